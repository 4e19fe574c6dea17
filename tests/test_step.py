"""The one training step and the optimizer seam."""


import pytest
import torch

import train
from benchmarks import tools
from configurator import Config, ConfigError
from model import GPT, GPTConfig
from sweeps import trial
from tests.helpers import TINY
from trainer import batches, checkpoint, distributed, log
from trainer.distributed import Ranks
from trainer.optimizer import OPTIMIZERS
from trainer.step import TrainingStep, to_host

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)
ONE_STEP = dict(batch_schedule="constant", max_tokens=256, warmup_tokens=0, lr_decay="none")  # of 16 sequences of 16 tokens


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(train.Run, "draw", lambda run: "")


def trained(out):
    return checkpoint.load(str(out))["model"]


@pytest.mark.parametrize("overrides", [dict(grad_clip=0.05), dict(gns="off"), dict(gns="exact", dtype="bfloat16"),
                                       dict(grad_stats=True, gns_crosscheck=True), dict(optimizer="muon")], ids=str)
def test_a_trials_step_and_train_pys_give_the_same_bits(tmp_path, tiny_args, tiny_data, overrides):
    assert train.main(tiny_args(out_dir=tmp_path, **ONE_STEP, **overrides)) == 0
    config = Config(**{**TINY, **ONE_STEP, **overrides, "dataset": tiny_data})
    data = batches.Dataset(tiny_data, 16)
    step = trial.build_step(config, data, "cpu", torch.bfloat16 if "dtype" in overrides else torch.float32)
    trial.timed_step(step, data, 4, 0, lambda: 0.0)
    expected = trained(tmp_path)
    assert all(torch.equal(p, expected[name]) for name, p in step.model.state_dict().items())


def test_every_benchmark_and_sweep_runs_that_step(monkeypatch, tiny_data):
    """Not a step of its own that drifts: a sentinel in the one step stops them all."""
    class Reached(Exception):
        pass

    def update(*_):
        raise Reached
    monkeypatch.setattr(TrainingStep, "update", update)
    config = Config(**{**TINY, "dataset": tiny_data})
    data = batches.Dataset(tiny_data, 16)
    for run in (tools.Step(dict(SHAPE, vocab_size=64), 2, "norm"),
                lambda: trial.timed_step(trial.build_step(config, data, "cpu", torch.float32), data, 1, 0, lambda: 0.0)):
        with pytest.raises(Reached):
            run()


def small_step(optimizer="adamw", **settings):
    torch.manual_seed(0)
    config = Config(optimizer=optimizer, micro_batch_size=4, gns_calibrate=False, **{**SHAPE, **settings})
    return TrainingStep(GPT(GPTConfig(vocab_size=64, **SHAPE)), config, Ranks(), "cpu", torch.float32)


def run_step(step, tiny_data, poisoned=False):
    x, y = batches.Dataset(tiny_data, 16).train_batch(0, 0, 4, "cpu")
    step.accumulate([(x, y)], 1, 0, x.numel())
    if poisoned:
        next(iter(step.parameters.values())).grad[0, 0] = float("nan")
    return step.update(0.01, 0.95, 0.1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_step_changes_neither_weights_nor_the_optimizer(tiny_data, optimizer):
    step = small_step(optimizer)
    run_step(step, tiny_data)
    before = [p.clone() for p in step.model.parameters()]
    states = [v.clone() for part in step.optimizer.parts for s in part.state.values() for v in s.values()]
    record = run_step(step, tiny_data, poisoned=True)
    assert record.numbers["bad"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters()))
    after = [v for part in step.optimizer.parts for s in part.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(states, after))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_divides_the_whole_gradient_by_its_excess(tiny_data, optimizer):
    """A clipped step is an unclipped step of the scaled gradient: by hand, with plain torch optimizers."""
    clip = 0.01
    ours, by_hand = small_step(optimizer, grad_clip=clip), small_step(optimizer, grad_clip=0)
    run_step(ours, tiny_data)
    x, y = batches.Dataset(tiny_data, 16).train_batch(0, 0, 4, "cpu")
    by_hand.model(x, y)[1].backward()
    total = torch.nn.utils.clip_grad_norm_(by_hand.model.parameters(), clip)
    assert total > 2 * clip
    by_hand.optimizer.set(0.01, 0.95, 0.1)
    for part in by_hand.optimizer.parts:
        part.step()
    for a, b in zip(ours.model.parameters(), by_hand.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest_each_once():
    step = small_step("muon")
    muon, adamw = ({id(p) for g in part.param_groups for p in g["params"]} for part in step.optimizer.parts)
    names = {id(p): n for n, p in step.parameters.items()}
    assert {names[i] for i in muon} == {n for n, p in step.parameters.items() if n.startswith("h.") and p.dim() == 2}
    assert not muon & adamw and len(muon | adamw) == len(step.parameters)
    decays = [g["weight_decay"] for part in step.optimizer.parts for g in part.param_groups]
    assert decays == [0.1, 0.1, 0.0]


def test_muon_has_no_metric_for_its_matrices_and_adams_for_the_norm_layers(tiny_data):
    step = small_step("muon")
    run_step(step, tiny_data)
    norms = {n: p for n, p in step.parameters.items() if "ln_" in n}
    assert step.optimizer.metric(norms).keys() == norms.keys()
    assert step.optimizer.metric(step.parameters) is None
    assert step.optimizer.moments(step.model.h[0].attn.c_attn.weight) is None


def test_muon_learns_measures_and_resumes_bit_for_bit(tmp_path, tiny_args):
    common = dict(optimizer="muon", grad_stats=True, gns_calibrate=True, beta2_scaling="tokens")
    assert train.main(tiny_args(out_dir=tmp_path / "whole", **common)) == 0
    assert train.main(tiny_args(out_dir=tmp_path / "two", **common, stop_tokens=1600)) == 0
    assert train.main(tiny_args(out_dir=tmp_path / "two", **common, resume=True)) == 0
    whole, two = (checkpoint.load(str(tmp_path / name)) for name in ("whole", "two"))
    assert all(torch.equal(v, two["model"][k]) for k, v in whole["model"].items())
    for a, b in zip(whole["optimizer"]["parts"], two["optimizer"]["parts"]):
        assert all(torch.equal(v, b["state"][i][k]) for i, s in a["state"].items() for k, v in s.items())
    rows = [r for r in log.read(tmp_path / "whole") if "train/loss" in r]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    assert rows[-1]["gns/norm_adam_tr_sigma"] > 0 and rows[-1]["adam/snr"] > 0


def test_muon_under_fsdp_is_refused_in_words():
    with pytest.raises(ConfigError, match="optimizer='muon' updates whole matrices.*parallel='ddp'"):
        distributed.check(Config(optimizer="muon", parallel="fsdp", batch_size=16, batch_size_start=16), 2, "cpu")


def test_several_steps_are_fetched_in_one_transfer_and_in_order(tiny_data, monkeypatch):
    step = small_step()
    records = [run_step(step, tiny_data) for _ in range(3)]
    transfers, real = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: transfers.append(1) or real(t))
    values = to_host(records)
    assert len(transfers) == 1
    for record, found in zip(records, values):
        assert found["loss"][0] == float(record.numbers["loss"])
        assert found["param_sq"] == pytest.approx(record.numbers["param_sq"].double().numpy())
