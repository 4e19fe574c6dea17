"""
Text from a checkpoint.

    python sample.py out/quickstart
    python sample.py out/gpt_111m --prompt="The right batch size" --tokens=200 --temperature=0.8 --seed=1
    python sample.py out/quickstart --newest

It takes the checkpoint with the lowest validation loss, ckpt.best.pt, and says so; --newest takes the last one.
"""

import argparse
import os
import signal
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -I leaves it out
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save

import torch
from torch.nn import functional as F

from data import tokenizers
from model import GPT, GPTConfig
from system import errors, terminal
from system.errors import ConfigError
from trainer import checkpoint, hardware, start


def load_model(out_dir, device, best=False):
    """(model, tokenizer name) of a run folder, from its newest checkpoint or the one with the lowest validation loss."""
    saved = load(out_dir, device, best)
    with start.restoring(saved["path"]):
        return model_of(saved, device), saved["data"]["tokenizer"]


def load(out_dir, device="cpu", best=True):
    """The checkpoint of a run folder, with all parts."""
    saved = (checkpoint.load_best if best else checkpoint.load)(out_dir, device)
    start.check_parts(saved)
    return saved


def model_of(saved, device):
    """The model of a checkpoint; no larger than its weights are."""
    config, weights = saved["config"], saved["model"]
    blocks = {name.split(".")[1] for name in weights if name.startswith("h.")}
    shapes, width = [tuple(weights[f"{name}.weight"].shape) for name in ("wte", "wpe")], config["n_embd"]
    if (len(blocks) != config["n_layer"] or width % config["n_head"]
            or shapes != [(saved["vocab_size"], width), (config["block_size"], width)]):
        raise ValueError("its weights have other shapes than its settings say")
    model = GPT(GPTConfig.of(saved["config"], saved["vocab_size"])).to(device)
    model.load_state_dict(saved["model"])
    return model.eval()


@torch.no_grad()
def generate(model, ids, tokens, temperature, top_k, generator):
    """ids (1, T) continued by `tokens` draws."""
    for _ in range(tokens):
        logits, _ = model(ids[:, -model.config.block_size:])
        logits = logits[0, -1].float()
        if temperature == 0:
            following = logits.argmax().view(1)
        else:
            best, where = torch.topk(logits / temperature, min(top_k, len(logits)))
            following = where[torch.multinomial(F.softmax(best, -1).cpu(), 1, generator=generator).to(where.device)]
        ids = torch.cat([ids, following.view(1, 1)], 1)
    return ids


def encode(tokenizer, prompt, vocab_size):
    """Token ids of a prompt, all of which the model knows."""
    ids = tokenizer.encode(prompt.encode("utf-8", "replace").decode()).tolist()  # a shell may hand over half a character
    if max(ids) >= vocab_size:
        raise ConfigError(f"--prompt: token {max(ids)} is none of the {vocab_size} that the model was trained on")
    return ids


def main(argv=None):
    terminal.steady()
    parser = terminal.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir")
    parser.add_argument("--prompt", default="\n")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token each time")
    parser.add_argument("--top_k", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--newest", action="store_true", help="the last checkpoint instead of the one with the lowest "
                                                              "validation loss")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    args = parser.parse_args(argv)
    if not 0 <= args.temperature < float("inf") or args.top_k < 1 or args.tokens < 1 or not 0 <= args.seed < 2**63:
        parser.error("--temperature and --seed must be at least 0, --top_k and --tokens at least 1")
    with errors.one_line():
        device = hardware.pick_device(args.device)
        saved = load(args.out_dir, device, best=not args.newest)
        with start.restoring(saved["path"]):
            model, tokenizer = model_of(saved, device), tokenizers.tokenizer_of(saved["data"])
            print(f"{saved['path']}: step {saved['state']['step']}", file=sys.stderr)
            ids = torch.tensor([encode(tokenizer, args.prompt or "\n", model.config.vocab_size)], device=device)
            ids = generate(model, ids, args.tokens, args.temperature, args.top_k, torch.Generator().manual_seed(args.seed))
            text = tokenizer.decode(ids[0].tolist())
    print(text)
    return terminal.heard()


if __name__ == "__main__":
    sys.exit(main())
