"""Resolve the name of a model: a directory on this disk, a repository on the hub, or a public model.

One rule for all verbs: `hf-hub:OWNER/NAME` is a repository; else, what has a separator or exists is a path; else, it is
the name of a model. timm is imported only for names that are not those of weft's networks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weft.checkpoints.config import CHOICE, CONFIG
from weft.errors import CheckpointError
from weft.lazy import LazyModule
from weft.models.families import VARIANTS, nearest_names

timm: Any = LazyModule("timm")

PREFIX = "hf-hub:"  # as in timm


def find_model(run: str | Path) -> Path | str:
    """Return the directory that a name means, or the name of a public model as `create_model` takes it.

    Args:
        run: a run directory (its best model), a model directory, an export, `hf-hub:OWNER/NAME`, which is downloaded,
            or a name that `weft.create_model` takes, with or without a tag.

    Raises:
        CheckpointError: it is none of these, or a file is missing.
    """
    if is_path(run):
        return model_dir(run)
    name = str(run)
    base, _, tag = name.partition(".")
    if base in VARIANTS:  # also under the tag of its weights
        weights = VARIANTS[base].weights
        if not tag or (weights is not None and weights.repo.partition(".")[2] == tag):
            return base
    if timm.is_model(base) and (not tag or name in timm.list_pretrained(f"{base}.*")):
        return name
    raise CheckpointError(
        f"A model must be a run directory, a model directory, an export or a model name; there is no directory {name},"
        f" and no model of this name. Nearest names: {', '.join(nearest_names(name))}. Or pass the path of a run"
        " directory. All names: weft models, and in Python timm.list_pretrained()."
    )


def check_model(run: str | Path) -> None:
    """Raise the error of `find_model` for a path without a model; names are left to it, since it imports timm."""
    if is_path(run) and not str(run).startswith(PREFIX):
        model_dir(run)


def model_dir(run: str | Path) -> Path:
    """Return the directory of a run (its best model), of a model or exports (itself) or of a downloaded hub repository.

    Raises:
        CheckpointError: there is no model directory, or it cannot be downloaded.
    """
    if str(run).startswith(PREFIX):
        from weft.checkpoints.hub_client import fetch_model_dir  # imports torch

        return fetch_model_dir(str(run).removeprefix(PREFIX))
    path = Path(run)
    for folder, file in ((path / "best", CONFIG), (path, CONFIG), (path, CHOICE)):
        if (folder / file).exists():
            return folder
    raise CheckpointError(_no_model_in(path))


def is_path(run: str | Path) -> bool:
    """Return whether a name means a directory, on this disk or on the hub; else it is the name of a model."""
    name = str(run)
    return name.startswith(PREFIX) or os.sep in name or "/" in name or Path(run).exists()


def _no_model_in(path: Path) -> str:
    """Return why a path has no model, and what to do."""
    if path.is_file():
        return (
            f"A model must be a directory; {path} is a file. Convert weights to a model directory: weft convert {path}"
            " DIR --model NAME. Of a file that weft export wrote, pass a directory: weft export RUN DIR"
        )
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
