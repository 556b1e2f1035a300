"""Model directories on the Hugging Face hub: `hf-hub:OWNER/NAME` is accepted wherever a model directory is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from weft.errors import CheckpointError

PREFIX = "hf-hub:"  # timm's word


def fetched(name: str, files: Sequence[str]) -> Path:
    """A directory of the hub on this disk; from the cache where nothing has changed or the hub cannot be reached.

    Args:
        name: `hf-hub:OWNER/NAME`, or with a branch, tag or commit behind it, `hf-hub:OWNER/NAME@v1`.
        files: which of its files are wanted; no others are fetched.

    Raises:
        CheckpointError: there is none, or it cannot be had.
    """
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    with told(repo):
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=list(files)))


@contextlib.contextmanager
def told(repo: str) -> Iterator[None]:
    """What the hub says, as a sentence.

    Raises:
        CheckpointError: whatever it was.
    """
    try:
        yield
    except HFValidationError as err:
        raise CheckpointError(f"A model on the hub is called OWNER/NAME; got '{repo}'.") from err
    except LocalTokenNotFoundError as err:
        raise CheckpointError(
            f"The hub must know who asks for {repo}; nobody is logged in. Run `hf auth login`, or set HF_TOKEN."
        ) from err
    except LocalEntryNotFoundError as err:
        raise CheckpointError(
            f"{repo} must be on the hub or in its cache; it is not in the cache, and the hub cannot be reached."
            " Go online once."
        ) from err
    except RevisionNotFoundError as err:
        raise CheckpointError(f"{repo} is on the hub, but not with that branch, tag or commit.") from err
    except RepositoryNotFoundError as err:
        raise CheckpointError(
            f"The hub must have {repo}; it has not, or not for you. See https://huggingface.co/{repo}, and log in with"
            " `hf auth login` where it is private."
        ) from err
    except (HfHubHTTPError, HTTPError, OSError) as err:
        said = str(err) or type(err).__name__
        raise CheckpointError(f"The hub did not do what was asked with {repo}: {said.splitlines()[0]}") from err
