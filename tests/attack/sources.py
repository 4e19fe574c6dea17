"""Cases of the attack on what a run reads: its data, the text behind them, its log."""

import json
import os
import pickle
import resource
import signal
import time

from tests.attack.around import Around
from tests.attack.harness import SECONDS, TINY, RefusedError, expect, refusal, result, rewrite
from tests.helpers import as_args, same_tensors

LONGER = {"max_tokens": 32_000}


class Sources(Around):
    # -- the text that a dataset is made of

    def texts_that_change(self):
        """prepare.py on folders that may not be read, texts that shrink and grow meanwhile, links that lead out, NUL bytes, and
        huge empty files: all of the text, or words."""
        text, out = self.folder(), self.folder()
        some = os.path.join(text, "sub", "some.txt")
        os.makedirs(os.path.dirname(some))
        names = [os.path.join(text, self.rng.choice(["", "sub"]), f"{i}.txt") for i in range(self.rng.choice([3, 30]))]
        for path in [*names, some]:
            with open(path, "w") as f:
                f.write(f"{os.path.basename(path)} is a name. " * 20_000)
        kind, scandir = self.rng.choice(["rights", "shrinks", "grows", "link", "link to a folder", "NUL", "huge"]), os.scandir
        if kind == "link":
            os.symlink("/etc/passwd", os.path.join(text, "z.txt"))
        elif kind == "link to a folder":
            os.symlink("/etc", os.path.join(text, "etc"))
        elif kind == "NUL":
            at = self.rng.randrange(300_000)
            rewrite(some, lambda data: data[:at] + b"\0" + data[at + 1:])
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
                tokens.choose_validation = lambda *a: os.truncate(some, 1000 if kind == "shrinks" else 800_000) or real(*a)
        child = self.command("data.text.prepare", text, f"--out={out}", prepare=prepare)
        if child.wait() != 0:
            child.refused(kind)
            expect(not os.path.exists(out), f"{kind}: it left a folder")
            raise RefusedError
        expect(kind.startswith("link") and "left out 1 link that lead" in child.error(), f"{kind}: taken without a word")

    # -- data of a run

    def some_data(self):
        """(a copy of some data, what a longer run gives on them): our own, or as nanoGPT's scripts write them, large, with no
        checksums."""
        def nanogpt():
            import numpy as np
            folder = self.folder()
            os.mkdir(folder)
            for name, times in (("train.bin", 1600), ("val.bin", 1)):
                ids = np.fromfile(os.path.join(self.data, name), np.uint8).astype(np.uint16)
                np.tile(ids, times).tofile(os.path.join(folder, name))
            with open(os.path.join(folder, "meta.pkl"), "wb") as f:
                pickle.dump({"vocab_size": 64, "itos": dict(enumerate(map(chr, range(64)))), "stoi": {}}, f)
            return folder
        data = self.rng.choice([self.data, self.once("nanogpt", nanogpt)])
        return self.folder(data), self.once(f"longer on {data}", lambda: result(self.run(dataset=data, **LONGER)))

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
            if self.chance(0.5):
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return back

    def data_put_back(self):
        """Data that are zeroed under a living run, and put back: it ends, and goes on from before."""
        data, reference = self.some_data()
        child, out = self.living(dataset=data, **LONGER)
        back = self.zeroed(os.path.join(data, self.rng.choice(["train.bin", "train.bin", "val.bin"])))
        self.pause(0, 0, 0.05, 0.1)
        back()
        try:
            self.came_to_its_end(child, out, reference)  # it may have read all that it needed
        except RefusedError:
            self.resumed(out, reference, dataset=data, **LONGER)

    def data_before_resume(self):
        """Data that were zeroed in part before a resume: refused, and gone on with once they are whole."""
        data, reference = self.some_data()
        out = self.run(dataset=data, **LONGER, stop_tokens=3200)
        times = os.stat(path := os.path.join(data, "train.bin"))
        back = self.zeroed(path)
        if self.chance(0.5):
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        child = self.train(out, dataset=data, **LONGER)
        expect(child.wait() != 0, "it went on with other data")
        child.refused()
        back()
        self.resumed(out, reference, dataset=data, **LONGER)

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
        rewrite(path, lambda _: "".join(lines).encode())
        if kind not in ("value", "end") and self.chance(0.5):
            for name in os.listdir(out):
                if name.startswith("ckpt"):
                    os.unlink(os.path.join(out, name))
        child, words = self.some_command([
            ("whatif", out), ("whatif", out, "--json=-"), ("plot", out), ("plot", "--layers", out),
            ("plot", "--compare", f"a={self.whole}", f"b={out}", f"--out={os.path.join(self.work, 'picture.png')}")])
        expect(child.wait() != 0, f"{kind}: {words} takes it for a whole one")
        child.refused(f"{kind}: {words}", names=path)
        raise RefusedError

    # -- what else goes on meanwhile

    def rewritten(self):
        """A schedule in a file that is written again and again, in place or by a rename: no half of it is ever in force."""
        out, path = self.folder(), os.path.join(self.work, f"schedule-{self.number}")
        texts, in_place = [b"0 4\n3200 16\n6400 12\n", b"0 8\n3200 12\n6400 160\n"], self.chance(0.7)
        with open(path, "wb") as f:
            f.write(texts[0])
        child = self.train(out, batch_schedule="file", batch_file=path, **LONGER)
        if self.chance(0.7):
            self.wait_for_log(child, out, 1000)
        while not child.ended() and time.monotonic() < child.started + SECONDS:
            for text in texts:
                with open(path if in_place else path + ".new", "wb", buffering=0) as f:
                    for part in (text[:-2], text[-2:]):
                        f.write(part)
                if not in_place:
                    os.replace(path + ".new", path)
                time.sleep(0.001)
        if child.wait() != 0:
            child.refused(names="without a pause")
            raise RefusedError
        with open(os.path.join(out, "log.jsonl")) as f:
            events = [row["event"] for row in map(json.loads, f) if "batch_file" in row.get("event", "")]
        said = {event.rpartition("read: ")[2].rpartition("changed: ")[2] for event in events
                if "changed" in event or "read" in event.split(":")[0]}
        halves = said - {"0:4, 3200:16, 6400:12", "0:8, 3200:12, 6400:160"}
        expect(not halves, f"half of a file: {halves} {events[:2]}")

    def pairs_of_sweeps(self):
        """Two sweeps in one folder at once, one of them or its runs killed; then a third to the end: what one alone gives."""
        asked = ["runs", *as_args({**TINY, "dataset": self.data, "max_tokens": 3200}), "--seed=0,1", "--jobs=2"]

        def start(out):
            return self.command("sweep", *asked, f"--out_dir={out}")

        def whole():
            expect(start(out := self.folder()).wait() == 0, "a sweep without an attack")
            return os.path.join(out, "sweep", "runs")
        sweep, out = self.once("sweep", whole), self.folder()
        both = [start(out), start(out)]
        self.pause(0.0, 8.0)
        killed, other = self.rng.sample(both, 2)
        killed.kill(signal.SIGKILL)
        killed.wait()
        if other.wait() != 0:
            other.refused("the other")
        until = time.monotonic() + 5 * SECONDS
        while (code := (last := start(out)).wait()) != 0 and time.monotonic() < until:
            expect(not refusal(last), f"the third: {refusal(last)}")  # runs of the killed one go on, and hold the folder
            time.sleep(0.2)
        expect(code == 0, f"the third: {last.error()[-200:]}")
        runs = os.path.join(out, "sweep", "runs")
        expect(sorted(os.listdir(runs)) == sorted(os.listdir(sweep)), f"other files: {os.listdir(runs)}")
        for name in os.listdir(sweep):
            here, there = os.path.join(runs, name), os.path.join(sweep, name)
            expect(not os.path.isdir(here) or same_tensors(result(here), result(there)), f"{name}: another result")
