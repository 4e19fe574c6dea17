"""Cases of the attack on what a run reads: its data, the text behind them, its log."""

import contextlib
import json
import os
import pickle
import resource
import signal
import time

from around import Around, ended
from harness import SECONDS, TINY, refusal, result, same

LONGER = {"max_tokens": 32_000}


class Sources(Around):
    # -- the text that a dataset is made of

    def texts_that_change(self):
        """prepare.py on folders that may not be read, texts that shrink and grow meanwhile, links that lead out, NUL bytes, and
        huge empty files: all of the text, or words."""
        text, out = self.folder(), self.folder()
        os.makedirs(os.path.join(text, "sub"))
        for i in range(self.rng.choice([3, 30])):
            with open(os.path.join(text, self.rng.choice(["", "sub"]), f"{i}.txt"), "w") as f:
                f.write(f"{i} is a number. " * 20_000)
        some = os.path.join(text, "sub", "some.txt")
        with open(some, "w") as f:
            f.write("this and that. " * 20_000)
        kind, scandir = self.rng.choice(["rights", "shrinks", "grows", "link", "link to a folder", "NUL", "huge"]), os.scandir
        if kind == "link":
            os.symlink("/etc/passwd", os.path.join(text, "z.txt"))
        elif kind == "link to a folder":
            os.symlink("/etc", os.path.join(text, "etc"))
        elif kind == "NUL":
            with open(some, "r+b") as f:
                f.seek(self.rng.randrange(300_000))
                f.write(b"\0")
        elif kind == "huge":
            os.truncate(some, 5 << 30)

        def refuse(path):
            if str(path).endswith("sub"):
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        def prepare():
            from data import tokens
            resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
            if kind == "rights":
                os.scandir = refuse
            if kind in ("shrinks", "grows"):
                real = tokens.choose_validation
                tokens.choose_validation = lambda *a: os.truncate(some, 1000 if kind == "shrinks" else 400_000) or real(*a)
        child = self.command("data.text.prepare", text, f"--out={out}", prepare=prepare)
        child.wait()
        if child.code == 0:
            said = kind.startswith("link") and "left out 1 link that lead" in child.error()
            return ("survived", "") if said else ("failed", f"{kind}: taken without a word")
        bad = refusal(child) or (os.path.exists(out) and f"left {os.listdir(out)}")
        return ("failed", f"{kind}: {bad}") if bad else ("refused", "")

    # -- data of a run

    def longer(self, data):
        """What a run of five times the length gives on such data without an attack."""
        if data not in self.references:
            out = self.folder()
            assert self.train(out, dataset=data, **LONGER).wait() == 0, "a longer run without an attack"
            self.references[data] = result(out)
        return self.references[data]

    def some_data(self):
        """(a copy of some data, what a longer run gives on them): our own, or as nanoGPT's scripts write them, large, with no
        checksums."""
        if not hasattr(self, "references"):
            import numpy as np
            self.references, self.nanogpt = {}, self.folder()
            os.mkdir(self.nanogpt)
            for name, times in (("train.bin", 1600), ("val.bin", 1)):
                ids = np.fromfile(os.path.join(self.data, name), np.uint8).astype(np.uint16)
                np.tile(ids, times).tofile(os.path.join(self.nanogpt, name))
            with open(os.path.join(self.nanogpt, "meta.pkl"), "wb") as f:
                pickle.dump({"vocab_size": 64, "itos": dict(enumerate(map(chr, range(64)))), "stoi": {}}, f)
        data = self.rng.choice([self.data, self.nanogpt])
        return self.folder(data), self.longer(data)

    def zeroed(self, path):
        """Zeros over a part of a file, most of it or little; returns what puts all back, perhaps with its times."""
        with open(path, "r+b") as f:
            data, times = f.read(), os.stat(path)
            size = max(64, int(len(data) * self.rng.choice([0, 0.0005, 0.74])))
            f.seek(self.rng.randrange(len(data) - size + 1))
            f.write(bytes(size))

        def back():
            with open(path, "r+b") as f:
                f.write(data)
            if self.rng.random() < 0.5:
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return back

    def data_put_back(self):
        """Data that are zeroed under a living run, and put back: it ends, and goes on from before."""
        out, (data, reference) = self.folder(), self.some_data()
        child = self.train(out, dataset=data, **LONGER)
        self.wait_for_log(child, out, 1000)
        back = self.zeroed(os.path.join(data, self.rng.choice(["train.bin", "train.bin", "val.bin"])))
        time.sleep(self.rng.choice([0, 0.05, 0.1]))
        back()
        found = self.outcome(child, out, reference)  # it may have read all that it needed
        return self.outcome(self.train(out, dataset=data, **LONGER), out, reference) if found[0] == "refused" else found

    def data_before_resume(self):
        """Data that were zeroed in part before a resume: refused, and gone on with once they are whole."""
        out, (data, reference) = self.folder(), self.some_data()
        if self.train(out, dataset=data, **LONGER, stop_tokens=3200).wait() != 0:
            return "failed", "it did not begin"
        times = os.stat(path := os.path.join(data, "train.bin"))
        back = self.zeroed(path)
        if self.rng.random() < 0.5:
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        child = self.train(out, dataset=data, **LONGER)
        child.wait()
        if child.code == 0:
            return "failed", "it went on with other data"
        if bad := refusal(child):
            return "failed", bad
        back()
        return self.outcome(self.train(out, dataset=data, **LONGER), out, reference)

    # -- the log

    def logs_in_part(self):
        """A log that lacks rows, has them in another order, twice, or with other values, or NaN: never summed up, with
        a checkpoint beside it or without."""
        out, kind = self.folder(self.whole), self.rng.choice(["missing", "order", "twice", "value", "end", "nan"])
        path = os.path.join(out, "log.jsonl")
        with open(path) as f:
            lines = f.readlines()
        at, more = self.rng.randrange(1, len(lines) - 9), self.rng.randint(2, 8)
        if kind == "missing":
            del lines[at:at + more]
        elif kind == "end":
            del lines[-more:]
        elif kind == "order":
            lines[at:at + more] = lines[at:at + more][::-1]
        elif kind == "twice":
            lines[at:at] = lines[at:at + more]
        else:
            row = json.loads(lines[at])
            row[self.rng.choice([key for key in row if key not in ("event", "row")])] = self.rng.choice(
                [7] if kind == "value" else [float("nan"), float("inf"), -float("inf")])
            lines[at] = json.dumps(row) + "\n"
        with open(path, "w") as f:
            f.writelines(lines)
        if kind not in ("value", "end") and self.rng.random() < 0.5:
            for name in os.listdir(out):
                if name.startswith("ckpt"):
                    os.unlink(os.path.join(out, name))
        asked = [("whatif", out), ("whatif", out, "--json=-"), ("plot", out), ("plot", "--layers", out),
                 ("plot", "--compare", f"a={self.whole}", f"b={out}", f"--out={os.path.join(self.work, 'picture.png')}")]
        words = self.rng.choice(self.possible(asked))
        child = self.command(*words)
        child.wait()
        if child.code == 0:
            return "failed", f"{kind}: {words[0]} takes it for a whole one"
        bad = refusal(child) or path not in child.error() and child.error()[-150:]
        return ("failed", f"{kind}: {bad}") if bad else ("refused", "")

    # -- what else goes on meanwhile

    def rewritten(self):
        """A schedule in a file that is written again and again, in place or by a rename: no half of it is ever in force."""
        out, path = self.folder(), os.path.join(self.work, f"schedule-{self.number}")
        texts, in_place, said = [b"0 4\n3200 16\n6400 12\n", b"0 8\n3200 12\n6400 160\n"], self.rng.random() < 0.7, []
        with open(path, "wb") as f:
            f.write(texts[0])
        child = self.train(out, batch_schedule="file", batch_file=path, **LONGER)
        if self.rng.random() < 0.7:
            self.wait_for_log(child, out, 1000)
        while not ended(child) and time.monotonic() < child.started + SECONDS:
            for text in texts:
                with open(path if in_place else path + ".new", "wb", buffering=0) as f:
                    for part in (text[:-2], text[-2:]):
                        f.write(part)
                if not in_place:
                    os.replace(path + ".new", path)
                time.sleep(0.001)
        child.wait()
        if child.code != 0:
            bad = refusal(child) or "without a pause" not in child.error() and child.error()[-200:]
            return ("failed", bad) if bad else ("refused", "")
        with open(os.path.join(out, "log.jsonl")) as f:
            events = [row["event"] for row in map(json.loads, f) if "batch_file" in row.get("event", "")]
        for event in events:
            if "changed" in event or "read" in event.split(":")[0]:
                said.append(event.rpartition("read: ")[2].rpartition("changed: ")[2])
        halves = set(said) - {"0:4, 3200:16, 6400:12", "0:8, 3200:12, 6400:160"}
        return ("failed", f"half of a file: {halves} {events[:2]}") if halves else ("survived", "")

    def pairs_of_sweeps(self):
        """Two sweeps in one folder at once, one of them or its runs killed; then a third to the end: what one alone gives."""
        data = {**TINY, "dataset": self.data, "max_tokens": 3200}
        asked = ["runs", *(f"--{k}={v}" for k, v in data.items() if k != "seed"), "--seed=0,1", "--jobs=2"]
        if not hasattr(self, "sweep"):
            self.sweep = self.folder()
            assert self.command("sweep", *asked, f"--out_dir={self.sweep}").wait() == 0, "a sweep without an attack"
        out = self.folder()
        both = [self.command("sweep", *asked, f"--out_dir={out}") for _ in range(2)]
        time.sleep(self.rng.uniform(0, 8))
        killed, other = self.rng.sample(both, 2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(killed.pid, signal.SIGKILL)
        codes = [killed.wait(), other.wait()]
        if codes[1] != 0 and (bad := refusal(other)):
            return "failed", f"the other: {bad}"
        until = time.monotonic() + SECONDS
        while (code := (last := self.command("sweep", *asked, f"--out_dir={out}")).wait()) != 0 and time.monotonic() < until:
            if bad := refusal(last):  # runs of the killed one go on, and hold the folder
                return "failed", f"the third: {bad}"
            time.sleep(0.2)
        if code != 0:
            return "failed", f"the third: {last.error()[-200:]}"
        runs = sorted(os.listdir(os.path.join(self.sweep, "sweep", "runs")))
        if sorted(os.listdir(os.path.join(out, "sweep", "runs"))) != runs:
            return "failed", f"other files: {sorted(os.listdir(os.path.join(out, 'sweep', 'runs')))}, not {runs}"
        for name in runs:
            here, there = (os.path.join(folder, "sweep", "runs", name) for folder in (out, self.sweep))
            if os.path.isdir(here) and not same(result(here), result(there)):
                return "failed", f"{name}: another result"
        return "survived", ""
