"""config.json of model directories and exports: its types and their validation. No torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from weft.checkpoints.confidence import Confidence
from weft.checkpoints.unknown import Sha256, Threshold
from weft.errors import CheckpointError, UsageError
from weft.models.contract import VALUE_RANGE
from weft.models.imagenet import imagenet_classes
from weft.reading import read_json
from weft.text import has_control_characters

WEIGHTS, CONFIG = "model.safetensors", "config.json"
CHOICE = "chosen.json"  # in a directory of exports, of `weft export --format auto`
TIMM_ON_HUB = "models--timm--"  # start of the folder of a repository of timm in the cache of the hub
PREPROCESSING = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", VALUE_RANGE)


def _ascending(ends: tuple[int, int]) -> tuple[int, int]:
    if ends[0] >= ends[1]:
        raise ValueError("the first value, black, must be below the second, white")
    return ends


Size = Annotated[int, Field(ge=1, le=65536)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(allow_inf_nan=False, ge=1e-6, le=1e6)]
Value = Annotated[int, Field(ge=-(2**31), le=2**32 - 1)]


@with_config(extra="allow")
class PretrainedCfg(TypedDict, total=False):
    """Preprocessing of images, under timm's keys."""

    input_size: tuple[Annotated[int, Field(ge=1, le=64)], Size, Size]
    mean: Annotated[list[Finite], Field(min_length=1, max_length=64)]
    std: Annotated[list[Positive], Field(min_length=1, max_length=64)]
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos", "random"]
    crop_pct: Annotated[float, Field(ge=0.1, le=10)]
    crop_mode: Literal["center", "squash", "border"]
    label_names: list[str]


@with_config(extra="allow")
class ExportRecord(TypedDict):
    """Description of an export; see `weft.deploy.exporting`."""

    version: Literal[1]
    format: Literal["onnx", "openvino", "torch"]
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    input: tuple[Annotated[int, Field(ge=1, le=64)], Size, Size]
    sha256: dict[str, Sha256]
    weights_sha256: NotRequired[Sha256]
    weight_bits: NotRequired[Annotated[int, Field(ge=1, le=8)]]


@with_config(extra="allow")
class ModelConfig(TypedDict):
    """Contents of config.json: the keys of timm and additional ones of weft."""

    architecture: str
    plugin: NotRequired[str]
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    pretrained_cfg: NotRequired[PretrainedCfg]
    model_args: NotRequired[dict[str, Any]]
    label_names: NotRequired[list[str] | None]
    value_range: NotRequired[Annotated[tuple[Value, Value], AfterValidator(_ascending)]]
    weights_sha256: NotRequired[Sha256]
    artefact: NotRequired[ExportRecord]
    confidence: NotRequired[Confidence | None]
    unknown: NotRequired[Threshold | None]


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json after validation, with all optional keys.

    `value_range` is in `pretrained_cfg`, with the other preprocessing; in the file it is not, since timm refuses
    unknown keys there.

    A repository of timm on the hub names no classes: if its outputs are ImageNet's classes, it gets their names.
    """
    file = path / CONFIG
    if (path / CHOICE).is_file():
        raise CheckpointError(f"{path} must have one model; it has several exports of one. Pass the run, or an export.")
    if not file.is_file():
        raise CheckpointError(f"A model directory must hold {CONFIG} and {WEIGHTS}; {path} has no {CONFIG}.")
    config: dict[str, Any] = {"pretrained_cfg": {}, "model_args": {}, **read_json(file, ModelConfig)}
    config["pretrained_cfg"].pop(VALUE_RANGE, None)
    if VALUE_RANGE in config:
        config["pretrained_cfg"][VALUE_RANGE] = list(config.pop(VALUE_RANGE))
    config["label_names"] = config.get("label_names") or config["pretrained_cfg"].get("label_names")
    if config["label_names"] is None and path.resolve().parent.parent.name.startswith(TIMM_ON_HUB):
        classes = imagenet_classes(config["num_classes"])
        config["label_names"] = classes.names if classes else None
    try:
        checked_names(config["label_names"], config["num_classes"])
    except UsageError as err:
        raise CheckpointError(f"{file}: {err}") from err
    return config


def checked_names(names: Any, num_classes: int | None = None) -> list[str] | None:
    """Return class names, one per class, as a list after validation; None for none.

    Raises:
        UsageError: a name is not a string in UTF-8, occurs twice or has control characters, or the number is wrong.
    """
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"label_names must be a list of strings; got {names!r}.")
    names = list(names)
    if num_classes is not None and len(names) != num_classes:
        raise UsageError(f"label_names must have one name per class, {num_classes}; got {len(names)}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"label_names must differ from each other; {twice!r} occurs twice.")
    if bad := next(filter(has_control_characters, names), None):
        raise UsageError(f"label_names must have no control characters; got {bad!r}.")
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"label_names must be UTF-8 text; got {error.object[error.start]!r} in one of them.") from None
    return names
