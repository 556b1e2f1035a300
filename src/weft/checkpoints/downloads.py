"""Download files: one progress bar, and one short attempt where the network cannot be reached."""

from __future__ import annotations

import contextlib
import inspect
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.errors import HTTPError

from weft.progress import Work, working

CONNECT_SECONDS = 5.0  # to wait for a reply, instead of the retries of the hub's client
UNREACHABLE_SECONDS = 60.0  # after a failed attempt, during which there is no other
_failed_at = -UNREACHABLE_SECONDS


def is_reachable() -> bool:
    """Return whether the hub replies: one request, which is not repeated."""
    global _failed_at
    if constants.HF_HUB_OFFLINE or time.monotonic() - _failed_at < UNREACHABLE_SECONDS:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except (HTTPError, OSError):
        _failed_at = time.monotonic()
        return False
    return True


@contextlib.contextmanager
def cache_if_unreachable() -> Iterator[None]:
    """Let huggingface_hub use its cache alone while the hub cannot be reached."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not is_reachable()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_file(repo: str, file: str, *, revision: str | None = None, cache_dir: str | Path | None = None) -> str:
    """Return the path of a file of a repository on the hub; download it unless it is cached.

    Raises:
        OSError, HTTPError: of huggingface_hub.
    """
    with cache_if_unreachable(), working(f"downloading {repo}", unit="MB", quiet=False) as progress:
        bar = {"tqdm_class": _bar(progress)} if "tqdm_class" in _PARAMETERS else {}
        return hf_hub_download(repo, file, revision=revision, cache_dir=cache_dir, **bar)


def url_to_file(url: str, path: Path, sha256: str) -> None:
    """Download a file and verify the first digits of its sha256.

    Raises:
        OSError: the download failed.
        RuntimeError: the sha256 differs.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_SECONDS)  # torch.hub sets none
    try:
        with working(f"downloading {path.name}", unit="", quiet=False):
            torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256, progress=False)
    finally:
        socket.setdefaulttimeout(before)


_PARAMETERS = inspect.signature(hf_hub_download).parameters


def _bar(work: Work) -> Any:
    """Return a class with that part of tqdm's interface that huggingface_hub uses; it reports to `work`."""

    class Bar:
        def __init__(self, *args: Any, total: float | None = None, initial: float = 0, **kwargs: Any) -> None:
            self.n, self.total = initial, total
            work.begin_at(initial / 1e6)
            self.update(0)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, count: float | None = 1) -> None:
            """Add bytes that are written to the file."""
            self.n += count or 0
            work.update(self.n / 1e6, None if self.total is None else self.total / 1e6)

        def update_transfer(self, count: float | None = 1) -> None:
            """Ignore bytes that were received but are not written yet."""

        def _ignore(self, *args: Any, **kwargs: Any) -> None:
            pass

        set_postfix_str = set_transfer_postfix_str = set_description_str = refresh = close = _ignore

    return Bar
