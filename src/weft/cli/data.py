"""`weft data`: check and prepare data, list known datasets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from weft.cli.options import add_common, example, print_json, table
from weft.errors import DataError, UsageError

if TYPE_CHECKING:
    from weft.data import Inventory

HELP = "check data, prepare it for training, list known datasets"

EXAMPLE = """
weft data check photos

bad   cats/IMG_7.jpg: truncated (the file is truncated)
bad   cats/page.jpg: not-an-image (its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF)

98 good, classes 2: cats 48, dogs 50
 2 bad: 1 not-an-image, 1 truncated
 3 ignored, neither named nor made like an image: 2 .txt, 1 .heic
12 exif-rotated: rotated by its EXIF orientation
 1 there more than once, the same to the byte: cats/7.jpg = dogs/3.jpg

weft data prepare photos packed --size 320        # resized once, in tar shards; then: weft train packed
weft data inaturalist train2018.json val2018.json inat18.csv   # a table from the annotations of iNaturalist
weft data list                                    # the papers' data sets
"""


PLACES = {  # of each action: its paths, and how many they are
    "check": (" DATA", 1, 1),
    "prepare": (" DATA OUT", 2, 2),
    "inaturalist": (" JSON [JSON ...] OUT.csv", 2, 100),
    "list": ("", 0, 0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.usage = "weft data check DATA | prepare DATA OUT [--size N] | inaturalist JSON [JSON ...] OUT.csv | list"
    parser.add_argument("action", choices=tuple(PLACES), help="what to do; no action writes to DATA")
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="check: folder of images; prepare: data and output folder; inaturalist: annotations and table",
    )
    parser.add_argument("--images", metavar="DIR", help="inaturalist: folder of the images (default: that of OUT)")
    parser.add_argument("--size", metavar="N", default="320", help="prepare: shorter side in pixels (default: 320)")
    parser.add_argument("--max-pixels", metavar="N", help="maximum pixels per image (default: 100 million)")
    parser.add_argument(
        "--no-decode", action="store_true", help="read only the first bytes of each file: faster, finds less"
    )
    parser.add_argument("--follow-links", action="store_true", help="also enter linked folders outside DATA")
    add_common(parser, "--force", "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Checks, prepares or lists."""
    words, fewest, most = PLACES[args.action]
    if not fewest <= len(args.paths) <= most:
        raise UsageError(f"weft data {args.action} is called as: weft data {args.action}{words}.")
    if args.action == "list":
        return _list(args.json)
    if args.action == "inaturalist":
        return _inaturalist(args)
    args.data, args.out = args.paths[0], args.paths[-1]
    return _check(args) if args.action == "check" else _prepare(args)


def _list(as_json: bool) -> int:
    from weft.data.sources.catalog import CATALOG

    if as_json:
        print_json([{"name": name, **known._asdict()} for name, known in CATALOG.items()])
        return 0
    rows = [
        (name, *(f"{count:,}" if count else "-" for count in known[:3]), known.source or "-", known.note)
        for name, known in CATALOG.items()
    ]
    print(table(("name", "classes", "train", "held out", "source", "note"), rows))
    return 0


def _inaturalist(args: argparse.Namespace) -> int:
    from weft.data.sources.inaturalist import convert_inaturalist

    *annotations, out = args.paths
    table = convert_inaturalist(annotations, out, images=args.images, force=args.force)
    if args.json:
        print_json({**table._asdict(), "out": str(table.out)})
    else:
        print(
            f"{table.train:,} images for training and {table.val:,} held out, in {table.classes:,} classes: {table.out}"
        )
    return 0


def _prepare(args: argparse.Namespace) -> int:
    from weft.data.prepare import prepare_data

    if not args.size.isdecimal():
        raise UsageError(f"--size must be a whole number of pixels; got '{args.size}'.")
    show = None if args.quiet or not sys.stderr.isatty() else _show
    done = prepare_data(args.data, args.out, int(args.size), force=args.force, progress=show)
    if args.json:
        print_json(done._asdict())
    else:
        print(
            f"{done.train:,} images for training and {done.val:,} held out, in {done.shards} shards: {args.out}\n"
            f"{done.bytes_before / 2**20:,.1f} MiB before, {done.bytes_after / 2**20:,.1f} MiB after"
        )
    return 0


def _check(args: argparse.Namespace) -> int:
    """Prints what there is; 3 if something is bad."""
    from weft.data import inspect
    from weft.data.images.decode import MAX_PIXELS

    if args.data == "digits" and not os.path.lexists(args.data):
        raise UsageError(
            "DATA must be a directory; got digits, which comes with scikit-learn and has no files to check."
        )
    inventory = inspect(
        args.data,
        decode=not args.no_decode,
        max_pixels=MAX_PIXELS if args.max_pixels is None else _pixels(args.max_pixels),
        follow_links=args.follow_links,
        progress=None if args.quiet or not sys.stderr.isatty() else _show,
    )
    if args.json:
        # ASCII: a name that is not UTF-8 is no text for a terminal, but its escapes are for json.loads
        print(json.dumps(inventory.as_dict(), indent=2))
    else:
        print(_report(inventory))
    return DataError.exit_code if inventory.bad else 0


def _pixels(text: str) -> int:
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"--max-pixels must be a whole number from 1 on; got '{text}'. 100 megapixels are 100000000.")
    return number


def _show(done: int, total: int) -> None:
    print(f"\rchecked {done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _report(inventory: Inventory) -> str:
    from weft.data.images.colour import NOTES
    from weft.data.images.decode import REASONS
    from weft.data.index.checks import extensions, first_few, same_bytes, tally
    from weft.data.index.tree import SKIPPED
    from weft.text import printable

    facts = inventory.as_dict()
    lines = [f"bad   {printable(bad.key)}: {bad.reason} ({REASONS[bad.reason]})" for bad in inventory.bad]
    lines += [""] * bool(lines)
    rows = []
    for split, counts in facts["classes"].items():
        place = f" in {inventory.val_name if split == 'val' else split}/" if split else ""
        each = first_few(f"{name} {count:,}" for name, count in counts.items())
        rows.append((sum(counts.values()), f"good{place}, classes {len(counts):,}{f': {each}' if each else ''}"))
    if facts["outside_classes"]:
        rows.append((facts["outside_classes"], "good outside all class folders, which training does not use"))
    reasons = tally(Counter(bad.reason for bad in inventory.bad))
    rows.append((len(inventory.bad), f"bad{f': {reasons}' if reasons else ''}"))
    if ignored := extensions(inventory.ignored):
        rows.append((sum(ignored.values()), f"ignored, neither named nor made like an image: {tally(ignored)}"))
    rows += [(number, f"{kind}: {NOTES[kind]}") for kind, number in facts["notes"].items()]
    if copies := inventory.copies:
        again = sum(len(keys) - 1 for keys in copies)
        rows.append((again, f"there more than once, the same to the byte: {first_few(map(same_bytes, copies))}"))
    rows += [(number, f"{kind}, passed over: {SKIPPED[kind]}") for kind, number in facts["skipped"].items()]
    width = max(len(f"{number:,}") for number, _ in rows)
    lines += [f"{number:>{width},} {text}" for number, text in rows]
    if inventory.unread:
        lines.append(f"Not read, because train/ exists: {first_few(f'{name}/' for name in inventory.unread)}.")
    if inventory.classes_outside:
        lines.append(f"Not entered, links to outside: {first_few(inventory.classes_outside)}. See --follow-links.")
    return "\n".join(lines)
