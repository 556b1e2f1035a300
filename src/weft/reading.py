"""Read untrusted files within size limits, and validate them against a schema.

A file that weft wrote may have been edited, truncated or replaced. So the number of bytes that are read and
decompressed is limited, and the types of all values are checked before other code uses them.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import CheckpointError, WeftError

T = TypeVar("T")
MAX_BYTES = 16 << 20


def read_bytes(path: Path, error: type[WeftError] = CheckpointError, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: the file.
        error: exception class to raise.
        max_bytes: maximum size of the file in bytes.

    Raises:
        WeftError: an `error`: the file is missing, not a regular file, too large, or cannot be read.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"{path} must be a regular file; it is a folder, pipe or device.")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise error(f"{path} must be readable; {getattr(cause, 'strerror', None) or cause}.") from cause
    if len(data) > max_bytes:
        raise error(f"{path} must have at most {max_bytes >> 20} MiB; it is larger. Check that it is the right file.")
    return data


def read_json(path: Path, schema: type[T], error: type[WeftError] = CheckpointError, max_bytes: int = MAX_BYTES) -> T:
    """Read and validate a JSON file.

    Args:
        path: the file.
        schema: the required type, any that pydantic supports (a TypedDict, `dict[str, int]` ...).
        error, max_bytes: as in `read_bytes`.

    Raises:
        WeftError: an `error`: as in `read_bytes`, or the file is not JSON or does not match the schema.
    """
    return parse_json(read_bytes(path, error, max_bytes), schema, str(path), error)


def parse_json(data: bytes, schema: type[T], name: str, error: type[WeftError] = CheckpointError) -> T:
    """Parse and validate JSON in UTF-8.

    Args:
        data: the text.
        schema, error: as in `read_json`.
        name: name of the file in messages.

    Raises:
        WeftError: an `error`: `data` is not JSON or does not match the schema.
    """
    from pydantic import ValidationError

    try:
        return _adapter(schema).validate_json(data, strict=True)
    except ValidationError as cause:
        first = cause.errors(include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        got = repr(first.get("input"))
        got = got if len(got) <= 80 else f"{got[:77]}..."
        if first["type"] == "json_invalid":
            raise error(f"{name} must be JSON; {first['msg'].removeprefix('Invalid JSON: ')}.") from None
        rule = first["msg"].replace("Input should", "it must").replace("Field required", "it is missing")
        raise error(
            f"{name} must have the format that weft writes; {location or 'the content'}: {rule}; got {got}."
        ) from None


@cache
def _adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def unzipped(data: bytes, max_bytes: int) -> bytes:
    """Decompress gzip data.

    Raises:
        ValueError: the data is damaged, or decompresses to more than `max_bytes` bytes.
    """
    try:
        with gzip.open(io.BytesIO(data)) as file:
            text = file.read(max_bytes + 1)
    except (OSError, EOFError) as cause:
        raise ValueError(str(cause)) from cause
    if len(text) > max_bytes:
        raise ValueError(f"it decompresses to more than {max_bytes >> 20} MiB")
    return text
