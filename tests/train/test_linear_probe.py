"""The linear probe: the classifier of scikit-learn, folded into the network; features from a cache that cannot lie."""

from __future__ import annotations

import contextlib
import csv
import sqlite3
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn

from tests.helpers import without_home
from tests.train import tiny
from weft.checkpoints import load_model_dir, save_model_dir
from weft.data import open_data
from weft.deploy import fold
from weft.errors import CheckpointError, StoppedError, UsageError
from weft.files import cache_dir
from weft.inference import features
from weft.inference.features import classifiers, read_features
from weft.inference.inputs import SourcePart
from weft.inference.measurement import evaluation_batches
from weft.machine.runtime import Runtime
from weft.models.building import create_model
from weft.models.contract import resized
from weft.recipes import Recipe
from weft.train import evaluate, train
from weft.train.linear_probe import Balance, fit, fit_heads

CPU = Runtime.of("cpu")
SETTINGS = {"head_init": "probe", "epochs": 2, "batch_size": 8, "optim.lr": 1e-4, "schedule.warmup_epochs": 0}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


def batches(photos: Path, network: nn.Module, size: int = 5):
    return evaluation_batches(open_data(str(photos)).train, network, size, 0)


def clouds(classes: int, images: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clouds of points, one per class: (images 2 width), and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    views = rng.normal(size=(classes, 1, width))[labels] + rng.normal(size=(images, 2, width))
    return (5 + 3 * views).astype(np.float32), labels


@pytest.mark.parametrize(("images", "width"), [(30, 200), (300, 8)], ids=["more features", "more images"])
@pytest.mark.parametrize("classes", [2, 3])
def test_it_is_logistic_regression_on_standardised_features(classes: int, images: int, width: int) -> None:
    """Folding and rotation change no prediction."""
    views, labels = clouds(classes, images, width)
    probe = fit(views, labels, classes)
    flat, repeated = views.reshape(-1, width), np.repeat(labels, 2)
    scaler = StandardScaler().fit(flat)
    model = LogisticRegression(C=probe.strength / 2, max_iter=5_000, tol=1e-6).fit(scaler.transform(flat), repeated)
    expected = model.predict_proba(scaler.transform(views[:, 0]))
    ours = softmax(views[:, 0] @ probe.weight.T + probe.bias, axis=1)
    assert ours == pytest.approx(expected, abs=0.02)
    assert probe.right.size == images


def test_the_penalty_follows_the_data() -> None:
    """Noise needs a strong penalty, and separable classes a weak one; the accuracy is of images that were held out."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    noise = fit(rng.normal(size=(60, 2, 50)).astype(np.float32), labels, 3)
    easy = fit(*clouds(3, 60, 50), 3)
    assert noise.strength < easy.strength
    assert noise.right.mean() < 0.6 < easy.right.mean()


def test_features_without_variation_have_no_say() -> None:
    views, labels = clouds(3, 30, 8)
    views[..., 3] = 7
    probe = fit(views, labels, 3)
    assert not probe.weight[:, 3].any()
    assert np.isfinite(probe.weight).all()


def test_a_class_with_one_image_leaves_no_cross_validation() -> None:
    views, labels = clouds(3, 30, 8)
    labels = np.where(labels == 2, 1, labels)
    labels[0] = 2
    probe = fit(views, labels, 3)
    assert probe.right.size == 0
    assert probe.describe(["ant", "bee", "fly"]).endswith(
        ", without cross-validation, because of classes with one image or group: fly. Add images."
    )


@pytest.mark.parametrize("present", [[1], [0, 2], [0, 2, 3]])
def test_a_class_without_an_image_is_never_predicted(present: list[int]) -> None:
    views, labels = clouds(len(present), 30, 8)
    probe = fit(views, np.array(present)[labels], 4, balance=Balance(is_weighted=True))
    assert np.isfinite(probe.weight).all()
    assert np.isfinite(probe.bias).all()
    alone = fit(views, labels, len(present), balance=Balance(is_weighted=True))
    assert probe.weight[present] == pytest.approx(alone.weight)
    assert set((views[:, 0] @ probe.weight.T + probe.bias).argmax(1)) <= set(present)
    classes = ["ant", "bee", "cat", "dog"]
    assert ", ".join(name for i, name in enumerate(classes) if i not in present) in probe.describe(classes)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_limit_below_the_number_of_classes(limit: int, photos: Path, tmp_path: Path) -> None:
    """The model is saved with finite weights, and predicts; every image that the limit left out is held out."""
    out = tmp_path / "run"
    train(photos, "ceit_nano_32", settings={**SETTINGS, "epochs": 1}, limit=limit, out=out, quiet=True)
    assert evaluate(out, photos, quiet=True).count == 3 * tiny.PER_CLASS - limit


@pytest.mark.parametrize("name", ["ceit_nano_32", "cvt_nano_32", "levit_nano_32", "resnet10t", "vit_tiny_patch16_224"])
def test_every_head_of_every_network_gets_its_classifier(name: str, photos: Path) -> None:
    """The network then predicts what the regression predicts; LeViT has two heads, each behind its own BatchNorm."""
    network = resized(create_model(name, num_classes=3), 32).eval()
    loader = batches(photos, network)
    probes = fit_heads(network, loader, 3, CPU, Recipe(epochs=0))
    assert len(probes) == len(classifiers(network)) == (2 if name.startswith("levit") else 1)
    views, labels = read_features(network, loader, CPU)
    expected = np.mean([v[:, 0] @ p.weight.T + p.bias for v, p in zip(views, probes, strict=True)], axis=0)
    with torch.no_grad():
        ours = torch.cat([network(images) for images, _ in loader]).numpy()
    assert ours == pytest.approx(expected, abs=1e-3 * float(np.abs(expected).max()))
    assert labels.tolist() == [int(label) for _, targets in loader for label in targets]


def test_features_come_from_the_cache_only_for_the_same_pixels_and_weights(photos: Path) -> None:
    network = create_model("ceit_nano_32", num_classes=3).eval()
    calls = []
    network.register_forward_hook(lambda *_: calls.append(1))
    first, _ = read_features(network, batches(photos, network), CPU)
    assert calls
    calls.clear()
    again, _ = read_features(network, batches(photos, network, size=3), CPU)  # other batches
    assert calls == []
    assert np.array_equal(first[0], again[0])

    with torch.no_grad():
        classifiers(network)[0].weight.zero_()  # has no part in the features
    read_features(network, batches(photos, network), CPU)
    assert calls == []
    with torch.no_grad():
        next(network.parameters()).add_(0.01)
    other, _ = read_features(network, batches(photos, network), CPU)
    assert calls
    assert not np.array_equal(first[0], other[0])


class Scaled(nn.Module):
    """A module of a user with a setting that is no weight."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.pretrained_cfg = {"classifier": "fc"}
        self.scale = scale
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc((self.conv(images) * self.scale).relu().mean((2, 3)))


def made(make: Any, name: str, **arguments: Any) -> Any:
    return make(create_model(name, **arguments))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: create_model("resnet10t"), lambda: create_model("resnet10t", global_pool="max")),
        *[
            (partial(made, make, name), partial(made, make, name, act_layer="relu"))
            for name in ("cvt_nano_32", "levit_nano_32")
            for make in (fold, nn.Module.eval)
        ],
    ],
)
def test_networks_with_equal_weights_have_features_of_their_own(first: Any, second: Any) -> None:
    one, same, other = first(), first(), second()
    for network in (same, other):
        network.load_state_dict(one.state_dict())
    assert features.network_key(one, CPU) == features.network_key(same, CPU) is not None
    assert features.network_key(one, CPU) != features.network_key(other, CPU)


def test_what_does_not_change_the_features_does_not_change_the_key(tmp_path: Path) -> None:
    """The number of classes, the rates of training, and a way through a model directory."""
    for name in ("ceit_nano_32", "levit_nano_32", "resnet10t"):
        one, other = create_model(name, num_classes=3), create_model(name, num_classes=5, drop_path_rate=0.2)
        heads = {f"{place}." for place, layer in one.named_modules() if layer in classifiers(one)}
        state = {key: value for key, value in one.state_dict().items() if not key.startswith(tuple(heads))}
        other.load_state_dict(state, strict=False)
        loaded, _ = load_model_dir(save_model_dir(other, tmp_path / name))
        keys = [features.network_key(network, CPU) for network in (one, other, loaded)]
        assert keys[0] == keys[1] == keys[2] is not None, name


def test_networks_that_no_name_describes_are_not_cached() -> None:
    """A module of the user's own, also if it is registered or is one of timm's that was changed."""
    changed: Any = create_model("resnet10t", num_classes=3)
    changed.act1 = nn.SiLU()
    changed.is_own_module = True  # as `register_module` marks it
    composed: Any = create_model("resnet10t", num_classes=3)
    composed.act1 = type("Act", (nn.Module,), {"__module__": "mine", "forward": lambda self, x: x})()
    for network in (Scaled(), changed, composed):
        assert features.network_key(network, CPU) is None


def test_images_of_another_shape_have_features_of_their_own() -> None:
    """Black images of 32 x 64 and 64 x 32 pixels have the same bytes."""
    network = create_model("resnet10t", num_classes=3).eval()
    wide = torch.zeros(1, 3, 32, 64)
    wide[..., 16:] = 1
    tall = wide.reshape(1, 3, 64, 32)
    with features.FeatureReader(network, CPU) as reader:
        reader(wide)
        np.testing.assert_array_equal(reader(tall), features._features(network, tall, CPU))


def rows_of_cache() -> int:
    with contextlib.closing(sqlite3.connect(cache_dir() / features.FILE)) as table:
        return table.execute("SELECT count(*) FROM rows").fetchone()[0]


def test_the_cache_drops_the_features_that_were_added_first(monkeypatch: pytest.MonkeyPatch) -> None:
    network = create_model("ceit_nano_32", num_classes=3).eval()
    images = torch.randn(400, 3, 32, 32)
    monkeypatch.setattr(features, "_features", lambda network, images, runtime: images.flatten(1)[:, :160].numpy())
    network.head = nn.Linear(160, 3)
    monkeypatch.setattr(features, "MAX_CACHED", 200_000)
    for part in (images[:200], images[200:]):
        with features.FeatureReader(network, CPU) as reader:
            reader(part)
    assert 100 < rows_of_cache() < 350
    assert (cache_dir() / features.FILE).stat().st_size < 400_000
    monkeypatch.setattr(features, "_features", None)  # the network cannot run
    with features.FeatureReader(network, CPU) as reader:
        reader(images[-100:])
        with pytest.raises(TypeError):
            reader(images[:50])


def test_two_processes_keep_the_features_of_each_other() -> None:
    network = create_model("ceit_nano_32", num_classes=3).eval()
    images = torch.randn(6, 3, 32, 32)
    with features.FeatureReader(network, CPU) as one, features.FeatureReader(network, CPU) as two:
        one(images[:4])
        two(images[2:])
    assert rows_of_cache() == 6


def test_a_large_cache_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    network = create_model("ceit_nano_32", num_classes=3).eval()
    width = classifiers(network)[0].in_features
    num_rows = 20_000_000 // (4 * width)
    cache = features.FeatureCache(str(features.network_key(network, CPU)), width)
    for start in range(0, num_rows, 1_000):
        values = np.zeros((1_000, width), np.float32)
        cache.put({b"%032d" % (start + place): row for place, row in enumerate(values)})
    cache.save()
    assert (cache_dir() / features.FILE).stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        with features.FeatureReader(network, CPU) as reader:
            reader(torch.zeros(1, 3, 32, 32))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_fitting_again_reads_only_new_images(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network computes the features of the images that are added, and of no other."""
    network, seen = create_model("ceit_nano_32", num_classes=3).eval(), []
    compute = features._features
    monkeypatch.setattr(features, "_features", lambda *args: (seen.append(len(args[1])), compute(*args))[1])
    source = open_data(str(photos)).train
    few = SourcePart(source, places=range(len(source) - 3))
    read_features(network, evaluation_batches(few, network, 4, 0), CPU)
    seen.clear()
    read_features(network, evaluation_batches(source, network, 4, 0), CPU)
    assert sum(seen) == 2 * 3  # as they are and mirrored


def test_features_that_are_not_finite_are_refused(photos: Path) -> None:
    network = create_model("ceit_nano_32", num_classes=3).eval()
    with torch.no_grad():
        next(network.parameters()).fill_(torch.nan)
    with pytest.raises(CheckpointError, match=r"features of CeiT must be finite; those of class\d.*png are not\."):
        read_features(network, batches(photos, network), CPU)


@pytest.mark.parametrize("damage", ["empty", "other", "half", "changed", "table"])
def test_a_damaged_cache_is_replaced(damage: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = create_model("ceit_nano_32", num_classes=3).eval()
    first, _ = read_features(network, batches(photos, network), CPU)
    path = cache_dir() / features.FILE
    whole = path.read_bytes()
    row = first[0][0, 0].tobytes()
    assert whole.count(row[:64]) == 1
    contents = {
        "empty": b"",
        "other": b"no table" * 1000,
        "half": whole[: len(whole) // 2],
        "changed": whole.replace(row[:64], bytes(64)),
        "table": whole[:4096] + b"\xff" * (len(whole) - 4096),
    }
    path.write_bytes(contents[damage])
    again, _ = read_features(network, batches(photos, network), CPU)
    np.testing.assert_allclose(first[0], again[0], atol=1e-5)  # other batches
    if damage != "changed":  # in which the other rows are still good
        monkeypatch.setattr(features, "_features", None)  # the network cannot run
    third, _ = read_features(network, batches(photos, network), CPU)
    np.testing.assert_allclose(first[0], third[0], atol=1e-5)


def test_a_cache_that_another_process_locks_costs_only_time(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "LOCKED_SECONDS", 0.1)
    network = create_model("ceit_nano_32", num_classes=3).eval()
    first, _ = read_features(network, batches(photos, network), CPU)
    with contextlib.closing(sqlite3.connect(cache_dir() / features.FILE)) as table:
        table.execute("BEGIN EXCLUSIVE")
        again, _ = read_features(network, batches(photos, network), CPU)
        table.rollback()
    assert np.array_equal(first[0], again[0])
    assert rows_of_cache() > 0


@pytest.mark.parametrize("has_home", [True, False])
def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    has_home: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
    if not has_home:
        without_home(monkeypatch)
    network = create_model("ceit_nano_32", num_classes=3).eval()
    views, _ = read_features(network, batches(photos, network), CPU)
    assert np.isfinite(views[0]).all()


def test_a_network_without_a_linear_classifier_is_refused() -> None:
    network = create_model("ceit_nano_32", num_classes=0).eval()
    with pytest.raises(UsageError, match=r"must end in a linear classifier to give features; CeiT does not"):
        classifiers(network)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_probe_alone_is_a_run(photos: Path, tmp_path: Path) -> None:
    """Evaluated, saved, reported, and finished: there is nothing to resume."""
    result = train(photos, "levit_nano_32", settings={**SETTINGS, "epochs": 0}, out=tmp_path / "run", quiet=True)
    assert (result.epochs, result.best_epoch) == (0, 0)
    assert [row["epoch"] for row in rows(tmp_path / "run")] == ["0"]
    assert evaluate(tmp_path / "run", photos, quiet=True).top1 == pytest.approx(result.top1)
    assert (tmp_path / "run" / "report" / "report.html").exists()
    again = train(resume=tmp_path / "run", quiet=True)
    assert again.top1 == result.top1


def test_the_best_model_may_be_the_one_before_training(photos: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "optim.lr": 1.0}
    result = train(photos, "ceit_nano_32", settings=settings, out=tmp_path / "run", quiet=True)
    accuracies = [float(row["val_top1"]) for row in rows(tmp_path / "run")]
    assert len(accuracies) == 3
    assert result.top1 == max(accuracies)
    assert result.best_epoch == accuracies.index(max(accuracies)) == 0


def test_a_stopped_run_ends_with_the_same_bits(photos: Path, tmp_path: Path) -> None:
    whole = train(photos, "levit_nano_32", settings=SETTINGS, out=tmp_path / "whole", quiet=True)
    with pytest.raises(StoppedError):
        train(photos, "levit_nano_32", settings=SETTINGS, out=tmp_path / "run", stop_after=1, quiet=True)
    result = train(resume=tmp_path / "run", quiet=True)
    assert (result.top1, result.best_epoch) == (whole.top1, whole.best_epoch)
    for name in ("best", "last"):
        file = f"{name}/model.safetensors"
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_no_epochs_need_a_probe(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"epochs must be at least 1, or 0 with --set head_init=probe; got 0\."):
        train(photos, "ceit_nano_32", settings={"epochs": 0}, out=tmp_path / "run", quiet=True)


def test_a_probe_corrects_class_frequencies() -> None:
    """With rare classes, weights raise the mean recall of the classes."""
    views, labels = clouds(3, 900, 6, seed=1)
    kept = np.flatnonzero((labels == 0) | (np.arange(900) % 15 == 1) | (np.arange(900) % 15 == 2))
    test_views, test_labels = clouds(3, 900, 6, seed=1)

    def mean_recall(balance: Balance) -> float:
        probe = fit(views[kept], labels[kept], 3, balance=balance)
        predicted = (test_views[:, 0] @ probe.weight.T + probe.bias).argmax(1)
        return float(np.mean([(predicted[test_labels == label] == label).mean() for label in range(3)]))

    plain = mean_recall(Balance())
    assert mean_recall(Balance(is_weighted=True)) > plain + 0.02


def test_groups_are_in_one_fold_of_the_probe() -> None:
    """Ten images each of the same object: what the other folds know of it must not count."""
    rng = np.random.default_rng(0)
    objects = rng.normal(size=(20, 1, 50))
    views = np.repeat(objects, 10, axis=0) + 0.01 * rng.normal(size=(200, 2, 50))
    labels, groups = np.repeat(np.arange(20) % 2, 10), [str(number // 10) for number in range(200)]
    assert fit(views, labels, 2).right.mean() > 0.99
    assert fit(views, labels, 2, groups=groups).right.mean() < 0.8
    assert fit(views, labels, 2, groups=[f"{label}" for label in labels]).right.size == 0, "a group per class"
