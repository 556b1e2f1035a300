"""Layout: how another library names and shapes the weights of one of weft's networks, as data.

A layout contains a table of their names and weft's. Rows apply in order, each where its words are between dots; `{}`
matches a number: `stage{}` -> `stages.{}` turns `stage2.cls_token` into `stages.2.cls_token`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.errors import CheckpointError
from weft.text import reason_of

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


def _unchanged(state: State) -> State:
    return state


def _none(state: State) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Layout:
    """Weights of one source.

    Attributes:
        name: source, as messages name it.
        signature: pattern that matches one name of this layout, and no name of any other.
        prepare: changes that a table of names cannot express (splitting and joining tensors), applied to their names.
        rename: their names -> weft's.
        drop: pattern of names whose tensors hold nothing learned.
        linear: pattern of our names whose weights are linear layers here and may be 1x1 convolutions there.
        asks: constructor arguments, read from the state dict, that make our network compute what theirs does.
        hidden: those of them that no tensor shows: a network must have been built with them.
    """

    name: str
    signature: str
    prepare: Callable[[State], State] = _unchanged
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: str | None = None
    linear: str | None = None
    asks: Callable[[State], dict[str, Any]] = _none
    hidden: tuple[str, ...] = ()

    def recognises(self, state: State) -> bool:
        """Return whether a state dict is in this layout."""
        signature = re.compile(self.signature)
        return any(signature.fullmatch(name) for name in state)

    def switches(self, state: State) -> dict[str, Any]:
        """Return the constructor arguments that make our network compute what the network of a state dict does.

        Raises:
            CheckpointError: a tensor that determines them is missing or has another shape.
        """
        with self._tensors_that_fit():
            return self.asks(state)

    def convert(self, state: State) -> tuple[State, dict[str, str]]:
        """Convert a state dict to weft's keys and shapes. Unknown keys are kept; loading reports them.

        Returns:
            The state dict, and for each of its keys the original one, for messages.

        Raises:
            CheckpointError: two keys map to the same key, or a tensor does not have the shape that the layout requires.
        """
        given = state
        original_keys = {id(tensor): name for name, tensor in given.items()}  # `prepare` may rename some tensors
        with self._tensors_that_fit():
            state = self.prepare(state)
        renamed: State = {}
        origins: dict[str, str] = {}
        for theirs, tensor in state.items():
            if self.drop and re.search(self.drop, theirs):
                continue
            ours = translate(theirs, self.rename)
            if ours in renamed:
                raise CheckpointError(
                    f"A checkpoint must have each tensor once; {origins[ours]} and {theirs} both map to {ours}."
                )
            origins[ours] = theirs if given.get(theirs) is tensor else original_keys.get(id(tensor), theirs)
            if self.linear and tensor.ndim == 4 and tensor.shape[2:] == (1, 1) and re.search(self.linear, ours):
                tensor = tensor[:, :, 0, 0]
            renamed[ours] = tensor
        return renamed, origins

    @contextlib.contextmanager
    def _tensors_that_fit(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, IndexError, RuntimeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"The weights look like {self.name}, but their tensors do not fit together "
                f"({reason_of(error)}). They are damaged or of another version. Nothing was loaded."
            ) from None


def translate(name: str, rename: Mapping[str, str]) -> str:
    """Return a key renamed by a table from their key patterns to weft's."""
    for theirs, ours in rename.items():
        name = _key_pattern(theirs).sub(lambda match, ours=ours: ours.format(*match.groups()), name, count=1)
    return name


@functools.cache
def _key_pattern(pattern: str) -> re.Pattern[str]:
    numbered = re.escape(pattern).replace(r"\{\}", r"(\d+)")
    return re.compile(rf"(?:^|(?<=\.)){numbered}(?=\.|$)")
