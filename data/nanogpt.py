"""nanoGPT's datasets as they are: train.bin and val.bin in uint16, and for characters a meta.pkl beside them.

meta.pkl is a pickle, which may hold code. It is never run: every instruction of the file is looked at first, and one
that is not about plain numbers, texts, lists and dictionaries is refused.
"""

import io
import os
import pickle
import pickletools

from data.tokenizers import GPT2Tokenizer
from data.tokens import FORMAT
from system.errors import ConfigError

MAX_PICKLE = 16 << 20  # bytes: GPT-2's 50257 words would take one
PLAIN = {"PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET",
         "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT",
         "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
         "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}


def is_there(folder):
    """Whether the folder is nanoGPT's. One of ours whose preparation was killed in its last moment is not."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    ours = any(name.startswith("meta.json") or name == "verified.json" for name in names)
    return {"train.bin", "val.bin"} <= set(names) and not ours


def describe(folder):
    """meta.json's contents for a folder of nanoGPT's, without checksums, and the assumptions behind them in words."""
    about = read_pickle(os.path.join(folder, "meta.pkl"))
    meta = {"format": FORMAT, "dtype": "uint16", "source": "nanoGPT's files"}
    if about is None:
        gpt2 = GPT2Tokenizer
        meta |= {"vocab_size": gpt2.vocab_size, "tokenizer": gpt2.name, "separator": gpt2.separator}
        said = "GPT-2's vocabulary, since there is no meta.pkl"
    else:
        characters = vocabulary(about, folder)
        meta |= {"vocab_size": len(characters), "tokenizer": "characters", "characters": characters}
        said = f"{len(characters)} characters, as meta.pkl says"
    for split in ("train", "val"):
        path = os.path.join(folder, f"{split}.bin")
        size = os.path.getsize(path)
        if size == 0 or size % 2:
            raise ConfigError(f"{path} holds {size} bytes: whole uint16 numbers were expected, as nanoGPT writes them")
        meta[f"{split}_tokens"] = size // 2
    return meta, f"{folder} has no meta.json, so it is read as nanoGPT's: token ids in uint16, {said}"


def vocabulary(about, folder):
    """The characters by their ids, from nanoGPT's {"vocab_size", "itos", "stoi"}."""
    try:
        size, itos = about["vocab_size"], about["itos"]
        characters = [itos[i] for i in range(size)]
        good = 0 < size <= 2**16 and all(isinstance(c, str) for c in characters)
    except (KeyError, TypeError, IndexError, OverflowError):
        good = False
    if not good:
        raise ConfigError(f"{folder}/meta.pkl does not list the vocabulary as nanoGPT's does (vocab_size, itos)")
    return characters


def read_pickle(path):
    """The plain values in a pickle; None where there is no such file."""
    if not os.path.isfile(path):
        return None
    if os.path.getsize(path) > MAX_PICKLE:
        raise ConfigError(f"{path} has more than {MAX_PICKLE >> 20} MB: no meta.pkl of nanoGPT's is that large")
    with open(path, "rb") as f:
        data = f.read()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            far = opcode.name.endswith(("PUT", "GET")) and int(argument or 0) > len(data)  # would take memory
            if opcode.name not in PLAIN or far:
                raise ConfigError(
                    f"{path} holds more than plain values ({opcode.name}), perhaps code: it is not read. Remove it if "
                    "the ids are GPT-2's, or prepare the text again with data/text/prepare.py"
                )
        return PlainUnpickler(io.BytesIO(data)).load()
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"{path} is not a readable pickle ({type(e).__name__})") from None


class PlainUnpickler(pickle.Unpickler):
    """Cannot name anything outside the file, so it cannot call anything."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")
