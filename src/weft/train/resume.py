"""Going on with a run: its recipe, its newest good state, and whether model and data are still what they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.data import Splits
from weft.data.fingerprint import Fingerprint, difference, fingerprint
from weft.errors import CheckpointError, DataError, UsageError
from weft.recipes import Recipe, dump, load_recipe, recorded_environment
from weft.recipes.load import KEYS
from weft.train.build import machine
from weft.train.rundir import DATA, remove, write_text
from weft.train.runtime import Runtime
from weft.train.state import RunFacts, Skipped, State, load_state, tidy, told

FREE = ("workers", "device", "data.source", "save.every_minutes", "save.every_steps", "save.keep")
"""Settings on which no result depends, and which may be others after a stop. The data is compared by its contents."""

BOUND = (
    *("model", "model_args", "img_size", "batch_size", "seed", "augment.repeats"),
    *("data.limit", "data.val_fraction", "data.train_fraction"),
)
"""Settings without which the state of a run means nothing."""


class Resumed(NamedTuple):
    """A run to go on with.

    Attributes:
        out: its directory.
        recipe: what it does from here on.
        state: where it stands.
        skipped: newer states that are damaged.
        changed: sentences, one for every setting that was changed.
    """

    out: Path
    recipe: Recipe
    state: State
    skipped: list[Skipped]
    changed: list[str]

    def notes(self, runtime: Runtime) -> list[str]:
        """What the person should know."""
        notes = [f"Passed over {told([item])}" for item in self.skipped] + self.changed
        before, now = self.state.facts["machine"], machine(runtime)
        for key in sorted(before):
            if key != "threads" and before[key] != now.get(key):
                notes.append(f"{key} was {before[key]} and is {now.get(key)}: the last bits of the result may differ.")
        return notes

    def tidy(self, recipe: Recipe) -> None:
        """Removes what is damaged or half written, and writes down what was changed."""
        for item in self.skipped:
            remove(item.path.with_suffix(".json"))
            remove(item.path.with_suffix(".safetensors"))
        tidy(self.out / "state")
        if self.changed:
            written = recorded_environment(self.out / "recipe.yaml")
            write_text(self.out / "recipe.yaml", dump(dataclasses.replace(recipe, environment=written)))


def resumed(out: Path, overrides: Sequence[tuple[str, Any]], *, override: bool) -> Resumed:
    """Opens a run to go on with.

    Args:
        out: its directory.
        overrides: settings that were asked for beside it.
        override: let them change what the run does.

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
    was, now = load_recipe(file), load_recipe(file, overrides)
    changed = [key for key in KEYS if key != "environment" and _value(was, key) != _value(now, key)]
    for key in changed:
        both = f"{key} was {_value(was, key)}, and now {_value(now, key)} is asked for"
        if key in BOUND:
            raise UsageError(f"A run that is resumed keeps its {key}; in {out} {both}. Begin another run for that.")
        if key not in FREE and not override:
            raise UsageError(
                f"A run that is resumed does what it began with; in {out} {both}."
                " Pass --override to change it from here on."
            )
    state, skipped = load_state(out / "state", RunFacts)
    told_of = [f"{key} was {_value(was, key)} and is {_value(now, key)} from here on." for key in changed]
    return Resumed(out, now, state, skipped, told_of)


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


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
