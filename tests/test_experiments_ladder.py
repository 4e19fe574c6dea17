"""experiments/ladder.py: its candidates against plain autograd, the measured run against the unmeasured one, going on."""

import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import ROOT, TINY

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import candidates  # noqa: E402
import ladder  # noqa: E402
import ladder_report  # noqa: E402

from configurator import Config  # noqa: E402
from sweeps import trial  # noqa: E402
from trainer import batches  # noqa: E402
from trainer.step import to_host  # noqa: E402


def trained(tiny_data, steps=6, dtype=torch.float32, **settings):
    """(TrainingStep after some steps of 8 examples, data)"""
    config = Config(**{**TINY, "dataset": tiny_data, "batch_schedule": "constant", "batch_size": 8, "gns": "exact", **settings})
    data = batches.Dataset(tiny_data, config.block_size)
    step = trial.build_step(config, data, "cpu", torch.float32)
    for n in range(steps):
        go(step, data, n)
    return step, data


def go(step, data, n):
    step.accumulate([data.train_batch(0, 8 * n + 4 * part, 4, "cpu") for part in (0, 1)], 2, 128 * n, 128 * (n + 1))
    record = step.update(1e-2, 0.95, 0.1)
    step.absorb(*to_host([record]), record)


@pytest.mark.parametrize("tied", [True, False])
def test_candidates_are_those_of_a_loop_over_examples_in_float64(tiny_data, tied):
    step, data = trained(tiny_data, tie_weights=tied)
    count, found = 12, candidates.measure(step, data, 48, 12, blocks=4)
    model = step.model.double()
    gradients = []
    for b in range(count):
        model.zero_grad()
        model(*data.train_batch(0, 48 + b, 1, "cpu"))[1].backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})

    def inside(name):
        return {"all": True, "norm": "ln_" in name, "body": name not in ("wte.weight", "wpe.weight", "lm_head.weight")}

    def weight(name, grain, e):
        p = dict(model.named_parameters())[name]
        state = next(s for q, s in step.optimizer.parts[0].state.items() if q is p)
        v = state["exp_avg_sq"].double() / (1 - 0.95 ** float(state["step"]))
        mean = {"coord": v, "tensor": v.mean(), "row": v.mean(1, keepdim=True) if v.dim() == 2 else v.mean()}[grain]
        return torch.where(mean > 0, (mean.sqrt() + (1e-8 if grain == "coord" else 0)) ** -e, 0.0) if e else torch.ones_like(v)
    assert set(found) == set(candidates.NAMES) and len(found) == 39
    for key, own in found.items():
        group, grain, e = key.split("/")
        small = big = momentum = 0.0
        for name in (n for n in gradients[0] if inside(n)[group]):
            p = weight(name, grain, float(e))
            each = torch.stack([g[name] for g in gradients])
            small += float((p * each**2).sum()) / count
            big += float((p * each.mean(0) ** 2).sum())
            state = next(s for q, s in step.optimizer.parts[0].state.items() if q is dict(model.named_parameters())[name])
            momentum += float((p * each.mean(0) * state["exp_avg"].double()).sum()) / (1 - 0.9 ** float(state["step"]))
        sq = (count * big - small) / (count - 1)
        tr = (small - big) / (1 - 1 / count)
        assert own["sq_norm"] == pytest.approx(sq, rel=1e-3) and own["tr_sigma"] == pytest.approx(tr, rel=1e-3), key
        assert own["momentum"] == pytest.approx(momentum, rel=1e-3, abs=1e-4 * sq), key


def test_candidates_are_what_train_py_measures_in_exact_mode(tiny_data):
    step, data = trained(tiny_data, n_embd=32)
    found = candidates.measure(step, data, 48, 8)  # the next step's own examples
    go(step, data, 6)
    row = step.row()
    for key, group in (("all/coord/0", "total"), ("body/coord/0", "body"), ("body/coord/1", "total_adam"),
                       ("norm/coord/0", "norm"), ("norm/coord/1", "norm_adam")):
        for part in ("sq_norm", "tr_sigma"):
            assert found[key][part] == pytest.approx(row[f"gns/{group}_step_{part}"], rel=1e-3), key


def test_the_error_is_that_of_repeated_estimates():
    random, dim, sizes = np.random.default_rng(0), 400, np.full(8, 16)

    def one():
        g = random.normal(0.05, 1.0, (128, dim))
        without = [np.delete(g, np.s_[16 * k:16 * k + 16], 0).mean(0) for k in range(8)]
        big = np.array([(m**2).sum() for m in (g.mean(0), *without)])
        return candidates.estimate((g**2).sum(1).reshape(8, 16).sum(1), big, np.ones(1), np.ones(1), 128, sizes)
    found = [one() for _ in range(200)]
    N = np.array([own["tr_sigma"] / own["sq_norm"] for own in found])
    assert np.median(N) == pytest.approx(1 / 0.05**2, rel=0.05)
    assert np.median([own["error"] for own in found]) == pytest.approx(N.std() / N.mean(), rel=0.3)


def test_measuring_changes_no_bit_of_the_run(tiny_data):
    config = Config(**{**TINY, "dataset": tiny_data, "batch_schedule": "constant", "gns": "off"})
    data, seen = batches.Dataset(tiny_data, config.block_size), []

    def look(step, examples, tokens, shrink):
        seen.append((examples, tokens))
        candidates.measure(step, data, examples, 8)
    plain, result = ladder.train(config, data)
    measured, same = ladder.train(config, data, [300, 900, 2000], look)
    assert seen == [(32, 512), (64, 1024), (128, 2048)] and result == same
    for one, other in ((plain.model, measured.model), (plain.optimizer, measured.optimizer)):
        one, other = ({k: v for k, v in enumerate(flat(own.state_dict()))} for own in (one, other))
        assert one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


def flat(value):
    if torch.is_tensor(value):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in flat(part)]


def test_the_ladder_runs_reports_and_goes_on_where_it_was(tiny, tmp_path, monkeypatch, capsys):
    made, real = [], ladder.train

    def train(config, *how):
        made.append((config.batch_size, config.max_tokens, config.learning_rate, config.seed))
        return real(config, *how)
    monkeypatch.setattr(ladder, "train", train)
    result = tiny(ladder, "--seeds", "1")
    assert set(result["table"]) <= set(ladder_report.ALL) and {row["length"] for row in result["rungs"]} == {"short", "long"}
    assert all(set(row["means"]) == set(ladder_report.ALL) for row in result["rungs"])
    path, first = tmp_path / "ladder_runs.json", len(made)
    kept = json.loads(path.read_text())
    assert len(kept["runs"]) == first and sum("seen" in run for run in kept["runs"].values()) == 3
    tiny(ladder, "--seeds", "1")
    assert len(made) == first, "nothing is run again"
    gone = [key for key in kept["runs"] if key.endswith("seed1")][-2:]
    path.write_text(json.dumps({**kept, "runs": {key: run for key, run in kept["runs"].items() if key not in gone}}))
    partial = tiny(ladder, "--seeds", "1", "--report")
    assert len(made) == first and len(partial["rungs"]) == 1, "a report starts nothing, and leaves out what is not complete"
    tiny(ladder, "--seeds", "1")
    assert len(made) == first + 2 and json.loads(path.read_text())["runs"].keys() == kept["runs"].keys()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="other settings"):
        ladder.main(["--tiny", "--seeds", "1", "--out", str(tmp_path), "--results", str(tmp_path), "--n_embd=32"])


def test_the_tokens_to_a_loss_are_found_by_going_on_until_it_lies_between_two_runs():
    def run(tokens):  # 3 - 0.3 ln(tokens)
        made.append(tokens)
        return {"steps": tokens, "loss": 3 - 0.3 * math.log(tokens)}
    for true in (90.0, 101.0, 170.0, 60.0):
        made = []
        ends = ladder.around(run, 100.0, 3 - 0.3 * math.log(true))
        assert ladder.reached(ends, 3 - 0.3 * math.log(true)) == pytest.approx(true) and len(made) <= ladder.TRIES
    made = []
    assert ladder.reached(ladder.around(run, 100.0, -9.0), -9.0) is None, "not beyond what was run"
    assert ladder.reached([(10, 2.0), (20, 2.0)], 2.0) is None


def test_moments_are_merged_by_one_over_the_noise_scale():
    """One step with a gradient a thousand times as large is one of many."""
    def moment(tokens, sq, tr):
        return tokens, 1.0, {"body/coord/1": dict(sq_norm=sq, tr_sigma=tr), "body/row/1": dict(sq_norm=sq, tr_sigma=tr)}
    seen = [moment(10 * n, 1.0, 5.0) for n in range(ladder.KEPT * 2)]
    seen[4] = moment(40, 1e6, 1e8)
    found = ladder.merged(seen)
    assert found["body/row/1"] == {"inverse": [0.2, 0.2, pytest.approx(0.105), *[0.2] * (ladder.KEPT - 3)]}
    assert found["body/coord/1"]["tr_sigma"][:3] == [5.0, 5.0, 5e7] and found["tokens"][:2] == [5, 25]


def test_a_ladder_of_the_theory_is_found_again():
    """Runs that need S (1 + C / B) steps, and a noise scale of C in every candidate but one, which has ten times as much."""
    C, block = 40.0, 8
    seen = {"tokens": [1000, 5000], "shrink": [1.0, 1.0]}
    for name in ladder_report.NAMES:
        N = 10 * C if name == ladder_report.BEFORE else C
        seen[name] = dict(inverse=[1 / N, 1 / N], sq_norm=[1.0, 1.0], tr_sigma=[N, N], momentum=[0.5, 0.5])
    steps = {b: 1000 * (1 + C / b) for b in ladder.BATCHES}
    measured = {"tokens": 8000, "loss": 2.0, "steps": steps[16], "seen": seen}
    one = ladder.Complete(block, 16, measured, measured, steps)
    rung = ladder.Rung("python", 256)
    numbers = ladder_report.collect({(rung, length): [one, None] for length in ladder.LENGTHS})
    assert [row["critical"] for row in numbers["rungs"]] == pytest.approx([C, C], rel=1e-3)
    after, before = (numbers["table"][name] for name in (ladder_report.AFTER, ladder_report.BEFORE))
    assert after["critical_over_mean"] == pytest.approx(1) and after["errors"]["x4"]["worst_error"] < 1e-3
    assert before["critical_over_mean"] == pytest.approx(0.1) and before["best_factor"] == pytest.approx(0.1, rel=0.05)
    assert before["errors"]["x2"]["median_error"] > 0.15 > before["errors_with_best_factor"]["x2"]["worst_error"]
    assert numbers["table"][ladder_report.LAGGING]["critical_over_mean"] == pytest.approx(1)
    assert [row["lasting_share"] for row in numbers["rungs"]] == [[0.5], [0.5]]
    assert "2 lengths" in ladder_report.finding(numbers)


def test_an_average_lags_behind_what_rises():
    N = np.linspace(10, 100, 100)
    sq, tr = ladder_report.averaged(1 / N, np.ones(100), 1e4)
    assert (tr / sq)[1:] == pytest.approx(N[1:], rel=0.5) and (tr / sq < N)[1:].all() and (tr / sq)[-1] < 0.9 * N[-1]


def test_smaller_vocabularies_are_the_first_merges_of_the_same_text(tmp_path):
    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"in"]
    import base64
    path = tmp_path / "merges"
    path.write_text("".join(f"{base64.b64encode(word).decode()} {n}\n" for n, word in enumerate(ranks)))
    pytest.importorskip("tiktoken")
    few, more = ladder.FirstMerges(str(path), 258), ladder.FirstMerges(str(path), 261)
    assert few.encode("the thin").tolist() == [256, ord("e"), ord(" "), 256, ord("i"), ord("n")]
    assert more.encode("in the").tolist() == [259, 258] and (few.separator, more.separator) == (257, 260)
    (tmp_path / "a.txt").write_bytes(b"in the thin\n" * 90_000)
    texts = ladder.english(tmp_path)
    assert b"".join(texts.values()) == b"in the thin\n" * 90_000 and len(texts) == 36
    args = SimpleNamespace(out=str(tmp_path), english=tmp_path, bpe=str(path))
    folder = ladder.dataset(ladder.Rung("english", 261), args)
    assert batches.Dataset(folder, 16).vocab_size == 261 and ladder.dataset(ladder.Rung("english", 261), args) == folder
