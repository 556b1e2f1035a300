"""Options shared by several verbs, and functions that print their results."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.errors import UsageError
from weft.processor import MAX_THREADS, set_num_threads
from weft.recipes.describe import options
from weft.text import csv_cell, one_line

COMMON: dict[str, dict[str, Any]] = {
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
        help="recipe setting, for example optim.lr=3e-4; may be repeated (all: `weft recipes settings`)",
    ),
    "--out": dict(metavar="DIR", help="output directory"),
    "--threads": dict(metavar="N", help="CPU threads for computation (default: torch's)"),
    "--tta": dict(
        action="store_true",
        help="test-time augmentation: average with the mirror image; not if left and right matter",
    ),
    "--reject-at-error": dict(
        metavar="PERCENT",
        help="reject predictions below the confidence at which this percentage of the held-out images was wrong",
    ),
    "--force": dict(action="store_true", help="overwrite existing output"),
    "--json": dict(action="store_true", help="print the result as JSON"),
    "--quiet": dict(action="store_true", help="print no progress and no notes"),
}
MODEL = "run directory (its best model is used), model directory, hf-hub:OWNER/NAME, or name of a public model"
RUN = "run directory (its best model is used), model directory, export, hf-hub:OWNER/NAME, or name of a public model"
NO_FORMULA = "a text that a spreadsheet would run as a formula (first character = + - @) gets a leading apostrophe"
RUN_OPTIONS = (
    *("--set", "--epochs", "--batch-size", "--device", "--precision", "--workers", "--limit", "--max-pixels"),
    "--follow-links",
)


def add_common(parser: argparse.ArgumentParser, *names: str, **extra: str) -> None:
    """Add options that several verbs share: those of `COMMON`, and of settings of the recipe.

    Args:
        parser: of the verb.
        names: options, such as `--out`.
        extra: text to add to the help of an option, for example `out="default: runs/..."`.
    """
    for name in names:
        arguments = dict(COMMON[name]) if name in COMMON else setting_option(name)
        if more := extra.get(name.lstrip("-").replace("-", "_")):
            arguments["help"] = f"{arguments['help']} ({more})"
        parser.add_argument(name, **arguments)


def setting_option(flag: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the option of a setting, derived from the recipe schema."""
    option = next(option for option in options().values() if option.flag == flag)
    help = option.summary[:1].lower() + option.summary[1:]
    if option.type is bool:
        return {"dest": option.argument, "help": help, "action": "store_true", "default": None}
    values = {"choices": option.choices} if option.choices else {"metavar": option.metavar}
    return {"dest": option.argument, "help": help, **values}


def setting(text: str) -> tuple[str, Any]:
    """Return the key and the value of one `--set KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set takes KEY=VALUE; got '{text}'. For example: --set optim.lr=3e-4.")
    return key, value


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return `--set` and the given options of settings as recipe settings, by dotted key."""
    given = ((option.key, getattr(args, option.argument, None)) for option in options().values())
    return dict(setting(text) for text in args.set) | {key: value for key, value in given if value is not None}


def whole(option: str, text: Any, most: int = 1 << 48) -> int:
    """Return the value of an option that is a whole number from 1 to `most`."""
    if not str(text).isdecimal() or len(str(text)) > 15 or not 1 <= int(text) <= most:
        bound = f" and at most {most}" if most < 1 << 48 else ""
        raise UsageError(f"{option} must be a whole number of at least 1{bound}; got {text}.")
    return int(text)


def percentage(option: str, text: str | None) -> float | None:
    """Return the value of an option in percent, such as `1%` or `0.5`, as a share from 0 to below 1; None without a
    value."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise UsageError(f"{option} must be a percentage, such as 1%; got '{text}'.") from None
    if not 0 <= share < 1:
        raise UsageError(f"{option} must be at least 0 and below 100 %; got '{text}'.")
    return share


def use_threads(text: str | None) -> None:
    """Set the number of CPU threads of torch and of every inference runtime."""
    if text is not None:
        set_num_threads(whole("--threads", text, MAX_THREADS))


def one_format(args: argparse.Namespace) -> None:
    """Refuse two output formats at the same time."""
    if args.json and args.csv:
        raise UsageError("--json and --csv exclude each other; pass one of them.")


def refuse_options_of_others(
    args: argparse.Namespace, verb: str, action: str, options: Mapping[str, Sequence[str]]
) -> None:
    """Refuse options that the chosen action of a verb does not read.

    Args:
        args: parsed arguments; the default of such an option is None, False or [].
        verb: verb and action, for the message.
        action: the chosen action.
        options: action -> the options that it reads.
    """
    for option in dict.fromkeys(option for known in options.values() for option in known):
        value = getattr(args, option.lstrip("-").replace("-", "_"))
        if option not in options[action] and value not in (None, False, []):
            owners = " and ".join(name for name, known in options.items() if option in known)
            raise UsageError(f"weft {verb} does not read {option}, an option of {owners}. Leave it out.")


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
    """Print a result as CSV; `NO_FORMULA` says how its texts differ from those of the files that weft writes."""
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
