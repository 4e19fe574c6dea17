import inspect
import json
import os
import re

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("tests.helpers", "tests.watching")
from tests.helpers import TINY, write_dataset  # noqa: E402

torch.set_num_threads(1)  # tiny tensors: a second thread only adds waiting, and sums keep one order

# what a slow test or one of its helpers says: it starts a process, or compiles
SLOW = re.compile(r"subprocess\.|multiprocessing|mp\.spawn|os\.fork\(|torch\.compile\b|triton_compile\.|--jobs=")


def pytest_collection_modifyitems(items):
    """Every test that starts processes or compiles, itself or by fixtures and helpers of tests/, is marked as slow."""
    for item in items:
        fixtures = [fixture.func for name in item.fixturenames for fixture in item._fixtureinfo.name2fixturedefs.get(name, ())]
        if any(is_slow(function, set()) for function in (item.function, *fixtures)):
            item.add_marker(pytest.mark.slow)


def is_slow(function, seen):
    """Whether the source of a function, or of one in tests/ that it names, matches SLOW."""
    function = inspect.unwrap(function)
    if function in seen or not getattr(function, "__module__", "").startswith("tests.") and "test_" not in function.__module__:
        return False
    seen.add(function)
    names = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    helpers = [value for value in names if inspect.isfunction(value)]
    return bool(SLOW.search(inspect.getsource(function))) or any(is_slow(helper, seen) for helper in helpers)


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
def tiny_args(tiny_data):
    """Command line of a tiny run: tiny_args(out_dir=..., key=value ...)."""
    def args(**overrides):
        return [f"--{k}={v}" for k, v in {"dataset": tiny_data, **TINY, **overrides}.items()]
    return args


