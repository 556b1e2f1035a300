"""Arguments of the verbs that run a model, settings and image files: checked here, before torch is imported."""

from __future__ import annotations

import contextlib
import glob
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.data.bit_depth import ValueRange, Values, range_note
from weft.data.decode import BadImage, image_info, image_values
from weft.data.folder import check_outside, images_below
from weft.data.formats import MAX_PIXELS
from weft.errors import DataError, UsageError, need
from weft.files import check_writable
from weft.progress import say
from weft.recipes import Recipe
from weft.recipes.checks import adapter, image_size, required, rule_of, shown
from weft.recipes.schema import BatchSize, Device, ImageSize, Positive, Precision, Workers
from weft.text import printable

NUM_SAMPLED = 32  # image files whose headers `note_values` reads
SUFFIXES = (".npy", ".parquet")  # of files of features


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Settings that the verbs share which run a model; the arguments of the same names, checked.

    Attributes:
        batch_size: images per batch.
        img_size: input size in pixels, or (height, width); None for that of the model.
        device, precision, workers, max_pixels, follow_links: as in `train`.
        limit: maximum number of images, of a dataset of each split.
    """

    batch_size: BatchSize = 64
    img_size: ImageSize | None = None
    device: Device = "auto"
    precision: Precision = "fp32"
    workers: Workers = "auto"
    limit: Positive | None = None
    max_pixels: Positive | None = None
    follow_links: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> InferenceOptions:
        """Return the options for those arguments of a verb, such as its `locals()`, that are options and not None.

        Raises:
            UsageError: an invalid value.
        """
        hints = typing.get_type_hints(cls, include_extras=True)
        values = {name: arguments[name] for name in hints if arguments.get(name) is not None}
        values |= {name: image_size(value) for name, value in values.items() if name == "img_size"}
        try:
            return adapter(cls).validate_python(values)  # type: ignore[return-value]
        except ValidationError as error:
            name = str(error.errors(include_url=False)[0]["loc"][0])
            raise UsageError(f"{name} must {rule_of(required(hints[name]))}; got {shown(arguments[name])}.") from None

    @property
    def of_model(self) -> dict[str, Any]:
        """The options that `Predictor.load` takes."""
        return {name: getattr(self, name) for name in ("img_size", "device", "precision", "max_pixels")}


def run_folder(run: Path) -> Path:
    """Return the run directory of a run, or of its best or last model."""
    return run.resolve().parent if run.resolve().name in ("best", "last") else run


def recipe_of(run: Path) -> Recipe | None:
    """Return the recipe that a model was trained with, if its run directory still exists."""
    file = run_folder(run) / "recipe.yaml"
    if not file.is_file():
        return None
    from weft.recipes import load_recipe  # imports YAML

    return load_recipe(file)


def image_files(images: str | Path | Sequence[str | Path]) -> list[str]:
    """Expand folders and patterns to image files, sorted. A name without a file, and a folder without images, stay, so
    that they are reported.

    Args:
        images: files, folders (with all images below them, by name or content) or patterns such as 'x/*.png'.
    """
    files: list[str] = []
    for image in [images] if isinstance(images, (str, Path)) else images:
        path = Path(image)
        if path.is_dir():
            inside = [str(path / name) for name in images_below(path)]
        elif path.exists():
            inside = [str(path)]
        else:
            inside = _matches(path)
        files += inside or [str(image)]
    return files


def _matches(pattern: Path) -> list[str]:
    """Return the files that a pattern matches, sorted; brackets that match nothing are part of a name."""
    folder, rest = _split_pattern(pattern)
    for text in (rest, rest.replace("[", "[[]")):
        inside = (Path(name) for name in glob.glob(f"{glob.escape(str(folder))}/{text}", recursive=True))
        if files := sorted(str(path) for path in inside if path.is_file()):
            return files
    return []


def _split_pattern(pattern: Path) -> tuple[Path, str]:
    """Return the folders at the beginning of a pattern that exist, and the rest."""
    parts = pattern.parts
    known = next(number for number in range(len(parts), -1, -1) if Path(*parts[:number]).is_dir())
    return Path(*parts[:known]), "/".join(parts[known:])


def check_images(*images: str | Path | Sequence[str | Path]) -> None:
    """Refuse images of which no file exists, before the import of torch.

    Args:
        images: as in `image_files`; each argument must have a file.

    Raises:
        BadImage: no file exists; names the first.
    """
    for argument in images:
        paths = image_files(argument)
        if paths and not any(Path(path).exists() for path in paths):
            raise BadImage(printable(paths[0]), "missing")


def note_values(paths: Sequence[str], value_range: ValueRange | None, max_pixels: int) -> None:
    """Print a note if images of more than 8 bits per channel do not fit the value range of a model.

    Args:
        paths: image files, of which NUM_SAMPLED are read.
        value_range: of the model; None if it stores none.
        max_pixels: images with more pixels are left out.
    """
    values: list[Values] = []
    for path in paths[:: max(len(paths) // NUM_SAMPLED, 1)]:
        with contextlib.suppress(BadImage, OSError):  # each verb reports files that it cannot read
            values += filter(None, [image_values(Path(path), max_pixels=max_pixels)])
    if note := range_note(values, value_range, range_advice(value_range)):
        say(note)


def range_advice(value_range: ValueRange | None) -> str:
    """Return what to do about images that do not fit the value range of a model."""
    if value_range is not None:
        return "It is the value range of the training images: pass images with the same bit depth."
    return (
        "The model stores no value range, because it was trained on images of 8 bits: convert these as its training"
        " images were, or train with --set data.value_range=[BLACK,WHITE]."
    )


def check_unknown_images(images: str | Path, max_pixels: int | None = None) -> None:
    """Check that an image of `--unknown-images` can be read, with at most `max_pixels`.

    Raises:
        DataError: none can.
    """
    for path in image_files(images):
        with contextlib.suppress(BadImage, OSError):
            image_info(path, max_pixels=max_pixels or MAX_PIXELS)
            return
    raise none_readable(images)


def none_readable(images: str | Path) -> DataError:
    """Return the error of a folder for `--unknown-images` without a readable image."""
    return DataError(
        f"--unknown-images must name images that show none of the classes; {printable(str(images))} has none that can"
        " be read. Name a folder of images."
    )


def check_outside_images(out: str | Path, *images: str | Path | Sequence[str | Path]) -> None:
    """Refuse an output in a folder of images, where a later run would read it as an image.

    Args:
        out: file or directory to write.
        images: as in `image_files`.

    Raises:
        UsageError: `out` is in one of the folders, or in the first folder of a pattern of folders.
    """
    for argument in images:
        for image in [argument] if isinstance(argument, (str, Path)) else argument:
            folder, pattern = _split_pattern(Path(image))
            if not pattern or "**" in pattern or ("/" in pattern and glob.has_magic(pattern)):
                check_outside(out, folder, is_dataset=False)


def feature_files(out: Path, images: str | Path | Sequence[str | Path], *, force: bool) -> list[Path]:
    """Return the files to write, and check that they can be written."""
    check_outside_images(out, images)
    if out.suffix not in SUFFIXES:
        raise UsageError(f"The file of features must end in {' or '.join(SUFFIXES)}; got '{printable(str(out))}'.")
    files = [out, out.with_suffix(".csv")] if out.suffix == ".npy" else [out]
    if out.suffix == ".parquet":
        need("data", "pyarrow")
    check_files(files, force=force)
    return files


def check_files(files: Sequence[Path], *, force: bool) -> None:
    """Check that files of one folder can be written; `force` replaces files.

    Raises:
        UsageError: one is taken.
        StorageError: the folder cannot be written to.
    """
    for file in files:
        if os.path.lexists(file) and (file.is_dir() or not force):
            raise UsageError(f"{printable(str(file))} exists. Choose another --out, or pass --force to replace a file.")
    check_writable(files[0].parent)
