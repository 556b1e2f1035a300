"""How somebody else names and shapes the weights of a network, as data.

A `Layout` is a table: words of their names, and ours. Rows apply in order, each wherever its words stand between dots;
`{}` stands for a number. `stage{}` -> `stages.{}` turns `stage2.cls_token` into `stages.2.cls_token`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from weft.errors import CheckpointError
from weft.models.base import activation

State = dict[str, Tensor]

_ACTIVATIONS = ("gelu", "quick_gelu", "hard_swish", "relu", "silu", "identity")


def _unchanged(state: State) -> State:
    return state


def _none(state: State) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Layout:
    """One source of weights.

    Attributes:
        name: who writes it, for messages.
        family: class of our network that it belongs to.
        signature: pattern of one name that only this layout has.
        ndim: axes of that tensor, where names alone do not tell.
        prepare: what a table cannot say, done on their names before renaming: splitting, joining, counting blocks.
        rename: their words -> ours.
        drop: pattern of names that hold nothing learned.
        linear: pattern of our names whose weights are linear layers here and may be 1x1 convolutions there.
        asks: from the state, the constructor values that make our network theirs; see `switches`.
    """

    name: str
    family: str
    signature: str
    ndim: int | None = None
    prepare: Callable[[State], State] = _unchanged
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: str | None = None
    linear: str | None = None
    asks: Callable[[State], dict[str, Any]] = _none

    def recognises(self, state: State) -> bool:
        """Whether a state dict is in this layout."""
        signature = re.compile(self.signature)
        found = next((tensor for name, tensor in state.items() if signature.fullmatch(name)), None)
        return found is not None and (self.ndim is None or found.ndim == self.ndim)

    def switches(self, state: State) -> dict[str, Any]:
        """The constructor values that make our network the one that a state dict belongs to.

        Raises:
            CheckpointError: a tensor that would tell them is not there or not what the layout says.
        """
        with self._tensors_that_fit():
            return self.asks(state)

    def prepared(self, state: State) -> State:
        """The state dict, ready for the table; raises as `switches` does."""
        with self._tensors_that_fit():
            return self.prepare(state)

    @contextlib.contextmanager
    def _tensors_that_fit(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, IndexError, RuntimeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"The weights look like {self.name}, but their tensors do not fit together "
                f"({str(error).partition(chr(10))[0]}). They are damaged or of another version. Nothing was loaded."
            ) from None


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


def name_of_activation(module: nn.Module) -> str:
    """The name under which a network is given this activation."""
    return next((name for name in _ACTIVATIONS if type(module) is activation(name)), type(module).__name__)
