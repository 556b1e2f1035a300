"""Model directories: weights with everything that inference needs; also readable by timm's `local-dir:`.

model.safetensors   the state dict
config.json         architecture, constructor arguments, classes, preprocessing, the sha256 of the weights
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from weft.checkpoints.confidence import Confidence, confidence_of
from weft.checkpoints.config import CONFIG, PREPROCESSING, WEIGHTS, checked_names, read_config
from weft.checkpoints.files import read_state_dict
from weft.checkpoints.load import load_checkpoint
from weft.checkpoints.unknown import FILE as DETECTOR
from weft.checkpoints.unknown import UnknownDetector, detector_of, read_detector
from weft.errors import CheckpointError, UsageError, nearest
from weft.files import new_directory, sha256_of, write_file
from weft.lazy import LazyModule
from weft.models.base import Backbone
from weft.models.building import NoRandomInit, build_described
from weft.models.contract import VALUE_RANGE
from weft.models.families import VARIANTS, plugin_of

CONTENTS = (WEIGHTS, CONFIG, DETECTOR)  # of a model directory
timm: Any = LazyModule("timm")


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
    with new_directory(path, CONTENTS, force=force) as folder:
        weights = _serialized(model)
        (folder / WEIGHTS).write_bytes(weights)
        config = write_config(model, folder, label_names, weights_sha256=hashlib.sha256(weights).hexdigest())
        _check_rebuilds(model, config)
    return path


def weights_sha256(model: nn.Module) -> str:
    """Return the sha256 of the weights of a model, as in the config.json of its model directory."""
    return hashlib.sha256(_serialized(model)).hexdigest()


def _serialized(model: nn.Module) -> bytes:
    return save({name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()})


def _check_rebuilds(model: nn.Module, config: dict[str, Any]) -> None:
    """Check that the model can be rebuilt from its name: it was not changed (pruned, folded ...) after it was built."""
    with torch.device("meta"):
        rebuilt = build_from(config)
    expected, actual = ({n: t.shape for n, t in m.state_dict().items()} for m in (rebuilt, model))
    if expected != actual:
        name, changed = config["architecture"], sorted(set(expected.items()) ^ set(actual.items()))[0][0]
        raise UsageError(
            f"A model directory must describe how to rebuild its model; this {name.removeprefix('weft_')} was changed"
            f" after it was built ({changed}). Build the changed model with arguments of create_model, and load the"
            " weights into it."
        )


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
            " your own, register a function that builds it first: timm.models.register_model(FUNCTION)."
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
    try:
        with NoRandomInit():
            model: Any = build_from(config)
    except UsageError as err:
        raise CheckpointError(f"{path / CONFIG} does not describe a model: {err}") from err
    load_checkpoint(model, state, switches="ignore")
    cfg = {key: value for key, value in config["pretrained_cfg"].items() if key in PREPROCESSING}
    cfg["num_classes"] = config["num_classes"]
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **cfg}
    model.confidence = config.get("confidence")
    model.unknown = read_detector(path, config.get("unknown"))
    return model.eval(), config.get("label_names")


def write_confidence(path: Path, confidence: Confidence, detector: UnknownDetector | None) -> None:
    """Write the calibration and the detector of unknown images of a model into its model directory.

    Killed at any moment, it leaves a model that loads: config.json names a detector only while its file is there.
    """
    config = {**json.loads((path / CONFIG).read_text(encoding="utf-8")), "confidence": asdict(confidence)}
    before, record = config.pop("unknown", None), None if detector is None else detector.record()
    if before is not None and (record is None or record["sha256"] != before["sha256"]):
        write_file(path / CONFIG, json.dumps(config, indent=2) + "\n")
    if detector is None:
        (path / DETECTOR).unlink(missing_ok=True)
    else:
        write_file(path / DETECTOR, detector.serialized())
        config["unknown"] = record
    write_file(path / CONFIG, json.dumps(config, indent=2) + "\n")


def build_from(config: dict[str, Any]) -> Any:
    """Build the network that a config.json describes, with random weights.

    Raises:
        UsageError: an unknown name, or invalid values.
    """
    size = config["pretrained_cfg"].get("input_size")
    channels = {"in_chans": size[0]} if size else {}
    name = config["architecture"].removeprefix("weft_")
    return build_described(name, config["model_args"], num_classes=config["num_classes"], **channels)


def write_config(model: Any, folder: Path, label_names: Sequence[str] | None = None, **extra: Any) -> dict[str, Any]:
    """Write config.json, under timm's keys and weft's, and the file of the detector of unknown images.

    Returns:
        The contents of config.json, with `extra` entries.

    Raises:
        UsageError: the names do not match the classes.
    """
    names = checked_names(label_names, getattr(model, "num_classes", None))
    config = _timm_config(model, names)
    if plugin := plugin_of(model):
        config["plugin"] = plugin
    if (detector := detector_of(model)) is not None:
        (folder / DETECTOR).write_bytes(detector.serialized())
        config["unknown"] = detector.record()
    if (confidence := confidence_of(model)) is not None:
        config["confidence"] = asdict(confidence)
    config |= extra
    if value_range := model.pretrained_cfg.get(VALUE_RANGE):
        config[VALUE_RANGE] = value_range  # not in `pretrained_cfg`, whose readers in timm refuse keys of others
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    return config


def _timm_config(model: Any, names: list[str] | None) -> dict[str, Any]:
    """Return the entries of config.json that timm reads."""
    of_model = ("num_classes", "in_chans", "global_pool")  # timm reads these from the model itself
    given = {key: value for key, value in getattr(model, "model_args", {}).items() if key not in of_model}
    arguments = timm.models.get_model_args(model, given)
    left_out = ("num_classes", "in_chans", "features_only", "cache_dir")
    cfg = timm.models.filter_pretrained_cfg(dict(model.pretrained_cfg), remove_source=True)
    current = timm.models.get_model_input_config(model)  # as built, or resized since then
    channels, *size = current["input_size"]
    if isinstance(model, Backbone) and current["fixed_input_size"]:
        arguments.setdefault("img_size", tuple(size))  # also where it is the default
    of_source = ("architecture", "state_dict", "label_offset", VALUE_RANGE)
    cfg = {key: value for key, value in cfg.items() if key not in of_source and not key.startswith("test_")}
    cfg |= {
        "custom_load": False,
        "num_classes": model.num_classes,
        "input_size": (channels, *(size if current["fixed_input_size"] else cfg["input_size"][1:])),
        "fixed_input_size": current["fixed_input_size"],
        "first_conv": current["first_conv"],
    }
    return {
        "architecture": model.pretrained_cfg["architecture"],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        **({"global_pool": arguments["global_pool"]} if arguments.get("global_pool") else {}),
        **({"label_names": names} if names else {}),
        "model_args": {key: value for key, value in arguments.items() if key not in left_out},
        "pretrained_cfg": cfg,
    }
