"""Convert the JSON annotations of iNaturalist 2018 and 2019 to a table that `open_data` reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.images.decode import read_regular
from weft.data.index.split_names import split_of
from weft.errors import DataError, UsageError
from weft.files import write_table, writing
from weft.text import printable, reason_of

HEADER = ("image", "label", "split")


class ConvertedTable(NamedTuple):
    """Counts of a table that was written.

    Attributes:
        out: the table.
        classes, train, val: number of classes, of training images and of validation images.
    """

    out: Path
    classes: int
    train: int
    val: int


def convert_inaturalist(
    annotations: Sequence[str | Path], out: str | Path, *, images: str | Path | None = None, force: bool = False
) -> ConvertedTable:
    """Write a CSV table (image, label, split) from the JSON files of iNaturalist 2018 or 2019.

    The files have COCO's layout: `images` with `id` and `file_name`, `annotations` with `image_id` and `category_id`,
    and `categories` with `id`. The label is the number of the category, so that the classes of both years keep their
    order. A file whose name contains `val` holds the validation images, any other the training images.

    Args:
        annotations: the JSON files, such as train2018.json and val2018.json.
        out: the table, a .csv file.
        images: folder that the paths in the JSON files start from; None for the folder of the table.
        force: replace an existing table.

    Raises:
        DataError: a file that cannot be read, is no JSON of this layout, or lists an image twice or without a class.
        UsageError: `out` does not end in .csv or exists already.
    """
    out = Path(out)
    if out.suffix != ".csv":
        raise UsageError(f"OUT must be a table that ends in .csv; got {out}.")
    if out.exists() and not force:
        raise UsageError(f"{out} exists already. Pass --force, or another path.")
    rows: list[tuple[str, str, str]] = []
    for file in map(Path, annotations):
        split = "val" if split_of(file.stem) in ("val", "test") else "train"
        rows += [(_place(name, images), str(label), split) for name, label in _labelled(file)]
    twice = [name for name, times in Counter(row[0] for row in rows).items() if times > 1]
    if twice:
        raise DataError(f"Every image must be listed once; '{printable(twice[0])}' is listed more than once.")
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_table(out, HEADER, rows)
    counts = Counter(row[2] for row in rows)
    return ConvertedTable(out, len({row[1] for row in rows}), counts["train"], counts["val"])


def _place(name: str, images: str | Path | None) -> str:
    return name if images is None else str(Path(images).resolve() / name)


def _labelled(file: Path) -> list[tuple[str, int]]:
    """(file name, category) of every image, in the order of the file."""
    content = _read(file)
    shown = printable(str(file))
    try:
        names = {int(row["id"]): str(row["file_name"]) for row in content["images"]}
        labels = {int(row["image_id"]): int(row["category_id"]) for row in content["annotations"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"'{shown}' must have images (id, file_name) and annotations (image_id, category_id), as iNaturalist 2018"
            f" and 2019 have; {type(error).__name__}: {reason_of(error)}."
        ) from error
    if missing := [name for number, name in names.items() if number not in labels]:
        raise DataError(
            f"Every image of '{shown}' must have an annotation; {len(missing):,} have none, such as"
            f" '{printable(missing[0])}'. A file of test images has no classes."
        )
    return [(name, labels[number]) for number, name in names.items()]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"'{printable(str(file))}' must be a JSON file; {reason_of(error)}.") from error
    if not isinstance(content, dict):
        raise DataError(f"'{printable(str(file))}' must hold a JSON object; it holds a {type(content).__name__}.")
    return content
