"""
A run's model for other programs.

    python export.py out/quickstart --hf=my_gpt2         # a GPT-2 that transformers loads; --hf alone: into out/quickstart/hf
    python export.py out/quickstart --hf --newest

It takes the checkpoint with the lowest validation loss, ckpt.best.pt; --newest takes the last one. In transformers:
GPT2LMHeadModel.from_pretrained("my_gpt2") gives the same logits. The way back is python train.py --init_from=my_gpt2.

What GPT-2 has no place for is refused by name: RMSNorm, cosine attention, spectral QKV. Models without biases get zeros, heads
of their own stay so, the vocabulary is as large as the run's.
"""

import argparse
import os
import signal
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -I leaves it out
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save

import sample
from system import errors, terminal
from trainer import huggingface, start

TOKENIZERS = {"gpt2": "its tokenizer is GPT-2's: AutoTokenizer.from_pretrained('gpt2')",
              "bytes": "a token is a byte of UTF-8: ids = list(text.encode())",
              "characters": "a token is a character: the list is in the run's config.json, data.characters"}


def main(argv=None):
    terminal.steady()
    parser = terminal.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir")
    parser.add_argument("--hf", nargs="?", const="", metavar="FOLDER", help="write a GPT-2 for transformers there")
    parser.add_argument("--newest", action="store_true", help="the last checkpoint instead of the one with the lowest "
                                                              "validation loss")
    args = parser.parse_args(argv)
    if args.hf is None:
        parser.error("say into what: --hf, or --hf=FOLDER")
    folder = args.hf or os.path.join(args.out_dir, "hf")
    with errors.one_line():
        saved = sample.load(args.out_dir, best=not args.newest)
        with start.restoring(saved["path"]):
            separator, step = saved["data"].get("separator"), saved["state"]["step"]
            if not isinstance(separator, int | None):
                raise TypeError("separator")
            huggingface.write(sample.model_of(saved, "cpu"), folder, separator)
    print(f"{folder}: a GPT-2 for transformers, from {saved['path']}, step {step}; "
          f"{TOKENIZERS.get(saved['data']['tokenizer'], 'its tokenizer is the dataset' + chr(39) + 's')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
