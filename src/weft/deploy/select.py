"""Select the exports of a model that can replace it: same weights, classes and preprocessing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.checkpoints.config import CONFIG, PREPROCESSING, WEIGHTS, read_config
from weft.checkpoints.resolve import find_model
from weft.deploy.choosing import FILE, expected_order, exports_in, read_choice, saturation_note
from weft.deploy.formats import RUNTIMES
from weft.errors import CheckpointError, UsageError, is_installed
from weft.files import sha256_of
from weft.text import printable


def candidates(
    run: str | Path, runtime: str = "auto", log: Callable[[str], None] = lambda text: None
) -> Sequence[str | Path]:
    """Return what a run can be served from: its exports, in the order that is expected of their speed, and its model.

    An export is taken if it is in the run, or in or next to the model directory, was made from the same weights, has
    the same architecture, classes and preprocessing, and belongs to the same user. int8 exports whose sums saturate on
    this processor are taken only if nothing else is left.

    Args:
        run: a run directory, a model directory, an export, or the name of a public model, which has no exports.
        runtime: `auto` for all; or `openvino` or `onnx`, of which there must be an export; or `torch` for the model.
        log: called with a message for every export that is skipped.

    Raises:
        UsageError: an unknown runtime, or there is no export for it.
        CheckpointError: `run` has no model.
    """
    if runtime not in RUNTIMES:
        raise UsageError(f"runtime must be one of {', '.join(RUNTIMES)}; got {runtime!r}.")
    model = find_model(run)
    if isinstance(model, str):
        if runtime in ("auto", "torch"):
            return [run]
        raise UsageError(
            f"runtime {runtime} needs an export; {run} is a public model. Run: weft export {run} {run}-{runtime}"
            f" --format {runtime}. Then pass {run}-{runtime}."
        )
    config = read_config(model)
    if "artefact" in config:
        if runtime == "auto":
            return [model]
        kinds = _kinds_of(model, config)
        formats = sorted({format for format, _ in kinds})
        if runtime not in formats:
            raise UsageError(
                f"runtime must be that of the export, {' or '.join(formats)}; got {runtime}. Leave out --runtime."
            )
        if not (paths := [kinds[kind] for kind in expected_order() if kind in kinds and kind[0] == runtime]):
            return [model]  # a .pt2 file, which is refused when it is opened
        return _accurate(paths, log)
    if runtime == "torch":
        return [model]
    exports = _exports_of(model, config, log)
    chosen = [exports[kind] for kind in expected_order() if kind in exports and runtime in ("auto", kind[0])]
    if runtime != "auto" and not chosen:
        raise UsageError(
            f"runtime {runtime} needs an export in or next to {model}; there is none that fits. Run: weft export {run}"
            f" {Path(run) / runtime} --format {runtime}"
        )
    paths = [*chosen, model] if runtime == "auto" and (not chosen or is_installed("torch")) else chosen
    return _accurate(paths, log)


def _accurate(paths: Sequence[Path], log: Callable[[str], None]) -> Sequence[Path]:
    """Leave out int8 exports whose sums saturate on this processor, unless nothing else is left."""
    notes = {path: note for path in paths if (note := saturation_note(read_config(path))) is not None}
    if len(notes) == len(paths):
        return paths
    for path, note in notes.items():
        log(f"the export {printable(str(path))} is skipped: {note}")
    return [path for path in paths if path not in notes]


def _exports_of(model: Path, config: dict[str, Any], log: Callable[[str], None]) -> dict[tuple[str, str], Path]:
    """Find the exports of a model, by format and precision."""
    exports: dict[tuple[str, str], Path] = {}
    weights: str | None = None
    parent = model.parent if model.name not in ("", "..") else Path(os.path.abspath(model)).parent
    for folder in sorted({*model.glob("*/"), *parent.glob("*/"), *parent.glob("exports/*/")}):
        try:
            if folder.name.startswith(".") or not (folder / CONFIG).is_file():  # .NAME.PID.part is not verified yet
                continue
            other = read_config(folder)
            if "artefact" not in other or _identity(other) != _identity(config):
                continue  # not an export, or of another model
            if (folder / CONFIG).stat().st_uid != (model / CONFIG).stat().st_uid:
                log(f"the export {printable(str(folder))} is skipped: it belongs to another user than the model.")
                continue
        except OSError:  # not readable, as /root next to /model in a container
            continue
        except CheckpointError as error:
            log(f"the directory {printable(str(folder))} is skipped: {error}")
            continue
        weights = weights or _weights_hash(model, config)
        if other["artefact"].get("weights_sha256") != weights:
            log(
                f"the export {printable(str(folder))} is skipped: it does not record that it was made from these"
                " weights. Export the model again, or serve the export by its own path."
            )
            continue
        try:
            exports |= _kinds_of(folder, other)
        except CheckpointError as error:
            log(f"the export {printable(str(folder))} is skipped: {error}")
    return exports


def _kinds_of(folder: Path, config: dict[str, Any]) -> dict[tuple[str, str], Path]:
    """Return the exports of a directory by format and precision: one, or of format auto all."""
    if not (folder / FILE).exists():
        return {(config["artefact"]["format"], config["artefact"]["precision"]): folder}
    exports = exports_in(folder, read_choice(folder))
    split = [(name.partition("-"), path) for name, path in exports.items()]
    return {(format, precision): path for (format, _, precision), path in split}


def _weights_hash(model: Path, config: dict[str, Any]) -> str:
    """Return the hash that an export of this model records for its weights."""
    known = config.get("weights_sha256")
    try:
        sha256 = sha256_of(model / WEIGHTS)
    except FileNotFoundError:  # a run that was copied with its exports alone
        return str(known)
    if sha256 == known:
        return sha256
    from weft.checkpoints.model_dir import load_model_dir, weights_sha256  # imports torch

    return weights_sha256(load_model_dir(model)[0])


def _identity(config: dict[str, Any]) -> str:
    """Return the settings that an export must share with its model, as text."""
    cfg = {key: config["pretrained_cfg"].get(key) for key in PREPROCESSING}
    parts = [config["architecture"], config["model_args"], config["num_classes"], config["label_names"], cfg]
    return json.dumps(parts, sort_keys=True)
