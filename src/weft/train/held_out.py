"""Outputs of the best model for held-out images, as arrays for the end of a run: each image is decoded once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weft.data.split import proportional_subset
from weft.inference.calibration import MAX_IMAGES
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.inference.torch_model import TorchModel, infer_with_features
from weft.progress import Work
from weft.train.mirrored_classes import small_versions
from weft.train.plan import Plan

MAX_LOGITS = 20_000_000  # of these images: 5,000 images of 4,000 classes, 909 of 22,000
MAX_INSPECTED = 2_000  # held-out images for the threshold of the detector, and for the search for mirrored classes


class HeldOutOutputs(NamedTuple):
    """Outputs for a random sample of the held-out images, in float32: logits of all may not fit into memory.

    Attributes:
        places: (images) indices of the sample in the validation set, ascending.
        labels: (images) class indices.
        logits, features: (images classes), and (images features) with no column without linear classifiers.
        is_inspected: (images) whether an image also has the outputs below; a random sample of these.
        folded_logits, folded_features: of the folded network.
        views: small versions of the images, and features: each (2 inspected features), of the images and of their
            mirror images. Empty unless training mirrors images.
    """

    places: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    features: np.ndarray
    is_inspected: np.ndarray
    folded_logits: np.ndarray
    folded_features: np.ndarray
    views: tuple[np.ndarray, ...]


def read_held_out(plan: Plan, best: TorchModel) -> HeldOutOutputs:
    """Run the best model over held-out images, in this process.

    Args:
        plan: of the run.
        best: the best model, folded.

    Raises:
        DataError: an image can no longer be read.
    """
    source, recipe, runtime, network = plan.splits.val, plan.recipe, plan.runtime, best.network
    most = min(MAX_IMAGES, max(MAX_LOGITS // len(source.classes), 1))
    places, inspected = (proportional_subset(source.keys, limit, recipe.seed) for limit in (most, MAX_INSPECTED))
    is_inspected, batch_size = np.isin(places, inspected), plan.val_batches.order.batch_size
    batches = evaluation_batches(SourcePart(source, places=places), network, batch_size, recipe.workers)

    outputs, of_folded, of_mirrored = [], [], []
    with Work("calibrating", len(places)) as work:
        for number, (images, _) in enumerate(batches):
            outputs.append(infer_with_features(network, images, runtime))
            part = images[torch.from_numpy(is_inspected[number * batch_size :][: len(images)])]
            if len(part):
                of_folded.append(infer_with_features(best.running, part, runtime))
            if len(part) and recipe.augment.hflip:
                mirrored = part.flip(-1)
                _, features = infer_with_features(network, mirrored, runtime)
                of_mirrored.append((small_versions(part), small_versions(mirrored), features))
            work.advance(len(images))

    logits, features = _joined(outputs)
    folded_logits, folded_features = _joined(of_folded)
    views: tuple[np.ndarray, ...] = ()
    if of_mirrored:
        *small, mirrored_features = _joined(of_mirrored)
        views = np.stack(small), np.stack([features[is_inspected], mirrored_features])
    return HeldOutOutputs(
        np.array(places),
        np.array(source.labels)[places],
        logits,
        features,
        is_inspected,
        folded_logits,
        folded_features,
        tuple(points for points in views if points.size),
    )


def _joined(batches: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Concatenate each of the arrays of all batches."""
    return [np.concatenate(arrays) for arrays in zip(*batches, strict=True)]
