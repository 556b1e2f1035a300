"""Download the public weights of weft's models, and convert their names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor

from weft.checkpoints.files import read_state_dict
from weft.checkpoints.load import to_weft
from weft.errors import CheckpointError, nearest
from weft.models.families import VARIANTS
from weft.models.family import PublicWeights

FILES = ("model.safetensors", "pytorch_model.bin")


def fetch_pretrained(name: str, cache_dir: str | Path | None = None) -> dict[str, Tensor]:
    """The public weights of one of our models, under our names; from the hub, or from the cache of an earlier time.

    Args:
        name: of the model.
        cache_dir: where the hub's files are kept; None for huggingface_hub's own place.

    Raises:
        CheckpointError: there are none, or they cannot be had.
    """
    source = VARIANTS[name].weights
    if source is None:
        on_hub = (known for known, variant in VARIANTS.items() if variant.weights and variant.weights.repo)
        have = ", ".join(nearest(name, on_hub))
        raise CheckpointError(f"{name} has no public weights. Nearest that have: {have}. Or train: weft train DATA.")
    if not source.repo:
        raise CheckpointError(
            f"No hub has the weights of {name}: {source.by_hand}. Fetch the file by hand, then"
            f" `weft convert FILE DIR --model {name}`."
        )
    return to_weft(read_state_dict(_download(source, cache_dir)))


def _download(source: PublicWeights, cache_dir: str | Path | None) -> str | Path:
    """A file of weights on this disk: from the hub, else from the authors' own place.

    Raises:
        CheckpointError: neither can be had; it says why.
    """
    problems = []
    for file in FILES:
        try:
            return hf_hub_download(source.repo, file, cache_dir=cache_dir)
        except LocalEntryNotFoundError:  # offline, and not in the cache
            problems.append(f"{file}: not in the cache, and the hub cannot be reached")
        except (EntryNotFoundError, RepositoryNotFoundError):
            problems.append(f"{file}: not there")
        except (HfHubHTTPError, OSError) as err:
            problems.append(f"{file}: {str(err).splitlines()[0]}")
    if source.file:
        try:
            return _fetch_file(source.file, cache_dir)
        except (OSError, RuntimeError) as err:
            problems.append(f"{source.file}: {str(err).splitlines()[0]}")
    raise CheckpointError(
        f"The weights {source.repo} must be on the hub or in its cache; {'; '.join(problems)}. Go online once, or"
        " download the file elsewhere and pass it to load_checkpoint."
    )


def _fetch_file(url: str, cache_dir: str | Path | None) -> Path:
    """A file by its address, kept under its name; it must have the sha256 that the name tells, fresh or kept.

    Raises:
        OSError: it cannot be fetched.
        RuntimeError: it has another sha256.
    """
    folder = Path(cache_dir or Path(torch.hub.get_dir()) / "checkpoints")
    path = folder / url.rpartition("/")[2]
    sha256 = path.stem.rpartition("-")[2]
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest().startswith(sha256):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256, progress=False)
    return path
