import json
import os
import subprocess
import sys

import pytest

from tests.attack import attack, harness
from tests.helpers import ROOT

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "attack.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a fork")
def test_nothing_is_lost_and_nothing_is_wrong_under_attack(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--cases=40", f"--out={tmp_path / 'table.json'}"], capture_output=True,
                          text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    assert {"command", "machine", "finding", "date"} < table.keys()
    assert table["total"]["tried"] == table["total"]["survived"] + table["total"]["refused"] >= 35
    for kind in ("kills", "kills_in_writes", "kills_of_a_rank", "kills_in_preparation", "flips", "pairs", "pairs_of_ranks",
                 "signals", "pipes"):
        assert table["kinds"][kind]["survived"] == table["kinds"][kind]["tried"] > 0, kind
    assert table["kinds"]["inputs"]["refused"] > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a fork")
def test_the_attack_notices_a_trainer_that_does_not_look_at_its_checkpoints():
    code = ("import sys; sys.path.insert(0, sys.argv.pop(1))\n"
            "from trainer import checkpoint; checkpoint.trouble = lambda path: ''\n"
            "from tests.attack import attack; sys.exit(attack.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", code, ROOT, "--only=flips", "--cases=60"], capture_output=True, text=True,
                          timeout=900)
    assert done.returncode == 1 and "silent change" in done.stdout, done.stdout + done.stderr


def ended_with(tmp_path, code, words):
    child = harness.Child.__new__(harness.Child)
    child.errors, child.code = str(tmp_path / "errors"), code
    (tmp_path / "errors").write_text(words)
    return child


@pytest.mark.parametrize("code, words, refused", [
    (2, "error: ckpt.pt is not readable\n", True),
    (2, "error: unrecognized arguments: --out (see --help)\n", False),   # the attack itself typed what does not exist
    (1, "error: ckpt.pt is not readable\n", False), (2, "error: one\nerror: two\n", False), (2, "", False),
    (2, "Traceback\nerror: one\n", False), (None, "", False)])
def test_a_refusal_is_one_line_and_exit_code_2(tmp_path, code, words, refused):
    child = ended_with(tmp_path, code, words)
    assert (harness.refusal(child) == "") == refused
    assert attack.outcome(lambda: child.refused(names="ckpt.pt")) == ("survived", "") if refused else attack.outcome(
        lambda: child.refused())[0] == "failed"
    assert attack.outcome(lambda: child.refused(names="elsewhere"))[0] == "failed"
