"""Explain predictions: attention maps, attention rollout, shares of layers, Grad-CAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.interpret.explaining import Explanation as Explanation
    from weft.interpret.explaining import explain as explain

__getattr__, __dir__, __all__ = attach(__name__, __file__)
