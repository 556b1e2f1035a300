"""`evaluate` and `predict`: run a trained model on labelled or unlabelled images."""

from __future__ import annotations

import dataclasses
import glob
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.checkpoints import load_model_dir
from weft.checkpoints.model_dir import model_dir
from weft.data import BadImage, Sample, Source, Splits, eval_transform, open_data, open_image
from weft.data.index.tree import EXTENSIONS, extension, walk
from weft.deploy import ExportReport, export, open_model
from weft.errors import CheckpointError, DataError, UsageError
from weft.recipes import Recipe, load_recipe
from weft.text import printable
from weft.train.build import evaluation_batches, name_of, preprocessing, resized
from weft.train.defaults import DIGITS, overrides_of
from weft.train.metrics import Evaluation, measure
from weft.train.mistakes import mistakes_figure
from weft.train.objective import mean_logits
from weft.train.progress import counting, looking, say
from weft.train.real_labels import check_listed, read_real_labels, real_score
from weft.train.report import PICTURES, write_report
from weft.train.rundir import check_writable, make_dir, refuse_taken, write_text
from weft.train.runtime import Runtime

NO_NUMBERS = "The model must give finite numbers; it gives no finite numbers. Its weights are damaged; train again."
SPLITS = ("auto", "train", "val", "all")
WORDS = {"train": "the training images", "val": "the held-out images", "all": "all images"}
CONTENTS = ("report.md", "report.html", *PICTURES, "evaluation.json")  # what `evaluate` writes


@dataclass(frozen=True)
class Answer:
    """What a model says about one picture: the likeliest classes, or why there is none."""

    image: str
    top: list[tuple[str, float]]
    error: str | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.error is not None:
            return {"image": self.image, "error": self.error, "reason": self.reason}
        return {"image": self.image, "top": [{"class": name, "probability": share} for name, share in self.top]}


class Mirrored(nn.Module):
    """A model that is also asked of the mirror image of each picture: the mean of the two logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """(b classes), one head or two."""
        return (mean_logits(self.model(images)) + mean_logits(self.model(images.flip(-1)))) / 2


def evaluate(
    run: str | Path,
    data: str | Path,
    *,
    split: str = "auto",
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    limit: int | None = None,
    tta: bool = False,
    real_labels: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Evaluation:
    """Measures a model on images with known classes, matched with the model's by name.

    Args:
        run: a run directory, whose best model is taken, or a model directory.
        data: a folder of images, or 'digits'.
        split: which images of `data`. 'auto': those held out, where the data has its own split or the run was trained
            on it; all of them otherwise.
        batch_size, img_size, device, precision, workers, limit: as in `train`.
        tta: test-time augmentation: also ask of the mirror image of each, and take the mean of the two logits.
        real_labels: also score by ReaL labels, of which an image has several or none: `real.json` for ImageNet's
            validation images, or a JSON object from image names to lists of class numbers.
        out: a directory for report and JSON; None to write nothing.
        force: replace an evaluation that is there.
        quiet: no progress and no notes.

    Raises:
        UsageError: a setting that does not fit, or `out` is taken.
        DataError: data that cannot be used, or with classes that the model does not know.
        CheckpointError: no model there, or one that cannot be read.
    """
    if split not in SPLITS:
        raise UsageError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    options = options_of(batch_size, img_size, device, precision, workers, limit)
    if out is not None:
        refuse_taken(Path(out), CONTENTS, force=force)
        check_writable(Path(out))
    model, classes, runtime = opened(run, options)
    trained_with = _recipe_of(Path(run))
    labels = None if real_labels is None else read_real_labels(real_labels, model.num_classes)
    splits = _open_known(data, classes, model.num_classes, options, trained_with, quiet)
    split, source, excluded = _chosen(splits, split, data, trained_with)
    if labels is not None:
        check_listed(labels, [name_of(source, place) for place in range(len(source))])
    if not quiet:
        say(f"Evaluating {WORDS[split]}: {len(source):,} images.")
    batches = evaluation_batches(source, model, int(options.batch_size), options.workers)
    with counting(len(source), quiet=quiet) as count:
        result = measure(
            Mirrored(model) if tta else model,
            batches,
            splits.classes,
            runtime,
            key_of=lambda place: printable(source.read(place).key),
            excluded=excluded,
            on_batch=count,
        )
    if len(source) and not math.isfinite(result.loss):
        raise CheckpointError(NO_NUMBERS)
    if labels is not None:
        keys = [name_of(source, int(place)) for place in result.places]
        result = dataclasses.replace(result, real=real_score(labels, keys, result.predicted))
    if out is not None:
        make_dir(Path(out), CONTENTS, force=force)
        facts = [
            ("model", str(run)),
            ("data", f"{data}, {WORDS[split]}"),
            ("images", f"{result.count}, {len(excluded)} excluded"),
        ]
        with_mirror = ", each asked with its mirror image" if tta else ""
        facts += [("top-1, top-5", f"{result.top1:.2f} %, {result.top5:.2f} %{with_mirror}")]
        if result.real is not None:
            facts += [("ReaL top-1", f"{result.real.top1:.2f} % of {result.real.images:,} images with a ReaL label")]
        seen = mistakes_figure(model, source, result.mistakes)
        write_report(Path(out), f"{Path(run).resolve().name} on {data}", facts, result, mistakes=seen)
        of = {"model": str(run), "data": str(data), "split": split, "tta": tta}
        write_text(Path(out) / "evaluation.json", json.dumps(of | result.as_dict(), indent=2) + "\n")
    return result


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    precision: str = "fp32",
    data: str | Path | None = None,
    max_drop: float = 0.5,
    limit: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> ExportReport:
    """`weft.export` for a run or model directory and for data by name.

    Args:
        run: a run directory, whose best model is taken, or a model directory.
        out, format, precision, max_drop, force: as in `weft.export`.
        data: a folder of images, or 'digits'; split as the run split it.
        limit: as in `train`.
        quiet: no progress and no notes.

    Raises:
        UsageError, DataError, CheckpointError, VerificationError: as `weft.export` and `evaluate`.
    """
    options = options_of(None, None, "cpu", None, None, limit)
    model, classes = load_model_dir(model_dir(run))
    splits = None
    if data is not None:
        splits = _open_known(data, classes, model.num_classes, options, _recipe_of(Path(run)), quiet)
    return export(
        model,
        out,
        format=format,
        precision=precision,
        data=splits,
        label_names=classes,
        max_drop=max_drop,
        force=force,
    )


def predict(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top_k: int = 5,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    limit: int | None = None,
    tta: bool = False,
) -> list[Answer]:
    """Names what is on pictures.

    Args:
        run: a run directory, whose best model is taken, or a model directory.
        images: files, folders (every image below them) or patterns such as 'x/*.png'.
        top_k: classes per picture, the likeliest first; fewer where the model has fewer.
        batch_size, img_size, device, precision, limit: as in `train`.
        tta: as in `evaluate`.

    Returns:
        One answer per picture, in the order given; for one that cannot be read, its `error` says why.

    Raises:
        UsageError: a setting that does not fit.
        CheckpointError: no model there, or one that cannot be read.
    """
    if top_k < 1:
        raise UsageError(f"top_k must be at least 1; got {top_k}.")
    options = options_of(batch_size, img_size, device, precision, None, limit)
    model, names, runtime = opened(run, options)
    names = names or [str(number) for number in range(model.num_classes)]
    transform = eval_transform(preprocessing(model))
    paths = list(expanded([images] if isinstance(images, (str, Path)) else images))[: options.data.limit]
    asked = Mirrored(model) if tta else model
    answers: list[Answer] = []
    size = int(options.batch_size)
    for start in range(0, len(paths), size):
        read = [_read(path, transform) for path in paths[start : start + size]]
        tensors = [item for item in read if isinstance(item, torch.Tensor)]
        tops = iter(_tops(asked, torch.stack(tensors), names, top_k, runtime) if tensors else ())
        for path, item in zip(paths[start:], read, strict=False):
            answers.append(item if isinstance(item, Answer) else Answer(printable(path), next(tops)))
    return answers


def options_of(batch_size: Any, img_size: Any, device: Any, precision: Any, workers: Any, limit: Any) -> Recipe:
    """Checks the shared settings as a recipe would."""
    given = dict(
        batch_size=batch_size, img_size=img_size, device=device, precision=precision, workers=workers, limit=limit
    )
    options = load_recipe(None, overrides_of(None, {}, given))
    if options.batch_size == "auto":
        raise UsageError("batch_size auto is for training; give a number of images, or leave it out.")
    return options


def opened(run: str | Path, options: Recipe) -> tuple[Any, list[str] | None, Runtime]:
    """The model of a run (timm's contract), ready to answer, with its class names if it has any."""
    runtime = Runtime.of(options.device, options.precision)
    model, names = open_model(model_dir(run))
    if options.img_size is not None:
        model = resized(model, options.img_size)
    return model.to(runtime.device).eval(), names, runtime


def _recipe_of(run: Path) -> Recipe | None:
    """How a model was trained, where the run around it is still there."""
    folder = run.resolve().parent if run.resolve().name in ("best", "last") else run
    return load_recipe(folder / "recipe.yaml") if (folder / "recipe.yaml").is_file() else None


def _open_known(
    data: str | Path,
    classes: list[str] | None,
    num_classes: int,
    options: Recipe,
    trained_with: Recipe | None,
    quiet: bool,
) -> Splits:
    """Data labelled with the model's classes, split as the run split it."""
    as_trained = trained_with or options
    with looking(quiet=quiet) as progress:
        splits = open_data(
            data,
            val_fraction=as_trained.data.val_fraction,
            seed=as_trained.seed,
            limit=options.data.limit,
            allow_empty_class=True,
            classes=classes,
            evaluate_only=True,
            progress=progress,
        )
    if classes is None and not quiet:
        say(_order_note(splits.classes))
    if len(splits.classes) != num_classes:
        raise DataError(
            f"Data must have the model's classes; it has {len(splits.classes)}, the model {num_classes} without names."
            " Evaluate a model directory that names its classes."
        )
    return splits


def _order_note(classes: Sequence[str]) -> str:
    """Sentence on which folder stands for which output of weights that name no classes."""
    return (
        "The weights have no class names: their outputs are matched with the folders in order, first"
        f" '{printable(classes[0])}', last '{printable(classes[-1])}'."
    )


def _chosen(
    splits: Splits, split: str, data: str | Path, trained_with: Recipe | None
) -> tuple[str, Source, list[tuple[str, str]]]:
    """The split that is meant, its images and those excluded."""
    is_trained_on = trained_with is not None and _same(data, trained_with.data.source)
    if split == "auto":
        split = "val" if splits.is_given or is_trained_on else "all"
    bad = [(printable(item.key), item.reason) for item in splits.bad if split == "all" or item.split in ("", split)]
    if split == "all":
        return split, _Joined(splits.train, splits.val), bad
    return split, splits.val if split == "val" else splits.train, bad


def _same(data: str | Path, source: str | None) -> bool:
    if source is None or DIGITS in (str(data), source):
        return str(data) == source
    return Path(data).resolve() == Path(source).resolve()


class _Joined:
    """Two sources of the same classes, one after the other."""

    def __init__(self, first: Source, second: Source) -> None:
        self.first, self.second = first, second
        self.classes, self.labels = first.classes, [*first.labels, *second.labels]
        self.keys = [*first.keys, *second.keys]

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def read(self, i: int) -> Sample:
        """Picture `i`."""
        return self.first.read(i) if i < len(self.first) else self.second.read(i - len(self.first))


def expanded(images: Iterable[str | Path]) -> Iterator[str]:
    """Folders and patterns to the files they stand for; what stands for nothing stays, to be reported."""
    for image in images:
        path = Path(image)
        if path.is_dir():
            inside = [str(path / name) for name in walk(str(path)).files if extension(name) in EXTENSIONS]
        elif path.exists():
            inside = [str(path)]
        else:
            inside = sorted(name for name in glob.glob(str(image), recursive=True) if Path(name).is_file())
        yield from inside or [str(image)]


def _read(path: str, transform: Any) -> torch.Tensor | Answer:
    try:
        return transform(open_image(Path(path)))
    except BadImage as error:
        return Answer(printable(path), [], str(error), error.reason)


def _tops(
    model: nn.Module, images: torch.Tensor, names: Sequence[str], top_k: int, runtime: Runtime
) -> list[list[tuple[str, float]]]:
    with torch.inference_mode(), runtime.autocast():
        logits = mean_logits(model(runtime.put(images))).float().cpu()
    if not bool(logits.isfinite().all()):
        raise CheckpointError(NO_NUMBERS)
    shares, places = logits.softmax(dim=1).topk(min(top_k, len(names)), dim=1)
    rows = zip(places.tolist(), shares.tolist(), strict=True)
    return [[(names[int(place)], share) for place, share in zip(top, sure, strict=True)] for top, sure in rows]
