"""Trials in processes of their own: whatever happens to one is a row, and the sweep goes on."""

import json
import os
import subprocess

import pytest

import sweep
from configurator import Config, ConfigError
from sweeps import micro, trial
from tests.helpers import TINY

# stands in for trial.py where only what becomes of a process matters
FAKE = """
import json, os, signal, sys, time
spec = json.loads(sys.argv[1])
micro, here = spec["config"]["micro_batch_size"], os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "calls"), "a") as f:
    f.write(f"{micro} {spec['accum']} {os.getpid()}\\n")
if micro == 32:
    while not os.path.exists(os.path.join(here, "go")):
        time.sleep(0.05)
if micro == 3:
    os.kill(os.getpid(), signal.SIGSEGV)
if micro == 5:
    os.kill(os.getpid(), signal.SIGKILL)
if micro == 7:
    sys.exit("terminate called after throwing an instance of 'std::bad_alloc'")
if micro == 9:
    sys.exit("something else")
speed = 100.0 * min(micro, 4)
print(json.dumps({"status": "ok", "micro_step_ms": 1.0, "update_ms": 1.0, "tok_per_sec": speed, "tok_per_sec_micro": speed,
                  "ceiling": 0.5, "matmul_gflops": 1.0, "update_share": 0.5, "steps": 3, "warmup_s": 0.1, "peak": 10**6 * micro,
                  "peak_allocated": 10**6 * micro, "before": 1000, "gradient_bytes": 1000}))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(trial, "SCRIPT", str(script))

    def calls():
        return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    return calls


def saved(out, command="memory"):
    with open(os.path.join(out, "sweep", command, "sweep.json")) as f:
        return json.load(f)


def test_out_of_memory_under_a_limit_is_a_row_and_the_sweep_goes_on(tmp_path, tiny_args, capsys):
    code = sweep.main(["memory", "--micro_batches=16384,2", "--memory_limit=600M", "--seconds=0",
                       *tiny_args(out_dir=tmp_path, activation_checkpointing="none")])
    large, small = saved(tmp_path)["rows"]
    assert code == 0 and large["status"] == "out of memory" and "allocate" in large["why"]
    assert small["status"] == "ok" and 0 < small["before"] < small["peak"] < 600e6 and small["tok_per_sec"] > 0
    assert small["peak_allocated"] < small["peak"]
    result = saved(tmp_path)["result"]
    assert result["take"]["micro_batch_size"] == 2 and result["largest"] == {"none": 2}
    text = capsys.readouterr().out
    assert "Largest micro-batch: 2; 16384: out of memory." in text and "micro_batch_size = 2" in text
    assert "python sweep.py throughput" in text and os.path.exists(tmp_path / "sweep" / "memory" / "sweep.png")


def test_a_hang_a_crash_and_a_kill_are_rows_and_nothing_is_left_behind(tmp_path, tiny_args, fake):
    arguments = ["memory", "--micro_batches=1,32,3,5,7,9,4", "--timeout=4",
                 *tiny_args(out_dir=tmp_path, activation_checkpointing="none")]
    assert sweep.main(arguments) == 0
    rows = {r["micro_batch_size"]: r for r in saved(tmp_path)["rows"]}
    assert {m: r["status"] for m, r in rows.items()} == {
        1: "ok", 32: "timeout", 3: "failed", 5: "out of memory", 7: "out of memory", 9: "failed", 4: "ok"}
    assert "SIGSEGV" in rows[3]["why"] and "something else" in rows[9]["why"] and "4 s" in rows[32]["why"]
    hung = next(int(pid) for micro, _, pid in fake() if micro == "32")
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    before = len(fake())
    (tmp_path / "go").touch()
    assert sweep.main(arguments) == 0 and len(fake()) == before, "failed ones, too, are not tried again by themselves"
    assert sweep.main([*arguments, "--retry"]) == 0
    assert sorted(int(m) for m, _, _ in fake()[before:]) == [3, 5, 7, 9, 32]
    assert {r["micro_batch_size"]: r["status"] for r in saved(tmp_path)["rows"]}[32] == "ok"


def test_ctrl_c_ends_the_trial_and_the_same_command_goes_on(tmp_path, tiny_args, fake, monkeypatch, capsys):
    real, started = subprocess.Popen.communicate, []

    def interrupted(self, *args, **kwargs):
        started.extend([self] if trial.SCRIPT in self.args else [])
        if len(started) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    arguments = ["memory", "--micro_batches=1,32", *tiny_args(out_dir=tmp_path, activation_checkpointing="none")]
    assert sweep.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().out and started[1].poll() is not None
    assert [r["micro_batch_size"] for r in saved(tmp_path)["rows"]] == [1]
    monkeypatch.setattr(subprocess.Popen, "communicate", real)
    (tmp_path / "go").touch()
    assert sweep.main([*arguments[:1], "--micro_batches=1,32,4", *arguments[2:]]) == 0
    tried = [micro for micro, _, _ in fake()]
    assert tried.count("1") == 1 and tried[-2:] == ["32", "4"], "what is done is not done again"
    assert saved(tmp_path)["result"]["take"]["micro_batch_size"] == 4


def test_other_settings_are_not_mixed_with_old_rows(tmp_path, tiny_args, fake, capsys):
    common = dict(out_dir=tmp_path, activation_checkpointing="none")
    assert sweep.main(["memory", "--micro_batches=1", *tiny_args(**common)]) == 0
    for option, more in ((dict(n_layer=1), []), ({}, ["--memory_limit=2G"])):
        with pytest.raises(SystemExit) as e:
            sweep.main(["memory", "--micro_batches=1", *more, *tiny_args(**common, **option)])
        message = capsys.readouterr().err
        assert e.value.code == 2 and "is of other settings" in message and "another --out_dir" in message
        assert ("n_layer is 1, there it is 2" if option else "memory_limit is 2000000000, there it is None") in message
    assert len(fake()) == 1 and len(saved(tmp_path)["rows"]) == 1
    assert sweep.main(["memory", "--micro_batches=1,2", *tiny_args(**common, learning_rate=1)]) == 0, "no matter to a trial"
    assert len(fake()) == 2


def test_throughput_goes_on_with_what_memory_found(tmp_path, tiny_args, fake, capsys):
    args = tiny_args(out_dir=tmp_path, batch_size_start=8)
    args = [a for a in args if not a.startswith("--micro_batch_size=")]  # 8, by default
    assert sweep.main(["throughput", "--dry_run", *args]) == 0
    assert "micro-batch 8, from the config: there is no finished sweep.py memory" in capsys.readouterr().out
    assert sweep.main(["memory", "--dry_run", "--max_micro_batch=8", *args]) == 0
    assert "would try micro-batches 1, 2, 4, 8 until one does not fit" in capsys.readouterr().out
    assert not (tmp_path / "calls").exists() and not (tmp_path / "sweep").exists()
    assert sweep.main(["memory", "--micro_batches=1,4,6", *args]) == 0
    assert [r["activation_checkpointing"] for r in saved(tmp_path)["rows"]] == ["none"] * 3 + ["block"] * 3
    assert sweep.main(["throughput", *args]) == 0
    assert [(r["micro_batch_size"], r["accum"]) for r in saved(tmp_path, "throughput")["rows"]] == [
        (4, 1), (4, 2), (4, 4), (4, 8), (4, 16)]
    text = capsys.readouterr().out
    assert "Memory of tensors does not grow with accumulation" in text and "python sweep.py quality" in text
    assert sweep.main(["throughput", "--dry_run", *args, "--micro_batch_size=2"]) == 0
    assert "micro-batch 2, as given" in capsys.readouterr().out
    os.remove(tmp_path / "sweep" / "throughput" / "sweep.json")
    assert sweep.main(["throughput", "--dry_run", *args, "--n_layer=1"]) == 0
    assert "micro-batch 8, from the config" in (text := capsys.readouterr().out) and "of other settings (n_layer)" in text


def test_a_trial_does_the_steps_of_a_run(tiny_data):
    """In this process; 2 micro-batches of 4, measured three times."""
    config = Config(**{**TINY, "dataset": tiny_data, "batch_schedule": "constant", "batch_size": 8, "grad_stats": True})
    row = trial.measure({"config": json.loads(json.dumps(vars(config))), "accum": 2, "seconds": 0, "memory_limit": None,
                         "timeout": 60})
    step = (2 * row["micro_step_ms"] + row["update_ms"]) / 1e3
    assert row["tok_per_sec"] == pytest.approx(2 * 4 * 16 / step) and row["steps"] == trial.MIN_STEPS
    assert row["update_share"] == pytest.approx(row["update_ms"] / 1e3 / step)
    assert row["gradient_bytes"] < row["peak_allocated"] < row["peak"] and 0 < row["ceiling"] < 1


# -- the search and what is made of it

def machine(limit, best):
    """A make-believe machine: memory for `limit` sequences, speed that levels off at `best`."""
    tried = []

    def measure(m):
        tried.append(m)
        if m > limit:
            return {"micro_batch_size": m, "status": "out of memory", "why": ""}
        return {"micro_batch_size": m, "status": "ok", "tok_per_sec_micro": 100 * min(m, best) - m, "peak": m}
    return measure, tried


@pytest.mark.parametrize("limit, best, expected", [
    (1, 1, [1, 2]), (21, 4, [1, 2, 4, 8, 16, 32, 24, 20, 22, 3, 6]), (100, 64, [1, 2, 4, 8, 16, 32, 64, 128, 96, 112, 104, 48]),
    (1000, 12, [1, 2, 4, 8, 16, 32, 64, 128, 12, 24])])
def test_the_search_finds_the_frontier_and_looks_around_the_fastest(limit, best, expected):
    measure, tried = machine(limit, best)
    micro.search(measure, 128)
    assert tried == expected
    if limit < 128:
        fits = max(m for m in tried if m <= limit)
        assert limit - fits <= max(1, fits // 8)


def test_what_goes_wrong_is_told_without_the_folders_of_this_machine():
    assert trial.without_folders("Failed to import /tmp/x_1/5n/abc.py (see a/b.py)") == "Failed to import abc.py (see a/b.py)"
    assert trial.without_folders("tried 3 / 4 of it") == "tried 3 / 4 of it"


def test_running_out_of_memory_is_seen_behind_other_errors(monkeypatch, capsys):
    def measure(spec):
        try:
            raise OSError(12, "Cannot allocate memory")
        except OSError as e:
            raise RuntimeError("Failed to import c5n.py") from e
    monkeypatch.setattr(trial, "measure", measure)
    monkeypatch.setattr(trial.signal, "alarm", lambda seconds: None)
    assert trial.main([json.dumps({"timeout": 10})]) == 0
    assert json.loads(capsys.readouterr().out) == {"status": "out of memory", "why": "RuntimeError: Failed to import c5n.py"}


def rows_of(*specs):
    return [{"micro_batch_size": m, "accum": 1, "activation_checkpointing": c, "compile": False, "status": "ok", "peak": peak,
             "tok_per_sec_micro": speed, "micro_step_ms": 1.0} for m, c, speed, peak in specs]


def test_it_takes_the_smallest_micro_batch_within_reach_of_the_best_speed():
    args = sweep.argparse.Namespace(config=None, rest=[])
    rows = rows_of((2, "none", 80.0, 20), (4, "none", 97.5, 30), (8, "none", 100.0, 60), (4, "block", 98.0, 25),
                   (2, "block", 60.0, 22))
    result = micro.memory_result(rows, 0.03, args)
    assert result["take"] == {"micro_batch_size": 4, "activation_checkpointing": "none", "compile": "False"}
    assert micro.memory_result(rows, 0.01, args)["take"]["micro_batch_size"] == 8
    nothing = [{**rows[0], "status": "out of memory", "why": ""}]
    assert micro.memory_result(nothing, 0.03, args)["take"] is None


def test_compile_is_tried_at_half_the_micro_batch_where_the_fastest_leaves_no_room_for_it(monkeypatch, capsys):
    class Trials:
        within, limit, config, path = 0.03, None, sweep.argparse.Namespace(compile="auto", activation_checkpointing="none"), ""
        rows = []

        def __init__(self, *_, **__):
            pass

        def __call__(self, micro, checkpointing="none", compile=False):
            row, = rows_of((micro, checkpointing, 10.0 * micro, 1))
            fits = micro <= (3 if compile else 4)
            row |= {"compile": compile, "status": "ok" if fits else "failed", "why": "no room"}
            if row not in self.rows:
                self.rows.append(row)
            return row

        def finish(self, result, table, draw):
            print(*result["says"])
            return 0

    monkeypatch.setattr(micro, "Trials", Trials)
    monkeypatch.setattr(micro, "memory_table", lambda *_: "")
    args = sweep.argparse.Namespace(max_micro_batch="4", micro_batches=None, dry_run=False, config=None,
                                    rest=["--activation_checkpointing=none"])
    assert micro.memory_sweep(args) == 0
    tried = [(r["micro_batch_size"], r["status"]) for r in Trials.rows if r["compile"]]
    assert tried == [(4, "failed"), (2, "ok")]
    assert "torch.compile at its best (micro-batch 2): 0.50 times the best speed without" in capsys.readouterr().out


def test_a_trial_has_one_speed_the_one_that_its_command_goes_by():
    row, = rows_of((4, "none", 100.0, 20))
    row |= {"tok_per_sec": 80.0, "update_ms": 1.0, "update_share": 0.2, "peak_allocated": None}
    assert "80 tok/s" in micro.in_words(row, "tok_per_sec") and " 80 " in micro.throughput_table([row])
    assert "100 tok/s" in micro.in_words(row, "tok_per_sec_micro")
    assert " 100 " in micro.memory_table([row | {"ceiling": 0.5}])


@pytest.mark.parametrize("peaks, grows", [((100, 110, 110, 110), False), ((100, 110, 111, 112), False),
                                          ((100, 110, 115, 120), True), ((100, 130, 130, 130), True)])
def test_growing_memory_is_noticed(peaks, grows):
    """A gradient of 10: the second micro-batch may cost that, no more."""
    rows = [{"accum": 2**i, "peak": 1e9, "peak_allocated": p * 10**6, "gradient_bytes": 10**7} for i, p in enumerate(peaks)]
    found = micro.memory_grows(rows)
    assert found["grows"] is grows and ("does not grow" in found["says"]) is not grows


@pytest.mark.parametrize("text, found", [
    ("4G", 4 * 10**9), ("500M", 5 * 10**8), ("2.5GB", 25 * 10**8), ("1000", 1000), ("8k", 8000)])
def test_sizes_in_bytes(text, found):
    assert micro.parse_bytes(text) == found


@pytest.mark.parametrize("arguments, words", [
    (["memory", "--memory_limit=lots"], "--memory_limit=lots: expected a number of bytes such as 4G"),
    (["memory", "--memory_limit=0"], "--memory_limit=0"), (["memory", "--timeout=soon"], "--timeout=soon: expected a number"),
    (["memory", "--micro_batches=1,x"], "--micro_batches=1,x: expected whole numbers"),
    (["memory", "--max_micro_batch=0"], "--max_micro_batch=0: expected a whole number of at least 1"),
    (["memory", "--micro_batch=4"], "unknown key 'micro_batch': did you mean micro_batch_size"),
    (["throughput", "--dataset=nowhere"], "dataset='nowhere'"),
    (["memory", "config/wikitext.py"], "did you mean config/wikitext2.py"),
    (["quality", "--steps=1"], "--steps=1: expected a whole number of at least 4"),
    (["quality", "--accumulations=1"], "--accumulations=1: nothing to compare"), (["speed"], "invalid choice: 'speed'"),
    (["quality", "--jobs=0"], "--jobs=0"), (["runs", "--batch_size=8,,16"], "--batch_size=8,,16: an empty value"),
    (["runs", "--batch_size=8,x"], "batch_size='x' must be a whole"), (["runs", "--batchsize=8"], "unknown key 'batchsize'"),
    (["runs", "--out_dir=a,b"], "out_dir is one for the whole sweep"), (["runs", "--jobs=two"], "--jobs=two"),
    (["runs", "--batch_size=8,12", "--batch_schedule=constant"], "batch_size=12: is not a multiple of micro_batch_size=8"),
    (["branch", "out/none", "--at", "1k", "--seed=1"], "--seed=1: unknown option of branch")])
def test_wrong_input_is_one_line_with_exit_code_2(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "run", None)
    with pytest.raises(SystemExit) as e:
        sweep.main(arguments)
    message = capsys.readouterr().err
    assert e.value.code == 2 and words in message and message.count("\n") == 1


def test_a_damaged_sweep_json_is_one_line(tmp_path):
    (tmp_path / "sweep.json").write_text('{"rows": [')
    with pytest.raises(ConfigError, match="not readable .*remove it to start anew"):
        micro.earlier_rows(str(tmp_path / "sweep.json"), {})
