"""Features of images: the inputs of a network's classifier, cached on disk.

A cached feature is found by the pixels that the network would receive, and by its name, arguments, weights and
precision, so a changed file, crop, normalisation or network never meets an old feature.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import itertools
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from weft.cache import CacheTable
from weft.data.loader import ImageLoader
from weft.deploy.folding import fastest
from weft.errors import CheckpointError, UsageError
from weft.machine.runtime import Runtime
from weft.models.base import Backbone
from weft.models.contract import evaluation_mode
from weft.models.families import plugin_of
from weft.text import printable
from weft.version import __version__

MAX_CACHED = 2_000_000_000  # bytes of the file of the cache
FILE = "features.sqlite3"  # in the cache directory
PENDING = 1_000  # new features in memory, which are written in one transaction
SHOWN = ("num_classes", "in_chans", "img_size", "global_pool")  # arguments that weights, `input_size` or the pool show
CODE = {"torch", "timm", "weft"}  # packages whose code their versions identify


def classifiers(network: nn.Module) -> list[nn.Linear]:
    """Return the last linear layers of a network, one per head.

    Raises:
        UsageError: the network has no linear classifier, so that no features can be taken from it.
    """
    layers = _classifiers(network)
    if not layers:
        raise UsageError(
            f"A network must end in a linear classifier to give features; {type(network).__name__} does not. Choose"
            " another --model, or train all layers with --set head_init=random."
        )
    return layers


def has_classifiers(network: nn.Module) -> bool:
    """Return whether each head of a network ends in a linear layer, so that features can be taken from it."""
    return bool(_classifiers(network))


def _classifiers(network: nn.Module) -> list[nn.Linear]:
    """Return the last linear layers of a network, one per head; none if a head has no or several linear layers."""
    get_classifier = getattr(network, "get_classifier", None)
    name = (getattr(network, "pretrained_cfg", None) or {}).get("classifier")
    heads = get_classifier() if get_classifier else network.get_submodule(name) if isinstance(name, str) else ()
    heads = heads if isinstance(heads, (tuple, list)) else [heads]
    layers = [[layer for layer in head.modules() if isinstance(layer, nn.Linear)] for head in heads]
    return [layer for of_head in layers for layer in of_head] if all(len(own) == 1 for own in layers) else []


@contextlib.contextmanager
def classifier_inputs(network: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs (b features) of the classifiers of a network in a forward pass inside the `with` block.

    Yields:
        A list that gets one tensor per head, in float32 on the CPU; it stays empty for a network without linear
        classifiers.
    """
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float().cpu()))
        for layer in _classifiers(network)
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


class FeatureReader:
    """Reader of the features of a network, with their cache; a context manager, which saves new features at its end.

    Inside, the network is in evaluation mode. Of a network of another library, a folded copy runs.

    Args:
        network: on its device; unchanged.
        runtime: device and precision.
        is_cached: use the cache on disk, if `network_key` knows the network.

    Attributes:
        widths: number of features of each classifier.

    Raises:
        UsageError: the network has no linear classifier.
    """

    def __init__(self, network: nn.Module, runtime: Runtime, *, is_cached: bool = True) -> None:
        is_own = isinstance(network, Backbone)  # folded, LeViT would have one classifier in place of two
        self.network, self.runtime = network if is_own else fastest(network, runtime.device), runtime
        self.widths = [layer.in_features for layer in classifiers(network)]
        key = network_key(self.network, runtime) if is_cached else None
        self._cache = None if key is None else FeatureCache(key, sum(self.widths))
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> FeatureReader:
        self._inside.enter_context(evaluation_mode(self.network))
        if self._cache is not None:
            self._inside.callback(self._cache.save)
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    def __call__(self, images: Tensor) -> np.ndarray:
        """Return the features of images (b c h w) as (b features) in float32; of several classifiers side by side."""
        if self._cache is None:
            return _features(self.network, images, self.runtime)
        keys = [self._cache.key_of(image.numpy()) for image in images]
        rows = self._cache.get(keys)
        missing = [place for place, key in enumerate(keys) if key not in rows]
        if missing:
            computed = _features(self.network, images[missing], self.runtime)
            new = {keys[place]: row for place, row in zip(missing, computed, strict=True)}
            self._cache.put(new)
            rows |= new
        return np.stack([rows[key] for key in keys])


def read_features(
    network: nn.Module,
    batches: ImageLoader,
    runtime: Runtime,
    on_batch: Callable[[int], None] = lambda count: None,
    *,
    is_mirrored: bool = True,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the features of images in evaluation mode, with the cache on disk.

    Args:
        network: on its device.
        batches: images with the preprocessing of the network.
        runtime: device and precision.
        on_batch: called with the number of images of every batch.
        is_mirrored: also read the mirror image of every image, as its second view.

    Returns:
        features: per head (images views features), in float32.
        labels: (images) class indices.

    Raises:
        UsageError: the network has no linear classifier.
        CheckpointError: features are not finite.
    """
    rows, labels = [], []
    with FeatureReader(network, runtime) as reader:
        for images, targets in batches:
            views = (images, images.flip(-1)) if is_mirrored else (images,)
            rows.append(np.stack([reader(view) for view in views], axis=1))
            is_finite = np.isfinite(rows[-1]).all(axis=(1, 2))
            if not is_finite.all():
                key = batches.dataset.source.keys[len(labels) + int(is_finite.argmin())]
                raise CheckpointError(
                    f"The features of {type(network).__name__} must be finite; those of {printable(key)} are not. The"
                    " weights are damaged: use others."
                )
            labels += targets.tolist()
            on_batch(len(targets))
    return split_heads(network, np.concatenate(rows)), np.array(labels)


def split_heads(network: nn.Module, features: np.ndarray) -> list[np.ndarray]:
    """Split features (..., features) of all classifiers side by side into those of each classifier."""
    ends = np.cumsum([layer.in_features for layer in classifiers(network)])
    return np.split(features, ends[:-1], axis=-1)


def logits_of(network: nn.Module, features: np.ndarray) -> np.ndarray:
    """Return the logits (images classes) of a network for features (images features); of several heads their mean."""
    parts = zip(classifiers(network), split_heads(network, features), strict=True)
    with torch.inference_mode():
        logits = [copy.deepcopy(layer).float().cpu()(torch.from_numpy(own)) for layer, own in parts]
    return torch.stack(logits).mean(dim=0).numpy()


def _features(network: nn.Module, images: Tensor, runtime: Runtime) -> np.ndarray:
    """Return the inputs of all classifiers (images features), side by side."""
    with classifier_inputs(network) as inputs, torch.inference_mode(), runtime.autocast():
        network(images.to(runtime.device))
    return torch.cat(inputs, dim=1).numpy()


def network_key(network: nn.Module, runtime: Runtime) -> str | None:
    """Return a hash of all that determines the features of given pixels: name, arguments, weights without those of the
    classifiers, input size, device, precision and versions.

    None for a network that these do not identify: it was not built by its name, or has code of the user.
    """
    cfg, arguments = getattr(network, "pretrained_cfg", None) or {}, getattr(network, "_model_args", None)
    name = cfg.get("architecture")
    code = {type(module).__module__.partition(".")[0] for module in network.modules()}
    has_own_code = not code <= CODE or plugin_of(network) is not None or getattr(network, "is_own_module", False)
    if name is None or arguments is None or has_own_code:
        return None
    kept = {
        key: value
        for key, value in arguments.items()
        if key not in SHOWN and not ("drop" in key and key.endswith("_rate"))  # dropout is off in evaluation mode
    }
    versions = [__version__, importlib.metadata.version("timm"), torch.__version__]
    pool = repr(getattr(network, "global_pool", None))
    parts = [name, kept, pool, cfg.get("input_size"), runtime.device.type, runtime.precision, versions]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode())
    heads = {id(tensor) for layer in classifiers(network) for tensor in layer.parameters()}
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        if id(tensor) not in heads:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class FeatureCache:
    """Features of one network in the cache on disk: a table that all networks and processes share.

    Rows are only added, so processes cannot overwrite each other's.

    Args:
        network: result of `network_key`.
        width: number of features of an image.
    """

    def __init__(self, network: str, width: int) -> None:
        self.network, self.num_bytes = network, 4 * width
        self._pending: dict[bytes, np.ndarray] = {}  # rows that are not written yet
        self._table = CacheTable(FILE, "key BLOB PRIMARY KEY, features BLOB, crc INTEGER", MAX_CACHED)

    def key_of(self, pixels: np.ndarray) -> bytes:
        """Return the key of the features of an image (c h w)."""
        return hashlib.sha256(f"{self.network} {pixels.shape}".encode() + pixels.tobytes()).digest()

    def get(self, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Return the features of those keys that have any."""
        rows = {key: self._pending[key] for key in keys if key in self._pending}

        def read(table: sqlite3.Connection) -> None:
            for key in keys:
                row = table.execute("SELECT features, crc FROM rows WHERE key = ?", (key,)).fetchone()
                if row is not None and len(row[0]) == self.num_bytes and zlib.crc32(row[0]) == row[1]:
                    rows[key] = np.frombuffer(row[0], np.float32)

        self._table.use(read)
        return rows

    def put(self, rows: dict[bytes, np.ndarray]) -> None:
        """Add features; they are written when there are PENDING, and by `save`."""
        self._pending |= rows
        if len(self._pending) >= PENDING:
            self.save()

    def save(self) -> None:
        """Write the features that are not written yet."""
        rows = [(key, row.tobytes()) for key, row in self._pending.items()]
        self._pending = {}

        def write(table: sqlite3.Connection) -> None:
            values = ((key, row, zlib.crc32(row)) for key, row in rows)
            table.executemany("INSERT OR IGNORE INTO rows (key, features, crc) VALUES (?, ?, ?)", values)

        if rows:
            self._table.use(write, adds=True)
