"""Text to token ids and back: bytes, GPT-2's BPE, and the characters of nanoGPT's meta.pkl."""

import hashlib
import re
import threading
from concurrent.futures import Future, wait

import numpy as np

from system.errors import ConfigError

UNIT = 1 << 18  # characters per unit of work: about 30 ms of BPE, so that all cores finish together
BPE_SECONDS = 20  # for the one 0.8 MB download of GPT-2's BPE; tiktoken itself sets no limit
BPE_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


def bounded(function, seconds):
    """function(), or TimeoutError after `seconds`. For calls that cannot be given a timeout, such as name lookups."""
    outcome = Future()

    def call():
        try:
            outcome.set_result(function())
        except Exception as e:  # noqa: BLE001 - raised again below
            outcome.set_exception(e)

    threading.Thread(target=call, daemon=True).start()  # daemon: a hung call does not hold up the exit
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return outcome.result()


class ByteTokenizer:
    name, vocab_size, dtype, separator = "bytes", 256, np.dtype("u1"), 0

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(text if isinstance(text, bytes) else text.encode("utf-8"), np.uint8)

    def decode(self, ids) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")


class GPT2Tokenizer:
    name, vocab_size, dtype, separator = "gpt2", 50257, np.dtype("<u2"), 50256

    def __init__(self):
        self.bpe = load_bpe()

    def encode(self, text: str) -> np.ndarray:
        return self.bpe.encode_to_numpy(text, disallowed_special=())  # "<|endoftext|>" in a text is just text

    def decode(self, ids) -> str:
        return self.bpe.decode(np.asarray(ids).tolist())


class CharacterTokenizer:
    """One id for each character of a list, as nanoGPT's meta.pkl has it."""

    name = "characters"

    def __init__(self, characters):
        self.characters, self.vocab_size = characters, len(characters)
        self.ids = {character: i for i, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        unknown = [c for c in text if c not in self.ids]
        if unknown:
            known = f"{self.vocab_size} that the model was trained on"
            raise ConfigError(f"character {unknown[0]!r} is none of the {known}")
        return np.array([self.ids[c] for c in text], np.int64)

    def decode(self, ids) -> str:
        return "".join(self.characters[i] for i in ids)


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}


def tokenizer_of(meta):
    """The tokenizer of a dataset, from its meta.json or from what a checkpoint holds of that."""
    return CharacterTokenizer(meta["characters"]) if meta.get("characters") else get_tokenizer(meta["tokenizer"])


def get_tokenizer(name):
    if name not in TOKENIZERS:
        raise ConfigError(f"tokenizer '{name}': expected one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


def load_bpe():
    """GPT-2's BPE. tiktoken's "r50k_base" has the same ids as its "gpt2" and needs one file instead of two."""
    try:
        import tiktoken

        return bounded(lambda: tiktoken.get_encoding("r50k_base"), BPE_SECONDS)
    except ImportError as e:
        raise ConfigError("GPT-2's BPE needs the package tiktoken: pip install tiktoken") from e
    except (OSError, ValueError) as e:  # requests' errors and TimeoutError are OSErrors; ValueError: a corrupt file
        raise ConfigError(
            f"cannot get GPT-2's BPE from {BPE_URL} ({type(e).__name__}): check the network or HTTPS_PROXY, or fetch "
            f"that file elsewhere, save it as {hashlib.sha1(BPE_URL.encode()).hexdigest()} in a folder, and set "
            "TIKTOKEN_CACHE_DIR to that folder; --tokenizer=bytes (data/text) and data/stdlib need no download"
        ) from e


# GPT-2's pre-tokeniser never joins a non-space with a space after it, or a letter or digit with punctuation
# after it, and neither its look-ahead nor its `$` sees across such a place. So BPE of the two sides gives the same
# ids as BPE of the whole. Python's \s and \w decide only where both agree with the tokeniser's Unicode classes.
SAFE_CUT = re.compile(r"\S(?=[ \n\r\t])|[^\W_](?=[!-/:-@\[-^`{-~、。，！？；：])")


def cut(text: str, low: int, high: int) -> int:
    """The last safe place to cut text in (low, high]; `high` itself where there is none (one 'word' all along)."""
    for reach in (256, 8192, high - low):
        ends = [match.end() for match in SAFE_CUT.finditer(text, max(low, high - reach), high + 1)]
        if ends:
            return ends[-1]
    return high


def pieces(blocks, size=UNIT):
    """A stream of text blocks, cut anew into pieces of at most `size` characters that are safe to encode apart."""
    rest = ""
    for block in blocks:
        rest, start = rest + block, 0
        while len(rest) - start > size:
            end = cut(rest, start, start + size)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest
