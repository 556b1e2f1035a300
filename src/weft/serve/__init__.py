"""Serve a classifier over HTTP, with a web page. Public names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.inference.predictor import Predictor as Predictor
    from weft.serve.app import create_app as create_app
    from weft.serve.server import serve as serve
    from weft.serve.settings import Settings as Settings

__getattr__, __dir__, __all__ = attach(__name__, __file__)
