"""The linear probe: the classifier of scikit-learn, folded into the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from tests.train import tiny
from weft.data import open_data
from weft.errors import StoppedError, UsageError
from weft.inference.features import classifiers, read_features
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.models.building import create_model
from weft.models.contract import resized
from weft.recipes import Recipe, load_recipe
from weft.runs.directory import read_metrics
from weft.train import evaluate, linear_probe, train
from weft.train.linear_probe import LinearProbe, balanced_score, fit, fit_heads

CPU = Runtime.of("cpu")
CLASSES = ["ant", "bee", "cat", "dog"]
PROBE = {"head_init": "probe", "epochs": 0, "batch_size": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def clouds(classes: int, images: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clouds of points, one per class: (images 2 width), and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    views = rng.normal(size=(classes, 1, width))[labels] + rng.normal(size=(images, 2, width))
    return (5 + 3 * views).astype(np.float32), labels


def logits(probe: LinearProbe, views: np.ndarray) -> np.ndarray:
    return views[:, 0] @ probe.weight.T + probe.bias


@pytest.mark.parametrize(("images", "width"), [(30, 200), (300, 8)], ids=["more features", "more images"])
@pytest.mark.parametrize("classes", [2, 3])
def test_it_is_logistic_regression_on_standardised_features(classes: int, images: int, width: int) -> None:
    """Folding changes no prediction, and a feature without variation has no say."""
    views, labels = clouds(classes, images, width)
    views[..., 3] = 7
    probe = fit(views, labels, classes)
    flat, repeated = views.reshape(-1, width), np.repeat(labels, 2)
    scaler = StandardScaler().fit(flat)
    model = LogisticRegression(C=probe.strength / 2, max_iter=5_000, tol=1e-6).fit(scaler.transform(flat), repeated)
    expected = model.predict_proba(scaler.transform(views[:, 0]))
    assert softmax(logits(probe, views), axis=1) == pytest.approx(expected, abs=0.02)
    assert not probe.weight[:, 3].any()
    assert probe.right.size == images


def test_the_penalty_follows_the_data() -> None:
    """Noise needs a strong penalty, and separable classes a weak one; the accuracy is of images that were held out."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    noise = fit(rng.normal(size=(60, 2, 50)).astype(np.float32), labels, 3)
    easy = fit(*clouds(3, 60, 50), 3)
    assert noise.strength < easy.strength
    assert noise.right.mean() < 0.6 < easy.right.mean()


def test_a_class_with_one_image_leaves_no_cross_validation() -> None:
    views, labels = clouds(3, 30, 8)
    labels = np.where(labels == 2, 1, labels)
    labels[0] = 2
    probe = fit(views, labels, 3)
    assert probe.right.size == 0
    assert "without cross-validation, because of classes with one image or group: cat." in probe.describe(CLASSES[:3])


@pytest.mark.parametrize("present", [[1], [0, 2], [0, 2, 3]])
def test_a_class_without_an_image_is_never_predicted(present: list[int]) -> None:
    views, labels = clouds(len(present), 30, 8)
    probe = fit(views, np.array(present)[labels], 4, is_weighted=True)
    assert np.isfinite(probe.bias).all()
    assert probe.weight[present] == pytest.approx(fit(views, labels, len(present), is_weighted=True).weight)
    assert set(logits(probe, views).argmax(1)) <= set(present)
    assert ", ".join(name for i, name in enumerate(CLASSES) if i not in present) in probe.describe(CLASSES)


def test_groups_are_in_one_fold() -> None:
    """Ten images each of the same object: what the other folds know of it must not count."""
    rng = np.random.default_rng(0)
    views = np.repeat(rng.normal(size=(20, 1, 50)), 10, axis=0) + 0.01 * rng.normal(size=(200, 2, 50))
    labels, groups = np.repeat(np.arange(20) % 2, 10), [str(number // 10) for number in range(200)]
    assert fit(views, labels, 2).right.mean() > 0.99
    probe = fit(views, labels, 2, groups=groups)
    assert probe.right.mean() < 0.8
    assert probe.right.size == len(probe.groups) == 200
    assert "by groups; with a random split it would be 100.00 %" in probe.describe(["a", "b"])
    a_group_per_class = fit(views, labels, 2, groups=[f"{label}" for label in labels])
    assert a_group_per_class.right.size == 0


def test_a_class_of_one_group_is_never_held_out_and_others_are() -> None:
    rng = np.random.default_rng(0)
    views, labels = rng.normal(size=(90, 1, 50)), np.repeat([0, 1, 2], 30)
    probe = fit(views, labels, 3, groups=["single" if label == 2 else str(i // 5) for i, label in enumerate(labels)])
    assert probe.right.size == 60
    assert "single" not in set(probe.groups)


def test_weights_raise_the_mean_recall_of_rare_classes() -> None:
    views, labels = clouds(3, 900, 6, seed=1)
    kept = np.flatnonzero((labels == 0) | (np.arange(900) % 15 == 1) | (np.arange(900) % 15 == 2))

    def mean_recall(*, is_weighted: bool) -> float:
        predicted = logits(fit(views[kept], labels[kept], 3, is_weighted=is_weighted), views).argmax(1)
        return float(np.mean([(predicted[labels == label] == label).mean() for label in range(3)]))

    assert mean_recall(is_weighted=True) > mean_recall(is_weighted=False) + 0.02


def test_in_the_balanced_score_every_class_counts_the_same() -> None:
    random = np.random.default_rng(0)
    labels = np.array([0] * 36 + [1] * 4)
    rows = random.normal(0, 1, (40, 3)) + labels[:, None]
    model = LogisticRegression().fit(rows, labels)
    losses = [log_loss(labels[labels == k], model.predict_proba(rows[labels == k]), labels=[0, 1]) for k in (0, 1)]
    assert balanced_score(model, rows, labels) == pytest.approx(-(losses[0] + losses[1]) / 2)
    assert balanced_score(model, rows[:36], labels[:36]) == pytest.approx(-losses[0])  # no image of the other class


@pytest.mark.parametrize(
    ("settings", "by_class"),
    [
        ({}, False),
        ({"loss.class_weights": "balanced"}, True),
        ({"data.sampling": "balanced"}, True),
        ({"best": "balanced"}, True),
    ],
    ids=str,
)
def test_the_balance_of_a_run_decides_the_score(settings, by_class, noise: Path, monkeypatch) -> None:
    scored: list[Any] = []
    monkeypatch.setattr(linear_probe, "balanced_score", lambda model, *_: scored.append(model) or 0.0)
    network: Any = resized(create_model("cvt_nano_32", num_classes=3), 32)
    loader, recipe = evaluation_batches(open_data(noise).train, network, 5, 0), load_recipe(overrides=settings.items())
    fit_heads(network, loader, 3, CPU, recipe)
    assert bool(scored) == by_class


@pytest.mark.parametrize("name", ["ceit_nano_32", "cvt_nano_32", "levit_nano_32", "resnet10t", "vit_tiny_patch16_224"])
def test_every_head_of_every_network_gets_its_classifier(name: str, noise: Path) -> None:
    """The network then predicts what the regression predicts; LeViT has two heads, each behind its own BatchNorm."""
    network: Any = resized(create_model(name, num_classes=3), 32).eval()
    loader = evaluation_batches(open_data(noise).train, network, 5, 0)
    probes = fit_heads(network, loader, 3, CPU, Recipe(epochs=0))
    assert len(probes) == len(classifiers(network)) == (2 if name.startswith("levit") else 1)
    views, labels = read_features(network, loader, CPU)
    expected = np.mean([logits(probe, own) for own, probe in zip(views, probes, strict=True)], axis=0)
    with torch.no_grad():
        ours = torch.cat([network(images) for images, _ in loader]).numpy()
    assert ours == pytest.approx(expected, abs=1e-3 * float(np.abs(expected).max()))
    assert labels.tolist() == [int(label) for _, targets in loader for label in targets]


def test_a_probe_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_probe, "available_gib", lambda: 20.0)
    linear_probe._check_memory(10_000, 10_000)
    with pytest.raises(UsageError, match=r"44,000 x 22,000 need about 22 GiB, and 20 GiB are available\. .*=random"):
        linear_probe._check_memory(44_000, 22_000)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_probe_alone_is_a_run(noise: Path, tmp_path: Path) -> None:
    """Evaluated, saved, reported, and finished: there is nothing to resume. Also with fewer images than classes."""
    out = tmp_path / "run"
    result = train(noise, "levit_nano_32", settings=PROBE, limit=2, out=out, quiet=True)
    assert (result.epochs, result.best_epoch) == (0, 0)
    assert [row.epoch for row in read_metrics(out / "metrics.csv")] == [0]
    assert evaluate(out, noise, quiet=True).count == 3 * tiny.PER_CLASS - 2  # all that the limit left out
    assert (out / "report" / "report.html").exists()
    assert train(resume=out, quiet=True).top1 == result.top1


def test_the_best_model_may_be_the_one_before_training_also_of_a_resumed_run(noise: Path, tmp_path: Path) -> None:
    settings = {**PROBE, "epochs": 2, "optim.lr": 1.0, "schedule.warmup_epochs": 0, "model_args.depth": [1, 1, 1]}
    whole = train(noise, "levit_nano_32", settings=settings, out=tmp_path / "whole", quiet=True)
    accuracies = [row.val_top1 for row in read_metrics(whole.out / "metrics.csv")]
    assert len(accuracies) == 3
    assert whole.best_epoch == accuracies.index(max(accuracies)) == 0
    with pytest.raises(StoppedError):
        train(noise, "levit_nano_32", settings=settings, out=tmp_path / "run", stop_after=1, quiet=True)
    result = train(resume=tmp_path / "run", quiet=True)
    assert (result.top1, result.best_epoch) == (whole.top1, 0)
    for file in ("best/model.safetensors", "last/model.safetensors"):
        assert (result.out / file).read_bytes() == (whole.out / file).read_bytes()
