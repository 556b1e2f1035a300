"""Explain predictions: attention maps, attention rollout, shares of layers, Grad-CAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.interpret.explaining import Explanation as Explanation
    from weft.interpret.explaining import explain as explain

_HOMES = {
    "Explanation": "weft.interpret.explaining",
    "explain": "weft.interpret.explaining",
}

__all__ = ["Explanation", "explain"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
