"""bench.py kernel and step on CUDA, with stand-ins for its events."""

import argparse

import torch

from benchmarks import overlap, tools
from trainer import hardware


class Event:
    made = []

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made.append(self)

    def record(self):
        self.at = len(Event.made)

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


def test_kernels_are_timed_by_events_behind_a_write_that_empties_the_l2(monkeypatch):
    writes = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tools, "half_a_gigabyte", lambda: type("Buffer", (), {"zero_": lambda self: writes.append(1)})())
    monkeypatch.setattr(hardware, "synchronize", lambda device: writes.append("a wait within the call"))
    found = tools.two_phases(lambda: 1, lambda out: None, "cuda")()
    assert found == {"forward": 1e-3, "backward": 1e-3, "both": 2e-3} and writes == [1]


def test_a_gpus_memory_is_what_its_allocator_held(monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 350)
    assert tools.peak_bytes(lambda: None, device="cuda") == 250


def test_the_ceiling_multiplies_data_where_ones_would_draw_less_power_and_leaves_the_runs_random_numbers_alone(monkeypatch):
    seen, real = [], torch.randn

    def randn(*size, device, generator):
        seen.append(device)
        return real(8, 8, generator=generator)
    generator = torch.Generator
    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(hardware, "synchronize", lambda device: None)
    before = torch.get_rng_state()
    assert hardware.matmul_ceiling("cuda", torch.float32, seconds=0) > 0
    assert seen == ["cuda", "cuda"] and torch.equal(before, torch.get_rng_state())


def test_readiness_is_the_share_of_the_backward_pass():
    one = {"begin": 10.0, "end": 20.0, "ready": [(1, 11.0), (4, 16.0), (3, 19.0), (2, 20.0)]}
    assert overlap.readiness(one, lambda a, b: b - a) == {"first_ready": 0.1, "half_ready": 0.6}


def test_overlap_needs_two_processes(capsys):
    args = argparse.ArgumentParser()
    overlap.arguments(args)
    assert overlap.run(args.parse_args(["--device=cpu"])) == 2
    assert capsys.readouterr().out.startswith("bench.py overlap needs two processes or more: torchrun")


def test_the_first_error_is_quoted_and_not_what_torchrun_says_after_it():
    said = "W1118 a warning\n[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: no such thing\n" + 88 * "noise\n"
    assert tools.complaint(said) == "[rank0]: ValueError: no such thing"
    assert tools.complaint("error: batch_size=3: too small\nmore") == "error: batch_size=3: too small"
    assert tools.complaint("") == ""
