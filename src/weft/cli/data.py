"""`weft data`: check, review and prepare data."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.options import (
    MODEL,
    add_common,
    example,
    print_json,
    refuse_options_of_others,
    setting,
    table,
    use_threads,
)
from weft.errors import DataError, UsageError

if TYPE_CHECKING:
    from weft.data import Inventory

HELP = "check data, find wrong labels, prepare data for training"

EXAMPLE = """
weft data check photos              # exit code 0 if `weft train photos` accepts the data, else 3

bad   cats/IMG_7.jpg: truncated (the file is truncated)
bad   cats/page.jpg: not-an-image (its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF, AVIF, HEIF)

98 good, classes 2: cats 48, dogs 50
 2 bad: 1 not-an-image, 1 truncated
 3 ignored, not images by name or content: 2 .txt, 1 .heic
12 exif-rotated: rotated by its EXIF orientation
 1 duplicate, byte-identical: cats/7.jpg = dogs/3.jpg
Trainable: yes, without the bad files: weft train photos

weft data review photos --out review              # likely label errors, near-duplicates, outliers: review/report.html
weft train review/corrected.csv --group group     # after a check: edit labels in the table, delete rows

weft data prepare photos packed --size 320        # resize images into tar shards; then: weft train packed
"""


SIZE = "320"  # default of --size, in pixels
PATHS = {"check": "DATA", "review": "DATA", "prepare": "DATA OUT"}

OPTIONS = {  # action -> options that it reads, in addition to --json; others are refused
    "check": ("--max-pixels", "--no-decode", "--follow-links", "--strict", "--set", "--quiet"),
    "review": (
        *("--run", "--batch-size", "--device", "--precision", "--threads", "--follow-links", "--out"),
        *("--max-pixels", "--set", "--force", "--quiet"),
    ),
    "prepare": ("--size", "--max-pixels", "--set", "--force", "--quiet"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft data check DATA | review DATA [--run RUN] [--out DIR] | prepare DATA OUT [--size N]"
    parser.add_argument("action", choices=tuple(PATHS), help="action; none of them changes DATA")
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="check: any data that train reads; review: a folder or a table; prepare: image and output folder",
    )
    parser.add_argument("--size", metavar="N", help="prepare: length of the shorter side in pixels (default: 320)")
    add_common(parser, "--max-pixels")
    parser.add_argument(
        "--no-decode", action="store_true", help="check only the headers of images: faster, but finds fewer errors"
    )
    parser.add_argument("--follow-links", action="store_true", help="also follow links to folders outside DATA")
    parser.add_argument("--strict", action="store_true", help="check: exit with 3 if a file is bad, also if trainable")
    parser.add_argument(
        "--run", metavar="RUN", help=f"review: model of the features: {MODEL} (default: the public weights of train)"
    )
    add_common(parser, "--batch-size", "--device", "--precision", "--threads")
    add_common(parser, "--set", set="here: data.image, data.label and, for review, data.group")
    add_common(parser, "--out", out="review: report.html, corrected.csv")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    if len(args.paths) != len(PATHS[args.action].split()):
        raise UsageError(
            f"The command must have the form: weft data {args.action} {PATHS[args.action]}. Number of paths given:"
            f" {len(args.paths)}."
        )
    refuse_options_of_others(args, f"data {args.action}", args.action, OPTIONS)
    if args.max_pixels is not None:
        args.max_pixels = _pixels(args.max_pixels)
    args.columns = _columns(args.set, ("data.image", "data.label", "data.group")[: 3 if args.action == "review" else 2])
    if args.action == "review":
        return _review(args)
    args.data, args.out = args.paths[0], args.paths[-1]
    return _check(args) if args.action == "check" else _prepare(args)


def _columns(texts: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """Return the columns that `--set` chooses, as arguments of `open_data` and `review`."""
    columns = dict(setting(text) for text in texts)
    if wrong := next((key for key in columns if key not in known), None):
        raise UsageError(f"--set takes {', '.join(known[:-1])} and {known[-1]} here; got '{wrong}'. Leave it out.")
    return {key.removeprefix("data."): value for key, value in columns.items()}


def _prepare(args: argparse.Namespace) -> int:
    from weft.data.prepare import prepare_data

    size = SIZE if args.size is None else args.size
    if not size.isdecimal():
        raise UsageError(f"--size must be a whole number of pixels; got '{size}'.")
    summary = prepare_data(
        args.data,
        args.out,
        int(size),
        **args.columns,
        max_pixels=args.max_pixels,
        force=args.force,
    )
    if args.json:
        print_json(summary)
    else:
        print(
            f"{summary['train']:,} images for training and {summary['val']:,} held out, in {summary['shards']} shards:"
            f" {args.out}\n"
            f"{summary['bytes_before'] / 2**20:,.1f} MiB before, {summary['bytes_after'] / 2**20:,.1f} MiB after"
        )
    return 0


def _review(args: argparse.Namespace) -> int:
    """Print the findings; return 3 if a file cannot be read."""
    from weft.cli.embed import note_unreadable
    from weft.text import printable
    from weft.train.data_review import review

    use_threads(args.threads)
    result = review(
        args.paths[0],
        run=args.run,
        out=args.out,
        batch_size=args.batch_size,
        device=args.device or "auto",
        precision=args.precision or "fp32",
        **args.columns,
        max_pixels=args.max_pixels,
        follow_links=args.follow_links,
        force=args.force,
    )
    if args.json:
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
        if args.out is not None:
            print(f"report: {args.out}/report.html; train with: {result.command(Path(args.out))}")
    return note_unreadable(result.unreadable)


def _check(args: argparse.Namespace) -> int:
    """Print the report and whether training accepts the data; return 3 if it does not."""
    from weft.data.formats import MAX_PIXELS
    from weft.data.open import inspect, problem_of
    from weft.progress import Work

    if args.data == "digits" and not os.path.lexists(args.data):
        raise UsageError(
            "DATA must be a directory; got digits, which is part of scikit-learn and has no files to check."
        )
    with Work("checking") as work:
        inventory = inspect(
            args.data,
            **args.columns,
            decode=not args.no_decode,
            max_pixels=args.max_pixels or MAX_PIXELS,
            follow_links=args.follow_links,
            progress=work.update,
        )
    problem = problem_of(inventory)
    if args.json:
        # ASCII: a terminal cannot print a file name that is not UTF-8, but json.loads can read its escapes
        print(json.dumps({**inventory.as_dict(), "trainable": not problem, "reason": problem or None}, indent=2))
    else:
        print(_report(inventory))
        print(_verdict(inventory, problem, args))
    return DataError.exit_code if problem or (args.strict and inventory.bad) else 0


def _verdict(inventory: Inventory, problem: str, args: argparse.Namespace) -> str:
    """Return the last line of the report."""
    from weft.text import one_line

    if problem:
        return one_line(f"Trainable: no. {problem}")
    options = f" --max-pixels {args.max_pixels}" if args.max_pixels else ""
    options += " --follow-links" if args.follow_links else ""
    options += "".join(f" --set {shlex.quote(text)}" for text in args.set)
    without = ", without the bad files" if inventory.bad else ""
    by = ", by the headers of the files" if args.no_decode else ""
    return one_line(f"Trainable: yes{without}{by}: weft train {args.data}{options}")


def _pixels(text: str) -> int:
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(
            f"--max-pixels must be a whole number of at least 1; got '{text}'. 100 megapixels are 100000000."
        )
    return number


def _report(inventory: Inventory) -> str:
    from weft.data.bit_depth import value_notes
    from weft.data.checks import ignored_files, same_bytes, tally, unread_notes
    from weft.data.colour import NOTES
    from weft.data.decode import REASONS
    from weft.data.preprocessing import eval_transform
    from weft.data.tree import SKIPPED
    from weft.text import first_few, one_line, printable

    summary = inventory.as_dict()
    lines = [f"bad   {printable(bad.key)}: {bad.reason} ({REASONS[bad.reason]})" for bad in inventory.bad]
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
