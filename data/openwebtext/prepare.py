"""OpenWebText, about 8 million documents and 9 billion tokens of GPT-2's BPE, from the Hugging Face hub.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --local='downloads/*.parquet'     # files of the same shape, no network
    python train.py config/gpt_111m.py

Streamed: the disk holds only the result, about 18 GB, and memory does not grow with the number of files (Arrow may read
ahead within one). A document goes to validation by a hash of its text, 1 in 2000, so the split is the same on every
machine and copies of a document are never on both sides.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import hub, tokenizers, tokens
from system import terminal
from system.errors import ConfigError

REPO = "Skylion007/openwebtext"
REVISION = "refs/convert/parquet"  # the main revision is a loading script, which `datasets` 4 and later refuse
DOCUMENTS = 8_013_769
VAL_FRACTION = 0.0005  # about 4,000 documents, 4 million tokens


def prepare(out_dir=None, local=None, val_fraction=VAL_FRACTION, revision=REVISION, quiet=False) -> dict:
    if not 0 < val_fraction <= 0.5:
        raise ConfigError(f"val_fraction={val_fraction}: expected more than 0 and at most 0.5")
    tokenizer = tokenizers.get_tokenizer("gpt2")
    if local:
        paths = hub.find(local)
        dataset, source, total = hub.from_files(paths), f"local files: {len(paths)} parquet files", None
    else:
        dataset = hub.from_hub(REPO, revision=revision, split="train", streaming=True)
        source, total = f"{REPO} {revision}", DOCUMENTS
    documents = (
        ("val" if tokens.hash_fraction(text) < val_fraction else "train", text, True)
        for text in hub.texts(dataset)
        if text
    )
    meta = tokens.build(
        out_dir or Path(__file__).resolve().parent,
        tokenizer,
        documents,
        total_documents=total,
        quiet=quiet,
        source=source,
        split=f"by document: hash of the text below {val_fraction:g}",
    )
    read = meta["train_documents"] + meta["val_documents"]
    if not local and read < 0.99 * DOCUMENTS:  # the hub converts only a part of some large datasets
        print(f"warning: {read:,} of {DOCUMENTS:,} documents at revision {revision}; see --revision", file=sys.stderr)
    return meta


def main(argv=None):
    parser = terminal.Parser(description="Prepare OpenWebText with GPT-2's BPE.")
    parser.add_argument("--local", help="file, folder or glob of parquet files to read instead of the hub")
    parser.add_argument("--val_fraction", type=float, default=VAL_FRACTION, help="share of the documents (0.0005)")
    parser.add_argument("--revision", default=REVISION, help=f"of {REPO} on the hub ({REVISION})")
    parser.add_argument("--out", help="folder to write (default: data/openwebtext)")
    args = parser.parse_args(argv)
    return tokens.run(lambda: prepare(args.out, args.local, args.val_fraction, args.revision))


if __name__ == "__main__":
    sys.exit(main())
