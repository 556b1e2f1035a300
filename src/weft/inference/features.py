"""Features of images: the inputs of a network's classifier, cached on disk.

A cached feature is found by the pixels that the network would receive, and by its weights, settings and code, so a
changed file, crop, normalisation or network never meets an old feature.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.checkpoints.unknown import unit_length as unit_length
from weft.data.loading.loader import ImageLoader
from weft.deploy import ExportedModel
from weft.errors import CheckpointError, UsageError
from weft.files import cache_file, write_whole
from weft.layers.norm import NormLinear, affine_of
from weft.models.contract import evaluation_mode
from weft.models.families import family_of
from weft.models.family import resolve
from weft.runtime import Runtime
from weft.text import printable
from weft.version import __version__

MAX_CACHED = 2_000_000_000  # bytes of features in the file of a network
KNOWN_CODE = {"torch", "timm", "weft", "builtins", "abc", "typing"}
NOT_SETTINGS = {  # attributes of a module that do not change its features, or that are hashed separately
    *vars(nn.Module()),
    *("num_classes", "grad_checkpointing", "confidence", "unknown", "drop_rate"),
    *("pretrained_cfg", "default_cfg", "pretrained_model_args", "model_args", "_model_args", "_traits"),
}
NO_EFFECT = {  # modules that do nothing in evaluation mode
    *("torch.nn.modules.linear.Identity", "torch.nn.modules.dropout.Dropout"),
    *("weft.layers.mlp.DropPath", "timm.layers.drop.DropPath"),
}
ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")


def classifiers(network: nn.Module) -> list[nn.Linear]:
    """Return the last linear layers of a network, one per head.

    Raises:
        UsageError: the network has no linear classifier, so that no features can be taken from it.
    """
    layers = [[layer for layer in head.modules() if isinstance(layer, nn.Linear)] for head in _heads(network)]
    if isinstance(network, ExportedModel):
        raise UsageError(
            "Features are computed by a network; an export gives class scores only. Pass the run directory or the model"
            " directory that it was made from."
        )
    if not layers or any(len(numbers) != 1 for numbers in layers):
        raise UsageError(
            f"A network must end in a linear classifier to give features; {type(network).__name__} does not. Choose"
            " another --model, or train all layers with --set head_init=random."
        )
    return [numbers[0] for numbers in layers]


def _heads(network: nn.Module) -> list[nn.Module]:
    get_classifier = getattr(network, "get_classifier", None)
    name = (getattr(network, "pretrained_cfg", None) or {}).get("classifier")
    heads = get_classifier() if get_classifier else network.get_submodule(name) if isinstance(name, str) else ()
    return list(heads) if isinstance(heads, (tuple, list)) else [heads]


class FeatureReader:
    """Reader of the features of a network, with their cache; a context manager, which saves the cache at its end.

    Inside, the network is in evaluation mode.

    Args:
        network: on its device.
        runtime: device and precision.
        is_cached: use the cache on disk, if the code of the network is known.

    Attributes:
        widths: number of features of each classifier.

    Raises:
        UsageError: the network has no linear classifier.
    """

    def __init__(self, network: nn.Module, runtime: Runtime, *, is_cached: bool = True) -> None:
        self.network, self.runtime = network, runtime
        self.widths = [layer.in_features for layer in classifiers(network)]
        key = _cache_key(network, runtime) if is_cached else None
        path = None if key is None else cache_file("features", f"{key}.npz")
        self._cache = None if path is None else _Cache(path, sum(self.widths))
        self._mode = contextlib.ExitStack()

    def __enter__(self) -> FeatureReader:
        self._mode.enter_context(evaluation_mode(self.network))
        return self

    def __exit__(self, *_: object) -> None:
        self._mode.close()
        if self._cache is not None:
            self._cache.save()

    def __call__(self, images: Tensor) -> np.ndarray:
        """Return the features of images (b c h w) as (b features) in float32; of several classifiers side by side."""
        if self._cache is None:
            return _features(self.network, images, self.runtime)
        rows = self._cache.rows
        keys = [hashlib.sha256(image.numpy().tobytes()).digest() for image in images]
        missing = [place for place, key in enumerate(keys) if key not in rows]
        if missing:
            computed = _features(self.network, images[missing], self.runtime)
            rows.update({keys[place]: row for place, row in zip(missing, computed, strict=True)})
        for key in dict.fromkeys(keys):  # to the end: the first rows are dropped first
            rows[key] = rows.pop(key)
        return np.stack([rows[key] for key in keys])


def read_features(
    network: nn.Module,
    batches: ImageLoader,
    runtime: Runtime,
    on_batch: Callable[[int], None] = lambda count: None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the features of images in evaluation mode, for each image as it is and mirrored, with the cache on disk.

    Args:
        network: on its device.
        batches: images with the preprocessing of the network.
        runtime: device and precision.
        on_batch: called with the number of images of every batch.

    Returns:
        features: per head (images views features), in float32.
        labels: (images) class indices; LOST for an image that can no longer be read.

    Raises:
        UsageError: the network has no linear classifier.
        CheckpointError: features are not finite.
    """
    rows, labels = [], []
    with FeatureReader(network, runtime) as reader:
        for images, targets in batches:
            rows.append(np.stack([reader(images), reader(images.flip(-1))], axis=1))
            is_finite = np.isfinite(rows[-1]).all(axis=(1, 2))
            if not is_finite.all():
                key = batches.dataset.source.keys[len(labels) + int(is_finite.argmin())]
                raise CheckpointError(
                    f"The features of {type(network).__name__} must be finite; those of {printable(key)} are not. The"
                    " weights are damaged: start from others."
                )
            labels += targets.tolist()
            on_batch(len(targets))
    return split_heads(network, np.concatenate(rows)), np.array(labels)


def split_heads(network: nn.Module, features: np.ndarray) -> list[np.ndarray]:
    """Split features (..., features) of all classifiers side by side into those of each classifier."""
    ends = np.cumsum([layer.in_features for layer in classifiers(network)])
    return np.split(features, ends[:-1], axis=-1)


def folded_inputs(network: nn.Module, features: np.ndarray) -> np.ndarray:
    """Return the inputs (images features) of the classifier of the folded network.

    Args:
        network: not folded.
        features: (images features), the inputs of its classifiers, side by side.
    """
    head = _heads(network)[0]
    if not isinstance(head, NormLinear):
        return features
    factor, term = (tensor.detach().cpu().numpy() for tensor in affine_of(head.bn))
    own = split_heads(network, features)[0]
    is_constant = np.abs(factor) < 1e-8  # such a channel does not depend on the input
    return ((own - term) / np.where(is_constant, 1, factor) * ~is_constant).astype(np.float32)


def logits_of(network: nn.Module, features: np.ndarray) -> np.ndarray:
    """Return the logits (images classes) of a network for features (images features); of several heads their mean."""
    logits = []
    for layer, own in zip(classifiers(network), split_heads(network, features), strict=True):
        weight, bias = (
            None if tensor is None else tensor.detach().float().cpu() for tensor in (layer.weight, layer.bias)
        )
        assert weight is not None
        logits.append(nn.functional.linear(torch.from_numpy(np.ascontiguousarray(own)), weight, bias).numpy())
    return np.mean(logits, axis=0)


def _features(network: nn.Module, images: Tensor, runtime: Runtime) -> np.ndarray:
    """Return the inputs of all classifiers (images features), side by side."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float().cpu()))
        for layer in classifiers(network)
    ]
    try:
        with torch.inference_mode(), runtime.autocast():
            network(images.to(runtime.device))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(inputs, dim=1).numpy()


def fingerprint(network: nn.Module, runtime: Runtime) -> str:
    """Return a hash of the weights except those of the classifiers, of weft's switches and of the precision.

    It identifies the weights of one network. The key of the cache also distinguishes networks with equal weights.
    """
    heads = {id(tensor) for layer in classifiers(network) for tensor in layer.parameters()}
    switches = json.dumps(_switches(network), sort_keys=True)
    digest = hashlib.sha256(f"{type(network).__qualname__} {switches} {runtime.precision} one view per row".encode())
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in heads:
            digest.update(name.encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()[:32]


def _cache_key(network: nn.Module, runtime: Runtime) -> str | None:
    """Return a hash of all that determines the features of given pixels; None if this cannot be known.

    The code of torch, timm and weft is known by versions, that of other classes by the source of their modules.
    """
    versions = f"weft {__version__}, timm {importlib.metadata.version('timm')}"
    digest = hashlib.sha256(f"{fingerprint(network, runtime)} {versions}".encode())
    heads, sources = {id(layer) for layer in classifiers(network)}, set[str]()
    for name, module in network.named_modules():
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if id(module) in heads or kind in NO_EFFECT:
            continue
        settings = repr(sorted((key, repr(value)) for key, value in vars(module).items() if key not in NOT_SETTINGS))
        homes = {parent.__module__ for parent in type(module).__mro__}
        own = {home for home in homes if home.partition(".")[0] not in KNOWN_CODE}
        if own and ADDRESS.search(settings):  # an object or a function whose content is unknown
            return None
        sources |= own
        digest.update(f"{name} {kind} {ADDRESS.sub('', settings)}".encode(errors="backslashreplace"))
    for name, buffer in network.named_buffers():  # the state dict lacks those that are not persistent
        digest.update(name.encode())
        digest.update(_bytes(buffer))
    try:
        for home in sorted(sources):
            digest.update(inspect.getsource(sys.modules[home]).encode(errors="backslashreplace"))
    except (OSError, TypeError, KeyError):  # code of a notebook or a command line
        return None
    return digest.hexdigest()[:32]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _switches(network: nn.Module) -> dict[str, Any]:
    """Return the constructor arguments that no weight shows, of a network of weft that is not folded."""
    family = family_of(network)
    built_values = resolve(family.built_values) if family else None
    if built_values is None:
        return {}
    try:
        return built_values(network)
    except AttributeError:  # folding has replaced the layers that show them
        return {}


class DamagedFileError(Exception):
    """A file of arrays that is missing, damaged or lacks an array."""


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return arrays of an .npz file by name.

    Raises:
        DamagedFileError: there is no such file, or it is damaged.
    """
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except Exception as error:  # what a damaged file raises depends on the damaged byte: a dozen kinds are known
        raise DamagedFileError(str(path)) from error


class _Cache:
    """Features by the hash of the pixels, in one file per network, which keeps those that were used last.

    A file that cannot be read is replaced.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.rows = path, dict[bytes, np.ndarray]()
        with contextlib.suppress(DamagedFileError):
            arrays = read_arrays(path, ("keys", "features"))
            keys, features = arrays["keys"], arrays["features"]
            if features.shape[1:] == (width,) and keys.shape == (len(features), 32):
                self.rows = {key.tobytes(): row for key, row in zip(keys, features, strict=True)}
        self.known = len(self.rows)

    def save(self) -> None:
        if len(self.rows) == self.known:
            return
        limit = MAX_CACHED // next(iter(self.rows.values())).nbytes
        kept = dict(list(self.rows.items())[-limit:])
        buffer = io.BytesIO()
        keys = np.frombuffer(b"".join(kept), np.uint8).reshape(-1, 32)
        content: dict[str, Any] = {"keys": keys, "features": np.stack(list(kept.values()))}
        np.savez(buffer, **content)
        with contextlib.suppress(OSError):  # a full or read-only disk costs only the cache
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, buffer.getvalue())
