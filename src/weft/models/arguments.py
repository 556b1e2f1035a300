"""Constructor values that come from a file or a command line: plain values, and none that names a place.

timm's builders take more than a network's own values: where to fetch weights, which file to read, what to return. An
untrusted recipe or model directory must not reach those. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from weft.errors import UsageError, nearest

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,64}\Z")  # `gelu`, `avg`: no path, no address
MAX_NUMBER, MAX_DEPTH, MAX_ITEMS = 100_000, 3, 256
# Arguments of timm.create_model, its entry points and build_model_with_cfg that are no values of a network.
REFUSED = (
    *("model_name", "variant", "pruned", "features_only", "out_indices", "kwargs_filter", "scriptable", "exportable"),
    *("no_jit", "device", "dtype"),
)
# Parts of the names of arguments that reach a file, a hub or code, in this version of timm or another.
REFUSED_PART = re.compile(
    r"pretrained(?!_window)|checkpoint|cache|file|url|hub|weights|(^|_)((?<!drop_)path|dir|cfg|config|fn|cls)$"
)


def check_arguments(name: str, arguments: Mapping[str, Any], offered: Collection[str] | None) -> None:
    """Check constructor arguments from an untrusted source.

    Args:
        name: of the model, for the message.
        arguments: names and values.
        offered: the names that there are; None for a model of timm, whose constructor has the last word.

    Raises:
        UsageError: an unknown name, one that can reach a file or a hub, or a value that is not plain: numbers within
            100,000, `true`, `false`, null, words of letters and digits, and lists of these.
    """
    for key, value in arguments.items():
        is_refused = key in REFUSED or REFUSED_PART.search(key) or not WORD.match(key)
        if key not in offered if offered is not None else is_refused:
            nearest_ones = f" Nearest: {', '.join(nearest(key, offered))}." if offered else " Remove it."
            raise UsageError(f"{name} has no constructor value {_cut(repr(key))} that a file may set.{nearest_ones}")
        if not _is_plain(value, MAX_NUMBER if "depth" not in key else 1_000):
            raise UsageError(
                f"{key} of {name} must be a number, a word, true, false, null or a list of these; got"
                f" {_cut(repr(value))}."
            )


def _is_plain(value: Any, most: float, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < MAX_DEPTH and len(value) <= MAX_ITEMS and all(_is_plain(item, most, depth + 1) for item in value)
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, (int, float)):
        return math.isfinite(value) and abs(value) <= most
    return isinstance(value, str) and WORD.match(value) is not None


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
