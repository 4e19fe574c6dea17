import functools
import inspect
import json
import os
import re

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("tests.helpers", "tests.watching")
from tests.helpers import ROOT, TINY, write_dataset  # noqa: E402

TESTS = os.path.dirname(os.path.abspath(__file__))
torch.set_num_threads(1)  # tiny tensors: a second thread only adds waiting, and sums keep one order

# what a slow test or one of its helpers says: it starts a process, compiles, or has a sweep make its runs
SLOW = re.compile(r"subprocess\.|multiprocessing|mp\.spawn|os\.fork\(|torch\.compile\b|triton_compile\.|"
                  r"run_training|\b(jobs|trial|wandb_server|against)\.[a-z]|sweep\.main")


def pytest_collection_modifyitems(items):
    """Every test that starts processes or compiles, itself or by fixtures and helpers of tests/, is marked as slow."""
    for item in items:
        fixtures = [fixture.func for name in item.fixturenames for fixture in item._fixtureinfo.name2fixturedefs.get(name, ())]
        waiting, seen = [item.function, *fixtures], set()
        while waiting and (function := inspect.unwrap(waiting.pop())):
            if function not in seen:
                seen.add(function)
                slow, helpers = read(function)
                waiting += helpers
                if slow:
                    item.add_marker(pytest.mark.slow)
                    break


@functools.cache
def read(function):
    """(whether the source of a function in tests/ matches SLOW, the functions that it names)"""
    if not inspect.getsourcefile(function).startswith(TESTS):
        return False, []
    helpers = [value for name in names(function.__code__) if inspect.isfunction(value := function.__globals__.get(name))]
    return bool(SLOW.search(inspect.getsource(function))), helpers


def names(code):
    """What a function names, and what functions within it do."""
    return {*code.co_names, *(name for inner in code.co_consts if inspect.iscode(inner) for name in names(inner))}


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Bytes with some structure, so that a tiny model learns: each byte follows from the one before, mostly."""
    rng = np.random.default_rng(0)
    ids = np.cumsum(rng.choice([1, 3, 7], 5000)) % 64
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny", ids[:4000], ids[4000:], vocab_size=64)


@pytest.fixture
def tiny(tmp_path, tiny_data, monkeypatch):
    """tiny(module, *arguments): an experiment in its tiny setting; returns its numbers file. tiny.runs: folders it ran."""
    from plots import report
    from sweeps import jobs
    monkeypatch.setattr(report, "draw", lambda out_dir: f"{out_dir}/report.png")  # not every run's picture
    real = jobs.run_training

    def run_training(config, *how, **changes):
        run.runs.append(os.path.basename(config.out_dir))
        return real(config, *how, **changes)

    def run(module, *arguments):
        name = module.__name__
        assert module.main(["--tiny", "--out", str(tmp_path / "out"), "--results", str(tmp_path), f"--dataset={tiny_data}",
                            *arguments]) == 0
        assert os.path.getsize(tmp_path / f"{name}.png") > 10_000
        with open(tmp_path / f"{name}.json") as f:
            result = json.load(f)
        assert result["paper"].startswith("The paper") and result["finding"].startswith("Here")
        assert str(tmp_path) not in json.dumps(result), "no path of this machine in a committed file"
        return result
    run.runs = []
    monkeypatch.setattr(jobs, "run_training", run_training)
    return run


@pytest.fixture
def prebuilt_compiler(tmp_path):
    """The environment of a process with an empty cache, and with a compiler that takes a second: it links the library that this
    process has compiled."""
    from rightbatch.kernels import build
    wrapper = tmp_path / "cxx"
    wrapper.write_text(f"""#!/bin/bash
[ "$1" = --version ] && exit
[[ "$*" =~ -shared ]] && made={build.build()} || made=/dev/null
while [ "$1" != -o ]; do shift; done
sleep 1; cp "$made" "$2"
""")
    wrapper.chmod(0o755)
    return {"CXX": str(wrapper), "RIGHTBATCH_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ROOT}


@pytest.fixture
def tiny_args(tiny_data):
    """Command line of a tiny run: tiny_args(out_dir=..., key=value ...)."""
    def args(**overrides):
        return [f"--{k}={v}" for k, v in {"dataset": tiny_data, **TINY, **overrides}.items()]
    return args


