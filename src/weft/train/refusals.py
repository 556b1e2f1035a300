"""Errors of constructors, layers and memory as errors of weft with advice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weft.errors import UsageError, WeftError
from weft.machine.memory import is_out_of_memory
from weft.recipes import Recipe


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
