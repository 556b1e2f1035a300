"""Detection of images that show none of the classes of a model (out-of-distribution detection).

The score of an image is high if it resembles the training images. It is a sum of

- the log probability of the predicted class (arXiv 1610.02136),
- the cosine similarity to the nearest training images, on centred features (arXiv 2204.06507), and
- for networks with public weights, how much of the probability of their original classifier falls on classes like
  those that the training images show. A class counts as far as its weights resemble those of such a class.

The model directory has the arrays in `unknown.safetensors`, and the threshold in config.json.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from weft.checkpoints.confidence import Count
from weft.errors import CheckpointError

FILE = "unknown.safetensors"
NEIGHBOURS = 3
SIMILARITY, SHARE = 5.0, 3.0  # weights of the second and the third term; the first has weight 1

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Threshold:
    """Smallest score of images that are not unknown, and how many images it finds unknown: those that it was set by in
    config.json, the evaluated ones in an evaluation.

    Attributes:
        value: the score.
        count: number of held-out images.
        unknown: number of them below the threshold.
        other_count: number of images of no class; 0 without such images.
        other_unknown: number of them below the threshold.
        auroc: area under the ROC curve of held-out images against images of no class, from 0 to 1; None without such
            images.
        sha256: of the file of the detector, in config.json.
    """

    value: Annotated[float, Field(allow_inf_nan=False)]
    count: Count
    unknown: Count
    other_count: Count = 0
    other_unknown: Count = 0
    auroc: Annotated[float, Field(ge=0, le=1)] | None = None
    sha256: Sha256 = ""

    def __str__(self) -> str:
        """Describe in one line how many images are unknown."""
        if self.auroc is None:
            return f"unknown are {self.unknown:,} of {self.count:,} held-out images"
        return (
            f"AUROC {self.auroc:.3f}; unknown are {self.other_unknown:,} of {self.other_count:,} other images and"
            f" {self.unknown:,} of {self.count:,} images of the classes"
        )


@dataclass(frozen=True, eq=False)
class OriginalClassifier:
    """Classifier of the public weights that training started from.

    Attributes:
        weight, bias: (classes features), (classes).
        known: (classes) from 0 to 1: how much each class resembles the classes that the training images show.
    """

    weight: Float[np.ndarray, "classes features"]
    bias: Float[np.ndarray, " classes"]
    known: Float[np.ndarray, " classes"]


@dataclass(frozen=True, eq=False)
class UnknownDetector:
    """Score of images by their features and probabilities.

    Attributes:
        mean: (features) mean of the training features.
        images: (images features) centred training features of unit length.
        original: classifier of the public weights, if there is one.
        threshold: smallest score of images that are not unknown; None before it is set.
    """

    mean: Float[np.ndarray, " features"]
    images: Float[np.ndarray, "images features"]
    original: OriginalClassifier | None = None
    threshold: Threshold | None = None

    def scores(
        self, features: Float[np.ndarray, "n features"], probabilities: Float[np.ndarray, "n classes"]
    ) -> Float[np.ndarray, " n"]:
        """Return the score of each image.

        Args:
            features: inputs of the classifier of the folded network.
            probabilities: calibrated, of the classes of the model.
        """
        similarity = unit_length(features - self.mean) @ self.images.T
        nearest = np.sort(similarity, axis=1)[:, -NEIGHBOURS:].mean(axis=1)
        score = np.log(np.maximum(probabilities.max(axis=1), 1e-12)) + SIMILARITY * nearest
        if self.original is not None:
            shares = class_probabilities(features, self.original.weight, self.original.bias) @ self.original.known
            score += SHARE * np.log(np.maximum(shares, 1e-6))
        return score

    def is_unknown(self, features: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Return whether each image is unknown: (n) booleans."""
        assert self.threshold is not None
        return self.scores(features, probabilities) < self.threshold.value

    def serialized(self) -> bytes:
        """Return the arrays as a safetensors file, in float16 where that suffices."""
        arrays = {"mean": self.mean.astype(np.float32), "images": self.images.astype(np.float16)}
        if self.original is not None:
            arrays |= {
                "original.weight": self.original.weight.astype(np.float16),
                "original.bias": self.original.bias.astype(np.float32),
                "original.known": self.original.known.astype(np.float32),
            }
        return save(arrays)

    @classmethod
    def deserialized(cls, content: bytes, threshold: Threshold | None = None) -> UnknownDetector:
        """Return the detector of a safetensors file.

        Raises:
            safetensors.SafetensorError, KeyError: it is damaged.
        """
        arrays = {name: array.astype(np.float32) for name, array in load(content).items()}
        original = None
        if "original.weight" in arrays:
            original = OriginalClassifier(*(arrays[f"original.{name}"] for name in ("weight", "bias", "known")))
        return cls(arrays["mean"], arrays["images"], original, threshold)

    def record(self) -> dict[str, Any]:
        """Return the entry in config.json."""
        assert self.threshold is not None
        return {**vars(self.threshold), "sha256": hashlib.sha256(self.serialized()).hexdigest()}


def unit_length(features: np.ndarray) -> np.ndarray:
    """Scale the rows of features (n features) to unit length."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def class_probabilities(features: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the probabilities (n classes) of a linear classifier."""
    logits = features @ weight.T + bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def read_detector(folder: Path, record: Threshold | None) -> UnknownDetector | None:
    """Read the detector of a model directory or an export; None if config.json has no record of one.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    file = folder / FILE
    if record is None:
        return None
    if not file.is_file():
        raise CheckpointError(
            f"{file} must exist: config.json states a detector of unknown images; the file is missing. Copy it again,"
            " or delete the entry 'unknown' of config.json to use the model without the detector."
        )
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise CheckpointError(f"{file} must have the sha256 that config.json states; it is damaged. Copy it again.")
    try:
        return UnknownDetector.deserialized(content, record)
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{file} must have the arrays of a detector of unknown images; it does not.") from error


def detector_of(model: Any) -> UnknownDetector | None:
    """Return the detector of a loaded model or export; None if it has none."""
    return getattr(model, "unknown", None)
