"""Evaluations of many classes: memory, size of the outputs, and the same numbers as from the confusion matrix."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluations import evaluation_of
from weft.cli.evaluate import _text
from weft.inference.conclusions import conclusions
from weft.inference.feature_map import draw
from weft.inference.metrics import MAX_MATRIX, Evaluation, class_lines
from weft.inference.report import MAX_ROWS, write_report
from weft.report.pages import NUM_STYLES, new_figure, svg

MIB = 2**20


def evaluation(num_classes: int, count: int) -> Evaluation:
    """Half of the predictions are correct; the others are of neighbouring classes."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, num_classes, count)
    predicted = np.where(rng.random(count) < 0.5, true, (true + rng.integers(1, 9, count)) % num_classes)
    rank = (true != predicted).astype(int)
    names, keys = [f"n{number:08}" for number in range(num_classes)], [f"{number}.jpg" for number in range(count)]
    return Evaluation(names, keys, np.arange(count), true, predicted, rng.random(count), rank, np.ones(count))


@pytest.fixture
def memory() -> Iterator[None]:
    svg(new_figure(1, 1))  # imports matplotlib before memory is measured
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("memory")
def test_22_000_classes_take_little_memory_and_give_small_outputs(tmp_path: Path) -> None:
    """A matrix of these classes would take 3,700 MiB."""
    result = evaluation(22_000, 44_000)
    values = result.as_dict()
    write_report(tmp_path, "t", [], result)
    text = "\n".join([_text(result, None), *class_lines(result), repr(result), result._repr_html_()])
    assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    assert len(values["classes"]) == 22_000
    assert sum(images for *_, images in values["confused"]) == (~result.is_correct).sum()
    assert (tmp_path / "report.html").stat().st_size < MIB
    assert len(text) < 20_000
    assert len(json.dumps(values)) < 5 * MIB


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_the_numbers_are_those_of_the_confusion_matrix(data: st.DataObject) -> None:
    num_classes = data.draw(st.integers(2, 7))
    numbers = st.lists(st.integers(0, 3), min_size=num_classes**2, max_size=num_classes**2).filter(any)
    matrix = np.array(data.draw(numbers)).reshape(num_classes, num_classes)
    result = evaluation_of([f"class {number}" for number in range(num_classes)], matrix)
    counts, errors = result.class_counts, matrix - np.diag(matrix.diagonal())
    np.testing.assert_array_equal(result.confusion, matrix)
    np.testing.assert_array_equal(counts, [matrix.sum(axis=1), matrix.sum(axis=0), matrix.diagonal()])
    order = np.argsort(-errors, axis=None, kind="stable")[: np.count_nonzero(errors)]
    places = [divmod(place, num_classes) for place in order.tolist()]
    assert result.confused.tolist() == [[*place, errors[place]] for place in places]
    never = (counts.images > 0) & (counts.predicted == 0)
    assert result.never_predicted == [f"class {number}" for number in np.flatnonzero(never)]
    recalls = [result.per_class[place].recall for place in result.weakest(num_classes)]
    defined = [recall for recall in recalls if recall is not None]
    assert recalls == sorted(defined) + [None] * (num_classes - len(defined))
    correct = f"{matrix.trace():,} of {matrix.sum():,} images correctly"
    assert correct in conclusions(result).sentences[0]


@pytest.mark.parametrize("num_classes", [MAX_MATRIX, MAX_MATRIX + 1])
def test_more_classes_than_a_person_can_read_have_lists_in_place_of_the_matrix(num_classes, tmp_path):
    result = evaluation(num_classes, 4_000)
    write_report(tmp_path, "t", [], result)
    page, values = (tmp_path / "report.html").read_text(encoding="utf-8"), result.as_dict()
    is_many = num_classes > MAX_MATRIX
    assert ("confused" in values, "confusion" in values) == (is_many, not is_many)
    assert ("Confusion matrix" in page) == (not is_many)
    assert ("The 100 of 101 classes with the lowest recall. evaluation.json of" in page) == is_many
    assert (f"{MAX_ROWS} of {len(result.confused)} pairs." in page) == is_many
    assert ("The 20 of 101 classes with the lowest recall; --csv lists all:" in _text(result, None)) == is_many
    assert _text(result, None).count("\nn0") == (20 if is_many else 100)
    lowest = min(score.recall for score in result.per_class if score.recall is not None)
    assert result.per_class[result.weakest(1)[0]].recall == lowest


def test_of_equal_recall_the_larger_class_is_first() -> None:
    result = evaluation_of("abcd", np.array([[0, 1, 0, 0], [0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 9]]))
    assert result.weakest(4) == [2, 0, 3, 1]
    assert result.weakest(1) == [2]


def test_a_map_of_many_classes_has_one_series_per_style() -> None:
    points, labels = np.zeros((50, 2)), np.arange(50) * 400
    names = [f"n{number}" for number in range(22_000)]
    axes = draw(points, labels, np.ones(50, bool), names, [""] * 50).axes[0]
    sizes = [len(series.get_offsets()) for series in axes.collections]
    assert (len(sizes), sum(sizes)) == (NUM_STYLES + 1, 50)  # with that of misclassified images
