"""
Which noise scale to go by: a ladder of vocabularies, and on each rung a sweep over batches against one measured run.

    OMP_NUM_THREADS=1 nice python experiments/ladder.py --bpe=r50k_base.tiktoken --english=texts   # hours; starts where it was
    python experiments/ladder.py --report                                                          # table and picture so far

A rung is a corpus (Python's standard library, or all *.txt of a folder), its tokens (bytes, or the first merges of GPT-2's BPE,
whose file is given or named by R50K), a tied or untied head, and a model. On each, at two lengths that differ by four:

- the critical batch by a sweep: constant batches, each with its own tuned learning rate (prediction.tune; seed 0, which is not
  reported), trained to the final loss of the measured run, and the curve through them (trainer/tradeoff.py);
- one measured run at batch 16. At some moments every weight's gradient is taken of many single examples, from the step's own
  on, and with Adam's v of that moment all candidates follow at once: norm layers, the body (all but the tables, see
  rightbatch/rows.py) or all weights; p = v^(-e/2), e = 0 the plain metric and 1 Adam's; v of each coordinate, of a row, of a
  tensor. The run's bits stay as they are;
- predictions: the steps of the other batches to that loss from the measured run alone, over those that they took.

Beside that, what may make the noise scale read low late in a run: the exponent; the part of the gradient that lasts (its
product with Adam's momentum); the lag of an average; the same run at a constant learning rate. B sequences in a step, N a noise
scale in sequences.
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import ladder_report
import numpy as np
import prediction
from candidates import measure, short
from common import Experiment

import configurator
from data.stdlib import prepare as stdlib
from sweeps import trial
from system import output
from train import validation_loss
from trainer import batches, hardware, log
from trainer.step import to_host

PAPER = ("The paper: goes by the plain noise scale of the norm layers, as a stand-in for all weights. McCandlish et al. 2018 "
         "(arXiv 1812.06162, section 2): a step of batch B makes the share B / (B + N) of the progress of one without noise.")
NOTES = ["How the moments of a run are averaged was settled after two rungs had been seen (the shorter length of bytes and of "
         "4,096 words, one seed). By the mean of both norms apart, `body/coord/1` read 18 and 15 there, by the mean of 1/N 17 "
         "and 9: one step with a huge gradient had filled the mean. The critical batches are 19 and 9. Later rungs are the "
         "test of it.",
         "English is 31 MB: GCIDE (8), Perl's manual (9), FOLDOC (6), WordNet's glosses (4), the Jargon File, the Debian "
         "Handbook and Reference and the Devil's Dictionary (4), from Debian's packages, and Wikitext-2's validation text (1)."]
SETTINGS = dict(batch_schedule="constant", learning_rate=5e-3, min_lr=5e-4, eval_iters=256, eval_tokens=0, gns="off")
TINY = dict(max_tokens=2560, learning_rate=3e-2, min_lr=3e-3)
SOURCE, BATCHES = 16, (4, 8, 16, 32, 64)  # the measured batch; those of the sweep
LENGTHS = {"short": 0.25, "long": 1.0}
TUNE = 0.35  # the length at which learning rates are tuned
TOKENS = {256: 3_000_000, 4096: 1_500_000, 50257: 600_000, 16384: 800_000}  # {words: tokens of the long run at batch 16}
GUESS = 30  # a critical batch, for the first guess at how long a run must be; others are made where that was wrong
STRETCH, TRIES, BEYOND = 1.35, 4, 1.15  # from one guess at the tokens to the next; runs; how far beyond them a loss is read
MOMENTS, EXAMPLES, KEPT = [((n + 0.5) / 60) ** 1.5 for n in range(60)], 64, 20  # of the measured run: closer where N rises fast


class Rung(NamedTuple):
    corpus: str
    words: int
    tied: bool = True
    layers: int = 3
    width: int = 96

    def __str__(self):
        return f"{self.corpus}_{self.words}_{'tied' if self.tied else 'untied'}_{self.layers}x{self.width}"


class Complete(NamedTuple):
    """One seed of one length of a rung."""
    block: int  # tokens in a sequence
    source: int  # batch of the measured runs
    measured: dict
    constant: dict | None  # the measured run at a constant learning rate
    taken: dict  # {batch: steps of a run to the loss of the measured one}


RUNGS = [Rung(corpus, words, tied, *model) for corpus, tied, model in (
    ("python", True, (3, 96)), ("english", True, (3, 96)), ("python", False, (3, 96)), ("python", True, (2, 64)))
    for words in TOKENS]


# -- data


class FirstMerges:
    """The first words of GPT-2's vocabulary, and a separator after them. The merges come in the order in which they were found,
    so these are the words of a smaller vocabulary on the same text."""
    dtype = np.dtype("<u2")

    def __init__(self, path, words):
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe
        from tiktoken_ext.openai_public import r50k_pat_str
        self.name, self.vocab_size, self.separator = f"gpt2-{words}", words, words - 1
        ranks = {word: n for word, n in load_tiktoken_bpe(path).items() if n < words - 1}
        self.bpe = tiktoken.Encoding(self.name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text):
        return np.array(self.bpe.encode_ordinary(text), np.int64)


def english(folder, piece=30_000):
    """{name: text} of all *.txt, cut at line ends into documents of some pages: a few large files could not be split."""
    texts = {}
    for path in sorted(Path(folder).glob("*.txt")):
        part, size = [], 0
        for line in path.read_bytes().replace(b"\0", b"").splitlines(keepends=True):
            part, size = [*part, line], size + len(line)
            if size >= piece:
                texts[f"{path.name}-{len(texts)}"], part, size = b"".join(part), [], 0
        texts[f"{path.name}-{len(texts)}"] = b"".join(part)
    return stdlib.readable(texts)


def dataset(rung, args):
    """The folder of a rung's tokens, made if need be."""
    folder = os.path.join(args.out, "data", f"{rung.corpus}_{rung.words}")
    if not batches.is_prepared(folder):
        if rung.corpus == "english":
            texts = english(args.english)
            source = "English: " + ", ".join(sorted({name.split("-")[0] for name in texts}))
        else:
            texts = stdlib.library_texts(Path(os.path.dirname(os.__file__)))
            source = "Python's standard library"
        tokenizer = None if rung.words == 256 else FirstMerges(args.bpe, rung.words)
        if tokenizer:
            texts = {name: text.decode("utf-8", "replace") for name, text in texts.items()}
        stdlib.write(texts, folder, stdlib.VAL_FRACTION, source, quiet=True, tokenizer=tokenizer)
    return folder


# -- one run


def train(config, data, moments=(), look=None):
    """(TrainingStep, {final validation loss, steps, curve of the training loss}) of a constant batch. look(TrainingStep, first
    example, tokens, shrink) is called before the first step that reaches each of `moments` (tokens); shrink: what clipping left
    of the last gradients, on average."""
    step = trial.build_step(config, data, config.device, hardware.prepare(config, config.device))
    schedule = configurator.batch_schedule(config, config.micro_batch_size)
    B, size, due = config.batch_size, config.micro_batch_size, sorted(moments)
    tokens, examples, records, losses, shrinks = 0, 0, [], [], [1.0]

    def fetch():
        for values in to_host(records):
            losses.append(float(values["loss"][0]))
            shrinks.append(min(1.0, config.grad_clip / (float(values["param_sq"].sum()) ** 0.5 + 1e-6)))
        records.clear()
    while tokens < config.max_tokens and math.isfinite(losses[-1] if losses else 0):
        if due and tokens >= due[0] and examples:
            fetch()
            look(step, examples, tokens, statistics.fmean(shrinks[-10:]))
            due = [moment for moment in due if moment > tokens]
        after = tokens + B * config.block_size
        parts = (data.train_batch(config.seed, examples + n * size, size, config.device) for n in range(B // size))
        step.accumulate(parts, B // size, tokens, after)
        records.append(step.update(schedule.learning_rate(tokens, after), config.beta2, config.weight_decay))
        tokens, examples = after, examples + B
        if len(records) == 50 or tokens >= config.max_tokens:
            fetch()
    loss = validation_loss(step, data)
    curve = [short(part.mean()) for part in np.array_split(losses, min(12, len(losses)))]
    return step, {"loss": loss if math.isfinite(loss) else None, "steps": len(losses), "curve": curve}


# -- all runs of a rung


class Missing(Exception):
    """A run that a report would need."""


class Ladder:
    def __init__(self, args, config):
        self.args, self.config, self.data = args, config, (None, None)
        os.makedirs(args.results, exist_ok=True)
        self.path = os.path.join(args.results, f"{args.name}_runs.json")
        self.settings = {k: v for k, v in vars(config).items() if v != configurator.FIELDS[k].default and k not in (
            "out_dir", "device", "dataset")}
        try:
            with open(self.path) as f:
                self.kept = json.load(f)
        except FileNotFoundError:
            self.kept = {"settings": self.settings, "runs": {}}
        if self.kept["settings"] != json.loads(json.dumps(self.settings)):
            sys.exit(f"error: {self.path} has runs of other settings: give another --name, or remove it")
        self.runs = self.kept["runs"]
        self.moments, self.examples = ((0.3, 0.6, 0.9), 16) if args.tiny else (MOMENTS, EXAMPLES)

    def config_of(self, rung):
        model = {} if self.args.tiny else dict(n_layer=rung.layers, n_embd=rung.width, n_head=rung.width // 32)
        tokens = self.config.max_tokens if self.args.tiny else TOKENS[rung.words]
        return dataclasses.replace(self.config, max_tokens=tokens, tie_weights=rung.tied, **model)

    def data_of(self, rung):
        folder = self.config.dataset if self.args.tiny else dataset(rung, self.args)
        if self.data[0] != folder:
            self.data = folder, batches.Dataset(folder, self.config.block_size)
        return self.data[1]

    def run(self, rung, batch, tokens, factor, seed, measured=False, **changes):
        """The record of a run: the one that is kept, or a new one."""
        tokens = round(tokens / 1000) * 1000 if tokens > 20_000 else round(tokens)
        key = "_".join([f"{rung}/batch{batch}", f"tokens{tokens}", f"lr{factor:g}", f"seed{seed}",
                        *["measured"] * measured, *map(str, changes.values())])
        if key in self.runs:
            return self.runs[key]
        if self.args.report:
            raise Missing(key)
        config, data = self.config_of(rung), self.data_of(rung)
        config = dataclasses.replace(config, **prediction.constant_batch(batch, tokens, factor, seed, "off", config), **changes)
        seen, started, cpu = [], time.time(), time.process_time()

        def look(step, examples, tokens, shrink):
            seen.append((tokens, shrink, measure(step, data, examples, self.examples)))
        _, result = train(config, data, [share * tokens for share in self.moments] if measured else (), look)
        run = {"tokens": tokens, **result, "seconds": round(time.time() - started, 1),
               "cpu_seconds": round(time.process_time() - cpu, 1), **({"seen": merged(seen)} if measured else {})}
        self.runs[key] = run
        self.save()
        print(f"{time.strftime('%d %H:%M')} {key}: loss {ended(run):.4f}, {run['seconds']:.0f} s", flush=True)
        return run

    def save(self):
        facts = {"command": self.args.command, "date": time.strftime("%Y-%m-%d"), "machine": hardware.facts(self.config.device),
                 "finding": "Each run with its final loss, and the measured ones with every candidate at every moment."}
        output.write_json(self.path, {**facts, **self.kept, **facts}, indent=None)

    def best_factors(self, rung):
        """{batch: factor on the learning rate}, tuned on seed 0."""
        def try_out(those):
            return {(b, f): ended(self.run(rung, b, TUNE * guess(self.config_of(rung).max_tokens, b), f, 0)) for b, f in those}
        tried = prediction.tune(try_out, BATCHES, centre=1.0 if rung.words == 256 else 0.5)  # words want less
        return {b: prediction.top(own) for b, own in tried.items()}

    def length(self, rung, length, seed):
        """Complete, after the runs that are missing; in a report None where there are such."""
        try:
            config, factors = self.config_of(rung), self.best_factors(rung)
            tokens = LENGTHS[length] * config.max_tokens
            measured = self.run(rung, SOURCE, tokens, factors[SOURCE], seed, measured=True)
            constant = None
            if length == "long":
                constant = self.run(rung, SOURCE, tokens, factors[SOURCE], seed, measured=True, lr_decay="none")
            ends = {b: around(lambda n, b=b: self.run(rung, b, n, factors[b], seed), guess(tokens, b), ended(measured))
                    for b in BATCHES if b != SOURCE}
        except Missing:
            return None
        steps = {SOURCE: measured["steps"]} | {b: reached(own, ended(measured)) for b, own in ends.items()}
        return Complete(config.block_size, SOURCE, measured, constant, {b: n for b, n in steps.items() if n})

    def rungs(self):
        if self.args.tiny:
            return [Rung("tiny", 256)]
        return [rung for rung in RUNGS if rung.corpus == "python" or self.args.english]

    def do(self):
        """Whole rounds of seeds; within them the vocabularies of one corpus and model, first at the shorter length."""
        families = [list(own) for _, own in itertools.groupby(self.rungs(), key=lambda rung: rung._replace(words=0))]
        for seed, family, length in itertools.product(range(1, self.args.seeds + 1), families, LENGTHS):
            for rung in family:
                started = time.time()
                self.length(rung, length, seed)
                print(f"-- {rung}, {length}, seed {seed}: {log.duration(time.time() - started)}", flush=True)


def merged(seen):
    """[(tokens, shrink, candidates)] of many moments as KEPT means: {"tokens": [...], "shrink": [...], candidate: {"inverse":
    [...], ...}}. Of the noise scale 1/N is averaged: the errors are |G|^2's, and one step with a huge gradient, which a mean of
    both norms would be full of, is one among others."""
    parts = [seen[part[0]:part[-1] + 1] for part in np.array_split(np.arange(len(seen)), min(KEPT, len(seen)))]
    found = {"tokens": [round(statistics.fmean(tokens for tokens, _, _ in part)) for part in parts],
             "shrink": [short(statistics.fmean(shrink for _, shrink, _ in part)) for part in parts]}
    for name in seen[0][2]:
        found[name] = {}
        for part in parts:
            own = {what: statistics.fmean(one[name][what] for _, _, one in part) for what in seen[0][2][name]}
            kept = {"inverse": statistics.fmean(one[name]["sq_norm"] / one[name]["tr_sigma"] for _, _, one in part)}
            if name.endswith(("coord/0", "coord/1")):
                kept |= own
            for what, value in kept.items():
                found[name].setdefault(what, []).append(short(value))
    return found


def guess(tokens, batch):
    """The tokens of a run that ends where one of `tokens` at SOURCE does, if the critical batch were GUESS."""
    return tokens * (1 + batch / GUESS) / (1 + SOURCE / GUESS)


def ended(run):
    return math.inf if run["loss"] is None else run["loss"]


def around(run, tokens, target):
    """[(steps, loss)] of run(tokens), the first with `tokens`, shorter or longer ones after it until the target lies between
    two."""
    found = [run(tokens)]
    way = STRETCH if ended(found[0]) > target else 1 / STRETCH
    while len(found) < TRIES and (min(map(ended, found)) > target or max(map(ended, found)) < target):
        tokens *= way
        found.append(run(tokens))
    return sorted((own["steps"], ended(own)) for own in found)


def reached(ends, target):
    """The steps of a run that ends at the target, on a line through the two nearest of [(steps, loss)] in the logarithm of the
    steps; None far outside of what was run."""
    ends = [(math.log(steps), loss) for steps, loss in ends if math.isfinite(loss)]
    pairs = [pair for pair in zip(ends, ends[1:]) if pair[0][1] > pair[1][1]]
    if not pairs:
        return None
    (a, high), (b, low) = min(pairs, key=lambda pair: max(target - pair[0][1], pair[1][1] - target))
    found = a + (b - a) * (high - target) / (high - low)
    return math.exp(found) if a - math.log(BEYOND) <= found <= b + math.log(BEYOND) else None


def climb(runs):
    """All runs that are missing, then the numbers of the report."""
    args, config = runs.args, runs.config
    config.device = hardware.pick_device(config.device)
    if not (args.tiny or args.report or args.bpe):
        sys.exit("error: --bpe: where is r50k_base.tiktoken, whose first merges are the vocabularies?")
    ladder = Ladder(args, config)
    if not args.report:
        ladder.do()
        args.report = True
    numbers = ladder_report.collect({(rung, length): [ladder.length(rung, length, seed) for seed in range(1, args.seeds + 1)]
                                     for rung in ladder.rungs() for length in LENGTHS})
    return {**numbers, "notes": NOTES}, None


OPTIONS = {"--report": dict(action="store_true", help="table and picture of what is there; nothing is run"),
           "--bpe": dict(default=os.environ.get("R50K"), help="r50k_base.tiktoken; default: the variable R50K"),
           "--english": dict(help="a folder of *.txt; without it those rungs are left out")}
main = Experiment("ladder", __doc__, PAPER, climb, ladder_report.finding, ladder_report.draw, SETTINGS, TINY, seeds=3,
                  options=OPTIONS)

if __name__ == "__main__":
    sys.exit(main())
