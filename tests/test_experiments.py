import os
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import batch_schedule  # noqa: E402
import common  # noqa: E402

# -- common.py

def test_settings_give_way_to_a_config_file_and_both_to_the_command_line(tmp_path):
    file = tmp_path / "c.py"
    file.write_text("batch_size = 24\n")
    settings = dict(batch_size=64, n_layer=3)
    assert common.parse([], "x", "", settings=settings)[1].batch_size == 64
    given = common.parse(["--config", str(file)], "x", "", settings=settings)[1]
    assert given.batch_size == 24 and given.n_layer != 3
    assert common.parse(["--batch_size=48"], "x", "", settings=settings)[1].batch_size == 48
    with pytest.raises(SystemExit):
        common.parse(["--batch_sise=48"], "x", "", settings=settings)


# -- batch_schedule.py

def test_the_batch_schedule_experiment_runs_reports_and_is_not_run_twice(tiny, capsys):
    result = tiny(batch_schedule, "--seeds", "1")
    text = capsys.readouterr().out
    assert "The paper:" in text and "18%" in text and "constant batch" in text
    assert len(tiny.runs) == len(set(tiny.runs)) == 6 * 3
    assert list(result["groups"])[0] == "fixed" and {"linear", "gns", "constant 4", "constant 32"} <= set(result["groups"])
    tiny(batch_schedule, "--seeds", "1")
    assert len(tiny.runs) == 18, "nothing is run again"
    with pytest.raises(SystemExit):
        tiny(batch_schedule, "--seeds", "1", "--n_embd=32")
    assert "holds a run with other settings: n_embd is 32, there it is 16" in capsys.readouterr().err


def test_the_finding_says_what_came_out_whichever_way():
    def group(tokens, steps, base=(1000, 100)):
        value = {m: {"mean": v, "low": v, "high": v, "std": None, "runs": 1} for m, v in
                 (("tokens", tokens), ("steps", steps), ("seconds", 1.0))} if tokens else dict.fromkeys(
                     ("tokens", "steps", "seconds"))
        less = {m: value[m] and {"mean": 1 - value[m]["mean"] / b} for m, b in zip(("tokens", "steps"), base)}
        return {"runs": 1, "at_target": {"reached": 1 if tokens else 0, **value, "less": less}}
    fixed, linear = group(1000, 100), group(900, 95)
    text = batch_schedule.finding({"groups": {"fixed": fixed, "linear": linear, "gns": group(800, 90),
                                              "constant 8": group(780, 150), "constant 16": group(790, 80)}})
    assert "20% fewer tokens and 10% fewer steps: a saving" in text and "(constant 8)" in text
    assert text.endswith("constant 16 beats it in both.")
    text = batch_schedule.finding({"groups": {"fixed": fixed, "linear": linear, "gns": group(None, None)}})
    assert "did not reach" in text
