import dataclasses
import json
import os

import numpy as np
import pytest

import sweep
import train
from configurator import Config
from plots import style
from sweeps import quality
from trainer import log

ARGS = sweep.argparse.Namespace(config=None, rest=[])


def made_up(batch, micro, scale, steps=20):
    """The log of a run whose gradient is signal 1 and noise: E|A_k|^2 = 1 + scale / (k micro), exactly, in every step."""
    K = batch // micro
    rows = []
    for step in range(1, steps + 1):
        early = 100.0 if step <= steps // 2 else 1.0  # the first half must not count
        row = {"step": step, "tokens": step, "batch_size": batch, "accum": K, "train/loss": 1.0, "adam/snr": 0.3 * early,
               "grad/norm": early * (1 + scale / batch) ** 0.5, "grad/mean": 0.0, "grad/variance": 1e-3, "update/norm": 0.1,
               "update/ratio": 0.01, "grad/coherence": micro / (micro + scale) if K > 1 else None,
               "grad/coherence_total": None if K == 1 else 0.5, "gns/total": scale, "gns/total_low": scale,
               "gns/total_high": scale}
        for k in (1, 2, 4, 8):
            if k < K:
                row |= {f"grad/norm_after_{k}": (1 + scale / (k * micro)) ** 0.5, f"grad/mean_after_{k}": 0.0,
                        f"grad/variance_after_{k}": 1e-3}
        rows.append(row)
    return rows


@pytest.mark.parametrize("scale, meaningful, beyond", [(2.5, 8, 16), (9.0, 32, 64), (100.0, 64, None), (0.1, 4, 8)])
def test_the_gain_of_a_doubling_is_what_the_noise_scale_says_and_decides(scale, meaningful, beyond):
    logs = [made_up(4 * K, 4, scale) for K in (1, 2, 4, 8, 16)]
    rows = [quality.average(own, 4) for own in logs]
    for row in rows:
        assert row["averaged"] == 10 and row["adam/snr"] == pytest.approx(0.3)
        assert sorted(row["gains"]) == [8 * 2**i for i in range(int(np.log2(row["accum"])))]
        for B, own in row["gains"].items():
            assert own["gain"] == pytest.approx(scale / (B + scale)) and own["se"] == pytest.approx(0, abs=1e-9)
    pooled = quality.gains([quality.growth(quality.second_half(own)) for own in logs], 4)
    assert list(pooled) == [8, 16, 32, 64]
    assert all(own["gain"] == pytest.approx(scale / (B + scale)) for B, own in pooled.items())
    config = Config(micro_batch_size=4, batch_size=64, block_size=1, max_tokens=100 * meaningful)
    assert quality.result_of(rows, pooled, config, 50, 0.2, ARGS)["take"]["batch_size"] == meaningful, "half of a run"
    result = quality.result_of(rows, pooled, config, 24, 0.2, ARGS)
    assert result["take"] == {"micro_batch_size": 4, "batch_size_start": meaningful} and result["beyond"] == beyond
    assert "24.00% of its tokens" in result["says"][-1] and "a batch to start with" in result["says"][-1]
    config = dataclasses.replace(config, batch_schedule="constant", batch_size=8)
    start = quality.result_of(rows, pooled, config, 24, 0.2, ARGS)["take"]
    assert start == {"micro_batch_size": 4, "batch_schedule": "gns", "batch_size_start": min(meaningful, 8)}
    assert meaningful <= max(4, 4 * scale) and (beyond is None or beyond > 4 * scale)
    assert f"{meaningful} sequences" in result["says"][0]
    assert f"beyond a batch of {4 * scale:.3g}" in result["says"][1]


def test_gains_stand_beside_the_plain_noise_scale_and_adams_has_a_column_of_its_own(tmp_path, monkeypatch):
    logs = [made_up(4 * K, 4, 9.0) for K in (1, 2, 4)]
    for own in logs[1:]:
        for row in own:
            for end in ("", "_low", "_high"):
                row[f"gns/total_adam{end}"] = row[f"gns{end}"] = 3 * row[f"gns/total{end}"]
    rows = [quality.average(own, 4) for own in logs]
    head, *lines = quality.table(rows, {}).splitlines()
    assert head.endswith("noise scale: gns/total_adam") and "noise scale: gns/total " in head
    assert lines[0].split()[-4:] == ["9", "[9,", "9]", "undetermined"]
    assert lines[2].split()[-6:] == ["9", "[9,", "9]", "27", "[27,", "27]"]
    assert "gns/total_adam is the noise scale of the whole model in Adam's metric" in "\n".join(lines)
    pooled = quality.gains([quality.growth(quality.second_half(own)) for own in logs], 4)
    says = quality.verdict(rows, pooled, 8, 16, 0.2)
    assert "plain noise scale of the whole model (gns/total), 9 to 9 sequences" in says[1], "not 27: gains are plain"
    plt, kept = style.pyplot(), []
    monkeypatch.setattr(plt, "close", kept.append)
    quality.draw(rows, {"gains": pooled, "gain": 0.2}, str(tmp_path / "a.png"))
    curve = next(line for ax in kept[0].axes for line in ax.lines if line.get_label() == "by the plain noise scale")
    assert curve.get_ydata() == pytest.approx(9 / (curve.get_xdata() + 9)), "the curve that the gains lie on"
    assert [own["gain"] for own in pooled.values()] == pytest.approx([9 / (B + 9) for B in pooled])


def test_the_standard_error_of_a_gain_is_that_of_a_ratio_of_means():
    rng = np.random.default_rng(0)
    found, errors = [], []
    for _ in range(300):
        b = 1 + 0.1 * rng.standard_normal(50)
        a = 1.5 * b + 0.2 * rng.standard_normal(50)
        gain, se = quality.ratio(a, b)
        found.append(gain)
        errors.append(se)
    assert np.mean(found) == pytest.approx(0.5, abs=0.01) and np.mean(errors) == pytest.approx(np.std(found), rel=0.15)


def test_quality_runs_train_and_reports_and_is_not_run_twice(tmp_path, tiny_args, monkeypatch, capsys):
    calls, real = [], train.main
    monkeypatch.setattr(train, "main", lambda argv: calls.append(argv) or real(argv))
    monkeypatch.setattr(train.Run, "draw", lambda run: "")
    arguments = ["quality", "--steps=6", "--accumulations=1,2,4", "--in_process",
                 *tiny_args(out_dir=tmp_path, learning_rate=3e-3, dropout=0.1)]
    assert sweep.main([*arguments, "--dry_run"]) == 0
    assert not calls and "3 of 3 runs to do, 2.69k tokens: about" in capsys.readouterr().out
    assert sweep.main(arguments) == 0
    text = capsys.readouterr().out
    assert len(calls) == 3 and "Largest effective batch with meaningful updates" in text and "python sweep.py runs" in text
    folder = tmp_path / "sweep" / "quality"
    assert os.path.getsize(folder / "sweep.png") > 10_000
    saved = json.loads((folder / "sweep.json").read_text())
    assert [r["batch_size"] for r in saved["rows"]] == [4, 8, 16] and saved["settings"]["steps"] == 6
    steps = [r for r in log.read(str(folder / "batch16")) if "train/loss" in r]
    assert [r["lr"] for r in steps] == [3e-3] * 6 and all(r["gns/total_step_tr_sigma"] is not None for r in steps)
    late = steps[3:]
    largest = saved["rows"][-1]
    assert largest["grad/coherence"] == pytest.approx(np.mean([r["grad/coherence"] for r in late]))
    expected = sum(r["grad/norm_after_2"] ** 2 for r in late) / sum(r["grad/norm"] ** 2 for r in late) - 1
    assert largest["gains"]["16"]["gain"] == pytest.approx(expected)
    assert sweep.main(arguments) == 0 and len(calls) == 3
    with pytest.raises(SystemExit):
        sweep.main([*arguments, "--learning_rate=1e-3"])
    assert "holds a run with other settings: learning_rate is 0.001, there it is 0.003" in capsys.readouterr().err
