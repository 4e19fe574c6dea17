import json
import os
import subprocess
import sys

import pytest

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
