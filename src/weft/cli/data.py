"""`weft data`: check, review and prepare data."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group

from weft.cli import options as opt
from weft.cli.options import flat, given, in_group, note_unreadable, pairs, print_json, table
from weft.errors import DataError, UsageError

if TYPE_CHECKING:
    from weft.data import Inventory

app = App(
    name="data",
    help="Check data, find wrong labels, prepare data for training, measure how fast it is loaded.",
    help_epilogue="""example:
  weft data check photos
  weft data bench photos
  weft data review photos --out review
  weft data prepare photos packed --size 320""",
    group_commands=Group("Commands"),
    **opt.PANELS,
)
COLUMNS = "column of a table: data.image, data.label or, for review, data.group"
Columns = Annotated[list[str] | None, in_group("Data", name="--set", metavar="KEY=VALUE", help=COLUMNS)]
FollowLinks = Annotated[bool, in_group("Data", help="also follow links to folders outside DATA")]


@flat
class ReadOptions:
    """Limit on images."""

    max_pixels: str | None = None


@flat
class Features(ReadOptions):
    """The model of the features."""

    img_size: str | None = None
    batch_size: str | None = None
    device: str | None = None
    precision: str | None = None


@flat
class OfBench(Features):
    """Network and machine that train on the images."""

    model: str | None = None


@flat
class OfPrepare(ReadOptions):
    """Reading and resizing of images."""

    group: str | None = None
    workers: Annotated[str | None, in_group("Machine", metavar="N|auto")] = None
    """processes that resize; 0 resizes in this one (default: auto, one per core)"""


@app.command
def check(
    data: str,
    /,
    *,
    no_decode: bool = False,
    strict: bool = False,
    follow_links: FollowLinks = False,
    settings: Columns = None,
    series: Annotated[str | None, in_group("Output", metavar="FILE")] = None,
    pixels: ReadOptions = ReadOptions(),
    output: opt.Output = opt.Output(),
) -> int:
    """Check the images of a dataset; exit with 3 if training would refuse it.

    Args:
        data: any data that train reads; none of the commands changes it
        no_decode: check only the headers of images: faster, but finds fewer errors
        strict: exit with 3 if a file is bad, also if trainable
        series: CSV file for series of similar images; needs PyTorch

    Example:
        weft data check photos              # exit code 0 if `weft train photos` accepts the data, else 3
        weft data check photos --series series.csv      # also which images are in one series: docs/series.md

        bad   cats/IMG_7.jpg: truncated (the file is truncated)
        bad   cats/page.jpg: not-an-image (its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF, AVIF, HEIF)

        98 good, classes 2: cats 48, dogs 50
         2 bad: 1 not-an-image, 1 truncated
         3 ignored, not images by name or content: 2 .txt, 1 .heic
        12 exif-rotated: rotated by its EXIF orientation
         1 duplicate, byte-identical: cats/7.jpg = dogs/3.jpg
        Trainable: yes, without the bad files: weft train photos
    """
    from weft.data.folder import check_new_file
    from weft.data.groups import SUFFIX
    from weft.data.open import inspect, problem_of
    from weft.inference.arguments import InferenceOptions
    from weft.progress import Work

    columns = _columns(settings, "data.image", "data.label")
    if series is not None:
        if not series.lower().endswith(SUFFIX):
            raise UsageError(f"--series must name a CSV file, which --group reads; got {series}.")
        check_new_file(Path(series), "--series", data, force=output.force)
    if data == "digits" and not os.path.lexists(data):
        raise UsageError(
            "DATA must be a directory; got digits, which is part of scikit-learn and has no files to check."
        )
    with Work("checking") as work:
        inventory = inspect(
            data,
            **columns,
            decode=not no_decode,
            max_pixels=InferenceOptions.of(vars(pixels)).max_pixels,
            follow_links=follow_links,
            progress=work.update,
        )
    problem = problem_of(inventory)
    options = f" --max-pixels {pixels.max_pixels}" if pixels.max_pixels else ""
    options += " --follow-links" if follow_links else ""
    options += "".join(f" --set {shlex.quote(text)}" for text in settings or ())
    if not output.json:
        print(_report(inventory))
        print(_verdict(inventory, problem, f"weft train {data}{options}", no_decode=no_decode), flush=True)
    in_series = None
    if series is not None and not problem:
        import weft.train as library

        arguments = {"max_pixels": pixels.max_pixels, "follow_links": follow_links or None}
        in_series = library.find_series(data, out=series, settings=pairs(settings), force=output.force, **arguments)
    if output.json:
        # ASCII: a terminal cannot print a file name that is not UTF-8, but json.loads can read its escapes
        own = {} if in_series is None else {"series": in_series}
        reason = problem or None
        print(json.dumps({**inventory.as_dict(), "trainable": not problem, "reason": reason, **own}, indent=2))
    elif in_series is not None:
        print(_series_found(in_series, len(inventory.keys), f"weft train {data}{options} --group {series}"))
    return DataError.exit_code if problem or (strict and inventory.bad) else 0


@app.command
def bench(
    data: str,
    /,
    *,
    recipe: Annotated[opt.Recipe, in_group("Training")] = None,
    settings: opt.Settings = None,
    seconds: Annotated[float, in_group("Options", metavar="N")] = 5.0,
    of_recipe: OfBench = OfBench(),
    shown: opt.Shown = opt.Shown(),
) -> int:
    """Measure how fast training images are loaded, by number of processes, and whether that keeps training busy.

    Args:
        data: any data that train reads
        settings: recipe setting, for example augment.rand_augment=null; may be repeated
        seconds: seconds for each number of processes (default: 5)

    Example:
        weft data bench photos --model levit_256
    """
    import weft.train as library

    common = {"recipe": recipe, "settings": pairs(settings), **given(of_recipe)}
    result = library.loading_speed(data, seconds=seconds, **common)
    if shown.json:
        print_json(result.as_dict())
    else:
        rows = [(rate.workers, f"{rate.images_per_second:,.0f}") for rate in result.rates]
        print(table(("workers", "images/s"), rows) + "\n")
        print(result.headline())
    return 0


@app.command
def review(
    data: str,
    /,
    *,
    run: Annotated[
        str | None,
        in_group(
            "Network", metavar="RUN", help=f"model of the features: {opt.MODEL} (default: the public weights of train)"
        ),
    ] = None,
    out: opt.Out = None,
    follow_links: FollowLinks = False,
    settings: Columns = None,
    features: Features = Features(),
    machine: opt.Machine = opt.Machine(),
    output: opt.Output = opt.Output(),
) -> int:
    """Find likely label errors, near-duplicates and outliers.

    Args:
        data: a folder of images or a table
        out: output directory: report.html, corrected.csv

    Example:
        weft data review photos --out review              # likely label errors, near-duplicates, outliers
        weft train review/corrected.csv --group group     # after a check: edit labels in the table, delete rows
    """
    import weft.train as library
    from weft.text import printable

    columns = _columns(settings, "data.image", "data.label", "data.group")
    result = library.review(
        data, run=run, out=out, follow_links=follow_links, force=output.force, **columns, **given(features)
    )
    if output.json:
        print_json(result.as_dict())
    else:
        rows = [
            (printable(row.path), row.label, row.proposed, row.chance, row.problem, row.action)
            for row in result.findings
        ]
        if rows:
            print(table(("image", "label", "proposed", "probability", "problem", "action"), rows) + "\n")
        print(result.headline())
        for name, value in result.lines():
            print(f"{name}: {value}")
        for text in result.notes:
            print(text)
        if out is not None:
            print(f"report: {out}/report.html; train with: {result.command(Path(out))}")
    return note_unreadable([message for _, message in result.unreadable])


@app.command
def prepare(
    data: str,
    out: str,
    /,
    *,
    size: opt.Number = 320,
    settings: Columns = None,
    reading: OfPrepare = OfPrepare(),
    output: opt.Output = opt.Output(),
) -> int:
    """Resize images into tar shards, which train reads faster.

    Args:
        data: folder of images
        out: output directory: tar shards
        size: length of the shorter side in pixels (default: 320)

    Example:
        weft data prepare photos packed --size 320        # then: weft train packed

        The shards keep the split. For images in series: weft data check photos --series FILE, then --group FILE.
    """
    from weft.data.prepare import prepare_data
    from weft.inference.arguments import InferenceOptions

    columns, options = _columns(settings, "data.image", "data.label"), InferenceOptions.of(vars(reading))
    limits = {"max_pixels": options.max_pixels, "workers": options.workers}
    summary = prepare_data(data, out, size, **columns, **limits, group=reading.group, force=output.force)
    if output.json:
        print_json(summary)
    else:
        print(
            f"{summary['train']:,} images for training and {summary['val']:,} held out, in {summary['shards']} shards:"
            f" {out}\n"
            f"{summary['bytes_before'] / 2**20:,.1f} MiB before, {summary['bytes_after'] / 2**20:,.1f} MiB after"
        )
    return note_unreadable([bad["error"] for bad in summary["unreadable"]])


def _columns(texts: list[str] | None, *known: str) -> dict[str, Any]:
    """Return the columns that `--set` chooses, as arguments of `open_data` and `review`."""
    columns = pairs(texts)
    if wrong := next((key for key in columns if key not in known), None):
        raise UsageError(f"--set takes {', '.join(known[:-1])} and {known[-1]} here; got '{wrong}'. Leave it out.")
    return {key.removeprefix("data."): value for key, value in columns.items()}


def _series_found(series: Mapping[str, str], number: int, command: str) -> str:
    """Return the lines on series of similar images, and on the file that lists them."""
    if not series:
        return "Series of similar images: none."
    sizes = Counter(series.values())
    return (
        f"Series of similar images: {len(sizes):,}, of {max(sizes.values()):,} images at most; {len(series):,} of"
        f" {number:,} images are in one. After a check of the file: {command}"
    )


def _verdict(inventory: Inventory, problem: str, command: str, *, no_decode: bool) -> str:
    """Return the last line of the report."""
    from weft.text import one_line

    if problem:
        return one_line(f"Trainable: no. {problem}")
    without = ", without the bad files" if inventory.bad else ""
    by = ", by the headers of the files" if no_decode else ""
    return one_line(f"Trainable: yes{without}{by}: {command}")


def _report(inventory: Inventory) -> str:
    from weft.data.bit_depth import value_notes
    from weft.data.checks import ignored_files, same_bytes, tally, unread_notes
    from weft.data.colour import NOTES
    from weft.data.decode import REASONS
    from weft.data.preprocessing import eval_transform
    from weft.data.tree import SKIPPED
    from weft.text import first_few, one_line, printable

    summary = inventory.as_dict()
    lines = []
    for bad in inventory.bad:
        text = f"{printable(bad.key)}: {bad.reason} ({REASONS[bad.reason]})"
        lines.append(f"bad   {bad.message if bad.key.endswith('.tar') else text}")
    lines += [""] * bool(lines)
    rows = []
    for split, counts in summary["classes"].items():
        place = f" in {inventory.folder(split)}/" if split else ""
        each = first_few(f"{name} {count:,}" for name, count in counts.items())
        rows.append((sum(counts.values()), f"good{place}, classes {len(counts):,}{f': {each}' if each else ''}"))
    if summary["outside_classes"]:
        rows.append((summary["outside_classes"], "good, but outside all class folders; not used in training"))
    reasons = tally(Counter(bad.reason for bad in inventory.bad))
    rows.append((len(inventory.bad), f"bad{f': {reasons}' if reasons else ''}"))
    if ignored := ignored_files(inventory):
        rows.append((inventory.ignored.total(), f"ignored, not images by name or content: {ignored}"))
    rows += [(number, f"{kind}: {NOTES[kind]}") for kind, number in summary["notes"].items()]
    if copies := summary["copies"]:
        num_duplicates = sum(len(keys) - 1 for keys in copies)
        noun = "duplicate" if num_duplicates == 1 else "duplicates"
        rows.append((num_duplicates, f"{noun}, byte-identical: {first_few(map(same_bytes, copies))}"))
    rows += [(number, f"{kind}, skipped: {SKIPPED[kind]}") for kind, number in summary["skipped"].items()]
    width = max(len(f"{number:,}") for number, _ in rows)
    lines += [f"{number:>{width},} {text}" for number, text in rows]
    lines += value_notes(inventory.values, summary["value_range"])
    lines += filter(None, [eval_transform({}).note(inventory.sizes)])
    lines += [*unread_notes(inventory), *inventory.remarks]
    if inventory.classes_outside:
        lines.append(
            f"Not followed, links to folders outside: {first_few(inventory.classes_outside)}. To read them, also in"
            " training: --follow-links."
        )
    return "\n".join(map(one_line, lines))
