import json
import os

import numpy as np
import pytest

import plot
from plots import compare, layers, report, style
from tests.helpers import exact_rows
from trainer import log, reader


def write_run(folder, n=20, **extra):
    os.makedirs(folder)
    with open(os.path.join(folder, log.NAME), "w") as f:
        for i in range(n):
            row = {"step": i, "tokens": 100 * i, "train/loss": 5 - i / 10, "lr": 1e-3, "batch_size": 8 + i, "tok_per_sec": 1e4,
                   "gns/norm": None if i < 3 else 10.0 + i, "gns/norm_low": None if i < 3 else 8.0 + i,
                   "gns/norm_high": None if i < 3 else 14.0 + i, "gns/norm_sq_norm": 1e-3, "gns/norm_tr_sigma": 1e-2, **extra}
            f.write(json.dumps(row) + "\n")
        f.write(json.dumps({"step": n, "tokens": 100 * n, "val/loss": 3.0}) + "\n")
    return str(folder)


def drawn(monkeypatch):
    """Keep the figure that report() draws, to look inside."""
    plt, kept = style.pyplot(), []
    monkeypatch.setattr(plt, "close", kept.append)
    return kept


def test_the_report_shows_the_log(tmp_path, monkeypatch):
    kept = drawn(monkeypatch)
    path = report.draw(write_run(tmp_path / "a"))
    assert path == str(tmp_path / "a" / "report.png") and os.path.getsize(path) > 20_000
    titles = {ax.get_title(loc="left"): ax for ax in kept[0].axes}
    loss = next(a for t, a in titles.items() if t.startswith("Loss"))
    assert list(loss.lines[0].get_ydata()) == [5 - i / 10 for i in range(20)] and list(loss.lines[1].get_ydata()) == [3.0]
    noise = next(a for t, a in titles.items() if "batch" in t)
    lines = {line.get_label(): line.get_ydata() for line in noise.lines}
    assert list(lines["batch size"]) == [8 + i for i in range(20)]
    value = list(lines["noise scale, the norm layers"])
    assert value[3:] == [10.0 + i for i in range(3, 20)] and value[0] != value[0], "undetermined is a gap"


def test_several_runs_are_drawn_over_each_other_and_named(tmp_path, monkeypatch):
    kept = drawn(monkeypatch)
    out = str(tmp_path / "both.png")
    assert plot.main([write_run(tmp_path / "a"), write_run(tmp_path / "b"), "--out", out]) == 0
    assert os.path.exists(out)
    labels = kept[0].axes[0].get_legend_handles_labels()[1]
    assert labels == ["a, validation", "b, validation"]


def test_a_run_without_noise_scale_or_with_an_undetermined_one_draws_too(tmp_path):
    undetermined = {k: None for k in ("gns/norm", "gns/norm_low", "gns/norm_high", "gns/norm_sq_norm", "gns/norm_tr_sigma")}
    assert os.path.exists(report.draw(write_run(tmp_path / "a", **undetermined)))
    rows = [{"step": 1, "tokens": 1, "train/loss": 1.0, "lr": 1.0, "batch_size": 1, "tok_per_sec": 1.0}]
    os.makedirs(tmp_path / "b")
    (tmp_path / "b" / log.NAME).write_text(json.dumps(rows[0]) + "\n")
    assert os.path.exists(report.draw(str(tmp_path / "b")))


@pytest.mark.parametrize("content, words", [(None, "no readable log.jsonl"), ("", "no logged step yet")])
def test_a_folder_without_a_run_is_one_clear_line(tmp_path, capsys, content, words):
    if content is not None:
        (tmp_path / log.NAME).write_text(content)
    with pytest.raises(SystemExit) as e:
        plot.main([str(tmp_path)])
    assert e.value.code == 2 and words in capsys.readouterr().err


# -- compare

def write_curve(folder, speed, batch, seconds_per_step=0.5, tokens=4000):
    """Loss 6 - speed * tokens / 1000, evaluated every 400 tokens; `batch` tokens a step."""
    os.makedirs(folder)
    with open(os.path.join(folder, log.NAME), "w") as f:
        for t in range(0, tokens + 1, 40):
            loss = 6 - speed * t / 1000
            if t:
                f.write(json.dumps({"step": t // batch, "tokens": t, "train/loss": loss, "lr": 1e-3, "batch_size": batch,
                                    "tok_per_sec": 1e4, "seconds": seconds_per_step * t / batch}) + "\n")
            if t % 400 == 0:
                f.write(json.dumps({"step": t // batch, "tokens": t, "val/loss": loss}) + "\n")
    return str(folder)


def groups(tmp_path):
    """fixed gets to 4.0 and 3.8; fast takes 20% fewer tokens in 60% fewer steps; small takes fewer tokens in more steps."""
    return {"fixed": [write_curve(tmp_path / "a", 0.5, 10), write_curve(tmp_path / "b", 0.55, 10)],
            "fast": [write_curve(tmp_path / "c", 0.656, 20), write_curve(tmp_path / "d", 0.656, 20)],
            "small": [write_curve(tmp_path / "e", 0.6, 5), write_curve(tmp_path / "f", 0.7, 5)],
            "greedy": [write_curve(tmp_path / "g", 0.5, 40)], "never": [write_curve(tmp_path / "h", 0.1, 10)]}


def test_compare_finds_known_tokens_steps_and_seconds(tmp_path):
    loaded = {name: [reader.load(d) for d in dirs] for name, dirs in groups(tmp_path).items()}
    result = compare.comparison(loaded)
    assert result["loss"] == "val" and result["target"] == pytest.approx(4.0), "the loss that both fixed runs reached"
    fixed, fast = (result["groups"][name]["at_target"] for name in ("fixed", "fast"))
    mean = (4000 + 2000 / 0.55) / 2
    assert fixed["tokens"]["mean"] == pytest.approx(mean) and fixed["tokens"]["low"] == pytest.approx(2000 / 0.55)
    assert fixed["steps"]["high"] == pytest.approx(400) and fixed["seconds"]["high"] == pytest.approx(200)
    assert fast["tokens"]["mean"] == pytest.approx(2000 / 0.656) and fast["tokens"]["std"] == pytest.approx(0, abs=1e-6)
    assert fast["less"]["tokens"]["mean"] == pytest.approx(1 - 2000 / 0.656 / mean)
    assert fast["less"]["steps"]["mean"] == pytest.approx(1 - 2000 / 0.656 / 20 / (mean / 10))
    assert result["groups"]["fast"]["final_val_loss"]["mean"] == pytest.approx(6 - 0.656 * 4)
    for row in result["groups"]["fast"]["levels"]:
        if 4.0 <= row["loss"] < 5.9:
            assert row["tokens"]["mean"] == pytest.approx((6 - row["loss"]) / 0.656 * 1000)
    never = result["groups"]["never"]["at_target"]
    assert never["reached"] == 0 and never["tokens"] is None and never["less"]["tokens"] is None


def test_reaching_a_loss_is_interpolated_and_the_first_time_counts():
    run = {"tokens": np.array([0.0, 100, 200, 300]), "steps": np.array([0.0, 10, 15, 20]),
           "seconds": np.array([0.0, 1, 2, 3]), "loss": np.array([5.0, 4.0, 4.5, 3.5])}
    assert reader.reach(run, 4.5) == {"tokens": 50.0, "steps": 5.0, "seconds": 0.5}
    assert reader.reach(run, 4.0)["tokens"] == 100.0 and reader.reach(run, 3.75)["tokens"] == 275.0
    assert reader.reach(run, 6.0)["tokens"] == 0.0 and reader.reach(run, 3.0) is None


def test_smoothing_keeps_a_constant_and_follows_tokens_not_rows():
    tokens = np.array([10.0, 20, 60])
    assert reader.smoothed_loss(tokens, np.full(3, 2.5), 10.0) == pytest.approx([2.5] * 3)
    a = reader.smoothed_loss(np.arange(1, 101.0), np.arange(100.0) // 50, 10.0)
    assert a[-1] == pytest.approx(1 - 2.0**-5, rel=0.01), "five half-lives after the jump"


def test_more_tokens_for_fewer_steps_is_never_called_a_saving(tmp_path, capsys):
    words = [f"{name}={','.join(dirs)}" for name, dirs in groups(tmp_path).items()]
    assert plot.main(["--compare", *words, "--out", str(tmp_path / "cmp.png")]) == 0
    lines = {line.split(":")[0].strip(): line for line in capsys.readouterr().out.split("Against fixed:")[1].splitlines()}
    assert "20% fewer tokens and 60% fewer steps: a saving" in lines["fast"]
    assert "fewer tokens" in lines["small"] and "more steps" in lines["small"] and lines["small"].count("a trade") == 1
    assert "more tokens" in lines["greedy"] and "no saving" in lines["greedy"]
    assert "0 of 1 runs got there" in lines["never"]
    assert os.path.getsize(tmp_path / "cmp.png") > 20_000
    assert json.load(open(tmp_path / "cmp.json"))["groups"]["fast"]["runs"] == 2


def test_runs_without_evaluations_are_compared_by_their_smoothed_training_loss(tmp_path):
    runs = {name: [[r for r in reader.load(d) if "val/loss" not in r] for d in dirs[:1]]
            for name, dirs in groups(tmp_path).items() if name in ("fixed", "fast")}
    result = compare.comparison(runs)
    assert result["loss"] == "train" and result["groups"]["fixed"]["final_val_loss"] is None
    assert result["groups"]["fast"]["at_target"]["less"]["tokens"]["mean"] == pytest.approx(1 - 0.5 / 0.656, abs=0.01)
    assert "smoothed training loss" in compare.table(result)


@pytest.mark.parametrize("words, message", [
    (["fixed"], "'fixed' is not name=out_dir"), (["a=x", "a=y"], "comes twice"), (["a=x"], "at least two"),
    (["a=", "b=y"], "'a=' is not"), (["a=x", "b=y"], "x: no readable log.jsonl")])
def test_wrong_groups_are_one_clear_line(words, message, capsys):
    with pytest.raises(SystemExit) as e:
        plot.main(["--compare", *words])
    assert e.value.code == 2 and message in capsys.readouterr().err


def with_config(folder, data=None, **config):
    data = {"tokenizer": "bytes", "vocab_size": 256, "train_sha256": 64 * "a", "val_sha256": 64 * "b", **(data or {})}
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"data": data, "config": {"n_layer": 2, "eval_iters": 8, "block_size": 16, **config}}, f)


@pytest.mark.parametrize("data, words", [
    ({"tokenizer": "gpt2", "vocab_size": 50257}, "b has gpt2 (50257 tokens): not the same tokenizer"),
    ({"val_sha256": 64 * "c"}, "b has cccccccccccc: not the same validation set")])
def test_runs_whose_losses_mean_other_things_are_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys, data, words):
    monkeypatch.chdir(tmp_path)
    for name, own in (("a", {}), ("b", data)):
        with_config(write_curve(tmp_path / name, 0.5, 10), own)
    with pytest.raises(SystemExit) as e:
        plot.main(["--compare", "one=a", "two=b"])
    assert e.value.code == 2 and words in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a", "b"] and sorted(os.listdir(tmp_path / "a")) == ["config.json", log.NAME]
    assert plot.main(["a", "b"]) == 0, "a picture says nothing about who is better"
    assert words in capsys.readouterr().out and sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("data, config, words", [
    ({"train_sha256": 64 * "c"}, {}, ["training data"]), ({}, {"n_layer": 3}, ["model: a has n_layer=2, b has n_layer=3"]),
    ({}, {"eval_iters": 9, "block_size": 32}, ["validation windows: a has eval_iters=8, block_size=16"]),
    ({}, {"learning_rate": 1e-3, "batch_size": 4, "seed": 7, "out_dir": "x"}, [])])
def test_runs_that_differ_in_more_than_their_training_get_a_warning(tmp_path, monkeypatch, capsys, data, config, words):
    monkeypatch.chdir(tmp_path)
    with_config(write_curve(tmp_path / "a", 0.5, 10))
    with_config(write_curve(tmp_path / "b", 0.5, 10), data, **config)
    assert plot.main(["--compare", "one=a", "two=b"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("careful:")]
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said))
    assert sorted(os.listdir(tmp_path)) == ["a", "b"], "nothing in the current folder"
    assert {"compare.png", "compare.json"} <= set(os.listdir(tmp_path / "a"))


def test_a_run_that_cannot_be_checked_is_named(tmp_path, capsys):
    with_config(write_curve(tmp_path / "a", 0.5, 10))
    b = write_curve(tmp_path / "b", 0.5, 10)
    assert plot.main(["--compare", f"one={tmp_path / 'a'}", f"two={b}"]) == 0
    assert f"careful: no config.json in {b}:" in capsys.readouterr().out


def dots(ax):
    return [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]


def test_single_points_are_drawn(tmp_path, monkeypatch):
    kept = drawn(monkeypatch)
    folders = []
    for name in "ab":
        os.makedirs(tmp_path / name)
        rows = [{"step": 1, "tokens": 10, "train/loss": 3.0, "lr": 1.0, "batch_size": 1, "tok_per_sec": 1.0, "seconds": 1.0,
                 "gns/norm": 4.0, "gns": 4.0, "gns_low": 3.0, "gns_high": 5.0, "gns/norm_sq_norm": 1.0,
                 "gns/norm_tr_sigma": 1.0}, {"step": 1, "tokens": 10, "val/loss": 3.0}]
        (tmp_path / name / log.NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(str(tmp_path / name))
    report.draw(folders[0])
    titles = {ax.get_title(loc="left"): ax for ax in kept[0].axes}
    for title in ("Loss (nats per token)", "Noise scale and batch (sequences)", "Its parts, norm layers", "Learning rate",
                  "Tokens per second"):
        assert dots(titles[title]), title
    compare.compare({"a": folders[:1], "b": folders[1:]}, source="val")
    assert len(dots(kept[1].axes[0])) == 2 and dots(kept[1].axes[1])
    style.line(ax := kept[1].axes[1], [1, 2, 3, 4], [1.0, float("nan"), 2.0, 3.0], color="red")
    assert list(ax.lines[-1].get_xdata()) == [1], "a point beside a gap"


def test_the_regression_finds_the_slope_that_was_put_in():
    numbers = layers.regressions(exact_rows())
    most = numbers[max(numbers)]["norm"]
    assert most["slope"] == pytest.approx(2.0, rel=0.05) and most["r"] > 0.98
    assert numbers[min(numbers)]["norm"]["r"] < most["r"], "less smoothing, more noise"


def test_the_slopes_interval_covers_the_slope_that_was_put_in():
    inside = 0
    for seed in range(40):
        rows = exact_rows(seed=seed)
        total, part = (layers.smoothed(rows, g, 8000)[40:] for g in ("total", "norm"))
        found = layers.regression(total, part)
        inside += found["slope_low"] <= 2.0 <= found["slope_high"]
    assert inside >= 34


def test_smoothing_a_logs_own_pairs_gives_the_tracked_average(tmp_path, tiny_args):
    import train
    train.main(tiny_args(out_dir=tmp_path / "run", gns="exact", max_tokens=6400))
    rows = [r for r in log.read(tmp_path / "run") if "train/loss" in r]
    value = layers.smoothed(rows, "total", 1000)[-1]
    assert value == pytest.approx(rows[-1]["gns/total_tr_sigma"] / rows[-1]["gns/total_sq_norm"], rel=1e-9)


def test_layers_draws_an_exact_run_and_refuses_another(tmp_path, capsys):
    os.makedirs(tmp_path / "a")
    (tmp_path / "a" / log.NAME).write_text("".join(json.dumps(r) + "\n" for r in exact_rows()))
    assert plot.main(["--layers", str(tmp_path / "a")]) == 0
    assert "slope" in capsys.readouterr().out and os.path.getsize(tmp_path / "a" / "layers.png") > 20_000
    with pytest.raises(SystemExit):
        plot.main(["--layers", write_run(tmp_path / "b")])
    assert "gns=exact" in capsys.readouterr().err
