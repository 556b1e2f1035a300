"""Weights that their authors gave to everybody: where they are, and how they get here, under our names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor

from weft.checkpoints.files import read_state_dict
from weft.checkpoints.layout import convert
from weft.checkpoints.load import recognise
from weft.errors import CheckpointError, nearest

FILES = ("model.safetensors", "pytorch_model.bin")


class Source(NamedTuple):
    """Where the weights of a model are.

    Attributes:
        repo: repository on the Hugging Face hub; '' where there is none.
        by_hand: how a person gets the file, where no hub has it.
        size: image side that they were trained at, in pixels.
    """

    repo: str
    by_hand: str = ""
    size: int = 224


# transformers runs CvT with another activation than these weights were trained with; here they get their own back.
_CEIT = "one archive for all CeiT on Google Drive, file 1S19SQUic9ILBGNkcJTOy74MGoj-JRM4x"
PUBLIC: dict[str, Source] = {
    "levit_128s": Source("timm/levit_128s.fb_dist_in1k"),
    "levit_128": Source("timm/levit_128.fb_dist_in1k"),
    "levit_192": Source("timm/levit_192.fb_dist_in1k"),
    "levit_256": Source("timm/levit_256.fb_dist_in1k"),
    "levit_384": Source("timm/levit_384.fb_dist_in1k"),
    "cvt_13": Source("microsoft/cvt-13"),
    "cvt_21": Source("microsoft/cvt-21"),
    "cvt_w24": Source("microsoft/cvt-w24-384-22k", size=384),
    "ceit_tiny_patch16_224": Source("", _CEIT),
    "ceit_small_patch16_224": Source("", _CEIT),
    "ceit_base_patch16_224": Source("", _CEIT),
    "ceit_tiny_patch16_384": Source("", _CEIT, size=384),
    "ceit_small_patch16_384": Source("", _CEIT, size=384),
}


def fetch_pretrained(name: str, cache_dir: str | Path | None = None) -> dict[str, Tensor]:
    """The public weights of one of our models, under our names; from the hub, or from the cache of an earlier time.

    Args:
        name: of the model.
        cache_dir: where the hub's files are kept; None for huggingface_hub's own place.

    Raises:
        CheckpointError: there are none, or they cannot be had.
    """
    source = PUBLIC.get(name)
    if source is None:
        have = ", ".join(nearest(name, (known for known, row in PUBLIC.items() if row.repo)))
        raise CheckpointError(f"{name} has no public weights. Nearest that have: {have}. Or train: weft train DATA.")
    if not source.repo:
        raise CheckpointError(
            f"No hub has the weights of {name}: {source.by_hand}. Fetch the file by hand, then"
            f" `weft convert FILE DIR --model {name}`."
        )
    path = _download(source.repo, cache_dir)
    state = read_state_dict(path)
    layout = recognise(state)
    return convert(layout, state).state if layout else state


def _download(repo: str, cache_dir: str | Path | None) -> str:
    problems = []
    for file in FILES:
        try:
            return hf_hub_download(repo, file, cache_dir=cache_dir)
        except LocalEntryNotFoundError:  # offline, and not in the cache
            problems.append(f"{file}: not in the cache, and the hub cannot be reached")
        except (EntryNotFoundError, RepositoryNotFoundError):
            problems.append(f"{file}: not there")
        except (HfHubHTTPError, OSError) as err:
            problems.append(f"{file}: {str(err).splitlines()[0]}")
    raise CheckpointError(
        f"The weights {repo} must be on the hub or in its cache; {'; '.join(problems)}. Go online once, or download the"
        " file elsewhere and pass it to load_checkpoint."
    )
