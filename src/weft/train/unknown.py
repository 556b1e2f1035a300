"""Fit the detector of unknown images at the end of training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import nn

from weft.checkpoints.confidence import Confidence
from weft.checkpoints.hub import create_model
from weft.checkpoints.unknown import OriginalClassifier, UnknownDetector, class_probabilities, unit_length
from weft.data import Source
from weft.data.formats import MAX_PIXELS
from weft.data.split import proportional_subset, stratified_subset
from weft.deploy import fold
from weft.errors import CheckpointError, WeftError
from weft.inference.features import FeatureReader, classifiers
from weft.inference.inputs import SourcePart, evaluation_batches
from weft.inference.predictor import Predictor
from weft.inference.unknown import scores_of_batches, scores_of_files, set_threshold
from weft.models.base import Backbone
from weft.models.building import build_described
from weft.recipes import Recipe
from weft.runs.directory import PUBLIC_CLASSIFIER
from weft.runtime import Runtime

MAX_IMAGES = 2_000  # training images that the detector keeps, and held-out images that set its threshold
MIN_CLASSES = 100  # of the public weights, so that some of them resemble no training image


def fit_detector(
    model: Any,
    train: Source,
    held_out: Source,
    recipe: Recipe,
    batch_size: int,
    confidence: Confidence,
    runtime: Runtime,
    out: Path,
) -> UnknownDetector | None:
    """Return a detector of unknown images with its threshold; None if the network has no linear classifier.

    Args:
        model: the trained network, on its device.
        train, held_out: images of the classes.
        recipe: of the training; `data.other` names images that show none of the classes.
        batch_size: number of images per forward pass.
        confidence: calibration of the model.
        runtime: device and precision.
        out: the run directory, which may have the classifier of the public weights.

    Raises:
        DataError: none of the images of `data.other` can be read.
    """

    def batches(source: Source, places: list[int]) -> Any:
        part = SourcePart(source, places) if len(places) < len(source) else source
        return evaluation_batches(part, model, batch_size, recipe.workers)

    fitted = stratified_subset(train.keys, train.labels, MAX_IMAGES, recipe.seed)
    scored = proportional_subset(held_out.keys, MAX_IMAGES, recipe.seed)

    network: nn.Module = model
    folded: Any = fold(network) if isinstance(network, Backbone) else network
    try:
        reader = FeatureReader(folded, runtime, is_cached=recipe.head_init == "probe")
    except WeftError:
        return None
    with reader:
        rows = [reader(images) for images, _ in batches(train, fitted)]
    detector = _without_threshold(np.concatenate(rows), out)
    if detector is None:
        return None
    model.unknown, model.confidence = detector, confidence
    predictor = Predictor(model, runtime=runtime, max_pixels=recipe.data.max_pixels or MAX_PIXELS)
    known = scores_of_batches(predictor, batches(held_out, scored))
    return _with_threshold(detector, known, predictor, recipe, batch_size)


def _without_threshold(features: np.ndarray, run: Path) -> UnknownDetector | None:
    """Return a detector for training images by their features (images features); None if these are not finite."""
    if not np.isfinite(features).all():
        return None
    mean = features.mean(axis=0)
    fitted = UnknownDetector(mean, unit_length(features - mean), _original_classifier(run, features))
    return UnknownDetector.deserialized(fitted.serialized())  # the threshold is that of the rounded values


def _with_threshold(
    detector: UnknownDetector, known: np.ndarray, predictor: Predictor, recipe: Recipe, batch_size: int
) -> UnknownDetector | None:
    """Set the threshold by the scores of held-out images and by the images of `data.other`; None without the former."""
    if not len(known):
        return None
    other = None if recipe.data.other is None else scores_of_files(predictor, recipe.data.other, batch_size)
    return dataclasses.replace(detector, threshold=set_threshold(known, other))


def public_classifier(recipe: Recipe) -> bytes | None:
    """Return the classifier of the public weights that a run starts from as a file, so that resuming needs no hub."""
    if not recipe.pretrained or recipe.start_from is not None or recipe.model is None:
        return None
    try:
        public: Any = build_described(recipe.model, dict(recipe.model_args), create_model, pretrained=True).eval()
        layers: list[nn.Linear] = classifiers(fold(public) if isinstance(public, Backbone) else public)
    except WeftError:  # the weights have no classifier
        return None
    if len(layers) != 1 or layers[0].out_features < MIN_CLASSES:
        return None
    with torch.inference_mode():
        weight = layers[0].weight.half().numpy()
        bias = np.zeros(len(weight), np.float32) if layers[0].bias is None else layers[0].bias.float().numpy()
    return save({"weight": weight, "bias": bias})


def read_public_classifier(out: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return weight (classes features) and bias (classes) of `public_classifier`; None without a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = out / PUBLIC_CLASSIFIER
    if not file.is_file():
        return None
    try:
        stored = load_file(file)
        return stored["weight"].astype(np.float32), stored["bias"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{file} must be the file that the run wrote; it cannot be read ({error}). Copy it again, or delete it:"
            " then unknown images are detected without the public classifier."
        ) from error


def _original_classifier(out: Path, features: np.ndarray) -> OriginalClassifier | None:
    """Return the classifier of the public weights that the run started from; None for other initial weights."""
    stored = read_public_classifier(out)
    if stored is None or stored[0].shape[1] != features.shape[1]:
        return None
    weight, bias = stored
    shown = np.minimum(class_probabilities(features, weight, bias).sum(axis=0), 1)
    directions = unit_length(weight - weight.mean(axis=0))
    known = np.clip((directions @ directions.T * shown).max(axis=1), 0, 1)
    return OriginalClassifier(weight, bias, known)
