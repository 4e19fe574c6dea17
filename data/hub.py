"""Datasets from the Hugging Face hub, or from local files of the same shape, with a clear word when that fails."""

import glob
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from data.tokenizers import bounded
from data.tokens import walk
from system.errors import ConfigError

HUB_SECONDS = 6  # for a sign of life from the hub; without one, `datasets` would retry for half a minute
ADVICE = (
    "check the network, HTTPS_PROXY or HF_ENDPOINT; or give files that were downloaded elsewhere with --local; "
    "or use your own text (data/text/prepare.py) or the embedded corpus (data/stdlib/prepare.py), which need no network"
)


def reachable(url, seconds=HUB_SECONDS) -> bool:
    """Does anything answer at `url`? Any answer counts, also an error page or a certificate that only we dislike."""

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
            return True
        except urllib.error.HTTPError:
            return True
        except urllib.error.URLError as e:
            return isinstance(e.reason, ssl.SSLError)

    try:
        return bounded(ask, seconds)
    except (OSError, ValueError):
        return False


def load(*args, **kwargs):
    """datasets.load_dataset, imported late."""
    try:
        from datasets import load_dataset
    except ImportError as e:
        raise ConfigError("this dataset needs the package datasets, release 4 or later: pip install datasets") from e
    return load_dataset(*args, **kwargs)


def from_hub(repo, *args, **kwargs):
    """load_dataset from the hub. Without a network only copies in the local cache are tried, and it takes seconds."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    online = reachable(endpoint)
    if not online:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when `datasets` is imported, which is why that is late
    try:
        return load(repo, *args, **kwargs)
    except ConfigError:
        raise
    except Exception as e:
        if online:
            raise ConfigError(f"cannot load {repo} from {endpoint} ({type(e).__name__}: {e}): {ADVICE}") from e
        raise ConfigError(f"cannot reach {endpoint} to load {repo}: {ADVICE}") from e


def from_files(paths):
    """Local parquet or text files (one row per line), streamed. All of one kind."""
    paths = [str(path) for path in paths]
    parquet = [path.endswith(".parquet") for path in paths]
    if any(parquet) and not all(parquet):
        raise ConfigError(f"parquet and text files together: {', '.join(paths)}; give one kind")
    try:
        if all(parquet):
            dataset = load("parquet", data_files=paths, split="train", streaming=True)
            # A shard per row group, where this release can: Arrow reads ahead within a shard, and a file may be large.
            return dataset.reshard() if hasattr(dataset, "reshard") else dataset
        return load(
            "text", data_files=paths, split="train", streaming=True, keep_linebreaks=True, encoding_errors="replace"
        )
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot read {', '.join(paths)} ({type(e).__name__}: {e})") from e


def find(where, suffixes=(".parquet",)) -> list[Path]:
    """Files that a path, a folder or a glob names, sorted."""
    inside = (os.path.join(folder, name) for folder, _, names in walk(where, followlinks=True) for name in names)
    paths = inside if os.path.isdir(where) else glob.glob(where, recursive=True)
    paths = sorted(Path(path) for path in paths if path.endswith(tuple(suffixes)) and os.path.isfile(path))
    if not paths:
        raise ConfigError(f"--local={where}: no {' or '.join('*' + suffix for suffix in suffixes)} file there")
    return paths


def texts(dataset):
    """The `text` column, row by row."""
    try:
        for batch in dataset.iter(batch_size=256):
            if "text" not in batch:
                raise ConfigError(f"no column 'text' in the dataset: it has {', '.join(batch)}")
            yield from batch["text"]
    except ConfigError:
        raise
    except Exception as e:  # a lost connection, a damaged file: whatever the reader below makes of it
        raise ConfigError(f"reading the dataset failed ({type(e).__name__}: {e}): {ADVICE}") from e
