"""The cache of compiled kernels: never loads what is damaged or what others could have written, and leaves no rest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rightbatch.kernels import build

ROOT = Path(__file__).parent.parent
LOAD = "import ln_kernel; print(*ln_kernel.choose_impl('cpu'), sep='\\n')"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a compiler that writes its command lines to a file and a few bytes as its output."""
    compiler = tmp_path / "cxx"
    compiler.write_text(f"""#!/bin/bash
[ "$1" = --version ] && exit
echo "$*" >> {tmp_path}/log
while [ "$1" != -o ]; do shift; done; echo "what was compiled" > "$2"
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("RIGHTBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def times_linked(cache):
    return (cache.parent / "log").read_text().count("-shared")


def as_other_user(monkeypatch):
    """The files stay; it is this process that is somebody else."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)


def test_what_was_built_is_found_again(cache):
    path = build.build()
    assert path.read_text() == "what was compiled\n" and path.parent == cache
    assert build.build() == path and times_linked(cache) == 1


@pytest.mark.parametrize("source", ["KERNELS", "GLUE"])
def test_a_further_source_file_is_one_more_name(cache, source, tmp_path, monkeypatch):
    before = build.build()
    (tmp_path / "more.cpp").write_text("")
    monkeypatch.setattr(build, source, (*getattr(build, source), str(tmp_path / "more.cpp")))
    assert build.build() != before, "another library"
    *_, link = (tmp_path / "log").read_text().splitlines()
    assert [re.search(rf"/{name}\.o\b", link) is not None for name in ("ln_kernel", "ln_autograd", "more")] == 3 * [True]
    commands = [c for c in (tmp_path / "log").read_text().splitlines() if "more.cpp" in c]
    assert len(commands) == 1 and ("-march=native" in commands[0]) == (source == "KERNELS")


@pytest.mark.parametrize("damage", ["truncated", "empty", "a flipped bit", "gone", "no digest", "empty digest", "other digest"])
def test_a_damaged_library_is_compiled_again(cache, damage, capfd):
    path = build.build()
    digest, content = path.with_suffix(".sha256"), path.read_bytes()
    capfd.readouterr()
    if damage in ("gone", "no digest"):
        (path if damage == "gone" else digest).unlink()
    elif "digest" in damage:
        digest.write_bytes(b"" if damage == "empty digest" else b"\xff" * 64)
    else:
        path.write_bytes({"truncated": content[:5], "empty": b""}.get(damage, bytes([content[0] ^ 1]) + content[1:]))
    assert build.build() == path and path.read_bytes() == content and times_linked(cache) == 2
    assert ("is damaged" in capfd.readouterr().err) == (damage != "gone")
    assert build.build() == path and times_linked(cache) == 2, "now it is whole"


def test_a_truncated_library_does_not_end_the_process(prebuilt_compiler, tmp_path):
    """The real one: loaded as it is, it dies of SIGBUS."""
    def load():
        return subprocess.run([sys.executable, "-c", LOAD], env=os.environ | prebuilt_compiler, capture_output=True, text=True,
                              timeout=300)
    assert load().stdout.startswith("cpu\n")
    library, = (tmp_path / "cache").glob("*.so")
    os.truncate(library, library.stat().st_size // 2)
    again = load()
    assert again.returncode == 0 and again.stdout.startswith("cpu\n") and "damaged" in again.stderr, again.stderr


def test_a_rebuilt_library_is_another_file_so_that_who_has_the_old_one_loaded_keeps_it(cache):
    path = build.build()
    with open(path, "rb") as loaded:
        path.with_suffix(".sha256").unlink()
        build.build()
        assert os.fstat(loaded.fileno()).st_ino != path.stat().st_ino


def test_files_are_on_disk_before_they_get_their_names(cache, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append((os.stat(a).st_ino, Path(b).suffix)), replace(a, b)))
    build.build()
    (first, so), (second, digest) = done[1], done[3]
    assert (so, digest) == (".so", ".sha256") and [done[0], done[2]] == [first, second]


def test_a_killed_compilers_left_overs_are_removed_and_nothing_of_the_users(cache):
    for name in ("kernels-partial-abcd", "tmp", "tmp_thesis"):
        (cache / name).mkdir(parents=True)
        (cache / name / "ln_kernel.o").write_text("half")
    build.build()
    assert sorted(f.suffix or f.name for f in cache.iterdir()) == [".sha256", ".so", "lock", "tmp", "tmp_thesis"]


# ---- others

def test_folder_and_files_are_written_by_the_user_alone_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        path = build.build()
    finally:
        os.umask(before)
    files = [cache, *cache.iterdir()]
    assert len(files) == 4 and all(f.stat().st_mode & 0o077 == 0 for f in files)
    assert build.build() == path and times_linked(cache) == 1


@pytest.mark.parametrize("what", ["folder", "library", "digest", "lock"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_refused_in_one_line(cache, what, mode):
    path = build.build()
    target = {"folder": cache, "library": path, "digest": path.with_suffix(".sha256"), "lock": cache / "lock"}[what]
    target.chmod(target.stat().st_mode | mode)
    if what == "lock":
        path.unlink()   # the lock is needed to compile
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(target))} is writable by others: [^\n]*chmod go-w"):
        build.build()
    assert times_linked(cache) == 1


def test_what_belongs_to_another_user_is_refused_in_one_line(cache, monkeypatch):
    build.build()
    if os.getuid() == 0:   # as root files can be given away; root's own are everybody's to trust
        os.chown(cache, 12345, -1)
    else:
        as_other_user(monkeypatch)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(cache))} belongs to another user: [^\n]*RIGHTBATCH_CACHE"):
        build.build()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["library", "digest"])
def test_a_file_of_another_user_in_ones_own_folder_is_refused(cache, what):
    path = build.build()
    target = path if what == "library" else path.with_suffix(".sha256")
    os.chown(target, 12345, -1)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(target))} belongs to another user"):
        build.build()


@pytest.mark.parametrize("what", ["library", "lock"])
def test_links_are_refused_and_what_they_point_to_is_not_touched(cache, what, tmp_path):
    path = build.build()
    target = path if what == "library" else cache / "lock"
    precious = tmp_path / "precious"
    precious.write_text("not ours")
    path.unlink()
    target.unlink(missing_ok=True)
    target.symlink_to(precious)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(target))} is a link: remove it$"):
        build.build()
    assert precious.read_text() == "not ours" and times_linked(cache) == 1


@pytest.mark.parametrize("what", ["library", "digest", "lock"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(cache, what):
    path = build.build()
    target = {"library": path, "digest": path.with_suffix(".sha256"), "lock": cache / "lock"}[what]
    target.unlink()
    os.mkfifo(target, 0o600)
    if what == "lock":
        path.unlink()
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(target))} is no file: remove it$"):
        build.build()


def test_the_lock_is_not_truncated(cache):
    cache.mkdir(mode=0o700)
    (cache / "lock").write_text("who holds it")
    (cache / "lock").chmod(0o600)
    build.build()
    assert (cache / "lock").read_text() == "who holds it"


def test_a_refused_cache_means_plain_torch_and_one_warning(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    run = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=120,
                         env=os.environ | {"RIGHTBATCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)})
    name, reason = run.stdout.splitlines()
    assert name == "ref" and "writable by others" in reason
    assert run.stderr.count("writable by others") == 1 and not list(cache.iterdir())


@pytest.mark.parametrize("value", ["g++ 'x", " "])
def test_a_compiler_that_is_no_command_means_plain_torch_and_one_warning_each(tmp_path, value):
    code = LOAD + ("; import torch; from rightbatch.kernels.attention import causal_attention"
                   "; causal_attention(torch.zeros(1, 2, 48), 1)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                         env=os.environ | {"CXX": value, "RIGHTBATCH_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0 and run.stdout.startswith("ref\n"), run.stderr
    assert run.stderr.count("norm layers use plain torch") == run.stderr.count("attention uses torch's own") == 1
