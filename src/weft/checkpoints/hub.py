"""Build models with public weights, which are on the hub, at their authors', or in an installed package."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from torch import Tensor, nn

from weft.checkpoints.bundled import bundle_advice, bundle_of, read_bundle
from weft.checkpoints.files import read_state_dict
from weft.checkpoints.hub_client import REPLY_SECONDS, hub_file
from weft.checkpoints.load import to_weft
from weft.errors import CheckpointError, nearest
from weft.files import sha256_of, write_file
from weft.lazy import LazyModule
from weft.models.building import create_model as build
from weft.models.families import VARIANTS
from weft.models.family import PublicWeights
from weft.models.imagenet import imagenet_classes
from weft.models.papers import Printed, printed_rows, row_of
from weft.progress import Work, say
from weft.text import reason_of

timm: Any = LazyModule("timm")

UNKNOWN = "unknown licence"
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
    if not pretrained:
        return build(name, **kwargs)
    if weights := _local_weights(name, cache_dir):
        kwargs["pretrained_cfg_overlay"] = {**(kwargs.get("pretrained_cfg_overlay") or {}), **weights}
    elif cache_dir is not None:
        kwargs["cache_dir"] = cache_dir
    model: Any = build(name, pretrained=True, **kwargs)
    if weights and hasattr(model, "pretrained_cfg"):
        cfg = {key: value for key, value in model.pretrained_cfg.items() if key not in weights}
        model.pretrained_cfg = model.default_cfg = cfg
    return model


def load_public(name: str) -> tuple[Any, list[str]]:
    """Load a public model in evaluation mode, with its preprocessing, and the names of its ImageNet classes.

    Raises:
        CheckpointError: there are no public weights, they have no classifier, or they cannot be downloaded.
    """
    if name not in VARIANTS:
        _check_classifier(name)
    model: Any = create_model(name, pretrained=True)
    classes = imagenet_classes(model.num_classes)
    assert classes is not None, name  # of the variants, and checked above for the others
    if (row := printed_row(name)) is not None and row.preprocessing:  # DeiT crops from 256 pixels, timm does not
        model.pretrained_cfg = model.default_cfg = {**dict(model.pretrained_cfg), **row.preprocessing}
    say(f"Public weights {source_of(name)}.")
    return model.eval(), classes.names


def _check_classifier(name: str) -> None:
    """Check that timm has public weights of this name, with ImageNet classes."""
    cfg = timm.get_pretrained_cfg(name)
    tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    with_classes = [tag for tag in tags if (c := timm.get_pretrained_cfg(tag)) and imagenet_classes(c.num_classes)]
    instead = f" Tags with classes: {', '.join(with_classes[:3])}." if with_classes else ""
    if cfg is None or not cfg.has_weights:
        raise CheckpointError(
            f"A model name needs public weights; {name} has none.{instead} Or train it: weft train DATA --model {name}"
        )
    if imagenet_classes(cfg.num_classes) is None:
        outputs = (
            "no classifier: they compute features"
            if cfg.num_classes == 0
            else f"{cfg.num_classes} outputs without known class names: features, or classes of another dataset"
        )
        raise CheckpointError(
            f"A model name needs public weights that classify into ImageNet's classes; those of {name} have"
            f" {outputs}.{instead} To classify your own images, train it: weft train DATA --model {name}"
        )


def _local_weights(name: str, cache_dir: str | Path | None) -> dict[str, Any]:
    """Return the entry of timm's `pretrained_cfg` for public weights on this disk, downloaded if necessary.

    It is empty for weights that are not on the hub, which timm downloads from elsewhere, and for unknown names.
    """
    if name in VARIANTS:
        return {"state_dict": fetch_pretrained(name, cache_dir)}
    if bundle_of(name) and not is_cached(name, cache_dir):
        return {"state_dict": read_bundle(name)}
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
    if cfg is None or not cfg.hf_hub_id:
        return {}
    file = cfg.hf_hub_filename or FILES[1]
    files = dict.fromkeys((file.replace(FILES[1], FILES[0]), file))  # as timm, which prefers safetensors
    return {"file": str(download_weights(PublicWeights(cfg.hf_hub_id), cache_dir, files=[*files]))}


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


def download_weights(
    source: PublicWeights, cache_dir: str | Path | None = None, *, files: Sequence[str] = FILES
) -> str | Path:
    """Return a local file with weights: the first of `files` in a repository on the hub, or else that of the authors.

    Raises:
        CheckpointError: neither can be downloaded; with the reasons.
    """
    problems = []
    for file in files:
        try:
            return hub_file(source.repo, file, cache_dir=cache_dir)
        except LocalEntryNotFoundError:  # offline, and not in the cache
            problems.append("they are not in the cache, and the hub cannot be reached")
        except (EntryNotFoundError, RepositoryNotFoundError):
            problems.append(f"{file}: does not exist")
        except (HTTPError, OSError) as err:
            problems.append(f"{file}: {reason_of(err)}")
    if source.file:
        try:
            return _fetch_file(source.file, cache_dir)
        except (OSError, HTTPException) as err:
            problems.append(f"{source.file}: {reason_of(err)}")
    raise CheckpointError(
        f"The weights {source.repo} must be on the hub or in its cache; {'; '.join(dict.fromkeys(problems))}. Connect"
        " to the internet, set HF_HOME to a cache that has them, or download the file elsewhere and convert it: weft"
        f" convert FILE DIR --model NAME.{bundle_advice()}"
    )


def _fetch_file(url: str, cache_dir: str | Path | None) -> Path:
    """Download a file or take it from the cache; verify it by the sha256 in its name."""
    path = Path(cache_dir or Path(torch.hub.get_dir()) / "checkpoints") / url.rpartition("/")[2]
    sha256 = path.stem.rpartition("-")[2]
    if path.is_file() and sha256_of(path).startswith(sha256):
        return path
    with Work(f"downloading {path.name}", unit=""), urlopen(url, timeout=REPLY_SECONDS) as reply:
        content = reply.read()
    actual = hashlib.sha256(content).hexdigest()[: len(sha256)]
    if actual != sha256:
        raise OSError(f"its sha256 must begin with {sha256}; it begins with {actual}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
    return path


def public_weights(name: str) -> PublicWeights | None:
    """Return where the public weights of a model of weft or timm are; None if it has none."""
    if name in VARIANTS:
        return VARIANTS[name].weights
    cfg = timm.get_pretrained_cfg(name)
    return PublicWeights(cfg.hf_hub_id or "", licence=cfg.license or UNKNOWN) if cfg and cfg.has_weights else None


def printed_row(name: str) -> Printed | None:
    """Return the row of a paper with the accuracy of the public weights of a model; None: no table has them."""
    if name in VARIANTS:
        own = row_of(name)
        return own if own is not None and own.weights == "own" else None
    weights = public_weights(name)
    rows = [row for row in printed_rows() if weights and row.weights.partition(" ")[0] == weights.repo != ""]
    return rows[-1] if rows else None  # DeiT's own, which comes after those of other papers


def is_cached(name: str, cache_dir: str | Path | None = None) -> bool:
    """Return whether the hub's cache has the public weights of a model."""
    weights, folder = public_weights(name), None if cache_dir is None else str(cache_dir)
    if weights is None or not weights.repo:
        return False
    return any(isinstance(try_to_load_from_cache(weights.repo, file, folder), str) for file in FILES)


def licence_of(name: str) -> str:
    """Return the licence of the public weights of a model, as an SPDX identifier."""
    weights = public_weights(name)
    return UNKNOWN if weights is None else weights.licence


def source_of(name: str) -> str:
    """Describe where `create_model(name, pretrained=True)` takes its weights from, with their licence."""
    if (bundle := bundle_of(name)) and not is_cached(name):
        return f"of {name} in the package {bundle.project} ({bundle.source})"
    weights = public_weights(name)
    return f"{weights.repo or f'of {name}'} ({weights.licence})" if weights is not None else f"of {name}"
