"""Runs in wandb: read back from its offline files, in its own record format, and from a server that speaks its protocol."""

import glob
import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest

from tests.helpers import ROOT, TINY, run_script
from tests.wandb_server import serve, steps
from trainer import log, log_keys, wandb_log

KEY = 40 * "k"


def records(path):
    """wandb's own records: LevelDB log framing behind a 7-byte header."""
    from wandb.proto import wandb_internal_pb2
    with open(path, "rb") as f:
        data = f.read()
    position, joined = 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position:position + 7])
        joined += data[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            joined = b""
            yield record


def read_back(out):
    """All offline folders of a run, as one."""
    def values(items):
        return {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}
    found = {"history": [], "summary": {}, "config": {}, "metrics": {}}
    for path in sorted(glob.glob(str(out / "wandb" / "offline-run-*" / "run-*.wandb"))):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                found["history"].append(values(record.history.item))
            elif kind == "summary":
                found["summary"] |= values(record.summary.update)
            elif kind == "run":
                found["run"], found["config"] = record.run, found["config"] | values(record.run.config.update)
            elif kind == "metric":
                found["metrics"][record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return found


@pytest.fixture(scope="module")
def nobody(tmp_path_factory):
    """The environment of a user without a key."""
    home = tmp_path_factory.mktemp("home")
    return {"WANDB_API_KEY": "", "NETRC": str(home / "netrc"),
            **{f"WANDB_{name}_DIR": str(home) for name in ("CONFIG", "CACHE", "DATA")}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_data, nobody):
    """(folder, what it said) of a finished offline run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    keys = {"dataset": tiny_data, **TINY, "out_dir": out, "wandb_log": True, "max_tokens": 12_800, "wandb_tags": "a, b",
            "wandb_group": "g", "wandb_notes": "a note, with a comma", "wandb_job_type": "test", "wandb_entity": "team"}
    result = run_script(*(f"--{k}={v}" for k, v in keys.items()), env=nobody)
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_a_finished_offline_run_has_sections_axes_config_summary_and_media(finished):
    out, said = finished
    said = [line for line in said.splitlines() if line.startswith("wandb:")]
    assert len(said) == 2 and "offline (no key" in said[0] and all("sync " in line for line in said)
    found, rows = read_back(out), log.read(out)

    run = found["run"]
    assert (run.project, run.display_name, run.run_group, list(run.tags), run.notes, run.job_type, run.entity) == (
        "rightbatch", "run", "g", ["a", "b"], "a note, with a comma", "test", "team")
    facts = json.load(open(out / "config.json"))
    assert found["config"]["dtype"] == "float32" and found["config"]["device"] == facts["device"]
    assert {key: found["config"][key] for key in ("parameters", "commit", "data")} == {
        key: facts[key] for key in ("parameters", "commit", "data")}
    assert found["config"]["schedule"]["batch"] == "linear: 4 to 16 sequences, 64 to 256 tokens"

    assert [h["_step"] for h in found["history"]] == list(range(rows[-1]["step"] + 1)), "each step once"
    expected = {}  # a step's rows are one in wandb
    for row in rows:
        expected.setdefault(row["step"], {}).update(wandb_log.values_of(row, 16))
    assert [{k: v for k, v in h.items() if not k.startswith(("_", "report/"))} for h in found["history"]] == list(
        expected.values())
    keys = {key for h in found["history"] for key in h if not key.startswith("_")}
    sections = {key.split("/")[0] for key in keys}
    assert sections == {"tokens", "train", "val", "batch", "gns", "step_time", "detail", "report"}
    assert {k for k in keys if k.startswith("gns/")} == {"gns/noise_scale", "gns/noise_scale_low", "gns/noise_scale_high"}
    assert {"batch/sequences", "batch/tokens"} <= keys and any(k.startswith("detail/gns/norm_adam") for k in keys)
    assert all(found["metrics"][f"{section}/*"] == "tokens" for section in ("train", "val", "batch", "gns", "detail"))

    end, val = found["history"][-1], [r["val/loss"] for r in rows if "val/loss" in r]
    summary = found["summary"]
    assert (summary["val_loss_best"], summary["val_loss_final"]) == (min(val), val[-1])
    assert (summary["tokens"], summary["steps"]) == (rows[-1]["tokens"], rows[-1]["step"]) and summary["hours"] > 0
    assert summary["noise_scale_low"] < summary["noise_scale"] < summary["noise_scale_high"]
    assert summary["right_batch_for_time"] >= summary["right_batch_for_tokens"] == 4
    assert not any(key.startswith("detail/") for key in summary)
    files = os.path.join(glob.glob(str(out / "wandb" / "offline-run-*"))[0], "files")
    assert os.path.getsize(os.path.join(files, end["report/picture/path"])) == os.path.getsize(out / "report.png")
    with open(os.path.join(files, end["report/closing_words/path"])) as f:
        assert "Trained on 12.9k tokens in 98 steps" in f.read()


class Killed:
    """A run that is started again and again, and killed once `enough(out)`."""

    def __init__(self, arguments, env, out):
        self.command = [sys.executable, os.path.join(ROOT, "train.py"), *arguments, "--resume=auto"]
        self.env, self.out = {**os.environ, "OMP_NUM_THREADS": "1", **env}, out

    def start(self):
        return subprocess.Popen(self.command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def until(self, enough):
        process = self.start()
        while process.poll() is None and not enough():
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"

    def newest(self):
        """Step and tokens of the newest row, which may be torn."""
        try:
            row = log.read(self.out)[-1]
            return row["step"], row["tokens"]
        except (OSError, IndexError):
            return 0, 0

    def finish(self, more):
        """To the end, which is so many tokens away."""
        self.command.append(f"--stop_tokens={self.newest()[1] + more}")
        done = subprocess.run(self.command, env=self.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout


LONG = dict(wandb_log=True, max_tokens=10_000_000, eval_tokens=5_000_000, checkpoint_tokens=2500, gns_calibrate=False)


def test_after_two_kills_an_offline_run_is_one_whole_run_and_syncs_with_the_printed_command(tmp_path, tiny_args, nobody):
    out = tmp_path / "run"
    run = Killed(tiny_args(out_dir=out, **LONG), nobody, out)
    for _ in range(2):
        before = run.newest()[0]
        run.until(lambda: run.newest()[0] > before + 60)
    said = run.finish(2000)
    expected = [row["step"] for row in log.read(out)]
    assert expected == sorted(expected) and expected[-1] > 120
    expected = sorted(set(expected))
    assert [h["_step"] for h in read_back(out)["history"]] == expected, "no step twice, none missing"
    printed = next(line for line in said.splitlines() if line.startswith("wandb: offline"))
    command = shlex.split(printed.split("send the run: ")[1])
    command = [sys.executable, "-m", "wandb", *command[-2:]] if command[0] == "wandb" else command
    with serve() as server:
        for _ in range(2):  # and nothing changes when it is sent once more
            synced = subprocess.run([*command, "--include-synced"], env={**os.environ, **nobody, "WANDB_BASE_URL": server.url,
                                                                         "WANDB_API_KEY": KEY}, capture_output=True, text=True)
            assert synced.returncode == 0 and "Finished syncing" in synced.stderr, synced.stderr
        (run_on_server,) = server.runs.values()
    assert steps(run_on_server) == expected
    assert {name.split("/")[1] for name in run_on_server["uploads"] if name.startswith("media/")} == {"html", "images"}


def test_online_the_server_gets_what_it_lacks_and_nothing_that_it_has(tmp_path, tiny_args, nobody):
    out = tmp_path / "run"
    with serve() as server:
        env = {**nobody, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}

        def train(tokens, resume):
            done = run_script(*tiny_args(out_dir=out, wandb_log=True, stop_tokens=tokens, resume=resume), env=env)
            assert done.returncode == 0 and f"wandb: {server.url}" in done.stdout and "offline" not in done.stdout, done.stderr
            (only,) = server.runs.values()
            assert steps(only) == sorted({row["step"] for row in log.read(out)}), "each step once"
            return only, done.stdout
        run, _ = train(1280, "False")
        run["files"]["wandb-history.jsonl"][-8:] = []  # as if killed before they were sent
        run["files"]["wandb-summary.json"] = [run["files"]["wandb-history.jsonl"][-1]]
        lacks = steps(run)[-1]
        train(1920, "True")
        newest = steps(run)[-1]
        (out / "ckpt.pt").write_bytes(b"")  # as if killed before it was written: the run goes back to the one before
        _, said = train(2560, "True")
        assert "they are written again" in said and lacks < newest < steps(run)[-1]
        summary = json.loads(run["files"]["wandb-summary.json"][-1])
        assert summary["tokens"] == log.read(out)[-1]["tokens"]


WATCHED = """
import json, os, signal, subprocess, sys, urllib.request
sys.path.insert(0, {root!r})
import train
from trainer import run, wandb_log
wandb_log.FINISH_TIMEOUT, wandb_log.PATIENCE = 4, 0.5
show, victim = run.Run.show, sys.argv.pop(1)
def shown(self, *numbers):
    show(self, *numbers)
    if self.count.step == 5 and victim == "service":
        listed = subprocess.run(["ps", "-o", "pid,args", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
        for line in listed.splitlines():
            if "wandb-core" in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)
    if self.count.step == 5 and victim == "server":
        urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/die").close()
run.Run.show = shown
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("victim", ["service", "server"])
def test_a_run_outlives_wandb_and_says_how_to_send_what_it_lacks(tmp_path, tiny_args, nobody, victim):
    out = tmp_path / "run"
    with serve() as server:
        env = {**os.environ, **nobody, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WATCHED.format(root=ROOT), victim, *tiny_args(out_dir=out, wandb_log=True)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        runs = server.runs
    assert done.returncode == 0 and "Traceback" not in done.stderr and log.read(out)[-1]["tokens"] >= 3200, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("wandb:")]
    assert said[-1] == f"wandb: the upload is incomplete; to send the rest: python -m trainer.wandb_log {out}"
    assert ("wandb: waiting for the last upload, at most 4 s" in said) == (victim == "server")
    with serve() as server:
        server.runs = runs
        sent = subprocess.run([sys.executable, "-m", "trainer.wandb_log", str(out)], cwd=ROOT, capture_output=True, text=True,
                              env={**env, "WANDB_BASE_URL": server.url}, timeout=300)
        assert sent.returncode == 0 and "incomplete" not in sent.stdout, sent.stderr
        (only,) = server.runs.values()
        assert steps(only) == sorted({row["step"] for row in log.read(out)}), "each step once"


ASK = """
import json, os, sys
sys.path.insert(0, {root!r})
import wandb
from trainer import wandb_log
for case in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:  # wandb reads the environment once
        os.environ.update(case)
        print(json.dumps(wandb_log.where_to(wandb)), flush=True)
        os._exit(0)
    os.wait()
"""
LOGIN = "import wandb; wandb.login(key={key!r}, verify=False)"


def test_the_key_that_wandb_login_stored_is_found_and_it_never_asks(tmp_path, nobody):
    """netrc files written by wandb's own login, for its own server and for another."""
    env = {**os.environ, **nobody}
    env.pop("WANDB_API_KEY")
    for name, more in (("own", {}), ("other", {"WANDB_BASE_URL": "https://wandb.example.com"})):
        subprocess.run([sys.executable, "-c", LOGIN.format(key=KEY)], check=True, capture_output=True, timeout=60,
                       env={**env, "NETRC": str(tmp_path / name), "WANDB_CONFIG_DIR": str(tmp_path / f"config_{name}"), **more})
    own, other = ({"NETRC": str(tmp_path / name)} for name in ("own", "other"))
    at_other = {"WANDB_BASE_URL": "https://wandb.example.com"}
    cases = [({}, "offline", "no key"), (own, "online", ""), ({"WANDB_API_KEY": KEY}, "online", ""),
             (other, "offline", "no key"), (own | at_other, "offline", "no key"), (other | at_other, "online", ""),
             ({"WANDB_API_KEY": "short"}, "offline", "WANDB_API_KEY"),
             (own | {"WANDB_MODE": "offline"}, "offline", "asked for")]
    done = subprocess.run([sys.executable, "-c", ASK.format(root=ROOT), json.dumps([case for case, *_ in cases])], env=env,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases), done.stderr
    for (case, mode, why), (got, reason) in zip(cases, answers):
        assert got == mode and why in reason, (case, got, reason)


def test_a_run_is_sent_afterwards_and_is_offline_where_the_server_does_not_answer(finished, tmp_path, nobody):
    out = shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns("wandb"))
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from trainer import wandb_log; wandb_log.INIT_TIMEOUT = 1; " \
           f"wandb_log.main([{str(out)!r}])"
    env = {**os.environ, **nobody, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    for _ in range(2):  # the second replaces the first
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "wandb: offline (" in done.stdout and "no key" not in done.stdout, done.stderr
        assert len(glob.glob(str(out / "wandb" / "offline-run-*"))) == 1
        time.sleep(1)  # wandb's folders are named by the second
    found = read_back(out)
    assert [h["_step"] for h in found["history"]] == sorted({row["step"] for row in log.read(out)})
    assert "report/picture/path" in found["history"][-1]


def test_every_key_of_the_table_has_one_name_in_wandb_and_few_are_outside_detail():
    names = [log_keys.in_wandb(key) for key, *_ in log_keys.KEYS if "{" not in key] + list(log_keys.WANDB.values())
    assert all(log_keys.rows_of(key) for key in log_keys.WANDB), "of keys that exist"
    named = [name for name in log_keys.WANDB.values() if name]
    assert len(set(named)) == len(named) and {name.split("/")[0] for name in named if "/" in name} == {
        "train", "val", "batch", "gns", "step_time"}
    assert all(name is None or name in named or name.startswith("detail/") for name in names)
    assert log_keys.in_wandb("gns/block_3_sq_norm") == "detail/gns/block_3_sq_norm"


def test_two_events_of_a_step_are_both_told():
    sent = []
    own = object.__new__(wandb_log.WandbLog)
    own.config, own.step, own.values, own.sent = type("C", (), {"block_size": 4}), None, {}, -1
    own.run = type("R", (), {"log": lambda self, values, **how: sent.append((how["step"], values))})()
    for row in ({"step": 1, "tokens": 4, "event": "one"}, {"step": 1, "tokens": 4, "event": "two"},
                {"step": 1, "tokens": 8, "train/loss": 2.0, "batch_size": 3}, {"step": 2, "tokens": 12}):
        own.write(row)
    assert sent == [(1, {"tokens": 8, "train/event": "one; two", "train/loss": 2.0, "batch/sequences": 3, "batch/tokens": 12})]
