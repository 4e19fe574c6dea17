"""Compiles the C++ kernels into one library, once for these sources, compiler, CPU and torch, and keeps it in a cache.

    build() -> path of a library that may be loaded; RuntimeError or OSError says why there is none

A further kernel is one more name in KERNELS, its torch operators one more in GLUE. The first file of GLUE opens the namespace
with TORCH_LIBRARY, each further one with TORCH_LIBRARY_FRAGMENT. cpp.py loads the library.

The cache is $RIGHTBATCH_CACHE or ~/.cache/rightbatch. What lies there is run as the user, so folder and files must belong to
the user (or to root) and be writable by nobody else. A damaged library would end the process when it is loaded, so its
SHA-256 lies beside it and is compared first.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
KERNELS = ("ln_kernel.cpp", "attention.cpp")   # without torch's headers; compiled for this CPU
GLUE = ("ln_autograd.cpp", "attention_autograd.cpp")   # kernels as torch operators
PARTIAL = "kernels-partial-"   # how the name of a folder begins in which a library is being built


def build():
    """Path of the library; compiles it where the cache has none, or a damaged one."""
    cxx = find_compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler found: install g++ or clang++, or set CXX")
    attempts = flag_attempts()
    cache = Path(os.environ.get("RIGHTBATCH_CACHE") or Path.home() / ".cache" / "rightbatch")
    path = cache / f"kernels-{_key(cxx, attempts)}.so"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_what_others_could_write(cache, cache.stat())
    if _is_whole(path):
        return path
    with _one_at_a_time(cache):
        if not _is_whole(path):   # nobody built it while this process waited
            why = "the compiled one is damaged" if path.exists() else "once"
            print(f"rightbatch: compiling the CPU kernels ({why}; half a minute) into {path}", file=sys.stderr, flush=True)
            compile_library(cxx, [FOLDER / name for name in KERNELS], [FOLDER / name for name in GLUE], attempts, path)
    return path


def _key(cxx, attempts):
    """What the library depends on, as a short hash."""
    texts = [path.read_text() for path in (*(FOLDER / name for name in KERNELS + GLUE), *sorted(FOLDER.glob("*.h")))]
    version = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    key = texts, cxx, version, attempts, glue_flags(), _cpu_model(), torch.__version__
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


# ---- the cache

def digest_of(path):
    return path.with_suffix(".sha256")


def _is_whole(path):
    """Whether the library is there as it was written. Refuses one that somebody else could have written."""
    digest = digest_of(path)
    try:
        for file in (path, digest):
            _refuse_what_others_could_write(file, file.lstat())
        return hashlib.sha256(path.read_bytes()).hexdigest() == digest.read_bytes().decode("ascii", "replace")
    except FileNotFoundError:
        return False


def _refuse_what_others_could_write(path, status):
    if not hasattr(os, "getuid"):   # Windows
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):   # a pipe would be waited for
        raise RuntimeError(f"{path} is {'a link' if stat.S_ISLNK(status.st_mode) else 'no file'}: remove it")
    if status.st_uid not in (os.getuid(), 0):
        raise RuntimeError(f"{path} belongs to another user: remove it, or set RIGHTBATCH_CACHE to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(f"{path} is writable by others: remove it, or, if you trust what is in it, chmod go-w it")


@contextlib.contextmanager
def _one_at_a_time(cache):
    """torch's headers take a compiler 1 GB: eight ranks that start together wait for one. Where files cannot be locked, all
    compile, and the last one's file stays."""
    path = cache / "lock"
    if path.is_symlink():   # O_NOFOLLOW refuses it, too, in words that nobody understands
        raise RuntimeError(f"{path} is a link: remove it")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        _refuse_what_others_could_write(path, os.fstat(lock))
        with contextlib.suppress(ImportError, OSError):
            import fcntl
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left_over in cache.glob(f"{PARTIAL}*"):   # of a process that was killed: whoever compiles has the lock
                shutil.rmtree(left_over, ignore_errors=True)
        yield
    finally:
        os.close(lock)


def _write_into_place(source, path, mode):
    """All of it or nothing, after a loss of power, too."""
    os.chmod(source, mode)
    with open(source, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(source, path)


# ---- compiling

def compile_library(cxx, kernels, glue, attempts, path):
    """Kernels with the first flags that work, glue with torch's; then the library and its digest. Built aside and moved into
    place whole: another process sees complete files or none."""
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=path.parent) as tmp, ThreadPoolExecutor(os.cpu_count()) as pool:
        library, digest = Path(tmp, "library.so"), Path(tmp, "library.sha256")
        compile_flags, link_flags = glue_flags()

        def compiled(source, flags):
            target = f"{tmp}/{source.stem}.o"
            return target, pool.submit(_run, [*cxx, "-c", str(source), "-o", target, *flags])
        operators = [compiled(source, compile_flags) for source in glue]
        for flags in attempts:
            objects = [compiled(source, flags) for source in kernels]
            errors = [done.exception() for _, done in (*operators, *objects)]   # waits for all
            if any(errors[:len(operators)]):
                break   # no flags of the kernels help
            try:
                if not any(errors):
                    _run([*cxx, *(target for target, _ in (*objects, *operators)), "-o", str(library), "-shared", *flags,
                          *link_flags])
                    break
            except RuntimeError as e:
                errors.append(e)
        for error in filter(None, errors):
            raise error
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        _write_into_place(library, path, 0o700)
        _write_into_place(digest, digest_of(path), 0o600)


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")


def find_compiler():
    if os.environ.get("CXX"):
        try:
            return shlex.split(os.environ["CXX"])
        except ValueError as e:
            raise RuntimeError(f"CXX={os.environ['CXX']!r}: {e}") from None
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def flag_attempts():
    """Best first. No -ffast-math: NaN and inf must come through. The sources are vectorised by hand already, and letting
    the compiler vectorise the leftover loops as well doubles compile time."""
    base = ["-std=gnu++17", "-O3", "-fno-tree-vectorize", "-fno-math-errno", "-fPIC"]
    native = [*base, "-march=native"]
    # torch brings its own OpenMP runtime. Linked to that very file we share its threads; a second runtime would start
    # threads of its own, and the two sets would compete for the cores.
    lib = Path(torch.__file__).parent / "lib"
    names = ("libgomp*.so*", "libomp.dylib", "../../torch.libs/libgomp*.so*")
    runtimes = [str(path) for name in names for path in lib.glob(name)]
    openmp = ["-Xpreprocessor", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp", "-Wl,--as-needed"]
    shared = [[*native, *openmp, runtime] for runtime in runtimes[:1]]
    return [*shared, [*native, "-fopenmp"], native, base]


def glue_flags():
    """What torch's headers need, to compile and to link."""
    include, lib = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    abi = int(torch.compiled_with_cxx11_abi())
    return (["-std=gnu++20", "-O2", "-fPIC", f"-I{include}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"],
            [f"-L{lib}", "-ltorch_cpu", "-lc10"])


def _cpu_model():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    except OSError:
        return platform.machine() + platform.processor()
