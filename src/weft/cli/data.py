"""`weft data`: what is wrong with a data directory, before anyone trains on it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from weft.cli.options import add_common, example
from weft.errors import DataError, UsageError

if TYPE_CHECKING:
    from weft.data import Inventory

HELP = "look through a data directory: bad files, conversions, ignored files"

EXAMPLE = """
weft data check photos

bad   cats/IMG_7.jpg: truncated (it ends too early)
bad   cats/page.jpg: not-an-image (its content is none of JPEG, PNG, WEBP, BMP, TIFF, GIF, whatever its name says)

98 good, classes 2: cats 48, dogs 50
 2 bad: 1 not-an-image, 1 truncated
 3 ignored, neither named nor made like an image: 2 .txt, 1 .heic
12 exif-rotated: turned upright by its EXIF orientation
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "action", choices=("check",), help="list bad files with reasons; nothing is ever written to DATA"
    )
    parser.add_argument("data", metavar="DATA", help="a directory of images")
    parser.add_argument("--max-pixels", metavar="N", help="pictures that claim more are bad (default: 100 million)")
    parser.add_argument(
        "--no-decode", action="store_true", help="read only the first bytes of each file: quick, sees less"
    )
    parser.add_argument("--follow-links", action="store_true", help="enter linked folders outside DATA, too")
    add_common(parser, "--json", "--quiet")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Prints what there is; 3 if something is bad."""
    from weft.data import inspect
    from weft.data.image import MAX_PIXELS

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
    from weft.data.checks import extensions, some, tally
    from weft.data.image import REASONS, printable
    from weft.data.pixels import NOTES
    from weft.data.tree import SKIPPED

    facts = inventory.as_dict()
    lines = [f"bad   {printable(bad.key)}: {bad.reason} ({REASONS[bad.reason]})" for bad in inventory.bad]
    lines += [""] * bool(lines)
    rows = []
    for split, counts in facts["classes"].items():
        place = f" in {inventory.val_name if split == 'val' else split}/" if split else ""
        each = some(f"{name} {count:,}" for name, count in counts.items())
        rows.append((sum(counts.values()), f"good{place}, classes {len(counts):,}{f': {each}' if each else ''}"))
    if facts["outside_classes"]:
        rows.append((facts["outside_classes"], "good outside all class folders, which training does not use"))
    reasons = tally(Counter(bad.reason for bad in inventory.bad))
    rows.append((len(inventory.bad), f"bad{f': {reasons}' if reasons else ''}"))
    if ignored := extensions(inventory.ignored):
        rows.append((sum(ignored.values()), f"ignored, neither named nor made like an image: {tally(ignored)}"))
    rows += [(number, f"{kind}: {NOTES[kind]}") for kind, number in facts["notes"].items()]
    rows += [(number, f"{kind}, passed over: {SKIPPED[kind]}") for kind, number in facts["skipped"].items()]
    width = max(len(f"{number:,}") for number, _ in rows)
    lines += [f"{number:>{width},} {text}" for number, text in rows]
    if inventory.unread:
        lines.append(f"Not read, since train/ is there: {some(f'{name}/' for name in inventory.unread)}.")
    if inventory.classes_outside:
        lines.append(f"Not entered, links to outside: {some(inventory.classes_outside)}. See --follow-links.")
    return "\n".join(lines)
