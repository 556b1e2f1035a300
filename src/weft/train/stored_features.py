"""Features of the images of a run, in its directory, so that classes can be added without the images.

A run stores them if the kept model is a linear classifier on frozen features. `weft.train.extend` reads them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from torch import nn

from weft.data import Source, Splits
from weft.errors import CheckpointError
from weft.files import write_whole
from weft.inference.features import DamagedFileError, fingerprint, read_arrays, read_features
from weft.inference.inputs import evaluation_batches
from weft.runtime import Runtime

BATCH_SIZE = 32
KINDS = {"labels": "iu", "is_held_out": "b", "keys": "U", "groups": "U", "hashes": "u"}  # numpy's kinds of types


@dataclass(frozen=True)
class StoredFeatures:
    """Features of labelled images, training and held-out images.

    Attributes:
        network: hash of the network that computed them (`weft.inference.features.fingerprint`).
        features: (images views features), of several classifiers side by side.
        labels: (images) class indices of the run.
        is_held_out: (images) whether each image is in the validation set.
        keys: (images) names of the images.
        groups: (images) groups; empty without groups.
        hashes: (images 32) sha256 of each file as bytes.
    """

    network: str
    features: np.ndarray
    labels: np.ndarray
    is_held_out: np.ndarray
    keys: np.ndarray
    groups: np.ndarray
    hashes: np.ndarray

    def chosen(self, places: np.ndarray) -> StoredFeatures:
        """Return the images at `places` (indices, or one truth value per image)."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        return StoredFeatures(**{name: v if name == "network" else v[places] for name, v in columns.items()})

    def joined(self, other: StoredFeatures) -> StoredFeatures:
        """Return these images followed by others of the same network."""
        columns = [item.name for item in fields(self) if item.name != "network"]
        joined = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in columns}
        return StoredFeatures(self.network, **joined)

    def write(self, path: Path) -> int:
        """Write an .npz file atomically, in float16 if the features are in its range; return its size in bytes."""
        columns = {item.name: np.asarray(getattr(self, item.name)) for item in fields(self)}
        is_half = np.abs(self.features).max(initial=0) <= np.finfo(np.float16).max
        columns["features"] = self.features.astype(np.float16 if is_half else np.float32)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **columns)  # type: ignore[arg-type]
        write_whole(path, buffer.getvalue())
        return buffer.tell()

    @classmethod
    def read(cls, path: Path) -> StoredFeatures:
        """Read features.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            columns = read_arrays(path, [item.name for item in fields(cls)])
        except DamagedFileError as error:
            raise _damaged(path) from error
        network, features = str(columns.pop("network")), columns.pop("features")
        if features.ndim != 3 or any(column.shape[:1] != features.shape[:1] for column in columns.values()):
            raise _damaged(path)
        if any(columns[name].dtype.kind not in kind for name, kind in KINDS.items()):
            raise _damaged(path)
        if features.dtype not in (np.float16, np.float32) or not np.isfinite(features).all():
            raise _damaged(path)
        features = features.astype(np.float32)
        return cls(network, features, **columns)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} must have the features that the run wrote; it is damaged. Remove it: the features are then computed"
        " from the images of the run, if they still exist."
    )


def collect(
    network: nn.Module,
    splits: Splits,
    runtime: Runtime,
    workers: int,
    on_batch: Callable[[int], None] = lambda count: None,
) -> StoredFeatures:
    """Compute the features of the training and the held-out images of a dataset, with the cache.

    Raises:
        UsageError: the network has no linear classifier.
        DataError: an image can no longer be read.
    """
    digest = fingerprint(network, runtime)
    parts = [
        _collect(network, digest, source, runtime, workers, is_held_out, groups, on_batch)
        for source, is_held_out, groups in ((splits.train, False, splits.groups), (splits.val, True, splits.val_groups))
        if len(source)
    ]
    return parts[0] if len(parts) == 1 else parts[0].joined(parts[1])


def _collect(
    network: nn.Module,
    digest: str,
    source: Source,
    runtime: Runtime,
    workers: int,
    is_held_out: bool,
    groups: Sequence[str] | None,
    on_batch: Callable[[int], None],
) -> StoredFeatures:
    batches = evaluation_batches(source, network, BATCH_SIZE, workers)
    features, labels = read_features(network, batches, runtime, on_batch)
    hashes = b"".join(hashlib.sha256(source.read(i).data).digest() for i in range(len(source)))
    return StoredFeatures(
        digest,
        np.concatenate(features, axis=2),
        labels,
        np.full(len(labels), is_held_out),
        np.array(source.keys, dtype=np.str_),
        np.array(groups or [""] * len(labels), dtype=np.str_),
        np.frombuffer(hashes, np.uint8).reshape(-1, 32),
    )
