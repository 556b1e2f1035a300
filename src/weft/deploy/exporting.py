"""Export a model to a directory that runs without weft's network code, and verify its outputs.

    out/config.json   as in a model directory, with a description of the export
    out/model.onnx    or model.xml and model.bin, or model.pt2 (see graphs)
    out/report.json   differences from the model, and the images that were compared

Networks of weft are folded first. An export that fails its verification is deleted.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from weft.checkpoints.config import CONFIG, read_config
from weft.checkpoints.model_dir import weights_sha256, write_config
from weft.checkpoints.unknown import FILE as DETECTOR
from weft.data import Splits
from weft.deploy import choosing
from weft.deploy.choosing import Choice, ConsideredExport
from weft.deploy.folding import fold
from weft.deploy.formats import AUTO, SUFFIXES, checked_format
from weft.deploy.graphs import OPSET, WEIGHT_BITS, check_tools, write_graph
from weft.deploy.runtimes import FILES, Infer, run_file
from weft.deploy.verification import (
    MIN_LOGIT,
    ExportReport,
    Reference,
    check_config,
    compare,
    labelled_batches,
    verify,
    verify_choosable,
)
from weft.errors import UsageError, VerificationError, WeftError
from weft.files import flush_folder, new_directory, sha256_of, writing
from weft.models.base import Backbone
from weft.progress import Work, obeys_quiet, say
from weft.system import rename
from weft.text import reason_of
from weft.version import __version__

REPORT = "report.json"
CONTENTS = (
    CONFIG,
    REPORT,
    DETECTOR,
    choosing.FILE,
    choosing.FOLDER,
    *(name for names in FILES.values() for name in names),
)
CALIBRATION = 300  # images, the default of NNCF


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
    batch_sizes: Sequence[int] = choosing.BATCH_SIZES,
    force: bool = False,
    quiet: bool = False,
) -> ExportReport:
    """Write an export and verify it against the model.

    Args:
        model: in evaluation mode, for example from `weft.create_model` or `load_checkpoint`; unchanged.
        out: the directory to write, for `weft predict`, `evaluate` and `bench`; or, for other programs, a file that
            ends in .onnx, .xml (with a .bin next to it) or .pt2. Next to such a file, config.json is written as a
            file that ends in .json.
        format: `onnx` (opset 20), `openvino`, `torch` (.pt2 of torch.export) or `aotinductor` (the same, compiled for
            this processor; needs a C++ compiler). weft does not load .pt2 files, which can contain any code. `auto`:
            the fastest of OpenVINO and ONNX Runtime in fp32, bf16 and int8, by measurement. None: by the suffix of
            `out`, `onnx` for a directory.
        precision: `fp32`, `fp16` (of the weights; a CPU computes in float32), `bf16` or `int8`; FORMATS lists the
            precisions of each format. NNCF or ONNX Runtime calibrates int8 on the training images of `data`. None for
            fp32, and with format `auto` for the fastest.
        data: labelled images; the export is verified on the held-out images. None: on random images.
        label_names: one name per class.
        max_drop: maximum loss of top-1 on the held-out images, in points from 0 to 100. The export is refused if it
            loses more and the 95 % interval of the loss is above 0: a few images cannot show a small loss.
        batch_sizes: numbers of images at which format `auto` times the candidates.
        force: replace an existing export.
        quiet: print no progress.

    Returns:
        The differences between the export and the model; with format `auto`, also all candidates.

    Raises:
        UsageError: an invalid argument, a model in training mode, a missing package, or an existing `out`.
        VerificationError: the outputs differ too much, or the format cannot run the network; nothing is written.
    """
    format = checked_format(out, format, precision, max_drop, has_data=data is not None)
    _check(model, data)
    if format == AUTO:
        options = dict(data=data, label_names=label_names, max_drop=max_drop)
        return _export_fastest(model, Path(out), precision, batch_sizes, force, options)
    precision = precision or "fp32"
    check_tools(format, precision)
    if Path(out).suffix in SUFFIXES:
        options = dict(precision=precision, data=data, label_names=label_names, max_drop=max_drop)
        return _export_file(model, Path(out), format, force, options)
    return _export_directory(
        model,
        Path(out),
        format,
        precision,
        data=data,
        label_names=label_names,
        max_drop=max_drop,
        force=force,
        is_timed=precision == "int8" and choosing.precision_note(format, precision) is not None,
    )


def _export_directory(
    model: nn.Module,
    path: Path,
    format: str,
    precision: str,
    *,
    data: Splits | None,
    label_names: Sequence[str] | None,
    max_drop: float,
    force: bool = False,
    is_timed: bool = False,
    reference: Reference | None = None,
) -> ExportReport:
    """Write and verify one export; with `is_timed`, also measure its time relative to fp32.

    `reference` is of the exports from which format auto chooses.
    """
    with (
        new_directory(path, CONTENTS, force=force) as folder,
        Work(f"converting to {format}") as progress,
    ):
        calibration = _calibration(data, model, progress) if precision == "int8" else ()
        with _conversion(format, precision):
            infer = write_export(model, folder, format, precision, calibration, label_names)
            check_config(folder, model, label_names, data)
            size = sum((folder / name).stat().st_size for name in FILES[format])
            expected = reference or Reference(model, data, _input_size(model))
            report = compare(expected, infer, path, format, precision, size, progress)
            if is_timed:
                progress.begin("timing the export and fp32")
                report = replace(report, time_to_fp32=_time_to_fp32(model, infer, format, folder))
        del infer  # Windows renames no file that a runtime has mapped
        verify(report, max_drop)
        if reference is not None:
            verify_choosable(report, max_drop)
        text = json.dumps(report.as_dict() | {"max_drop": max_drop}, indent=2) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8", newline="\n")
    return report


def _time_to_fp32(model: nn.Module, infer: Infer, format: str, folder: Path) -> float:
    """Return the time of an image in an export, relative to the same export in fp32, which is written to `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        graphs = {"fp32": write_export(model, Path(temporary), format, "fp32", ()), "other": infer}
        calls = {name: partial(_run_zeros, graph, _input_size(model)) for name, graph in graphs.items()}
        seconds = choosing.time_calls(calls, (1,))
        del graphs, calls  # Windows removes no file that a runtime has mapped
    return seconds["other"][1] / seconds["fp32"][1]


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
            " --format or --precision. Nothing was written."
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


def _export_fastest(
    model: nn.Module,
    path: Path,
    precision: str | None,
    batch_sizes: Sequence[int],
    force: bool,
    options: dict[str, Any],
) -> ExportReport:
    """Write all exports that fit this machine, and put the fastest one at the top of the directory."""
    choosing.check_batch_sizes(batch_sizes)
    choosing.check_runtimes()
    with new_directory(path, CONTENTS, force=force) as folder:
        _check_possible(precision, has_data=options["data"] is not None)
        options = options | {"reference": Reference(model, options["data"], _input_size(model))}
        reports: dict[str, ExportReport] = {}
        candidates: list[ConsideredExport] = []
        for format, number in choosing.KINDS:
            if precision not in (None, number):
                continue
            candidate = ConsideredExport(format, number)
            made = _one_candidate(model, folder / choosing.FOLDER / candidate.name, format, number, options)
            if isinstance(made, str):
                candidates.append(replace(candidate, refused=made[:2000]))
                continue
            final = path / choosing.FOLDER / candidate.name
            reports[candidate.name] = _rewrite_report(folder / choosing.FOLDER / candidate.name, made, final, options)
            relative = made.max_difference / max(made.max_logit, MIN_LOGIT)
            candidates.append(replace(candidate, difference=relative, top1=made.top1))
        if not reports:
            reasons = "; ".join(f"{candidate.name}: {candidate.refused}" for candidate in candidates)
            raise VerificationError(
                f"One export at least must hold the accuracy of the model; none does. {reasons} Nothing was written."
            )
        seconds = _timed(folder, reports, batch_sizes)
        chosen = choosing.fastest(seconds)
        for file in (folder / choosing.FOLDER / chosen).iterdir():
            file.replace(folder / file.name)
        (folder / choosing.FOLDER / chosen).rmdir()
        report = _rewrite_report(folder, reports[chosen], path, options)
        candidates = [
            replace(row, seconds={str(size): value for size, value in seconds.get(row.name, {}).items()})
            for row in candidates
        ]
        choosing.write_choice(folder, Choice(1, choosing.machine(), tuple(candidates), chosen))
    return replace(report, candidates=tuple(candidates))


def _check_possible(precision: str | None, *, has_data: bool) -> None:
    """Check that one of the exports can be built, before any is.

    Raises:
        UsageError: none can.
    """
    kinds = [kind for kind in choosing.KINDS if precision in (None, kind[1])]
    reasons = {"-".join(kind): _impossible(*kind, has_data=has_data) for kind in kinds}
    if None in reasons.values():
        return
    text = "; ".join(f"{name}: {str(reason).rstrip('.')}" for name, reason in reasons.items())
    if precision is not None:
        raise UsageError(f"precision {precision} must be possible on this machine; it is not. {text}. Leave it out.")
    raise UsageError(f"format auto needs an export that is possible on this machine; there is none. {text}.")


def _impossible(format: str, precision: str, *, has_data: bool) -> str | None:
    """Return why an export is not made here, as a sentence; None if it can be made."""
    reason = choosing.unsuitable(format, precision, has_data=has_data)
    if reason is not None:
        return reason
    try:
        check_tools(format, precision)
    except UsageError as error:
        return str(error)
    return None


def _one_candidate(
    model: nn.Module, path: Path, format: str, precision: str, options: dict[str, Any]
) -> ExportReport | str:
    """Export in one format and precision; return why not if the export is not possible or not accurate enough."""
    reason = _impossible(format, precision, has_data=options["data"] is not None)
    if reason is not None:
        return reason
    try:
        return _export_directory(model, path, format, precision, **options)
    except VerificationError as error:
        return str(error).replace(" Pass another --format or --precision.", "").replace(" Nothing was written.", "")
    except MemoryError:
        return "memory does not suffice to make it"


def _rewrite_report(folder: Path, report: ExportReport, path: Path, options: dict[str, Any]) -> ExportReport:
    """Write report.json with the final path of an export."""
    report = replace(report, out=str(path))
    values = report.as_dict() | {"max_drop": options["max_drop"]}
    (folder / REPORT).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return report


def _timed(folder: Path, reports: dict[str, ExportReport], batch_sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """Time the exports, in the order that is expected of them; a batch size at which one fails is left out."""
    calls: dict[str, Callable[[int], object]] = {}
    for format, precision in choosing.expected_order():
        if (name := f"{format}-{precision}") in reports:
            path = folder / choosing.FOLDER / name
            size = read_config(path)["artefact"]["input"]
            graph = run_file(path / FILES[format][0], format, precision)
            calls[name] = partial(_run_zeros, graph, tuple(size))

    def left_out(size: int, reason: str) -> None:
        say(f"--batch-size {size} is left out: the exports cannot be timed with it ({reason}).")

    with Work("timing the exports"):
        seconds = choosing.time_sizes(calls, batch_sizes, left_out)
    if not all(seconds.values()):
        raise UsageError(
            "The exports must be timed at one batch size at least; memory suffices for none of --batch-size"
            f" {' '.join(map(str, batch_sizes))}. Choose smaller ones."
        )
    return seconds


def _run_zeros(graph: Infer, size: tuple[int, ...], count: int) -> np.ndarray:
    return graph(np.zeros((count, *size), np.float32))


def _export_file(model: nn.Module, path: Path, format: str, force: bool, options: dict[str, Any]) -> ExportReport:
    """Export to files without a directory of their own."""
    targets = [path.with_suffix(Path(name).suffix) for name in FILES[format]] + [path.with_suffix(".json")]
    existing = [target for target in targets if target.exists()]
    if existing and not force:
        raise UsageError(f"An export must be new; {existing[0]} exists already. Pass --force or another path.")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            inside = Path(folder) / "export"
            report = export(model, inside, format=format, **options)
            for name, target in zip([*FILES[format], CONFIG], targets, strict=True):
                rename(inside / name, target)
        flush_folder(path.parent)
    return replace(report, out=str(path))


def _check(model: nn.Module, data: Splits | None) -> None:
    if model.training:
        raise UsageError(
            "The model must be in evaluation mode to be exported; it is in training mode. Call model.eval()."
        )
    classes = getattr(model, "num_classes", None)
    if data is not None and len(data.classes) != classes:
        raise UsageError(f"data must have the model's {classes} classes; it has {len(data.classes)}.")
    if data is not None and not len(data.val):
        raise UsageError("data must have held-out images, on which the export is verified; it has none.")


def _calibration(data: Splits | None, model: nn.Module, progress: Work) -> Iterator[np.ndarray]:
    """Yield training images with the preprocessing of evaluation, one at a time."""
    assert data is not None
    progress.begin("reading images for calibration", min(CALIBRATION, len(data.train)))
    for images, _ in itertools.islice(labelled_batches(data, "train", model, 1), CALIBRATION):
        yield images.numpy()
        progress.advance()
    progress.begin("calibrating int8")
