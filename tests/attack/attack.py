"""
An attack on the trainer: kills, damaged files, pairs of starts, bad input, full disks, lost terminals. One table at the end.

    python tests/attack/attack.py                     # the short one, part of the tests
    python tests/attack/attack.py --cases=1000        # make attack
    python tests/attack/attack.py --only=flips --seed=3
    python tests/attack/attack.py --cases=1000 --soak=10000 --out=results/attack.json

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
import shutil
import signal
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests import helpers  # noqa: E402
from tests.attack.harness import (  # noqa: E402
    CHECKPOINTS,
    GARBAGE,
    TEXTS,
    FailedError,
    RefusedError,
    UntriedError,
    damage,
    deadly,
    expect,
    flip,
    result,
    rewrite,
)
from tests.attack.hostile import Hostile  # noqa: E402
from tests.attack.sources import Sources  # noqa: E402

COLUMNS = ("tried", "survived", "refused", "failed")


class Attack(Hostile, Sources):
    def kills(self):
        """At any moment, from the start on; then on to the end."""
        out = self.folder()
        for _ in range(self.rng.randint(1, 3)):
            child = self.train(out)
            self.pause(0.0, 0.8)
            child.kill(signal.SIGKILL)
            child.wait()
        self.resumed(out)

    def kills_in_writes(self):
        """In the middle of a write to a file, before or after an fsync, a replace, a link."""
        out = self.folder()
        for _ in range(self.rng.randint(1, 2)):
            self.train(out, deadly(self.rng, writes=400, others=40), keep_checkpoints=self.rng.choice([1, 2, 4])).wait()
        self.resumed(out)

    def flips(self):
        """One bit of a checkpoint."""
        out = self.folder(self.stopped)
        rewrite(os.path.join(out, "ckpt.pt"), lambda data: flip(data, self.rng))
        self.resumed(out)

    def holes(self):
        """Zeros, a cut, foreign content, in checkpoint or log."""
        out = self.folder(self.stopped)
        damage(os.path.join(out, self.rng.choice(["ckpt.pt", "log.jsonl", "config.json"])), self.rng)
        self.resumed(out)

    def foreign(self):
        """A checkpoint that torch can read and train.py did not write."""
        import torch
        out = self.folder(self.stopped)
        path = os.path.join(out, CHECKPOINTS[0])
        state = torch.load(path, weights_only=True)
        for key in self.rng.sample(list(state), self.rng.randint(0, 3)):
            state[key] = self.rng.choice([None, {}, [], "x", -1, torch.zeros(2)])
        os.unlink(path)
        torch.save(self.rng.choice([state, {"model": state["model"]}, state["model"], [1], "x"]), path)
        self.resumed(out)

    def pairs(self):
        """Two starts into one folder, perhaps under two names."""
        out = other = self.folder()
        if self.chance(0.3):
            other = out + "-link"
            os.mkdir(out)
            os.symlink(out, other)
        children = [self.train(out)]
        self.pause(0, 0, 0.05, 0.3)
        children.append(self.train(other))
        codes = [child.wait() for child in children]
        for child in children:
            if child.code != 0:
                child.refused("one of two")
        expect(0 in codes, f"nobody ran: {codes}")
        expect(helpers.same_tensors(result(out), self.reference), "a mix of two runs")

    def signals(self):
        """A terminal that is lost, Ctrl-C, SIGTERM, a scheduler's SIGUSR1; then on to the end."""
        out, number = self.folder(), self.rng.choice([signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        child = self.train(out)
        self.wait_for_log(child, out, 2000)
        child.kill(number)
        expect(child.wait() in (0, 128 + number), f"{number.name}: exit {child.code}, nothing saved")
        self.resumed(out)

    def pipes(self):
        """Nobody reads what it says: pipes and descriptors that are closed, a full disk behind them."""
        out, (reader, writer) = self.some_folder(), os.pipe()
        kind, numbers = self.rng.choice(["pipe", "pipe", "closed", "full"]), self.rng.choice([(1,), (2,), (1, 2)])
        if os.path.exists(out) and self.chance(0.5):  # it has something to say on stderr
            rewrite(os.path.join(out, "ckpt.pt"), lambda _: b"no checkpoint")

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
        self.pause(0.0, 0.5)
        os.close(reader)
        self.came_to_its_end(child, out, about=f"{kind} {numbers}")

    def inputs(self):
        """A value, a config file, a dataset, an environment: runs, or one line, and then nothing has changed."""
        rng, out, more, env, changes = self.rng, self.folder(), [], {}, {}
        kind = rng.choice(["value", "value", "value", "file", "meta", "bin", "environment", "batch file", "log"])
        path = os.path.join(self.work, f"input-{self.number}")
        if kind == "value":
            import configurator
            keys = [k for k in configurator.FIELDS if k not in ("max_tokens", "out_dir", "device", "wandb_log")]
            changes = {rng.choice(keys): rng.choice(GARBAGE) for _ in range(rng.choice([1, 1, 2]))}
        elif kind == "environment":
            env = {name: rng.choice(["abc", "-1", "0", "", "9" * 30, "1.5"]) for name in
                   rng.sample(["WORLD_SIZE", "RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_PORT"], 2)}
        elif kind in ("file", "batch file"):
            self.pipe_or_text(path, TEXTS, 0.2)
            more, changes = ([path], {}) if kind == "file" else ([], {"batch_schedule": "file", "batch_file": path})
        elif kind in ("meta", "bin"):
            shutil.copytree(self.data, path)
            if kind == "meta":
                def change(data):
                    meta = json.loads(data)
                    meta[rng.choice(list(meta))] = rng.choice(["x", -1, 0, None, [], {}, 1.5, 10**30, "float32", True])
                    return json.dumps(meta).encode()
                rewrite(os.path.join(path, "meta.json"), change)
            else:
                rewrite(os.path.join(path, rng.choice(["train.bin", "val.bin"])), lambda data: flip(data, rng))
            changes = {"dataset": path}
        else:
            os.makedirs(out)
            with open(os.path.join(out, "log.jsonl"), "wb") as f:
                f.write(rng.choice(TEXTS) + b"\n")
        before = helpers.tree(out)
        child = self.train(out, env=env, more=[*more, "--stop_tokens=64"], **changes)
        if child.wait(20) is None and os.path.exists(os.path.join(out, "ckpt.pt")):
            return  # it trains, slowly
        expect(child.code != 0 or kind != "bin", "damaged data were trained on")
        if child.code != 0:
            child.refused(f"{kind} {changes or env or more}"[:300])
            expect(helpers.tree(out) == before or os.path.exists(os.path.join(out, "config.json")),
                   f"left something in {sorted(helpers.tree(out))}")
            raise RefusedError

    def pipe_or_text(self, path, texts, share):
        """In this share of cases a pipe, else a file with one of the texts."""
        if self.chance(share):
            os.mkfifo(path)
        else:
            with open(path, "wb") as f:
                f.write(self.rng.choice(texts))

    def edits(self):
        """A schedule in a file, edited badly while the run goes on."""
        out, path = self.folder(), os.path.join(self.work, f"schedule-{self.number}")
        with open(path, "w") as f:
            f.write("0 4\n6400 16\n")
        child = self.train(out, batch_schedule="file", batch_file=path)
        self.pause(0.1, 0.6)
        os.unlink(path)
        self.pipe_or_text(path, [*TEXTS, b"0 4000000000000", b"0 -4", b"1e400 4"], 0.3)
        child.answered()

    def divergence(self):
        """A learning rate that is far too high: weights that are no numbers never take the place of good ones."""
        import torch
        out = self.folder()
        child = self.train(out, learning_rate=10.0 ** self.rng.randint(3, 38), min_lr=1, warmup_tokens=0, grad_clip=0)
        if child.wait() not in (0, 1):
            child.refused()
        rows, weights = result(out)
        expect(all(torch.isfinite(v).all() for v in weights.values()), "the checkpoint is not finite")
        last = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row][-1]
        expect(child.code != 0 or last is not None, "a run that ended without a finite loss ends with 0")
        if child.code != 0:
            raise RefusedError


def soak(attack, steps):
    """Descriptors, memory and time per step of a long run, at a tenth of the way and at its end: (good or not, words)."""
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
    return good, (f"{rows[-1]['step']} steps: memory {grown:+.1%}, descriptors {files:+d}, a step {early:.2f} ms in the first "
                  f"fifth, {late:.2f} ms in the last")


# how many of a hundred cases each kind gets
KINDS = {"kills": 5, "kills_in_writes": 6, "kills_of_a_rank": 1, "kills_in_preparation": 3, "flips": 8, "holes": 7,
         "foreign": 4, "edited": 4, "swapped": 4, "meddling": 4, "meddling_with_data": 3, "pairs": 4, "pairs_of_ranks": 1,
         "signals": 3, "pipes": 4, "full_disks": 4, "small_disks": 4, "full_disks_in_preparation": 2, "read_only": 3,
         "limits": 3, "inputs": 11, "readers": 8, "edits": 3, "divergence": 2, "mutants": 8, "specials": 5, "little_memory": 3,
         "data_put_back": 3, "data_before_resume": 3, "texts_that_change": 4, "logs_in_part": 5, "rewritten": 2,
         "pairs_of_sweeps": 1}


def outcome(case):
    """(survived, refused or failed, in which words); None for a case that could not be tried."""
    try:
        case()
    except UntriedError:
        return None
    except RefusedError:
        return "refused", ""
    except FailedError as e:
        return "failed", str(e)
    except Exception as e:
        return "failed", f"the attack met {type(e).__name__}: {e}"
    return "survived", ""


def run(attack, counts, show=print):
    table = {}
    for kind, count in counts.items():
        row = table[kind] = {**dict.fromkeys(COLUMNS, 0), "why": []}
        for found in filter(None, (outcome(getattr(attack, kind)) for _ in range(count))):
            row["tried"] += 1
            row[found[0]] += 1
            row["why"] += [found[1]] if found[0] == "failed" else []
        show(line(kind, row))
        for why in sorted(set(row["why"]))[:5]:
            show(f"    {why}")
    return table


def line(kind, row):
    return f"{kind:<26}" + "".join(f"{row[key]:>10}" for key in COLUMNS)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=tuple(KINDS))
    parser.add_argument("--soak", type=int, default=0, help="and a run of so many steps, whose memory must not grow")
    parser.add_argument("--out", help="a JSON file for the table")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from plots import style
    from trainer import hardware
    for name in ("train", "sample", "plot", "whatif", "sweep", "export", "data.text.prepare"):  # once, not in every fork
        importlib.import_module(name)
    style.pyplot()
    torch.set_num_threads(1)
    hardware.matmul_ceiling = lambda *_, **__: 1e12  # measures for 0.3 s
    counts = {kind: max(1, round(share * args.cases / 100)) for kind, share in KINDS.items() if args.only in (None, kind)}
    print(f"{'':<26}" + "".join(f"{key:>10}" for key in COLUMNS))
    with tempfile.TemporaryDirectory() as work:
        attack = Attack(work, random.Random(args.seed))
        table = run(attack, counts, lambda text: print(text, flush=True))
        if args.soak:
            good, words = soak(attack, args.soak)
            table["soak"] = {"tried": 1, "survived": int(good), "refused": 0, "failed": int(not good), "why": [words]}
            print(line("soak", table["soak"]) + f"    {words}")
    total = {key: sum(row[key] for row in table.values()) for key in COLUMNS}
    print(line("in all", total))
    if args.out:
        words = (f"Of {total['tried']:,} cases {total['survived']:,} survived bit for bit, {total['refused']:,} were refused "
                 f"in words, {total['failed']:,} failed.")
        found = {"command": f"python tests/attack/attack.py --cases={args.cases} --seed={args.seed} --soak={args.soak}",
                 "cases": args.cases, "seed": args.seed, "date": time.strftime("%Y-%m-%d"), "machine": hardware.facts("cpu"),
                 "finding": words, "total": total, "kinds": table}
        with open(args.out, "w") as f:
            f.write(json.dumps(found, indent=1) + "\n")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
