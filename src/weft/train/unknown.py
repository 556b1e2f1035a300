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

from weft.checkpoints.hub import create_model
from weft.checkpoints.unknown import OriginalClassifier, UnknownDetector, class_probabilities, unit_length
from weft.data.split import stratified_subset
from weft.deploy import fold
from weft.errors import CheckpointError, WeftError
from weft.inference.features import FeatureReader, classifiers
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.inference.predictor import Predictor
from weft.inference.probabilities import softmax
from weft.inference.torch_model import torch_model
from weft.inference.unknown import scores_of_files, set_threshold
from weft.models.base import Backbone
from weft.models.building import build_described
from weft.recipes import Recipe
from weft.runs.directory import PUBLIC_CLASSIFIER
from weft.train.held_out import HeldOutOutputs
from weft.train.plan import Plan

MAX_IMAGES = 2_000  # training images that the detector keeps
ROWS = 2_048  # of a similarity matrix of the classes at a time
MIN_CLASSES = 100  # of the public weights, so that some of them resemble no training image


def fit_detector(plan: Plan, out: Path, best: Predictor, held_out: HeldOutOutputs) -> UnknownDetector | None:
    """Return a detector of unknown images; None if the network has no linear classifier, or features are not finite.

    Args:
        plan: of the run; `data.unknown_images` of its recipe names images that show none of the classes.
        out: the run directory, which may have the classifier of the public weights.
        best: the best model with its temperature; gets the detector without threshold.
        held_out: outputs of the model; those of the folded network set the threshold.

    Raises:
        DataError: none of the images of `data.unknown_images` can be read.
    """
    recipe, train, batch_size = plan.recipe, plan.splits.train, plan.val_batches.order.batch_size
    of_known, logits = held_out.folded_features, held_out.folded_logits
    if not of_known.size:
        return None
    images = SourcePart(train, places=stratified_subset(train.keys, train.labels, MAX_IMAGES, recipe.seed))
    batches = evaluation_batches(images, best.model.info, batch_size, recipe.workers)
    with FeatureReader(torch_model(best.model).running, plan.runtime, is_cached=recipe.head_init == "probe") as reader:
        features = np.concatenate([reader(batch) for batch, _ in batches])
    if not all(np.isfinite(array).all() for array in (features, of_known, logits)):
        return None
    mean = features.mean(axis=0)
    fitted = UnknownDetector(mean, unit_length(features - mean), _original_classifier(out, features))
    best.detector = UnknownDetector.deserialized(fitted.serialized())  # the threshold is that of the rounded values
    known = best.detector.scores(of_known, softmax(logits, best.temperature))
    other = (
        None if recipe.data.unknown_images is None else scores_of_files(best, recipe.data.unknown_images, batch_size)
    )
    return dataclasses.replace(best.detector, threshold=set_threshold(known, other))


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
    blocks = (directions[start : start + ROWS] for start in range(0, len(directions), ROWS))
    known = np.concatenate([(block @ directions.T * shown).max(axis=1) for block in blocks]).clip(0, 1)
    return OriginalClassifier(weight, bias, known)
