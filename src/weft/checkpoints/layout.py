"""Convert state dicts from the layouts of other libraries (`weft.models.layout`) to weft's names and shapes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

from weft.errors import CheckpointError
from weft.models.layout import Layout, State


class Renamed(NamedTuple):
    """A state dict under our names.

    Attributes:
        state: our names and tensors.
        origins: our name -> theirs, for messages.
    """

    state: State
    origins: dict[str, str]


@functools.cache
def _words(pattern: str) -> re.Pattern[str]:
    numbered = re.escape(pattern).replace(r"\{\}", r"(\d+)")
    return re.compile(rf"(?:^|(?<=\.)){numbered}(?=\.|$)")


def translate(name: str, rename: Mapping[str, str]) -> str:
    """One name by a table."""
    for theirs, ours in rename.items():
        name = _words(theirs).sub(lambda match, ours=ours: ours.format(*match.groups()), name, count=1)
    return name


def convert(layout: Layout, state: State) -> Renamed:
    """Brings a state dict to our names and shapes; what has no place here keeps its name, and loading reports it.

    Raises:
        CheckpointError: two entries have one place, or their tensors are not what the layout says.
    """
    given = {id(tensor): name for name, tensor in state.items()}  # preparing may have moved some to other names
    state = layout.prepared(state)
    renamed, origins = {}, {}
    for theirs, tensor in state.items():
        if layout.drop and re.search(layout.drop, theirs):
            continue
        ours = translate(theirs, layout.rename)
        if ours in renamed:
            raise CheckpointError(f"{origins[ours]} and {theirs} are both {ours}; a checkpoint must have each once.")
        origins[ours] = given.get(id(tensor), theirs)
        if layout.linear and tensor.ndim == 4 and tensor.shape[2:] == (1, 1) and re.search(layout.linear, ours):
            tensor = tensor[:, :, 0, 0]
        renamed[ours] = tensor
    return Renamed(renamed, origins)
