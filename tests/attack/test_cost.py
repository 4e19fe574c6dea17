import json
import os
import subprocess
import sys

from results import render
from tests.helpers import ROOT

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cost.py")


def test_save_load_and_start_are_timed_before_and_after_by_both_clocks_and_rendered(tmp_path):
    out = tmp_path / "cost.json"
    options = [f"--root={ROOT}", "--rounds=1", "--warmup=0", "--floats=120000", f"--out={out}"]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["clock"] for row in result["rows"]] == ["wall", "cpu"] * 3
    for row in result["rows"]:
        assert row["before"]["n"] == row["after"]["n"] == 1 and 0 < row["before"]["median_ms"] < 60_000
        assert row["difference_ms"] == row["after"]["median_ms"] - row["before"]["median_ms"]
    start = result["rows"][-2]
    assert start["what"].startswith("a run starts") and start["after"]["median_ms"] > result["rows"][0]["after"]["median_ms"]
    assert str(tmp_path) not in out.read_text() and {"command", "machine", "finding", "date"} <= result.keys()
    text = "\n".join(render.cost_table(result))
    assert text.count("| a checkpoint is saved | ") == 1 and f"{start['after']['median_ms'] / 1e3:.2f}" in text
