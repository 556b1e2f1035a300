"""Options that mean the same under several verbs, and functions that print their results.

Fields are options, and their docstrings the help. A field that is named like a setting of the recipe with an option has
its flag, placeholder and help from `recipes/schema.py`; its text is checked where recipes are read.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_origin

from cyclopts import Group, Parameter, Token, convert

from weft.errors import DataError, UsageError
from weft.recipes import schema
from weft.recipes.describe import options
from weft.recipes.fields import NUMBERS, bytes_of, checked_number, in_words, seconds_of
from weft.text import csv_cell, one_line

Kind = TypeVar("Kind", bound=type)

GROUPS = {  # heading in the help -> settings of the recipe below it
    "Arguments": (),
    "Options": (),
    "Network": ("model", "start_from", "img_size"),
    "Training": ("epochs", "batch_size", "lr", "seed"),
    "Data": ("limit", "max_pixels", "follow_links", "group", "folds", "unknown_images"),
    "Machine": ("device", "precision", "workers"),
    "Stop and resume": (),
    "Output": (),
}
HEADINGS = {name: Group(name, sort_key=number) for number, name in enumerate(GROUPS)}
PANELS: Any = {"group_arguments": HEADINGS["Arguments"], "group_parameters": HEADINGS["Options"]}  # of an `App`
GROUP_OF = {name: HEADINGS[group] for group, names in GROUPS.items() for name in names}
SHORT = {"model": "-m", "batch_size": "-b"}


def in_group(heading: str, **keywords: Any) -> Parameter:
    """Return an option under one of the headings of `GROUPS`."""
    return Parameter(group=HEADINGS[heading], **keywords)


def setting(name: str) -> Parameter:
    """Return the option of a setting of the recipe, by the name of its argument."""
    option = options()[name]
    return Parameter(
        name=option.flag,
        alias=SHORT.get(name),
        help=option.summary[:1].lower() + option.summary[1:],
        metavar="|".join(option.choices) or option.metavar,
        choices=option.choices or None,
        group=GROUP_OF[name],
    )


def flat(kind: Kind) -> Kind:
    """Make a class a dataclass whose fields are options of the verbs that take it."""
    for name, hint in kind.__annotations__.items():
        if name in options() and get_origin(hint) is not Annotated:
            value = bool if options()[name].type is bool else str
            kind.__annotations__[name] = Annotated[value | None, setting(name)]
    return Parameter(name="*")(dataclass(frozen=True, kw_only=True)(kind))


def given(*records: object) -> dict[str, Any]:
    """Return the options that were given, as keyword arguments; for the others, the defaults of the library hold."""
    return {name: value for record in records for name, value in vars(record).items() if value is not None}


def parsed(parse: Callable[[str, str], float]) -> Any:
    """Return a converter of an option from a function of the text and the name of the option."""
    return lambda kind, tokens: parse(tokens[0].value, tokens[0].keyword)


def typed(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert the text of an option, which may be a decimal and finite number."""
    return convert(kind, tokens, converter=_number)


def _number(kind: type, text: str) -> Any:
    value = kind(checked_number(kind, text) if kind in NUMBERS else text)
    if kind is float and not math.isfinite(value):
        raise ValueError
    return value


def percentage(text: str, option: str) -> float:
    """Return a value in percent, such as `1%` or `0.5`, as a share from 0 to below 1."""
    try:
        share = _number(float, text.strip().removesuffix("%")) / 100
    except ValueError:
        raise UsageError(f"{option} must be a percentage, such as 1%; got '{text}'.") from None
    if not 0 <= share < 1:
        raise UsageError(f"{option} must be at least 0 and below 100 %; got '{text}'.")
    return share


MODEL = "run directory (its best model is used), model directory, hf-hub:OWNER/NAME, or name of a public model"
RUN = "run directory (its best model is used), model directory, export, hf-hub:OWNER/NAME, or name of a public model"
NO_FORMULA = "a text that a spreadsheet would run as a formula (first character = + - @) gets a leading apostrophe"


def as_csv(rows: str) -> Parameter:
    """Return the option --csv of a verb, whose output has these rows."""
    return in_group("Output", help=f"print CSV, {rows}; {NO_FORMULA}")


Run = Annotated[str, Parameter(help=RUN)]
Model = Annotated[str, Parameter(help=MODEL)]


def _check_range(rule: Any, kind: Any, number: int | None) -> None:
    """Check a number by the type of a setting, whose annotation has the range."""
    if number is not None and not rule.__metadata__[0].low <= number <= rule.__metadata__[0].high:
        raise ValueError(f"must be {in_words(rule)}")


ImageFiles = Annotated[str, Parameter(required=True, help="image files, folders, or quoted patterns such as 'x/*.png'")]
Number = Annotated[int, Parameter(metavar="N")]
Positive = Annotated[int, Parameter(metavar="N", validator=functools.partial(_check_range, schema.Positive))]
OF_THREADS = {"metavar": "N", "validator": functools.partial(_check_range, schema.Threads)}
Threads = Annotated[
    int | None, in_group("Machine", help="CPU threads for computation (default: torch's)", **OF_THREADS)
]
ImageSize = Annotated[
    str | None, in_group("Network", metavar="N|HxW", help="input size in pixels: one side, or height x width")
]
Words = Annotated[list[str] | None, Parameter(consume_multiple=1)]
Settings = Annotated[list[str] | None, in_group("Training", name="--set", metavar="KEY=VALUE")]
Recipe = Annotated[
    str | None, in_group("Training", metavar="NAME|FILE", help="recipe name (see `weft recipes`) or YAML file")
]
Out = Annotated[str | None, in_group("Output", alias="-o", metavar="DIR")]
Tta = Annotated[
    bool, Parameter(help="test-time augmentation: average with the mirror image; not if left and right matter")
]
Percent = Annotated[
    float | None,
    Parameter(
        converter=parsed(percentage),
        metavar="PERCENT",
        help="reject predictions below the confidence at which this percentage of the held-out images was wrong",
    ),
]

Duration = Annotated[float | None, Parameter(converter=parsed(seconds_of), metavar="TIME")]
Latency = Annotated[
    float | None, Parameter(converter=parsed(functools.partial(seconds_of, needs_unit=True)), metavar="TIME")
]
Size = Annotated[float | None, Parameter(converter=parsed(bytes_of), metavar="SIZE")]


@flat
class Shown:
    """How a result is shown."""

    json: Annotated[bool, in_group("Output")] = False
    """print the result as JSON"""

    quiet: Annotated[bool, in_group("Output", alias="-q")] = False
    """print no progress and no notes"""


@flat
class Output(Shown):
    """How a result is shown and written, of a verb with models."""

    force: Annotated[bool, in_group("Output")] = False
    """overwrite existing output"""


@flat
class Plugins:
    """Third-party networks."""

    plugin: Annotated[list[str] | None, in_group("Network", metavar="FILE")] = None
    """Python file with a family of networks of your own (docs/your-own-network.md); it is run; may be repeated"""


@flat
class Machine(Plugins):
    """Threads of this process."""

    threads: Threads = None


@flat
class Images:
    """Images, and the model that is applied to them."""

    img_size: str | None = None
    device: str | None = None
    limit: str | None = None
    max_pixels: str | None = None


@flat
class Inference(Images):
    """The same, in batches."""

    batch_size: str | None = None
    precision: str | None = None


@flat
class Dataset:
    """Reading of labelled images."""

    workers: str | None = None
    follow_links: bool | None = None


@flat
class Sweep(Inference, Dataset):
    """Training runs of a comparison or a study: where they run, and their settings."""

    engine: Annotated[Literal["local", "ray"], in_group("Machine", metavar="local|ray")] = "local"
    """where training runs (default: local)"""

    jobs: Annotated[Positive, in_group("Machine")] = 1
    """concurrent training runs (default: 1)"""

    threads: Annotated[
        Threads, Parameter(help="CPU threads per training run (default: the cores shared among --jobs)")
    ] = None

    epochs: str | None = None


def pairs(texts: Iterable[str] | None) -> dict[str, str]:
    """Return keys and values of `--set KEY=VALUE`."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE; got '{text}'. For example: --set optim.lr=3e-4.")
        found[key] = value
    return found


def run_settings(texts: Iterable[str] | None, record: object) -> dict[str, Any]:
    """Return `--set` and the given options of settings as recipe settings, by dotted key."""
    return pairs(texts) | {options()[name].key: value for name, value in given(record).items() if name in options()}


def one_format(*, json: bool, csv: bool) -> None:
    """Refuse two output formats at the same time."""
    if json and csv:
        raise UsageError("--json and --csv exclude each other; pass one of them.")


def note(text: str) -> None:
    """Print one line to stderr."""
    print(one_line(text), file=sys.stderr)


def note_unreadable(messages: Sequence[object], among: int | None = None) -> int:
    """Print to stderr why images could not be read, and return the exit code."""
    from weft.progress import say

    for message in messages:
        note(f"weft: {message}")
    if messages:
        number = len(messages) if among is None else f"{len(messages)} of {among}"
        say(f"weft: {number} images could not be read.")
    return DataError.exit_code if messages else 0


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
