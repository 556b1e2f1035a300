"""Log metrics to TensorBoard and Weights & Biases."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, need, unknown
from weft.recipes import Recipe

TRACKERS = ("tensorboard", "wandb")


class Tracker:
    """Passes numbers on.

    Args:
        names: of `TRACKERS`.
        recipe: what the run does, for the record.
        out: the directory of the run; TensorBoard's files go into `out/tensorboard`.

    Raises:
        UsageError: one cannot be started, such as Weights & Biases without a key or a network.
    """

    def __init__(self, names: Sequence[str], recipe: Recipe, out: Path) -> None:
        self.trackers = []
        for name in names:
            try:
                self.trackers.append(_opened(name, recipe, out))
            except WeftError:
                raise
            except Exception as error:  # each library has errors of its own
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise UsageError(f"--track {name} must be able to start; {reason} Or leave --track out.") from error

    def step(self, step: int, **values: float) -> None:
        """Numbers of one step, counted from 1."""
        for tracker in self.trackers:
            tracker.log(values, step=step)

    def finish(self) -> None:
        """Nothing more will come."""
        for tracker in self.trackers:
            tracker.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Check the names and that their libraries are installed, before a run directory is made.

    Raises:
        UsageError: a name that is not of `TRACKERS`, or a library that is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS, ", ".join(TRACKERS))
        if sys.modules.get(name, sys) is None:  # the command line hides wandb from timm
            del sys.modules[name]
        need("track", name)


def _opened(name: str, recipe: Recipe, out: Path) -> Any:
    from accelerate import tracking

    values = {key: json.dumps(value) for key, value in dataclasses.asdict(recipe).items() if key != "environment"}
    if name == "tensorboard":
        tracker: Any = tracking.TensorBoardTracker("tensorboard", out)
    else:
        tracker = tracking.WandBTracker("weft", name=out.name, dir=str(out))
    tracker.start()
    tracker.store_init_configuration(values)
    return tracker
