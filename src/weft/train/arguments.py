"""Check the arguments of `train` that can be checked before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.checkpoints.finding import CONFIG, PREFIX, WEIGHTS
from weft.data.sources.open import check_exists
from weft.devices import check_device
from weft.errors import CheckpointError, UsageError
from weft.files import refuse_taken
from weft.inference.arguments import check_other
from weft.models.timm_names import check_name
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import default_recipe, overrides_of, recipe_names
from weft.runs.directory import REPLACEABLE, check_run_dir
from weft.train.stop import seconds_of
from weft.train.track import check_trackers


def check_arguments(
    data: str | Path | None,
    recipe: str | Path | None,
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    *,
    from_scratch: bool = False,
    resume: str | Path | None = None,
    out: str | Path | None = None,
    max_time: str | float | None = None,
    track: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Check the arguments of `train`, and that the files exist that they name.

    Args:
        given: arguments that are settings, by name; None if not given.
        data, recipe, settings, from_scratch, resume, out, max_time, track, force: as in `train`.

    Raises:
        UsageError, DataError, CheckpointError: as `train`.
    """
    check_trackers(track)
    if max_time is not None:
        seconds_of(max_time)
    if resume is not None:
        check_resume(resume, recipe, out, force=force, from_scratch=from_scratch)
        recipe_file(Path(resume))
        check_device(load_recipe(None, overrides_of(data, settings or {}, given)).device)
        return
    loaded = checked_recipe(data, recipe, settings, given, from_scratch=from_scratch)
    check_recipe(loaded)
    if out is not None:
        check_run_dir(Path(out), str(loaded.data.source))
        refuse_taken(Path(out), REPLACEABLE, force=force)


def check_recipe(recipe: Recipe) -> None:
    """Check that model, data and initial weights of a recipe exist.

    Raises:
        UsageError: an unknown model, or a device that this machine does not have.
        DataError: there is no such data.
        CheckpointError: there are no such weights.
    """
    check_device(recipe.device)
    if recipe.model is not None:
        check_name(recipe.model)
    start = recipe.start_from
    if start is not None and not start.startswith(PREFIX):
        start_file(start)
    check_exists(str(recipe.data.source))


def start_file(source: str | Path) -> Path:
    """Return the file of the weights that `--from` names.

    Args:
        source: a run directory (its best model), a model directory, or a checkpoint file.

    Raises:
        CheckpointError: it is none of these.
    """
    folders = (Path(source) / "best", Path(source))
    path = next((folder / WEIGHTS for folder in folders if (folder / WEIGHTS).is_file()), Path(source))
    if path.is_dir() or not path.exists():
        raise CheckpointError(
            f"--from must name a run, a model directory or a checkpoint file; {source} is none of these."
        )
    return path


def check_resume(
    resume: str | Path, recipe: str | Path | None, out: str | Path | None, *, force: bool, from_scratch: bool
) -> None:
    """Check that no argument contradicts `resume`.

    Raises:
        UsageError: one does.
    """
    if recipe is not None or out is not None or force:
        raise UsageError(
            "--resume uses the recipe and the directory of the run; got --recipe, --out or --force. Omit them."
        )
    if from_scratch:
        raise UsageError("--resume continues from the saved state of a run; got --from-scratch. Omit one of them.")


def recipe_file(run: Path) -> Path:
    """Return the recipe of a run directory.

    Raises:
        CheckpointError: it has none.
    """
    file = run / "recipe.yaml"
    if not file.is_file():
        raise CheckpointError(
            f"--resume must name a run directory; {run} has no recipe.yaml."
            " To start a new run from its weights: weft train DATA --from PATH."
        )
    return file


def checked_recipe(
    data: str | Path | None,
    recipe: str | Path | None,
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    *,
    from_scratch: bool = False,
) -> Recipe:
    """Load the recipe that the arguments of `train` describe, with `from_scratch`.

    Raises:
        UsageError: an invalid setting, no dataset, or `from_scratch` with weights to start from.
        DataError: none of the images of `data.other` can be read.
    """
    loaded = load_plan_recipe(data, recipe, settings, given)
    if loaded.data.other is not None:
        check_other(loaded.data.other, loaded.data.max_pixels)
    if not from_scratch:
        return loaded
    if loaded.start_from is not None:
        raise UsageError("--from-scratch and --from exclude each other; omit one of them.")
    if loaded.epochs == 0:
        raise UsageError(
            "--from-scratch needs epochs, since a linear probe needs trained weights; got epochs 0. Omit it, or pass"
            " --epochs N."
        )
    return dataclasses.replace(loaded, pretrained=False, head_init="random")


def load_plan_recipe(
    data: str | Path | None,
    recipe: str | Path | None,
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    option: str = "",
) -> Recipe:
    """Load the recipe that the arguments of `train` describe.

    Weights to start from replace public weights, and their network replaces that of a recipe of weft.

    Args:
        data, recipe, settings: as in `train`.
        given: arguments of `train` that are settings, by name; None if not given.
        option: option of `weft train` to name in the error.

    Raises:
        UsageError: an invalid setting, or no dataset.
        CheckpointError: there are no such weights to start from.
    """
    overrides = overrides_of(data, settings or {}, given)
    is_extended = any(key == "extend" for key, _ in overrides)  # the recipe is that of the run
    loaded = load_recipe(recipe or (None if is_extended else default_recipe(data)), overrides)
    if loaded.data.source is None:
        raise UsageError(
            f"Training needs images; got none. Name a folder or `digits`: weft train DATA {option}".rstrip() + "."
        )
    if loaded.pretrained and loaded.start_from is not None:
        is_named = given.get("model") is not None or "model" in (settings or {}) or recipe not in recipe_names()
        is_described = loaded.start_from.startswith(PREFIX) or (start_file(loaded.start_from).parent / CONFIG).is_file()
        model = None if is_described and not is_named else loaded.model
        loaded = dataclasses.replace(loaded, model=model, pretrained=False)
    return loaded
