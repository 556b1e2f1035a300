"""Export a model to a directory that needs no weft network to predict, and verify its outputs.

    out/config.json   as a model directory's, and what the export is
    out/model.onnx    or model.xml and model.bin, or model.pt2 (see graphs)
    out/report.json   how far its answers are from the model's, on which images

Networks of weft are folded first. Nothing is published that failed its check.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from weft.checkpoints.model_dir import CONFIG, PREPROCESSING, describe, new_directory, read_config, weights_sha256
from weft.data import ImageDataset, Splits, eval_transform, make_loader
from weft.data.loading.loader import ImageLoader
from weft.deploy.folding import fold
from weft.deploy.graphs import FORMATS, OPSET, check_tools, write_graph
from weft.deploy.runtimes import FILES, Answer
from weft.durable import flush_folder, sha256_of, writing
from weft.errors import UsageError, VerificationError
from weft.models.base import Backbone
from weft.version import __version__

SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}
UNKNOWN = (".pt", ".pth", ".bin", ".engine", ".mlmodel", ".mlpackage", ".safetensors", ".tflite", ".torchscript")
REPORT = "report.json"
CONTENTS = (CONFIG, REPORT, *(name for names in FILES.values() for name in names))
BATCHES = (2, 1, 7)  # of the comparison; a graph that was specialised to one size fails on another
CALIBRATION = 300  # images, NNCF's own number
CLOSE = {
    "fp32": 1e-4,
    "fp16": 0.02,
    "bf16": 0.1,
}  # largest difference of logits over the largest logit; int8 is judged by its top-1
AGREEING = 99.9  # percent of images with equal top-1, in fp32
RANDOM_IMAGES = 60


@dataclass(frozen=True)
class ExportReport:
    """What came of an export.

    Attributes:
        out: the directory.
        format, precision: of the export.
        images: how many images were compared, and `compared_on` which.
        max_difference, mean_difference: of logits.
        max_logit: the largest of the model's, to judge them by.
        agreement: percent of images with the same top-1.
        top1, top1_model: percent right, where the images have classes.
        bytes: size of the files.
    """

    out: str
    format: str
    precision: str
    compared_on: str
    images: int
    max_difference: float
    mean_difference: float
    max_logit: float
    agreement: float
    top1: float | None
    top1_model: float | None
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def export(
    model: nn.Module,
    out: str | Path,
    *,
    format: str | None = None,
    precision: str = "fp32",
    data: Splits | None = None,
    label_names: Sequence[str] | None = None,
    max_drop: float = 0.5,
    force: bool = False,
) -> ExportReport:
    """Writes an export and checks it against the model.

    Args:
        model: in evaluation mode, as `weft.create_model` or `load_checkpoint` gave it; it stays as it is.
        out: the directory to write, for `weft predict`, `evaluate` and `bench`; or, for other programs, a file that
            ends in .onnx, .xml (with a .bin beside it) or .pt2, with the directory's config.json as a .json beside it.
        format: `onnx` (opset 20), `openvino`, `torch` (torch.export's .pt2) or `aotinductor` (the same, compiled for
            this processor; needs a C++ compiler); weft itself loads neither .pt2, which could hold any code. None: by
            the end of `out`; onnx for a directory.
        precision: `fp32`, `fp16` (weights; a CPU computes in float32), `bf16` or `int8`; FORMATS says which format has
            which. int8 is made by NNCF or ONNX Runtime, its ranges from the training images of `data`.
        data: images with classes; the held-out ones are compared and counted. None: random images are compared.
        label_names: one name per class.
        max_drop: how many points of top-1 on the held-out images the export may lose, 0 to 100.
        force: take the place of an export that is there.

    Raises:
        UsageError: words that do not fit, a model in training mode, something not installed, or `out` is taken.
        VerificationError: the export's answers are not the model's; nothing is published.
    """
    suffix = Path(out).suffix
    if suffix in UNKNOWN:
        raise UsageError(
            f"A file ends in {', '.join(SUFFIXES)}; {out} does not, and would be a folder. Name one of them."
        )
    format = format or SUFFIXES.get(suffix, "onnx")
    _check(model, format, precision, data, max_drop)
    if suffix in SUFFIXES and suffix != Path(FILES[format][0]).suffix:
        raise UsageError(
            f"{out} is a file of {SUFFIXES[suffix]}, and format says {format}. Leave format out, or name a folder."
        )
    if suffix in SUFFIXES:
        words = dict(precision=precision, data=data, label_names=label_names, max_drop=max_drop)
        return _export_file(model, Path(out), format, force, words)
    network: Any = model
    height_width = tuple(network.pretrained_cfg["input_size"])
    path = Path(out)
    with new_directory(path, CONTENTS, force=force) as beside:
        names = FILES[format]
        # what is not ours keeps its BatchNorm here; the runtimes merge it themselves
        lean = fold(model) if isinstance(model, Backbone) else copy.deepcopy(model)
        calibration = _calibration(data, model) if precision == "int8" else ()
        answer = write_graph(lean.cpu(), beside / names[0], format, precision, height_width, calibration)
        artefact = {
            "version": 1,
            "format": format,
            "precision": precision,
            "input": list(height_width),
            "batch": "any",
            "weights_sha256": weights_sha256(model),
            "sha256": {name: sha256_of(beside / name) for name in names},
            "weft": __version__,
            **({"opset": OPSET} if format == "onnx" else {}),
        }
        config = describe(model, beside, label_names, {"artefact": artefact})
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _check_config(beside, model, label_names, data)
        size = sum((beside / name).stat().st_size for name in names)
        report = _compare(model, answer, path, format, precision, data, height_width, size)
        _judge(report, max_drop)
        (beside / REPORT).write_text(json.dumps(report.as_dict() | {"max_drop": max_drop}, indent=2) + "\n")
    return report


def _export_file(model: nn.Module, path: Path, format: str, force: bool, words: dict[str, Any]) -> ExportReport:
    """An export without its directory."""
    places = [path.with_suffix(Path(name).suffix) for name in FILES[format]] + [path.with_suffix(".json")]
    taken = [place for place in places if place.exists()]
    if taken and not force:
        raise UsageError(f"An export must be new; {taken[0]} is there already. Pass --force or another path.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            inside = Path(folder) / "export"
            report = export(model, inside, format=format, **words)
            for name, place in zip([*FILES[format], CONFIG], places, strict=True):
                os.replace(inside / name, place)
        flush_folder(path.parent)
    return replace(report, out=str(path))


def _check(model: nn.Module, format: str, precision: str, data: Splits | None, max_drop: float) -> None:
    if format not in FORMATS:
        raise UsageError(f"format must be one of {', '.join(FORMATS)}; got {format!r}.")
    if precision not in FORMATS[format]:
        offered = "; ".join(f"{name}: {', '.join(words)}" for name, words in FORMATS.items())
        raise UsageError(f"{format} has no {precision}. There are {offered}.")
    if model.training:
        raise UsageError("An export answers as a model does in evaluation; this one is in training mode. Call eval().")
    if precision == "int8" and data is None:
        raise UsageError("int8 is calibrated on images of the kind it will see; give --data (data=).")
    if not 0 <= max_drop <= 100:
        raise UsageError(f"max_drop is a number of points, 0 to 100; got {max_drop}.")
    classes = getattr(model, "num_classes", None)
    if data is not None and len(data.classes) != classes:
        raise UsageError(f"data must have the model's {classes} classes; it has {len(data.classes)}.")
    check_tools(format, precision)


def _check_config(folder: Path, model: nn.Module, label_names: Sequence[str] | None, data: Splits | None) -> None:
    """The written file says what the model and the images are: preprocessing, and the order of classes."""
    config, network = read_config(folder), cast(Any, model)
    for key in PREPROCESSING:
        want, have = (cfg.get(key) for cfg in (network.pretrained_cfg, config["pretrained_cfg"]))
        if json.dumps(want) != json.dumps(have):
            raise VerificationError(f"The export must prepare images as the model does; {key} is {have}, not {want}.")
    names = config.get("label_names")
    for who, want in (("model", label_names), ("folder of images", data.classes if data is not None else None)):
        if names is not None and want is not None and list(want) != names:
            first, second = next(pair for pair in zip(names, want, strict=False) if pair[0] != pair[1])
            raise VerificationError(
                f"The export must name the classes as the {who} does; it says {first!r} where that says {second!r}."
                " Nothing is kept."
            )


def _calibration(data: Splits | None, model: nn.Module) -> Iterator[np.ndarray]:
    """Images for training as evaluation sees them, one at a time."""
    assert data is not None
    for images, _ in itertools.islice(_batches(data, "train", model, 1), CALIBRATION):
        yield images.numpy()


def _batches(data: Splits, split: str, model: nn.Module, batch_size: int) -> ImageLoader:
    """Images as the model's evaluation sees them, and their classes; those for training in a random order."""
    network: Any = model
    dataset = ImageDataset(getattr(data, split), eval_transform(network.pretrained_cfg))
    return make_loader(dataset, batch_size, shuffle=split == "train")


def _compare(
    model: nn.Module,
    answer: Answer,
    out: Path,
    format: str,
    precision: str,
    data: Splits | None,
    size: tuple[int, ...],
    num_bytes: int,
) -> ExportReport:
    """The model in float32 beside the export, on the same images, in batches of several sizes."""
    device = next(model.parameters()).device
    theirs, ours, classes = [], [], []
    for images, labels in _to_compare(model, data, size):
        with torch.inference_mode():
            theirs.append(model(images.to(device)).float().cpu().numpy())
        ours.append(np.asarray(answer(np.ascontiguousarray(images.numpy())), dtype=np.float32))
        classes.append(labels.numpy())
    expected, found, right = (np.concatenate(parts) for parts in (theirs, ours, classes))
    if expected.shape != found.shape:
        raise VerificationError(f"The export answers {found.shape} where the model answers {expected.shape}.")
    difference = np.abs(expected - found)
    top, top_model = found.argmax(1), expected.argmax(1)
    is_labelled = data is not None
    return ExportReport(
        out=str(out),
        format=format,
        precision=precision,
        compared_on="held-out images" if is_labelled else "random images",
        images=len(expected),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        max_logit=float(np.abs(expected).max()),
        agreement=100 * float((top == top_model).mean()),
        top1=100 * float((top == right).mean()) if is_labelled else None,
        top1_model=100 * float((top_model == right).mean()) if is_labelled else None,
        bytes=num_bytes,
    )


def _to_compare(model: nn.Module, data: Splits | None, size: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    if data is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(RANDOM_IMAGES, *size, generator=generator)
        chunks = iter([(images, torch.zeros(RANDOM_IMAGES, dtype=torch.int64))])
    else:
        chunks = _batches(data, "val", model, sum(BATCHES))
    for images, labels in chunks:
        place = 0
        while place < len(images):
            for count in BATCHES:
                if place < len(images):
                    yield images[place : place + count], labels[place : place + count]
                    place += count


def _judge(report: ExportReport, max_drop: float) -> None:
    """Raises a VerificationError where an export is not what it should be."""
    if not np.isfinite(report.max_difference):
        raise VerificationError(
            f"The {report.format} export answers with numbers that are not finite. Nothing is kept."
        )
    relative = report.max_difference / max(report.max_logit, 1e-6)
    if relative > CLOSE.get(report.precision, math.inf):
        raise VerificationError(
            f"The {report.format} export must answer as the model does, in {report.precision} to"
            f" {CLOSE[report.precision]:g} of the largest logit; it differs by {relative:.2g}. Nothing is kept."
        )
    if report.precision == "fp32" and report.agreement < AGREEING:
        raise VerificationError(
            f"The {report.format} export must name the class that the model names on {AGREEING} % of the"
            f" {report.compared_on}; it does on {report.agreement:.2f} %. Nothing is kept."
        )
    if report.top1 is not None and report.top1_model is not None and report.top1_model - report.top1 > max_drop:
        raise VerificationError(
            f"The {report.precision} export may lose {max_drop:g} points of top-1; of {report.images} held-out images"
            f" the model has {report.top1_model:.2f} % right and it has {report.top1:.2f} %. Nothing is kept."
            " Calibrate on more images, take bf16, or raise max_drop."
        )
