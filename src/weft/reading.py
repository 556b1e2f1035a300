"""Read files of other people within size limits, and validate them against a schema.

A file of weft's own may have been edited, cut off or put there by somebody else. So no more bytes are read than such a
file can have, nothing unpacks to more than it should, and every value has the type that the code after it relies on.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import CheckpointError, WeftError

T = TypeVar("T")
MAX_BYTES = 16 << 20


def read_bytes(path: Path, error: type[WeftError] = CheckpointError, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        error: what is raised.
        max_bytes: how many it may have.

    Raises:
        WeftError: of the kind `error`: missing, a folder or device, too large, or not readable.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"{path} must be a regular file; it is a folder, pipe or device.")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise error(f"{path} must be readable; {getattr(cause, 'strerror', None) or cause}.") from cause
    if len(data) > max_bytes:
        raise error(f"{path} must be smaller than {max_bytes >> 20} MiB; it is larger, and so not what it should be.")
    return data


def read_json(path: Path, kind: type[T], error: type[WeftError] = CheckpointError, max_bytes: int = MAX_BYTES) -> T:
    """The content of a JSON file.

    Args:
        path: the file.
        kind: the type that it must have, as pydantic understands it (a TypedDict, `dict[str, int]` ...).
        error, max_bytes: as in `read_bytes`.

    Raises:
        WeftError: of the kind `error`: as `read_bytes`, no JSON, or of another type; the message says where.
    """
    return parse_json(read_bytes(path, error, max_bytes), kind, str(path), error)


def parse_json(data: bytes, kind: type[T], name: str, error: type[WeftError] = CheckpointError) -> T:
    """As `read_json`, for text that was read before.

    Args:
        data: UTF-8.
        kind, error: as there.
        name: what the message calls it.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as cause:
        if b"\\ud" in data and (value := _with_surrogates(data, kind)) is not None:
            return value
        first = cause.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        got = repr(first.get("input"))
        got = got if len(got) <= 80 else f"{got[:77]}..."
        if first["type"] == "json_invalid":
            raise error(f"{name} must be JSON; {first['msg'].removeprefix('Invalid JSON: ')}.") from None
        must = first["msg"].replace("Input should", "it must").replace("Field required", "it is missing")
        raise error(f"{name} must be as weft writes it; {place or 'the whole'}: {must}; got {got}.") from None


def _with_surrogates(data: bytes, kind: type[T]) -> T | None:
    """JSON with the escapes by which Python keeps names that are not UTF-8; pydantic has no such text."""
    try:
        value = json.loads(data)
        _adapter(kind).validate_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"), strict=True)
    except (ValueError, RecursionError):
        return None
    return value


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def unzipped(data: bytes, max_bytes: int) -> bytes:
    """The content of gzip data.

    Raises:
        ValueError: it is damaged, or has more than `max_bytes`.
    """
    try:
        with gzip.open(io.BytesIO(data)) as file:
            text = file.read(max_bytes + 1)
    except (OSError, EOFError) as cause:
        raise ValueError(str(cause)) from cause
    if len(text) > max_bytes:
        raise ValueError(f"it unpacks to more than {max_bytes >> 20} MiB")
    return text
