"""config.json: every value that its schema lets through makes the objects that weft builds from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter

from tests.helpers import FULL, lively
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.config import ModelConfig, read_config
from weft.checkpoints.unknown import FILE, Threshold, UnknownDetector, unit_length
from weft.data import eval_transform
from weft.errors import CheckpointError, UsageError, WeftError

SCHEMA = TypeAdapter(ModelConfig).json_schema()
ANY = st.none() | st.booleans() | st.integers(-2, 300) | st.floats(0, 1) | st.text(max_size=3) | st.lists(st.integers())
MAX_SIDE = 64  # of images here: the schema accepts sides that take minutes


def values(schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Values of a JSON schema, as pydantic writes it."""
    if "$ref" in schema:
        return values(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], name)
    if "anyOf" in schema:
        return st.one_of([values(choice, name) for choice in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "integer":
        most = schema.get("maximum", 2**70)
        return st.integers(schema.get("minimum", -(2**70)), min(most, MAX_SIDE) if most == 65536 else most)
    if kind == "number":
        return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan="minimum" not in schema)
    if kind == "string":
        return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else st.text(max_size=5)
    if kind == "array" and "prefixItems" in schema:
        return st.tuples(*(values(item, name) for item in schema["prefixItems"])).map(list)
    if kind == "array":
        return st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=4)
    if kind == "object" and "properties" in schema:
        fields = {key: values(field, key) for key, field in schema["properties"].items()}
        required = {key: fields.pop(key) for key in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields)
    if kind == "object":
        return st.dictionaries(st.text(max_size=3), values(schema["additionalProperties"]) if name == "sha256" else ANY)
    return {"null": st.none(), "boolean": st.booleans()}.get(str(kind), ANY)


def assert_says(error: Exception, words: str) -> None:
    assert words in str(error)
    assert "\n" not in str(error)


def record(name: str, **changes: Any) -> dict[str, Any]:
    """A valid entry of config.json."""
    entries: dict[str, dict[str, Any]] = {
        "confidence": dict(temperature=1.5, count=9, ece_before=4.0, ece_after=2.0, curve=[[0.9, 5, 1]]),
        "unknown": dict(value=0.5, count=9, unknown=1, other_count=0, other_unknown=0, auroc=None, sha256="0" * 64),
    }
    return {name: {**entries[name], **changes}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a detector of unknown images."""
    path = save_model_dir(lively("levit_nano_32", num_classes=3), tmp_path_factory.mktemp("config") / "m")
    features = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    detector = UnknownDetector(features.mean(0), unit_length(features), None, Threshold(0.5, 9, 1))
    (path / FILE).write_bytes(detector.serialized())
    (path / "base.json").write_text((path / "config.json").read_text())
    return path


def changed(folder: Path, change: dict[str, Any]) -> dict[str, Any]:
    """Write the config with changed entries, and read it."""
    base = json.loads((folder / "base.json").read_text())
    (folder / "config.json").write_text(json.dumps({**base, **change}))
    return read_config(folder)


ONE_FILE = settings(max_examples=2000 if FULL else 60, deadline=None)
A_MODEL = settings(max_examples=500 if FULL else 15, deadline=None)


@ONE_FILE
@given(change=st.fixed_dictionaries({"confidence": values({"$ref": "Confidence"})}), error=st.floats(0, 1))
@example(change=record("confidence", curve=[[0.5, 3, -1]]), error=0.5)
@example(change=record("confidence", curve=[[0.5, 0, 0]]), error=0.5)
@example(change=record("confidence", curve=[[0.5, 0, 1]]), error=0.0)
@example(change=record("confidence", curve=[[0.5, 2, 3]]), error=1.0)
def test_a_confidence_that_the_schema_accepts_rejects_images(
    folder: Path, change: dict[str, Any], error: float
) -> None:
    try:
        confidence = changed(folder, change)["confidence"]
    except CheckpointError as refused:
        assert_says(refused, "config.json must have the format that weft writes; confidence")
        return
    try:
        rejection = confidence.rejection(error)
    except UsageError as refused:
        assert_says(refused, "--reject-at-error must be")
        return
    assert 0 <= rejection.error.low <= rejection.error.value <= rejection.error.high <= 100
    assert f"below {rejection.threshold:.3f} are rejected" in str(rejection)


@ONE_FILE
@given(change=st.fixed_dictionaries({"unknown": values({"$ref": "Threshold"})}))
@example(change=record("unknown", value=float("nan")))
@example(change=record("unknown", unknown=-1))
def test_a_threshold_that_the_schema_accepts_is_finite(folder: Path, change: dict[str, Any]) -> None:
    try:
        threshold = changed(folder, change)["unknown"]
    except CheckpointError as refused:
        assert_says(refused, "config.json must have the format that weft writes; unknown")
        return
    assert np.isfinite(threshold.value)
    assert min(threshold.count, threshold.unknown, threshold.other_count, threshold.other_unknown) >= 0


@ONE_FILE
@given(change=values({"$ref": "PretrainedCfg"}))
def test_preprocessing_that_the_schema_accepts_makes_an_image(folder: Path, change: dict[str, Any]) -> None:
    change.pop("label_names", None)
    cfg = changed(folder, {"pretrained_cfg": change})["pretrained_cfg"]
    try:
        tensor: Any = eval_transform(cfg)(Image.new("RGB", (9, 7)))
    except UsageError as refused:
        is_of_channels = str(refused).startswith("in_chans")
        assert_says(refused, "must be 3 (RGB) or 1 (gray)" if is_of_channels else "must have one value per channel")
        return
    assert tensor.isfinite().all()


@A_MODEL
@given(change=values(SCHEMA))
def test_a_config_that_the_schema_accepts_is_loaded_or_refused_in_a_sentence(
    folder: Path, change: dict[str, Any]
) -> None:
    change.pop("architecture")
    try:
        changed(folder, change)
        load_model_dir(folder)
    except WeftError as refused:
        assert_says(refused, ".")
