"""Linear probe: the classifier that logistic regression finds for the features of a frozen network.

It is the start of fine-tuning (head first, then all layers; Kumar et al., arXiv 2202.10054), and with few images often
the best classifier. Features are standardised; the strength of the L2 penalty is chosen by stratified cross-validation
on the training images. The result is folded into the last linear layer, so the network is the same as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import fminbound
from scipy.special import log_softmax, softmax
from threadpoolctl import threadpool_limits
from torch import nn

from weft.data.loader import ImageLoader
from weft.inference.features import classifiers, read_features
from weft.intervals import accuracy_of
from weft.recipes import Recipe
from weft.runtime import Runtime
from weft.text import first_few

STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)  # inverse L2 penalty C of scikit-learn, for features of unit variance
FOLDS = 5
DEFAULT_STRENGTH = 0.1  # where a class has too few images for cross-validation
MAX_CROSS_VALIDATED = 3_000  # images; of more, one fold is held out instead of each in turn
ITERATIONS = 1_000
ABSENT_LOGIT = -10.0  # of a class without a training image; the largest logit of the others is at least about 0


class Balance(NamedTuple):
    """Correction of the class frequencies.

    Attributes:
        is_weighted: weight images by the inverse frequency of their class.
        is_chosen_by_class: every class counts the same in the loss that decides the penalty.
    """

    is_weighted: bool = False
    is_chosen_by_class: bool = False


UNBALANCED = Balance()


def balance_of(recipe: Recipe) -> Balance:
    """Return the correction that a recipe asks for."""
    is_weighted = recipe.loss.class_weights == "balanced" or recipe.data.sampling == "balanced"
    return Balance(is_weighted, recipe.best == "balanced")


@dataclass(frozen=True)
class LinearProbe:
    """Result of a linear probe.

    Attributes:
        weight, bias: (classes features), (classes).
        strength: the chosen inverse L2 penalty.
        right: (images) whether the prediction of each image by the other folds is correct; empty without
            cross-validation.
        counts: (classes) number of training images of each class; of groups, if the images are in groups.
    """

    weight: np.ndarray
    bias: np.ndarray
    strength: float
    right: np.ndarray
    counts: np.ndarray

    def describe(self, classes: Sequence[str]) -> str:
        """Describe the probe, with the 95 % interval of its cross-validated accuracy (Wilson)."""
        text = f"Logistic regression on {self.weight.shape[1]:,} features (C = {self.strength:g})"
        absent, single = (first_few(np.array(classes)[self.counts == number]) for number in (0, 1))
        if self.right.size:
            accuracy = accuracy_of(int(self.right.sum()), self.right.size)
            text += f": {accuracy} % in cross-validation over {self.right.size:,} training images."
        elif single:
            text += f", without cross-validation, because of classes with one image or group: {single}. Add images."
        else:
            text += ", without cross-validation, because there are too few groups."
        return f"{text} Classes without a training image, which are never predicted: {absent}." if absent else text


def fit_heads(
    network: nn.Module,
    batches: ImageLoader,
    num_classes: int,
    runtime: Runtime,
    *,
    balance: Balance = UNBALANCED,
    groups: Sequence[str] | None = None,
    seed: int = 0,
    label_smoothing: float = 0.0,
    is_mirrored: bool = True,
    on_batch: Callable[[int], None] = lambda count: None,
) -> list[LinearProbe]:
    """Fit the classifiers of a network to images, and set their weights.

    Args:
        network: on its device; only the weights of its last linear layers change.
        batches: training images with the preprocessing of the evaluation.
        num_classes: number of classes.
        runtime: device and precision of the features.
        balance: correction of the class frequencies.
        groups: group of every image; a group is in one fold. None without groups.
        seed: of the folds.
        label_smoothing: of the training that follows. The logits are scaled down to the least loss with it, which
            changes no prediction: at larger logits, the first steps would undo the classifier.
        is_mirrored: fit also to the mirror image of every image.
        on_batch: called with the number of images of every batch.

    Returns:
        A probe per head.

    Raises:
        UsageError: the network has no linear classifier.
    """
    features, labels = read_features(network, batches, runtime, on_batch)
    num_views = 2 if is_mirrored else 1
    features = [views[:, :num_views] for views in features]
    probes = fit_features(features, labels, num_classes, balance=balance, groups=groups, seed=seed)
    scales = [
        _scale(views[:, 0] @ probe.weight.T + probe.bias, labels, label_smoothing)
        for probe, views in zip(probes, features, strict=True)
    ]
    set_heads(network, probes, scales)
    return probes


def fit_features(
    features: Sequence[np.ndarray],
    labels: np.ndarray,
    num_classes: int,
    *,
    balance: Balance = UNBALANCED,
    groups: Sequence[str] | None = None,
    seed: int = 0,
) -> list[LinearProbe]:
    """Fit a classifier to the features (images views features) of each head; arguments as in `fit`."""
    with threadpool_limits(1):  # more threads gain nothing on matrices of this size, and lose much on a busy machine
        return [fit(views, labels, num_classes, seed, groups, balance) for views in features]


def set_heads(network: nn.Module, probes: Sequence[LinearProbe], scales: Sequence[float] | None = None) -> None:
    """Set the weights of the classifiers of a network, multiplied by a factor each."""
    factors = [1.0] * len(probes) if scales is None else scales
    for layer, probe, scale in zip(classifiers(network), probes, factors, strict=True):
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(scale * probe.weight))
            if layer.bias is not None:
                layer.bias.copy_(torch.from_numpy(scale * probe.bias))


def _scale(logits: np.ndarray, labels: np.ndarray, label_smoothing: float) -> float:
    """Return the factor up to 1 at which logits (images classes) have the least loss with label smoothing."""
    if label_smoothing == 0:
        return 1.0
    targets = np.full(logits.shape, label_smoothing / logits.shape[1])
    targets[np.arange(len(labels)), labels] += 1 - label_smoothing

    def loss(scale: float) -> float:
        return -float((targets * log_softmax(scale * logits, axis=1)).sum(1).mean())

    return float(np.asarray(fminbound(loss, 1e-3, 1.0)))


def fit(
    views: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    seed: int = 0,
    groups: Sequence[str] | None = None,
    balance: Balance = UNBALANCED,
) -> LinearProbe:
    """Fit one linear classifier.

    Args:
        views: (images views features).
        labels: (images) class indices. A class without an image gets the logit ABSENT_LOGIT for every image.
        num_classes: number of classes.
        seed: of the folds.
        groups: group of every image; a group is in one fold. None without groups.
        balance: correction of the class frequencies.
    """
    points, basis, mean, deviation = _standardised(views)
    strength, right = DEFAULT_STRENGTH, np.zeros(0, bool)
    present, own = np.unique(labels, return_inverse=True)
    splits = _folds(own, len(present), seed, groups)
    if splits:
        if len(labels) > MAX_CROSS_VALIDATED:
            splits = splits[:1]
        scores = [_cross_validate(points, own, len(present), splits, strength, balance) for strength in STRENGTHS]
        best = int(np.argmin([loss for loss, _ in scores]))
        strength, right = STRENGTHS[best], scores[best][1]
    weight, bias = np.zeros((num_classes, points.shape[-1])), np.full(num_classes, ABSENT_LOGIT)
    weight[present], bias[present] = _regression(points, own, len(present), strength, balance)
    weight = weight @ basis / deviation
    bias -= weight @ mean
    counts = _counts(labels, num_classes, groups)
    return LinearProbe(weight.astype(np.float32), bias.astype(np.float32), strength, right, counts)


def held_out_probabilities(
    views: np.ndarray, labels: np.ndarray, num_classes: int, fold_of: np.ndarray, is_used: np.ndarray | None = None
) -> np.ndarray:
    """Return the class probabilities (images classes) of every image by a classifier fitted to the other folds.

    The strength of the penalty is that with the least loss. A class without a training image in the other folds has the
    probability 0 there.

    Args:
        views: (images views features); the first view is predicted.
        labels: (images) class indices.
        num_classes: number of classes.
        fold_of: (images) fold of every image, from 0; at least two folds.
        is_used: (images) whether the classifiers are fitted to an image; None for all.
    """
    points, *_ = _standardised(views)
    is_used = np.ones(len(labels), bool) if is_used is None else is_used
    folds = [(np.flatnonzero((fold_of != fold) & is_used), np.flatnonzero(fold_of == fold))
             for fold in range(int(fold_of.max()) + 1)]  # fmt: skip

    def predicted(strength: float, fold: int) -> np.ndarray:
        train, held_out = folds[fold]
        present, own = np.unique(labels[train], return_inverse=True)
        scores = np.full((len(held_out), num_classes), -np.inf)
        if not len(present):
            scores[:] = 0
        else:
            weight, bias = _regression(points[train], own, len(present), strength, UNBALANCED)
            scores[:, present] = points[held_out, 0] @ weight.T + bias
        return softmax(scores, axis=1)

    tried = range(len(folds) if len(labels) <= MAX_CROSS_VALIDATED else 1)
    of_strength = {}
    for strength in STRENGTHS:
        parts, losses = [predicted(strength, fold) for fold in tried], []
        for (train, held_out), part in zip(folds, parts, strict=False):
            own = part[np.arange(len(held_out)), labels[held_out]]
            losses.append(-np.log(np.maximum(own, 1e-12))[is_used[held_out] & np.isin(labels[held_out], labels[train])])
        of_strength[strength] = (float(np.concatenate(losses).sum()), parts)
    strength = min(of_strength, key=lambda one: of_strength[one][0])
    parts = of_strength[strength][1] + [predicted(strength, fold) for fold in range(len(tried), len(folds))]
    result = np.empty((len(labels), num_classes))
    for (_, held_out), part in zip(folds, parts, strict=True):
        result[held_out] = part
    return result


def _standardised(views: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return features of unit variance in a rotated basis (images views dimensions), basis, mean and deviation."""
    flat = views.reshape(-1, views.shape[-1]).astype(np.float64)
    mean, deviation = flat.mean(0), flat.std(0)
    deviation[deviation < 1e-6 * max(deviation.max(), 1e-12)] = np.inf  # constant features have no say
    scaled = (flat - mean) / deviation
    # A rotation changes neither the classifier nor its penalty, and leaves at most one dimension per view of an image.
    basis = np.linalg.svd(scaled, full_matrices=False)[2] if len(scaled) < scaled.shape[1] else np.eye(scaled.shape[1])
    return (scaled @ basis.T).reshape(*views.shape[:2], -1), basis, mean, deviation


def _folds(
    labels: np.ndarray, num_classes: int, seed: int, groups: Sequence[str] | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (training, held-out) indices of each fold; none if a class would lack training images in a fold."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # takes seconds to import

    folds = min(FOLDS, int(_counts(labels, num_classes, groups).min()))
    if folds < 2 or num_classes < 2:
        return []
    if groups is not None:
        kind = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
        splits = list(kind.split(labels, labels, np.array(groups)))
        return splits if all(len(np.unique(labels[train])) == num_classes for train, _ in splits) else []
    return list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels))


def _counts(labels: np.ndarray, num_classes: int, groups: Sequence[str] | None) -> np.ndarray:
    """Return the number of images of each class, or of groups of images."""
    units = set(zip(labels.tolist(), range(len(labels)) if groups is None else groups, strict=True))
    return np.bincount([label for label, _ in units], minlength=num_classes)


def _cross_validate(
    points: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    splits: Sequence[tuple[np.ndarray, np.ndarray]],
    strength: float,
    balance: Balance,
) -> tuple[float, np.ndarray]:
    """Return the mean loss of the held-out images in nats (of the classes, if they are balanced), and whether each of
    their predictions is correct."""
    losses, right, weights = [], [], _image_weights(labels, num_classes, balance)
    for train, held_out in splits:
        weight, bias = _regression(points[train], labels[train], num_classes, strength, balance)
        scores = log_softmax(points[held_out, 0] @ weight.T + bias, axis=1)
        losses.append(-scores[np.arange(len(held_out)), labels[held_out]] * weights[held_out])
        right.append(scores.argmax(1) == labels[held_out])
    return float(np.concatenate(losses).mean()), np.concatenate(right)


def _image_weights(labels: np.ndarray, num_classes: int, balance: Balance) -> np.ndarray:
    """Return the weight of every image: the same for all, or so that every class has the same sum."""
    if balance == UNBALANCED:
        return np.ones(len(labels))
    counts = np.bincount(labels, minlength=num_classes)
    return (len(labels) / np.count_nonzero(counts) / np.maximum(counts, 1))[labels]


def _regression(
    points: np.ndarray, labels: np.ndarray, num_classes: int, strength: float, balance: Balance
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight (classes features) and bias (classes) of logistic regression on all views of the images."""
    if num_classes == 1:
        return np.zeros((1, points.shape[-1])), np.zeros(1)
    from sklearn.linear_model import LogisticRegression  # takes seconds to import

    number = points.shape[1]
    model = LogisticRegression(
        C=strength / number, max_iter=ITERATIONS, class_weight="balanced" if balance.is_weighted else None
    )
    model.fit(points.reshape(-1, points.shape[-1]), np.repeat(labels, number))
    weight, bias = np.asarray(model.coef_), np.asarray(model.intercept_)
    if num_classes == 2:  # scikit-learn has one row for two classes
        weight, bias = np.stack([-weight[0], weight[0]]) / 2, np.stack([-bias[0], bias[0]]) / 2
    return weight, bias
