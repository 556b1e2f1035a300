"""Rules for text and names that no other check has: exit code 1 where one is broken.

weft speaks plain technical English: words and phrases that it does not use, and what it says instead. Text comes from
generators of `Text`: `of_page` (Markdown), `of_module` (docstrings, comments and strings of Python code), `of_settings`
(recipes and studies) and `of_help`. Text files have an encoding, class names are unique, modules say what they are, and
only the folder of a paper knows its networks.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from weft.cli.app import commands, main
from weft.models.families import FOLDERS, VARIANTS, families

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weft"
FAMILIES = SOURCE / "models" / "families.py"  # the one file that names them: it holds the list, and the default model
PLACES = (*FOLDERS, "ports")
HOME = re.compile(rf"weft\.models\.({'|'.join(PLACES)})\b")
INSIDE = {"attention_biases", "lca", "num_stages", "leff", "kv_stride"}  # arguments and parameters of one family
NAMES = {*FOLDERS, *VARIANTS, *INSIDE, *(family.name for family in families())} - {"baselines"}
PARTS = {"Attention", "Block", "ClassTokenBlock", "MLP", "Stage"}  # names that the folders of families may repeat

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


def texts() -> Iterator[Text]:
    """Yield all text for people."""
    for page in PAGES:
        yield from of_page(page)
    for module in sorted(SOURCE.rglob("*.py")):
        yield from of_module(module)
    for settings in sorted(SOURCE.rglob("*.yaml")):
        yield from of_settings(settings)
    for verb in ("", *commands()):
        yield from of_help(verb)


def calls_without_encoding(code: str) -> list[int]:
    """Return the lines that call `read_text` or `write_text`, or open a text stream, without an encoding.

    Windows has another default. Ruff does not see these calls where it does not know that the object is a path.
    """
    lines = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, named = node.func.attr, {keyword.arg: keyword.value for keyword in node.keywords}
        modes = [*node.args[1:2], *filter(None, [named.get("mode")])]
        is_text = name in ("read_text", "write_text") or (
            name == "fdopen" and not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
        )
        is_text = is_text or (name in ("Popen", "run") and "text" in named)
        if is_text and "encoding" not in named:
            lines.append(node.lineno)
    return lines


def says_what_it_is(doc: str) -> bool:
    """Return whether the first line of a module stands alone in an index: a sentence or a noun phrase, no riddle."""
    first = doc.partition("\n")[0]
    riddles = ("What ", "Whatever ", "That ", "Where ", "Of ", "Who")
    return first.endswith(".") and 15 < len(first) <= 120 and not first.startswith(riddles)


def breaches(source: str) -> Iterator[str]:
    """Yield what a file knows of one family."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0] if node.body else None, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if HOME.match(start + alias.name):
                    yield f"{node.lineno}: imports {start}{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in NAMES or HOME.match(node.value):
                yield f"{node.lineno}: has the text {node.value!r}"
        elif getattr(node, "id", getattr(node, "attr", "")) in NAMES:
            yield f"{node.lineno}: has the name of a family's own"


def faults_of_modules() -> Iterator[str]:
    """Yield text files without an encoding, class names that are not unique, and modules that do not say what they are.

    One paper, one folder: no other code imports from a family's folder, names the family, or knows what is special.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        tree = ast.parse(code)
        for line in calls_without_encoding(code):
            yield f"{_name(path)}:{line}: a text file without an encoding"
        if not says_what_it_is(ast.get_docstring(tree) or ""):
            yield f"{_name(path)}:1: the first line of a module must say what it is"
        if path != FAMILIES and not any(SOURCE / "models" / place in path.parents for place in PLACES):
            yield from (f"{_name(path)}:{breach}" for breach in breaches(code))
        for node in tree.body:
            is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if is_public and not (node.name in PARTS and path.is_relative_to(SOURCE / "models")):
                places[node.name].append(_name(path))
    yield from (f"{where[1]}: class {name} is also in {where[0]}" for name, where in places.items() if len(where) > 1)


if __name__ == "__main__":
    found = [*faults(texts()), *faults_of_modules()]
    print("\n".join(found) or "lint: all texts and names follow the rules.")
    sys.exit(bool(found))
