"""Download files to the cache: https only, limited in size, written atomically, verified if a hash is given."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO, Any

from weft.errors import DataError, UsageError
from weft.files import cache_dir
from weft.system import rename
from weft.text import printable

MAX_DOWNLOAD_BYTES = 64 << 30
TIMEOUT_S = 30


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follow redirects to https only."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str) -> Path:
    """Return the path of a downloaded file; download it unless it is cached.

    Args:
        url: https URL; `#sha256=...` at its end states the hash of the file.

    Raises:
        UsageError: a scheme other than https.
        DataError: the download fails, is too large or incomplete, or does not have the stated hash.
    """
    _check(url)
    address, _, fragment = url.partition("#")
    expected = fragment.removeprefix("sha256=").lower() if fragment.startswith("sha256=") else None
    name = Path(urllib.parse.urlsplit(address).path).name or "file"
    key = address if expected is None else f"{address}#sha256={expected}"  # another hash is another file
    path = cache_dir() / "downloads" / hashlib.sha256(key.encode()).hexdigest()[:16] / name
    if path.is_file():
        return path
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = _download(address, partial)
        if expected is not None and digest != expected:
            raise DataError(f"{printable(address)} must have the sha256 {expected[:12]}...; got {digest[:12]}...")
        rename(partial, path)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise DataError(f"{printable(address)} must be reachable; the download failed ({reason}).") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _check(url: str) -> None:
    if urllib.parse.urlsplit(url).scheme != "https":
        raise UsageError(f"Data must be a local path or an https URL; got '{printable(url)}'.")


def _download(address: str, partial: Path) -> str:
    """Download to a file and return its sha256."""
    opener = urllib.request.build_opener(_HttpsOnly)
    digest, size = hashlib.sha256(), 0
    with opener.open(address, timeout=TIMEOUT_S) as response, partial.open("wb") as file:
        announced = int(response.headers.get("Content-Length") or -1)
        most = min(MAX_DOWNLOAD_BYTES, shutil.disk_usage(partial.parent).free)
        if announced > most:
            raise DataError(
                f"{printable(address)} must have at most {most:,} bytes (limit or free disk space); "
                f"it has {announced:,}."
            )
        while block := response.read(1 << 20):
            size += len(block)
            if size > MAX_DOWNLOAD_BYTES:
                raise DataError(f"{printable(address)} must have at most {MAX_DOWNLOAD_BYTES:,} bytes; it has more.")
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if announced >= 0 and size != announced:
        raise DataError(f"{printable(address)} must be downloaded completely; got {size:,} of {announced:,} bytes.")
    return digest.hexdigest()
