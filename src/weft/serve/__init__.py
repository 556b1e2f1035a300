"""Serve a classifier over HTTP, with a web page. Public names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.inference.predictor import Predictor as Predictor
    from weft.serve.app import create_app as create_app
    from weft.serve.server import serve as serve
    from weft.serve.settings import Settings as Settings

_HOMES = {
    "Predictor": "weft.inference.predictor",
    "Settings": "weft.serve.settings",
    "create_app": "weft.serve.app",
    "serve": "weft.serve.server",
}

__all__ = ["Predictor", "Settings", "create_app", "serve"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
