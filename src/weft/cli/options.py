"""Options shared by several verbs, and functions that print their results."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from weft.errors import UsageError
from weft.processor import MAX_THREADS
from weft.text import csv_cell, one_line

COMMON: dict[str, dict[str, Any]] = {
    "--model": dict(metavar="NAME", help="name from `weft models`, or any timm model"),
    "--plugin": dict(
        metavar="FILE",
        action="append",
        default=[],
        help="Python file with a family of networks of your own (docs/your-own-network.md); it is run",
    ),
    "--recipe": dict(metavar="NAME|FILE", help="recipe name (see `weft recipes`) or YAML file"),
    "--set": dict(
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="recipe setting, for example optim.lr=3e-4; may be repeated",
    ),
    "--epochs": dict(metavar="N", help="number of epochs"),
    "--batch-size": dict(metavar="N", help="images per batch"),
    "--img-size": dict(metavar="N|HxW", help="image size in pixels: one side, or height x width"),
    "--out": dict(metavar="DIR", help="output directory"),
    "--seed": dict(metavar="N", help="random seed"),
    "--device": dict(choices=("auto", "cpu", "cuda"), help="auto uses a GPU if there is one"),
    "--precision": dict(choices=("fp32", "bf16"), help="number format of matrix multiplications and convolutions"),
    "--workers": dict(metavar="N", help="data loader processes; results do not depend on it"),
    "--threads": dict(metavar="N", help="CPU threads for computation (default: torch's)"),
    "--tta": dict(
        action="store_true",
        help="test-time augmentation: average with the mirror image; not if left and right matter",
    ),
    "--limit": dict(metavar="N", help="use at most N images of each split"),
    "--force": dict(action="store_true", help="overwrite existing output"),
    "--json": dict(action="store_true", help="print the result as JSON"),
    "--quiet": dict(action="store_true", help="print no progress and no notes"),
}


def add_common(parser: argparse.ArgumentParser, *names: str, **extra: str) -> None:
    """Add options of `COMMON`; `extra` adds to the help of one, for example `out="default: runs/..."`."""
    for name in names:
        settings = dict(COMMON[name])
        if more := extra.get(name.lstrip("-").replace("-", "_")):
            settings["help"] = f"{settings['help']} ({more})"
        parser.add_argument(name, **settings)


def setting(text: str) -> tuple[str, Any]:
    """Return the key and the value of one `--set KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set takes KEY=VALUE; got '{text}'. For example: --set optim.lr=3e-4.")
    return key, value


RUN_OPTIONS = ("--set", "--epochs", "--batch-size", "--device", "--precision", "--workers", "--limit")


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `RUN_OPTIONS` as recipe settings."""
    settings = dict(setting(text) for text in args.set)
    keys = {"limit": "data.limit"}
    for option in ("epochs", "batch_size", "device", "precision", "workers", "limit"):
        if (value := getattr(args, option)) is not None:
            settings[keys.get(option, option)] = value
    return settings


def whole(option: str, text: Any, most: int = 1 << 48) -> int:
    """Return the value of an option that is a whole number from 1 to `most`."""
    if not str(text).isdecimal() or len(str(text)) > 15 or not 1 <= int(text) <= most:
        bound = f" and at most {most}" if most < 1 << 48 else ""
        raise UsageError(f"{option} must be a whole number of at least 1{bound}; got {text}.")
    return int(text)


def use_threads(text: str | None) -> None:
    """Set the number of CPU threads of torch and of every inference runtime."""
    if text is not None:
        import torch

        torch.set_num_threads(whole("--threads", text, MAX_THREADS))


def example(parser: argparse.ArgumentParser, text: str) -> None:
    """Add an example to the end of a verb's help."""
    parser.epilog = "example:\n" + "\n".join(f"  {line}".rstrip() for line in text.strip("\n").splitlines())


def note(text: str) -> None:
    """Print one line to stderr."""
    print(one_line(text), file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a result as CSV."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows([csv_cell(cell) for cell in row] for row in (header, *rows))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as text; columns of numbers are aligned right."""
    cells = [list(header), *([one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(_is_number(row[column]) for row in cells[1:]) and len(cells) > 1 for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    )


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.rstrip("%MGk ").replace(".", "", 1).replace(",", "").lstrip("-").isdigit()
