"""Pictures and pages: what is drawn is what was measured, and a strange name breaks nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weft.train.metrics import Evaluation, Mistake, class_scores
from weft.train.report import MAX_NAMES, MAX_VALUES, confusion_figure, curves_figure, reliability_figure, write_report
from weft.train.rundir import EpochRow

HISTORY = [
    EpochRow(n, 10 * n, 1e-3, 2.0 / n, 30.0 + n, 1.8 / n, 40.0 + n % 3, 90.0, 100.0, 2.0, 5.0) for n in range(1, 8)
]


def evaluation(classes: list[str], seed: int = 0) -> Evaluation:
    confusion = np.random.default_rng(seed).integers(0, 9, (len(classes), len(classes)))
    return Evaluation(
        classes=classes,
        count=int(confusion.sum()),
        excluded=[],
        loss=1.0,
        top1=100 * confusion.trace() / confusion.sum(),
        top5=99.0,
        confusion=confusion,
        per_class=class_scores(classes, confusion),
        mistakes=[Mistake("a|b/<img>.png", classes[0], classes[1], 0.987, 0)],
        right=np.arange(confusion.sum()) < confusion.trace(),
        sure=np.linspace(0.05, 1, confusion.sum()),
    )


def texts(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_curves_show_the_history_and_name_their_axes() -> None:
    left, right = curves_figure(HISTORY).axes
    assert [left.get_xlabel(), right.get_xlabel()] == ["epoch", "epoch"]
    assert left.get_ylabel() == "loss (cross-entropy, nats)"
    assert right.get_ylabel() == "top-1 accuracy (%)"
    assert left.lines[0].get_ydata() == pytest.approx([row.train_loss for row in HISTORY])
    assert right.lines[1].get_ydata() == pytest.approx([row.val_top1 for row in HISTORY])
    assert left.lines[0].get_linestyle() != left.lines[1].get_linestyle()  # not told by colour alone
    assert right.texts[0].get_text() == "best: 42.00 %\nepoch 2"


def test_one_epoch_is_a_curve_too() -> None:
    assert len(curves_figure(HISTORY[:1]).axes) == 2


def test_few_classes_have_their_values_in_the_cells() -> None:
    result = evaluation(["cat", "dog", "cow"])
    figure = confusion_figure(result)
    assert sorted(texts(figure)) == sorted(str(count) for count in result.confusion.ravel() if count)
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("was taken for", "is")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "cow"]
    share = axes.images[0].get_array()
    np.testing.assert_allclose(share.sum(axis=1), 100)


@pytest.mark.parametrize(("count", "has_names"), [(MAX_VALUES + 1, True), (MAX_NAMES + 1, False)])
def test_many_classes_have_none(count: int, has_names: bool) -> None:
    figure = confusion_figure(evaluation([f"n{number}" for number in range(count)]))
    assert texts(figure) == []
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert ("n3" in shown) == has_names


def test_a_report_is_whole(tmp_path: Path) -> None:
    result = evaluation(["$x", "tab\tby|bar", "<b>bold</b>" + "y" * 60])
    write_report(tmp_path / "report", "A & B", [("images", "5 < 6")], result, HISTORY)
    folder = tmp_path / "report"
    pictures = {"confusion.png", "curves.png", "reliability.png"}
    assert {path.name for path in folder.iterdir()} == {*pictures, "report.html", "report.md"}
    for name in pictures:
        with Image.open(folder / name) as image:
            assert min(image.size) > 400
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == len(pictures)
    assert "<b>" not in page
    assert "&lt;img&gt;" in page
    assert "<h1>A &amp; B</h1>" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the page needs another file"
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "![Loss and accuracy by epoch](curves.png)" in text
    assert r"a\|b/&lt;img&gt;.png" in text
    for line in text.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6), line


def test_reliability_says_which_way_it_errs(tmp_path: Path) -> None:
    result = evaluation(["a", "b", "c"])
    unsure = dataclasses.replace(result, sure=np.full(result.count, 0.05))
    even = dataclasses.replace(result, sure=np.full(result.count, result.top1 / 100))
    for found, words in ((unsure, "less sure than it is right"), (even, "as sure as it is right")):
        write_report(tmp_path, "t", [], found)
        assert words in (tmp_path / "report.md").read_text()
    upper, lower = reliability_figure(result).axes
    line = upper.get_lines()[1]
    assert list(line.get_ydata()) == [100 * row.right for row in result.calibration]
    assert sum(bar.get_height() for bar in lower.patches) == result.count


def test_pairs_are_sorted_by_how_often(tmp_path: Path) -> None:
    result = evaluation(["a", "b", "c"])
    result.confusion[:] = [[5, 7, 0], [1, 5, 0], [0, 2, 5]]
    write_report(tmp_path, "T", [], result)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    pairs = text.partition("## Most confused pairs")[2].partition("##")[0]
    assert re.findall(r"^\| ([abc]) \| ([abc]) \| (\d) \| ([\d.]+) \|$", pairs, re.MULTILINE) == [
        ("a", "b", "7", "58.3"),
        ("c", "b", "2", "28.6"),
        ("b", "a", "1", "16.7"),
    ]
    assert not (tmp_path / "curves.png").exists()


def test_no_mistakes_no_table(tmp_path: Path) -> None:
    result = evaluation(["a", "b"])
    result.confusion[:] = [[5, 0], [0, 5]]
    result.mistakes.clear()
    write_report(tmp_path, "T", [], result)
    assert "mistakes" not in (tmp_path / "report.html").read_text(encoding="utf-8")
