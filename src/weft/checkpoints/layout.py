"""Convert state dicts from the layouts of other libraries (`weft.models.layout`) to weft's names and shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from weft.errors import CheckpointError
from weft.models.layout import Layout, State


class RenamedState(NamedTuple):
    """A state dict under weft's keys.

    Attributes:
        state: weft's keys and tensors.
        origins: key mapping from weft's key to the original key, for messages.
    """

    state: State
    origins: dict[str, str]


@functools.cache
def _key_pattern(pattern: str) -> re.Pattern[str]:
    numbered = re.escape(pattern).replace(r"\{\}", r"(\d+)")
    return re.compile(rf"(?:^|(?<=\.)){numbered}(?=\.|$)")


def translate(name: str, rename: Mapping[str, str]) -> str:
    """Return a key renamed by a table from their key patterns to weft's."""
    for theirs, ours in rename.items():
        name = _key_pattern(theirs).sub(lambda match, ours=ours: ours.format(*match.groups()), name, count=1)
    return name


def convert(layout: Layout, state: State) -> RenamedState:
    """Convert a state dict to weft's keys and shapes. Unknown keys are kept; loading reports them.

    Raises:
        CheckpointError: two keys map to the same key, or a tensor does not have the shape that the layout requires.
    """
    original_keys = {id(tensor): name for name, tensor in state.items()}  # `prepared` may rename some tensors
    state = layout.prepared(state)
    renamed, origins = {}, {}
    for theirs, tensor in state.items():
        if layout.drop and re.search(layout.drop, theirs):
            continue
        ours = translate(theirs, layout.rename)
        if ours in renamed:
            raise CheckpointError(
                f"A checkpoint must have each tensor once; {origins[ours]} and {theirs} both map to {ours}."
            )
        origins[ours] = original_keys.get(id(tensor), theirs)
        if layout.linear and tensor.ndim == 4 and tensor.shape[2:] == (1, 1) and re.search(layout.linear, ours):
            tensor = tensor[:, :, 0, 0]
        renamed[ours] = tensor
    return RenamedState(renamed, origins)
