"""Pictures and pages: what is drawn is what was measured, and a strange name breaks nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from tests.evaluations import evaluation_of
from weft.inference.conclusions import Training, conclusions
from weft.inference.metrics import Evaluation
from weft.inference.report import MAX_NAMES, MAX_VALUES, confusion_figure, reliability_figure, write_report
from weft.report.intervals import too_few_text
from weft.report.pages import svg
from weft.runs.directory import EpochRow
from weft.train.curves import curve_figures

pytestmark = pytest.mark.figures

HISTORY = [
    EpochRow(n, 10 * n, 1e-3, 2.0 / n, 30.0 + n, 1.8 / n, 40.0 + n % 3, 90.0, 100.0, 2.0, 5.0) for n in range(1, 8)
]


def evaluation(classes: list[str], seed: int = 0) -> Evaluation:
    confusion = np.random.default_rng(seed).integers(0, 9, (len(classes), len(classes)))
    return evaluation_of(classes, confusion, ["a|b/<img>.png"])


def test_curves_show_the_history_and_name_their_axes() -> None:
    figures = curve_figures(HISTORY, 2)
    assert [name for _, name in figures] == ["Accuracy by epoch", "Loss by epoch"]
    (accuracy,), (loss,) = (figure.axes for figure, _ in figures)
    assert [accuracy.get_xlabel(), loss.get_xlabel()] == ["epoch", "epoch"]
    assert accuracy.get_ylabel() == "top-1 accuracy (%)"
    assert loss.get_ylabel() == "loss (cross-entropy, nats)"
    assert list(loss.lines[0].get_ydata()) == [row.train_loss for row in HISTORY]
    assert list(accuracy.lines[1].get_ydata()) == [row.val_top1 for row in HISTORY]
    assert loss.lines[0].get_linestyle() != loss.lines[1].get_linestyle()  # not told by colour alone
    assert accuracy.get_title() == "best: epoch 2, 42.00 %"


def test_no_name_covers_a_point() -> None:
    for figure, _ in curve_figures(HISTORY, 2):
        figure.draw_without_rendering()
        (legend,), (axes,) = figure.legends, figure.axes
        assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
        assert not axes.texts


def test_epochs_without_an_evaluation_are_no_gap_in_the_curve() -> None:
    nan = float("nan")
    history = [row if row.epoch % 3 == 0 else row._replace(val_top1=nan, val_loss=nan) for row in HISTORY]
    (figure, _), _ = curve_figures(history, 3)
    assert list(figure.axes[0].lines[1].get_xdata()) == [3, 6]


def test_one_epoch_is_a_curve_too() -> None:
    for figure, _ in curve_figures(HISTORY[:1], 1):
        figure.draw_without_rendering()
        low, high = figure.axes[0].get_xlim()
        assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1]


def test_few_classes_have_their_values_in_the_cells(tmp_path: Path) -> None:
    result = evaluation(["cat", "dog", "cow"])
    write_report(tmp_path, "t", [], result)
    rows = re.findall(r'<tr><th scope="row" dir="auto">(\w+)</th>(.+?)</tr>', (tmp_path / "report.html").read_text())
    assert [name for name, _ in rows] == ["cat", "dog", "cow"]
    cells = [re.findall(r"<td[^>]*>(\d*)</td>", cells) for _, cells in rows]
    assert cells == [[str(count or "") for count in row] for row in result.confusion.tolist()]


@pytest.mark.parametrize(("count", "has_names"), [(MAX_VALUES + 1, True), (MAX_NAMES + 1, False)])
def test_many_classes_are_shares(count: int, has_names: bool) -> None:
    axes = confusion_figure(evaluation([f"n{number}" for number in range(count)])).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    np.testing.assert_allclose(axes.images[0].get_array().sum(axis=1), 100)
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert ("n3" in shown) == has_names


def test_a_report_is_whole(tmp_path: Path) -> None:
    result = evaluation(["$x", "tab\tby|bar", "<b>bold</b>" + "y" * 60])
    write_report(tmp_path / "report", "A & B", [("images", "5 < 6")], result, curves=curve_figures(HISTORY, 2))
    folder = tmp_path / "report"
    assert [path.name for path in folder.iterdir()] == ["report.html"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 3  # curves, loss, reliability; the confusion matrix is a table
    assert '<table class="matrix">' in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "@media (prefers-color-scheme: dark)" in page
    assert "<b>" not in page
    assert "&lt;img&gt;" in page
    assert '<h1 dir="auto">A &amp; B</h1>' in page
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the page needs another file"
    assert 'alt="Accuracy by epoch"' in page
    assert "a|b/&lt;img&gt;.png" in page


def test_reliability_says_which_way_it_errs(tmp_path: Path) -> None:
    result = evaluation(["a", "b", "c"])
    unsure = dataclasses.replace(result, confidence=np.full(result.count, 0.05))
    even = dataclasses.replace(result, confidence=np.full(result.count, result.top1 / 100))
    for found, arguments in (
        (unsure, "below accuracy (underconfident)"),
        (even, "mean confidence equals accuracy within 1 point"),
    ):
        write_report(tmp_path, "t", [], found)
        assert arguments in (tmp_path / "report.html").read_text()
    upper, lower = reliability_figure(result).axes
    line = upper.get_lines()[1]
    assert list(line.get_ydata()) == [100 * row.right for row in result.calibration]
    assert sum(bar.get_height() for bar in lower.patches) == result.count


def test_pairs_are_sorted_by_how_often(tmp_path: Path) -> None:
    result = evaluation_of("abc", np.array([[5, 7, 0], [1, 5, 0], [0, 2, 5]]))
    write_report(tmp_path, "T", [], result)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    pairs = page.partition("<h2>Most confused pairs</h2>")[2].partition("<h2>")[0]
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.+?)</tr>", pairs)]
    assert [tuple(row) for row in cells if row] == [
        ("a", "b", "7", "58.3"),
        ("c", "b", "2", "28.6"),
        ("b", "a", "1", "16.7"),
    ]
    assert "by epoch" not in page


def test_no_mistakes_no_table(tmp_path: Path) -> None:
    write_report(tmp_path, "T", [], evaluation_of("ab", np.array([[5, 0], [0, 5]])))
    assert "confident errors" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_many_classes_are_a_figure(tmp_path: Path) -> None:
    write_report(tmp_path, "T", [], evaluation([f"n{number}" for number in range(MAX_VALUES + 1)]))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<table class="matrix">' not in page
    assert 'alt="Confusion matrix: true classes by predicted classes"' in page


def test_figures_follow_the_dark_mode() -> None:
    text = svg(reliability_figure(evaluation(["a", "b"]))).decode()
    assert text.count("@media (prefers-color-scheme: dark)") == 1
    assert ">confidence (%)</text>" in text  # text, not outlines: the browser has the fonts of every script
    assert text == svg(reliability_figure(evaluation(["a", "b"]))).decode()


def test_the_conclusions_say_how_good_and_how_certain() -> None:
    result = evaluation_of(["cat", "dog"], np.array([[5, 7], [0, 10]]))
    lead = conclusions(result)
    assert lead.sentences == [
        "The model classifies 15 of 22 images correctly: 68.2 % (95 % interval 47.3 to 83.6 %).",
        "It is not shown to be better than predicting cat, the most frequent class, for all images (54.5 %).",
        too_few_text(result.top1, 22),
        "Most frequent errors: cat as dog (7 of 12).",
    ]
    assert "Add training images of the weakest classes: cat (5 of 12 correct)." in lead.next_steps


def test_what_to_do_next_follows_the_curves() -> None:
    result = evaluation(["cat", "dog"])
    late = conclusions(result, Training([30, 40], HISTORY, 7)).next_steps
    assert any(step.startswith("Train longer: the best epoch, 7,") for step in late)
    assert any("30 training images" in step or "40 training images" in step for step in late)
    overfitted = [row._replace(train_top1=99.5) for row in HISTORY]
    steps = conclusions(result, Training([30, 40], overfitted, 2)).next_steps
    assert any(step.startswith("Training accuracy is 58 points above held-out accuracy") for step in steps)


def test_only_confident_errors_have_suspicious_labels() -> None:
    result = evaluation_of(["cat", "dog"], np.array([[3, 1], [0, 0]]), ["x.png"])
    for probability, is_suspicious in ((0.85, True), (0.75, False)):
        confidence = np.array([0.7, 0.8, 0.9, probability])
        steps = conclusions(dataclasses.replace(result, confidence=confidence)).next_steps
        assert any("Check these labels" in step and "x.png" in step for step in steps) == is_suspicious


def test_no_weakness_is_said() -> None:
    perfect = evaluation_of(["cat", "dog"], np.array([[80, 0], [0, 90]]))
    lead = conclusions(dataclasses.replace(perfect, confidence=np.ones(170)))
    assert "It makes no error on these images." in lead.sentences
    assert lead.next_steps[0].startswith("No weakness stands out.")
