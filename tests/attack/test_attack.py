import json
import os
import subprocess
import sys

import pytest

from results import render

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "attack.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a fork")
def test_nothing_is_lost_and_nothing_is_wrong_under_attack(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--cases=40", f"--out={tmp_path / 'table.json'}"], capture_output=True,
                          text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["total"]["tried"] == table["total"]["survived"] + table["total"]["refused"] >= 35
    for kind in ("kills", "kills_in_writes", "kills_of_a_rank", "kills_in_preparation", "flips", "pairs", "pairs_of_ranks",
                 "signals", "pipes"):
        assert table["kinds"][kind]["survived"] == table["kinds"][kind]["tried"] > 0, kind
    assert table["kinds"]["inputs"]["refused"] > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a fork")
def test_the_attack_notices_a_trainer_that_does_not_look_at_its_checkpoints(tmp_path):
    code = ("import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]\n"
            "from trainer import checkpoint; checkpoint.trouble = lambda path: ''\n"
            "import attack; sys.exit(attack.main(sys.argv[1:]))")
    root = os.path.dirname(os.path.dirname(os.path.dirname(SCRIPT)))
    done = subprocess.run([sys.executable, "-c", code, root, os.path.dirname(SCRIPT), "--only=flips", "--cases=60"],
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 1 and "silent change" in done.stdout, done.stdout + done.stderr


def test_an_option_that_does_not_exist_is_no_refusal(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(SCRIPT))
    import harness
    child = harness.Child.__new__(harness.Child)
    child.errors, child.code = str(tmp_path / "errors"), 2
    for words, good in (("ckpt.pt is not readable", True), ("unrecognized arguments: --out (see --help)", False)):
        (tmp_path / "errors").write_text(f"error: {words}\n")
        assert (harness.refusal(child) == "") == good


def test_two_tables_become_one_result_that_says_what_the_older_version_lacks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(SCRIPT))
    import joined
    row = {"tried": 3, "survived": 1, "refused": 0, "failed": 2, "why": ["/tmp/x"], "left_out": []}
    old = {"cases": 10, "seed": 1, "date": "2026-11-18", "machine": {"commit": "old"},
           "kinds": {"flips": row, "readers": {**row, "left_out": ["export", "whatif"]}}}
    new = {**old, "machine": {"commit": "new"},
           "kinds": {"flips": {**row, "survived": 3, "failed": 0}, "readers": row, "edits": row}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    result = joined.join(joined.read(tmp_path / "old.json"), new)
    assert result["kinds"]["flips"]["before"]["failed"] == 2 and result["kinds"]["flips"]["after"]["failed"] == 0
    assert result["kinds"]["edits"]["before"] is None and "Not tried before: edits." in result["notes"]
    assert "readers: before has no export, whatif; those cases went to the other commands." in result["notes"]
    assert "of 6 cases 2 survived" in result["finding"] and "/tmp" not in json.dumps(result)
    assert "| edits | -, 3 |" in "\n".join(render.attack_table(result))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="not what attack.py --out writes"):
        joined.read(tmp_path / "other.json")


def test_commands_that_an_older_version_lacks_are_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(SCRIPT))
    import around

    import train
    asked = [("train", str(tmp_path), "--eval"), ("train", str(tmp_path)), ("nothing", "--x")]
    attack = around.Around.__new__(around.Around)
    attack.left_out = []
    assert attack.possible(asked) == asked[:2] and attack.left_out == ["nothing"]
    monkeypatch.delattr(train, "evaluate")
    assert attack.possible(asked) == asked[1:2] and attack.left_out[1:] == ["train --eval", "nothing"]
