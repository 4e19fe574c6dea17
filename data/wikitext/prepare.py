"""WikiText-2 or WikiText-103, raw, with GPT-2's BPE: from the Hugging Face hub into data/wikitext-2 or -103.

    python data/wikitext/prepare.py
    python data/wikitext/prepare.py --size=103
    python data/wikitext/prepare.py --local=FILE_OR_FOLDER       # parquet or text files of the same shape, no network
    python train.py config/wikitext2.py

The official train and validation splits. The rows are the lines of the original files; they are joined to
articles, each ending with <|endoftext|>.
"""

import re
import sys
from pathlib import Path

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import hub, tokenizers, tokens
from system import terminal
from system.errors import ConfigError

REPO = "Salesforce/wikitext"
SUFFIXES = (".parquet", ".txt", ".raw", ".tokens")
TITLE = re.compile(r" = [^=].* = \n?")  # " = Title = "; sections have two or more signs: " = = Section = = "
LAST_PART = 0.05  # for validation, when a single local file has to give both


def articles(rows):
    """Join rows to articles. An article begins with a title between blank rows; formulas look like titles too."""
    article, blank, held = [], True, None  # held: a title after a blank row, waiting for the next row
    for row in rows:
        is_blank = not row.strip()
        row = " \n" if is_blank else row if row.endswith("\n") else row + "\n"  # the hub has "" for blank lines
        if held is not None:
            if is_blank and article and "".join(article).strip():
                yield "".join(article)
                article = []
            article.append(held)
            held = None
        if blank and TITLE.fullmatch(row):
            held = row
        else:
            article.append(row)
        blank = is_blank
    text = "".join(article) + (held or "")
    if text.strip():
        yield text


def from_hub(size):
    config = f"wikitext-{size}-raw-v1"
    splits = {"train": "train", "val": "validation"}
    rows = {split: hub.texts(hub.from_hub(REPO, config, split=name)) for split, name in splits.items()}
    documents = ((split, text, True) for split in splits for text in articles(rows[split]))
    return documents, f"{REPO} {config}", "official train and validation splits"


def from_local(where, size):
    """Files with "train" and "valid" in their names are the splits (others are left out); a single file gives both."""
    paths = hub.find(where, SUFFIXES)
    paths = [p for p in paths if f"wikitext-{size}-raw-v1" in p.parts] or paths  # a copy of the hub's repository
    files = {"train": [p for p in paths if "train" in p.name], "val": [p for p in paths if "valid" in p.name]}
    source = f"local files: {', '.join(p.name for p in paths)}"
    if len(paths) > 1:
        if not all(files.values()):
            names = ", ".join(p.name for p in paths)
            raise ConfigError(f"--local={where}: expected 'train' and 'valid' in the file names, found {names}")
        documents = (
            (split, text, True) for split in files for text in articles(hub.texts(hub.from_files(files[split])))
        )
        return documents, source, "by file name: train and validation"

    def read():
        return articles(hub.texts(hub.from_files(paths)))

    lengths = [len(text) for text in read()]
    total, seen, first = sum(lengths), 0, len(lengths)
    while first > 1 and seen < LAST_PART * total:
        first -= 1
        seen += lengths[first]
    documents = (("val" if i >= first else "train", text, True) for i, text in enumerate(read()))
    return documents, source, f"by position: the last {len(lengths) - first} of {len(lengths)} articles"


def prepare(size=2, out_dir=None, local=None, quiet=False) -> dict:
    tokenizer = tokenizers.get_tokenizer("gpt2")
    documents, source, split = from_local(local, size) if local else from_hub(size)
    if not quiet:
        print(f"{source}; split {split}", file=sys.stderr)
    out_dir = out_dir or Path(__file__).resolve().parents[1] / f"wikitext-{size}"
    return tokens.build(out_dir, tokenizer, documents, quiet=quiet, source=source, split=split)


def main(argv=None):
    parser = terminal.Parser(description="Prepare WikiText, raw, with GPT-2's BPE.")
    parser.add_argument("--size", type=int, default=2, choices=(2, 103))
    parser.add_argument("--local", help="file or folder to read instead of the hub: parquet, or text")
    parser.add_argument("--out", help="folder to write (default: data/wikitext-SIZE)")
    args = parser.parse_args(argv)
    return tokens.run(lambda: prepare(args.size, args.out, args.local))


if __name__ == "__main__":
    sys.exit(main())
