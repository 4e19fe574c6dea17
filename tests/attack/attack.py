"""
An attack on the trainer: kills, damaged files, pairs of starts, bad input, full disks, lost terminals. One table at the end.

    python tests/attack/attack.py                     # the short one, part of the tests
    python tests/attack/attack.py --cases=1000        # make attack
    python tests/attack/attack.py --only=flips --seed=3
    python tests/attack/attack.py --root=elsewhere --out=before.json     # another checkout, an older one, say
    python tests/attack/attack.py --before=before.json --out=results/attack.json    # and this one beside it

A case survives if what comes out is, bit for bit, what comes out without the attack. It is refused if the process ends with
one line of words, or says what is lost. All else has failed: a traceback, a hang, a result that changed in silence, a lost row.
Each case is a fork of this process, which has torch loaded, so it takes a fraction of a second. What is random follows a seed.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time

import joined
from harness import DEADLY, GARBAGE, TEXTS, deadly, flip, refusal, result, same, tree
from hostile import Hostile
from sources import Sources


class Attack(Hostile, Sources):
    # -- one case of each kind

    def kills(self):
        """At any moment, from the start on; then on to the end."""
        out = self.folder()
        for _ in range(self.rng.randint(1, 3)):
            child = self.train(out)
            time.sleep(self.rng.uniform(0, 0.8))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
        return self.resumed(out)

    def kills_in_writes(self):
        """In the middle of a write to a file, before or after an fsync, a replace, a link."""
        out = self.folder()
        for _ in range(self.rng.randint(1, 2)):
            name = self.rng.choice(DEADLY)
            nth = self.rng.randint(1, 400 if name == "write" else 40)
            keep = {"keep_checkpoints": self.rng.choice([1, 2, 4])} if "keep_checkpoints" in self.keys else {}
            self.train(out, deadly(name, nth, self.rng.random() < 0.5), **keep).wait()
        return self.resumed(out)

    def flips(self):
        """One bit of a checkpoint."""
        return self.damaged("ckpt.pt", lambda data: flip(data, self.rng))

    def holes(self):
        """Zeros, a cut, foreign content, in checkpoint or log."""
        name = self.rng.choice(["ckpt.pt", "log.jsonl", "config.json"])

        def change(data):
            at = self.rng.randrange(len(data))
            return self.rng.choice([data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096:], data[:at], None,
                                    self.rng.choice(TEXTS), data[:at] + b"garbage\n" + data[at:], flip(data, self.rng)])
        return self.damaged(name, change)

    def damaged(self, name, change):
        out = self.folder(self.stopped)
        path = os.path.join(out, name)
        with open(path, "rb") as f:
            data = change(f.read())
        os.unlink(path)
        if data is not None:
            with open(path, "wb") as f:
                f.write(data)
        return self.resumed(out)

    def foreign(self):
        """A checkpoint that torch can read and train.py did not write."""
        import torch
        out = self.folder(self.stopped)
        path = os.path.join(out, "ckpt.pt")
        state = torch.load(path, weights_only=True)
        for key in self.rng.sample(list(state), self.rng.randint(0, 3)):
            state[key] = self.rng.choice([None, {}, [], "x", -1, torch.zeros(2)])
        os.unlink(path)
        torch.save(self.rng.choice([state, {"model": state["model"]}, state["model"], [1], "x"]), path)
        return self.resumed(out)

    def pairs(self):
        """Two starts into one folder, perhaps under two names."""
        out = self.folder()
        other = out
        if self.rng.random() < 0.3:
            other = out + "-link"
            os.mkdir(out)
            os.symlink(out, other)
        children = [self.train(out)]
        time.sleep(self.rng.choice([0, 0, 0.05, 0.3]))
        children.append(self.train(other))
        codes = [child.wait() for child in children]
        for child in children:
            if child.code != 0 and (bad := refusal(child)):
                return "failed", bad
        if 0 not in codes:
            return "failed", f"nobody ran: {codes}"
        try:
            return ("survived", "") if same(result(out), self.reference) else ("failed", "a mix of two runs")
        except Exception as e:
            return "failed", f"unreadable result: {e}"

    def signals(self):
        """A terminal that is lost, Ctrl-C, SIGTERM, a scheduler's SIGUSR1; then on to the end."""
        out, number = self.folder(), self.rng.choice([signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        child = self.train(out)
        self.wait_for_log(child, out, 2000)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        child.wait()
        if child.code not in (0, 128 + number):
            return "failed", f"{number.name}: exit {child.code}, nothing saved"
        return self.resumed(out)

    def pipes(self):
        """Nobody reads what it says: pipes and descriptors that are closed, a full disk behind them."""
        out, (reader, writer) = self.folder(self.stopped if self.rng.random() < 0.5 else None), os.pipe()
        kind, numbers = self.rng.choice(["pipe", "pipe", "closed", "full"]), self.rng.choice([(1,), (2,), (1, 2)])
        if os.path.exists(out) and self.rng.random() < 0.5:  # it has something to say on stderr
            os.unlink(os.path.join(out, "ckpt.pt"))
            with open(os.path.join(out, "ckpt.pt"), "wb") as f:
                f.write(b"no checkpoint")

        def prepare():
            os.close(reader)
            for number in numbers:
                stream = {1: "stdout", 2: "stderr"}[number]
                if kind == "closed":
                    os.close(number)
                    setattr(sys, stream, None)  # as Python itself starts then
                else:
                    os.dup2(writer if kind == "pipe" else os.open("/dev/full", os.O_WRONLY), number)
                    setattr(sys, stream, open(number, "w", closefd=False))
            os.close(writer)
        idle = {} if os.path.exists(out) else {"batch_gns_factor": 2}  # it is told that this has no effect
        child = self.train(out, prepare, **idle)
        os.close(writer)
        time.sleep(self.rng.uniform(0, 0.5))
        os.close(reader)
        outcome, why = self.outcome(child, out)
        return outcome, why and f"{kind} {numbers}: {why}"

    def full_disks(self):
        """No file may grow beyond some size: refused by name, nothing left over, and on to the end with more room."""
        out, limit = self.folder(self.stopped if self.rng.random() < 0.5 else None), self.rng.randint(0, 60_000)

        def prepare():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        child = self.train(out, prepare)
        child.wait()
        if child.code != 0:
            bad = refusal(child)
            if bad and limit > 1000:  # below, there is no room for the error itself
                return "failed", bad
            left = [name for name in (os.listdir(out) if os.path.isdir(out) else []) if name.endswith(".tmp")]
            if left:
                return "failed", f"left over: {left}"
            if out not in child.error() and limit > 1000:
                return "failed", f"names no file: {child.error()[-150:]!r}"
        return self.resumed(out)

    def inputs(self):
        """A value, a config file, a dataset, an environment: runs, or one line, and then nothing has changed."""
        rng, out, more, env, changes = self.rng, self.folder(), [], {}, {}
        kind = rng.choice(["value", "value", "value", "file", "meta", "bin", "environment", "batch file", "log"])
        keys = [k for k in self.keys if k not in ("max_tokens", "out_dir", "device", "wandb_log")]
        path = os.path.join(self.work, f"input-{self.number}")
        if kind == "value":
            changes = {rng.choice(keys): rng.choice(GARBAGE) for _ in range(rng.choice([1, 1, 2]))}
        elif kind == "environment":
            env = {name: rng.choice(["abc", "-1", "0", "", "9" * 30, "1.5"]) for name in
                   rng.sample(["WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_PORT"], 2)}
        elif kind in ("file", "batch file"):
            if rng.random() < 0.2:
                os.mkfifo(path)
            else:
                with open(path, "wb") as f:
                    f.write(rng.choice(TEXTS))
            more, changes = ([path], {}) if kind == "file" else ([], {"batch_schedule": "file", "batch_file": path})
        elif kind in ("meta", "bin"):
            shutil.copytree(self.data, path)
            if kind == "meta":
                with open(os.path.join(path, "meta.json")) as f:
                    meta = json.load(f)
                meta[rng.choice(list(meta))] = rng.choice(["x", -1, 0, None, [], {}, 1.5, 10**30, "float32", True])
                with open(os.path.join(path, "meta.json"), "w") as f:
                    json.dump(meta, f)
            else:
                name = os.path.join(path, rng.choice(["train.bin", "val.bin"]))
                with open(name, "rb") as f:
                    data = flip(f.read(), rng)
                with open(name, "wb") as f:
                    f.write(data)
            changes = {"dataset": path}
        else:
            os.makedirs(out)
            with open(os.path.join(out, "log.jsonl"), "wb") as f:
                f.write(rng.choice(TEXTS) + b"\n")
        before = tree(out)
        child = self.train(out, env=env, more=[*more, "--stop_tokens=64"], **changes)
        child.wait(20)
        if child.code is None and os.path.exists(os.path.join(out, "ckpt.pt")):
            return "survived", "it trains, slowly"
        if child.code == 0:
            return ("failed", f"a damaged {kind} was trained on") if kind == "bin" else ("survived", "")
        bad = refusal(child)
        if not bad and tree(out) != before and not os.path.exists(os.path.join(out, "config.json")):
            bad = f"left something in {sorted(tree(out))}"
        return ("failed", f"{kind} {changes or env or more} {bad}"[:400]) if bad else ("refused", "")

    def edits(self):
        """A schedule in a file, edited badly while the run goes on."""
        out, path = self.folder(), os.path.join(self.work, f"schedule-{self.number}")
        with open(path, "w") as f:
            f.write("0 4\n6400 16\n")
        child = self.train(out, batch_schedule="file", batch_file=path)
        time.sleep(self.rng.uniform(0.1, 0.6))
        os.unlink(path)
        if self.rng.random() < 0.3:
            os.mkfifo(path)
        else:
            with open(path, "wb") as f:
                f.write(self.rng.choice([*TEXTS, b"0 4000000000000", b"0 -4", b"1e400 4"]))
        child.wait()
        if child.code == 0:
            return "survived", ""
        return ("failed", bad) if (bad := refusal(child)) else ("refused", "")

    def divergence(self):
        """A learning rate that is far too high: weights that are no numbers never take the place of good ones."""
        import torch

        from trainer import checkpoint
        out = self.folder()
        child = self.train(out, learning_rate=10.0 ** self.rng.randint(3, 38), min_lr=1, warmup_tokens=0, grad_clip=0)
        child.wait()
        if child.code not in (0, 1) and (bad := refusal(child)):
            return "failed", bad
        finite = all(torch.isfinite(v).all() for v in checkpoint.load(out)["model"].values())
        if not finite:
            return "failed", "the checkpoint is not finite"
        losses = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
        last = [row[key] for row in losses for key in ("train/loss", "val/loss") if key in row][-1]
        if child.code == 0 and last is None:
            return "failed", "a run that ended without a finite loss ends with 0"
        return ("survived", "") if child.code == 0 else ("refused", "")


def soak(attack, steps):
    """Descriptors, memory and time per step of a long run, at a tenth of the way and at its end."""
    out, marks = attack.folder(), []
    child = attack.train(out, max_tokens=steps * 16, micro_batch_size=1, batch_size=1, batch_size_start=1, log_interval=100,
                         eval_tokens=steps * 4, checkpoint_tokens=steps, gns_calibrate=False, warmup_tokens=16)
    log = os.path.join(out, "log.jsonl")
    while os.waitpid(child.pid, os.WNOHANG)[0] == 0:
        with contextlib.suppress(OSError):
            rows = sum(1 for _ in open(log))
            memory = int(open(f"/proc/{child.pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            files = len(os.listdir(f"/proc/{child.pid}/fd"))
            if memory and files:  # else it has just ended
                marks.append((rows, memory, files))
        time.sleep(0.2)
    first = next(m for m in marks if m[0] >= steps // 1000)
    grown, files = marks[-1][1] / first[1] - 1, marks[-1][2] - first[2]
    rows = [json.loads(row) for row in open(log)]
    times = [row["dt_ms"] for row in rows if "dt_ms" in row]
    part = max(1, len(times) // 5)
    early, late = (statistics.median(those) for those in (times[part // 2:part // 2 + part], times[-part:]))
    good = grown < 0.05 and files <= 1 and rows[-1]["step"] >= steps and late < 1.5 * early
    return ("survived" if good else "failed"), (f"{rows[-1]['step']} steps: memory {grown:+.1%}, descriptors {files:+d}, "
                                                f"a step {early:.2f} ms in the first fifth, {late:.2f} ms in the last")


# how many of a hundred cases each kind gets
KINDS = {"kills": 5, "kills_in_writes": 6, "kills_of_a_rank": 1, "kills_in_preparation": 3, "flips": 8, "holes": 7,
         "foreign": 4, "edited": 4, "swapped": 4, "meddling": 4, "meddling_with_data": 3, "pairs": 4, "pairs_of_ranks": 1,
         "signals": 3, "pipes": 4, "full_disks": 4, "small_disks": 4, "full_disks_in_preparation": 2, "read_only": 3,
         "limits": 3, "inputs": 11, "readers": 8, "edits": 3, "divergence": 2, "mutants": 8, "specials": 5, "little_memory": 3,
         "data_put_back": 3, "data_before_resume": 3, "texts_that_change": 4, "logs_in_part": 5, "rewritten": 2,
         "pairs_of_sweeps": 1}


def run(attack, counts, show=print):
    table = {}
    for kind, count in counts.items():
        row = table[kind] = {"tried": 0, "survived": 0, "refused": 0, "failed": 0, "why": []}
        attack.left_out = []
        for _ in range(count):
            try:
                found = getattr(attack, kind)()
            except Exception as e:
                found = "failed", f"the attack met {type(e).__name__}: {e}"
            if found is None:  # it needs what we may not do here: mount a disk
                continue
            outcome, why = found
            row["tried"] += 1
            row[outcome] += 1
            if outcome == "failed":
                row["why"].append(why)
        row["left_out"] = sorted(set(attack.left_out))
        show(line(kind, row))
        if row["left_out"]:
            show(f"    this version has no {', '.join(row['left_out'])}")
        for why in sorted(set(row["why"]))[:5]:
            show(f"    {why}")
    return table


def line(kind, row):
    return f"{kind:<26}" + "".join(f"{row[key]:>10}" for key in ("tried", "survived", "refused", "failed"))


def main(argv=None):
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default=here, help="the checkout to attack")
    parser.add_argument("--only", choices=tuple(KINDS))
    parser.add_argument("--soak", type=int, default=0, help="and a run of so many steps, whose memory must not grow")
    parser.add_argument("--before", help="what --out of another checkout wrote: both go into one file")
    parser.add_argument("--out", help="a JSON file for the table")
    args = parser.parse_args(argv)
    before = joined.read(args.before) if args.before else None  # what is missing is missing now, not after an hour
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, os.path.abspath(args.root))
    import torch

    from plots import style
    from trainer import hardware
    for name in ("train", "sample", "plot", "whatif", "sweep", "export", "data.text.prepare"):  # once, not in every fork
        with contextlib.suppress(ModuleNotFoundError):  # another checkout may not have it
            importlib.import_module(name)
    style.pyplot()
    torch.set_num_threads(1)
    hardware.matmul_ceiling = lambda *_, **__: 1e12  # measures for 0.3 s
    counts = {kind: max(1, round(share * args.cases / 100)) for kind, share in KINDS.items() if args.only in (None, kind)}
    print(f"{'':<26}{'tried':>10}{'survived':>10}{'refused':>10}{'failed':>10}")
    with tempfile.TemporaryDirectory() as work:
        attack = Attack(work, random.Random(args.seed))
        table = run(attack, counts, lambda text: print(text, flush=True))
        if args.soak:
            outcome, words = soak(attack, args.soak)
            table["soak"] = {"tried": 1, "survived": 0, "refused": 0, "failed": 0, outcome: 1, "why": [words]}
            print(line("soak", table["soak"]) + f"    {words}")
    total = joined.total(table)
    print(line("in all", total))
    if args.out:
        found = {"cases": args.cases, "seed": args.seed, "date": time.strftime("%Y-%m-%d"), "machine": hardware.facts("cpu"),
                 "total": total, "kinds": table}
        with open(args.out, "w") as f:
            f.write(json.dumps(joined.join(before, found) if before else found, indent=1) + "\n")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
