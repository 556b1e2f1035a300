"""`weft embed` and `weft similar`: features of image files, and the most similar images."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoints.resolve import check_model
from weft.checkpoints.unknown import unit_length
from weft.data import BadImage
from weft.data.preprocessing import Pixels
from weft.errors import DataError
from weft.files import write_file, write_table, writing
from weft.inference.arguments import (
    InferenceOptions,
    check_images,
    feature_files,
    image_files,
    note_values,
)
from weft.inference.prediction import prepared_batches
from weft.inference.predictor import NonFiniteError, Predictor
from weft.progress import Work, loading, obeys_quiet
from weft.recipes.checks import check_argument
from weft.recipes.schema import Positive
from weft.report.notebook import described
from weft.text import printable


@dataclass(frozen=True)
class Embedding:
    """Features of images.

    Attributes:
        images: paths, as they were given or found.
        features: (images features), in float32.
        errors: (path, message) of each file that cannot be read; it has no row.
    """

    images: list[str]
    features: np.ndarray
    errors: list[tuple[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints: sizes and errors, without the features."""
        return {
            "images": len(self.images),
            "features": self.features.shape[1],
            "errors": [{"image": printable(path), "error": message} for path, message in self.errors],
        }

    def __repr__(self) -> str:
        """Return the sizes in one line."""
        values = [("images", len(self.images)), ("features", self.features.shape[1]), ("errors", len(self.errors))]
        return described("Embedding", values)


@dataclass(frozen=True)
class SimilarImage:
    """An image and the cosine similarity of its features to those of the query, from -1 to 1."""

    image: str
    similarity: float

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {"image": printable(self.image), "similarity": self.similarity}


@obeys_quiet
def embed(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    normalize: bool = False,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Embedding:
    """Compute the features of image files: the inputs of the classifier, of several heads side by side.

    Args:
        run: a run directory, whose best model is loaded, a model directory, or the name of a public model.
        images: files, folders (with all images below them) or patterns such as 'x/*.png'.
        out: file for the features. `x.npy` has (images features) in float32, and the paths are in `x.csv`, one row per
            row of features. `x.parquet` has the columns `image` and `features`. None to write no files.
        normalize: scale the features of each image to unit L2 norm.
        batch_size, img_size, device, precision, limit, max_pixels: as in `train`.
        force: replace existing files.
        quiet: print no progress.

    Raises:
        UsageError: a setting that is not supported, an export or a network without a linear classifier, or `out` is
            taken.
        DataError: no image can be read.
        CheckpointError: the model is missing or cannot be read, or its outputs are not finite.
    """
    options = InferenceOptions.of(locals())
    files = [] if out is None else feature_files(Path(out), images, force=force)
    check_model(run)
    check_images(images)
    predictor = feature_predictor(run, options)
    result = read_files(predictor, image_files(images)[: options.limit], options.batch_size)
    if not result.images:
        raise none_readable(result)
    if normalize:
        result = Embedding(result.images, unit_length(result.features), result.errors)
    if files:
        _write(files, result)
    return result


@obeys_quiet
def similar(
    run: str | Path,
    query: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top_k: int = 10,
    batch_size: int | None = None,
    img_size: int | tuple[int, int] | str | None = None,
    device: str | None = None,
    precision: str | None = None,
    limit: int | None = None,
    max_pixels: int | None = None,
    quiet: bool = False,
) -> tuple[list[SimilarImage], list[tuple[str, str]]]:
    """Find the images whose features have the highest cosine similarity to those of a query image.

    Args:
        run, images, batch_size, img_size, device, precision, limit, max_pixels, quiet: as in `embed`. The query itself
            is left out of `images`.
        query: an image file.
        top_k: number of images to return.

    Returns:
        The most similar images, most similar first, and (path, message) of each file that cannot be read.

    Raises:
        UsageError, CheckpointError: as in `embed`.
        DataError: the query or all images cannot be read.
    """
    check_argument("top_k", top_k, Positive)
    options = InferenceOptions.of(locals())
    if Path(query).is_dir():
        raise DataError(
            f"The query must be an image file; {printable(str(query))} is a folder. Pass one of its images."
        )
    check_model(run)
    check_images(query, images)
    predictor = feature_predictor(run, options)
    try:
        predictor.prepare(Path(query))
    except BadImage as error:
        raise DataError(f"The query must be an image. {error}") from error
    files = {os.path.abspath(path): path for path in image_files(images)}  # an image of two folders is found once
    others = [path for path in files.values() if not _is_same_file(path, query)][: options.limit]
    read = read_files(predictor, [str(query), *others], options.batch_size)
    if len(read.images) < 2:
        first = f" The first: {read.errors[0][1]}" if read.errors else ""
        raise DataError(f"At least one image besides the query must be readable; got none.{first}")
    wanted, *searched = unit_length(read.features.astype(np.float64))
    similarity = np.array(searched) @ wanted
    order = np.argsort(-similarity, kind="stable")[:top_k]
    result = [SimilarImage(read.images[1 + i], float(np.clip(similarity[i], -1, 1))) for i in order]
    return result, read.errors


def feature_predictor(run: str | Path, options: InferenceOptions) -> Predictor:
    """Load a model that gives features.

    Raises:
        UsageError: `run` is an export, or the network has no linear classifier.
        CheckpointError: the model is missing or cannot be read.
    """
    predictor = Predictor.load(run, fold=False, **options.of_model)
    with loading():  # for an export, which has not needed torch so far
        from weft.inference.features import classifiers
        from weft.inference.torch_model import torch_model

    classifiers(torch_model(predictor.model).network)
    return predictor


def read_files(predictor: Predictor, paths: Sequence[str], batch_size: int) -> Embedding:
    """Return the features of image files.

    Raises:
        NonFiniteError: the features are not finite.
    """
    from weft.inference.features import FeatureReader
    from weft.inference.torch_model import torch_model

    model = torch_model(predictor.model)
    note_values(paths, predictor.preprocessing.value_range, predictor.max_pixels)
    used, errors, rows = [], [], []
    with (
        FeatureReader(model.running, model.runtime) as reader,
        Work("features", len(paths)) as work,
    ):
        for batch in prepared_batches(predictor, paths, batch_size):
            errors += [(path, str(item)) for path, item in batch if isinstance(item, BadImage)]
            usable = [(path, item) for path, item in batch if isinstance(item, Pixels)]
            if usable:
                used += [path for path, _ in usable]
                rows.append(reader(predictor.tensor([item for _, item in usable])))
                if not np.isfinite(rows[-1]).all():
                    raise NonFiniteError
            work.advance(len(batch))
    features = np.concatenate(rows) if rows else np.empty((0, sum(reader.widths)), np.float32)
    return Embedding(used, features, errors)


def none_readable(result: Embedding) -> DataError:
    """Return the error for files of which none is an image."""
    return DataError(
        f"At least one image must be readable; none of {len(result.errors):,} is. The first: {result.errors[0][1]}"
    )


def _is_same_file(path: str | Path, other: str | Path) -> bool:
    try:
        return Path(path).samefile(other)
    except OSError:
        return False


def _write(files: Sequence[Path], result: Embedding) -> None:
    with writing(files[0].parent):
        files[0].parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    if files[0].suffix == ".npy":
        np.save(buffer, result.features)
        write_table(files[1], ["image"], ([path] for path in result.images))  # exact: other programs open these paths
    else:
        import pyarrow as pa
        from pyarrow import parquet

        width = result.features.shape[1]
        columns = {
            "image": pa.array([path.encode("utf-8", "backslashreplace").decode() for path in result.images]),
            "features": pa.FixedSizeListArray.from_arrays(pa.array(result.features.ravel()), width),
        }
        parquet.write_table(pa.table(columns), buffer)
    write_file(files[0], buffer.getvalue())
