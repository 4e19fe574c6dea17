"""
bench.py data: how fast text becomes token files, and whether memory stays flat while the text grows.

    python bench.py data --text=book.txt --megabytes=10

Ours is all of data/text/prepare.py with GPT-2's BPE: reading, decoding, encoding on all cores, checking, writing, checksums.
Beside it tiktoken's own encode_ordinary_batch on all cores, with the text in memory already and cut into parts at line ends;
its lists of ids are dropped. The two take turns. Peak memory is that of processes of their own, one with ten times the text.
"""

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.tools import ROOT, interleave, paired, quartiles, spread, write_json
from configurator import ConfigError
from data import tokens
from data.text.prepare import prepare

PART = tokens.UNIT  # characters per part of tiktoken's batch: as many as ours, so that cores finish together


def arguments(parser):
    parser.add_argument("--text", required=True, help="a UTF-8 text, which is repeated")
    parser.add_argument("--megabytes", type=float, default=10.0, help="of text for the rates; memory also with ten times that")
    parser.add_argument("--seconds", type=float, default=20.0, help="at least")
    parser.add_argument("--rounds", type=int, default=5, help="at least so many")
    parser.add_argument("--out", default="results/data.json")


def repeat(source, target, n_bytes):
    """n_bytes of a text, over and over, at line ends."""
    with open(source, "rb") as f:
        text = f.read(n_bytes)
    if not text.strip():
        raise ConfigError(f"--text={source}: is empty")
    text += b"" if text.endswith(b"\n") else b"\n"
    with open(target, "wb") as f:
        while f.tell() < n_bytes:
            f.write(text)
    return os.path.getsize(target)


def parts_of(text):
    parts, start = [], 0
    while start < len(text):
        end = text.rfind("\n", start, start + PART) + 1 or start + PART
        parts.append(text[start:end])
        start = end
    return parts


def rates(path, folder, seconds, rounds):
    """{variant: spread, MB/s}, and the ratio of rates in each round."""
    bpe = tokens.load_bpe()
    with open(path, encoding="utf-8") as f:
        parts = parts_of(f.read())
    megabytes = os.path.getsize(path) / 1e6

    def ours():
        start = time.perf_counter()
        prepare([path], os.path.join(folder, "out"), "gpt2", quiet=True)
        return {"all": time.perf_counter() - start}

    def theirs():
        start = time.perf_counter()
        bpe.encode_ordinary_batch(parts, num_threads=tokens.cores())
        return {"all": time.perf_counter() - start}
    samples = {name: s["all"] for name, s in interleave({"ours": ours, "tiktoken": theirs}, seconds, rounds).items()}
    report = {name: {**spread(s), "megabytes_per_second": [megabytes / t for t in reversed(quartiles(s))]}
              for name, s in samples.items()}
    return {**report, "megabytes": megabytes, **paired(samples["tiktoken"], samples["ours"])}


def peak_memory(path, folder):
    """Largest resident set, in bytes, of a process that prepares the text. Linux gives a new process its parent's ru_maxrss, so
    there it is asked of the process's own memory map."""
    code = """if True:
        import os, resource, sys
        from data import tokens
        from data.text.prepare import prepare
        tokens.return_large_blocks()  # as the script does
        prepare([sys.argv[1]], sys.argv[2], "gpt2", quiet=True)
        if os.path.exists("/proc/self/status"):
            line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
            print(1024 * int(line.split()[1]))
        else:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""
    process = subprocess.run([sys.executable, "-c", code, path, folder], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(process.stderr.strip().splitlines()[-1])
    return int(process.stdout)


def run(args):
    if not os.path.isfile(args.text):
        raise ConfigError(f"--text={args.text}: no such file")
    with tempfile.TemporaryDirectory() as folder:
        small, large = (os.path.join(folder, f"{name}.txt") for name in ("small", "large"))
        sizes = [repeat(args.text, small, int(args.megabytes * 1e6)), repeat(args.text, large, int(args.megabytes * 1e7))]
        try:
            speed = rates(small, folder, args.seconds, args.rounds)
        except tokens.PrepareError as e:
            raise ConfigError(e) from None
        memory = [peak_memory(path, os.path.join(folder, f"out{i}")) for i, path in enumerate((small, large))]
    print(f"{speed['megabytes']:.1f} MB of text, {tokens.cores()} cores, {speed['ours']['n']} rounds; MB/s: median (quartiles)")
    for name in ("ours", "tiktoken"):
        low, median, high = speed[name]["megabytes_per_second"]
        print(f"  {name:10}{median:7.2f} ({low:.2f} to {high:.2f})")
    print(f"  ours / tiktoken, each round's: {speed['ratio']:.3f} ({speed['ratio_q1']:.3f} to {speed['ratio_q3']:.3f})")
    print(f"  peak memory: {memory[0] / 2**20:.0f} MiB for {sizes[0] / 1e6:.1f} MB of text, {memory[1] / 2**20:.0f} MiB for "
          f"{sizes[1] / 1e6:.1f} MB: {memory[1] / memory[0]:.3f} times")
    write_json(args.out, {"cores": tokens.cores(), "speed": speed, "text_bytes": sizes, "peak_bytes": memory,
                          "memory_ratio": memory[1] / memory[0]})
