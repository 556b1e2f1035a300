"""Export a model to a directory that runs without weft's network code, and verify its outputs.

    out/config.json   as in a model directory, with a description of the export
    out/model.onnx    or model.xml and model.bin, or model.pt2 (see graphs)
    out/report.json   differences from the model, and the images that were compared

Format auto writes such a directory per format and precision, and `chosen.json` (see choosing). Networks of weft are
folded first. An export that fails its verification is deleted.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from weft.checkpoints.config import CHOICE, CONFIG
from weft.checkpoints.model_dir import weights_sha256, write_config
from weft.checkpoints.unknown import FILE as DETECTOR
from weft.data import Splits
from weft.deploy import choosing
from weft.deploy.folding import fold
from weft.deploy.formats import (
    AUTO,
    BATCH_SIZES,
    KINDS,
    SUFFIXES,
    check_batch_sizes,
    check_tools,
    checked_format,
    unsuitable,
)
from weft.deploy.graphs import OPSET, WEIGHT_BITS, write_graph
from weft.deploy.opening import open_one
from weft.deploy.runtimes import FILES, Infer
from weft.deploy.verification import ConsideredExport, ExportReport, Reference, labelled_batches, verify
from weft.errors import UsageError, VerificationError, WeftError
from weft.files import flush_folder, new_directory, sha256_of, writing
from weft.machine.system import rename
from weft.models.base import Backbone
from weft.progress import Work, obeys_quiet, say
from weft.text import reason_of
from weft.version import __version__

REPORT = "report.json"
NAMES = {"-".join(kind): kind for kind in KINDS}
CONTENTS = (CONFIG, REPORT, DETECTOR, CHOICE, *NAMES, *(name for names in FILES.values() for name in names))
CALIBRATION = 300  # images, the default of NNCF
WRITTEN = " Nothing was written."  # end of a message


@obeys_quiet
def export(
    model: nn.Module,
    out: str | Path,
    *,
    format: str | None = None,
    precision: str | None = None,
    data: Splits | None = None,
    label_names: Sequence[str] | None = None,
    max_drop: float = 0.5,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    force: bool = False,
    quiet: bool = False,
) -> ExportReport:
    """Write an export and verify it against the model.

    Args:
        model: in evaluation mode, for example from `weft.create_model` or `load_checkpoint`; unchanged.
        out: the directory to write, for `weft predict`, `evaluate` and `bench`; or, for other programs, a file that
            ends in .onnx, .xml (with a .bin next to it) or .pt2. Next to such a file, config.json is written as a
            file that ends in .json.
        format: `onnx` (opset 20), `openvino` or `torch` (.pt2 of torch.export). weft does not load .pt2 files, which
            can contain any code. `auto`: all that fit this machine of OpenVINO and ONNX Runtime in fp32, bf16 and int8,
            in a directory each; weft runs the fastest. None: by the suffix of `out`, `onnx` for a directory.
        precision: `fp32`, `fp16` (of the weights; a CPU computes in float32), `bf16` or `int8`; FORMATS lists the
            precisions of each format. NNCF or ONNX Runtime calibrates int8 on the training images of `data`. None for
            fp32, and with format `auto` for all.
        data: labelled images; the export is verified on the held-out images. None: on random images.
        label_names: one name per class.
        max_drop: maximum loss of top-1 on the held-out images, in points from 0 to 100, or one image if that is more.
        batch_sizes: numbers of images at which format `auto` times the exports.
        force: replace an existing export.
        quiet: print no progress.

    Returns:
        The differences between the export and the model; with format `auto` of the fastest export, with all candidates.

    Raises:
        UsageError: an invalid argument, a model in training mode, a missing package, or an existing `out`.
        VerificationError: the outputs differ too much, or the format cannot run the network; nothing is written.
    """
    format, path = checked_format(out, format, precision, max_drop, has_data=data is not None), Path(out)
    _check(model, data, label_names)
    exporter = _Exporter(model, label_names, max_drop, data)
    if format == AUTO:
        check_batch_sizes(batch_sizes)
        with new_directory(path, CONTENTS, force=force) as folder:
            return _export_all(exporter, folder, path, precision, batch_sizes)
    check_tools(format, precision or "fp32")
    place = _files(path, format, force) if path.suffix in SUFFIXES else new_directory(path, CONTENTS, force=force)
    with place as folder:
        return exporter.written(folder, path, format, precision or "fp32")


class _Exporter:
    """Writes and verifies exports of one model. The arguments are those of `export`."""

    def __init__(
        self, model: nn.Module, label_names: Sequence[str] | None, max_drop: float, data: Splits | None
    ) -> None:
        self.model, self.label_names, self.max_drop, self.data = model, label_names, max_drop, data
        self.reference = Reference(model, data, _input_size(model))

    def written(self, folder: Path, path: Path, format: str, precision: str) -> ExportReport:
        """Write one export to an existing directory, which will be `path`, and verify it."""
        with Work(f"converting to {format}") as progress, _conversion(format, precision):
            calibration = self._calibration(progress) if precision == "int8" else ()
            infer = write_export(self.model, folder, format, precision, calibration, self.label_names)
            size = sum((folder / name).stat().st_size for name in FILES[format])
            report = self.reference.compare(infer, path, format, precision, size, progress)
        verify(report, self.max_drop)
        text = json.dumps(report.as_dict() | {"max_drop": self.max_drop}, indent=2) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8", newline="\n")
        return report

    def _calibration(self, progress: Work) -> Iterator[np.ndarray]:
        """Yield training images with the preprocessing of evaluation, one at a time."""
        assert self.data is not None
        progress.begin("reading images for calibration", min(CALIBRATION, len(self.data.train)))
        for images, _ in itertools.islice(labelled_batches(self.data, "train", self.model, 1), CALIBRATION):
            yield images.numpy()
            progress.advance()
        progress.begin("calibrating int8")


def _export_all(
    exporter: _Exporter, folder: Path, path: Path, precision: str | None, batch_sizes: Sequence[int]
) -> ExportReport:
    """Write all exports that fit this machine, time them, and record the fastest."""
    kinds = {name: kind for name, kind in NAMES.items() if precision in (None, kind[1])}
    refused = {name: unsuitable(*kind, has_data=exporter.data is not None) for name, kind in kinds.items()}
    if all(refused.values()):
        must = "format auto needs an export that is possible on this machine; there is none"
        if precision is not None:
            must = f"precision {precision} must be possible on this machine; it is not"
        raise UsageError(f"{must}. {_listed(refused)}.")
    reports: dict[str, ExportReport] = {}
    for name in [name for name, reason in refused.items() if reason is None]:
        (folder / name).mkdir()
        try:
            reports[name] = exporter.written(folder / name, path / name, *kinds[name])
            continue
        except MemoryError:
            refused[name] = "memory does not suffice to make it"
        except VerificationError as error:
            refused[name] = str(error).replace(" Pass another --format or --precision.", "").replace(WRITTEN, "")
        shutil.rmtree(folder / name)
    if not reports:
        raise VerificationError(
            f"One export at least must hold the accuracy of the model; none does. {_listed(refused)}.{WRITTEN}"
        )
    seconds = _timed({name: folder / name for name in reports}, batch_sizes)
    chosen = choosing.quickest(seconds)
    choosing.write_choice(folder, {"chosen": chosen, "machine": choosing.machine(), "seconds": seconds})
    considered = []
    for name, kind in kinds.items():
        if (report := reports.get(name)) is None:
            considered.append(ConsideredExport(*kind, refused[name]))
        else:
            times = {str(size): value for size, value in seconds[name].items()}
            considered.append(ConsideredExport(*kind, None, times, report.relative_difference, report.top1))
    return replace(reports[chosen], out=str(path), candidates=tuple(considered))


def _listed(refused: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {str(reason).rstrip('.')}" for name, reason in refused.items())


def _timed(exports: Mapping[str, Path], batch_sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Time exports, in the order that is expected of them; a batch size at which one fails is left out."""
    opened = {name: open_one(exports[name]) for name in choosing.expected_order() if name in exports}
    seconds, reasons = choosing.time_in_turns(opened, batch_sizes)
    if not all(seconds.values()):
        raise UsageError(
            "The exports must be timed at one batch size at least; memory suffices for none of --batch-size"
            f" {' '.join(map(str, batch_sizes))}. Choose smaller ones."
        )
    for size, reason in reasons.items():
        say(f"--batch-size {size} is left out: the exports cannot be timed with it ({reason}).")
    return seconds


@contextlib.contextmanager
def _conversion(format: str, precision: str) -> Iterator[None]:
    """Turn an error of a converter or a runtime into a VerificationError."""
    try:
        yield
    except (WeftError, OSError, MemoryError):
        raise
    except Exception as error:
        raise VerificationError(
            f"{format} must be able to run the network in {precision}; it fails: {reason_of(error)}. Pass another"
            f" --format or --precision.{WRITTEN}"
        ) from error


def write_export(
    model: nn.Module,
    folder: Path,
    format: str,
    precision: str,
    calibration: Iterable[np.ndarray],
    label_names: Sequence[str] | None = None,
) -> Infer:
    """Write the graph of a model and config.json, without verification.

    Args:
        model: in evaluation mode; unchanged.
        folder: existing directory.
        format, precision: see `export`.
        calibration: images (1, channels, height, width) that calibrate int8; unused in other precisions.
        label_names: one name per class.

    Returns:
        A function from images (b channels height width) to logits, which runs the graph.
    """
    size, names = _input_size(model), FILES[format]
    # other networks keep BatchNorm; the runtimes merge it
    folded = fold(model) if isinstance(model, Backbone) else copy.deepcopy(model)
    infer = write_graph(folded.cpu(), folder / names[0], format, precision, size, calibration)
    artefact = {
        "version": 1,
        "format": format,
        "precision": precision,
        "input": list(size),
        "batch": "any",
        "weights_sha256": weights_sha256(model),
        "sha256": {name: sha256_of(folder / name) for name in names},
        "weft": __version__,
        **({"opset": OPSET} if format == "onnx" else {}),
        **({"weight_bits": WEIGHT_BITS} if precision == "int8" else {}),
    }
    write_config(model, folder, label_names, artefact=artefact)
    return infer


def _input_size(model: nn.Module) -> tuple[int, ...]:
    """Return (channels, height, width) of the images of a network."""
    network: Any = model
    return tuple(network.pretrained_cfg["input_size"])


@contextlib.contextmanager
def _files(path: Path, format: str, force: bool) -> Iterator[Path]:
    """Yield a directory for an export, whose files are moved to those named like `path`, with their suffixes."""
    targets = [path.with_suffix(Path(name).suffix) for name in FILES[format]] + [path.with_suffix(".json")]
    existing = [target for target in targets if target.exists()]
    if existing and not force:
        raise UsageError(f"An export must be new; {existing[0]} exists already. Pass --force or another path.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            yield Path(folder)
            for name, target in zip([*FILES[format], CONFIG], targets, strict=True):
                rename(Path(folder) / name, target)
        flush_folder(path.parent)


def _check(model: nn.Module, data: Splits | None, label_names: Sequence[str] | None) -> None:
    if model.training:
        raise UsageError(
            "The model must be in evaluation mode to be exported; it is in training mode. Call model.eval()."
        )
    if data is None:
        return
    classes = getattr(model, "num_classes", None)
    if len(data.classes) != classes:
        raise UsageError(f"data must have the model's {classes} classes; it has {len(data.classes)}.")
    if not len(data.val):
        raise UsageError("data must have held-out images, on which the export is verified; it has none.")
    for name, own in zip(label_names or (), data.classes, strict=False):
        if name != own:
            raise UsageError(f"data must have the classes of the model in their order; it has {own!r} for {name!r}.")
