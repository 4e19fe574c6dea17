"""What a user names to be written: nothing is replaced that he did not mean."""

import json
import os
import stat
import subprocess
import sys
import threading

import pytest

import bench
import export
import plot
import train
import whatif
from configurator import ConfigError
from data import tokenizers, tokens
from system import files, output
from tests.helpers import RAMP, ROOT, write_run
from trainer import checkpoint


@pytest.fixture
def device(tmp_path):
    """device(minor): a node of our own, as /dev/null (3) and /dev/full (7) are."""
    def make(minor):
        path = tmp_path / f"device{minor}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            open(path, "wb").close()
        except OSError:
            pytest.skip("needs the right to make a device")
        return path
    return make


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", RAMP)


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


def refused(capsys, command, *arguments):
    with pytest.raises(SystemExit) as e:
        command.main([str(a) for a in arguments])
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("arguments", [["--json={}"], ["--json=-", "--out={}"]])
def test_a_device_is_written_to_and_stays_a_device(run, device, arguments):
    path = device(3)
    assert whatif.main([run, *(a.format(path) for a in arguments)]) == 0
    assert stat.S_ISCHR(os.lstat(path).st_mode) and plot.main([run, f"--out={path}"]) == 0
    assert stat.S_ISCHR(os.lstat(path).st_mode)


def test_a_full_device_is_one_line_that_names_it(run, device, capsys):
    path = device(7)
    for arguments in ([f"--json={path}"], ["--json=-", f"--out={path}"]):
        assert f"{path}: No space left on device" in refused(capsys, whatif, run, *arguments)
    assert stat.S_ISCHR(os.lstat(path).st_mode)


def test_a_pipe_gets_the_numbers_and_stays_a_pipe(run, tmp_path):
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(json.loads(path.read_text())))
    reader.start()
    assert whatif.main([run, f"--json={path}"]) == 0
    reader.join()
    assert found[0]["rows"] and stat.S_ISFIFO(os.lstat(path).st_mode)


def test_a_pipe_that_the_shell_made_gets_the_numbers(run):
    command = f'"{sys.executable}" "{ROOT}/whatif.py" "{run}" --json=>(cat >&2) --out="{run}/x.png"; sleep 0.5'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stderr)["rows"] and done.returncode == 0


def test_numbers_for_the_file_that_stdout_goes_to_join_the_words(run, tmp_path):
    for name in ("/dev/stdout", tmp_path / "all.txt"):
        with open(tmp_path / "all.txt", "w") as f:
            subprocess.run([sys.executable, f"{ROOT}/whatif.py", run, f"--json={name}"], stdout=f, check=True, timeout=300)
        text = (tmp_path / "all.txt").read_text()
        assert text.startswith("{\n") and "Picture: " in text


def test_a_link_stays_and_what_it_points_to_is_written(run, tmp_path):
    (tmp_path / "old.json").write_text("old")
    for name, target in (("link", "old.json"), ("dangling", "new.json")):
        (tmp_path / name).symlink_to(target)
        assert whatif.main([run, f"--json={tmp_path / name}"]) == 0
        assert os.readlink(tmp_path / name) == target and json.loads((tmp_path / target).read_text())["rows"]


@pytest.mark.parametrize("name", ["log.jsonl", "config.json", "ckpt.pt", "ckpt.3.pt", "ckpt.best.pt", "step_time.json", "lock",
                                  "log.jsonl.damaged"])
def test_what_a_run_lives_from_is_refused_and_stays(run, tmp_path, capsys, monkeypatch, name):
    before = contents(run)
    (tmp_path / "link").symlink_to(os.path.join(run, name))
    for path in (os.path.join(run, name), os.path.join(run, "..", "run", name), tmp_path / "link"):
        for arguments in ((whatif, run, f"--json={path}"), (whatif, run, f"--out={path}"), (plot, run, f"--out={path}")):
            assert f"lives from its {name}" in refused(capsys, *arguments)
        monkeypatch.setattr(sys, "argv", ["bench.py", "kernel", f"--out={path}"])
        with pytest.raises(SystemExit):
            bench.main()
        assert f"lives from its {name}" in capsys.readouterr().err
    assert contents(run) == before


def test_the_numbers_of_a_comparison_do_not_replace_a_runs_settings(run, tmp_path, capsys):
    before, other = contents(run), write_run(tmp_path / "other", RAMP)
    assert "lives from its config.json" in refused(capsys, plot, "--compare", f"a={run}", f"b={other}", f"--out={run}/config")
    assert contents(run) == before


def test_the_same_name_where_no_run_is_may_be_written_and_a_run_may_hold_other_files(run, tmp_path):
    for path in (tmp_path / "config.json", os.path.join(run, "mine.json"), os.path.join(run, "report.png")):
        output.write_json(path, {"a": 1})
        assert json.load(open(path)) == {"a": 1}


def test_data_are_not_written_over(tiny_data):
    for name in ("train.bin", "val.bin", "meta.json", "verified.json"):
        with pytest.raises(ConfigError, match=f"lives from its {name}"):
            output.write(os.path.join(tiny_data, name), b"")


def test_a_folder_is_one_line_and_stays(run, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert "Is a directory" in refused(capsys, whatif, run, f"--json={tmp_path / 'folder'}")
    assert os.listdir(tmp_path / "folder") == [] and sorted(os.listdir(tmp_path)) == ["folder", "run"]


def test_a_picture_that_cannot_be_written_whole_leaves_the_old_one(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "old.png").write_bytes(b"old")

    def full(self, data):
        self.error = OSError(28, "No space left on device")
        raise self.error
    monkeypatch.setattr(files.Output, "write", full)
    assert "old.png: No space left" in refused(capsys, whatif, run, "--json=-", f"--out={tmp_path / 'old.png'}")
    assert (tmp_path / "old.png").read_bytes() == b"old"


def test_an_export_never_goes_into_what_is_there(tmp_path, tiny_args, capsys, device):
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=320))
    before, path = contents(tmp_path / "run"), device(3)
    assert "is not empty" in refused(capsys, export, tmp_path / "run", f"--hf={tmp_path / 'run'}")
    assert "File exists" in refused(capsys, export, tmp_path / "run", f"--hf={path}")
    assert contents(tmp_path / "run") == before and stat.S_ISCHR(os.lstat(path).st_mode)


# -- words

def written_to(path, script, *arguments):
    with open(path, "wb") as stdout:
        return subprocess.run([sys.executable, f"{ROOT}/{script}", *map(str, arguments)], stdout=stdout, stderr=subprocess.PIPE,
                              text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_words_that_a_full_disk_swallows_make_a_command_fail_and_a_run_go_on(run, tmp_path, tiny_args, device):
    path, out = device(7), tmp_path / "trained"
    done = written_to(path, "train.py", *tiny_args(out_dir=out, max_tokens=640))
    assert done.returncode == 0 and checkpoint.load(str(out))["state"]["tokens"] >= 640
    for script, *typed in (("sample.py", out, "--tokens=3"), ("whatif.py", run, "--json=-"), ("train.py", out, "--eval"),
                           ("train.py", "--plan"), ("train.py", "--help"), ("plot.py", out)):
        done = written_to(path, script, *typed)
        assert done.returncode == 2, script
        assert done.stderr.endswith("error: output is lost: No space left on device\n"), done.stderr


def test_a_reader_that_has_heard_enough_makes_no_command_fail(run):
    command = f'"{sys.executable}" "{ROOT}/whatif.py" "{run}" --json=- | true; exit ${{PIPESTATUS[0]}}'
    assert subprocess.run(["bash", "-c", command], timeout=300).returncode == 0


# -- temporary files

def test_a_run_removes_its_own_temporary_files_and_no_others(tmp_path, tiny_args):
    mine = ["thesis.tmp", "ckpt.pt.tmp", "notes.20261118.tmp", "ckpt.pt.abcdefgh.tmp", "log.jsonl.1234.tmp"]
    left = ["ckpt.pt.0123abcd.tmp", "ckpt.1.pt.0123abcd.tmp", "log.jsonl.0123abcd.tmp", "report.png.0123abcd.tmp"]
    for name in (*mine, *left):
        (tmp_path / name).write_text("x")
    train.main(tiny_args(out_dir=tmp_path, max_tokens=320))
    assert sorted(p.name for p in tmp_path.glob("*.tmp")) == sorted(mine)


def test_preparing_data_removes_its_own_temporary_files_and_no_others(tmp_path):
    for name in ("thesis.tmp", "train.bin.tmp", "book.20261118.tmp", "val.bin.0123abcd.tmp", "meta.json.0123abcd.tmp"):
        (tmp_path / name).write_text("x")
    with tokens.DatasetWriter(tmp_path, tokenizers.ByteTokenizer()):
        pass
    assert sorted(os.listdir(tmp_path)) == ["book.20261118.tmp", "thesis.tmp", "train.bin.tmp"]
