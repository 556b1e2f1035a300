"""Resume a run: load its recipe and newest valid state, and check that settings, data and teacher are unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from weft.data import Splits
from weft.data.fingerprint import Fingerprint, difference, fingerprint
from weft.data.groups import read_groups
from weft.errors import CheckpointError, DataError, UsageError
from weft.files import remove, sha256_of, write_file
from weft.machine.runtime import Runtime
from weft.models.families import plugins
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import KEYS, recorded_environment
from weft.recipes.rules import check_rules
from weft.runs.directory import FINGERPRINT, SERIES, sweep
from weft.train.environment import machine
from weft.train.request import recipe_file
from weft.train.state import RunState, load_state, skipped_text

FREE = (
    *("workers", "device", "data.source", "data.damaged", "data.cache_gb"),
    *("save.every_minutes", "save.every_steps", "save.keep"),
)
"""Settings that do not affect the result and may change on resume. The data is compared by its contents."""

FIXED = (
    *("best", "model", "model_args", "img_size", "batch_size", "seed", "augment.repeats", "start_from", "pretrained"),
    *("optim.opt", "optim.freeze"),  # the saved moments are of this optimizer and these weights
    *("data.seed", "data.limit", "data.val_fraction", "data.train_fraction", "data.folds", "data.fold"),
    *("data.group", "data.sampling", "data.value_range"),
)
"""Settings that the saved models or the order of the images depend on; they cannot change on resume."""


class ChangedSetting(NamedTuple):
    """A setting that changes on resume: key, old value and new value."""

    key: str
    old: Any
    new: Any


class SavedRun(NamedTuple):
    """An interrupted run, ready to resume.

    Attributes:
        out: the run directory.
        recipe: the recipe from the next step on.
        state, tensors: the newest valid state.
        skipped: newer states that are not valid, with reasons.
        changed: settings that differ from those of the state.
    """

    out: Path
    recipe: Recipe
    state: RunState
    tensors: dict[str, Tensor]
    skipped: dict[Path, str]
    changed: list[ChangedSetting]

    @property
    def changes_result(self) -> bool:
        """Whether a changed setting affects the result."""
        return any(item.key not in FREE for item in self.changed)

    def notes(self, runtime: Runtime) -> list[str]:
        """Return notes on skipped states, changed settings, and differences of the machine."""
        notes = [f"Skipped the state{skipped_text({path: reason})}" for path, reason in self.skipped.items()]
        notes += [f"{item.key} changes from {item.old} to {item.new} from here on." for item in self.changed]
        old, new = dict[str, Any](self.state.machine), dict[str, Any](machine(runtime))
        for key in sorted(old):
            if key == "processes" and old[key] != new[key] and self._has_process_statistics:
                notes.append(_batchnorm_note(old[key], new[key], runtime.device.type))
            elif key != "threads" and old[key] != new.get(key):
                notes.append(f"{key} was {old[key]} and is now {new.get(key)}: the result may differ in the last bits.")
        return notes

    @property
    def _has_process_statistics(self) -> bool:
        """Whether BatchNorm computes its statistics over the images of one process."""
        is_fixed = self.recipe.sync_bn or self.recipe.train_mode == "eval"
        return not is_fixed and any(name.endswith(".running_mean") for name in self.tensors)

    def check_data(self, splits: Splits) -> None:
        """Check that the dataset is the one that the run started with, and that its images are shuffled as they were.

        Raises:
            DataError: it differs; the message names the differences.
        """
        source, by_files = self.recipe.data.source, self.state.by_files
        if by_files != (splits.train.blocks is not None):
            was, now = ("on a server", "on a disk") if by_files else ("on a disk", "on a server")
            raise DataError(
                "A resumed run must read shards from the kind of place where it began, since the order of the images"
                f" depends on it; they were {was}, and {source} is {now}. Pass an address of that kind."
            )
        differs = difference(Fingerprint.read(self.out / FINGERPRINT), fingerprint(splits))
        if differs is not None:
            raise DataError(
                f"A resumed run needs the data that it started with; {source} differs from the data of {self.out}:"
                f" {differs} Restore the data, or start a new run: weft train {source} --from {self.out}."
            )

    def check_length(self, steps: int) -> None:
        """Raise UsageError if the run has trained more steps than it shall have in all, as with a lower `epochs`."""
        recipe, done = self.recipe, self.state.step
        if done > steps:
            length = f"steps {steps}" if recipe.steps else f"epochs {recipe.epochs}, which is {steps} steps"
            raise UsageError(
                f"A resumed run needs at least the steps that it has trained; {self.out} has trained {done}, got"
                f" {length}. Raise epochs or steps, or start a new run."
            )

    def check_teacher(self, record: dict[str, Any] | None) -> None:
        """Check that the teacher is the one that the run started with, unless the setting was changed.

        Args:
            record: `Teacher.record` of the current teacher; None without distillation.

        Raises:
            DataError: the teacher differs.
        """
        old, new = self.state.teacher or {}, record or {}
        if old == new or any(item.key == "distill.teacher" for item in self.changed):
            return
        differences = [f"its {key} was {old.get(key)} and is now {new[key]}" for key in new if old.get(key) != new[key]]
        raise DataError(
            f"A resumed run needs the teacher that it started with; {self.recipe.distill.teacher} has changed:"
            f" {' and '.join(differences)}. Restore it, or pass --override --set distill.teacher=OTHER to use another"
            " teacher."
        )

    def clean_up(self, recipe: Recipe) -> None:
        """Remove states that are not valid and what ended processes left, and write changed settings to recipe.yaml."""
        for path in self.skipped:
            remove(path)
        for folder in (self.out, self.out / "state"):
            sweep(folder)
        if self.changed:
            environment = recorded_environment(self.out / "recipe.yaml")
            write_file(self.out / "recipe.yaml", dump(dataclasses.replace(recipe, environment=environment)))


def _batchnorm_note(old: int, new: int, device: str) -> str:
    """Return the note on BatchNorm statistics after a change of the number of processes."""
    advice = f"Use {old} processes" if old > 1 else "Use 1 process"
    if old == 1 and device == "cuda":
        advice += " or set sync_bn (--override --set sync_bn=true)"
    return (
        f"processes was {old} and is now {new}: BatchNorm computes its statistics over the images of one process, and"
        f" each process now has {old / new:g} times as many images per step. The result differs by more than rounding,"
        f" as with another batch size. {advice} to get the same result up to rounding."
    )


def open_run(out: Path, overrides: Sequence[tuple[str, Any]], *, override: bool) -> SavedRun:
    """Load recipe and newest valid state of an interrupted run.

    Args:
        out: the run directory.
        overrides: settings given in addition to the run's recipe.
        override: allow them, and edits of recipe.yaml, to change settings that affect the result.

    Raises:
        CheckpointError: not a run directory, or no valid state.
        UsageError: a setting differs that must not change.
    """
    file = recipe_file(out)
    _check_plugins(file)
    recipe = load_recipe(file, overrides)
    check_rules(recipe)
    return open_state(out, recipe, override=override)


def recorded_series(out: Path) -> dict[str, str]:
    """Return the series of similar images that a run found, by key.

    Raises:
        CheckpointError: their file is not the one that the run wrote.
    """
    file, sha256 = out / SERIES, recorded_environment(recipe_file(out)).get("series_sha256")
    if sha256 is None:
        return {}
    if not file.is_file() or sha256_of(file) != sha256:
        problem = "it has changed" if file.is_file() else "it is missing"
        raise CheckpointError(
            f"{file} must be the file that the run wrote, since it decides which images are held out; {problem}."
            " Restore it."
        )
    return read_groups(file)


def open_state(out: Path, recipe: Recipe, *, override: bool) -> SavedRun:
    """Load the newest valid state of a run that resumes with a recipe; otherwise as `open_run`."""
    state, tensors, skipped = load_state(out / "state")
    new, recorded = _settings_as_json(recipe), _settings_as_json(load_recipe(recipe_file(out)))
    old = recorded | {key: value for key, value in state.recipe.items() if key in recorded}
    return SavedRun(out, recipe, state, tensors, skipped, _changed_settings(out, old, new, override=override))


def _check_plugins(recipe: Path) -> None:
    """Raise UsageError if a plugin that a run was started with is not loaded."""
    recorded = recorded_environment(recipe).get("plugins", [])
    missing = [str(name) for name in recorded if name not in plugins()] if isinstance(recorded, list) else []
    if missing:
        raise UsageError(
            f"{recipe.parent} was started with the plugin {missing[0]}, which is not loaded. Pass --plugin FILE if you"
            " trust the file: its code is executed."
        )


def _changed_settings(out: Path, old: dict[str, str], new: dict[str, str], *, override: bool) -> list[ChangedSetting]:
    """Return the settings that differ; raise UsageError if one must not change."""
    try:
        changed = [ChangedSetting(k, json.loads(old[k]), json.loads(new[k])) for k in old if old[k] != new[k]]
    except ValueError:
        raise CheckpointError(
            f"The newest state in {out} must record its settings as JSON; it was edited. Remove that state to resume"
            " from the one before."
        ) from None
    for key, before, after in changed:
        values = f"in {out} {key} is {before}, got {after}"
        if key in FIXED:
            raise UsageError(f"A resumed run cannot change its {key}; {values}. Start a new run for that.")
        if key not in FREE and not override:
            raise UsageError(
                f"A resumed run keeps its settings; {values}. Pass --override to change the setting from here on."
            )
    return changed


def recipe_record(recipe: Recipe) -> dict[str, str]:
    """Return the settings that affect the result, for a state: values as JSON by dotted key."""
    return {key: value for key, value in _settings_as_json(recipe).items() if key not in FREE}


def _settings_as_json(recipe: Recipe) -> dict[str, str]:
    """Return all settings as JSON by dotted key: lists equal tuples, and paths that are not UTF-8 become ASCII."""
    return {key: json.dumps(attrgetter(key)(recipe), sort_keys=True) for key in KEYS if key != "environment"}
