"""The examples run, and say a noise scale."""

import importlib.util
import os

import pytest

from tests.helpers import ROOT


def example(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(ROOT, "examples", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_loop_verifies_itself_and_prints_the_noise_scale(capsys):
    w = example("plain_loop").main(["--steps=10"])
    out = capsys.readouterr().out
    assert "largest error" in out and out.count(" noise scale ") >= 5 and "in Adam's metric" in out
    assert w.meter.scales["norm"].averages.updates == 10
    assert "A step takes" in out or "too few steps" in out


@pytest.mark.skipif(not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")),
                    reason="transformers and accelerate are not installed")
def test_the_huggingface_example_logs_the_keys():
    history = example("huggingface_trainer").main(["--steps=10"])
    rows = [row for row in history if "loss" in row]
    assert len(rows) == 5 and all("gns/norm_tr_sigma" in row for row in rows) and rows[-1]["loss"] < rows[0]["loss"]
    assert "step_time/fixed_ms" in rows[-1] and rows[-1]["gns/coverage_percent"] == 100
