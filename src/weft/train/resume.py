"""Resume a run: read its recipe and newest valid state, and check that model and data are unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from weft.data import Splits
from weft.data.index.fingerprint import Fingerprint, difference, fingerprint
from weft.errors import CheckpointError, DataError, UsageError
from weft.models.families import plugins
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import KEYS, recorded_environment
from weft.train.build import machine
from weft.train.rundir import DATA, remove, write_text
from weft.train.runtime import Runtime
from weft.train.state import RunFacts, Skipped, State, load_state, tidy, told

FREE = ("workers", "device", "data.source", "save.every_minutes", "save.every_steps", "save.keep")
"""Settings on which no result depends, and which may be others after a stop. The data is compared by its contents."""

BOUND = (
    *("model", "model_args", "img_size", "batch_size", "seed", "augment.repeats", "start_from", "pretrained"),
    *("data.limit", "data.val_fraction", "data.train_fraction"),
)
"""Settings without which the state of a run means nothing."""


class Changed(NamedTuple):
    """A setting, its value so far and its value from here on."""

    key: str
    was: Any
    now: Any


class Resumed(NamedTuple):
    """A run to go on with.

    Attributes:
        out: its directory.
        recipe: what it does from here on.
        state: where it stands.
        skipped: newer states that are damaged.
        changed: settings that are others from here on.
    """

    out: Path
    recipe: Recipe
    state: State
    skipped: list[Skipped]
    changed: list[Changed]

    @property
    def changes_result(self) -> bool:
        """Whether a setting is another on which the result depends."""
        return any(item.key not in FREE for item in self.changed)

    def notes(self, runtime: Runtime) -> list[str]:
        """What the person should know."""
        notes = [f"Passed over {told([item])}" for item in self.skipped]
        notes += [f"{item.key} was {item.was} and is {item.now} from here on." for item in self.changed]
        before, now = self.state.facts["machine"], machine(runtime)
        for key in sorted(before):
            if key == "processes" and before[key] != now[key] and self._has_own_statistics:
                notes.append(_statistics_differ(before[key], now[key]))
            elif key != "threads" and before[key] != now.get(key):
                notes.append(f"{key} was {before[key]} and is {now.get(key)}: the last bits of the result may differ.")
        return notes

    @property
    def _has_own_statistics(self) -> bool:
        """Whether BatchNorm takes its statistics over the images of one process alone."""
        return not self.recipe.sync_bn and any(name.endswith(".running_mean") for name in self.state.tensors)

    def check_teacher(self, record: dict[str, Any] | None) -> list[str]:
        """Refuse a teacher that is not the one that the run began with, unless it was chosen on purpose.

        Args:
            record: of the teacher, as `Teacher.record`; None for no teacher.

        Returns:
            A note where the teachers cannot be compared.

        Raises:
            DataError: it is another.
        """
        if any(item.key == "distill.teacher" for item in self.changed):
            return []
        if "teacher" not in self.state.facts:
            unknown = (
                "The teacher could not be compared: the run was saved by a version of weft that did not record it."
            )
            return [] if record is None else [unknown]
        was = self.state.facts["teacher"]
        if was == record:
            return []
        both = [
            f"its {key} was {(was or {}).get(key)}, and is {value}"
            for key, value in (record or {}).items()
            if (was or {}).get(key) != value
        ]
        raise DataError(
            f"A run that is resumed needs the teacher that it began with; of {self.recipe.distill.teacher}"
            f" {' and '.join(both)}. Put it back, or pass --override --set distill.teacher=OTHER to learn from another."
        )

    def tidy(self, recipe: Recipe) -> None:
        """Removes what is damaged or half written, and writes down what was changed."""
        for item in self.skipped:
            remove(item.path.with_suffix(".json"))
            remove(item.path.with_suffix(".safetensors"))
        tidy(self.out / "state")
        if self.changed:
            written = recorded_environment(self.out / "recipe.yaml")
            write_text(self.out / "recipe.yaml", dump(dataclasses.replace(recipe, environment=written)))


def _statistics_differ(was: int, now: int) -> str:
    same = f"Keep {was}" if was > 1 else f"Keep {was}, or set sync_bn (--override --set sync_bn=true)"
    return (
        f"processes was {was} and is {now}: BatchNorm takes its statistics over the images of one process, of which"
        f" there are now {was / now:g} times as many in a step. The result differs by more than rounding, as with"
        f" another batch size. {same}, for the same result up to rounding."
    )


def resumed(out: Path, overrides: Sequence[tuple[str, Any]], *, override: bool) -> Resumed:
    """Opens a run to go on with.

    Args:
        out: its directory.
        overrides: settings that were asked for beside it.
        override: let them, and edits of its recipe.yaml, change what the run does.

    Raises:
        CheckpointError: it is no run, or holds no state that can be used.
        UsageError: a setting would change, and must not.
    """
    file = out / "recipe.yaml"
    if not file.is_file():
        raise CheckpointError(
            f"--resume must name the directory of a run that was begun; {out} has no recipe.yaml."
            " To start from its weights alone: weft train DATA --from PATH."
        )
    _check_plugins(file)
    recipe = load_recipe(file, overrides)
    was, now = _values(load_recipe(file)), _values(recipe)
    _changed(out, was, now, override=override)
    state, skipped = load_state(out / "state", RunFacts)
    was |= {key: value for key, value in state.facts.get("recipe", {}).items() if key in was}
    return Resumed(out, recipe, state, skipped, _changed(out, was, now, override=override))


def _check_plugins(recipe: Path) -> None:
    """Check that the plugins that a run was started with are loaded.

    Raises:
        UsageError: one is not.
    """
    recorded = recorded_environment(recipe).get("plugins", [])
    missing = [str(name) for name in recorded if name not in plugins()] if isinstance(recorded, list) else []
    if missing:
        raise UsageError(
            f"{recipe.parent} was started with the plugin {missing[0]}, which is not loaded. Pass --plugin FILE, if you"
            " trust the file: it is run."
        )


def _changed(out: Path, was: dict[str, str], now: dict[str, str], *, override: bool) -> list[Changed]:
    """The settings that differ, after a look whether they may."""
    try:
        changed = [Changed(key, json.loads(was[key]), json.loads(now[key])) for key in was if was[key] != now[key]]
    except ValueError:
        raise CheckpointError(f"The newest state in {out} must record settings as JSON; it has been edited.") from None
    for key, before, after in changed:
        both = f"{key} was {before}, and now {after} is asked for"
        if key in BOUND:
            raise UsageError(f"A run that is resumed keeps its {key}; in {out} {both}. Begin another run for that.")
        if key not in FREE and not override:
            raise UsageError(
                f"A run that is resumed does what it began with; in {out} {both}."
                " Pass --override to change it from here on."
            )
    return changed


def record_data(out: Path, splits: Splits) -> None:
    """Leaves in a run directory which images it learns from."""
    fingerprint(splits).write(out / DATA)


def check_data(out: Path, splits: Splits, source: str) -> None:
    """Refuses data that is not what the run began with.

    Raises:
        DataError: it is not; the message names what differs.
    """
    differs = difference(Fingerprint.read(out / DATA), fingerprint(splits))
    if differs is not None:
        raise DataError(
            f"A run that is resumed needs the data that it began with; {source} differs from what {out} learned from: "
            f"{differs} Put it back, or begin another run: weft train {source} --from {out}."
        )


def recipe_record(recipe: Recipe) -> dict[str, str]:
    """The settings on which the result depends, for the state of a run: values as JSON, by their dotted keys."""
    return {key: value for key, value in _values(recipe).items() if key not in FREE}


def _values(recipe: Recipe) -> dict[str, str]:
    """All settings, as JSON: lists and tuples are the same, and a path that is no text is ASCII."""
    return {key: json.dumps(attrgetter(key)(recipe), sort_keys=True) for key in KEYS if key != "environment"}
