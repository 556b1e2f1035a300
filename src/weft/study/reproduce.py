"""Reproduce rows of the papers' tables: count a network, evaluate its public weights, or train it with its recipe."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.bench.cost import Cost, cost
from weft.checkpoints import load_checkpoint, save_model_dir
from weft.checkpoints.config import read_config
from weft.checkpoints.hub import create_model, download_weights, is_downloaded
from weft.checkpoints.resolve import model_dir
from weft.errors import CheckpointError, UsageError
from weft.files import cache_dir
from weft.inference.evaluation import evaluate
from weft.models.families import VARIANTS, is_model
from weft.models.family import PublicWeights
from weft.models.papers import DATA_SETS, TABLES, Printed, papers
from weft.recipes import Recipe, load_recipe, recipe_text
from weft.runtime import Runtime
from weft.study.plan import Study, read_study, study_names
from weft.study.statistics import accuracy
from weft.train.timing import time_step

IMAGENET = "imagenet"
TRAINING_IMAGES = {  # CeiT (arXiv 2103.11816), section 4, and DeiT (arXiv 2012.12877), Table 6
    "imagenet": 1_281_167,
    "inat18": 437_513,
    "inat19": 265_240,
    "cars": 8_144,
    "flowers": 2_040,
    "pets": 3_680,
    "cifar10": 50_000,
    "cifar100": 50_000,
}
FIRST_BATCH = {"cpu": 8, "cuda": 1024}  # images per step of a measurement, halved until memory suffices


@dataclass(frozen=True)
class Count:
    """Size of a network, as weft counts it and as the paper prints it.

    Attributes:
        params, macs: counted by weft.
        params_m, macs_g: in the paper, in millions and 10^9; None if not printed.
        params_percent, macs_percent: difference of weft's count in percent of the paper's; 0 if they are equal when
            rounded as in the paper, None if not printed.
    """

    params: int
    macs: int
    params_m: float | None
    macs_g: float | None
    params_percent: float | None
    macs_percent: float | None


@dataclass(frozen=True)
class EvaluationPlan:
    """How to evaluate the public weights of a row.

    Attributes:
        weights: OWNER/NAME on the hub, or how to get the file.
        status: cached, download or by hand.
        data: the ImageNet that was given or found; None if there is none.
        top1: in the paper, in percent.
        command: of `weft reproduce`.
    """

    weights: str
    status: str
    data: str | None
    top1: float | None
    command: str


@dataclass(frozen=True)
class TrainingSpeed:
    """Throughput of training steps of a network on one device, without loading of images.

    Attributes:
        device, batch_size: what was measured; the batch is smaller than that of the recipe if memory does not suffice.
        images_per_second: throughput.
        hours: duration of the whole run at this throughput.
    """

    device: str
    batch_size: int
    images_per_second: float
    hours: float


@dataclass(frozen=True)
class TrainingPlan:
    """How to train the network of a row.

    Attributes:
        recipe: name of the recipe.
        datasets: names of the datasets, one run for each.
        epochs, steps: length of a run; one of them is None.
        batch_size: images per step.
        images: training images of all runs and epochs together.
        is_finetuning: the run starts from weights of another row.
        paper_cost: cost in the paper, from the recipe; '' if not stated.
        command: of `weft train`.
        speed: measured here; None if not measured.
    """

    recipe: str
    datasets: tuple[str, ...]
    epochs: int | None
    steps: int | None
    batch_size: int
    images: int
    is_finetuning: bool
    paper_cost: str
    command: str
    speed: TrainingSpeed | None = None


@dataclass(frozen=True)
class RowPlan:
    """A row of a paper, and what weft can do about it.

    Attributes:
        table: of TABLES.
        row: the row, as the paper prints it.
        count, evaluation, training: None if weft cannot.
        obstacle: why weft cannot train the network; '' if it can.
    """

    table: str
    row: Printed
    count: Count | None
    evaluation: EvaluationPlan | None
    training: TrainingPlan | None
    obstacle: str

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        row = self.row
        printed = {key: getattr(row, key) for key in ("paper", "model", "builds", "size", "top1", "elsewhere", "note")}
        own = dataclasses.asdict(self)
        del own["row"], own["table"]
        return {**printed, "table": self.table, "table_in_paper": row.table, **own}


@dataclass(frozen=True)
class RowEvaluation:
    """Accuracy of weights, next to the paper's.

    Attributes:
        model, weights, data, images: what was evaluated; `images` is their number.
        top1, low, high: accuracy in percent, and its 95 % confidence interval over the images.
        paper: accuracy in the paper, in percent.
        difference: measured minus paper, in percentage points.
    """

    model: str
    weights: str
    data: str
    images: int
    top1: float
    low: float
    high: float
    paper: float | None
    difference: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return dataclasses.asdict(self)


def paper_studies(paper: str) -> dict[str, Study]:
    """Return the studies of `weft study` that repeat tables of a paper, by name; their networks are not built."""
    studies = {name: read_study(name) for name in study_names()}
    named = rf"\b{papers()[paper.lower()]}\b(?!')"  # a study with parts that are "DeiT's" repeats no table of DeiT
    return {name: study for name, study in studies.items() if re.search(named, study.source)}


def find_imagenet() -> str | None:
    """Return the name of ImageNet for `--data` if it is where `weft train imagenet` reads it; None if it is not."""
    root = Path(os.environ.get("WEFT_DATA") or cache_dir() / "data")
    return IMAGENET if (root / "val").is_dir() and (root / "meta.bin").is_file() else None


def plan_row(table: str, row: Printed, data: str | None = None) -> RowPlan:
    """Return what weft can do about a row.

    Args:
        table: of TABLES.
        row: the row.
        data: ImageNet, as in `weft evaluate`; None if there is none.
    """
    training, evaluation = _training(table, row, data), _evaluation(row, data)
    obstacle = row.obstacle or ("" if row.builds else row.note)
    if training is None and not obstacle:
        obstacle = "weft has no recipe for this network"
    return RowPlan(table, row, _count(row), evaluation, training, obstacle)


def _count(row: Printed) -> Count | None:
    if row.params is None or row.macs is None:
        return None
    differences = (_percent(row.params / 1e6, row.params_m), _percent(row.macs / 1e9, row.macs_g))
    return Count(row.params, row.macs, row.params_m, row.macs_g, *differences)


def _percent(counted: float, printed: float | None) -> float | None:
    if printed is None:
        return None
    decimals = len(f"{printed:g}".partition(".")[2])
    return 0.0 if round(counted, decimals) == printed else 100 * (counted / printed - 1)


def _weights(row: Printed) -> tuple[PublicWeights | None, dict[str, Any]]:
    """Return the public weights of a row, and the preprocessing that differs from the model's."""
    name, _, settings = row.weights.partition(" ")
    if not name:
        return None, {}
    source = VARIANTS[row.builds].weights if name == "own" else PublicWeights(name)
    values = (setting.partition("=") for setting in settings.split())
    return source, {key: value if key == "crop_mode" else float(value) for key, _, value in values}


def _evaluation(row: Printed, data: str | None) -> EvaluationPlan | None:
    source, _ = _weights(row)
    if source is None:
        return None
    command = ["weft", "reproduce", row.paper.lower(), "--row", row.model, "--data", data or "IMAGENET", "--run"]
    if not source.repo:
        command += ["--weights", "FILE"]
    status = ("cached" if is_downloaded(source) else "download") if source.repo else "by hand"
    return EvaluationPlan(source.repo or source.by_hand, status, data, row.top1, shlex.join(command))


def recipe_of_row(row: Printed) -> tuple[str, dict[str, Any]]:
    """Return the recipe of a row, and the settings that override it."""
    name, *settings = row.recipe.split()
    values: dict[str, Any] = {"model": row.builds}
    values |= {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    own_size = VARIANTS[row.builds].size if row.builds in VARIANTS else row.size
    if own_size != row.size and load_recipe(name).img_size != row.size:
        values["img_size"] = row.size
    return name, values


def _training(table: str, row: Printed, data: str | None) -> TrainingPlan | None:
    if not row.recipe:
        return None
    name, settings = recipe_of_row(row)
    recipe, text = load_recipe(name, settings.items()), recipe_text(name)
    elsewhere = [key for key, shown in DATA_SETS.items() if shown in row.elsewhere and key != IMAGENET]
    datasets = [IMAGENET] if table == TABLES[0] else elsewhere
    assert isinstance(recipe.batch_size, int), name
    per_run = recipe.steps * recipe.batch_size if recipe.steps else 0
    images = sum(per_run or (recipe.epochs or 0) * TRAINING_IMAGES[key] for key in datasets)
    is_finetuning = "--from" in text
    source = data if data and datasets == [IMAGENET] else datasets[0] if len(datasets) == 1 else "DATA"
    options = [
        part
        for key, value in settings.items()
        for part in (("--set", f"{key}={value}") if "." in key else (f"--{key.replace('_', '-')}", str(value)))
    ]
    command = ["weft", "train", source, "--recipe", name, *options, *(["--from", "WEIGHTS"] if is_finetuning else [])]
    stated = re.search(r"^# cost: +paper: ([^;\n]*)", text, re.MULTILINE)
    return TrainingPlan(
        name,
        tuple(datasets),
        recipe.epochs if not recipe.steps else None,
        recipe.steps,
        recipe.batch_size,
        images,
        is_finetuning,
        stated[1] if stated else "",
        shlex.join(command),
    )


def with_speed(plan: RowPlan, device: str | None = None) -> RowPlan:
    """Return a plan with the duration of its training run, from a few steps on random images on this machine.

    Args:
        plan: of a row; unchanged if the row cannot be trained.
        device: auto, cpu, cuda or mps; None for auto.

    Raises:
        UsageError: the memory of the device does not suffice for a batch of two images.
    """
    if plan.training is None:
        return plan
    name, settings = recipe_of_row(plan.row)
    speed = training_speed(load_recipe(name, settings.items()), plan.training.images, device)
    return dataclasses.replace(plan, training=dataclasses.replace(plan.training, speed=speed))


def training_speed(recipe: Recipe, images: int, device: str | None = None, num_classes: int = 1000) -> TrainingSpeed:
    """Measure training steps of a recipe, the forward pass of its teacher included, and extrapolate.

    Args:
        recipe: complete recipe.
        images: training images of the whole run.
        device: auto, cpu, cuda or mps; None for auto.
        num_classes: number of classes.
    """
    runtime = Runtime.of(device or "auto", recipe.precision)
    kind = runtime.device.type
    assert isinstance(recipe.batch_size, int)
    size = min(recipe.batch_size, FIRST_BATCH.get(kind, FIRST_BATCH["cpu"]))
    recipe = dataclasses.replace(recipe, accumulate=1)
    while math.isinf(seconds := time_step(recipe, size, num_classes, runtime, with_teacher=True)):
        if size <= 2:
            raise UsageError(f"{recipe.model} needs more memory for a training step of {size} images on this {kind}.")
        size //= 2
    return TrainingSpeed(kind, size, size / seconds, images * seconds / size / 3600)


def count_row(row: Printed) -> Cost | None:
    """Count parameters and multiply-adds of the network of a row again; None if no network can be built."""
    if not row.builds or not is_model(row.builds):
        return None
    with torch.device("meta"):
        return cost(create_model(row.builds), row.size)


def evaluate_row(
    row: Printed, data: str | Path, *, weights: str | Path | None = None, **settings: Any
) -> RowEvaluation:
    """Evaluate weights on ImageNet's validation images, next to the paper's number.

    Args:
        row: row of an ImageNet table.
        data: ImageNet, as in `weft.train.evaluate`.
        weights: a run, a model directory or a checkpoint file; None for the public weights of the row.
        **settings: further arguments of `weft.train.evaluate`.

    Raises:
        UsageError: the row has no public weights, its network cannot be built, or `weights` are of another one.
        CheckpointError: the weights cannot be downloaded or read.
        DataError: the data cannot be read, or has other classes.
    """
    with tempfile.TemporaryDirectory() as folder:
        if weights is not None and (Path(weights).is_dir() or str(weights).startswith("hf-hub:")):
            model: str | Path = weights
            _check_network(row, weights)
        else:
            model = save_model_dir(_network(row, weights), Path(folder) / "model")
        result = evaluate(model, data, **settings)
    estimate = accuracy(result.is_correct)
    source, _ = _weights(row)
    return RowEvaluation(
        model=row.model,
        weights=str(weights) if weights is not None or source is None else source.repo,
        data=str(data),
        images=result.count,
        top1=result.top1,
        low=estimate.low,
        high=estimate.high,
        paper=row.top1,
        difference=None if row.top1 is None else result.top1 - row.top1,
    )


def _check_network(row: Printed, run: str | Path) -> None:
    """Raise UsageError if a run or model directory has another network than a row."""
    config = read_config(model_dir(run))
    name = config["architecture"].removeprefix("weft_")
    size = config["pretrained_cfg"].get("input_size", (0, row.size))[1] if name in VARIANTS else row.size
    if row.builds and (name, size) != (row.builds, row.size):
        raise UsageError(
            f"The weights of {row.model} must be of {row.builds} at {row.size} pixels; {run} has {name}"
            f"{f' at {size} pixels' * (name in VARIANTS)}. Pass other --weights, or choose the row of this network."
        )


def _network(row: Printed, file: str | Path | None) -> Any:
    """Return the network of a row with the weights of a file, or with its public weights."""
    source, preprocessing = _weights(row)
    if not row.builds:
        raise UsageError(f"{row.model} must be a network that weft or timm has; {row.note}. Choose another row.")
    if file is None and source is None:
        raise UsageError(f"{row.model} must have public weights; weft knows none. Pass --weights RUN_OR_FILE.")
    if file is None and source is not None and source.repo and row.builds not in VARIANTS:
        model: Any = create_model(source.repo.removeprefix("timm/"), pretrained=True)
    else:
        has_size = row.builds not in VARIANTS or VARIANTS[row.builds].size == row.size
        arguments: dict[str, Any] = {} if has_size else {"img_size": row.size}
        model = create_model(row.builds, **arguments)
        if file is not None:
            load_checkpoint(model, file)
        else:  # published with settings of another library; the network here is that of the paper
            load_checkpoint(model, _download(source, row), switches="ignore")
    model.pretrained_cfg = model.default_cfg = {**dict(model.pretrained_cfg), **preprocessing}
    return model


def _download(source: PublicWeights | None, row: Printed) -> str | Path:
    assert source is not None, row.model
    if not source.repo:
        raise CheckpointError(
            f"weft cannot download the weights of {row.model}: {source.by_hand}. Download the file yourself, and pass"
            " --weights FILE."
        )
    return download_weights(source)


def train_row(row: Printed, data: str | Path, *, weights: str | Path | None = None, **arguments: Any) -> Any:
    """Train the network of a row with its recipe.

    Args:
        row: row of an ImageNet table, with a recipe.
        data: ImageNet, as in `weft.train.train`.
        weights: weights that a fine-tuning run starts from.
        **arguments: further arguments of `weft.train.train`; `settings` override those of the row.

    Returns:
        The `RunResult`.

    Raises:
        UsageError: there is no recipe, or a fine-tuning run has no weights to start from.
    """
    plan = _training(TABLES[0], row, str(data))
    if plan is None:
        raise UsageError(f"{row.model} must have a recipe; weft has none. See weft reproduce {row.paper.lower()}.")
    if plan.is_finetuning and weights is None:
        raise UsageError(
            f"{row.model} is fine-tuned from trained weights; got none. Pass them with --weights RUN_OR_FILE."
        )
    from weft.train import train

    name, settings = recipe_of_row(row)
    more: Mapping[str, Any] = arguments.pop("settings", {})
    return train(data, recipe=name, settings={**settings, **more}, start_from=weights, **arguments)
