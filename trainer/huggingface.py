"""
GPT-2 as Hugging Face keeps it, a folder with config.json and model.safetensors: into a run (init_from) and out of one
(export.py). Nothing here needs transformers.

safetensors: eight bytes with the length of a header, the header in JSON ({name: {dtype, shape, data_offsets}}), the numbers.
GPT-2 keeps the matrices of its blocks as (in, out), ours are (out, in), as torch's Linear has them.
"""

import glob
import json
import math
import os

import torch

from configurator import ConfigError
from trainer import checkpoint, lock, tensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_HEADER = 100 << 20
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias")  # the causal mask, which old checkpoints hold
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


# -- safetensors

def read_tensors(path):
    """{name: float tensor} of a safetensors file."""
    header, start = read_header(path)
    found, size = {}, os.path.getsize(path) - start
    left = size  # no two tensors are the same bytes
    with open(path, "rb") as f:
        for name, about in header.items():
            if name == "__metadata__" or name.endswith(NO_WEIGHTS):
                continue
            try:
                dtype, shape, (begin, end) = DTYPES.get(about["dtype"]), about["shape"], about["data_offsets"]
                if dtype is None:
                    raise ConfigError(f"{path}: {name[:100]} is in {about['dtype']}; {', '.join(DTYPES)} are read")
                left -= end - begin
                if not 0 <= begin <= end <= size or left < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                    raise ValueError
                f.seek(start + begin)
                found[name] = torch.frombuffer(bytearray(f.read(end - begin)), dtype=dtype).view(shape)
            except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
                raise ConfigError(f"{path} is damaged: {name[:100]} does not lie in the file as its header says") from None
    return tensors.checked(found, "cpu", size)


def read_header(path):
    """({name: about}, where the numbers begin)."""
    try:
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, os.path.getsize(path) - 8):
                raise ValueError
            header = json.loads(f.read(length).decode("utf-8"))
        if not isinstance(header, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not a safetensors file, or a damaged one") from None
    return header, 8 + length


def write_tensors(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the numbers begin at a multiple of eight

    def write(f):
        f.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            f.write(tensor.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes())
    checkpoint.write_atomically(path, write)


# -- into a run

def find(name):
    """The folder that init_from names: a path, or a model that Hugging Face's own cache holds. Nothing is fetched."""
    if os.path.isfile(os.path.join(name, CONFIG)):
        return name
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    for model in (name, f"openai-community/{name}"):
        found = sorted(glob.glob(os.path.join(glob.escape(hub), f"models--{glob.escape(model.replace('/', '--'))}", "snapshots",
                                              "*", CONFIG)), key=os.path.getmtime)
        if found:
            return os.path.dirname(found[-1])
    raise ConfigError(f"init_from={name!r}: there is no folder {name} with {CONFIG} and {WEIGHTS}, and no such model in {hub}; "
                      "nothing is fetched. To go on with a run of this program: python train.py out/run")


def settings(name):
    """({key: value} of the model that init_from names, how many positions it knows)."""
    path = os.path.join(find(name), CONFIG)
    try:
        with open(path, encoding="utf-8") as f:
            about = json.load(f)
        kind = about.get("model_type")
        shape = {key: about[key] for key in ("n_layer", "n_head", "n_embd")}
        positions = about.get("n_positions", about.get("n_ctx"))
        if not all(type(v) is int and v > 0 for v in (*shape.values(), positions)):
            raise ValueError
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"init_from={name!r}: {path} is no GPT-2's (n_layer, n_head, n_embd, n_positions)") from None
    usual = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
             "add_cross_attention": False}
    odd = [f"{k}={about[k]!r}" for k, v in usual.items() if about.get(k, v) != v]
    odd += [] if kind == "gpt2" else [f"model_type={kind!r}"]
    odd += [] if about.get("n_inner") in (None, 4 * shape["n_embd"]) else [f"n_inner={about['n_inner']!r}"]
    activation = about.get("activation_function", "gelu_new")
    odd += [] if activation in GELU else [f"activation_function={activation!r}"]
    if odd:
        raise ConfigError(f"init_from={name!r}: {', '.join(odd)} is not what GPT-2 has: this model cannot be loaded")
    own = {"bias": True, "norm": "layernorm", "cos_attn": (), "spectral_qkv": (), "gelu": GELU[activation],
           "tie_weights": about.get("tie_word_embeddings", True)}
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
    found = {}
    for part in files:
        found |= {key.removeprefix("transformer."): tensor for key, tensor in
                  read_tensors(os.path.join(folder, part)).items()}
    if model.config.tie_weights:
        found["lm_head.weight"] = found.get("wte.weight")
    for key, own in wanted.items():
        tensor = found.get(key)
        if tensor is None:
            raise ConfigError(f"init_from={name!r}: its weights have no {key}")
        tensor = tensor.t() if key.endswith(TRANSPOSED) else tensor
        tensor = tensor[:len(own)] if key == "wpe.weight" else tensor
        if tensor.shape != own.shape:
            if key == "wte.weight":
                raise ConfigError(f"init_from={name!r}: its vocabulary has {len(tensor)} tokens, the dataset's has {len(own)}: "
                                  "prepare the text with its tokenizer (--tokenizer=gpt2 for GPT-2's)")
            raise ConfigError(f"init_from={name!r}: {key} is {tuple(tensor.shape)}, expected {tuple(own.shape)}")
        with torch.no_grad():
            own.copy_(tensor)


# -- out of a run

def refusals(config):
    """What GPT-2 has no place for, in words; empty if all can be written."""
    words = {"rmsnorm": "norm='rmsnorm' (GPT-2 has LayerNorm)" if config.norm == "rmsnorm" else "",
             "cosine": f"cos_attn={config.cos_attn} (GPT-2 has no cosine attention)" if config.cos_attn else "",
             "spectral": f"spectral_qkv={config.spectral_qkv} (GPT-2 has no spectral norm)" if config.spectral_qkv else ""}
    return [text for text in words.values() if text]


def write(model, folder, separator=None):
    """A GPT as a folder that transformers' GPT2LMHeadModel.from_pretrained reads. Biases that ours does not have are zeros."""
    c = model.config
    cannot = refusals(c)
    if cannot:
        raise ConfigError(f"not a GPT-2: {'; '.join(cannot)}. Such a model cannot be written for transformers")
    if os.path.isdir(folder) and os.listdir(folder):
        raise ConfigError(f"{folder} is not empty: give another folder, or remove it first")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            if not c.tie_weights:
                tensors[name] = tensor
            continue
        tensors[f"transformer.{name}"] = tensor.t() if name.endswith(TRANSPOSED) else tensor
        bias = name.removesuffix("weight") + "bias"
        if name.startswith(("h.", "ln_f")) and name.endswith("weight") and bias not in model.state_dict():
            tensors[f"transformer.{bias}"] = tensor.new_zeros(tensor.shape[0])
    lock.make(folder)
    write_tensors(os.path.join(folder, WEIGHTS), tensors)
    checkpoint.write_json(os.path.join(folder, CONFIG), {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": c.n_layer, "n_head": c.n_head,
        "n_embd": c.n_embd, "n_positions": c.block_size, "n_ctx": c.block_size, "vocab_size": c.vocab_size, "n_inner": None,
        "activation_function": "gelu_new" if c.gelu == "tanh" else "gelu", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": c.tie_weights, "resid_pdrop": c.dropout, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout,
        "bos_token_id": separator, "eos_token_id": separator})
