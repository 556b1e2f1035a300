"""Output in notebooks: progress that is updated in place, notes, and lists of images."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from weft.report import markup

UPDATE_SECONDS = 0.5  # smallest time between two updates of an output
MAX_CARDS = 24  # images of a list that are shown


class HasCard(Protocol):
    """A result with an image."""

    def card(self) -> markup.Card:
        """Return the image and its caption."""
        ...


Item = TypeVar("Item", bound=HasCard)


class ImageList(list[Item]):
    """A list of results that a notebook shows as a gallery of images; a slice of it is one also."""

    def __getitem__(self, index: Any) -> Any:
        items = super().__getitem__(index)
        return ImageList(items) if isinstance(index, slice) else items

    def _repr_html_(self) -> str:
        rest = len(self) - MAX_CARDS
        more = markup.element("p", f"and {rest:,} more") if rest > 0 else ""
        return markup.fragment(markup.gallery([item.card() for item in self[:MAX_CARDS]]) + more)


class LiveOutput:
    """One output of a notebook cell that is updated in place. Several threads may update it."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lock = threading.Lock()

    @property
    def is_shown(self) -> bool:
        """Whether something was shown."""
        return self._handle is not None

    def show(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show a line of text in place of the present content.

        Args:
            text: the line.
            done: number of finished units, for a bar; None for no bar.
            total: number of all units; None while it is unknown.
        """
        bar = ""
        if done is not None:
            state = f' value="{done:g}" max="{total:g}"' if total else ""
            bar = f'<progress{state} style="width: 12em; vertical-align: middle; margin-right: .7em"></progress>'
        html = f'<div dir="auto" style="overflow-wrap: anywhere">{bar}{markup.escaped(text)}</div>'
        content = {"text/html": html, "text/plain": text}
        with self._lock:
            if self._handle is None:
                display = importlib.import_module("IPython.display").display
                self._handle = display(content, raw=True, display_id=True)
            else:
                self._handle.update(content, raw=True)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. IPython is not imported."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


def described(name: str, values: Sequence[tuple[str, object]]) -> str:
    """Return a compact `repr` of a result: its class name, and some of its values; those that are None are omitted."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in values if value is not None)})"
