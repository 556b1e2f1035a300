"""What an earlier version left behind still loads, goes on and answers; what networks are made of has not changed.

Optimiser state is kept by the number of a parameter: with another order a run would go on without an error, with the
moments of other tensors. So the order, the initial values and the weights at the end of a resumed run are held.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.compat.record import DATA, SMALL, service_answers, variant_facts, verb_answers
from tests.helpers import outputs_of
from weft.checkpoints import load_model_dir
from weft.data import eval_transform
from weft.data.formats import MAX_PIXELS
from weft.deploy.choosing import exports_of
from weft.inference import open_model
from weft.models.families import VARIANTS
from weft.study import run_study
from weft.study.jobs import Job, read_result
from weft.train import predict, train

NETWORKS = json.loads((DATA / "networks.json").read_text())
ANSWERS = json.loads((DATA / "answers.json").read_text())


@pytest.mark.slow_except(*SMALL)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_its_parameters_in_their_order_with_their_values(name: str) -> None:
    now, then = variant_facts(name), NETWORKS[name]
    for key in ("parameters", "state", "groups"):
        assert now[key] == then[key], key
    np.testing.assert_allclose(now["sums"], then["sums"], rtol=1e-3)


def test_every_network_of_an_earlier_version_is_still_there() -> None:
    assert set(NETWORKS) <= set(VARIANTS)


@pytest.mark.parametrize("name", SMALL)
def test_a_stopped_run_ends_with_the_weights_that_it_would_have_had(name: str, tmp_path: Path) -> None:
    """AVX2 in place of AVX-512 changes a weight by up to 8e-6; the moments of two tensors swapped, by 4e-5 and more."""
    shutil.copytree(DATA / name / "stopped", tmp_path / "run")
    train(DATA / "images", resume=tmp_path / "run", quiet=True)
    now, then = (
        load_file(file)
        for file in (tmp_path / "run" / "last" / "model.safetensors", DATA / name / "resumed.safetensors")
    )
    assert list(now) == list(then)
    for key, value in then.items():
        torch.testing.assert_close(now[key], value, rtol=0, atol=1.5e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", SMALL)
def test_a_finished_run_and_its_exports_answer_alike(name: str, tmp_path: Path) -> None:
    image = DATA / "images" / "class1" / "000.png"
    run = DATA / name / "finished"
    (answer,) = predict(run, image)
    model, names = load_model_dir(run / "best")
    with Image.open(image) as opened:
        tensor = eval_transform(model.pretrained_cfg)(opened.convert("RGB"))[None]
    with torch.inference_mode():
        logits = model(tensor)
    logits = logits if isinstance(logits, torch.Tensor) else sum(logits) / 2
    for folder, tolerance in (("onnx-fp32", 1e-4), ("openvino-int8", 0.5)):
        pytest.importorskip("onnxruntime" if folder.startswith("onnx") else "openvino")
        exported = open_model(DATA / name / folder)
        assert exported.info.label_names == names
        largest = float(logits.abs().max())
        torch.testing.assert_close(outputs_of(exported, tensor), logits, rtol=0, atol=tolerance * largest)
    assert answer.top[0][0] == names[int(logits.argmax())]
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(DATA / name / "onnx-fp32", tmp_path / "run" / "onnx")
    assert exports_of(tmp_path / "run" / "best")[0].path == tmp_path / "run" / "onnx"


@pytest.mark.parametrize("folder", sorted(DATA.glob("*/runs/*")), ids=lambda folder: folder.name)
def test_a_job_that_is_done_is_not_done_again(folder: Path) -> None:
    fields: dict[str, Any] = json.loads((folder / "job.json").read_text())
    arguments = {key: fields[key] for key in ("recipe", "data", "settings", "until")}
    job = Job(folder, **arguments, test_sizes=tuple(fields["test_sizes"]))
    result = read_result(job)
    assert result is not None
    assert 0 <= result.top1() <= 100


def test_a_study_that_is_done_is_reported_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.study.jobs.subprocess.Popen", None)
    shutil.copytree(DATA / "study", tmp_path / "study")
    shutil.copy(DATA / "study.yaml", tmp_path / "study.yaml")
    then = json.loads((DATA / "study" / "results.json").read_text())
    result = run_study(tmp_path / "study.yaml", out=tmp_path / "study", quiet=True)
    assert [row.top1[0] for row in result.rows] == [row["top1"][0] for row in then["rows"]]


def without_values(answer: Any) -> Any:
    """Its keys and the kinds of its values."""
    if isinstance(answer, dict):
        return {key: without_values(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [without_values(answer[0])] if answer else []
    return "number" if isinstance(answer, (int, float, type(None))) else type(answer).__name__  # null: undefined


def assert_has_all(now: Any, then: Any, where: str = "") -> None:
    """Check that nothing was removed or changed. Answers may have new fields; what a client must send may not grow."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key, value in then.items():
            assert key in now, f"{where}/{key}"
            assert_has_all(now[key], value, f"{where}/{key}")
    elif isinstance(then, list) and any(isinstance(value, dict) for value in then):
        assert len(now) == len(then), where
        for number, value in enumerate(then):
            assert_has_all(now[number], value, f"{where}/{number}")
    else:
        assert now == then, where


def test_a_removed_and_a_changed_field_are_noticed() -> None:
    then = {"a": {"b": 1}, "required": ["a"]}
    assert_has_all({"a": {"b": 1, "c": 2}, "required": ["a"]}, then)
    for now in ({"a": {}, "required": ["a"]}, {"a": {"b": 2}, "required": ["a"]}, {**then, "required": ["a", "c"]}):
        with pytest.raises(AssertionError):
            assert_has_all(now, then)


@pytest.mark.slow
def test_verbs_print_the_same_json() -> None:
    now = verb_answers(DATA / "images", DATA / "levit_nano_32" / "finished")
    assert now["models"] == ANSWERS["models"]
    assert {row["name"] for row in now["recipes"]} >= {row["name"] for row in ANSWERS["recipes"]}
    assert_has_all(without_values(now["evaluate"]), without_values(ANSWERS["evaluate"]))
    assert now["evaluate"]["top1"] == pytest.approx(ANSWERS["evaluate"]["top1"])


def without_texts(schema: Any) -> Any:
    """Return an OpenAPI document without its descriptions, which may be worded differently in each version."""
    if isinstance(schema, dict):
        return {key: without_texts(value) for key, value in schema.items() if key != "description"}
    return [without_texts(value) for value in schema] if isinstance(schema, list) else schema


@pytest.mark.slow
def test_the_service_describes_itself_alike() -> None:
    now = service_answers(DATA / "levit_nano_32" / "finished")
    then = ANSWERS["/model"]
    assert then["limits"].pop("max_pixels") == 25_000_000  # since then, the limit of all other verbs
    assert now["/model"]["limits"].pop("max_pixels") == MAX_PIXELS
    assert now["/model"].pop("name") == "finished"  # new since then
    assert_has_all(now["/model"], then)
    assert_has_all(without_texts(now["/openapi.json"]), without_texts(ANSWERS["/openapi.json"]))
