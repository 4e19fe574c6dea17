"""
watch in a training loop of your own: a small transformer of plain torch learns the bytes of Python's standard library.

    python examples/plain_loop.py [--steps=200]
"""

import argparse
import glob
import os

import torch
from torch import nn

from rightbatch import verify, watch

C, T = 64, 64  # channels, tokens


class Transformer(nn.Module):
    def __init__(self, layers=2, heads=4, vocabulary=256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, C), nn.Embedding(T, C)
        block = nn.TransformerEncoderLayer(C, heads, 4 * C, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(C), enable_nested_tensor=False)
        self.head = nn.Linear(C, vocabulary)

    def forward(self, idx):  # (B, T)
        x = self.tokens(idx) + self.positions.weight[:idx.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        return self.head(self.blocks(x, mask, is_causal=True))


def loss_of(model, idx):
    return nn.functional.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())


def text():
    paths = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:80]
    return torch.frombuffer(bytearray(b"".join(open(path, "rb").read() for path in paths)), dtype=torch.uint8).long()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    steps, batch = vars(parser.parse_args(argv)).values()
    torch.manual_seed(0)
    data, model = text(), Transformer()
    draw = lambda: torch.stack([data[i:i + T + 1] for i in torch.randint(len(data) - T, (batch // 2,)).tolist()])  # noqa: E731
    print(verify(model, loss_of, draw()))

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    w = watch(model, optimizer)  # the one line: steps close themselves when the optimizer steps
    for step in range(1, steps + 1):
        for _ in range(2):  # two micro-batches
            loss = loss_of(model, draw())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 5) == 0:
            print(f"step {step} loss {loss.item():.3f} {w}")
    print(w.whatif())  # the right batch on this machine
    return w


if __name__ == "__main__":
    main()
