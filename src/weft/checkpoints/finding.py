"""Find the directory of a model on this disk; no torch is imported, so that a misspelt name is refused soon."""

from __future__ import annotations

import os
from pathlib import Path

from weft.errors import CheckpointError
from weft.models.families import VARIANTS, is_model, nearest_names

PREFIX = "hf-hub:"  # as in timm; accepted wherever a model directory is
WEIGHTS, CONFIG = "model.safetensors", "config.json"
GRAPHS = (".onnx", ".xml", ".pt2")  # files of a single export


def local_model_dir(run: str | Path) -> Path | None:
    """Return the model directory of a run (its best model) or of a model directory (itself); None: there is none."""
    return next((path for path in (Path(run) / "best", Path(run)) if (path / CONFIG).is_file()), None)


def is_path(run: str | Path) -> bool:
    """Return whether a RUN can only be a directory or a repository, not the name of a public model."""
    name = str(run)
    return name.startswith(PREFIX) or os.sep in name or "/" in name or Path(run).exists()


def check_model(run: str | Path) -> None:
    """Refuse a RUN that is no directory with a model and cannot be the name of a public model or a repository.

    Args:
        run: a run directory, a model directory, an export, `hf-hub:OWNER/NAME`, or the name of a public model.

    Raises:
        CheckpointError: it is none of these.
    """
    name = str(run)
    if name.startswith(PREFIX) or local_model_dir(run) is not None:
        return
    if is_path(run):
        raise CheckpointError(without_model(Path(run)))
    base, _, tag = name.partition(".")
    weights = VARIANTS[base].weights if base in VARIANTS else None
    is_own = base in VARIANTS and (not tag or (weights is not None and weights.repo.partition(".")[2] == tag))
    if not is_own and not is_model(name):
        raise CheckpointError(without_name(name))


def without_name(name: str) -> str:
    """Return that a name is neither a directory nor a model, and which models have similar names."""
    return (
        f"A model must be a run directory, a model directory, an export or a model name; there is no directory {name},"
        f" and no model of this name. Nearest names: {', '.join(nearest_names(name))}. Or pass the path of a run"
        " directory. All names: weft models, and in Python timm.list_pretrained()."
    )


def without_model(path: Path) -> str:
    """Return why a path has no model, and what to do."""
    if path.suffix in GRAPHS and path.is_file():
        return (
            f"{path} is an export for other programs, without its classes and preprocessing. Pass an export directory:"
            " weft export RUN DIR --format onnx (or openvino)."
        )
    if path.is_file():
        return (
            f"A model must be a directory; {path} is a file. Convert weights to a model directory: weft convert {path}"
            " DIR --model NAME"
        )
    for folder in (path / "best", path):
        if (folder / WEIGHTS).is_file():
            return f"A model directory must hold {CONFIG} and {WEIGHTS}; {folder} has no {CONFIG}. Copy it again."
    if (path / "recipe.yaml").is_file():
        return (
            f"A run directory must have best/{CONFIG}; {path} has none: its training has not finished an epoch, or the"
            f" file was removed. Resume it: weft train --resume {path}"
        )
    return (
        f"The model must be a run directory (with best/) or a model directory (with {CONFIG}); {path}"
        f" {'is neither' if path.exists() else 'does not exist and is neither'}. Make one with weft train or weft"
        " convert."
    )
