"""Model directories: weights with everything that inference needs; also readable by timm's `local-dir:`.

model.safetensors   the state dict
config.json         architecture, constructor arguments, classes, preprocessing, the sha256 of the weights
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from safetensors.torch import save
from torch import nn
from typing_extensions import TypedDict

from weft.checkpoints.confidence import Confidence, confidence_of, parse_confidence
from weft.checkpoints.files import read_state_dict
from weft.checkpoints.finding import CONFIG, PREFIX, WEIGHTS, local_model_dir, without_model
from weft.checkpoints.hub import fetch_files
from weft.checkpoints.load import load_checkpoint
from weft.checkpoints.unknown import FILE as DETECTOR
from weft.checkpoints.unknown import UnknownDetector, detector_of, read_detector
from weft.errors import CheckpointError, UsageError, nearest
from weft.files import new_directory, sha256_of, write_text, write_whole
from weft.lazy import LazyModule
from weft.models.building import build_described, create_model, without_random_init
from weft.models.families import VARIANTS, plugin_of
from weft.reading import read_json
from weft.text import has_control_characters

timm: Any = LazyModule("timm")

PREPROCESSING = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


Size = Annotated[int, Field(ge=1, le=65536)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1e6)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@with_config(extra="allow")
class Preprocessing(TypedDict, total=False):
    """Preprocessing of images, under timm's keys."""

    input_size: tuple[Annotated[int, Field(ge=1, le=64)], Size, Size]
    mean: Annotated[list[Finite], Field(min_length=1, max_length=64)]
    std: Annotated[list[Positive], Field(min_length=1, max_length=64)]
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos", "random"]
    crop_pct: Annotated[float, Field(gt=0, le=10)]
    crop_mode: Literal["center", "squash", "border"]
    label_names: list[str]


@with_config(extra="allow")
class Export(TypedDict):
    """Description of an export; see `weft.deploy.exporting`."""

    version: int
    format: str
    precision: str
    input: tuple[Annotated[int, Field(ge=1, le=64)], Size, Size]
    sha256: dict[str, Sha256]
    weights_sha256: NotRequired[Sha256]
    weight_bits: NotRequired[Annotated[int, Field(ge=1, le=8)]]


class ConfidenceRecord(TypedDict):
    """Calibration of a model, as `weft.checkpoints.confidence.Confidence`."""

    temperature: Annotated[float, Field(gt=0, le=1000)]
    count: Annotated[int, Field(ge=0)]
    ece_before: Annotated[float, Field(ge=0, le=100)]
    ece_after: Annotated[float, Field(ge=0, le=100)]
    curve: list[tuple[Annotated[float, Field(ge=0, le=1)], int, int]]


class UnknownRecord(TypedDict):
    """Threshold of the detector of unknown images, as `weft.checkpoints.unknown.Threshold`, and its file."""

    value: float
    count: Annotated[int, Field(ge=0)]
    unknown: Annotated[int, Field(ge=0)]
    other_count: Annotated[int, Field(ge=0)]
    other_unknown: Annotated[int, Field(ge=0)]
    auroc: Annotated[float, Field(ge=0, le=1)] | None
    sha256: Sha256


@with_config(extra="allow")
class ModelConfig(TypedDict):
    """Contents of config.json: the keys of timm and additional ones of weft."""

    architecture: str
    plugin: NotRequired[str]
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    pretrained_cfg: NotRequired[Preprocessing]
    model_args: NotRequired[dict[str, Any]]
    label_names: NotRequired[list[str] | None]
    weights_sha256: NotRequired[Sha256]
    artefact: NotRequired[Export]
    confidence: NotRequired[ConfidenceRecord | None]
    unknown: NotRequired[UnknownRecord | None]


def save_model_dir(
    model: nn.Module, path: str | Path, *, label_names: Sequence[str] | None = None, force: bool = False
) -> Path:
    """Write a model directory atomically.

    Args:
        model: a model that `weft.create_model` built.
        path: the directory.
        label_names: one name per class, in the order of the logits.
        force: replace an existing model directory.

    Returns:
        The path of the directory.

    Raises:
        UsageError: `path` exists, the names do not match the classes, or the model cannot be rebuilt from its name.
        StorageError: the directory cannot be written.
    """
    if getattr(model, "is_folded", False):
        raise UsageError(
            "A model directory must have the original network; this network is folded, for inference only. Save the"
            " original."
        )
    path = Path(path)
    with new_directory(path, (WEIGHTS, CONFIG, DETECTOR), force=force) as folder:
        weights = _serialized(model)
        (folder / WEIGHTS).write_bytes(weights)
        config = describe(model, folder, label_names, {"weights_sha256": hashlib.sha256(weights).hexdigest()})
        _check_rebuilds(model, config)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    return path


def weights_sha256(model: nn.Module) -> str:
    """Return the sha256 of the weights of a model, as in the config.json of its model directory."""
    return hashlib.sha256(_serialized(model)).hexdigest()


def _serialized(model: nn.Module) -> bytes:
    return save({name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()})


def _check_rebuilds(model: nn.Module, config: dict[str, Any]) -> None:
    """Check that the model can be rebuilt from its name: it was not changed (pruned, folded ...) after it was built."""
    name = config["architecture"].removeprefix("weft_")
    rebuilt = create_model(name, device="meta", **arguments_of(config))
    expected, actual = ({n: t.shape for n, t in m.state_dict().items()} for m in (rebuilt, model))
    if expected != actual:
        changed = sorted(set(expected.items()) ^ set(actual.items()))[0][0]
        raise UsageError(
            f"A model directory must describe how to rebuild its model; this {name} was changed after it was built"
            f" ({changed}). Build the changed model with arguments of create_model, and load the weights into it."
        )


def model_dir(run: str | Path) -> Path:
    """Return the model directory of a run (its best model), of a model directory (itself) or of a hub repository.

    Args:
        run: a run directory, a model directory, or `hf-hub:OWNER/NAME`, which is downloaded.

    Raises:
        CheckpointError: there is no model directory, or it cannot be downloaded.
    """
    if str(run).startswith(PREFIX):
        folder = fetch_files(str(run), (WEIGHTS, CONFIG))
        if (folder / CONFIG).is_file() and read_config(folder).get("unknown"):
            fetch_files(f"{str(run).partition('@')[0]}@{folder.name}", (DETECTOR,))  # of the same commit
        return folder
    directory = local_model_dir(run)
    if directory is None:
        raise CheckpointError(without_model(Path(run)))
    return directory


def load_model_dir(path: str | Path) -> tuple[Any, list[str] | None]:
    """Load the model of a model directory.

    Returns:
        The model in evaluation mode, and its class names or None if it has none.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is unknown.
    """
    path = Path(path)
    config = read_config(path)
    if "artefact" in config:
        raise CheckpointError(
            f"{path} must be a model directory with weights; it is an export, for inference only. Pass the run or model"
            " directory that it was made from. Exports are for weft predict, evaluate, serve and bench."
        )
    name = config["architecture"].removeprefix("weft_")
    if name not in VARIANTS and not timm.is_model(name):
        if plugin := config.get("plugin"):
            raise CheckpointError(
                f"{path} needs the plugin {plugin}, which has the model {name}; it is not loaded. Pass --plugin FILE"
                " (Python: weft.load_plugin) if you trust the file, which weft runs."
            )
        closest = ", ".join(nearest(name, VARIANTS))
        raise CheckpointError(
            f"{path / CONFIG} must name a model that exists; got {name!r}. Nearest: {closest}. If it is a module of"
            " your own, register it first, in Python: weft.register_module(MODULE)."
        )
    weights = path / WEIGHTS
    expected = config.get("weights_sha256")
    if expected is not None and weights.is_file():
        actual = sha256_of(weights)
        if actual != expected:
            raise CheckpointError(
                f"{weights} must have the sha256 that {CONFIG} states, {expected[:12]}...; got {actual[:12]}..."
                " The file is damaged or not the one that was saved."
            )
    state = read_state_dict(weights)
    cfg = config["pretrained_cfg"]
    try:
        with without_random_init():
            model: Any = build_described(name, config["model_args"], **more_arguments(config))
    except UsageError as err:
        raise CheckpointError(f"{path / CONFIG} does not describe a model: {err}") from err
    load_checkpoint(model, state, switches="ignore")
    model.pretrained_cfg = model.default_cfg = {
        **dict(model.pretrained_cfg),
        **{key: cfg[key] for key in PREPROCESSING if key in cfg},
        "num_classes": config["num_classes"],
    }
    model.confidence = parse_confidence(config.get("confidence"))
    model.unknown = read_detector(path, config.get("unknown"))
    return model.eval(), config.get("label_names")


def write_confidence(path: Path, confidence: Confidence, detector: UnknownDetector | None) -> None:
    """Write the calibration and the detector of unknown images of a model into its model directory."""
    config = {**json.loads((path / CONFIG).read_text(encoding="utf-8")), "confidence": confidence.as_dict()}
    if detector is not None:
        write_whole(path / DETECTOR, detector.serialized())
        config["unknown"] = detector.record()
    write_text(path / CONFIG, json.dumps(config, indent=2) + "\n")


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `create_model` to rebuild the model of a config."""
    return {**config["model_args"], **more_arguments(config)}


def more_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments to rebuild a model that are not in `model_args`: classes and input channels."""
    arguments = {"num_classes": config["num_classes"]}
    if "input_size" in config["pretrained_cfg"]:
        arguments["in_chans"] = config["pretrained_cfg"]["input_size"][0]
    return arguments


def describe(model: Any, folder: Path, label_names: Sequence[str] | None, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json: timm's keys, with the constructor arguments that the model was built with.

    Args:
        model: the model.
        folder: the model directory; the file of the detector of unknown images is written into it, and timm may write a
            temporary config.json.
        label_names: one name per class, or None.
        extra: additional keys.

    Raises:
        UsageError: the names do not match the classes.
    """
    names = checked_names(label_names, getattr(model, "num_classes", None))
    plugin = plugin_of(model)
    confidence = confidence_of(model)
    extra = {"confidence": confidence.as_dict(), **extra} if confidence is not None else extra
    if (detector := detector_of(model)) is not None:
        (folder / DETECTOR).write_bytes(detector.serialized())
        extra = {"unknown": detector.record(), **extra}
    extra = ({"label_names": names} if names else {}) | ({"plugin": plugin} if plugin else {}) | extra
    file = folder / CONFIG
    read_from_model = ("num_classes", "in_chans", "global_pool")  # timm reads these from the model itself
    given = {k: v for k, v in getattr(model, "model_args", {}).items() if k not in read_from_model}
    timm.models._hub.save_config_for_hf(model, str(file), model_config=dict(extra), model_args=given)
    config = json.loads(file.read_text(encoding="utf-8"))
    not_switches = ("num_classes", "in_chans", "features_only", "cache_dir")
    config["model_args"] = {k: v for k, v in config.get("model_args", {}).items() if k not in not_switches}
    if len(getattr(model, "pretrained_cfg", {})):
        config["pretrained_cfg"] |= {k: model.pretrained_cfg[k] for k in PREPROCESSING if k in model.pretrained_cfg}
    return config


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json after validation, with all optional keys."""
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"A model directory must hold {CONFIG} and {WEIGHTS}; {path} has no {CONFIG}.")
    config: dict[str, Any] = {"pretrained_cfg": {}, "model_args": {}, **read_json(file, ModelConfig)}
    config["label_names"] = config.get("label_names") or config["pretrained_cfg"].get("label_names")
    try:
        checked_names(config["label_names"], config["num_classes"])
    except UsageError as err:
        raise CheckpointError(f"{file}: {err}") from err
    return config


def checked_names(names: Any, num_classes: int | None = None, what: str = "label_names") -> list[str] | None:
    """Return class names as a list after validation.

    Args:
        names: one string per class; None for none.
        num_classes: required number of names; None for any number.
        what: name of the list in messages.

    Raises:
        UsageError: a name is not a string, occurs twice or has control characters, or the number is wrong.
    """
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{what} must be a list of strings; got {names!r}.")
    names = list(names)
    if num_classes is not None and len(names) != num_classes:
        raise UsageError(f"{what} must have one name per class, {num_classes}; got {len(names)}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{what} must differ from each other; {twice!r} occurs twice.")
    for name in names:
        if has_control_characters(name):
            raise UsageError(f"{what} must have no control characters; got {name!r}.")
    return names
