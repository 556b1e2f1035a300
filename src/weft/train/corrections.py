"""`weft data review --apply`: a table of a dataset with the actions of `changes.csv` carried out."""

from __future__ import annotations

import csv
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from weft.data import Source, Splits, open_data
from weft.data.folder import FileReader, check_outside
from weft.data.source import KeyedSource
from weft.data.table import SUFFIXES, other_columns, read_table
from weft.errors import DataError, UsageError
from weft.files import check_writable, write_table, writing
from weft.progress import obeys_quiet, reading, say
from weft.text import count, first_few, printable

HEADER = ("path", "label", "proposed", "probability", "problem", "action", "split", "group")  # of changes.csv
NEEDED = ("path", "label", "proposed", "action")  # columns without which it cannot be applied
ACTIONS = ("keep", "relabel", "exclude")
GROUP = "group"


@obeys_quiet
def apply_changes(
    data: str | Path,
    changes: str | Path,
    out: str | Path,
    *,
    image: str | None = None,
    label: str | None = None,
    max_pixels: int | None = None,
    follow_links: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> dict[str, int]:
    """Write a table of a dataset with the actions of `changes.csv` carried out; no image changes.

    Args:
        data: the dataset that was reviewed.
        changes: a table as `review` writes it, perhaps edited; an image that it does not list is kept.
        out: the new table, `x.csv`, with the columns path, label, group, split if the dataset defines one, and every
            other column that `data` has if it is a table. A column `group` of it and the near-duplicates are joined:
            images that are connected by either are in one group. `train` reads the new table.
        image, label: columns of a table, as in `open_data`.
        follow_links: as in `train`.
        force: replace an existing table.
        quiet: print no progress and no notes.

    Returns:
        Number of images with each action.

    Raises:
        UsageError: `out` exists, does not end in .csv, or is one of the inputs; or the data are not files.
        DataError: the changes cannot be read, have an unknown action, list an image twice or one that the data do not
            have, or were made for another label.
    """
    out = Path(out)
    check_outside(out, data)
    _check_table(out, (Path(data), Path(changes)), force)
    rows = _read_changes(Path(changes))
    splits = open_files(data, follow_links, max_pixels, image, label)
    names, values = _other_columns(data, image, label)
    images = [
        (side, path, splits.classes[number])
        for side, source in (("train", splits.train), ("val", splits.val))
        for path, number in zip(paths_of(source), source.labels, strict=True)
    ]
    if missing := rows.keys() - {path for _, path, _ in images}:
        raise DataError(
            f"Every image of the changes must be in the data; {printable(min(missing))} is not among the readable"
            f" images of {printable(str(data))}. Pass the data that were reviewed, or remove the row."
        )
    own = [values[path][names.index(GROUP)].strip() if GROUP in names else "" for _, path, _ in images]
    groups = joined_groups(own, [rows[path][GROUP] if path in rows else "" for _, path, _ in images])
    kept: list[tuple[str, ...]] = []
    counts: dict[str, int] = dict.fromkeys(ACTIONS, 0)
    others = [place for place, name in enumerate(names) if name != GROUP]
    for (side, path, label), group in zip(images, groups, strict=True):
        row = rows.get(path)
        if row is not None and row["label"] != label.strip():
            raise DataError(
                f"The changes must belong to the data; {printable(path)} has the label '{printable(label)}',"
                f" {printable(str(changes))} was made for '{printable(row['label'])}'. Review the data again."
            )
        action = "keep" if row is None else row["action"]
        counts[action] += 1
        if action != "exclude":
            label = row["proposed"] if row is not None and action == "relabel" else label
            more = [values[path][place] for place in others]
            kept.append((path, label, group, *([side] if splits.is_given else []), *more))
    header = ("path", "label", GROUP, *(["split"] if splits.is_given else []), *(names[place] for place in others))
    # without the first, on the split: the new table has that of the data
    for text in splits.notes[1:] + _class_notes(splits.classes, Counter(row[1] for row in kept)):
        say(text)
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_table(out, header, kept)
    return counts


def joined_groups(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return groups of images such that images of one group by `first` or by `second` are in one group.

    Args:
        first, second: group of every image; empty for an image in no group. A group of the result has the first name,
            alphabetically, of its groups in `first`, else of those in `second`, with a number if the name is taken.
    """
    names = sorted({(0, name) for name in first if name}) + sorted({(1, name) for name in second if name})
    number = {name: place for place, name in enumerate(names)}
    pairs = [(number[0, a], number[1, b]) for a, b in zip(first, second, strict=True) if a and b]
    edges = coo_array(([1] * len(pairs), tuple(zip(*pairs, strict=True)) or ([], [])), shape=(len(names), len(names)))
    _, component = connected_components(edges, directed=False)
    name_of, taken = dict[int, str](), set[str]()
    for place, (_, name) in enumerate(names):
        if (group := int(component[place])) not in name_of:
            options = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
            name_of[group] = next(option for option in options if option not in taken)
            taken.add(name_of[group])

    def joined(a: str, b: str) -> str:
        return name_of[int(component[number[0, a] if a else number[1, b]])] if a or b else ""

    return [joined(a, b) for a, b in zip(first, second, strict=True)]


def open_files(
    data: str | Path,
    follow_links: bool,
    max_pixels: int | None,
    image: str | None = None,
    label: str | None = None,
) -> Splits:
    """Open a dataset with all of its readable images, and with classes that have none."""
    with reading() as progress:
        return open_data(
            data,
            image=image,
            label=label,
            max_bad=1,
            max_pixels=max_pixels,
            allow_empty_class=True,
            evaluate_only=True,
            follow_links=follow_links,
            progress=progress,
        )


def paths_of(source: Source) -> list[str]:
    """Return the absolute paths of the images of a folder or table.

    Raises:
        UsageError: the images are not files.
    """
    if not isinstance(source, KeyedSource) or not isinstance(source.reader, FileReader):
        raise UsageError(
            "A review reads image files: a folder with one subfolder per class, or a table of paths and labels. Unpack"
            " other data into a folder first."
        )
    folder = os.path.abspath(source.reader.folder)
    return [os.path.join(folder, key) for key in source.keys]


def _other_columns(data: str | Path, image: str | None, label: str | None) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the further columns of a table, and their values by absolute path; none for a folder."""
    path = Path(data)
    if path.suffix not in SUFFIXES or not path.is_file():
        return [], defaultdict(list)
    names, values = other_columns(path, image, label)
    folder = os.path.abspath(path.parent)
    return names, {os.path.join(folder, key): row for key, row in values.items()}


def _check_table(out: Path, inputs: Sequence[Path], force: bool) -> None:
    if out.suffix != ".csv":
        raise UsageError(
            f"The corrected table must end in .csv; got '{printable(str(out))}'. For example: --out new.csv."
        )
    if any(out.resolve() == path.resolve() for path in inputs):
        raise UsageError(
            f"The corrected table must be a new file; {printable(str(out))} is an input. Choose another --out."
        )
    if out.is_dir() or (os.path.lexists(out) and not force):
        raise UsageError(f"{printable(str(out))} exists. Choose another --out, or pass --force to replace a file.")
    check_writable(out.parent)


def _read_changes(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of `changes.csv` by path, with an empty text for each value that is missing."""
    name, rows = printable(str(path)), dict[str, dict[str, str]]()
    try:
        table = read_table(path)
        if missing := [column for column in NEEDED if column not in table.columns]:
            raise DataError(
                f"The changes must have a column '{missing[0]}'; {name} has {', '.join(table.columns) or 'none'}. Use"
                " the changes.csv of weft data review."
            )
        for number, *values in zip(table.numbers, *table.columns.values(), strict=True):
            texts = ("" if value is None else str(value) for value in values)
            row = dict.fromkeys(HEADER, "") | dict(zip(table.columns, texts, strict=True))
            row |= {column: row[column].strip() for column in ("label", "proposed", "action", GROUP)}
            row["action"] = row["action"].lower() or "keep"
            if row["action"] not in ACTIONS:
                raise DataError(
                    f"An action must be keep, relabel or exclude; row {number} of {name} has '{row['action']}'."
                )
            if row["action"] == "relabel" and not row["proposed"]:
                raise DataError(f"To relabel an image, 'proposed' must name a class; row {number} of {name} does not.")
            if row["path"] in rows:
                raise DataError(
                    f"The changes must list every image once; row {number} of {name} lists"
                    f" '{printable(row['path'])}' again. Keep one of its rows."
                )
            rows[row["path"]] = row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"The changes must be a readable table; {name} is not ({reason}).") from error
    return rows


def _class_notes(before: Sequence[str], images: Counter[str]) -> list[str]:
    """Return sentences about classes that the changes add and those that they leave without an image."""
    notes = []
    if added := [f"{printable(name)} ({count(images[name], 'image')})" for name in sorted(images.keys() - set(before))]:
        notes.append(f"New: {count(len(added), 'class', 'classes')} that the data do not have, {first_few(added)}.")
    if lost := [printable(name) for name in before if not images[name]]:
        notes.append(f"No image is left of {count(len(lost), 'class', 'classes')}: {first_few(lost)}.")
    return notes
