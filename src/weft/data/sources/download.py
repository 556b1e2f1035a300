"""Files from the web, once: https only, bounded, whole or not there, and checked where a hash is given."""

from __future__ import annotations

import hashlib
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any

from weft.errors import DataError, UsageError
from weft.text import printable

MAX_DOWNLOAD_BYTES = 64 << 30
TIMEOUT_S = 30


def cache_dir() -> Path:
    """Where weft keeps what it can make or fetch again: WEFT_CACHE, or the user's cache directory."""
    if own := os.environ.get("WEFT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to https and to nothing else."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetched(url: str) -> Path:
    """The file behind a URL, downloaded unless it was before.

    Args:
        url: https; `#sha256=...` at its end states what the file must hash to.

    Raises:
        UsageError: another scheme.
        DataError: it cannot be had, is longer than allowed, shorter than announced, or another file than was stated.
    """
    _check(url)
    address, _, fragment = url.partition("#")
    expected = fragment.removeprefix("sha256=").lower() if fragment.startswith("sha256=") else None
    name = Path(urllib.parse.urlsplit(address).path).name or "file"
    path = cache_dir() / "downloads" / hashlib.sha256(address.encode()).hexdigest()[:16] / name
    if path.is_file():
        return path
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _download(address, beside)
        if expected is not None and found != expected:
            raise DataError(f"{printable(address)} must have the sha256 {expected[:12]}...; got {found[:12]}...")
        os.replace(beside, path)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(f"{printable(address)} must be within reach; it is not ({reason}).") from error
    finally:
        beside.unlink(missing_ok=True)
    return path


def _check(url: str) -> None:
    if urllib.parse.urlsplit(url).scheme != "https":
        raise UsageError(f"Data comes over https or from a disk; got '{printable(url)}'.")


def _download(address: str, beside: Path) -> str:
    """Fetches into a file, and tells its sha256."""
    opener = urllib.request.build_opener(_HttpsOnly)
    digest, size = hashlib.sha256(), 0
    with opener.open(address, timeout=TIMEOUT_S) as answer, beside.open("wb") as file:
        announced = int(answer.headers.get("Content-Length") or -1)
        most = min(MAX_DOWNLOAD_BYTES, shutil.disk_usage(beside.parent).free)
        if announced > most:
            raise DataError(f"{printable(address)} must fit; it has {announced:,} bytes, {most:,} are allowed.")
        while block := answer.read(1 << 20):
            size += len(block)
            if size > MAX_DOWNLOAD_BYTES:
                raise DataError(f"{printable(address)} must have at most {MAX_DOWNLOAD_BYTES:,} bytes; it has more.")
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if announced >= 0 and size != announced:
        raise DataError(f"{printable(address)} must come whole; {size:,} of {announced:,} bytes came.")
    return digest.hexdigest()
