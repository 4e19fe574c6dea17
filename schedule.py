"""
Pure functions of the tokens seen so far: batch size and learning rate. Nothing here counts steps, since steps change
size. Batches are in sequences and come in whole quanta (micro-batch x processes).
"""

import math


def batch_size_at(tokens, config, quantum):
    """The effective batch of the step that starts at `tokens`, a multiple of `quantum`, exact at both ends."""
    start, end = config.batch_size_start, config.batch_size
    if config.batch_schedule == "constant":
        return end
    share = min(tokens / config.max_tokens, 1.0)
    return to_quanta(start + (end - start) * share, quantum)


def to_quanta(batch, quantum):
    return max(1, math.floor(batch / quantum + 0.5)) * quantum


def learning_rate_at(tokens, config):
    """Linear warm-up from 0, then linear or cosine decay to min_lr at decay_tokens, then min_lr."""
    if tokens < config.warmup_tokens:
        return config.learning_rate * tokens / config.warmup_tokens
    if config.lr_decay == "none":
        return config.learning_rate
    end = config.decay_tokens or config.max_tokens
    share = 1.0 if tokens >= end else (tokens - config.warmup_tokens) / (end - config.warmup_tokens)
    left = 1 - share if config.lr_decay == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    return config.min_lr + (config.learning_rate - config.min_lr) * left
