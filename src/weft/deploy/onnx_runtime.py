"""Import ONNX Runtime without its telemetry.

Version 1.31 stores a device number in the user's cache directory when it is imported, and sends events to Microsoft,
unless a variable of the environment is set before.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

DISABLE = "ORT_DISABLE_TELEMETRY"


def import_onnx_runtime() -> Any:
    """Return the package onnxruntime."""
    os.environ.setdefault(DISABLE, "1")
    return importlib.import_module("onnxruntime")
