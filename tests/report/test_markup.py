"""Names with markup in them, of classes, files, variants and data, are text in every report: they are read back here by
a parser of HTML, and those of a model card by one of Markdown."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from markdown_it import MarkdownIt

from tests.evaluations import evaluation_of
from weft.checkpoints import save_model_dir
from weft.checkpoints.hub import create_model
from weft.inference.report import write_report
from weft.report.intervals import Estimate
from weft.report.markup import Card
from weft.runs.directory import EpochRow, write_metrics
from weft.runs.hub import model_card
from weft.study import Study
from weft.study.plan import Scale, StudyVariant
from weft.study.report import write_report as write_study_report
from weft.study.result import ExperimentResult, Form, Limits, Row
from weft.text import fenced, markdown, printable

NAMES = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td></tr></table><h1>x",
    "<!-- x",
    "& &amp; &lt; &#60;",
    "\"double\" 'single'",
    "[red]rich[/red] [/]",
    ":bomb:",
    "[link](javascript:alert(1))",
    "![seen](http://example.org/x)",
    "<http://example.org>",
    "https://example.org/ www.example.org",
    "a|b \\| c",
    "`code` ``two``",
    "*b* **c** _d_ __e__ f_g",
    "~~gone~~ ~x~",
    "$x^2$ $\\frac$",
    "# heading",
    "- item",
    "1. item",
    "> quote",
    "\\ \\* \\\\",
    "{{x}} {0} %s",
    "_hidden",
    "[x]: http://example.org",
    "two  spaces",
    "Straße 犬 🐕",
    "\x1b[31mred",
    "a\u202eb",
    "new\nline",
    "tab\tby",
    "\0",
)
MAX_REPR = 400  # characters
TAGS = {"html", "head", "body", "meta", "title", "style", "h1", "h2", "p", "img", "table", "thead", "tbody", "tr", "th",
        "td", "ul", "li", "pre", "code", "hr", "div", "section", "dl", "dt", "dd", "figure", "figcaption"}  # fmt: skip


class Reader(html.parser.HTMLParser):
    """Texts of a page, tags and addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.tags, self.places, self._text = [], set(), [], ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.places += [value for name, value in attrs if name in ("src", "href")]
        self.texts += [value for name, value in attrs if name == "alt"]
        assert not [name for name, _ in attrs if name.startswith("on")]
        self._end()

    def handle_endtag(self, tag: str) -> None:
        self._end()

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def _end(self) -> None:
        self.texts.append(self._text)
        self._text = ""


def read_markdown(text: str) -> Reader:
    """As a page that shows HTML in Markdown, tables and strikethrough."""
    return Reader(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text))


def check_page(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """The page shows these names as they are, and holds nothing but what weft put there."""
    page = Reader((folder / "report.html").read_text("utf-8"))
    assert page.tags <= TAGS
    assert all(re.fullmatch(r"data:image/(png|jpeg|svg\+xml);.*", place) for place in page.places)
    shown = "\n".join(page.texts)
    missing = [name for name in names if printable(name) not in shown]
    assert missing == []


def read(result: Any, *names: str) -> Reader:
    """Read the HTML of a result: it has known tags alone, and these names as text; and its short representation."""
    page = Reader(result._repr_html_())
    assert page.tags <= TAGS
    assert all(place.startswith("data:image/") for place in page.places)
    shown = "\n".join(page.texts)
    assert [name for name in names if printable(name) not in shown] == []
    return page


def check_repr(result: Any) -> None:
    assert len(repr(result)) <= MAX_REPR
    assert repr(result).isprintable()
    assert repr(result).startswith(f"{type(result).__name__}(")


@pytest.mark.parametrize("name", NAMES)
def test_markdown_shows_the_text(name: str) -> None:
    for frame in ("# {}", "- name: {}", "| a |\n| --- |\n| {} |", "![{}](x.png)"):
        page = read_markdown(frame.format(markdown(name)))
        assert any(text.endswith(printable(name)) for text in page.texts), page.texts
        assert page.tags <= TAGS
    assert not re.search(r"://|www\.", markdown(name))  # which GitHub would make a link of
    assert len(markdown(name).splitlines()) == 1


def test_words_stay_readable_in_the_source() -> None:
    for word in ("levit_nano_32", "top-1, top-5", "98.50 % (97.1 to 99.2)", "photos/class0/000.png", "McNemar p"):
        assert markdown(word) == word


@pytest.mark.parametrize("text", ["plain\n", "a: '```'\n", "a:\n  ````\n", "````yaml\n```\n"])
def test_a_code_block_holds_its_text(text: str) -> None:
    (token,) = MarkdownIt("commonmark").parse(fenced(text, "yaml"))
    assert (token.type, token.content, token.info) == ("fence", text, "yaml")


ESTIMATE = Estimate(50.0, 49.0, 51.0)


def row_of(name: str, line: str | None, **more: Any) -> Row:
    return Row(name, line, (50.0,), ESTIMATE, ESTIMATE, curve=((1, 10.0), (2, 20.0)), **more)


@pytest.mark.figures
def test_the_report_of_a_run(tmp_path: Path) -> None:
    result = evaluation_of(NAMES, np.random.default_rng(0).integers(0, 9, (len(NAMES), len(NAMES))), NAMES)
    title = " ".join(name for name in NAMES if "\n" not in name)
    pixels = np.zeros((8, 8, 3), np.uint8)
    errors = [Card({"image": pixels, "map": pixels}, [mistake.true], mistake.key) for mistake in result.mistakes]
    write_report(tmp_path, title, [(f"fact {name}", f"value {name}") for name in NAMES], result, errors)
    check_page(tmp_path, (*NAMES, title, *(f"value {name}" for name in NAMES)))


@pytest.mark.figures
def test_the_report_of_a_study(tmp_path: Path) -> None:
    variants = tuple(StudyVariant(name, line=NAMES[number % 9], at=number + 1.0) for number, name in enumerate(NAMES))
    scale = Scale("digits", "digits", set={"optim.opt": NAMES[0]})
    study = Study("mine", NAMES[2], NAMES[8], NAMES[4], {"small": scale}, variants, x="share $x$ of <b>")
    more = dict(verdict="higher", paper=1.0, paper_effect=2.0)
    rows = tuple(row_of(name, NAMES[0], errors=((0, f"no {name}"),), **more) for name in NAMES)
    result = ExperimentResult(tmp_path, study, "small", NAMES[9], 1, rows)
    write_study_report(result)
    check_page(tmp_path, (*NAMES, *(f"no {name}" for name in NAMES)))
    read(result, *NAMES, *(f"no {name}" for name in NAMES))
    check_repr(dataclasses.replace(result, out=Path("x")))
    study = dataclasses.replace(study, x=None)
    write_study_report(ExperimentResult(tmp_path, study, "small", "digits", 1, rows[:3]))
    check_page(tmp_path, NAMES[:3])


@pytest.mark.figures
def test_the_report_of_a_comparison(tmp_path: Path) -> None:
    forms = (Form("float", NAMES[4], 50.0, 1.0, 100.0, 4.0),)
    rows = tuple(row_of(name, None, weights=name, forms=forms) for name in NAMES)
    failed = tuple(Row(name, errors=((0, f"no {name}"),)) for name in NAMES)
    study = Study("compare", f"Comparison of models on {NAMES[0]}", "", "", {"small": Scale(None, NAMES[0])}, ())
    texts: Any = dict(notes=NAMES, protocol=NAMES[3], limits=Limits(), frontier=((NAMES[0], "float"),), advice=NAMES[8])
    result = ExperimentResult(tmp_path, study, "small", NAMES[0], 1, (*rows, *failed), **texts)
    write_study_report(result)
    check_page(tmp_path, (*NAMES, *(f"no {name}" for name in NAMES)))
    page = read(result, *NAMES, *(f"no {name}" for name in NAMES))
    assert f"Report: {tmp_path / 'report.html'}" in page.texts
    check_repr(dataclasses.replace(result, out=Path("x")))


def test_model_cards(tmp_path: Path) -> None:
    """Of classes with these names, and of a dataset and weights with each."""
    names = [name for name in NAMES if name.isprintable()]  # others cannot be those of a model
    network = create_model("levit_nano_32", num_classes=len(names), depth=[1, 1, 1])
    save_model_dir(network, tmp_path / "best", label_names=names)
    write_metrics(tmp_path / "metrics.csv", [EpochRow(1, *[1.0] * 10)])
    for name in (name for name in NAMES if "/" not in name and "\0" not in name):
        source = f"elsewhere/{name}"
        settings = {"start_from": source, "data": {"source": source}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
        _, head, body = model_card(tmp_path, "me/model").split("---\n", 2)
        assert yaml.safe_load(head)["model-index"][0]["results"][0]["dataset"]["type"] == printable(name)
        page = read_markdown(body)
        assert page.tags <= TAGS
        assert page.places == []
        assert f"{len(names)}: {', '.join(names)}" in page.texts
