"""What `pip install` brings, and that what the requirement files ask for can be had together."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rightbatch

ROOT = Path(__file__).parent.parent

# The triton that torch's CUDA build requires, by torch's version. Plain `pip install torch` brings that build on Linux, and
# with another triton pinned nothing can be installed. A CPU build does not ask for triton, so it would not notice.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}

# A norm layer with a probe, forward and backward, after importing the modules in this order.
USE = """
import importlib, sys
sys.path.insert(0, {folder!r})
for name in {order!r}:
    importlib.import_module(name)
import rightbatch, torch
from rightbatch import gns, ln_kernel, per_example
from rightbatch.kernels import backends
for module in (gns, ln_kernel, per_example):
    copies = {{id(m) for m in list(sys.modules.values()) if getattr(m, "__file__", None) == module.__file__}}
    assert len(copies) == 1, (module, copies)
    print(module.__file__)
assert backends.ln_kernel is ln_kernel and backends.BACKENDS["ref"].forward is ln_kernel.ref_forward
probe, w = torch.zeros(2, 3, requires_grad=True), torch.ones(8, requires_grad=True)
ln_kernel.layer_norm(torch.randn(3, 4, 8), w, torch.zeros(8), probe).sum().backward()
assert probe.grad[1].tolist() == 3 * [8 * 16.0], probe.grad
assert gns.unbiased_pair(3.0, 2.0, 1, 2) == (1.0, 2.0)
assert all(getattr(rightbatch, name) is not None for name in rightbatch.__all__)
print(ln_kernel.choose_impl("cpu")[0], rightbatch.__version__)
"""


def use(folder, order, cwd, script=USE):
    """In a process that sees torch, numpy and this folder; not the directory it starts in, nor PYTHONPATH."""
    run = subprocess.run([sys.executable, "-I", "-c", script.format(folder=str(folder), order=order)], cwd=cwd,
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    run = subprocess.run([sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir",
                          str(folder)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_has_the_library_and_nothing_else(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"rightbatch", f"rightbatch-{rightbatch.__version__}.dist-info"}
    in_library = {name.removeprefix("rightbatch/") for name in names if name.startswith("rightbatch/")}
    in_checkout = {str(path.relative_to(ROOT / "rightbatch")) for path in (ROOT / "rightbatch").rglob("*")
                   if path.suffix in (".py", ".cpp", ".h", ".typed")}
    assert in_library == in_checkout | {"gns.py", "ln_kernel.py"} and {"py.typed", "per_example.py"} < in_checkout
    from rightbatch.kernels import build
    assert {f"kernels/{name}" for name in build.KERNELS + build.GLUE} <= in_library


def test_the_wheel_needs_torch_and_numpy_and_the_rest_to_train(wheel):
    metadata = wheel.read(f"rightbatch-{rightbatch.__version__}.dist-info/METADATA").decode()
    needs = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*(;.*)?$", metadata, re.MULTILINE)
    assert {name for name, extra in needs if not extra} == {"torch", "numpy"}
    everything = {re.match(r"[\w-]+", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines()}
    assert {name for name, extra in needs if "'train'" in extra} == everything - {"torch", "numpy"}


@pytest.mark.parametrize("order", [["rightbatch"], ["rightbatch.kernels.backends"]], ids=str)
def test_the_unpacked_wheel_works_on_its_own(wheel, order, tmp_path):
    wheel.extractall(tmp_path / "installed")
    *files, last = use(tmp_path / "installed", order, tmp_path)
    assert files == [str(tmp_path / "installed" / "rightbatch" / f"{name}.py") for name in ("gns", "ln_kernel", "per_example")]
    assert last in ("cpu 0.1.0", "ref 0.1.0")


OUTSIDE = """
import torch
from rightbatch import gns, ln_kernel, watch
reveal_type(watch(torch.nn.LayerNorm(4)))
reveal_type(gns.NoiseScale(1.0))
reveal_type(ln_kernel.layer_norm)
watch(torch.nn.LayerNorm(4), mode=3)
"""


def test_whoever_installs_the_wheel_has_its_types(wheel, tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    wheel.extractall(tmp_path)
    (tmp_path / "mine.py").write_text(OUTSIDE)
    run = subprocess.run([sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", "mine.py"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = json.loads(run.stdout)["generalDiagnostics"]
    types = [re.search(' is "(.*)"', d["message"])[1] for d in said if d["severity"] == "information"]
    assert types[:2] == ["Watch", "NoiseScale"] and types[2].startswith("("), types
    assert ["mode" in d["message"] for d in said if d["severity"] == "error"] == [True], said


# An example with torch and numpy, and nothing else of what a trainer has.
EXAMPLE = """
import runpy, sys
for name in {order!r}:
    sys.modules[name] = None
sys.path.insert(0, {folder!r})
sys.argv = ["plain_loop.py", "--steps=5"]
w = runpy.run_path("plain_loop.py")["main"](sys.argv[1:])
import rightbatch
print(rightbatch.__file__, w.steps)
"""


def test_the_unpacked_wheel_runs_the_example_without_any_other_package_of_a_trainer(wheel, tmp_path):
    wheel.extractall(tmp_path / "installed")
    shutil.copy(ROOT / "examples" / "plain_loop.py", tmp_path)
    absent = ["transformers", "accelerate", "peft", "lightning", "pytorch_lightning", "wandb", "datasets", "tiktoken",
              "matplotlib"]
    *lines, last = use(tmp_path / "installed", absent, tmp_path, EXAMPLE)
    assert last == f"{tmp_path / 'installed' / 'rightbatch' / '__init__.py'} 5"
    assert any(line.startswith("largest error") for line in lines) and any(" noise scale " in line for line in lines)


ONCE = """
import ln_kernel as top_level
assert top_level is ln_kernel and sys.modules["gns"] is gns
"""


@pytest.mark.parametrize("order", [["rightbatch"], ["ln_kernel"], ["gns", "rightbatch.kernels.backends"]], ids=str)
def test_in_a_checkout_each_module_exists_once_whichever_name_comes_first(order, tmp_path):
    *files, last = use(ROOT, order, tmp_path, USE + ONCE)
    assert files == [str(ROOT / name) for name in ("gns.py", "ln_kernel.py", "rightbatch/per_example.py")]
    assert last in ("cpu 0.1.0", "ref 0.1.0")


def test_a_module_of_the_same_name_before_a_checkout_is_refused_in_one_line(tmp_path):
    (tmp_path / "gns.py").write_text("mine = True\n")
    script = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\nimport rightbatch\n"
    run = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=300)
    *_, line = run.stderr.splitlines()
    assert run.returncode == 1 and re.fullmatch(rf"ImportError: .*{tmp_path}/gns.py comes before it.*: rename that file", line)


# ---- requirement files

def pins():
    lines = (ROOT / "requirements.txt").read_text().splitlines() + (ROOT / "requirements-test.txt").read_text().splitlines()
    return dict(re.match(r"([\w-]+)==([\w.]+)", line).groups() for line in lines if not line.startswith("-r"))


def test_triton_is_pinned_to_the_release_that_torch_requires():
    torch_version, triton = pins()["torch"], pins()["triton"]
    assert torch_version in TRITON_OF_TORCH, "look up the triton that torch's CUDA build requires, and pin that"
    assert triton == TRITON_OF_TORCH[torch_version]
    asked = [r for r in importlib.metadata.requires("torch") if r.startswith("triton")]   # none in a CPU build
    assert all(f"=={triton}" in r for r in asked), asked


def test_papers_name_the_same_versions_and_packages_as_the_requirement_files():
    hook, = re.findall(r"ruff-pre-commit\n    rev: v(.*)\n", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hook == pins()["ruff"]
    groups = re.search(r"\[dependency-groups\].*?\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[0]
    of_tests = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements-test.txt").read_text(), re.MULTILINE)) - {"triton"}
    assert set(re.findall(r'"([\w-]+)"', groups)) - {"lint"} == of_tests   # triton comes with torch
    version, = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == rightbatch.__version__


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="for a stock Linux machine")
@pytest.mark.skipif("RIGHTBATCH_RESOLVE" not in os.environ, reason="takes a minute or two: make requirements runs it")
def test_both_requirement_files_resolve_against_the_plain_index(tmp_path):
    """requirements-test.txt includes requirements.txt. Without wheels or indexes of this machine; downloads metadata only."""
    own = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CONSTRAINT")
    env = {k: v for k, v in os.environ.items() if k not in own} | {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1",
                                                                   "PIP_DEFAULT_TIMEOUT": "20"}

    def pip(path, *args):
        return subprocess.run([sys.executable, *path, *args], env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=600)
    # older ones download whole wheels to resolve, gigabytes of them
    got = pip(["-m", "pip"], "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "pip>=25")
    if got.returncode:
        pytest.skip("the package index cannot be reached")
    newer, = tmp_path.glob("pip-*.whl")
    run = pip([f"{newer}/pip"], "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:", "-r",
              str(ROOT / "requirements-test.txt"))
    impossible = re.search("ResolutionImpossible|No matching distribution|conflicting dependencies", run.stderr)
    if run.returncode and not impossible:
        pytest.skip(f"the package index went away: {run.stderr.strip()[-200:]}")
    assert run.returncode == 0, run.stderr
