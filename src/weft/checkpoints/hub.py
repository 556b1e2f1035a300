"""Weights and model directories on the Hugging Face hub, and `create_model` with public weights."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor, nn

from weft.checkpoints.bundled import bundle_advice, bundle_of, read_bundle
from weft.checkpoints.downloads import cache_if_unreachable, hub_file, is_reachable, url_to_file
from weft.checkpoints.files import read_state_dict
from weft.checkpoints.finding import PREFIX
from weft.checkpoints.load import to_weft
from weft.errors import CheckpointError, nearest
from weft.lazy import LazyModule
from weft.models.building import create_model as build
from weft.models.families import VARIANTS
from weft.models.family import PublicWeights
from weft.text import reason_of

timm: Any = LazyModule("timm")

FILES = ("model.safetensors", "pytorch_model.bin")


def create_model(
    name: str, *, pretrained: bool = False, cache_dir: str | Path | None = None, **kwargs: Any
) -> nn.Module:
    """Build a model by name.

    Args:
        name: one of `list_models()`, or any model name of timm.
        pretrained: load the public weights, from the hub's cache, an installed package (extra `offline`) or the hub.
            Positions are resized to `img_size`, and the first convolution is adapted
            to `in_chans`; with a `num_classes` other than 1000 the head is initialised at random.
        cache_dir: directory for downloaded weights; None for that of huggingface_hub.
        **kwargs: constructor arguments of the network, such as `num_classes`, `img_size` (int or (height, width)),
            `in_chans`, `drop_path_rate`, and every ablation switch; and timm's `features_only`, `out_indices`,
            `device`, `dtype`.

    Raises:
        UsageError: an unknown name or argument, or an unsupported size.
        CheckpointError: there are no public weights, or they cannot be downloaded.
    """
    if pretrained and name in VARIANTS:
        kwargs["pretrained_cfg_overlay"] = dict(state_dict=fetch_pretrained(name, cache_dir))
    elif pretrained and bundle_of(name) is not None and not is_cached(name, cache_dir):
        kwargs["pretrained_cfg_overlay"] = dict(state_dict=read_bundle(name))
    elif cache_dir is not None:
        kwargs["cache_dir"] = cache_dir
    if not pretrained or "pretrained_cfg_overlay" in kwargs:
        return build(name, pretrained=pretrained, **kwargs)
    return _of_timm(name, cache_dir, kwargs)


def _of_timm(name: str, cache_dir: str | Path | None, kwargs: dict[str, Any]) -> nn.Module:
    """Build a model of timm with public weights."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name.split(".")[0]) else None
    if cfg is not None and cfg.hf_hub_id and not is_cached(name, cache_dir):
        with contextlib.suppress(HfHubHTTPError, HTTPError, OSError):  # timm knows other names, and states the reason
            hub_file(cfg.hf_hub_id, FILES[0], cache_dir=cache_dir)
    with cache_if_unreachable():
        try:
            return build(name, pretrained=True, **kwargs)
        except CheckpointError as error:
            if is_reachable():
                raise
            raise CheckpointError(
                f"The weights of {name} must be on the hub or in its cache; they are not in the cache, and the hub"
                " cannot be reached. Connect to the internet, or set HF_HOME to a cache that has them."
                f"{bundle_advice()}"
            ) from error


def has_public_weights(name: str) -> bool:
    """Return whether a model of weft or timm has public weights, on the hub or elsewhere."""
    if name in VARIANTS:
        return VARIANTS[name].weights is not None
    cfg = timm.get_pretrained_cfg(name)
    return bool(cfg and cfg.has_weights)


def is_cached(name: str, cache_dir: str | Path | None = None) -> bool:
    """Return whether the hub's cache has the public weights of a model."""
    if name in VARIANTS:
        source = VARIANTS[name].weights
        repo = source.repo if source else ""
    else:
        cfg = timm.get_pretrained_cfg(name)
        repo = (cfg and cfg.hf_hub_id) or ""
    return _is_in_hub_cache(repo, cache_dir)


def is_downloaded(source: PublicWeights) -> bool:
    """Return whether public weights are on this disk: in the cache of the hub, or as the file of their authors."""
    return _is_in_hub_cache(source.repo) or bool(source.file and _path_of(source.file).is_file())


def _is_in_hub_cache(repo: str, cache_dir: str | Path | None = None) -> bool:
    folder = None if cache_dir is None else str(cache_dir)
    return bool(repo) and any(isinstance(try_to_load_from_cache(repo, file, folder), str) for file in FILES)


def source_of(name: str) -> str:
    """Describe where `create_model(name, pretrained=True)` takes its weights from."""
    bundle = None if name in VARIANTS or is_cached(name) else bundle_of(name)
    if bundle is not None:
        return f"of {name} in the package {bundle.project} ({bundle.source})"
    if name in VARIANTS:
        weights = VARIANTS[name].weights
        return weights.repo if weights is not None else ""
    cfg = timm.get_pretrained_cfg(name)
    return (cfg and cfg.hf_hub_id) or f"of {name}"


def fetch_pretrained(name: str, cache_dir: str | Path | None = None) -> dict[str, Tensor]:
    """Download the public weights of a model of weft, or read them from the cache, under weft's state dict keys.

    Args:
        name: name of the model.
        cache_dir: directory for downloaded files; None for that of huggingface_hub.

    Raises:
        CheckpointError: there are none, or they cannot be downloaded.
    """
    source = VARIANTS[name].weights
    if source is None:
        with_weights = (known for known, variant in VARIANTS.items() if variant.weights and variant.weights.repo)
        closest = ", ".join(nearest(name, with_weights))
        raise CheckpointError(
            f"{name} has no public weights. Nearest models that have: {closest}. Or train it with weft train."
        )
    if not source.repo:
        raise CheckpointError(
            f"weft cannot download the weights of {name}: {source.by_hand}. Download the file yourself, then run"
            f" `weft convert FILE DIR --model {name}`."
        )
    return to_weft(read_state_dict(download_weights(source, cache_dir)))


def download_weights(source: PublicWeights, cache_dir: str | Path | None = None) -> str | Path:
    """Return a local file with weights, from the hub or else from the URL of the authors.

    Raises:
        CheckpointError: neither can be downloaded; with the reasons.
    """
    problems = []
    for file in FILES:
        try:
            return hub_file(source.repo, file, cache_dir=cache_dir)
        except LocalEntryNotFoundError:  # offline, and not in the cache
            problems.append("they are not in the cache, and the hub cannot be reached")
        except (EntryNotFoundError, RepositoryNotFoundError):
            problems.append(f"{file}: does not exist")
        except (HfHubHTTPError, OSError) as err:
            problems.append(f"{file}: {reason_of(err)}")
    if source.file:
        try:
            return _fetch_file(source.file, cache_dir)
        except (OSError, RuntimeError) as err:
            problems.append(f"{source.file}: {reason_of(err)}")
    reasons = "; ".join(dict.fromkeys(problems))
    raise CheckpointError(
        f"The weights {source.repo} must be on the hub or in its cache; {reasons}. Connect to the internet,"
        f" or download the file elsewhere and convert it: weft convert FILE DIR --model NAME.{bundle_advice()}"
    )


def _fetch_file(url: str, cache_dir: str | Path | None) -> Path:
    """Download a file or take it from the cache; verify it by the sha256 in its name.

    Raises:
        OSError: the download failed.
        RuntimeError: the sha256 differs.
    """
    path = _path_of(url, cache_dir)
    sha256 = path.stem.rpartition("-")[2]
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest().startswith(sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    url_to_file(url, path, sha256)
    return path


def _path_of(url: str, cache_dir: str | Path | None = None) -> Path:
    """Return where the file of a URL is cached."""
    return Path(cache_dir or Path(torch.hub.get_dir()) / "checkpoints") / url.rpartition("/")[2]


def fetch_files(name: str, files: Sequence[str]) -> Path:
    """Download files of a repository on the hub, or take them from the cache, and return their directory.

    Args:
        name: `hf-hub:OWNER/NAME`, or with a branch, tag or commit: `hf-hub:OWNER/NAME@v1`.
        files: names of the files; no others are downloaded.

    Raises:
        CheckpointError: the repository does not exist or cannot be downloaded.
    """
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    folder: Path | None = None
    with hub_errors(repo):
        for file in files:
            try:
                folder = Path(hub_file(repo, file, revision=revision or None)).parent
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
    except HFValidationError as err:
        raise CheckpointError(f"A model on the hub must be named OWNER/NAME; got '{repo}'.") from err
    except LocalTokenNotFoundError as err:
        raise CheckpointError(
            f"{repo} needs a login to the hub; you are not logged in. Run `hf auth login`, or set HF_TOKEN."
        ) from err
    except LocalEntryNotFoundError as err:
        raise CheckpointError(
            f"{repo} must be on the hub or in its cache; it is not in the cache, and the hub cannot be reached."
            " Connect to the internet, and try again."
        ) from err
    except RevisionNotFoundError as err:
        raise CheckpointError(
            f"{repo} must have this branch, tag or commit on the hub; it has not. Check the part after @."
        ) from err
    except RepositoryNotFoundError as err:
        raise CheckpointError(
            f"{repo} must exist on the hub; it does not, or it is private. See https://huggingface.co/{repo}. For a"
            " private repository, run `hf auth login`."
        ) from err
    except (HfHubHTTPError, HTTPError, OSError) as err:
        raise CheckpointError(f"A request to the hub failed for {repo}: {reason_of(err)}.") from err
