"""Errors of PyTorch within a run as errors of weft with advice: settings, memory, values, lost processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import NoReturn

from torch import distributed

from weft.data import Source
from weft.data.order import Key
from weft.errors import DivergedError, UsageError, WeftError
from weft.inference.inputs import name_of
from weft.machine.memory import is_out_of_memory
from weft.recipes import Recipe
from weft.text import first_few
from weft.train.meter import StepResult
from weft.train.stop import Stop

MAX_NAMES = 16  # image names in a message


@contextlib.contextmanager
def refusing(requirement: str, out_of_memory: WeftError | None = None, advice: str = "") -> Iterator[None]:
    """Raise any error of the block, such as one of a constructor or layer, as a UsageError with advice.

    Args:
        requirement: condition that does not hold, as the start of the message.
        out_of_memory: error to raise if memory does not suffice; None to treat this case like any other error.
        advice: sentence appended to the advice.

    Raises:
        UsageError: any error of the block that is not a WeftError.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:  # constructors and layers raise errors of any type
        if out_of_memory is not None and is_out_of_memory(error):
            raise out_of_memory from error
        message = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]  # advice of torch.compile to its developers
        reason = " ".join(message.split())[:300].rstrip(" .") or type(error).__name__
        raise UsageError(
            f"{requirement}; {reason}. Choose another --img-size, --batch-size or --model.{advice}"
        ) from error


def memory_error(recipe: Recipe) -> UsageError:
    """Return the error for a step that does not fit into memory."""
    return UsageError(
        f"A step must fit into memory; batch_size {recipe.batch_size} in {recipe.accumulate} part(s) does not."
        " Lower --batch-size, or raise accumulate, or set grad_checkpointing."
    )


def diverged(
    result: StepResult, step: int, epoch: int, lr: float, images: Source, keys: Iterable[Key]
) -> DivergedError:
    """Return the error for a step whose loss or gradient is not finite.

    Args:
        result: of the step.
        step, epoch: its number and that of its epoch, from 1.
        lr: its learning rate.
        images: the training images.
        keys: keys of the images of the step.
    """
    is_loss = not math.isfinite(result.loss)
    name, value = ("loss", result.loss) if is_loss else ("gradient norm", result.grad_norm)
    names = (name_of(images, index) for index in dict.fromkeys(index for _, index, _ in keys))
    return DivergedError(
        f"The {name} must be finite; got {value} at step {step} (epoch {epoch}), learning rate {lr:.3g}, images"
        f" {first_few(names, MAX_NAMES)}. This step did not change the weights, and the last state is kept. Lower the"
        " learning rate, increase schedule.warmup_epochs, or check these images."
    )


def raise_explained(error: MemoryError | RuntimeError, recipe: Recipe, stop: Stop, newest: str) -> NoReturn:
    """Raise an error of PyTorch that the machine caused as a WeftError with advice; others unchanged.

    Args:
        error: raised within a step.
        recipe: of the run.
        stop: requests to stop.
        newest: sentence that names the newest saved state.
    """
    text = str(error)
    # a signal to a process group may end another process before this one has stopped
    if stop.requested is not None and _is_lost_process(error):
        reason = Stop.REASONS[stop.reason]
        stop.end(stop.reason, f"Stopped: {reason}; the step in progress was discarded. {newest}")
    if "DataLoader worker" in text:
        raise WeftError(
            f"The worker processes must run until the end; one was terminated ({text.splitlines()[0]})."
            f" The machine may be out of memory: lower --workers. {newest}"
        ) from error
    if is_out_of_memory(error):
        raise memory_error(recipe) from error
    raise error


def _is_lost_process(error: BaseException) -> bool:
    """Return whether an error comes from the end of another process: a data loader worker, or one of the same run."""
    text = str(error)
    return isinstance(error, distributed.DistError) or "DataLoader worker" in text or "gloo" in text.lower()
