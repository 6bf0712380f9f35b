"""The glossary explains what the lessons link to, and nothing else; its entries say where the code is."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "notebooks" / "glossary.md").read_text(encoding="utf-8")
ANCHORS = re.findall(r'^<a id="([\w-]+)"></a>$', GLOSSARY, flags=re.MULTILINE)
NOTEBOOKS = [path for folder in ("notebooks", "exercises", "solutions") for path in sorted((ROOT / folder).glob("*.ipynb"))]

UNLINKED = {"max_num_batched_tokens"}
"""Terms that need no link from a lesson: lesson 07 explains it itself."""


def text_of(path):
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def glossary_links(text, path):
    """The links to the glossary, as (file, anchor)."""
    found = re.findall(r"\]\(([\w./-]*glossary\.md)#?([^)]*)\)", text)
    return [((path.parent / target).resolve(), anchor) for target, anchor in found]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[f"{path.parent.name}/{path.stem}" for path in NOTEBOOKS])
def test_links_to_the_glossary_find_their_term(path):
    for target, anchor in glossary_links(text_of(path), path):
        assert target == ROOT / "notebooks" / "glossary.md" and anchor in ["", *ANCHORS], anchor


def test_an_anchor_is_there_once_and_terms_link_to_terms():
    assert sorted(ANCHORS) == sorted(set(ANCHORS))
    assert [anchor for anchor in re.findall(r"\]\(#([^)]*)\)", GLOSSARY) if anchor not in ANCHORS] == []


def test_every_term_is_linked_from_a_lesson_or_known_not_to_be():
    linked = {anchor for path in NOTEBOOKS for _, anchor in glossary_links(text_of(path), path)}
    assert set(ANCHORS) - linked - UNLINKED == set()
    assert set(ANCHORS) >= UNLINKED


def test_terms_are_in_alphabetical_order():
    terms = [term.strip("`").lower() for term in re.findall(r"^\*\*(.+?)\*\*: ", GLOSSARY, flags=re.MULTILINE)]
    assert len(terms) == len(ANCHORS) and terms == sorted(terms)


def test_an_entry_is_one_to_three_sentences_and_says_where():
    for entry in GLOSSARY.split('<a id="')[1:]:
        _, text, where = entry.strip().split("\n")
        assert where.startswith("*Where:* ") and where.endswith(".")
        sentences = re.findall(r"[.:](?: |$|\))", re.sub(r"\*\*.+?\*\*: ", "", text))
        assert 1 <= len(sentences) <= 3, text


def test_what_an_entry_names_is_in_the_file():
    for names, file in re.findall(r"\*Where:\* (?:((?:`\w+`(?: and )?)+) in )?`([\w/.]+)`", GLOSSARY):
        assert (ROOT / file).exists(), file
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8")), (name, file)


def test_the_searches_find_what_they_should():
    exercise = ROOT / "exercises" / "04_paged_kv_cache.ipynb"
    text = "[KV cache](../notebooks/glossary.md#kv-cache) [no](other.md#x) [all](../notebooks/glossary.md)"
    glossary = ROOT / "notebooks" / "glossary.md"
    assert glossary_links(text, exercise) == [(glossary, "kv-cache"), (glossary, "")]
    assert glossary_links("[block](glossary.md#block)", exercise) == [(ROOT / "exercises" / "glossary.md", "block")]
