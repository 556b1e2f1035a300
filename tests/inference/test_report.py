"""The report of an evaluation: its conclusions, what is drawn is what was measured, and a browser shows it on every
screen."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.evaluations import evaluation_of
from weft.inference.conclusions import Training, conclusions
from weft.inference.metrics import Evaluation
from weft.inference.report import MAX_NAMES, MAX_VALUES, confusion_figure, reliability_figure, write_report
from weft.report.intervals import too_few_text
from weft.report.markup import Card
from weft.report.pages import svg
from weft.runs.directory import EpochRow
from weft.train.finish import curve_figures

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = ["cat", "犬", "سمكة", "🐕", "Donaudampfschifffahrtsgesellschaftskapitän", "a_name_without_a_space_" * 4]
NAN = float("nan")
EVEN = np.array([[5, 3], [4, 6]])
HISTORY = [
    EpochRow(n, 10 * n, 1e-3, 2.0 / n, 30.0 + n, 1.8 / n, 40.0 + n % 3, 90.0, 100.0, 2.0, 5.0) for n in range(1, 8)
]


def evaluation(classes: list[str]) -> Evaluation:
    confusion = np.random.default_rng(0).integers(0, 9, (len(classes), len(classes)))
    return evaluation_of(classes, confusion, ["a|b/<img>.png"])


def written(folder: Path, *arguments: object, **more: object) -> str:
    write_report(folder, *arguments, **more)
    return (folder / "report.html").read_text(encoding="utf-8")


def test_curves_show_the_history_and_name_their_axes() -> None:
    figures = curve_figures(HISTORY, 2)
    assert [name for _, name in figures] == ["Accuracy by epoch", "Loss by epoch"]
    (accuracy,), (loss,) = (figure.axes for figure, _ in figures)
    assert accuracy.get_xlabel() == loss.get_xlabel() == "epoch"
    assert (accuracy.get_ylabel(), loss.get_ylabel()) == ("top-1 accuracy (%)", "loss (cross-entropy, nats)")
    assert list(loss.lines[0].get_ydata()) == [row.train_loss for row in HISTORY]
    assert list(accuracy.lines[1].get_ydata()) == [row.val_top1 for row in HISTORY]
    assert loss.lines[0].get_linestyle() != loss.lines[1].get_linestyle()  # not told by colour alone
    assert accuracy.get_title() == "best: epoch 2, 42.00 %"
    for figure, _ in figures:
        figure.draw_without_rendering()
        assert not figure.legends[0].get_window_extent().overlaps(figure.axes[0].get_tightbbox())


def test_curves_of_few_evaluations_have_no_gaps_and_whole_ticks() -> None:
    history = [row if row.epoch % 3 == 0 else row._replace(val_top1=NAN, val_loss=NAN) for row in HISTORY]
    (figure, _), _ = curve_figures(history, 3)
    assert list(figure.axes[0].lines[1].get_xdata()) == [3, 6]
    for figure, _ in curve_figures(HISTORY[:1], 1):
        figure.draw_without_rendering()
        low, high = figure.axes[0].get_xlim()
        assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1]


def test_few_classes_have_their_values_in_the_cells(tmp_path: Path) -> None:
    result = evaluation(["cat", "dog", "cow"])
    page = written(tmp_path, "t", [], result)
    rows = re.findall(r'<tr><th scope="row" dir="auto">(\w+)</th>(.+?)</tr>', page)
    assert [name for name, _ in rows] == ["cat", "dog", "cow"]
    cells = [re.findall(r"<td[^>]*>(\d*)</td>", cells) for _, cells in rows]
    assert cells == [[str(count or "") for count in row] for row in result.confusion.tolist()]


@pytest.mark.parametrize(("count", "has_names"), [(MAX_VALUES + 1, True), (MAX_NAMES + 1, False)])
def test_many_classes_are_a_figure_of_shares(count: int, has_names: bool, tmp_path: Path) -> None:
    result = evaluation([f"n{number}" for number in range(count)])
    axes = confusion_figure(result).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    np.testing.assert_allclose(axes.images[0].get_array().sum(axis=1), 100)
    assert ("n3" in [label.get_text() for label in axes.get_yticklabels()]) == has_names
    if has_names:
        page = written(tmp_path, "t", [], result)
        assert '<table class="matrix">' not in page
        assert 'alt="Confusion matrix: true classes by predicted classes"' in page


def test_a_report_is_one_file_without_markup_of_others(tmp_path: Path) -> None:
    result = evaluation(["$x", "tab\tby|bar", "<b>bold</b>" + "y" * 60])
    page = written(tmp_path, "A & B", [("images", "5 < 6")], result, curves=curve_figures(HISTORY, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert page.count("data:image/svg+xml;base64,") == 3  # curves, loss, reliability; the confusion matrix is a table
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the page needs another file"
    assert "<b>" not in page
    texts = ('<h1 dir="auto">A &amp; B</h1>', 'alt="Accuracy by epoch"', "a|b/&lt;img&gt;.png")
    for part in (*texts, '<meta name="viewport" content="width=device-width', "@media (prefers-color-scheme: dark)"):
        assert part in page


def test_reliability_says_which_way_it_errs(tmp_path: Path) -> None:
    result = evaluation(["a", "b", "c"])
    for confidence, said in (
        (0.05, "below accuracy (underconfident)"),
        (0.99, "above accuracy (overconfident)"),
        (result.top1 / 100, "mean confidence equals accuracy within 1 point"),
    ):
        other = dataclasses.replace(result, confidence=np.full(result.count, confidence))
        assert said in written(tmp_path, "t", [], other)
    upper, lower = reliability_figure(result).axes
    assert list(upper.get_lines()[1].get_ydata()) == [100 * row.right for row in result.calibration]
    assert sum(bar.get_height() for bar in lower.patches) == result.count


def test_pairs_are_sorted_by_how_often(tmp_path: Path) -> None:
    page = written(tmp_path, "T", [], evaluation_of("abc", np.array([[5, 7, 0], [1, 5, 0], [0, 2, 5]])))
    pairs = page.partition("<h2>Most confused pairs</h2>")[2].partition("<h2>")[0]
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.+?)</tr>", pairs)]
    assert [row for row in cells if row] == [["a", "b", "7", "58.3"], ["c", "b", "2", "28.6"], ["b", "a", "1", "16.7"]]
    assert "by epoch" not in page
    assert "confident errors" not in written(tmp_path, "T", [], evaluation_of("ab", np.array([[5, 0], [0, 5]])))


@pytest.mark.figures
def test_figures_follow_the_dark_mode_and_are_the_same_each_time() -> None:
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
        too_few_text(result.interval, 22),
        "Most frequent errors: cat as dog (7 of 12).",
    ]
    assert "Add training images of the weakest classes: cat (5 of 12 correct)." in lead.next_steps
    assert "Evaluate on more images, so that the accuracy is known better." in lead.next_steps
    grouped = dataclasses.replace(result, groups=[str(number // 2) for number in range(22)])
    assert grouped.warnings() == [too_few_text(grouped.interval, 22, 11)]
    assert "Evaluate on images of more groups, so that the accuracy is known better." in conclusions(grouped).next_steps


@pytest.mark.parametrize(
    ("confusion", "best_epoch", "train_top1", "said"),
    [
        (EVEN, 7, 37.0, "Train longer: the best epoch, 7, is among the last. For example --epochs 14."),
        (EVEN, 7, 37.0, "(6 of 10 correct, 20 training images)"),
        (EVEN, 2, 99.5, "Training accuracy is 58 points above held-out accuracy"),
        (np.array([[19, 0], [1, 0]]), 1, 37.0, "--set best=balanced"),
    ],
)
def test_what_to_do_next_follows_the_run(confusion: np.ndarray, best_epoch: int, train_top1: float, said: str) -> None:
    history = [row._replace(train_top1=train_top1) for row in HISTORY]
    steps = conclusions(evaluation_of(["cat", "dog"], confusion), Training([30, 20], history, best_epoch)).next_steps
    assert any(said in step for step in steps)


def test_only_confident_errors_have_suspicious_labels() -> None:
    result = evaluation_of(["cat", "dog"], np.array([[3, 1], [0, 0]]), ["x.png"])
    for probability, is_suspicious in ((0.85, True), (0.75, False)):
        confidence = np.array([0.7, 0.8, 0.9, probability])
        steps = conclusions(dataclasses.replace(result, confidence=confidence)).next_steps
        assert any("Check these labels" in step and "x.png" in step for step in steps) == is_suspicious


def test_a_model_without_weakness_is_not_given_one() -> None:
    perfect = evaluation_of(["cat", "dog"], np.array([[80, 0], [0, 90]]))
    lead = conclusions(dataclasses.replace(perfect, confidence=np.ones(170)))
    assert "It makes no error on these images." in lead.sentences
    assert lead.next_steps[0].startswith("No weakness stands out.")


@pytest.mark.figures
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as Debian's package of that name brings it")
def test_a_browser_shows_it_on_every_screen(tmp_path: Path) -> None:
    """On a phone and a desktop, in light and dark mode, with class names in any script."""
    playwright, result = pytest.importorskip("playwright.sync_api"), evaluation(NAMES)
    pixels = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    errors = [Card({"image": pixels, "map": pixels}, [name]) for name in NAMES]
    summary, training = [("repeat with", "weft train --config " + "a/long/path/" * 12)], Training([10] * 6, HISTORY, 2)
    write_report(tmp_path, "model on photos", summary, result, errors, curve_figures(HISTORY, 2), training)
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for width, scheme in ((360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")):
            page, requests = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme), []
            page.on("request", lambda request, requests=requests: requests.append(request.url))
            page.goto((tmp_path / "report.html").as_uri())
            assert all(url.startswith(("file:", "data:")) for url in requests)
            assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll inside the page
            rgb = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
            assert max(rgb[:3]) < 60 if scheme == "dark" else min(rgb[:3]) > 200
            for name in NAMES:
                assert page.get_by_text(name, exact=True).count() >= 3  # in the matrix, twice, and in the classes
            sides = page.evaluate("[...document.querySelectorAll('.card img')].map(image => image.clientWidth)")
            assert len(sides) == 2 * len(NAMES)
            assert min(sides) > 100
            headings = page.locator("h2").all_inner_texts()
            assert headings[:4] == ["What to do next", "Summary", "Accuracy and loss by epoch", "Confusion matrix"]
        browser.close()
