"""
Writes docs/first_ten_minutes.md: what three new users type in their first ten minutes, and what they read. Every command is
run, in a folder of its own, and what it prints is taken as it is, but for words about what else the machine does.

    python results/transcripts.py             # writes the page
    python results/transcripts.py --check     # fails where the page no longer says what the commands say

Numbers, generated text and what follows from the clock differ from machine to machine and are left out of the comparison.
"""

import argparse
import contextlib
import importlib
import io
import os
import pickle
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "first_ten_minutes.md"
TINY = """n_layer = 2
n_embd = 64
block_size = 64
max_tokens = 20_000
warmup_tokens = 1000
log_interval = 10
eval_tokens = 0
"""

INTRO = """# First ten minutes

What three new users type first, and what they read. `python results/transcripts.py` runs every command and writes this
page, so it says what this version says. The models are tiny, to take seconds.
"""
ROLES = {
    "Somebody who comes from nanoGPT": [
        ("say", "`data/shakespeare_char` is as nanoGPT's `prepare.py` left it: `train.bin`, `val.bin`, `meta.pkl`. The habits\n"
                "come along, too:"),
        ("same", "python train.py --dataset=shakespeare_char --max_iters=500"),
        ("same", "python train.py --dataset=shakespeare_char --gradient_accumulation_steps=4"),
        ("say", "Everything is counted in tokens, and `batch_size` is in sequences per step. A config file is Python\n"
                "assignments:"),
        ("file", "tiny.py", TINY),
        ("same", "python train.py tiny.py --dataset shakespeare_char --stop_tokens=10k"),
        ("say", "A run's folder knows its settings:"),
        ("same", "python train.py out/latest"),
        ("same", "python train.py out/latest --eval"),
        ("same", "python train.py out/latest --n_layer=6"),
        ("text", "python sample.py out/latest --prompt='def ' --tokens=40"),
        ("same", "python export.py out/latest --hf=my_gpt2"),
        ("say", "In transformers `GPT2LMHeadModel.from_pretrained('my_gpt2')` gives the same logits. `--init_from=my_gpt2` is\n"
                "the way back."),
    ],
    "Somebody with a text of her own": [
        ("same", "python train.py tiny.py --dataset=book.txt"),
        ("same", "python data/text/prepare.py book.txt --out=data/book"),
        ("same", "python train.py tiny.py --dataset=book"),
        ("say", "Another batch gets another folder by itself, and a finished run can be made longer:"),
        ("same", "python train.py tiny.py --dataset=book --batch_size=16"),
        ("same", "python train.py out/latest --max_tokens=24k"),
        ("text", "python sample.py out/latest --prompt='def ' --tokens=40"),
    ],
    "Somebody with a trainer of her own": [
        ("say", "Two lines in her loop: `w = watch(model, optimizer)` before it and `print(w)` in it.\n"
                "[`examples/plain_loop.py`](../examples/plain_loop.py) is such a loop. It begins with a comparison of `watch`\n"
                "with a plain loop over single examples:"),
        ("text", "python examples/plain_loop.py --steps=40"),
        ("say", "What cannot be measured is refused in words:"),
        ("file", "no_norm.py", "from torch import nn\n\nfrom rightbatch import watch\n\n"
                               "watch(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))\n"),
        ("same", "python no_norm.py"),
        ("say", "[More](watch.md)."),
    ],
}


# -- running

def prepare_desk(folder):
    """What the three have before they begin."""
    text = (Path(os.__file__).parent / "argparse.py").read_text(encoding="utf-8")
    (folder / "book.txt").write_text(text, encoding="utf-8")
    characters = sorted(set(text))
    import numpy as np
    ids = np.array([characters.index(c) for c in text], np.uint16)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    ids[:-8000].tofile(data / "train.bin")
    ids[-8000:].tofile(data / "val.bin")
    itos = dict(enumerate(characters))
    meta = {"vocab_size": len(characters), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


def main_of(script):
    """The function behind `python script`."""
    if not (ROOT / script).exists():
        return lambda argv: runpy.run_path(script)
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")).main


def run(command):
    """What a command prints, both streams together, and its exit code if it is not 0."""
    _, script, *arguments = shlex.split(command)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main_of(script)(arguments)
        except SystemExit as e:
            code = e.code
        except Exception as e:  # as Python's last line has it
            print(f"{type(e).__name__}: {e}")
            code = 1
    lines = [line for line in out.getvalue().strip("\n").split("\n") if not line.startswith("other processes use")]
    return "\n".join(lines) + (f"\n[exit code {code}]" if isinstance(code, int) and code else "")


def page(compared=False):
    """The whole page; or what is compared of it, without the output of "text" commands."""
    from plots import report
    parts, here = [INTRO], os.getcwd()
    no_picture = mock.patch.object(report, "draw", lambda folder: f"{folder}/report.png")
    with tempfile.TemporaryDirectory() as folder, no_picture:
        prepare_desk(Path(folder))
        os.chdir(folder)
        try:
            for role, script in ROLES.items():
                parts.append(f"## {role}\n")
                for kind, text, *more in script:
                    if kind == "say":
                        parts.append(text + "\n")
                    elif kind == "file":
                        Path(text).write_text(*more, encoding="utf-8")
                        parts.append(f"```\n$ cat {text}\n{more[0].strip()}\n```\n")
                    else:
                        printed = "" if compared and kind == "text" else f"{run(text)}\n"
                        parts.append(f"```\n$ {text}\n{printed}```\n")
        finally:
            os.chdir(here)
    return "\n".join(parts)


# -- comparing

CLOCK = ("A step takes", "Right batch", "This run's own", "Assumes a learning", "At this loss", "Noise scale of",
         "It is the norm", "The noise scale", "The schedule", "Trained")


def stable(text):
    """The lines of a page that are the same on every machine, with # for numbers. Of what a text command prints, nothing."""
    lines, free, texts = [], False, {words for script in ROLES.values() for kind, words, *_ in script if kind == "text"}
    for line in text.splitlines():
        free = line.removeprefix("$ ") in texts if line.startswith("$ ") else free and line != "```"
        line = line.split(" | gns")[0]
        line = re.sub(r"float32|bfloat16", "#", re.sub(r"\d[\d.,]*[kMB]?", "#", line.replace("threads", "thread")))
        if (not free or line.startswith("$ ")) and not line.startswith(CLOCK):
            lines.append(" ".join(line.split()))
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    if not args.check:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return 0
    if stable(PAGE.read_text(encoding="utf-8")) == stable(page(compared=True)):
        return 0
    print(f"stale: {PAGE.relative_to(ROOT)}: python results/transcripts.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
