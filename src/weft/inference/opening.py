"""Open a model by its name: a run, a model directory, an export, a repository on the hub, or a public model."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.checkpoints.config import CHOICE, read_config
from weft.checkpoints.resolve import find_model
from weft.deploy.choosing import Candidate, exports_in, exports_of, fastest, run_blank
from weft.deploy.formats import RUNTIMES
from weft.deploy.model import Model
from weft.deploy.opening import open_export, open_one
from weft.errors import UsageError, WeftError, is_installed, need_torch
from weft.machine.processor import bf16_note, num_threads
from weft.progress import loading, obeys_quiet, say
from weft.text import printable


@obeys_quiet
def open_model(
    run: str | Path,
    *,
    img_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    fold: bool = True,
    threads: int | None = None,
    quiet: bool = False,
) -> Model:
    """Open the best model of a run, a model directory, an export or a public model. An export needs no torch.

    Args:
        run: a run directory, a model directory, an export, of a directory of exports the fastest one on this machine,
            `hf-hub:OWNER/NAME`, or the name of a public model.
        img_size: input size in pixels, or (height, width); None for that of the model.
        device: auto, cpu, cuda or mps; of an export auto or cpu.
        precision: auto, fp32 or bf16.
        fold: merge BatchNorm into the weights of weft's networks.
        threads: number of threads of an export; None for `weft.machine.processor.num_threads`. torch has its own.
        quiet: print no notes.

    Returns:
        An export, or a `weft.inference.torch_model.TorchModel`, whose `network` is the module of torch.

    Raises:
        UsageError: an unsupported device, precision or image size, or a package is not installed.
        CheckpointError: the model is missing or cannot be read.
    """
    source = find_model(run)  # once: the newest commit of a repository on the hub
    if isinstance(source, str) or not _is_export(source):
        return _open_network(run, source, img_size, device, precision, fold)
    return _checked(lambda: open_export(source, threads), img_size, device, precision)


def _checked(open: Callable[[], Model], img_size: int | tuple[int, int] | None, device: str, precision: str) -> Model:
    """Return an export that is opened; raise a UsageError if it does not run in this way."""
    if device not in ("auto", "cpu"):
        raise UsageError(f"device of an export must be auto or cpu; got {device!r}. Pass the run that was exported.")
    model = open()
    if precision == "bf16" != model.info.precision:
        raise UsageError(
            f"precision must be that of the export, {model.info.precision}; got bf16. Leave it out, or export with"
            " --precision bf16."
        )
    _, height, width = model.info.pretrained_cfg["input_size"]
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    if size is not None and tuple(size) != (height, width):
        raise UsageError(
            f"img_size must be that of the export, {height}x{width}; got {size[0]}x{size[1]}. For another size, export"
            " the model again."
        )
    return model


def open_fastest(
    run: str | Path,
    *,
    runtime: str = "auto",
    img_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    precision: str = "fp32",
    batch_size: int = 1,
) -> Model:
    """Open the fastest of a run's exports and its best model.

    The first call on a machine times them, at batch sizes 1 and `batch_size`; the choice is stored in the cache.

    Args:
        run: as in `open_model`.
        runtime: `auto`, `torch`, `openvino` or `onnx`.
        img_size: as in `open_model`; exports of another size are skipped.
        device, precision: of torch; with another `runtime`, those that `open_model` takes for an export.
        batch_size: largest batch, which the model must be able to run.

    Returns:
        The model. The path in its `info`, if there is one, and its runtime lead to the same model again.

    Raises:
        UsageError: there is no export for `runtime`, or `runtime` is not installed.
        CheckpointError: the model is missing or cannot be read.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1; got {batch_size}.")
    if runtime not in RUNTIMES:
        raise UsageError(f"runtime must be one of {', '.join(RUNTIMES)}; got {runtime!r}.")
    source = find_model(run)
    is_export = isinstance(source, Path) and _is_export(source)
    if runtime == "auto" and is_export:
        return open_model(source, img_size=img_size, device=device, precision=precision)
    choices = candidates(run, source, runtime, precision)

    def opened(candidate: Candidate) -> Model:
        if candidate.runtime == "torch" and not is_export:
            model = _open_network(run, source, img_size, device, precision)
        else:
            own = ("auto", "auto") if runtime == "auto" else (device, precision)
            model = _checked(lambda: open_one(candidate.path), img_size, *own)
        run_blank(model, batch_size)
        return model

    has_gpu = os.path.exists("/dev/nvidia0")  # hosts may share a cache directory; torch is imported only where it runs
    settings = (runtime, img_size, device, has_gpu, num_threads(), _torch_version())
    return fastest(choices, opened, (1, batch_size), settings=settings)


def candidates(run: str | Path, source: Path | str, runtime: str, precision: str) -> list[Candidate]:
    """Return what a run can be served from: its exports, as expected of their speed, and its model."""
    if isinstance(source, str):
        if runtime in ("auto", "torch"):
            return [Candidate(Path(), "torch", precision)]
        raise UsageError(
            f"runtime {runtime} needs an export; {run} is a public model. Run: weft export {run} {run}-{runtime}"
            f" --format {runtime}. Then pass {run}-{runtime}."
        )
    if _is_export(source):
        exports = exports_in(source)
        if chosen := [export for export in exports if runtime in ("auto", export.runtime)]:
            return chosen
        formats = " or ".join(sorted({export.runtime for export in exports}))
        raise UsageError(f"runtime must be that of the export, {formats}; got {runtime}. Leave out --runtime.")
    if runtime == "torch":
        return [Candidate(source, "torch", precision)]
    chosen = [export for export in exports_of(source) if runtime in ("auto", export.runtime)]
    if runtime != "auto" and not chosen:
        raise UsageError(
            f"runtime {runtime} needs an export in or next to {source}; there is none that fits. Run: weft export {run}"
            f" {Path(run) / runtime} --format {runtime}"
        )
    if runtime == "auto" and (not chosen or is_installed("torch")):
        chosen.append(Candidate(source, "torch", precision))
    return chosen


def _is_export(folder: Path) -> bool:
    """Return whether a directory has an export, or several; else it has a model."""
    return (folder / CHOICE).exists() or "artefact" in read_config(folder)


def _open_network(
    run: str | Path,
    source: Path | str,
    img_size: int | tuple[int, int] | None,
    device: str,
    precision: str,
    fold: bool = True,
) -> Model:
    need_torch(f"{run} is not an export, and its network runs in torch.{_exports_text(source)}")
    with loading():
        from weft.checkpoints.model_dir import load_model_dir
        from weft.inference.torch_model import TorchModel
        from weft.machine.runtime import Runtime
        from weft.models.contract import resized
    runtime = Runtime.of(device, precision)
    if (emulated := bf16_note(runtime.device.type, runtime.precision)) is not None:
        say(emulated)
    network: Any
    if isinstance(source, str):
        from weft.checkpoints.hub import load_public  # imports huggingface_hub

        path, (network, classes) = None, load_public(source)
    else:
        path, (network, classes) = source, load_model_dir(source)
    if img_size is not None:
        network = resized(network, img_size)
    return TorchModel(network, classes, runtime=runtime, fold=fold, path=path)


def _exports_text(source: Path | str) -> str:
    """Return the first export of a model as a sentence, where torch is not installed; empty if it has none."""
    if is_installed("torch") or isinstance(source, str):
        return ""
    try:
        exports = exports_of(source)
    except WeftError:
        return ""
    return f" It has an export: {printable(str(exports[0].path))}." if exports else ""


def _torch_version() -> str | None:
    """Return the version of torch; None if it is not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
