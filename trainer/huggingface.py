"""
GPT-2 as Hugging Face keeps it, a folder with config.json and model.safetensors: into a run (init_from) and out of one
(export.py). Nothing here needs transformers.

GPT-2 keeps the matrices of its blocks as (in, out), ours are (out, in), as torch's Linear has them.
"""

import glob
import json
import os

import safetensors
import torch
from safetensors.torch import save

from system import errors, files
from system.errors import ConfigError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias")  # the causal mask, which old checkpoints hold
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


# -- into a run

def read_tensors(path):
    """{name: float tensor} of a safetensors file. The package refuses a tensor that does not lie in the file as its header
    says."""
    try:
        with safetensors.safe_open(path, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys() if not name.endswith(NO_WEIGHTS)}
    except (safetensors.SafetensorError, OSError) as e:
        raise ConfigError(f"{path} is not a readable safetensors file: {errors.short(str(e))}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ConfigError(f"{path}: {errors.short(name)} is {tensor.dtype}; weights of 16 to 64 bits are read")
    return tensors


def find(name):
    """The folder that init_from names: a path, or a model that Hugging Face's own cache holds. Nothing is fetched."""
    if os.path.isfile(os.path.join(name, CONFIG)):
        return name
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    for model in (name, f"openai-community/{name}"):
        pattern = os.path.join(glob.escape(hub), f"models--{glob.escape(model.replace('/', '--'))}", "snapshots", "*", CONFIG)
        snapshots = sorted(glob.glob(pattern), key=os.path.getmtime)
        if snapshots:
            return os.path.dirname(snapshots[-1])
    raise ConfigError(f"init_from={name!r}: there is no folder {name} with {CONFIG} and {WEIGHTS}, and no such model in {hub}; "
                      "nothing is fetched. To go on with a run of this program: python train.py out/run")


def settings(name):
    """({key: value} of the model that init_from names, how many positions it knows)."""
    path = os.path.join(find(name), CONFIG)
    try:
        with open(path, encoding="utf-8") as f:
            about = json.load(f)
        shape = {key: about[key] for key in ("n_layer", "n_head", "n_embd")}
        positions = about.get("n_positions", about.get("n_ctx"))
        if not all(type(v) is int and v > 0 for v in (*shape.values(), positions)):
            raise ValueError
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"init_from={name!r}: {path} is no GPT-2's (n_layer, n_head, n_embd, n_positions)") from None
    usual = {"model_type": ["gpt2"], "layer_norm_epsilon": [1e-5], "scale_attn_weights": [True],
             "scale_attn_by_inverse_layer_idx": [False], "add_cross_attention": [False],
             "n_inner": [None, 4 * shape["n_embd"]], "activation_function": list(GELU)}
    odd = [f"{key}={about[key]!r}" for key, values in usual.items() if about.get(key, values[0]) not in values]
    if odd:
        raise ConfigError(f"init_from={name!r}: {', '.join(odd)} is not what GPT-2 has: this model cannot be loaded")
    own = {"bias": True, "norm": "layernorm", "cos_attn": (), "spectral_qkv": (),
           "gelu": GELU[about.get("activation_function", "gelu_new")], "tie_weights": about.get("tie_word_embeddings", True)}
    return {**shape, **own}, positions


def load_into(model, name):
    """The weights that init_from names, into a GPT of its shape. Of its positions the first block_size are taken."""
    folder, wanted = find(name), model.state_dict()
    index = os.path.join(folder, INDEX)
    files = [WEIGHTS]
    if os.path.isfile(index):
        try:
            with open(index, encoding="utf-8") as f:
                files = sorted({os.path.basename(part) for part in json.load(f)["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ConfigError(f"init_from={name!r}: {index} does not say where the weights are") from None
    missing = [part for part in files if not os.path.isfile(os.path.join(folder, part))]
    if missing:
        raise ConfigError(f"init_from={name!r}: {folder} has no {missing[0]}; other formats than safetensors are not read")
    theirs = {key.removeprefix("transformer."): tensor for part in files
              for key, tensor in read_tensors(os.path.join(folder, part)).items()}
    if model.config.tie_weights:
        theirs["lm_head.weight"] = theirs.get("wte.weight")
    for key, own in wanted.items():
        tensor = theirs.get(key)
        if tensor is None:
            raise ConfigError(f"init_from={name!r}: its weights have no {key}")
        if tensor.dim() == 2:
            tensor = tensor.t() if key.endswith(TRANSPOSED) else tensor[:len(own)] if key == "wpe.weight" else tensor
        if key == "wte.weight" and tensor.dim() == 2 and len(tensor) != len(own):
            raise ConfigError(f"init_from={name!r}: its vocabulary has {len(tensor)} tokens, the dataset's has {len(own)}: "
                              "prepare the text with its tokenizer (--tokenizer=gpt2 for GPT-2's)")
        if tensor.shape != own.shape:
            raise ConfigError(f"init_from={name!r}: {key} is {tuple(tensor.shape)}, expected {tuple(own.shape)}")
        with torch.no_grad():
            own.copy_(tensor)


# -- out of a run

def refusals(config):
    """What GPT-2 has no place for, in words; empty if all can be written."""
    odd = [(config.norm == "rmsnorm", "norm='rmsnorm' (GPT-2 has LayerNorm)"),
           (config.cos_attn, f"cos_attn={config.cos_attn} (GPT-2 has no cosine attention)"),
           (config.spectral_qkv, f"spectral_qkv={config.spectral_qkv} (GPT-2 has no spectral norm)")]
    return [words for is_set, words in odd if is_set]


def write(model, folder, separator=None):
    """A GPT as a folder that transformers' GPT2LMHeadModel.from_pretrained reads. Biases that ours does not have are zeros."""
    c = model.config
    cannot = refusals(c)
    if cannot:
        raise ConfigError(f"not a GPT-2: {'; '.join(cannot)}. Such a model cannot be written for transformers")
    if os.path.isdir(folder) and os.listdir(folder):
        raise ConfigError(f"{folder} is not empty: give another folder, or remove it first")
    weights, tensors = model.state_dict(), {}
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            if not c.tie_weights:
                tensors[name] = tensor
            continue
        tensors[f"transformer.{name}"] = tensor.t() if name.endswith(TRANSPOSED) else tensor
        bias = name.removesuffix("weight") + "bias"
        if name.startswith(("h.", "ln_f")) and name.endswith("weight") and bias not in weights:
            tensors[f"transformer.{bias}"] = tensor.new_zeros(tensor.shape[0])
    data = save({name: tensor.float().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    files.make(folder)
    files.write_atomically(os.path.join(folder, WEIGHTS), lambda f: f.write(data))
    files.write_json(os.path.join(folder, CONFIG), {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": c.n_layer, "n_head": c.n_head,
        "n_embd": c.n_embd, "n_positions": c.block_size, "n_ctx": c.block_size, "vocab_size": c.vocab_size, "n_inner": None,
        "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": c.tie_weights, "resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout,
        "bos_token_id": separator, "eos_token_id": separator})
