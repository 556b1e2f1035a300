"""k-nearest-neighbour classifier on the features of a network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.data.loader import ImageLoader
from weft.inference.features import FeatureReader, unit_length

TEMPERATURE = 0.07  # of the votes, as in arXiv 1805.01978
FLOOR = 1e-4  # share of the votes that all classes have in common, so that no probability is 0


class KNNClassifier(nn.Module):
    """Classify images by the labelled images with the most similar features (arXiv 1805.01978).

    Each of the `k` nearest images votes for its class with weight exp(s / 0.07), where s is the cosine similarity of
    the features. The network is not trained, so its own classes do not matter.

    Args:
        reader: of the features of the network, inside its context.
        features: (images features) of the labelled images, by the same reader.
        labels: (images) class indices.
        num_classes: number of classes.
        k: number of neighbours, from 1; all images if there are fewer.
    """

    def __init__(
        self, reader: FeatureReader, features: np.ndarray, labels: np.ndarray, num_classes: int, k: int
    ) -> None:
        super().__init__()
        self.reader, self.num_classes = reader, num_classes
        self.k = min(k, len(labels))
        self.references, self.labels = torch.from_numpy(unit_length(features)), torch.from_numpy(labels)

    @classmethod
    def fit(
        cls,
        reader: FeatureReader,
        batches: ImageLoader,
        num_classes: int,
        k: int,
        on_batch: Callable[[int], None] = lambda count: None,
    ) -> KNNClassifier:
        """Read the features of labelled images, and return the classifier; `on_batch` gets their number per batch."""
        rows, labels = [], []
        for images, targets in batches:
            rows.append(reader(images))
            labels.append(targets.numpy())
            on_batch(len(targets))
        return cls(reader, np.concatenate(rows), np.concatenate(labels), num_classes, k)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return log-probabilities (b classes)."""
        features = torch.from_numpy(unit_length(self.reader(images.cpu())))
        similarity, places = (features @ self.references.T).topk(self.k, dim=1)
        votes = torch.softmax(similarity / TEMPERATURE, dim=1)
        shares = torch.zeros(len(images), self.num_classes).scatter_add_(1, self.labels[places], votes)
        return ((1 - FLOOR) * shares + FLOOR / self.num_classes).log()
