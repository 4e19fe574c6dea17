"""
What a forward pass is given: how many examples and tokens, and what each example weighs in the loss. Arguments count by their
names, whether they come by name, by position or in a dict.

Letters: B examples, T positions.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass

import torch

from rightbatch.recognise import WatchError

IGNORED = -100  # the label that losses leave out, by torch's convention


@dataclass
class Facts:
    """What a model's own code says about its arguments and its loss. Read once: a compiled model's hooks cannot look."""
    names: list        # of forward's positional arguments
    shift: int         # 1 where it shifts labels to the left itself, as causal language models of Hugging Face do
    uses_items: bool   # its loss is divided by num_items_in_batch
    mask: str | None   # the argument that says which positions have logits of their own: of models with a language head


def facts_of(model):
    names, of_hugging_face = names_of(model), ("loss_function", "get_output_embeddings", "config_class")
    inner = next((m for m in model.modules() if all(hasattr(type(m), name) for name in of_hugging_face)), None)
    if inner is None:
        return Facts(names, 0, "num_items_in_batch" in names, None)
    pair = inner.config.is_encoder_decoder
    causal = inner.loss_type in (None, "ForCausalLM", "ForConditionalGeneration")
    head = inner.get_output_embeddings() is not None
    return Facts(names, int(causal and not pair), "num_items_in_batch" in names or loss_uses_items(inner),
                 ("decoder_attention_mask" if pair else "attention_mask") if head else None)


def names_of(model):
    """A wrapper that hands on *args, as DDP does, has the names of what it wraps."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    children = list(model.children())
    return names_of(children[0]) if not names and len(children) == 1 else names


def loss_uses_items(model):
    """Whether forward hands num_items_in_batch on to a loss that takes it. Trainer passes it to any model that takes **kwargs,
    also to those that leave it lying."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(model.forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    calls = [n for n in ast.walk(code) if isinstance(n, ast.Call)
             and any(k.arg in (None, "num_items_in_batch") for k in n.keywords)]
    names = [getattr(n.func, "attr", None) or getattr(n.func, "id", "") for n in calls]
    if "loss_function" not in names:
        return any("loss" in name.lower() for name in names)
    taken = inspect.signature(model.loss_function).parameters.values()
    return any(p.name == "num_items_in_batch" or p.kind == p.VAR_KEYWORD for p in taken)


def leaves(values, name=""):
    """[(name, value)] of nested arguments, in order; what has no name of its own has that of what it is in."""
    if isinstance(values, torch.Tensor):
        return [(name, values)]
    if isinstance(values, (tuple, list)):
        return [leaf for v in values for leaf in leaves(v, name)]
    if hasattr(values, "keys") and hasattr(values, "items"):
        return [leaf for key, v in values.items() for leaf in leaves(v, key if isinstance(key, str) else name)]
    return [(name, values)]


def arguments(facts, args, kwargs):
    """The leaves of a call."""
    names = facts.names + [""] * len(args)
    return [leaf for name, value in zip(names, args) for leaf in leaves(value, name)] + leaves(kwargs)


def first_input(given):
    """The tensor that tells the number of examples: the first of two dimensions or more; not a mask, which may be (T, T)."""
    found = [(name, v) for name, v in given if isinstance(v, torch.Tensor) and v.dim() >= 2]
    return next((v for name, v in [*(pair for pair in found if "mask" not in pair[0]), *found]), None)


def named(given, name):
    return next((v for n, v in given if n == name), None)


def lengths_of(facts, given, B, segments):
    """(B,) tokens of each example that count in the loss, or None where there is nothing to tell them from."""
    labels, mask = named(given, "labels"), named(given, facts.mask)
    shift, counts = 0, None
    if isinstance(labels, torch.Tensor):
        if labels.dim() != 2 or labels.is_floating_point() or labels.shape[0] != B:
            return None
        shift = facts.shift
        counts = labels[:, shift:] != IGNORED  # what position t predicts
    elif isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == B:
        counts = mask
    if segments is None:
        return None if counts is None else counts.sum(1)
    document, n = segments
    document = document[:, :document.shape[1] - shift]
    counts = torch.ones_like(document) if counts is None else counts.long()
    return counts.new_zeros(n + 1).index_add_(0, document.reshape(-1) % (n + 1), counts.reshape(-1))[:n]


def one_mean_per_step(facts, given):
    """Whether the loss is a part of one mean over the whole step, as Hugging Face's Trainer has it. Without labels the model
    has no loss, and what the caller does with its output is not known here."""
    return facts.uses_items and all(named(given, name) is not None for name in ("num_items_in_batch", "labels"))


def check_documents(ids, n):
    """Each document in one row, numbered below n."""
    if int(ids.max()) >= n or int(ids.min()) < -1:
        raise WatchError(f"w.segments: documents are numbered from 0 to {n - 1}, padding is -1; got {int(ids.min())} to "
                         f"{int(ids.max())}")
    rows = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
    first, last = (torch.full((n + 1,), fill).scatter_reduce_(0, ids.reshape(-1).long() % (n + 1), rows, how) for fill, how in (
        (len(ids), "amin"), (-1, "amax")))
    if bool((first < last)[:n].any()):
        raise WatchError("w.segments: a document is in several rows. Number the documents of all rows, not of each")
