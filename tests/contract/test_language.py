"""weft speaks plain technical English: words and phrases that it does not use, and what it says instead.

Text comes from generators of `Text`: `of_page` (Markdown), `of_module` (docstrings, comments and strings of Python
code) and `of_help`. To check another kind of text, write a generator and a test that passes it to `faults`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.cli.app import commands, main

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "weft"

# Phrase to avoid, as a regular expression without regard to case -> what to say. A space also matches a line break.
BANNED = {
    # resume
    r"\bthe very (bits|same|pixels)\b": "bit-exact, the same bits",
    r"\bto the (same )?(bits?|byte)\b": "bit-exactly, bit for bit, byte-identical",
    r"\bgo(es)? on (to|from|with|where|after|until)\b|\bgoes on\b|\bgo on\b|\bwent on\b": "continue, resume",
    r"\bon its way\b": "in progress",
    r"\bbeforehand\b": "before",
    # inference and service
    r"\bwhat answers\b|\banswers? (with|like|as) \b|\bready to answer\b|\banswering\b": "infer, predict, return",
    r"\b(may|can) be asked\b|\bis asked (of|for|about)\b|\bare asked\b|\basked at\b": "receives, is requested",
    r"\bis told\b|\bare told\b|\bunless told\b|\btold of\b|\bas told\b": "is reported, gets, by default",
    r"\bis at fault\b|\bto blame\b": "caused the error",
    r"\b(dies|died|dying)\b": "fails, crashes, ends",
    r"\bcompany\b": "other requests",
    r"\b(its|the) door\b": "accepts connections, stops accepting connections",
    r"\bwith no word\b": "without a message",
    r"\bbears?\b": "supports",
    # images and training
    r"\bpictures?\b": "image; figure (of a report)",
    r"\bdata sets?\b": "dataset",
    r"\b(is|are|be|to) learned? from\b|\blearns? from\b": "training images, is trained on",
    r"\bheld out of\b": "held-out images, validation set",
    r"\b(a|one|two|each|every|another) training\b"
    r"(?! (and|set|image|step|run|mode|form|epoch|script|process|protocol))": "training run",
    r"\btrainings\b": "training runs",
    r"\bthe trained one\b": "the trained model",
    r"\bby heart\b": "overfitting",
    r"\blaid over\b": "overrides",
    # results and speed
    r"\blikeliest\b": "most probable",
    r"\bcomes? to\b|\bcame to\b|\bcame of it\b": "results in, is",
    r"\bwhat came\b": "the result",
    r"\b(allows?|allowed) to (say|tell)\b": "is significant, is not significant",
    r"\bapart from what\b|\btold apart\b|\btell(s)? apart\b": "distinguish",
    r"\bwhere the (network|model) look(s|ed)\b|\blook(s|ed|ing)? (at|through)\b": "attention map; reads, checks",
    r"\bquick(er|est)?\b": "fast, faster, fastest",
    r"\bin turns\b": "alternating, take turns",
    r"\bmatrix products?\b|\bproducts\b": "matrix multiplication",
    r"\bbrings?\b": "adds, increases, the effect of",
    # relations, places, people
    r"\bbeside\b": "next to (place), besides, compared with",
    r"\bof theirs\b|\bours\b(?!:)": "of the paper, weft's",
    r"\bit stands\b|\bstands (in|at|for)\b(?! a kill)": "is, is listed in, represents",
    r"\b(lies|lay) (in|at|beside|below|under|next to)\b": "is in, is stored in",
    r"\bapart\b": "separately, except",
    r"\bat once\b": "immediately, or: at the same time",
    r"\bat hand\b|\b(cannot|can) be had\b": "is available, is not available, cannot be downloaded",
    r"\banew\b": "again, new",
    r"\bwhoever\b|\bwhatever\b|\bthat which\b": "name the subject",
    r"\b(anybody|nobody|somebody)\b|\bstrangers?\b": "user, client; untrusted, third-party",
    r"\bfacts\b": "metadata, record",
    # style
    r"(?:\A|(?<=[.:!?]\s))(?-i:What)\b(?![^.!?]*\?)": "start with a noun: Dictionary that ..., Files that ...",
    r"\bsuch as (it|they)\b": "name the noun",
    r", too\b(?! (large|long|deep|many|much|few|little|small|slow|old|late))|\btoo[.;]": "also",
    r"\bas well\b(?! as)": "also",
    r"\bdoes not fit\b(?! in| into| the| through)": "is not supported, is invalid",
}
PATTERNS = {re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE): instead for pattern, instead in BANNED.items()}

# (start of a place, phrase) -> reason: where a banned phrase is right.
ALLOWED = {
    ("src/weft/serve/page", "picture"): "the page is for lay people",
    ("src/weft/serve/page", "pictures"): "the page is for lay people",
    ("src/weft/interpret/explaining.py", "picture"): "name of an array in the .npz files of `weft explain`",
    ("src/weft/study/ceit-convergence.yaml", "beside"): "names in the recorded table of runs",
    ("README.md", "what"): "heading of the comparison with other libraries",
    ("docs/deploy.md", "what"): "heading that the README and other pages link to",
    ("docs/your-own-network.md", "what"): "heading",
}
# Rooms of src/weft whose docstrings, comments and messages are checked.
PLAIN_PACKAGES = tuple(sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("README.md")),  # not report.md, which has the words of the run that wrote it
]


class Text(NamedTuple):
    """A text for people, with its line breaks.

    Attributes:
        place: path relative to the repository, or a command.
        line: number of its first line.
    """

    place: str
    line: int
    text: str


def of_page(path: Path) -> Iterator[Text]:
    """Yield paragraphs, list items and table cells of a Markdown page.

    Code, link targets and sections that are generated from recorded results are left out.
    """
    page = path.read_text(encoding="utf-8")
    for part in (
        r"(?ms)^[ ]*```.*?^[ ]*```",
        r"(?s)<!-- begin .*?<!-- end [^>]*-->",
        r"`[^`]*`",
        r"(?<=\])\([^)\s]*\)",
    ):
        page = re.sub(part, _blank, page)
    starts_block = r"[ ]*(?:[-*|#]|\d+\. )"
    for block in re.finditer(rf"[^\n]+(?:\n(?!{starts_block})[^\n]+)*", page):
        for part in re.finditer(r"[^|]+" if block[0].startswith("|") else r"(?s).+", block[0]):
            text = part[0].lstrip(" -*#\n")
            if text:
                start = block.start() + part.end() - len(text)
                yield Text(_name(path), 1 + page.count("\n", 0, start), text)


def of_module(path: Path) -> Iterator[Text]:
    """Yield docstrings, comments and strings with spaces of a Python file."""
    source, name = path.read_text(encoding="utf-8"), _name(path)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(name, node.lineno, _without_code(node.value))
    previous, comment, start = -1, "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# fmt:")):
            if token.start[0] != previous + 1:  # consecutive lines are one text
                yield Text(name, start, _without_code(comment))
                comment, start = "", token.start[0]
            comment += f"{token.string.lstrip('# ')}\n"
            previous = token.start[0]
    yield Text(name, start, _without_code(comment))


def of_settings(path: Path) -> Iterator[Text]:
    """Yield the comments and values of a recipe or a study in YAML."""
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        yield Text(_name(path), line, _without_code(text.lstrip("# ")))


def of_help(verb: str) -> Iterator[Text]:
    """Yield the help of a verb, or of `weft` itself for the empty one."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        main([*verb.split(), "--help"])
    text = re.sub(r" *[│╮╯]\n│ +(?=[^-* ])", " ", stream.getvalue())  # one paragraph for each option
    yield Text(f"weft {verb} --help", 1, _without_code(text))


def faults(texts: Iterable[Text]) -> list[str]:
    """Return the banned phrases of texts, with their place and what to say instead."""
    found = []
    for place, line, text in texts:
        for pattern, instead in PATTERNS.items():
            for match in pattern.finditer(text):
                phrase = " ".join(match[0].split())
                if not any(place.startswith(start) and phrase.lower() == allowed for start, allowed in ALLOWED):
                    around = " ".join(text[max(match.start() - 40, 0) : match.end() + 30].split())
                    at = line + text.count("\n", 0, match.start())
                    found.append(f"{place}:{at}: '{phrase}' in '{around}'; say: {instead}")
    return found


def _without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", _blank, text)


def _blank(match: re.Match[str]) -> str:
    """Return a stand-in for code, with the same number of line breaks."""
    return "CODE" + "\n" * match[0].count("\n")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_pages(page: Path) -> None:
    found = faults(of_page(page))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PLAIN_PACKAGES)
def test_packages(package: str) -> None:
    found = [fault for path in sorted((SOURCE / package).rglob("*.py")) for fault in faults(of_module(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("verb", ["", *commands()])
def test_help_texts(verb: str) -> None:
    found = faults(of_help(verb))
    assert not found, "\n".join(found)


def test_recipes_and_studies() -> None:
    paths = sorted(SOURCE.rglob("*.yaml"))
    assert len(paths) > 20
    found = [fault for path in paths for fault in faults(of_settings(path))]
    assert not found, "\n".join(found)


def test_single_modules() -> None:
    found = [fault for path in sorted(SOURCE.glob("*.py")) for fault in faults(of_module(path))]
    assert not found, "\n".join(found)


def test_a_fault_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```sh\nweft at once\n```\n\nThe run `goes on` as\nusual, and it goes\non. Cats, too.\n")
    assert [fault.partition(" in ")[0] for fault in faults(of_page(page))] == [
        "page.md:8: 'goes on'",
        "page.md:9: ', too'",
    ]
    module = tmp_path / "module.py"
    module.write_text('"""Read pictures."""\n\nx = 1  # one data\n# set; `beside`\n')
    assert [fault.partition(" in ")[0] for fault in faults(of_module(module))] == [
        "module.py:1: 'pictures'",
        "module.py:3: 'data set'",
    ]
