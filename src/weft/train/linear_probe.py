"""Linear probe: the classifier that logistic regression finds for the features of a frozen network.

It is the start of fine-tuning (head first, then all layers; Kumar et al., arXiv 2202.10054), and with few images often
the best classifier. Features are standardised; the strength of the L2 penalty is chosen by stratified cross-validation
on the training images. The result is folded into the last linear layer, so the network is the same as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import fminbound
from scipy.special import log_softmax, softmax
from threadpoolctl import threadpool_limits

from weft.data.split import grouped_fold, grouped_split
from weft.errors import UsageError
from weft.machine.memory import available_gib
from weft.progress import Work
from weft.recipes import Recipe
from weft.report.intervals import accuracy_in_groups, accuracy_of
from weft.text import first_few

if TYPE_CHECKING:
    from torch import nn

    from weft.data.loader import ImageLoader
    from weft.machine.runtime import Runtime

STRENGTHS = np.array([0.01, 0.1, 1.0, 10.0, 100.0])  # inverse L2 penalty C, for features of unit variance
FOLDS = 5
DEFAULT_STRENGTH = 0.1  # where a class has too few images for cross-validation
RIDGE = 0.3  # penalty of ridge regression per feature of unit variance
MAX_CROSS_VALIDATED = 3_000  # images; of more, one fold is held out instead of each in turn
ITERATIONS = 1_000
MATRICES = 3  # (rows classes) in float64, in memory: logits, gradients, temporary values
ABSENT_LOGIT = -10.0  # of a class without a training image; the largest logit of the others is at least about 0
LOSS = "neg_log_loss"  # a scorer of scikit-learn
Split = tuple[np.ndarray, np.ndarray]
"""Indices of rows to fit to, and of held-out rows."""


@dataclass(frozen=True)
class LinearProbe:
    """Result of a linear probe.

    Attributes:
        weight, bias: (classes features), (classes).
        strength: the chosen inverse L2 penalty.
        right: (images) whether the prediction of each image by the other folds is correct; empty without
            cross-validation.
        counts: (classes) number of training images of each class; of groups, if the images are in groups.
        groups: group of each image of `right`; None without groups.
        random: accuracy in percent in folds of single images, if the images are in groups.
    """

    weight: np.ndarray
    bias: np.ndarray
    strength: float
    right: np.ndarray
    counts: np.ndarray
    groups: list[str] | None = None
    random: float | None = None

    def describe(self, classes: Sequence[str]) -> str:
        """Describe the probe, with the 95 % interval of its cross-validated accuracy (Wilson)."""
        text = f"Logistic regression on {self.weight.shape[1]:,} features (C = {self.strength:g})"
        absent, single = (first_few(np.array(classes)[self.counts == number]) for number in (0, 1))
        if self.right.size:
            accuracy = accuracy_of(int(self.right.sum()), self.right.size)
            if self.groups is not None:
                accuracy = accuracy_in_groups(self.right, self.groups)
            text += f": {accuracy} % in cross-validation over {self.right.size:,} training images"
            text += "." if self.random is None else f", by groups; with a random split it would be {self.random:.2f} %."
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
    recipe: Recipe,
    groups: Sequence[str] | None = None,
) -> list[LinearProbe]:
    """Fit the classifiers of a network to images, and set their weights.

    The logits are scaled down to the least loss with the label smoothing of the training that follows, which changes no
    prediction: at larger logits, the first steps would undo the classifier.

    Args:
        network: on its device; only the weights of its last linear layers change.
        batches: training images with the preprocessing of the evaluation.
        num_classes: number of classes.
        runtime: device and precision of the features.
        recipe: of the training; with `augment.hflip`, the mirror image of every image is fitted to also.
        groups: group of every image; a group is in one fold. None without groups.

    Returns:
        A probe per head.

    Raises:
        UsageError: the network has no linear classifier, or memory does not suffice for so many images and classes.
    """
    import torch

    from weft.inference.features import classifiers, read_features

    images = batches.dataset.source.labels
    _check_memory(len(images) * (1 + recipe.augment.hflip), len(set(images)))
    with Work("features", len(batches.dataset)) as work:
        features, labels = read_features(network, batches, runtime, work.advance, is_mirrored=recipe.augment.hflip)
    probes, smoothing = [], recipe.loss.label_smoothing if recipe.epochs != 0 else 0.0
    is_weighted, by_class = "balanced" in (recipe.loss.class_weights, recipe.data.sampling), recipe.best == "balanced"
    with threadpool_limits(1):  # more threads gain nothing on matrices of this size, and lose much on a busy machine
        for layer, views in zip(classifiers(network), features, strict=True):
            probe = fit(views, labels, num_classes, recipe.seed, groups, is_weighted=is_weighted, by_class=by_class)
            scale = _scale(views[:, 0] @ probe.weight.T + probe.bias, labels, smoothing)
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(scale * probe.weight))
                if layer.bias is not None:
                    layer.bias.copy_(torch.from_numpy(scale * probe.bias))
            probes.append(probe)
    return probes


def _check_memory(num_rows: int, num_classes: int) -> None:
    """Raise UsageError if the matrices (rows classes) of a logistic regression do not fit into memory."""
    needed, available = MATRICES * 8 * num_rows * num_classes / 2**30, available_gib()
    if needed > available:
        raise UsageError(
            f"A linear probe needs memory for rows x classes; {num_rows:,} x {num_classes:,} need about {needed:.0f}"
            f" GiB, and {available:.0f} GiB are available. Leave it out: --set head_init=random."
        )


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
    *,
    is_weighted: bool = False,
    by_class: bool = False,
) -> LinearProbe:
    """Fit one linear classifier.

    Args:
        views: (images views features); each view of an image is a row of the regression.
        labels: (images) class indices. A class without an image gets the logit ABSENT_LOGIT for every image.
        num_classes: number of classes.
        seed: of the folds.
        groups: group of every image; a group is in one fold. None without groups.
        is_weighted: weight images by the inverse frequency of their class.
        by_class: every class counts the same in the loss that decides the penalty; also with weights.
    """
    class_weight = "balanced" if is_weighted else None
    scoring = balanced_score if is_weighted or by_class else LOSS
    rows, mean, deviation = _standardised(views)
    num_views, counts = views.shape[1], _counts(labels, num_classes, groups)
    present, own = np.unique(labels, return_inverse=True)
    targets, strength, right = np.repeat(own, num_views), DEFAULT_STRENGTH, np.zeros(0, bool)
    held_out, random = None, None
    splits = _splits(own, num_views, seed) if groups is None else _grouped_splits(own, groups, num_views, seed)
    most = FOLDS if len(labels) <= MAX_CROSS_VALIDATED else 1
    if splits := splits[:most]:
        strength, of_folds = _cross_validated(rows, targets, splits, num_views, class_weight, scoring)
        right = _are_right(rows, targets, splits, of_folds, num_views)
    if groups is not None and splits:
        held_out = [groups[int(row // num_views)] for _, fold in splits for row in fold[::num_views]]
        if singles := _splits(own, num_views, seed)[:most]:
            chosen = np.array([strength])
            _, of_folds = _cross_validated(rows, targets, singles, num_views, class_weight, scoring, chosen)
            random = 100 * float(_are_right(rows, targets, singles, of_folds, num_views).mean())
    coefficients = _regression(rows, targets, strength / num_views, class_weight)
    weight, bias = np.zeros((num_classes, rows.shape[1])), np.full(num_classes, ABSENT_LOGIT)
    weight[present], bias[present] = coefficients[:, :-1] / deviation, coefficients[:, -1]
    bias -= weight @ mean
    weight, bias = weight.astype(np.float32), bias.astype(np.float32)
    return LinearProbe(weight, bias, strength, right, counts, held_out, random)


def held_out_right(
    rows: np.ndarray, labels: np.ndarray, seed: int = 0, groups: Sequence[str] | None = None
) -> tuple[np.ndarray, list[str] | None]:
    """Return whether ridge regression on the other folds predicts each image, fold after fold, and the groups of these
    images. It ranks features like logistic regression, in a hundredth of the time.

    Args:
        rows: (images features).
        labels: (images) class indices.
        seed: of the folds.
        groups: group of every image; a group is in one fold. None without groups.

    Returns:
        Booleans, none if a class has too few images or groups for cross-validation; the groups, or None without.
    """
    from sklearn.linear_model import RidgeClassifier  # takes seconds to import

    own, (scaled, *_) = np.unique(labels, return_inverse=True)[1], _standardised(rows[:, None])
    splits = _splits(own, 1, seed) if groups is None else _grouped_splits(own, groups, 1, seed)
    rights = [np.zeros(0, bool)]
    with threadpool_limits(1):
        for train, held_out in splits:
            model = RidgeClassifier(alpha=RIDGE * rows.shape[1]).fit(scaled[train], own[train])
            rights.append(model.predict(scaled[held_out]) == own[held_out])
    held_out_groups = None if groups is None else [groups[int(i)] for _, held_out in splits for i in held_out]
    return np.concatenate(rights), held_out_groups


def held_out_probabilities(
    views: np.ndarray, labels: np.ndarray, num_classes: int, fold_of: np.ndarray, is_used: np.ndarray | None = None
) -> np.ndarray:
    """Return the class probabilities (images classes) of every image by a classifier fitted to the other folds.

    The strength of the penalty is that with the least loss.

    Args:
        views: (images views features); the first view is predicted.
        labels: (images) class indices, of at least two classes.
        num_classes: number of classes.
        fold_of: (images) fold of every image, from 0; at least two folds.
        is_used: (images) whether the classifiers are fitted to an image, and the loss is that of it; None for all.
    """
    rows, *_ = _standardised(views)
    num_views, used = views.shape[1], np.ones(len(labels), bool) if is_used is None else is_used

    def rows_of(images: np.ndarray) -> np.ndarray:
        return (images[:, None] * num_views + np.arange(num_views)).ravel()

    folds = [np.flatnonzero(fold_of == fold) for fold in np.unique(fold_of)]
    splits = []
    for fold in folds:
        fitted = np.setdiff1d(np.flatnonzero(used), fold)
        is_scored = used[fold] & np.isin(labels[fold], labels[fitted])  # others have no probability to learn
        splits.append((rows_of(fitted), rows_of(fold[is_scored] if is_scored.any() else fold)))
    present, own = np.unique(labels, return_inverse=True)
    _, of_folds = _cross_validated(rows, np.repeat(own, num_views), splits, num_views)
    result = np.zeros((len(labels), num_classes))
    for fold, coefficients in zip(folds, of_folds, strict=True):
        result[np.ix_(fold, present)] = softmax(_logits(rows[fold * num_views], coefficients), axis=1)
    return result


def _standardised(views: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features of unit variance, a row per view (rows features), and their mean and deviation."""
    rows = views.reshape(-1, views.shape[-1]).astype(np.float64)
    mean, deviation = rows.mean(0), rows.std(0)
    deviation[deviation < 1e-6 * max(deviation.max(), 1e-12)] = np.inf  # constant features have no say
    return (rows - mean) / deviation, mean, deviation


def _splits(labels: np.ndarray, num_views: int, seed: int) -> list[Split]:
    """Return the rows of each fold of single images; none if a class would lack training images in a fold."""
    from sklearn.model_selection import StratifiedGroupKFold  # takes seconds to import

    counts = np.bincount(labels)
    if (folds := min(FOLDS, int(counts.min()))) < 2 or len(counts) < 2:
        return []
    targets = np.repeat(labels, num_views)
    kind = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    splits = list(kind.split(targets, targets, np.repeat(np.arange(len(labels)), num_views)))
    return splits if all(len(np.unique(targets[train])) == len(counts) for train, _ in splits) else []


def _grouped_splits(labels: np.ndarray, groups: Sequence[str], num_views: int, seed: int) -> list[Split]:
    """Return the rows of each fold that holds out groups. A class keeps a group for training in every fold."""
    names, numbers = labels.tolist(), range(1, FOLDS + 1)
    folds = [grouped_split(names, groups, grouped_fold(names, groups, FOLDS, fold, seed)) for fold in numbers]

    def rows_of(images: list[int]) -> np.ndarray:
        return (np.array(images)[:, None] * num_views + np.arange(num_views)).ravel()

    splits = [(rows_of(train), rows_of(val)) for train, val in folds if val]
    return splits if len(splits) > 1 and len(np.unique(labels)) > 1 else []


def _counts(labels: np.ndarray, num_classes: int, groups: Sequence[str] | None) -> np.ndarray:
    """Return the number of images of each class, or of groups of images."""
    units = set(zip(labels.tolist(), range(len(labels)) if groups is None else groups, strict=True))
    return np.bincount([label for label, _ in units], minlength=num_classes)


def _cross_validated(
    rows: np.ndarray,
    targets: np.ndarray,
    splits: Sequence[Split],
    num_views: int,
    class_weight: str | None = None,
    scoring: Any = LOSS,
    strengths: np.ndarray = STRENGTHS,
) -> tuple[float, np.ndarray]:
    """Return the strength with the least loss on held-out rows, and coefficients (splits classes features+1), each
    fitted without the held-out rows of its split, the bias last."""
    from sklearn.linear_model import LogisticRegressionCV  # takes seconds to import

    build: Any = LogisticRegressionCV  # its types miss some arguments
    model = build(  # along each path, the coefficients of one strength are the start for the next
        Cs=strengths / num_views,
        cv=splits,
        scoring=scoring,
        l1_ratios=(0,),
        refit=False,
        use_legacy_attributes=False,
        max_iter=ITERATIONS,
        class_weight=class_weight,
    ).fit(rows, targets)
    best = int(model.scores_[:, 0].mean(axis=0).argmax())
    return float(strengths[best]), _per_class(model.coefs_paths_[:, 0, best])


def _are_right(
    rows: np.ndarray, targets: np.ndarray, splits: Sequence[Split], of_folds: np.ndarray, num_views: int
) -> np.ndarray:
    """Return whether the prediction of each held-out image is correct, as it is and not mirrored, fold after fold."""
    images = [held_out[::num_views] for _, held_out in splits]
    return np.concatenate(
        [_logits(rows[of], own).argmax(1) == targets[of] for of, own in zip(images, of_folds, strict=True)]
    )


def _regression(rows: np.ndarray, targets: np.ndarray, strength: float, class_weight: str | None) -> np.ndarray:
    """Return the coefficients (classes features+1) of logistic regression, the bias last."""
    from sklearn.linear_model import LogisticRegression  # takes seconds to import

    if not targets.any():  # a single class
        return np.zeros((1, rows.shape[1] + 1))
    model = LogisticRegression(C=strength, max_iter=ITERATIONS, class_weight=class_weight).fit(rows, targets)
    return _per_class(np.column_stack([model.coef_, model.intercept_]))


def balanced_score(model: Any, rows: np.ndarray, targets: np.ndarray) -> float:
    """Return the negative cross-entropy in nats, in which every class counts the same; a scorer of scikit-learn."""
    from sklearn.metrics import log_loss
    from sklearn.utils.class_weight import compute_sample_weight

    weights = compute_sample_weight("balanced", targets)
    return -log_loss(targets, model.predict_proba(rows), sample_weight=weights, labels=model.classes_)


def _per_class(coefficients: np.ndarray) -> np.ndarray:
    """Return coefficients (..., classes features+1); scikit-learn has one row for two classes."""
    if coefficients.shape[-2] > 1:
        return coefficients
    return np.concatenate([-coefficients, coefficients], axis=-2) / 2


def _logits(rows: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    return rows @ coefficients[:, :-1].T + coefficients[:, -1]
