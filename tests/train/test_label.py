"""Images to label next, and proposed labels."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train.test_extend import COLOURS, PROBE, part
from weft.cli import main
from weft.errors import CheckpointError, DataError, UsageError
from weft.inference import predict
from weft.runs.directory import FEATURES, FINGERPRINT
from weft.train import RunResult, active, label, train
from weft.train.active import UNCERTAIN_SHARE, choose


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path_factory.mktemp("cache")))


def paint(folder: Path, seed: int, per_class: int) -> Path:
    """Noisy images of two colours."""
    random = np.random.default_rng(seed)
    for name in ("bee", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = np.clip(np.array(COLOURS[name]) + random.normal(0, 60, (32, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("label")
    data = paint(folder / "data", 0, 12)
    return train(data, model="levit_nano_32", settings=PROBE, out=folder / "run", device="cpu", quiet=True)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("more") / "more", 1, 10)


def uncertain(number: int) -> np.ndarray:
    return np.full((number, 2), 0.5)


def test_uncertain_images_are_chosen_before_certain_ones() -> None:
    rng = np.random.default_rng(0)
    margin = rng.permutation(20) / 20
    probabilities = np.stack([(1 + margin) / 2, (1 - margin) / 2], axis=1)
    chosen = choose(rng.normal(size=(20, 4)), probabilities, np.empty((0, 4)), 5)
    assert chosen[0] == margin.argmin()  # without labelled images the least certain one is first
    assert set(chosen) <= set(np.argsort(margin)[: int(20 * UNCERTAIN_SHARE)].tolist())


def test_chosen_images_differ_from_each_other_and_from_labelled_ones() -> None:
    """Of groups of equal images, one is labelled: one image of each other group is chosen first."""
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 4))
    chosen = choose(np.eye(5)[groups], uncertain(20), np.eye(5)[[2]], 10)
    others = set(groups[:10].tolist()) - {2}  # at equal margins the candidates are the first half
    assert len(others) >= 3
    assert set(groups[chosen[: len(others)]].tolist()) == others


def test_similarities_in_blocks_choose_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    points, known = rng.normal(size=(40, 6)), rng.normal(size=(25, 6))
    whole = choose(points, uncertain(40), known, 10)
    monkeypatch.setattr(active, "MAX_SIMILARITIES", 3 * 25)
    assert choose(points, uncertain(40), known, 10) == whole


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_no_image_is_chosen_twice_and_never_more_than_there_are(budget: int) -> None:
    chosen = choose(np.ones((4, 3)), uncertain(4), np.ones((2, 3)), budget)
    assert sorted(chosen) == sorted(set(chosen))
    assert len(chosen) == min(budget, 4)


def test_labels_are_those_of_predict_and_the_files_stay(run: RunResult, unlabelled: Path, tmp_path: Path) -> None:
    def state() -> dict[str, str]:
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in unlabelled.rglob("*.png")}

    before = state()
    result = label(run.out, unlabelled, budget=6, certain=0.6, out=tmp_path / "out", quiet=True)
    assert state() == before
    rows = [*result.next, *result.proposed, *result.rest]
    assert sorted(row.image for row in rows) == sorted(before)
    expected = {p.image: p.top[0] for p in predict(run.out, unlabelled, top_k=1, quiet=True)}
    for row in rows:
        name, probability = expected[row.image]
        assert row.probability == pytest.approx(probability, abs=1e-4)  # calibrated
        assert row.label == name or row.probability == pytest.approx(0.5, abs=1e-3)
    assert len(result.next) == 6
    assert all(row.probability >= 0.6 for row in result.proposed)
    assert all(row.probability < 0.6 for row in result.rest)
    assert "held-out images" in result.check


def test_tables_are_data_for_training(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    arguments = ["label", str(run.out), str(unlabelled), "--budget", "4", "--certain", "0.5", "--out", str(out)]
    assert main([*arguments, "--quiet"]) == 0
    assert "proposed labels: 16 images" in capsys.readouterr().out
    header, *rows = csv.reader((out / "proposed.csv").read_text().splitlines())
    assert header == ["path", "label", "probability", "action", "split"]
    assert {tuple(row[3:]) for row in rows} == {("accept", "train")}
    extended = train(out / "proposed.csv", extend=run.out, out=tmp_path / "extended", quiet=True)
    assert extended.extension is not None
    assert extended.extension.classes == []
    assert extended.extension.new_count == 0  # no accuracy on labels that the model itself proposed
    # in next.csv the labels are empty: training refuses it until a person has written them
    with pytest.raises(DataError, match=r"must name an image and its class; row 2 .* Fill it in, or delete"):
        train(out / "next.csv", extend=run.out, out=tmp_path / "refused", quiet=True)
    header, *rows = csv.reader((out / "next.csv").read_text().splitlines())
    assert [row[1] for row in rows] == [""] * 4
    assert {row[3] for row in rows} == {"label"}
    lines = [header, *([row[0], "wasp", *row[2:]] for row in rows)]
    (out / "next.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    extended = train(out / "next.csv", extend=run.out, out=tmp_path / "wasps", quiet=True)
    assert extended.extension is not None
    assert extended.extension.classes == ["wasp"]
    assert main([*arguments, "--quiet"]) == 2
    assert main([*arguments, "--quiet", "--force"]) == 0


def test_images_of_the_run_are_left_out(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    both = part(unlabelled, tmp_path / "both", "bee")
    source = Path(run.data)
    shutil.copytree(source / "dog", both / "known")
    assert main(["label", str(run.out), str(both), "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["labelled"] == 12
    assert sum(len(result[name]) for name in ("next", "proposed", "rest")) == 10
    for model in (run.out, run.out / "best"):
        with pytest.raises(DataError, match="all 24 are among the images of the run"):
            label(model, source, quiet=True)
        assert "held-out images" in label(model, unlabelled, budget=1, quiet=True).check


def test_it_works_without_stored_features(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.out, copy)
    (copy / FEATURES).unlink()
    shutil.copy(next(Path(run.data).rglob("*.png")), unlabelled / "known.png")
    result = label(copy, unlabelled, budget=3)
    assert (len(result.next), result.check, result.labelled) == (3, "", 1)
    assert "already labelled is unknown" not in capsys.readouterr().err
    (copy / FINGERPRINT).unlink()
    assert label(copy, unlabelled, budget=3).labelled == 0
    assert "Which images are already labelled is unknown" in capsys.readouterr().err
    (unlabelled / "known.png").unlink()


def test_the_precision_is_that_of_the_run_unless_it_is_emulated_here(
    run: RunResult, unlabelled: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = dict(model="levit_nano_32", settings=PROBE, precision="bf16", device="cpu", quiet=True)
    mixed = train(run.data, out=tmp_path / "run", **more).out
    monkeypatch.setattr(active, "bf16_note", lambda *_: None)
    assert "held-out images" in label(mixed, unlabelled, budget=1).check
    assert "not used" not in capsys.readouterr().err
    monkeypatch.setattr(active, "bf16_note", lambda *_: "This processor emulates bf16.")
    for precision in (None, "fp32"):
        assert label(mixed, unlabelled, budget=1, precision=precision).check == ""
        assert "The features of the run are not used: " in capsys.readouterr().err
    monkeypatch.setattr(active, "bf16_note", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(active.Runtime, "of", lambda device: SimpleNamespace(device=torch.device("mps")))
        assert active._precision_of(mixed, "auto") == "fp32"
    (mixed / FEATURES).unlink()
    assert active._precision_of(mixed, "cpu") == "fp32"  # as `weft predict`


def test_bad_input(run: RunResult, unlabelled: Path, tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    assert main(["label", str(run.out), str(bad), str(unlabelled), "--quiet"]) == 3
    assert "bad.png" in capsys.readouterr().err
    with pytest.raises(DataError, match="At least one image must be readable"):
        label(run.out, bad, quiet=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="a folder without images"):
        label(run.out, tmp_path / "empty", quiet=True)
    with pytest.raises(UsageError, match=r"budget must be at least 1; got 0"):
        label(run.out, unlabelled, budget=0, quiet=True)
    with pytest.raises(UsageError, match=r"--out must name a directory; .*label.csv' is the name of a file"):
        label(run.out, unlabelled, out=tmp_path / "label.csv", quiet=True)
    with pytest.raises(UsageError, match=r"certain must be above 0 and at most 1; got 1\.5"):
        label(run.out, unlabelled, certain=1.5, quiet=True)
    config = json.loads((run.out / "best" / "config.json").read_text())
    shutil.copytree(run.out / "best", tmp_path / "nameless")
    del config["label_names"]
    (tmp_path / "nameless" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="Labels are class names"):
        label(tmp_path / "nameless", unlabelled, quiet=True)
