"""Cases of the attack that come from around a run: its disks, its other processes, the commands that prepare and read."""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

from harness import DEADLY, TEXTS, Harness, deadly, flip, refusal, result, same

MEGABYTE = 1 << 20
HOSTILE = [None, 0, -1, 1, 2, 0.5, 1e300, -1e300, 10**20, 2**62, True, "x", [], {}]  # for a value of a JSON file


class Around(Harness):
    # -- disks

    @contextlib.contextmanager
    def disk(self, size):
        """A file system of so many bytes of its own; None where we may not mount one."""
        self.number += 1
        path = os.path.join(self.work, f"disk-{self.number}")
        os.mkdir(path)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
        try:
            yield path if mounted.returncode == 0 else None
        finally:
            if mounted.returncode == 0:
                subprocess.run(["umount", "-l", path], check=True)

    @staticmethod
    def remount(path, options):
        subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)

    def small_disks(self):
        """A run, fresh or resumed, on a disk that is too small: refused by name, nothing left over; then on, with more room."""
        with self.disk(MEGABYTE) as disk:
            if not disk:
                return None
            out = os.path.join(disk, "run")
            if self.rng.random() < 0.5:
                shutil.copytree(self.stopped, out)
            used = sum(os.path.getsize(os.path.join(d, f)) + 4096 for d, _, names in os.walk(disk) for f in names)
            self.remount(disk, f"size={used + self.rng.randint(1, 300) * 1000}")
            child = self.train(out)
            child.wait()
            if child.code != 0:
                bad = refusal(child) or left_over(out)
                if not bad and disk not in child.error():
                    bad = f"names no file: {child.error()[-150:]!r}"
                if bad:
                    return "failed", bad
            self.remount(disk, "size=16m")
            return self.resumed(out)

    def read_only(self):
        """A disk that cannot be written to, or a folder that is another file: data is read from it, a run on it is refused."""
        with self.disk(16 * MEGABYTE) as disk:
            if not disk:
                return None
            what = self.rng.choice(["data", "run", "new run", "reader", "cache"])
            out = os.path.join(disk, "run")
            shutil.copytree(self.whole if what == "reader" else self.stopped, out)
            data = shutil.copytree(self.data, os.path.join(disk, "data"))
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(data, "verified.json"))
            self.remount(disk, "ro")
            if what == "reader":
                asked = [("sample", "--tokens=5"), ("whatif", "--json=-"), ("whatif",), ("plot",), ("export", "--hf")]
                name, *options = self.rng.choice(self.possible(asked))
                child = self.command(name, out, *options)
                child.wait()
            elif what == "data":
                fresh = self.folder()
                return self.outcome(self.train(fresh, dataset=data), fresh)
            elif what == "cache":
                fresh = self.folder()
                return self.outcome(self.train(fresh, env={"RIGHTBATCH_CACHE": os.path.join(disk, "cache")}), fresh)
            else:
                child = self.train(out if what == "run" else os.path.join(disk, "a", "b"))
                child.wait()
            if child.code == 0:
                return ("survived", "") if what == "reader" else ("failed", "it trained on a disk that cannot be written to")
            bad = refusal(child)
            if not bad and disk not in child.error():
                bad = f"names no file: {child.error()[-150:]!r}"
            return ("failed", f"{what}: {bad}") if bad else ("refused", "")

    def limits(self):
        """Few open files, or short ones: one line, and then on to the end without the limit."""
        out, kind = self.folder(self.stopped if self.rng.random() < 0.5 else None), self.rng.choice(["NOFILE", "FSIZE"])
        limit = self.rng.randint(6, 30) if kind == "NOFILE" else self.rng.randint(1000, 100_000)

        def prepare():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
        child = self.train(out, prepare)
        child.wait()
        if child.code != 0 and (bad := refusal(child) or left_over(out)):
            return "failed", f"{kind} {limit}: {bad}"
        if child.has_no_kernel():  # its file could not be opened
            return "refused", "another kernel"
        return self.resumed(out)

    # -- other processes

    def ranks(self, out, **changes):
        """Two processes of one run, as torchrun starts them."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [self.train(out, micro_batch_size=2, env={**env, "RANK": rank, "LOCAL_RANK": rank}, **changes) for rank in "01"]

    def of_two_ranks(self, parallel="ddp"):
        """What a run of two processes gives without an attack."""
        known = self.__dict__.setdefault("pair_references", {})
        if parallel not in known:
            out = self.folder()
            children = self.ranks(out, parallel=parallel)
            assert [child.wait() for child in children] == [0, 0], "two processes without an attack"
            known[parallel] = result(out)
        return known[parallel]

    def kills_of_a_rank(self):
        """One process of two is killed: the other ends in words; both go on to the end."""
        parallel = self.rng.choice(["ddp", "fsdp"])
        reference, out = self.of_two_ranks(parallel), self.folder()
        children = self.ranks(out, parallel=parallel)
        self.wait_for_log(children[0], out)
        time.sleep(self.rng.uniform(0, 1))
        killed, other = self.rng.sample(children, 2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(killed.pid, signal.SIGKILL)
        codes = [child.wait() for child in (killed, other)]
        text = other.error()
        if codes[1] is None or "Traceback" in text or (codes == [-signal.SIGKILL, 1] and "goes on from the last" not in text):
            return "failed", f"the other rank: exit {codes[1]}: {text[-300:]!r}"
        again = self.ranks(out, parallel=parallel)
        again[1].wait()
        outcome, why = self.outcome(again[0], out, reference)
        return outcome, why and f"{parallel}: {why}"

    def pairs_of_ranks(self):
        """Two starts of two processes each into one folder: one of them runs."""
        reference, out = self.of_two_ranks(), self.folder()
        both = [self.ranks(out)]
        time.sleep(self.rng.choice([0, 0.3]))
        both.append(self.ranks(out))
        codes = [[child.wait() for child in children] for children in both]
        if sorted(codes) != [[0, 0], [2, 2]]:
            return "failed", f"{codes}: {[c.error()[-150:] for children in both for c in children]}"
        refused = both[codes.index([2, 2])][0].error()
        if "Traceback" in refused or "in use by process" not in refused:
            return "failed", refused[-300:]
        return ("survived", "") if same(result(out), reference) else ("failed", "a mix of two runs")

    # -- files that change under a run

    def meddling(self):
        """Somebody removes, cuts, replaces or edits files of a living run."""
        out = self.folder()
        child = self.train(out)
        log = self.wait_for_log(child, out, 1000)
        time.sleep(self.rng.uniform(0, 0.3))
        how, path = self.rng.choice(["remove", "cut", "empty", "replace", "append"]), log
        if self.rng.random() < 0.3:
            path, how = os.path.join(out, self.rng.choice(["ckpt.pt", "ckpt.1.pt", "config.json", "lock"])), "remove"
        with contextlib.suppress(FileNotFoundError):
            if how in ("remove", "replace"):
                os.unlink(path)
            if how in ("cut", "empty"):
                os.truncate(path, 0 if how == "empty" else os.path.getsize(path) // 2)
            if how in ("replace", "append"):
                with open(path, "ab") as f:
                    f.write(self.rng.choice(TEXTS))
        if ended(child):  # nobody could have noticed
            return None
        outcome, why = self.outcome(child, out)
        if "is not the log that" in why:  # it came behind the run's last look: whoever reads the log is told
            return "refused", ""
        return outcome, why

    def meddling_with_data(self):
        """Somebody writes into the data of a living run, cuts them, replaces them, or changes their rights."""
        out, data = self.folder(), self.folder(self.data)
        child = self.train(out, dataset=data)
        self.wait_for_log(child, out, 1000)
        time.sleep(self.rng.uniform(0, 0.3))
        path = os.path.join(data, self.rng.choice(["train.bin", "val.bin"]))
        how = self.rng.choice(["write", "cut", "replace", "chmod"])
        if how == "write":
            with open(path, "r+b") as f:
                f.write(bytes(self.rng.randrange(64) for _ in range(self.rng.choice([1, 500]))))
        elif how == "cut":
            os.truncate(path, self.rng.choice([0, 100]))
        elif how == "replace":
            put(os.path.join(self.data, "meta.json"), path + ".new")
            os.replace(path + ".new", path)
        else:
            os.chmod(path, 0o600)
        if ended(child):
            return None
        outcome, why = self.outcome(child, out)
        if outcome == "refused" and how in ("replace", "chmod"):
            return "failed", f"{how}: it need not have ended"
        return outcome, why and f"{how}: {why}"

    def swapped(self):
        """Files of one run in the folder of another, and one's own in each other's places."""
        if not hasattr(self, "other"):
            self.other = self.folder()
            assert self.train(self.other, seed=5, stop_tokens=3200).wait() == 0
        out, kind = self.folder(self.stopped), self.rng.choice(["foreign", "foreign", "own", "data", "twice"])
        names = ["ckpt.pt", "ckpt.1.pt", "ckpt.best.pt", "log.jsonl", "config.json", "step_time.json"]
        if kind == "foreign":
            for name in self.rng.sample(names, self.rng.randint(1, 3)):
                put(os.path.join(self.other, name), os.path.join(out, name))
        elif kind == "own":
            there = [name for name in names[:3] if os.path.exists(os.path.join(out, name))]
            if len(there) > 1:
                a, b = (os.path.join(out, name) for name in self.rng.sample(there, 2))
                os.rename(a, out + ".swap")
                os.rename(b, a)
                os.rename(out + ".swap", b)
        elif kind == "twice":  # damaged, resumed for a while, damaged again
            for stop in (4000, 5000):
                with open(os.path.join(out, "log.jsonl"), "r+b") as f:
                    f.seek(self.rng.randrange(1000))
                    f.write(b"garbage")
                child = self.train(out, stop_tokens=stop)
                child.wait()
                if child.code != 0 and (bad := refusal(child)):
                    return "failed", bad
            if sum(name.startswith("log.jsonl.damaged") for name in os.listdir(out)) != 2:
                return "failed", f"a damaged log is gone: {sorted(os.listdir(out))}"
        else:
            return self.other_data(out)
        return self.outcome(self.train(out, seed=0), out)  # typed, or it would be taken from the other run's config.json

    def other_data(self, out):
        """A resume under data that are no longer what they were."""
        path = os.path.join(self.data, "meta.json")
        with open(path) as f:
            meta = f.read()
        key, value = self.rng.choice([("vocab_size", 100), ("vocab_size", 63), ("dtype", "int8"), ("tokenizer", "gpt2"),
                                      ("val_tokens", 999), ("val_sha256", json.loads(meta)["train_sha256"])])
        try:
            with open(path, "w") as f:
                json.dump({**json.loads(meta), key: value}, f)
            outcome, why = self.outcome(self.train(out), out)
            return outcome, why and f"{key} is {value}: {why}"
        finally:
            with open(path, "w") as f:
                f.write(meta)

    def edited(self):
        """A checkpoint that somebody changed, with a checksum that fits: no traceback, no hang. Weights are his to choose."""
        import torch

        from trainer import checkpoint
        out = self.folder(self.stopped)
        state = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)
        for _ in range(self.rng.randint(1, 3)):
            where, depth = state, self.rng.randint(0, 3)
            while depth and isinstance(where, dict) and (inner := [v for v in where.values() if isinstance(v, dict) and v]):
                where, depth = self.rng.choice(inner), depth - 1
            key = self.rng.choice(list(where) or ["new"])
            if self.rng.random() < 0.3:
                where.pop(key, None)
            else:
                where[key] = self.rng.choice([*HOSTILE, torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
        state.pop("format", None)
        for name in ("ckpt.pt", "ckpt.1.pt", "ckpt.best.pt"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(out, name))
        checkpoint.save(out, state)
        asked = [("sample", out, "--tokens=5", "--prompt=\x01"), ("export", out, f"--hf={out}-exported"),
                 ("export", out, f"--hf={out}-exported", "--newest"), ("train", out), ("train", out, "--eval"),
                 ("sweep", "branch", out, "--at", "3200", "--dry_run")]
        words = self.rng.choice(self.possible(asked))
        child = self.command(*words) if self.rng.random() < 0.6 else self.train(out)
        child.wait()
        if child.code in (0, 1) and "Traceback" not in child.error():
            return "survived", ""
        return ("failed", f"{words[0]}, or a resume: {bad}") if (bad := refusal(child)) else ("refused", "")

    # -- the commands around

    def kills_in_preparation(self):
        """prepare.py killed inside its writes, over an older dataset or none: what is there is whole, or counts as nothing."""
        from data import tokens
        if not hasattr(self, "texts"):
            self.texts = [self.folder(), self.folder()]
            for seed, folder in enumerate(self.texts):
                os.mkdir(folder)
                for i in range(30):
                    with open(os.path.join(folder, f"{i}.txt"), "w") as f:
                        f.write(f"{seed} and {i} make {seed + i}. " * 2000)
            self.prepared = [self.folder(), self.folder()]
            for folder, text in zip(self.prepared, self.texts):
                assert self.command("data.text.prepare", text, f"--out={folder}").wait() == 0
        out = self.folder(self.prepared[0] if self.rng.random() < 0.5 else None)
        name = self.rng.choice(DEADLY)
        prepare = deadly(name, self.rng.randint(1, 12 if name == "write" else 4), self.rng.random() < 0.5)
        self.command("data.text.prepare", self.texts[1], f"--out={out}", prepare=prepare).wait()
        try:
            there = tokens.verify(out)
        except tokens.PrepareError:
            there = None
        if there not in (None, tokens.read_meta(self.prepared[0]), tokens.read_meta(self.prepared[1])):
            return "failed", "a mix of two datasets"
        again = self.command("data.text.prepare", self.texts[1], f"--out={out}")
        if again.wait() != 0:
            return "failed", f"exit {again.code}: {again.error()[-200:]}"
        if sorted(os.listdir(out)) != sorted(os.listdir(self.prepared[1])) or tokens.verify(out) != tokens.read_meta(
                self.prepared[1]):
            return "failed", f"not what it gives without a kill: {sorted(os.listdir(out))}"
        return "survived", ""

    def full_disks_in_preparation(self):
        """No room for the dataset: one line, the old one stays."""
        from data import tokens
        if not hasattr(self, "texts"):
            self.kills_in_preparation()
        with self.disk(8 * MEGABYTE) as disk:
            if not disk:
                return None
            out = os.path.join(disk, "data")
            if self.rng.random() < 0.5:
                shutil.copytree(self.prepared[0], out)
            used = sum(os.path.getsize(os.path.join(d, f)) + 4096 for d, _, names in os.walk(disk) for f in names)
            self.remount(disk, f"size={used + self.rng.randint(1, 1000) * 1000}")
            before = os.path.exists(out) and tokens.verify(out)
            child = self.command("data.text.prepare", self.texts[1], f"--out={out}")
            child.wait()
            bad = refusal(child) or left_over(out)
            if not bad and (before and tokens.verify(out)) != before:
                bad = "the old dataset is gone"
            if not bad and disk not in child.error():
                bad = f"names no file: {child.error()[-150:]!r}"
            return ("failed", bad) if bad else ("refused", "")

    def possible(self, asked):
        """Of such commands, those that the attacked version has; the others are remembered."""
        self.left_out += [name for words in asked if (name := unknown(words))]
        return [words for words in asked if not unknown(words)]

    def readers(self):
        """sample, export, plot, whatif and sweep branch on a damaged folder: an answer, or one line."""
        out = self.folder(self.whole)
        for _ in range(self.rng.choice([1, 1, 2])):
            name = self.rng.choice(["log.jsonl", "log.jsonl", "config.json", "ckpt.pt", "ckpt.best.pt", "step_time.json"])
            if not name.endswith(".pt") and self.rng.random() < 0.6:
                change_values(os.path.join(out, name), self.rng)
            else:
                damage(os.path.join(out, name), self.rng)
        picture = os.path.join(self.work, "picture.png")
        asked = [
            ("sample", out, "--tokens=5"), ("plot", out), ("plot", "--layers", out), ("whatif", out),
            ("whatif", out, "--json=-"), ("train", out), ("train", out, "--eval"), ("train", out, "--max_tokens=8000"),
            ("export", out, f"--hf={out}-exported"), ("export", out, f"--hf={out}-exported", "--newest"),
            ("plot", out, self.whole, f"--out={picture}"), ("whatif", out, "--export=steps"), ("whatif", out, "--hours=1"),
            ("plot", "--compare", f"a={self.whole}", f"b={out}", f"--out={picture}"),
            ("whatif", out, "--devices=1,8", "--kind=H100"),
            ("sweep", "branch", out, "--at", "3200", "--factors", "1,nan"), ("sweep", "runs", f"--out_dir={out}", "--dry_run")]
        command, *arguments = self.rng.choice(self.possible(asked))
        child = self.command(command, *arguments)
        child.wait()
        text = child.error()
        if child.code == 0 and "Traceback" not in text:
            return "survived", ""
        return ("failed", f"{command} {arguments}: {bad}") if (bad := refusal(child)) else ("refused", "")


# what an older version may lack: the words on the command line, and the name in its code that says that it does not
YOUNGER = {("train", "--eval"): ("train", "evaluate"), ("train", "RUN"): ("configurator", "of_run"),
           ("sweep", "branch", "--dry_run"): ("sweeps.branch", "dry_run")}


def unknown(words):
    """The command, in words, if the attacked version does not have it, or ''."""
    command, *options = words
    if command not in sys.modules:
        return command
    given = {"RUN" if os.path.isdir(option) else option.partition("=")[0] for option in options}
    for (name, *needed), (module, attribute) in YOUNGER.items():
        if name == command and given >= set(needed) and not hasattr(importlib.import_module(module), attribute):
            return " ".join([name, *needed])
    return ""


def ended(child):
    """Whether a process is over; it can still be waited for."""
    return bool(os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))


def left_over(folder):
    """Words about temporary files that a process left, or ''."""
    left = [name for name in (os.listdir(folder) if os.path.isdir(folder) else []) if name.endswith(".tmp")]
    return f"left over: {left}" if left else ""


def put(source, path):
    """A copy, in a file of its own: names of one file share their damage."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, path)


def damage(path, rng):
    """Zeros, a cut, nothing at all, foreign content, a flipped bit."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as f:
        data = f.read()
    at = rng.randrange(max(1, len(data)))
    data = rng.choice([data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096:], data[:at], None, rng.choice(TEXTS),
                       data[:at] + b"garbage\n" + data[at:], flip(data or b"x", rng)])
    os.unlink(path)
    if data is not None:
        with open(path, "wb") as f:
            f.write(data)


def change_values(path, rng):
    """Values of a JSON file, or of rows of a log, that are no such values; keys that are gone."""
    try:
        with open(path) as f:
            lines = [f.read()] if path.endswith(".json") else f.read().splitlines()
        if not all(isinstance(json.loads(line), dict) for line in lines):
            return
    except (OSError, ValueError, RecursionError):  # damaged already
        return
    for _ in range(rng.choice([1, 3, 30])):
        i = rng.randrange(len(lines))
        where = whole = json.loads(lines[i])
        while rng.random() < 0.6 and (inner := [v for v in where.values() if isinstance(v, dict) and v]):
            where = rng.choice(inner)
        key = rng.choice(list(where))
        if rng.random() < 0.2:
            del where[key]
        else:
            where[key] = rng.choice(HOSTILE)
        if not whole:
            break
        lines[i] = json.dumps(whole)
    os.unlink(path)
    with open(path, "w") as f:
        f.write("".join(line + "\n" for line in lines))
