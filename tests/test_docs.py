"""README.md and docs/ against the repository: pages that are written from data, sizes, links, commands."""

import json
import re
import shlex
from pathlib import Path

import pytest

import configurator
from results import render, transcripts
from tests.helpers import ROOT
from trainer import plan

ROOT = Path(ROOT)
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def parts(page):
    """(prose, code): the page without its code blocks, and the lines in them."""
    pieces = re.split(r"^```.*$", page.read_text(encoding="utf-8"), flags=re.M)
    return "".join(pieces[::2]), "".join(pieces[1::2]).splitlines()


def long_cells(text, limit=200):
    rows = [line.strip().strip("|") for line in text.splitlines() if line.lstrip().startswith("|")]
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row) if len(cell.strip()) > limit]


def anchors(page):
    return {render.anchor(heading) for heading in re.findall(r"^#+ (.+)$", parts(page)[0], flags=re.M)}


def dead_links(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", parts(page)[0]):
        target, _, anchor = link.partition("#")
        path = (page.parent / target) if target else page
        if not link.startswith("https://") and (not path.exists() or (anchor and anchor not in anchors(path))):
            dead.append(link)
    return dead


def commands(page):
    """Every command of a page, as words: lines of code blocks and `code` in prose that start with a program."""
    prose, code = parts(page)
    lines = code + re.findall(r"`([^`]+)`", prose)
    return [shlex.split(line, comments=True) for line in lines if re.match(r"\s*(python|torchrun|make) ", line)]


def missing_from(words):
    """Scripts, config files, make targets and keys of train.py that a command names and that are not there."""
    if words[0] == "make":
        return [w for w in words[1:] if not re.search(rf"^{w}:", (ROOT / "Makefile").read_text(), flags=re.M)]
    words = [f"{word.replace('.', '/')}.py" if before == "-m" else word for before, word in zip(["", *words], words)]
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    gone = [w for w in words if w.endswith(".py") and not (ROOT / w).exists()]
    if words[script] == "train.py":
        known = {*configurator.FIELDS, *plan.OPTIONS, "plan", "help", "eval"}
        gone += [w for w in words[script + 1:] if w.startswith("--") and w[2:].split("=")[0] not in known]
    return gone


def test_pages_written_from_data_are_up_to_date():
    for name, text in render.pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"docs/{name} is stale: python results/render.py"


def test_check_says_which_page_is_stale_and_rendering_mends_it(tmp_path, monkeypatch, capsys):
    fresh = render.pages()
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "pages", lambda: fresh)
    assert render.main([]) == 0 and render.main(["--check"]) == 0
    (tmp_path / "docs" / "figures.md").write_text("old")
    assert render.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "stale: docs/figures.md"
    assert (tmp_path / "docs" / "figures.md").read_text() == "old"  # a check writes nothing
    assert render.main([]) == 0 and render.main(["--check"]) == 0


@pytest.mark.parametrize("key", ["command", "machine", "finding", "date"])
def test_a_result_that_lacks_a_field_is_refused_by_name(tmp_path, key):
    result = {"command": "c", "machine": {"device": "d"}, "finding": "f", "date": "2026-11-17"}
    del result[key]
    (tmp_path / "kernel.json").write_text(json.dumps(result))
    with pytest.raises(SystemExit, match=f"kernel.json has no {key}"):
        render.load(tmp_path)


def test_a_result_without_a_title_is_refused(tmp_path):
    for path in (ROOT / "results").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    assert len(render.load(tmp_path)) > 30
    (tmp_path / "another.json").write_text((ROOT / "results" / "kernel.json").read_text())
    with pytest.raises(SystemExit, match="another"):
        render.load(tmp_path)


def test_a_table_has_a_row_for_each_place_of_a_path_and_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(render.TABLES, "x", [("Told.", "machines/*/losses/*", {
        "machine": "{0}", "loss": "{loss:.1f}", "8": "{regret[8]:+.0%}", "16": "{regret[16]:+.0%}"})])
    result = json.loads('{"machines": {"one": {"losses": [{"loss": 2, "regret": {"8": 0.1}}, {"loss": null}]}}}',
                        object_hook=render.Numbers)
    assert render.tables("x", result) == ["Told.", "", "| machine | loss | 8 | 16 |", "|---|---|---|---|",
                                          "| one | 2.0 | +10% | - |", "| one | - | - | - |", ""]


def test_the_transcripts_say_what_the_commands_say():
    shown, now = transcripts.stable(transcripts.PAGE.read_text(encoding="utf-8")), transcripts.stable(transcripts.page(True))
    assert shown == now, "docs/first_ten_minutes.md is stale: python results/transcripts.py"
    assert sum(line.startswith("$ ") for line in now) > 15 and any(line.startswith("error: ") for line in now)


def test_the_transcripts_comparison_leaves_out_numbers_and_the_clock_alone():
    text = "```\n$ python train.py out/x\nstep 10 | 1.2k tok 5% | loss 2.5 | batch 8 | gns 4 [3, 5] | 0:01 left\nTrained\n```"
    assert transcripts.stable(text) == transcripts.stable(text.replace("2.5", "3.7").replace("gns 4", "gns 7"))
    assert transcripts.stable(text) != transcripts.stable(text.replace("batch", "size"))


def test_the_readme_has_at_most_12000_bytes():
    assert README.stat().st_size <= 12_000


@each_page
def test_no_cell_of_a_table_is_longer_than_200_characters(page):
    assert long_cells(page.read_text(encoding="utf-8")) == []


@each_page
def test_every_link_and_picture_leads_somewhere(page):
    assert dead_links(page) == []


def test_every_page_of_docs_is_linked():
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES
              for link in re.findall(r"\]\(([^)\s]+)\)", parts(page)[0])}
    assert [page.name for page in DOCS if page not in linked] == []


# results.md holds commands as they were typed then
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "results.md"], ids=lambda page: page.name)
def test_every_command_names_scripts_configs_and_keys_that_exist(page):
    assert {" ".join(words): gone for words in commands(page) if (gone := missing_from(words))} == {}


def test_these_tests_can_fail(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](none.md) [b](page.md#two) ![c](none.png) [d](page.md#one)\n`python gone.py`\n"
                    "```\nmake nothing\npython train.py config/none.py --lr=1 --seed=1   # why\n```\n"
                    f"| {'x' * 201} | y |\n")
    assert dead_links(page) == ["none.md", "page.md#two", "none.png"]
    assert [missing_from(words) for words in commands(page)] == [["nothing"], ["config/none.py", "--lr=1"], ["gone.py"]]
    assert len(long_cells(page.read_text())) == 1
    assert len(commands(README)) > 15
