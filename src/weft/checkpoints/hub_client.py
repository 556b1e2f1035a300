"""Download files and model directories from the Hugging Face hub, with the cache of huggingface_hub."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from weft.errors import CheckpointError
from weft.progress import is_quiet
from weft.text import reason_of

REPLY_SECONDS = 4  # to wait for a reply of a server
UNREACHABLE_SECONDS = 60.0  # after the hub has not replied, during which it is not asked again
_ask_from = 0.0  # in monotonic time


def is_reachable() -> bool:
    """Return whether the hub replies within 4 s; where it does not, it is not asked again for a minute."""
    global _ask_from
    if constants.HF_HUB_OFFLINE or time.monotonic() < _ask_from:
        return False
    replies: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(HTTPError, OSError):
            replies.append(get_session().head(constants.ENDPOINT, timeout=REPLY_SECONDS))

    # in a thread, since looking up an address, and trying several of them, have no time limit
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REPLY_SECONDS)
    if not replies:
        _ask_from = time.monotonic() + UNREACHABLE_SECONDS
    return bool(replies)


def hub_file(repo: str, file: str, *, revision: str | None = None, cache_dir: str | Path | None = None) -> str:
    """Return the path of a file of a repository on the hub; download it unless it is cached."""
    is_local = not is_reachable()
    with _bar():
        return hf_hub_download(
            repo,
            file,
            revision=revision,
            cache_dir=cache_dir,
            etag_timeout=REPLY_SECONDS,
            local_files_only=is_local,
        )


@contextlib.contextmanager
def _bar() -> Iterator[None]:
    """Let huggingface_hub show its bar, unless `weft.progress.quietly` is in effect."""
    if not is_quiet() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def fetch_model_dir(name: str) -> Path:
    """Download a model directory, OWNER/NAME or OWNER/NAME@COMMIT, from the hub, or take it from the cache."""
    from weft.checkpoints.config import CONFIG, WEIGHTS, read_config  # imports pydantic; `create_model` needs neither
    from weft.checkpoints.unknown import FILE as DETECTOR

    repo, _, revision = name.partition("@")
    folder = fetch_files(repo, (WEIGHTS, CONFIG), revision or None)
    if (folder / CONFIG).is_file() and read_config(folder).get("unknown"):
        fetch_files(repo, (DETECTOR,), folder.name)  # of the same commit
    return folder


def fetch_files(repo: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Download these files of a repository, or take them from the cache, and return their directory.

    Raises:
        CheckpointError: the repository, or the branch, tag or commit, does not exist or cannot be downloaded.
    """
    folder: Path | None = None
    with hub_errors(repo):
        for file in files:
            try:
                folder = Path(hub_file(repo, file, revision=revision)).parent
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:  # the caller names a file that is missing
                continue
            revision = folder.name  # the commit, so that all files are of the same
    if folder is None:
        raise CheckpointError(f"{repo} on the hub must hold {' and '.join(files)}; it has none of them.")
    return folder


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raise errors of huggingface_hub as a CheckpointError with advice."""
    try:
        yield
    except (HFValidationError, HTTPError, OSError) as err:
        match err:
            case HFValidationError():
                text = f"A model on the hub must be named OWNER/NAME; got '{repo}'."
            case LocalTokenNotFoundError():
                text = f"{repo} needs a login to the hub; you are not logged in. Run `hf auth login`, or set HF_TOKEN."
            case LocalEntryNotFoundError():
                text = (
                    f"{repo} must be on the hub or in its cache; it is not in the cache, and the hub cannot be reached."
                    " Connect to the internet, and try again."
                )
            case RevisionNotFoundError():
                text = f"{repo} must have this branch, tag or commit on the hub; it has not. Check the part after @."
            case RepositoryNotFoundError():
                text = (
                    f"{repo} must exist on the hub; it does not, or it is private. See https://huggingface.co/{repo}."
                    " For a private repository, run `hf auth login`."
                )
            case _:
                text = f"A request to the hub failed for {repo}: {reason_of(err)}."
        raise CheckpointError(text) from err
