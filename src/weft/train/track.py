"""Log metrics to TensorBoard and Weights & Biases."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, need, unknown
from weft.recipes import Recipe
from weft.text import reason_of

TRACKERS = ("tensorboard", "wandb")
Log = Callable[[dict[str, float], int], Any]  # of metrics by name, and the step


class Tracker:
    """Log metrics to any number of experiment trackers.

    Args:
        names: names from `TRACKERS`.
        recipe: the training recipe; its settings are logged.
        out: the run directory; TensorBoard writes to `out/tensorboard`.

    Raises:
        UsageError: a tracker cannot start, e.g. Weights & Biases without an API key or a network.
    """

    def __init__(self, names: Sequence[str], recipe: Recipe, out: Path) -> None:
        self.trackers = []
        for name in names:
            try:
                self.trackers.append(_start(name, recipe, out))
            except WeftError:
                raise
            except Exception as error:  # each library has its own exception types
                raise UsageError(
                    f"--track {name} must be able to start; {reason_of(error)}. Or omit --track."
                ) from error

    def step(self, step: int, **values: float) -> None:
        """Log the metrics of a step, counted from 1."""
        for log, _ in self.trackers:
            log(values, step)

    def finish(self) -> None:
        """Close all trackers."""
        for _, close in self.trackers:
            close()


def check_trackers(names: Sequence[str]) -> None:
    """Check tracker names and that their libraries are installed, before a run directory is created.

    Raises:
        UsageError: a name is not in `TRACKERS`, or a library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS, ", ".join(TRACKERS))
        if sys.modules.get(name, sys) is None:  # the command line hides wandb from timm
            del sys.modules[name]
        need("track", name)


def _start(name: str, recipe: Recipe, out: Path) -> tuple[Log, Callable[[], Any]]:
    """Start a tracker; return the functions that log the metrics of a step, and that close it."""
    values = {key: json.dumps(value) for key, value in dataclasses.asdict(recipe).items() if key != "environment"}
    if name == "wandb":
        import wandb

        run = wandb.init(project="weft", name=out.name, dir=str(out), config=values)
        return lambda metrics, step: run.log(metrics, step=step), run.finish
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(out / "tensorboard")
    writer.add_hparams(values, metric_dict={})

    def log(metrics: dict[str, float], step: int) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log, writer.close
