"""`weft info`: what a run, a model directory, an export or a public model is. No torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from weft.checkpoints.config import CHOICE, read_config
from weft.checkpoints.resolve import find_model
from weft.deploy.choosing import exports_in
from weft.errors import CheckpointError
from weft.files import folder_size
from weft.inference.arguments import run_folder
from weft.models.families import VARIANTS
from weft.models.papers import row_of
from weft.reading import read_json
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import recorded_environment
from weft.report import markup
from weft.report.intervals import accuracy_text, held_out_text
from weft.runs.directory import best_of, read_metrics
from weft.text import count, first_few, printable

RECIPE, METRICS, REPORT = "recipe.yaml", "metrics.csv", "report.json"


@with_config(extra="ignore")
class Report(TypedDict):
    """Keys of the report.json of an export that are read."""

    images: NotRequired[int]
    top1: NotRequired[float | None]


@with_config(extra="ignore")
class Times(TypedDict):
    """Keys of chosen.json that are read: seconds of a batch, by export and batch size."""

    seconds: NotRequired[dict[str, dict[int, float]]]


@dataclass(frozen=True)
class ExportInfo:
    """An export of a run.

    Attributes:
        path: its directory, relative to the run; that of an export itself as it was given.
        format, precision: of the export.
        bytes: size of its files.
        top1: accuracy in percent on the held-out images of its verification; None if it had none.
        images_per_second: by batch size, as `weft export --format auto` measured it; empty if it did not.
    """

    path: str
    format: str
    precision: str
    bytes: int
    top1: float | None
    images_per_second: dict[int, float]

    def __str__(self) -> str:
        """Describe the export in one line."""
        parts = [f"{self.format} {self.precision}", _size(self.bytes)]
        parts += [] if self.top1 is None else [f"top-1 {self.top1:.2f} %"]
        parts += [f"{speed:,.0f} images/s at batch {size}" for size, speed in self.images_per_second.items()]
        return f"{self.path}: {', '.join(parts)}"


@dataclass(frozen=True)
class RunInfo:
    """Description of a run, a model directory, an export or a public model.

    Attributes:
        name: as it was given.
        kind: `run`, `model directory`, `export` or `public model`.
        network: name of the network.
        input: (channels, height, width).
        classes: names of the classes; empty if the model has none.
        num_classes: their number; None if it is not known.
        licence: SPDX identifier of the licence of public weights, also of those that a run started from; None if it is
            not known.
        data: the dataset, and its number of training and held-out images; None if they are not known.
        recipe: name or network, epochs, learning rate and further settings in one line; None if it is not known.
        accuracy: held-out top-1 with its interval, or the accuracy that the paper prints for public weights.
        files: (path, bytes) of the directory.
        exports: in the directory, and itself.
    """

    name: str
    kind: str
    network: str
    input: tuple[int, int, int] | None = None
    classes: list[str] = field(default_factory=list)
    num_classes: int | None = None
    licence: str | None = None
    data: str | None = None
    recipe: str | None = None
    accuracy: str | None = None
    files: list[tuple[str, int]] = field(default_factory=list)
    exports: list[ExportInfo] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {**asdict(self), "files": [{"path": path, "bytes": size} for path, size in self.files]}

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) lines."""
        channels, height, width = self.input or (0, 0, 0)
        named = f": {first_few(self.classes, 10)}" if self.classes else ""
        lines = [
            (self.kind, printable(self.name)),
            ("network", self.network),
            *([("input", f"{height}x{width} pixels, {count(channels, 'channel')}")] if self.input else []),
            *([] if self.num_classes is None else [("classes", f"{self.num_classes:,}{named}")]),
        ]
        for name in ("data", "recipe", "accuracy"):
            if (value := getattr(self, name)) is not None:
                lines.append((name, value))
        lines.append(("licence of the weights", self.licence or "not recorded"))
        lines += [("export", str(export)) for export in self.exports]
        return lines + [("file", f"{path}, {_size(size)}") for path, size in self.files]

    def __str__(self) -> str:
        """Return the lines as text."""
        return "\n".join(f"{name}: {value}" for name, value in self.lines())

    def _repr_html_(self) -> str:
        return markup.fragment(markup.table(("model", ""), self.lines()))


def info(run: str | Path) -> RunInfo:
    """Describe a run, a model directory, an export or a public model, from its files.

    Args:
        run: a run directory, a model directory, an export, `hf-hub:OWNER/NAME`, or the name of a public model.

    Raises:
        CheckpointError: there is no such model, or a file of it is damaged.
    """
    model = find_model(run)
    if isinstance(model, str):
        return _of_public_model(model)
    several = exports_in(model) if (model / CHOICE).is_file() else ()
    folder, config = run_folder(model), read_config(several[0].path if several else model)
    recipe = load_recipe(folder / RECIPE) if (folder / RECIPE).is_file() else None
    kind = "export" if "artefact" in config else "model directory" if recipe is None else "run"
    is_public = recipe is not None and recipe.pretrained
    root = folder if kind == "run" else model
    return RunInfo(
        name=str(run),
        kind=kind,
        network=config["architecture"].removeprefix("weft_"),
        input=config["pretrained_cfg"].get("input_size"),
        classes=config["label_names"] or [],
        num_classes=config["num_classes"],
        licence=config["pretrained_cfg"].get("license") if is_public else None,
        data=None if recipe is None else _data(folder, recipe),
        recipe=None if recipe is None else _summary(recipe),
        accuracy=_accuracy(model, folder, recipe),
        files=_sizes(root),
        exports=_exports(
            {model: str(run)}
            if kind == "export" and not several
            else {path: str(path.relative_to(root)) for path in sorted({*root.glob("*/"), *root.glob("*/*/")})}
        ),
    )


def _of_public_model(name: str) -> RunInfo:
    base = name.partition(".")[0]
    if base not in VARIANTS:  # of timm, whose licences are on its pages of the hub
        return RunInfo(name, "public model", name)
    variant, row = VARIANTS[base], row_of(base)
    size = (3, variant.size, variant.size)
    accuracy = None
    if row is not None and row.weights == "own" and row.top1 is not None:
        accuracy = f"top-1 {row.top1:g} % on ImageNet's validation set ({row.source})"
    licence = None if variant.weights is None else variant.weights.licence
    return RunInfo(name, "public model", base, size, num_classes=1000, licence=licence, accuracy=accuracy)


def _data(folder: Path, recipe: Recipe) -> str:
    """Return the dataset of a run with its numbers of images, as far as they are recorded."""
    environment = recorded_environment(folder / RECIPE)
    training, held_out = (environment.get(key) for key in ("train_images", "val_images"))
    text = printable(str(recipe.data.source))
    if isinstance(training, int) and isinstance(held_out, int):
        text += f": {count(training, 'image')} for training, {held_out:,} held out"
    return text


def _summary(recipe: Recipe) -> str:
    """Return the main settings of a recipe in one line."""
    start = recipe.start_from or ("public weights" if recipe.pretrained else "random weights")
    epochs = "linear probe" if recipe.epochs == 0 else count(recipe.epochs or 0, "epoch")
    length = count(recipe.steps, "step") if recipe.steps else epochs
    parts = [recipe.name, length, f"batch size {recipe.batch_size}", recipe.precision, f"from {printable(str(start))}"]
    return ", ".join(str(part) for part in parts if part)


def _accuracy(model: Path, folder: Path, recipe: Recipe | None) -> str | None:
    """Return the held-out accuracy that a run or an export recorded."""
    report = _recorded(model / REPORT, Report)
    if (top1 := report.get("top1")) is not None:
        return f"top-1 {accuracy_text(top1, report.get('images', 0))}"
    if recipe is None or model.name == "last" or not (folder / METRICS).is_file():
        return None
    best = best_of(read_metrics(folder / METRICS), recipe.best)
    held_out, groups = (recorded_environment(folder / RECIPE).get(name) for name in ("val_images", "val_groups"))
    if best is None:
        return None
    text = f"{best.val_top1:.2f} %"
    if isinstance(held_out, int):
        text = held_out_text(best.val_top1, held_out, groups if isinstance(groups, int) else None)
    return f"top-1 {text}, epoch {best.epoch} (the best)"


def _exports(folders: Mapping[Path, str]) -> list[ExportInfo]:
    """Return the exports among some directories, which are shown by name, with what is recorded about them."""
    exports = []
    for folder, name in folders.items():
        try:
            config = read_config(folder)
        except (CheckpointError, OSError):  # not a model, or damaged: it does not run, and is not listed
            continue
        if "artefact" not in config:
            continue
        record, top1 = config["artefact"], _recorded(folder / REPORT, Report).get("top1")
        times = _recorded(folder.parent / CHOICE, Times).get("seconds", {}).get(folder.name, {})
        speeds = {size: size / seconds for size, seconds in times.items()}
        exports.append(ExportInfo(name, record["format"], record["precision"], folder_size(folder), top1, speeds))
    return exports


def _recorded(file: Path, schema: Any) -> Any:
    """Return what weft recorded in a JSON file; empty if there is no such file, or another one."""
    try:
        return read_json(file, schema)
    except CheckpointError:
        return {}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _sizes(folder: Path) -> list[tuple[str, int]]:
    """Return the entries of a directory with the bytes of all files in them."""
    entries = sorted(folder.iterdir())
    return [(entry.name, folder_size(entry) if entry.is_dir() else entry.stat().st_size) for entry in entries]
