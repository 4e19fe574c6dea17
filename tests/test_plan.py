"""The planner's formulas against real models: parameters, optimizer state, tensors kept for the backward pass, FLOPs, steps."""

import contextlib
import dataclasses

import pytest
import torch

import configurator
import train
from configurator import Config
from model import GPT, GPTConfig
from trainer import log, plan, start

V = 100
SHAPES = [dict(), dict(bias=False), dict(norm="rmsnorm"), dict(norm="rmsnorm", bias=False, tie_weights=False),
          dict(n_layer=3, n_head=8, n_embd=96, block_size=40, tie_weights=False)]


def pair(**more):
    """A config and its model, which attends as on a GPU, for a plan is for GPUs."""
    shape = dict(n_layer=2, n_head=4, n_embd=64, block_size=32, micro_batch_size=3)
    config = Config(**{**shape, **more})
    names = {f.name for f in dataclasses.fields(GPTConfig)} & set(configurator.FIELDS)
    return config, GPT(GPTConfig(vocab_size=V, **{k: getattr(config, k) for k in names}))


def kept_bytes(model, config, dtype, mode=None):
    """Bytes of all distinct storages that autograd keeps besides parameters: [activations, parameters' copies in bf16]."""
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    shapes |= {s[::-1] for s in shapes}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in own:
            kept[s.data_ptr()] = (s, tuple(t.shape) in shapes and t.dtype == torch.bfloat16)  # holding it keeps its address
        return t
    ids = torch.randint(0, V, (2, config.micro_batch_size, config.block_size))
    probes = None if mode is None else torch.zeros(len(model.probe_sites(mode)), 2, config.micro_batch_size, requires_grad=True)
    cast = torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), cast:
        model(*ids, probes=probes)
    return [sum(s.nbytes() for s, copy in kept.values() if copy is which) for which in (False, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameters_and_flops_are_those_of_the_model(shape):
    config, model = pair(**shape)
    assert plan.parameters(config, V) == model.parameter_count()
    assert plan.unit_parameters(config, V)[0] == sum(p.numel() for p in model.h[0].parameters())
    assert plan.flops_per_token(config, V) == model.flops_per_token()


@pytest.mark.parametrize("name", ["gpt_70m", "gpt_111m", "gpt_161m", "gpt_1_3b"])
def test_parameters_of_the_named_configs(name):
    config = start.parse([f"config/{name}.py"])
    names = {f.name for f in dataclasses.fields(GPTConfig)} & set(configurator.FIELDS)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, **{k: getattr(config, k) for k in names}))
    assert plan.parameters(config, 50257) == model.parameter_count()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", [None, "norm", "exact"])
def test_activations_are_the_bytes_that_autograd_keeps(shape, dtype, mode):
    config, model = pair(**shape)
    half = 4 if dtype == torch.float32 else 2
    measured, copies = kept_bytes(model, config, dtype, mode)
    expected = sum(plan.activations(config, V, half, "none").values())
    assert expected == pytest.approx(measured, rel=0.005)
    assert plan.memory(config, V, 1, "ddp", half).get("weights in bf16") == pytest.approx(copies, rel=0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_are_not_kept_unless_steps_are_exact(dtype, monkeypatch):
    half = 4 if dtype == torch.float32 else 2
    config, model = pair(gns_calibrate=False)
    usual = plan.activations(config, V, half, "none")["head"], plan.working_memory(config, V, half, room=0)
    monkeypatch.setattr(plan.head_loss, "WORTH_BYTES", 0)
    expected = sum(plan.activations(config, V, half, "none").values())
    assert expected == pytest.approx(kept_bytes(model, config, dtype, "norm")[0], rel=0.005)
    assert plan.activations(pair(gns="exact")[0], V, half, "none")["head"] == usual[0]
    monkeypatch.setattr(plan.head_loss, "CHUNK_BYTES", half * V * 8)
    assert plan.working_memory(config, V, half, room=0) < usual[1] / 8
    assert plan.working_memory(config, V, half, room=32 * half * V * 16) == half * 16 * plan.head_loss.padded(V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpointed_blocks_keep_their_inputs_only(dtype):
    config, model = pair(activation_checkpointing="block", n_layer=4)
    half = 4 if dtype == torch.float32 else 2
    parts = plan.activations(config, V, half, "block")
    assert parts["blocks"] + parts["head"] == pytest.approx(kept_bytes(model, config, dtype)[0], rel=0.01)
    # one block on its own, as it is recomputed: what it keeps besides its input
    _, single = pair(n_layer=1)
    _, none = pair(n_layer=1)
    none.h = torch.nn.ModuleList()
    block = kept_bytes(single, config, dtype)[0] - kept_bytes(none, config, dtype)[0]
    assert parts["recomputed"] + 4 * 3 * 32 * 64 == pytest.approx(block, rel=0.005)


def test_cosine_attention_keeps_little_more_than_planned():
    config, model = pair(cos_attn=(1,), n_layer=8)
    planned = sum(plan.activations(config, V, 4, "none").values())
    assert planned == pytest.approx(kept_bytes(model, config, torch.float32)[0], rel=0.04)


def test_optimizer_and_gradient_bytes_are_those_of_adamw():
    config, model = pair()
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), fused=True)
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))[1].backward()
    optimizer.step()
    parts = plan.memory(config, V, 1, "ddp", 4)
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.dim() > 0)
    assert parts["optimizer"] == state
    assert parts["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())


def test_fsdp_divides_what_it_shards_and_counts_whole_gradients_while_accumulating():
    one = plan.memory(Config(batch_size=64, micro_batch_size=8), V, 1, "fsdp", 2)
    once = plan.memory(Config(batch_size=64, micro_batch_size=8), V, 8, "fsdp", 2)
    more = plan.memory(Config(batch_size=64, micro_batch_size=4), V, 8, "fsdp", 2)
    for part in ("weights", "gradients", "optimizer"):
        assert once[part] == pytest.approx(one[part] / 8, rel=1e-4)
    assert more["gradients"] - once["gradients"] == one["gradients"]


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_steps_are_those_of_a_real_run(tmp_path, tiny_args, schedule, monkeypatch):
    monkeypatch.setattr(train.Run, "draw", lambda run: "")
    args = tiny_args(out_dir=tmp_path / "run", batch_schedule=schedule, gns="off", max_tokens=2000)
    train.main(args)
    last = [r for r in log.read(tmp_path / "run") if "train/loss" in r][-1]
    assert plan.steps(start.parse(args), 1)[:2] == (last["step"], last["tokens"])


def test_a_plan_for_eight_devices_says_which_micro_batch_it_takes(capsys):
    assert train.main(["config/gpt_111m.py", "--plan", "--devices=8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("micro_batch_size=8 is taken as 1: batches of 16, 120 are then whole on 8 processes")
    assert "steps of 16 to 120 sequences" in text and "8 in one pass of 8 x 1, accumulation 2 to 15" in text


def test_the_plan_is_printed_without_data_or_a_device(capsys, tmp_path, monkeypatch):
    assert train.main(["config/gpt_1_3b.py", "--plan", "--devices=8", "--kind=a100"]) == 0
    text = capsys.readouterr().out
    for words in ("Parameters   1,3", "26,0", "steps", "FLOPs", "days on 8 x A100", "35%", "fsdp", "checkpointed", "assumed"):
        assert words in text, words
    for bad, words in ({"--kind=H1000": "expected one of", "--devices=x": "=x: expected a number", "--devices=0": "at least 1",
                        "--devices=6": "x 6 processes", "--device=tpu": "must be one of"}).items():
        with pytest.raises(SystemExit) as e:
            train.main(["config/gpt_1_3b.py", "--plan", bad])
        assert e.value.code == 2 and words in capsys.readouterr().err
