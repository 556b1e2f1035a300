"""Read the rows of Parquet files: paths and labels, or the images themselves as datasets of the Hugging Face hub.

Images in a file are read at random through the library datasets, which maps them from a copy in weft's cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.data.library import LibraryReader, hf_bytes
from weft.data.split_names import split_of
from weft.data.tabular import Table, column_names
from weft.data.tree import is_junk
from weft.errors import DataError, need
from weft.files import cache_dir
from weft.text import first_few, printable, reason_of

SUFFIX = ".parquet"


def read_parquet(path: Path, image: str | None) -> Table:
    """Read all columns of a file or of a folder of files, except the bytes of images.

    Args:
        path: the file, or a folder of files with the same columns.
        image: column of images; None for the first that has the bytes of images.

    Raises:
        DataError: a file is no Parquet file, or files of a folder do not belong together.
        UsageError: a library is not installed.
    """
    need("data", "pyarrow")
    from pyarrow import ArrowException, parquet

    paths = [path]
    if path.is_dir():
        paths = sorted(file for file in path.glob(f"*{SUFFIX}") if not is_junk(file.name))
    sides = _sides(paths) if path.is_dir() else []
    columns: dict[str, list[Any]] = {}
    column, header, classes = "", list[str](), dict[str, list[str]]()
    for place, file_path in enumerate(paths):
        try:
            file = parquet.ParquetFile(file_path)
            schema = file.schema_arrow
            with_bytes = [field.name for field in schema if _has_bytes(field.type)]
            names = [name for name in schema.names if name not in with_bytes]
            if place == 0:
                column = _image_column(schema, with_bytes) if image is None else image if image in with_bytes else ""
                header, classes = names, _class_names(schema.metadata or {})
                added = [*([column] if column else []), *(["split"] if sides else [])]
                columns = {name: [] for name in column_names(printable(str(path)), [*names, *added])}
            if _class_names(schema.metadata or {}) != classes:
                raise DataError(
                    f"Parquet files of a folder must define the same class names; '{printable(file_path.name)}' and"
                    f" '{printable(paths[0].name)}' do not. Keep them in two folders."
                )
            if names != header or (column and column not in with_bytes):
                raise DataError(
                    f"Parquet files of a folder must have the same columns; '{printable(str(file_path))}' has"
                    f" {first_few(schema.names)}, not {first_few([*header, *([column] if column else [])])}."
                )
            rows = file.read(columns=names)
        except (ArrowException, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"A table of images that ends in .parquet must be a Parquet file; '{printable(str(file_path))}':"
                f" {reason_of(error)}."
            ) from error
        new = [
            [_value(value, classes.get(name)) for value in values.to_pylist()]
            for name, values in zip(names, rows.columns, strict=True)
        ]
        if column:
            new.append([f"{file_path.name}/{place}/{number:07}" for number in range(file.metadata.num_rows)])
        if sides:
            new.append(sides[place : place + 1] * file.metadata.num_rows)
        for of_column, values in zip(columns.values(), new, strict=True):
            of_column += values
    reader = _reader(paths, column) if column else None
    numbers = range(2, 2 + len(next(iter(columns.values()), [])))
    return Table(printable(str(path)), columns, numbers, [], column.strip(), reader, classes)


def _sides(paths: Sequence[Path]) -> list[str]:
    """Return the split of each file by its name; none if no name says it."""
    sides = [split_of(path.stem) for path in paths]
    if "" in sides and any(sides):
        raise DataError(
            "Names of Parquet files in a folder must all say the split, such as train-00000-of-00001.parquet, or none;"
            f" '{printable(paths[sides.index('')].name)}' does not. Rename it, or move it to another folder."
        )
    return sides if any(sides) else []


def _has_bytes(kind: Any) -> bool:
    """Return whether a column type holds encoded files: bytes, or a struct with a field `bytes`."""
    from pyarrow import types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _has_bytes(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _image_column(schema: Any, names: Sequence[str]) -> str:
    """Return the column of images among those with bytes: `image`, else a struct, as datasets of the hub have."""
    from pyarrow import types

    def rank(name: str) -> tuple[bool, bool]:
        return name.lower() not in ("image", "img"), not types.is_struct(schema.field(name).type)

    return min(names, key=rank, default="")


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Return the class names by column, from the metadata of the library datasets."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            str(name): [str(word) for word in feature["names"]]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _value(value: Any, names: list[str] | None) -> Any:
    """Return a value, or the class name of its number; None for a number without name, as hidden labels have."""
    if isinstance(value, float) and value.is_integer():  # as pandas writes integers next to missing values
        value = int(value)
    if names is None or not isinstance(value, int):
        return None if value != value else value  # NaN: missing
    return names[value] if 0 <= value < len(names) else None


def _reader(paths: Sequence[Path], column: str) -> LibraryReader:
    need("data", "datasets")
    import datasets
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        cache = str(cache_dir() / "parquet")
        parts = [datasets.Dataset.from_parquet(str(path), columns=[column], cache_dir=cache) for path in paths]
        parts = [part.cast_column(column, datasets.Image(decode=False)) for part in parts]
    except Exception as error:  # the library raises many types, also of other libraries
        raise DataError(
            f"The images of '{printable(str(paths[0]))}' must be readable by the library datasets; {reason_of(error)}."
        ) from error
    finally:
        if not were_disabled:
            enable_progress_bars()
    return LibraryReader(parts, partial(hf_bytes, column))
