"""watch in Hugging Face's Trainer, Lightning, accelerate and on two ranks, against the float64 loop."""

import json
import os
import subprocess
import sys

import pytest
import torch

from rightbatch import watch
from tests.helpers import ROOT
from tests.watching import TINY, documents, hf, ids, loop, needs, pair_of, plain, trainer_of, truth_of_ragged


@needs("transformers", "accelerate")
def test_huggingface_trainer_agrees_with_accumulation_ragged_lengths_and_clipping(tmp_path):
    import transformers

    from rightbatch import WatchCallback
    model, rows, seen = hf("LlamaForCausalLM", "LlamaConfig", **TINY), documents(8), []

    class Logger(transformers.TrainerCallback):  # where wandb's stands
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))
    callback = WatchCallback()
    trainer = trainer_of(tmp_path, model, rows, callback)
    trainer.callback_handler.callbacks.insert(1, Logger())
    lasts = []
    step = callback.on_pre_optimizer_step
    callback.on_pre_optimizer_step = lambda *a, **k: lasts.append((step(*a, **k), callback.w.fetch(), callback.w.last)[2])
    trainer.train()
    for last, part in zip(lasts, (rows[:4], rows[4:])):
        q, big, shares = truth_of_ragged(model, part)
        h = float(shares.square().sum())
        assert last.examples == 4 and last.effective == pytest.approx(1 / h, rel=1e-5)
        assert last.small / last.big == pytest.approx(q / h / big, rel=1e-4)
    for line in (seen[1], trainer.state.log_history[1]):
        assert line["gns/norm_tr_sigma"] > 0 and "loss" in line
    assert not any(m._forward_hooks for m in model.modules())


@needs("transformers", "accelerate")
def test_huggingface_trainer_carries_on_from_a_checkpoint(tmp_path):
    from rightbatch import WatchCallback
    model, rows = hf("LlamaForCausalLM", "LlamaConfig", **TINY), documents(16)
    first = WatchCallback()
    trainer_of(tmp_path, model, rows, first, save_strategy="steps", save_steps=2).train()
    second = WatchCallback()
    trainer = trainer_of(tmp_path, model, rows, second, max_steps=4, restore_callback_states_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=True)
    callback = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "WatchCallback")
    assert callback.w.meter.scales["norm"].averages.updates == 4


@needs("pytorch_lightning")
def test_lightning_agrees_with_accumulation_and_logs_the_keys(tmp_path):
    import pytorch_lightning as pl

    from rightbatch import WatchCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = plain()

        def training_step(self, batch, index):
            return self.net(batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    module, data = Module(), ids(batch=16)
    q, big = pair_of(loop(module.net, {"idx": data[:4]}), ["first.weight", "first.bias", "second.weight"])
    callback, lasts = WatchCallback(), []
    step = callback.on_before_optimizer_step
    callback.on_before_optimizer_step = lambda *a: (step(*a), callback.w.fetch(), lasts.append(callback.w.last))
    trainer = pl.Trainer(max_steps=4, accumulate_grad_batches=2, gradient_clip_val=1e-3, callbacks=[callback], logger=False,
                         log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
                         enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2, shuffle=False))
    assert len(lasts) == 4 and lasts[0].examples == 4 and callback.w.last.mean_length == 12
    assert lasts[0].small / lasts[0].big == pytest.approx(4 * q / big, rel=1e-4)
    assert trainer.callback_metrics["gns/norm_tr_sigma"] > 0 and "gns/norm_adam_tr_sigma" in trainer.callback_metrics


@needs("pytorch_lightning")
@pytest.mark.parametrize("one_backward", [True, False])
def test_lightning_with_two_optimizers_closes_a_step_for_each_backward_pass(tmp_path, one_backward):
    import pytorch_lightning as pl

    from rightbatch import WatchCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.automatic_optimization = plain(0), plain(1), False

        def training_step(self, batch, index):
            pairs = list(zip((self.a, self.b), self.optimizers()))
            if one_backward:
                self.manual_backward(self.a(batch) + self.b(batch))
            for net, optimizer in pairs:
                if not one_backward:
                    self.manual_backward(net(batch))
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.a.parameters(), lr=0.0), torch.optim.AdamW(self.b.parameters(), lr=0.0)

    module, data, callback = Module(), ids(batch=12), WatchCallback()
    names = ["first.weight", "first.bias", "second.weight"]
    pairs = [pair_of(loop(net, {"idx": data[8:]}), names) for net in (module.a, module.b)]
    pl.Trainer(max_epochs=1, callbacks=[callback], logger=False, log_every_n_steps=1, enable_checkpointing=False,
               enable_progress_bar=False, accelerator="cpu", enable_model_summary=False, default_root_dir=tmp_path
               ).fit(module, torch.utils.data.DataLoader(data, batch_size=4, shuffle=False))
    q, big = [sum(v) for v in zip(*pairs)] if one_backward else pairs[1]
    assert callback.w.steps == (3 if one_backward else 6) and len(callback.w._ending.optimizers) == 2
    assert (callback.w.last.small, callback.w.last.big) == (pytest.approx(4 * q, rel=1e-4), pytest.approx(big, rel=1e-4))


@needs("accelerate")
@pytest.mark.parametrize("before", [True, False])
def test_accelerate_closes_a_step_when_it_steps(before):
    import accelerate
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, idx = plain(), ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    w = watch(model, optimizer) if before else None
    model, optimizer = accelerator.prepare(model, optimizer)
    w = w or watch(model, optimizer)
    q, big = pair_of(loop(model, {"idx": idx}), ["first.weight", "first.bias", "second.weight"])
    for part in idx.split(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(part))
            optimizer.step()
            optimizer.zero_grad()
    assert w.meter.scales["norm"].averages.updates == 1
    assert w.last.small / w.last.big == pytest.approx(4 * q / big, rel=1e-5)


def test_neither_framework_is_imported_by_watching():
    code = ("import sys, torch, rightbatch; rightbatch.watch(torch.nn.LayerNorm(4)); "
            "print([m for m in ('transformers', 'lightning', 'pytorch_lightning', 'accelerate', 'peft') if m in sys.modules])\n"
            "try: rightbatch.WatchCallback()\nexcept ImportError as e: print(e)")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.startswith("[]\nWatchCallback is for Hugging Face's Trainer or Lightning")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """tests/watch_ranks.py on two processes: {case: numbers}."""
    folder = tmp_path_factory.mktemp("ranks")
    code = os.path.join(ROOT, "tests", "watch_ranks.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": ROOT,
           "STORE": str(folder / "store")}
    both = [subprocess.Popen([sys.executable, code, str(folder)], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out[-3000:]
    return json.loads((folder / "numbers.json").read_text())


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_two_ranks_agree_with_the_loop_over_all_examples(ranks, case):
    q, big = ranks["truth"]
    assert ranks[case]["examples"] == 8
    assert ranks[case]["small"] == pytest.approx(8 * q, rel=1e-4) and ranks[case]["big"] == pytest.approx(big, rel=1e-4)


def test_what_ddp_waits_for_is_fixed_cost_and_the_slowest_ranks_clock_counts(ranks):
    """8 examples on two ranks: 1 s of forward and backward on one, 2 s on the other, 5 s of communication."""
    own, slowest = ranks["times"]["own"], ranks["times"]["slowest"]
    assert (own["per_sequence"][0], own["fixed"][0]) == (pytest.approx(1 / 8), pytest.approx(5))
    assert (slowest["per_sequence"][0], slowest["fixed"][0]) == (pytest.approx(2 / 8), pytest.approx(5))


def test_compiled_before_watch_is_said_on_several_ranks(ranks):
    assert "was the model compiled before" in ranks["compiled"]


def test_a_layer_that_one_rank_does_not_use_stops_no_other(ranks):
    assert ranks["exact"]["examples"] == 8 and 0 < ranks["exact"]["coverage"] <= 100


def test_adams_metric_is_the_same_on_shards(ranks):
    assert ranks["fsdp"]["adam"] == pytest.approx(ranks["ddp"]["adam"], rel=1e-3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("mode, steps", [("norm", 3), ("exact", 6)])
def test_rows_on_two_ranks_are_those_of_one_process(ranks, kind, mode, steps):
    ours, one = ranks[f"{mode}_{kind}"], ranks[f"{mode}_one"]
    assert ours["left_out"] == one["left_out"] == {}
    assert len(one["body"]) == 2 + 4 * (steps - 1), "as many steps sample, the first without Adam's metric"
    assert ours["body"] == pytest.approx(one["body"], rel=1e-5)


@needs("transformers", "accelerate")
def test_huggingface_trainer_agrees_on_two_ranks_with_ragged_lengths(ranks):
    q, big, h = ranks["hf_truth"]
    assert ranks["hf"]["examples"] == 8 and ranks["hf"]["effective"] == pytest.approx(1 / h, rel=1e-5)
    assert ranks["hf"]["small"] / ranks["hf"]["big"] == pytest.approx(q / h / big, rel=1e-4)


# -- the same model, data and order in train.py


def as_huggingface(state, n_positions):
    """train.py's weights in transformers' GPT-2: linears turned, one more position for the token that is only predicted."""
    import transformers
    V, C = state["wte.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("h."))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=V, n_positions=n_positions + 1, n_embd=C, n_layer=layers, n_head=2, activation_function="gelu",
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2))
    state = {name: torch.cat([v, v[:1]]) if name == "wpe.weight" else
             v.t() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else v for name, v in state.items()}
    model.transformer.load_state_dict({name: v for name, v in state.items() if name != "lm_head.weight"})
    return model


@needs("transformers", "accelerate")
def test_gpt2_in_trainer_has_the_noise_scale_that_train_py_logs(tmp_path, tiny_args, tiny_data):
    import train
    from rightbatch import WatchCallback
    from trainer import checkpoint, log
    from trainer.batches import Dataset
    args = tiny_args(out_dir=tmp_path / "run", micro_batch_size=32, batch_size=64, batch_size_start=64, learning_rate=1e-12,
                     min_lr=1e-12, max_tokens=16 * 64 * 8, warmup_tokens=0, gns_half_life_tokens=1600, seed=3)
    assert train.main(args) == 0
    model = as_huggingface(checkpoint.load(str(tmp_path / "run"))["model"], 16)
    inputs, targets = Dataset(tiny_data, 16).train_batch(3, 0, 64 * 8, "cpu")
    rows = [{"input_ids": [*i.tolist(), int(t[-1])]} for i, t in zip(inputs, targets)]
    callback = WatchCallback(half_life_tokens=1600 * 17 / 16)
    trainer = trainer_of(tmp_path / "hf", model, rows, callback, max_steps=8, max_grad_norm=1.0, per_device_train_batch_size=32,
                         adam_beta2=0.95)
    trainer.train()
    ours = [row for row in log.read(tmp_path / "run") if "train/loss" in row]
    theirs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(ours) == len(theirs) == 8
    compared = set()
    for a, b in zip(ours, theirs):
        assert a["train/loss"] == pytest.approx(b["loss"], rel=1e-4)
        for key in [k for k in b if k.startswith("gns/norm")]:
            assert a[key] == pytest.approx(b[key], rel=2e-3), key
            compared.add(key)
    assert {"gns/norm", "gns/norm_low", "gns/norm_high", "gns/norm_tr_sigma", "gns/norm_adam_tr_sigma"} <= compared
