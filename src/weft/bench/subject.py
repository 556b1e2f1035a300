"""The model that a worker process of a speed measurement runs, and the error if the memory does not suffice."""

from __future__ import annotations

from typing import Any, NamedTuple

from weft.errors import UsageError


class OutOfMemoryError(UsageError):
    """The memory of the device does not suffice for a batch."""


class Subject(NamedTuple):
    """The model that a worker runs.

    Attributes:
        call: function from images (b c h w) to logits; None outside the worker.
        way, precision, device: how it runs; for an export, as it was exported.
        size: (channels, height, width) of the images.
        more: further values by name, or None.
    """

    call: Any
    way: str
    precision: str
    device: str
    size: tuple[int, ...]
    more: dict[str, Any] | None = None
