"""Open an export: check its files and load it into its runtime. No torch is imported.

weft loads only formats that contain no code: ONNX with ONNX Runtime, and OpenVINO's format with OpenVINO. A `.pt2` file
can contain any code, so weft writes and verifies such files but never loads one from a directory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoints.config import CHOICE, PREPROCESSING, read_config
from weft.checkpoints.unknown import read_detector
from weft.deploy.choosing import exports_in, fastest, machine, read_choice
from weft.deploy.formats import BATCH_SIZES, PACKAGES
from weft.deploy.model import ModelInfo
from weft.deploy.runtimes import FILES, OnnxModel, OpenVinoModel, run_file
from weft.errors import CheckpointError, WeftError
from weft.files import sha256_of
from weft.machine.processor import num_threads
from weft.models.families import family_named
from weft.text import printable, reason_of


def open_export(folder: Path, threads: int | None = None) -> OnnxModel | OpenVinoModel:
    """Load an export, or the fastest export of a directory of format auto; measure on a machine that has not.

    Args:
        folder: its directory.
        threads: number of threads; None for `weft.machine.processor.num_threads`.

    Raises:
        CheckpointError: a file is missing, damaged, or of another version of weft.
        UsageError: the runtime of the export is not installed.
    """
    if not (folder / CHOICE).exists():
        return open_one(folder, threads)
    choice, threads = read_choice(folder), threads or num_threads()
    return fastest(
        exports_in(folder),
        lambda candidate: open_one(candidate.path, threads),
        sorted({size for row in choice["seconds"].values() for size in row}) or BATCH_SIZES,
        settings=(threads,),
        known=choice["chosen"] if choice["machine"] == machine(threads) else None,
    )


def open_one(folder: Path, threads: int | None = None) -> OnnxModel | OpenVinoModel:
    """Load one export, as `open_export`, and run it once."""
    try:
        config = read_config(folder)
        if "artefact" not in config:
            raise CheckpointError(f"{folder} must have an export; it has a model. Export it: weft export {folder} OUT")
        _check_files(folder, config["artefact"])
        return _opened(folder, config, threads)
    except OSError as error:
        raise CheckpointError(
            f"The files in {printable(str(folder))} must be readable; they are not ({reason_of(error)})."
        ) from error


def _check_files(folder: Path, artefact: dict[str, Any]) -> None:
    if artefact["format"] not in PACKAGES:
        raise CheckpointError(
            f"{folder} contains a .pt2 file, which can contain any code, so weft does not load it. If you trust it,"
            " load it with torch.export.load, or export to onnx or openvino."
        )
    for name in FILES[artefact["format"]]:
        if not (folder / name).is_file() or sha256_of(folder / name) != artefact["sha256"].get(name):
            raise CheckpointError(
                f"{folder / name} must exist and have the sha256 that config.json states; it is missing or damaged."
                " Export the model again."
            )


def _opened(folder: Path, config: dict[str, Any], threads: int | None) -> OnnxModel | OpenVinoModel:
    format, precision, size = (config["artefact"][key] for key in ("format", "precision", "input"))
    family, file = family_named(config["architecture"].removeprefix("weft_")), folder / FILES[format][0]
    cfg = {key: config["pretrained_cfg"][key] for key in PREPROCESSING if key in config["pretrained_cfg"]}
    info = ModelInfo(
        runtime=format,
        precision=precision,
        architecture=config["architecture"] if family is None else family.reference.rpartition(":")[2],
        num_classes=config["num_classes"],
        label_names=config["label_names"],
        pretrained_cfg={**cfg, "input_size": tuple(size), "num_classes": config["num_classes"]},
        family=family,
        confidence=config.get("confidence"),
        detector=read_detector(folder, config.get("unknown")),
        config=config,
        path=folder,
    )
    try:
        model = run_file(file, format, precision, threads, features=info.detector is not None, info=info)
        shape = model.run(np.zeros((1, *size), np.float32)).logits.shape
    except WeftError:  # a package is not installed
        raise
    except Exception as error:  # each runtime has its own exception types
        reason = reason_of(error).replace(str(folder), "")
        raise CheckpointError(
            f"{file} must contain a graph that {format} can run; it cannot ({type(error).__name__}:"
            f" {reason}). Export the model again."
        ) from error
    if shape != (1, info.num_classes):
        raise CheckpointError(
            f"{file} must return {info.num_classes} logits per image, as config.json states; it returns {shape}."
            " Export the model again."
        )
    if not model.has_features:
        model.info = replace(info, detector=None)
    return model
