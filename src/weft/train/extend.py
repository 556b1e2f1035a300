"""`weft train DATA --extend RUN`: add classes and images to a run, with the features of its images.

The layers stay frozen; the classifier is fitted again, to the features of old and new images together. The old images
are not needed where the run stored their features (`weft.train.stored_features`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.checkpoints import load_model_dir, save_model_dir
from weft.data import Splits
from weft.data.index.fingerprint import Fingerprint
from weft.data.index.fingerprint import fingerprint as fingerprint_of
from weft.errors import CheckpointError, UsageError
from weft.files import write_text
from weft.inference.calibration import calibrate, calibration_lines
from weft.inference.feature_map import map_of
from weft.inference.features import classifiers, logits_of, split_heads
from weft.inference.metrics import Evaluation, accuracy_lines, confidence_lines, measure
from weft.inference.report import write_report
from weft.intervals import accuracy_text
from weft.progress import clock, counting, say
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import overrides_of
from weft.recipes.rules import check_rules
from weft.runs.directory import (
    EXTENSION,
    FEATURES,
    FINGERPRINT,
    PUBLIC_CLASSIFIER,
    EpochRow,
    Reservation,
    write_metrics,
)
from weft.runtime import Runtime
from weft.text import first_few, printable
from weft.train.environment import environment
from weft.train.extension_data import old_features, open_new, sides_of_groups, without_copies
from weft.train.few_images import with_available_weights
from weft.train.linear_probe import LinearProbe, balance_of, fit_features, set_heads
from weft.train.request import Request
from weft.train.stored_features import StoredFeatures, collect
from weft.train.unknown import fit_detector_on_features

KEPT = ("model", "model_args", "img_size")  # settings of the old run that the new one keeps
NAMED = 6  # class names in a note


@dataclass(frozen=True)
class Extension:
    """Result of an extension. Accuracies are in percent; None without held-out images.

    Attributes:
        run: the extended run.
        classes: names of the new classes.
        old_count: number of held-out images of the old run.
        before: their accuracy by the old run, among its classes.
        after: their accuracy by the new run, among all classes.
        new_count: number of held-out images of the new data.
        new: their accuracy by the new run.
    """

    run: str
    classes: list[str]
    old_count: int
    before: float | None
    after: float | None
    new_count: int
    new: float | None

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) lines for the report and the terminal."""
        lines = [("new classes", ", ".join(map(printable, self.classes)) or "none")]
        if self.before is not None and self.after is not None:
            lines += [
                ("old held-out images before", accuracy_text(self.before, self.old_count)),
                ("old held-out images after", accuracy_text(self.after, self.old_count)),
            ]
        if self.new is not None:
            lines.append(("new held-out images", accuracy_text(self.new, self.new_count)))
        return lines


@dataclass(frozen=True)
class ExtendedRun:
    """Result of `extend`: recipe, evaluation of all held-out images, comparison, duration in seconds."""

    recipe: Recipe
    evaluation: Evaluation
    extension: Extension
    seconds: float


def extended_recipe(request: Request) -> Recipe:
    """Return the recipe of a run that extends another: that of the old run, with the new data and the given settings.

    Args:
        request: what the user asked for, with `extend`.

    Raises:
        CheckpointError: the run to extend is not a run directory.
        UsageError: a setting that an extension does not support, or settings that contradict each other.
    """
    loaded, _ = with_available_weights(request)
    run = Path(str(loaded.extend))
    if not (run / "recipe.yaml").is_file():
        raise CheckpointError(
            f"--extend must name a run directory; {printable(str(run))} has no recipe.yaml. For weights alone: weft"
            f" train {loaded.data.source} --from {printable(str(run))}."
        )
    old = load_recipe(run / "recipe.yaml")
    for key in KEPT:
        value, default = getattr(loaded, key), getattr(Recipe(), key)
        if value not in (default, getattr(old, key)):
            raise UsageError(
                f"An extended run keeps its {key}, which the features of its images depend on; it is"
                f" {getattr(old, key)}, got {value}. Omit it, or train a new run."
            )
    refused = {
        "epochs": loaded.epochs not in (None, 0),
        "steps": loaded.steps is not None,
        "folds": loaded.data.folds is not None,
        "start_from": loaded.start_from is not None,
    }
    if names := [name for name, is_given in refused.items() if is_given]:
        raise UsageError(
            f"--extend fits the classifier on frozen features, so it does not support {names[0]}. Omit it; to train all"
            f" layers on all images, join the folders: weft train FOLDER --from {printable(str(run))}."
        )
    overrides = overrides_of(loaded.data.source, dict(request.settings), {})
    result = load_recipe(request.recipe, overrides, base=run / "recipe.yaml")
    only_new = {"limit": loaded.data.limit, "folds": None, "fold": None, "train_fraction": loaded.data.train_fraction}
    if loaded.data.other is None and result.data.other is not None and not Path(result.data.other).exists():
        only_new["other"] = None
    recipe = dataclasses.replace(
        result,
        **{key: getattr(old, key) for key in KEPT},
        name=loaded.name,
        device=loaded.device,
        extend=str(run),
        start_from=None,
        pretrained=False,
        head_init="probe",
        epochs=0,
        steps=None,
        data=dataclasses.replace(result.data, **only_new),
        optim=dataclasses.replace(result.optim, freeze="none"),  # which needs `start_from` or `pretrained`
    )
    check_rules(recipe)
    return recipe


def extend(recipe: Recipe, reservation: Reservation, runtime: Runtime, *, quiet: bool) -> ExtendedRun:
    """Fit the classifier of a run to its old images and new ones, and write a run directory.

    Args:
        recipe: result of `extended_recipe`.
        reservation: of the new run directory.
        runtime: device and precision.
        quiet: print no progress and no notes.

    Raises:
        UsageError: the network has no linear classifier.
        DataError: the new data cannot be used, have no new image, or the features of the old images are missing.
        CheckpointError: the model or the features of the old run cannot be read.
    """
    start, run, out = time.perf_counter(), Path(str(recipe.extend)), reservation.path

    def note(text: str) -> None:
        if not quiet:
            say(text)

    network, names = load_model_dir(run / "best")
    if names is None:
        raise CheckpointError(f"A run must name its classes to be extended; {run / 'best'} does not. Train it again.")
    network = network.to(runtime.device)
    classifiers(network)
    if not hasattr(network, "reset_classifier"):
        raise UsageError(
            f"A network needs the method reset_classifier to be extended; {type(network).__name__} has none."
        )
    old = old_features(run, network, names, runtime, recipe.workers, note, quiet)
    recipe, splits, classes = open_new(recipe, names, sides_of_groups(old), note, quiet)
    note(f"{len(splits.train):,} new images for training, {len(splits.val):,} held out.")
    for text in splits.notes[1:]:  # the first one counts old classes also
        if not text.startswith("No validation image"):
            note(text)
    number = len(splits.train) + len(splits.val)
    with counting(number, quiet=quiet, task_name="features") as count:
        new = collect(network, splits, runtime, recipe.workers, count)
    new = without_copies(old, new, classes, str(recipe.data.source), note)
    for text in _class_notes(new, names, classes):
        note(text)

    before = logits_of(network, old.features[:, 0]).argmax(1) == old.labels
    everything = old.joined(new)
    train = everything.chosen(~everything.is_held_out)
    num_views = 2 if recipe.augment.hflip else 1  # each image, and its mirror image
    features = split_heads(network, train.features[:, :num_views])
    groups = [str(group) or f"/{key}" for group, key in zip(train.groups, train.keys, strict=True)]
    probes = fit_features(
        features,
        train.labels,
        len(classes),
        balance=balance_of(recipe),
        groups=groups if any(train.groups) else None,
        seed=recipe.seed,
    )
    network = _with_classes(network, len(classes), probes)
    for probe in probes:
        note(probe.describe(classes))

    is_old = np.arange(len(everything.labels)) < len(old.labels)
    held_out = everything.is_held_out
    right = logits_of(network, everything.features[:, 0]).argmax(1) == everything.labels
    extension = Extension(
        str(run),
        classes[len(names) :],
        int((is_old & held_out).sum()),
        _percent(before[old.is_held_out]),
        _percent(right[is_old & held_out]),
        int((~is_old & held_out).sum()),
        _percent(right[~is_old & held_out]),
    )
    images = everything.chosen(held_out)
    confidence = calibrate(logits_of(network, images.features[:, 0]), images.labels)
    evaluation = _evaluate(network, images, classes, runtime, confidence.temperature)
    gone = load_recipe(run / "recipe.yaml").data.other
    if recipe.data.other is None and gone is not None and not Path(gone).exists():
        note(f"{printable(gone)} no longer exists; only held-out images set the threshold of unknown images.")
    network.unknown = fit_detector_on_features(network, everything, recipe, confidence, runtime, run)
    network.confidence = confidence
    result = ExtendedRun(recipe, evaluation, extension, time.perf_counter() - start)
    _write(result, network, everything, splits, classes, reservation, runtime)
    note(f"{out / FEATURES}: features of {len(everything.labels):,} images, {_size(out / FEATURES)}.")
    return result


def _percent(right: np.ndarray) -> float | None:
    return 100 * float(right.mean()) if right.size else None


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def _class_notes(new: StoredFeatures, names: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return sentences about the new classes and those that get more images."""
    counts = np.bincount(new.labels, minlength=len(classes))
    added = [f"{printable(name)} {count}" for name, count in zip(names, counts, strict=False) if count]
    fresh = [
        f"{printable(name)} {count}" for name, count in zip(classes[len(names) :], counts[len(names) :], strict=True)
    ]
    return [f"New classes: {first_few(fresh, NAMED)}." if fresh else "No new class."] + (
        [f"More images of classes of the run: {first_few(added, NAMED)}."] if added else []
    )


def _with_classes(network: Any, num_classes: int, probes: Sequence[LinearProbe]) -> Any:
    """Return the network with classifiers of `num_classes`; all other weights stay, also those of layers in a head."""
    state = network.state_dict()
    network.reset_classifier(num_classes)
    fresh = network.state_dict()
    kept = {name: value for name, value in state.items() if name in fresh and fresh[name].shape == value.shape}
    network.load_state_dict(kept, strict=False)
    set_heads(network, probes)
    return network.eval()


class _Heads(nn.Module):
    """The classifiers of a network as a module: features (b features) to logits (b classes)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.of = [network]  # not a child: it stays in its mode

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # as the calibration
            return torch.from_numpy(logits_of(self.of[0], features.cpu().numpy()))


def _evaluate(
    network: nn.Module, images: StoredFeatures, classes: Sequence[str], runtime: Runtime, temperature: float
) -> Evaluation:
    features, labels = torch.from_numpy(images.features[:, 0]), torch.from_numpy(images.labels)
    keys = [printable(str(key)) for key in images.keys]
    return measure(
        _Heads(network),
        [(features, labels)],
        classes,
        runtime,
        temperature=temperature,
        key_of=lambda place: keys[place],
    )


def _write(
    result: ExtendedRun,
    network: nn.Module,
    everything: StoredFeatures,
    splits: Splits,
    classes: Sequence[str],
    reservation: Reservation,
    runtime: Runtime,
) -> None:
    """Write the files of a run that exist without epochs."""
    recipe, evaluation, out = result.recipe, result.evaluation, reservation.path
    reservation.move_aside()
    record = environment(runtime, splits) | {
        "train_images": int((~everything.is_held_out).sum()),
        "val_images": int(everything.is_held_out.sum()),
        "classes": list(classes),
    }
    write_text(out / "recipe.yaml", dump(dataclasses.replace(recipe, environment=record)))
    old = Path(result.extension.run) / FINGERPRINT
    images = fingerprint_of(splits)
    (Fingerprint.read(old).joined(images) if old.is_file() else images).write(out / FINGERPRINT)
    for name in ("best", "last"):
        save_model_dir(network, out / name, label_names=classes, force=True)
    if (public := Path(result.extension.run) / PUBLIC_CLASSIFIER).is_file():
        shutil.copyfile(public, out / PUBLIC_CLASSIFIER)  # for further extensions
    everything.write(out / FEATURES)
    none = math.nan
    accuracies = evaluation.loss, evaluation.top1, evaluation.top5
    write_metrics(out / "metrics.csv", [EpochRow(0, 0, 0.0, none, none, *accuracies, 0.0, 0.0, result.seconds)])
    write_text(out / EXTENSION, json.dumps(dataclasses.asdict(result.extension), indent=2) + "\n")
    summary = [
        ("extends", result.extension.run),
        *result.extension.lines(),
        ("held-out images", f"{evaluation.count}"),
        *accuracy_lines(evaluation, "held-out images"),
        *confidence_lines(evaluation, is_fitted=True),
        *calibration_lines(network),
        ("training images", f"{int((~everything.is_held_out).sum())}"),
        ("training and evaluation", f"{clock(result.seconds)} on {runtime.device.type}"),
        ("repeat with", f"weft train --config {out / 'recipe.yaml'} --out DIR"),
    ]
    held_out = everything.chosen(everything.is_held_out)
    drawn = map_of(held_out.features[:, 0], held_out.labels, evaluation)
    title = f"{recipe.model} on {recipe.data.source}"
    write_report(out / "report", title, summary, evaluation, features=drawn, is_fitted=True)
    reservation.discard_replaced()
    reservation.is_kept = True
