"""
How far a reader has to go for one training step: the Python calls of an ordinary step (neither logged nor sampled) of the
quickstart, counted among this project's own files.

    python tests/step_trace.py                  # of this checkout
    python tests/step_trace.py ../other         # of another one
    python tests/step_trace.py --list           # every call, in order
"""

import collections
import os
import sys
import tempfile

STEPS = 40
SETTINGS = {"dataset": "stdlib", "device": "cpu", "dtype": "float32", "max_tokens": STEPS * 8 * 128, "warmup_tokens": 0,
            "batch_schedule": "constant", "batch_size": 8, "eval_iters": 1}


def trace(checkout):
    """[(file, function) of each call of a step], for each step of a short run."""
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    import train
    from trainer.distributed import Ranks
    steps, first = [], Ranks.vote.__code__  # what each turn of the loop begins with

    def profile(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(checkout + os.sep):
            return
        if code is first:
            steps.append([])
        if steps:
            steps[-1].append((os.path.relpath(code.co_filename, checkout), code.co_qualname))
    train.summary.closing = lambda *_: ""  # no words, no picture: the steps alone
    train.Run.draw = lambda run: None
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(profile)
        try:
            train.main([f"--{key}={value}" for key, value in {**SETTINGS, "out_dir": os.path.join(folder, "run")}.items()])
        finally:
            sys.setprofile(None)
    return steps


def main(argv):
    names = [a for a in argv if not a.startswith("--")]
    checkout = os.path.realpath(names[0] if names else os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    steps = trace(checkout)[STEPS // 4:-1]
    calls = collections.Counter(map(tuple, steps)).most_common(1)[0][0]  # most steps are ordinary ones
    if "--list" in argv:
        print("\n".join(f"{file:<32} {function}" for file, function in calls))
    files = [file for file, _ in calls]
    changes = sum(a != b for a, b in zip(files, files[1:]))
    print(f"{len(calls)} calls in {len(set(calls))} functions of {len(set(files))} files, {changes} changes of file")
    for file, count in collections.Counter(files).most_common():
        print(f"{count:>6}  {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
