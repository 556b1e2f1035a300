"""Notebooks: results are tables and images, progress is one output that is updated, and the example runs."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.evaluations import evaluation_of
from tests.report.test_markup import NAMES, check_repr, read
from weft.inference.embedding import Embedding
from weft.inference.explain_files import FileExplanation
from weft.inference.prediction_files import FilePrediction
from weft.interpret import Explanation
from weft.progress import Work, quietly, say
from weft.report import notebook
from weft.report.notebook import MAX_CARDS, ImageList, in_notebook
from weft.runs.directory import EpochRow
from weft.train import RunResult
from weft.train.loop import Meter
from weft.train.reporter import Reporter, epoch_line

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_hour.ipynb"
MAX_LINES = 12  # of progress in a cell
METER = Meter(10, 10, 200, 300.0, 84, seconds=2.0, waiting=0.5, seen=2469)


class Cell:
    """Outputs of a cell, as a front end shows them: the last content of each, and the number of messages."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.messages = 0

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        place = len(self.outputs)
        self.outputs.append({})

        def update(content: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[place] = content
            self.messages += 1

        update(content, raw=True)
        return types.SimpleNamespace(update=update)

    @property
    def texts(self) -> list[str]:
        return [content["text/plain"] for content in self.outputs]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """A process in a kernel, without IPython."""
    cell = Cell()
    shell = types.SimpleNamespace(kernel=object())
    module = types.ModuleType("IPython")
    display = types.ModuleType("IPython.display")
    module.get_ipython, display.display = lambda: shell, cell.display
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


class Time:
    """Clock that a test moves."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_run(tmp_path):
    found = evaluation_of(["a", "b"], np.array([[100, 8], [12, 80]]))
    run = RunResult(tmp_path, NAMES[0], NAMES[1], 9, 7, 65.0, found)
    page = read(run, *NAMES[:2])
    check_repr(dataclasses.replace(run, out=Path("runs/x")))
    assert "90.00 % of 200 held-out images (95 % CI 85.1 to 93.4 %)" in page.texts


@pytest.mark.parametrize("count", [9, 200])
def test_an_evaluation_has_a_matrix_of_few_classes_and_is_short_for_many(count):
    names = list(NAMES[:9]) if count == 9 else [f"class {number}" for number in range(count)]
    result = evaluation_of(names, np.full((count, count), 3))
    html = result._repr_html_()
    assert ('class="matrix"' in html) == (count == 9)
    assert ("The 20 of 200 classes with the lowest recall:" in html) == (count == 200)
    assert html.count("<tr>") < 35
    check_repr(result)
    if count == 9:
        read(result, *names)
        assert repr(result) == ("Evaluation(count=243, classes=9, top1=11.11 (7.75 to 15.68), loss=1.0000, excluded=0)")


@pytest.mark.parametrize("side", [8, 500])
def test_a_prediction_has_its_image(tmp_path, side):
    path = tmp_path / "a <b> & c.png"
    Image.new("RGB", (side, side), "red").save(path)
    one = FilePrediction(str(path), [(NAMES[0], 0.75), (NAMES[1], 0.2)], rejected=True, unknown=True)
    page = read(one, path.name, f"{NAMES[0]}, 75.0 %", "unknown: the image resembles no training image")
    assert len(page.places) == 1
    assert len(page.places[0]) < 10_000  # a thumbnail
    read(FilePrediction("gone.png", [(NAMES[0], 0.5)]), NAMES[0], "gone.png")
    read(FilePrediction(NAMES[0], [], NAMES[1], "truncated"), *NAMES[:2])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            FilePrediction("x.png", [("cat", 0.75)], unknown=False),
            "FilePrediction(image='x.png', top=['cat' 75.0 %], unknown=False)",
        ),
        (FilePrediction("x", [], "x is damaged", "truncated"), "FilePrediction(image='x', error='x is damaged')"),
        (FileExplanation("x", error="damaged"), "FileExplanation(image='x', error='damaged')"),
        (
            Embedding(["a.png"] * 9000, np.zeros((9000, 192), np.float32), []),
            "Embedding(images=9000, features=192, errors=0)",
        ),
    ],
)
def test_the_representation_of_a_result_is_short(result, text):
    assert repr(result) == text


def test_a_list_of_predictions_is_a_gallery() -> None:
    predictions = ImageList(FilePrediction(f"{number}.png", [], "damaged") for number in range(MAX_CARDS + 6))
    assert predictions._repr_html_().count("<figure") == MAX_CARDS
    assert "and 6 more" in predictions._repr_html_()
    assert predictions[:2]._repr_html_().count("<figure") == 2
    assert predictions[0].image == "0.png"
    assert predictions == list(predictions)


def test_an_explanation_has_overlays(tmp_path: Path) -> None:
    picture, fmap = np.zeros((32, 32, 3), np.uint8), np.arange(16.0).reshape(4, 4)
    probabilities = np.full(1000, 0.001)
    maps = {"rollout": fmap, "saliency": fmap[:2, :2], "grad_cam": fmap}
    one = Explanation(picture, 3, probabilities, {"stages.2": fmap}, **maps)
    page = read(one, "class 3, 0.1 %", "image, attention, attention rollout, Grad-CAM")
    assert len(set(page.places)) == 3  # the two maps of equal values look the same
    assert repr(one) == (
        "Explanation(label=3, probability=0.001, size=32x32, maps=['stages.2', 'rollout', 'grad_cam'])"
    )
    assert len(read(dataclasses.replace(one, saliency=fmap, rollout=fmap, grad_cam=None)).places) == 2
    of_file = Explanation(picture, 3, probabilities, rollout=fmap)
    file = FileExplanation("a.png", NAMES[0], 0.001, "a.png", "a.npz", folder=tmp_path, explanation=of_file)
    assert len(read(file, f"{NAMES[0]}, 0.1 %", "image, attention rollout", "a.png").places) == 2
    assert not {"folder", "explanation"} & file.as_dict().keys()
    read(dataclasses.replace(file, explanation=None), f"{NAMES[0]}: {tmp_path / 'a.png'}")


def test_without_a_kernel_there_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    shell = types.ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", shell)  # while it is being imported
    assert not in_notebook()
    shell.get_ipython = lambda: None
    assert not in_notebook()
    shell.get_ipython = types.SimpleNamespace  # IPython on a terminal
    assert not in_notebook()


def test_a_task_is_one_output(cell: Cell, capfd: pytest.CaptureFixture[str]) -> None:
    now = Time()
    with Work("evaluating <b>", 2000, now=now) as work:
        for _ in range(1000):
            now.seconds += 0.01
            work.advance(1)
        assert cell.texts == ["evaluating <b>: 1,000 of 2,000 images, 0:10 elapsed, 0:10 left, 100 images/s"]
        assert '<progress value="1000" max="2000"' in cell.outputs[0]["text/html"]
        assert "evaluating &lt;b&gt;" in cell.outputs[0]["text/html"]
        assert cell.messages <= 10 / notebook.UPDATE_SECONDS
        with Work("reading", 5, now=now) as inner:  # one at a time
            now.seconds += 9
            inner.advance(5)
        work.update(2000)
    assert cell.texts == ["evaluating <b>: 2,000 of 2,000 images, 0:19 elapsed, 105 images/s"]
    assert "<progress" not in cell.outputs[0]["text/html"]
    assert capfd.readouterr() == ("", "")


def test_a_task_of_several_parts_ends_in_one_line(cell: Cell) -> None:
    now = Time()
    with Work("converting", now=now) as work:
        now.seconds += 20
        work.begin("checking", 10)
        now.seconds += 5
        work.advance(10)
        assert cell.texts == ["checking: 10 of 10 images, 0:05 elapsed, 0:00 left, 2.0 images/s"]
    assert cell.texts == ["converting: 0:25 elapsed"]


def test_a_short_task_and_quiet_ones_show_nothing(cell):
    with Work("evaluating", 20) as work:
        work.advance(20)
    now = Time()
    with quietly():
        with Work("evaluating", 20, now=now) as work:
            now.seconds += 900
            work.advance(20)
        with Reporter(3) as reporter:
            reporter.step(1, METER)
        say("A note.")
    assert cell.outputs == []


def test_a_note_is_an_output(cell: Cell, capfd: pytest.CaptureFixture[str]) -> None:
    say("A note <b> [with brackets].")
    assert cell.texts == ["A note <b> [with brackets]."]
    assert "&lt;b&gt;" in cell.outputs[0]["text/html"]
    assert capfd.readouterr() == ("", "")


def test_the_progress_of_a_run_is_one_output(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "UPDATE_SECONDS", 0.0)
    row = EpochRow(1, 10, 1e-3, 1.25, 61.5, 0.9, 70.125, 99.0, 1234.5, 12.4, 8.0)
    with Reporter(36) as reporter:
        for epoch in range(1, 37):
            reporter.step(epoch, METER)
        assert "epoch 36/36  loss 1.500  top-1 42.0 %" in cell.texts[0]
        assert "360 of 360 steps" in cell.texts[0]
        say(epoch_line(row, 36, is_best=True))
    assert len(cell.outputs) == 2
    assert "<progress" not in cell.outputs[0]["text/html"]
    assert cell.texts[1].startswith("epoch  1/36  loss 1.250")


def test_the_example_has_no_outputs() -> None:
    import nbformat

    example = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(example)
    for part in example.cells:
        assert part.get("outputs", []) == []
        assert part.get("execution_count") is None


@pytest.mark.nightly
@pytest.mark.figures
@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs, results are tables and images, and nothing is printed to stderr."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    example = nbformat.read(EXAMPLE, as_version=4)
    # sockets as files: another test may take a free TCP port before the kernel does. Their paths must be short.
    with tempfile.TemporaryDirectory() as sockets:
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", sockets)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        NotebookClient(example, timeout=600, resources={"metadata": {"path": str(tmp_path)}}, config=config).execute()
    outputs = {part.id: part.outputs for part in example.cells if part.cell_type == "code"}
    for name, shown in outputs.items():
        assert not [output for output in shown if output.output_type in ("stream", "error")], (name, shown)
        progress = [output.data["text/plain"] for output in shown if output.output_type == "display_data"]
        lines = [line for text in progress for line in text.splitlines()]
        assert sum("oading PyTorch" not in line for line in lines) <= MAX_LINES, (name, progress)  # said if it is slow
    html = {name: "".join(output.data.get("text/html", "") for output in shown) for name, shown in outputs.items()}
    assert all("<table" in html[name] for name in ("result", "evaluate", "export"))
    assert "epoch 4/4" in html["train"]
    assert "<progress" not in "".join(html.values())
    assert html["evaluate"].count("<table") == 3
    images = {name: len(re.findall('src="data:image/png;base64,', text)) for name, text in html.items()}
    assert {name: count for name, count in images.items() if count} == {"predict": 5, "explain": 3, "export-predict": 1}
