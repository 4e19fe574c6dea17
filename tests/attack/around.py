"""Cases of the attack that come from around a run: its disks, its other processes, the commands that prepare and read."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess

from tests.attack.harness import (
    CHECKPOINTS,
    HOSTILE,
    TEXTS,
    FailedError,
    Harness,
    RefusedError,
    UntriedError,
    change_a_value,
    change_values,
    damage,
    deadly,
    expect,
    result,
    rewrite,
)
from tests.helpers import same_tensors

MEGABYTE = 1 << 20


def no_left_overs(folder):
    left = [name for name in (os.listdir(folder) if os.path.isdir(folder) else []) if name.endswith(".tmp")]
    expect(not left, f"left over: {left}")


def put(source, path):
    """A copy, in a file of its own, or nothing where there is no source."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source, path)


class Around(Harness):
    # -- disks

    @contextlib.contextmanager
    def disk(self, size):
        """A file system of so many bytes of its own, and remount(options)."""
        path = f"{self.folder()}-disk"
        os.mkdir(path)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
            raise UntriedError
        try:
            yield path, lambda options: subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)
        finally:
            subprocess.run(["umount", "-l", path], check=True)

    def nearly_full(self, disk, remount, most):
        """So many kilobytes are left on the disk at most."""
        used = sum(os.path.getsize(os.path.join(d, f)) + 4096 for d, _, names in os.walk(disk) for f in names)
        remount(f"size={used + self.rng.randint(1, most) * 1000}")

    def small_disks(self):
        """A run, fresh or resumed, on a disk that is too small: refused by name, nothing left over; then on, with more room."""
        with self.disk(MEGABYTE) as (disk, remount):
            out = os.path.join(disk, "run")
            if self.chance(0.5):
                shutil.copytree(self.stopped, out)
            self.nearly_full(disk, remount, 300)
            child = self.train(out)
            if child.wait() != 0:
                child.refused(names=disk)
                no_left_overs(out)
            remount("size=16m")
            self.resumed(out)

    def read_only(self):
        """A disk that cannot be written to, or a folder that is another file: data is read from it, a run on it is refused."""
        with self.disk(16 * MEGABYTE) as (disk, remount):
            what, fresh, out = self.rng.choice(["data", "run", "new run", "reader", "cache"]), self.folder(), f"{disk}/run"
            shutil.copytree(self.whole if what == "reader" else self.stopped, out)
            data = shutil.copytree(self.data, f"{disk}/data")
            with contextlib.suppress(OSError):
                os.unlink(f"{data}/verified.json")
            remount("ro")
            if what == "data":
                return self.resumed(fresh, dataset=data)
            if what == "cache":
                return self.resumed(fresh, env={"RIGHTBATCH_CACHE": f"{disk}/cache"})
            if what == "reader":
                child, words = self.some_command([("sample", out, "--tokens=5"), ("whatif", out, "--json=-"), ("whatif", out),
                                                  ("plot", out), ("export", out, "--hf")])
                return child.answered(words, names=disk)
            self.train(out if what == "run" else f"{disk}/a/b").answered(what, codes=(), names=disk)

    # -- too little of something

    def full_disks(self):
        """No file may grow beyond some size."""
        self.limited("FSIZE", self.rng.randint(0, self.rng.choice([60_000, 100_000])))

    def limits(self):
        """Few open files."""
        self.limited("NOFILE", self.rng.randint(6, 30))

    def little_memory(self):
        """Too little memory at some moment."""
        self.limited("AS", self.rng.randint(0, self.rng.choice([1, 8, 60]) * MEGABYTE))

    def limited(self, kind, limit):
        """One line, which names the file that has no room, and nothing left over; then on to the end without the limit. Without
        memory the process may be dead, where a library sees no other way."""
        out = self.some_folder()

        def prepare():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            with open("/proc/self/statm") as f:
                used = int(f.read().split()[0]) * resource.getpagesize() if kind == "AS" else 0
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (used + limit, used + limit))
        child = self.train(out, prepare)
        child.wait()
        dead, mute = kind == "AS" and child.code and child.code < 0, kind == "FSIZE" and limit <= 1000  # no room for the error
        if child.code != 0 and not dead:
            if not mute:
                child.refused(f"{kind} {limit}", names=out if kind == "FSIZE" else "")
            no_left_overs(out)
        if child.has_no_kernel():  # it could not be opened or mapped
            raise RefusedError
        self.resumed(out)

    # -- other processes

    def ranks(self, out, **changes):
        """Two processes of one run, as torchrun starts them."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        return [self.train(out, micro_batch_size=2, env={**env, "RANK": rank, "LOCAL_RANK": rank}, **changes) for rank in "01"]

    def of_two_ranks(self, parallel="ddp"):
        """What a run of two processes gives without an attack."""
        def make():
            out = self.folder()
            codes = [child.wait() for child in self.ranks(out, parallel=parallel)]
            expect(codes == [0, 0], "two processes without an attack")
            return result(out)
        return self.once(f"two ranks, {parallel}", make)

    def kills_of_a_rank(self):
        """One process of two is killed: the other ends in words; both go on to the end."""
        parallel = self.rng.choice(["ddp", "fsdp"])
        reference, out = self.of_two_ranks(parallel), self.folder()
        children = self.ranks(out, parallel=parallel)
        self.wait_for_log(children[0], out)
        self.pause(0.0, 1.0)
        killed, other = self.rng.sample(children, 2)
        killed.kill(signal.SIGKILL)
        codes, text = [child.wait() for child in (killed, other)], other.error()
        silent = codes == [-signal.SIGKILL, 1] and "goes on from the last" not in text
        expect(codes[1] is not None and "Traceback" not in text and not silent, f"the other rank: {codes}: {text[-300:]!r}")
        again = self.ranks(out, parallel=parallel)
        again[1].wait()
        self.came_to_its_end(again[0], out, reference, parallel)

    def pairs_of_ranks(self):
        """Two starts of two processes each into one folder: one of them runs."""
        reference, out = self.of_two_ranks(), self.folder()
        both = [self.ranks(out)]
        self.pause(0, 0, 0.3, 0.3)
        both.append(self.ranks(out))
        codes, errors = [[child.wait() for child in pair] for pair in both], [pair[0].error() for pair in both]
        expect(sorted(codes) == [[0, 0], [2, 2]], f"{codes}: {[text[-150:] for text in errors]}")
        refused = errors[codes.index([2, 2])]
        expect("Traceback" not in refused and "in use by process" in refused, refused[-300:])
        expect(same_tensors(result(out), reference), "a mix of two runs")

    # -- files that change under a run

    def living(self, **changes):
        """(a run that has begun to write its log, its folder)"""
        out = self.folder()
        child = self.train(out, **changes)
        self.wait_for_log(child, out, 1000)
        return child, out

    def meddling(self):
        """Somebody removes, cuts, replaces or edits files of a living run."""
        child, out = self.living()
        self.pause(0.0, 0.3)
        how, path = self.rng.choice(["remove", "cut", "empty", "replace", "append"]), os.path.join(out, "log.jsonl")
        if self.chance(0.3):
            path, how = os.path.join(out, self.rng.choice(["ckpt.pt", "ckpt.1.pt", "config.json", "lock"])), "remove"
        with contextlib.suppress(FileNotFoundError):
            if how in ("remove", "replace"):
                os.unlink(path)
            if how in ("cut", "empty"):
                os.truncate(path, 0 if how == "empty" else os.path.getsize(path) // 2)
            if how in ("replace", "append"):
                with open(path, "ab") as f:
                    f.write(self.rng.choice(TEXTS))
        try:
            self.noticed(child, out, how)
        except FailedError as e:
            if "is not the log that" in str(e):  # it came behind the run's last look: whoever reads the log is told
                raise RefusedError from None
            raise

    def meddling_with_data(self):
        """Somebody writes into the data of a living run, cuts them, replaces them, or changes their rights."""
        data = self.folder(self.data)
        child, out = self.living(dataset=data)
        self.pause(0.0, 0.3)
        path, how = f"{data}/{self.rng.choice(['train', 'val'])}.bin", self.rng.choice(["write", "cut", "replace", "chmod"])
        if how == "write":
            with open(path, "r+b") as f:
                f.write(bytes(self.rng.randrange(64) for _ in range(self.rng.choice([1, 500]))))
        elif how == "cut":
            os.truncate(path, self.rng.choice([0, 100]))
        elif how == "replace":
            put(f"{self.data}/meta.json", f"{path}.new")
            os.replace(f"{path}.new", path)
        else:
            os.chmod(path, 0o600)
        try:
            self.noticed(child, out, how)
        except RefusedError:
            expect(how not in ("replace", "chmod"), f"{how}: it need not have ended")
            raise

    def noticed(self, child, out, how):
        """A run under which something changed comes to its end, or says so."""
        if child.ended():  # nobody could have noticed
            raise UntriedError
        self.came_to_its_end(child, out, about=how)

    def swapped(self):
        """Files of one run in the folder of another, and one's own in each other's places."""
        other = self.once("another run", lambda: self.run(seed=5, stop_tokens=3200))
        out, kind = self.folder(self.stopped), self.rng.choice(["foreign", "foreign", "own", "data"])
        names = [*CHECKPOINTS, "log.jsonl", "config.json", "step_time.json"]
        if kind == "foreign":
            for name in self.rng.sample(names, self.rng.randint(1, 3)):
                put(os.path.join(other, name), os.path.join(out, name))
        elif kind == "own":
            a, b = self.rng.sample([os.path.join(out, name) for name in CHECKPOINTS if name in os.listdir(out)], 2)
            os.rename(a, f"{out}.swap")
            os.rename(b, a)
            os.rename(f"{out}.swap", b)
        else:  # a resume under data that are no longer what they were
            meta = json.loads(open(f"{self.data}/meta.json").read())
            key, value = self.rng.choice([("vocab_size", 100), ("vocab_size", 63), ("dtype", "int8"), ("tokenizer", "gpt2"),
                                          ("val_tokens", 999), ("val_sha256", meta["train_sha256"])])
            rewrite(f"{self.data}/meta.json", lambda _: json.dumps({**meta, key: value}).encode())
            try:
                return self.came_to_its_end(self.train(out), out, about=f"{key} is {value}")
            finally:
                rewrite(f"{self.data}/meta.json", lambda _: json.dumps(meta).encode())
        self.resumed(out, seed=0)  # typed, or it would be taken from the other run's config.json

    def edited(self):
        """A checkpoint that somebody changed, with a checksum that fits: no traceback, no hang. Weights are his to choose."""
        import torch

        from trainer import checkpoint
        out = self.folder(self.stopped)
        state = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)
        for _ in range(self.rng.randint(1, 3)):
            change_a_value(state, self.rng, [*HOSTILE, torch.zeros(2), torch.zeros(3, dtype=torch.int64)], deeper=0.6, gone=0.3)
        state.pop("format", None)
        for name in CHECKPOINTS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(out, name))
        checkpoint.save(out, state)
        if self.chance(0.4):
            return self.train(out).answered("a resume", codes=(0, 1))
        child, words = self.some_command([
            ("sample", out, "--tokens=5", "--prompt=\x01"), ("export", out, f"--hf={out}-exported"), ("train", out),
            ("export", out, f"--hf={out}-exported", "--newest"), ("train", out, "--eval"),
            ("sweep", "branch", out, "--at", "3200", "--dry_run")])
        child.answered(words, codes=(0, 1))

    # -- the commands around

    def texts(self):
        """Two folders of text, and the dataset of each: (texts, datasets)."""
        def make():
            texts, datasets = [self.folder(), self.folder()], [self.folder(), self.folder()]
            for seed, text in enumerate(texts):
                os.mkdir(text)
                for i in range(30):
                    with open(os.path.join(text, f"{i}.txt"), "w") as f:
                        f.write(f"{seed} and {i} make {seed + i}. " * 2000)
                child = self.command("data.text.prepare", text, f"--out={datasets[seed]}")
                expect(child.wait() == 0, "texts without an attack")
            return texts, datasets
        return self.once("texts", make)

    def kills_in_preparation(self):
        """prepare.py killed inside its writes, over an older dataset or none: what is there is whole, or counts as nothing."""
        from data import tokens
        from system.errors import ConfigError
        (_, text), (old, new) = self.texts()
        out = self.folder(old if self.chance(0.5) else None)
        self.command("data.text.prepare", text, f"--out={out}", prepare=deadly(self.rng, writes=12, others=4)).wait()
        with contextlib.suppress(ConfigError):
            expect(tokens.verify(out) in (None, tokens.read_meta(old), tokens.read_meta(new)), "a mix of two datasets")
        again = self.command("data.text.prepare", text, f"--out={out}")
        expect(again.wait() == 0, f"exit {again.code}: {again.error()[-200:]}")
        expect(sorted(os.listdir(out)) == sorted(os.listdir(new)) and tokens.verify(out) == tokens.read_meta(new),
               f"not what it gives without a kill: {sorted(os.listdir(out))}")

    def full_disks_in_preparation(self):
        """No room for the dataset: one line, the old one stays."""
        from data import tokens
        (_, text), (old, _) = self.texts()
        with self.disk(8 * MEGABYTE) as (disk, remount):
            out = os.path.join(disk, "data")
            if self.chance(0.5):
                shutil.copytree(old, out)
            self.nearly_full(disk, remount, 1000)
            before = os.path.exists(out) and tokens.verify(out)
            child = self.command("data.text.prepare", text, f"--out={out}")
            expect(child.wait() != 0, "there was room")
            child.refused(names=disk)
            no_left_overs(out)
            expect((before and tokens.verify(out)) == before, "the old dataset is gone")
            raise RefusedError

    def readers(self):
        """sample, export, plot, whatif and sweep branch on a damaged folder: an answer, or one line."""
        out = self.folder(self.whole)
        for _ in range(self.rng.choice([1, 1, 2])):
            name = self.rng.choice(["log.jsonl", "log.jsonl", "config.json", "ckpt.pt", "ckpt.best.pt", "step_time.json"])
            change = change_values if not name.endswith(".pt") and self.chance(0.6) else damage
            change(os.path.join(out, name), self.rng)
        exported, picture = f"--hf={out}-exported", f"--out={self.work}/picture.png"
        child, words = self.some_command([
            ("sample", out, "--tokens=5"), ("plot", out), ("plot", "--layers", out), ("whatif", out), ("train", out),
            ("whatif", out, "--json=-"), ("train", out, "--eval"), ("train", out, "--max_tokens=8000"),
            ("export", out, exported), ("export", out, exported, "--newest"), ("plot", out, self.whole, picture),
            ("whatif", out, "--export=steps"), ("whatif", out, "--hours=1"), ("whatif", out, "--devices=1,8", "--kind=H100"),
            ("plot", "--compare", f"a={self.whole}", f"b={out}", picture),
            ("sweep", "branch", out, "--at", "3200", "--factors", "1,nan"), ("sweep", "runs", f"--out_dir={out}", "--dry_run")])
        child.answered(words)
