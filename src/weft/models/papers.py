"""The papers' own tables, row by row: what they print, next to parameters and multiply-adds counted by weft.

Each paper's folder has its tables: `imagenet.csv` with accuracy on ImageNet, `transfer.csv` with fine-tuning on other
datasets; `baselines/` has those of DeiT, which all three papers compare with. `note` says where the papers contradict
each other or themselves. Data only, no torch; a test builds every network and counts again.
"""

from __future__ import annotations

import csv
import fnmatch
from pathlib import Path
from typing import NamedTuple

from weft.errors import unknown
from weft.models.families import FOLDERS


class Printed(NamedTuple):
    """A row of a paper. Accuracies in percent; None where the paper has nothing.

    Attributes:
        paper, table: where it is printed.
        model: as the paper calls it.
        builds: what the library calls it that has it (weft, timm or transformers); '' where none does.
        size: image side in pixels.
        params_m, macs_g: in print, millions and 10^9.
        params, macs: counted here.
        top1, top5, real, v2: on ImageNet's validation set, with ReaL labels, and on ImageNet-V2.
        images_per_second: in print, by machine.
        elsewhere: top-1 after fine-tuning, by dataset.
        weights: public weights of this row: `own` for those of the variant `builds`, or OWNER/NAME on the hub, with
            settings of the evaluation that differ from the model's, such as `crop_pct=0.875`; '' for none.
        recipe: recipe of weft that trains it, with settings that differ from the recipe's; '' for none.
        obstacle: why it cannot be trained; '' if `recipe` or `note` says it.
        note: what does not agree.
    """

    paper: str
    table: str
    model: str
    builds: str
    size: int
    params_m: float | None
    macs_g: float | None
    params: int | None
    macs: int | None
    top1: float | None
    top5: float | None
    real: float | None
    v2: float | None
    images_per_second: dict[str, float]
    elsewhere: dict[str, float]
    weights: str
    recipe: str
    obstacle: str
    note: str


class Baseline(NamedTuple):
    """A network of timm whose public weights weft loads, by its explicit tag, and its accuracy in the papers.

    timm resolves a name without a tag to the tag that it prefers, which may be weights other than those of the papers.

    Attributes:
        name: timm's, with the tag of the weights.
        role: what weft loads it for.
        size: image side in pixels that the tag is built for.
        params: number of parameters.
        paper_top1, paper_source: top-1 in percent on ImageNet-1k that the papers report, and where.
        tag_top1, tag_source: top-1 that is reported for these weights, and where.
    """

    name: str
    role: str
    size: int
    params: int
    paper_top1: float
    paper_source: str
    tag_top1: float
    tag_source: str


def baselines() -> list[Baseline]:
    """Teachers and baselines of timm, in the order of baselines/timm.csv."""
    return [
        Baseline(
            cells["name"],
            cells["role"],
            int(cells["size"]),
            int(cells["params"]),
            float(cells["paper_top1"]),
            cells["paper_source"],
            float(cells["tag_top1"]),
            cells["tag_source"],
        )
        for cells in _read("baselines/timm.csv")
    ]


TABLES = ("imagenet", "transfer")
MACHINES = {"v100": "V100", "xeon": "Xeon 6138, one thread", "graviton2": "Graviton2, one thread"}
DATA_SETS = {
    "imagenet": "ImageNet",
    "inat18": "iNat18",
    "inat19": "iNat19",
    "cars": "Cars",
    "flowers": "Flowers",
    "pets": "Pets",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}


def printed_rows(table: str = "imagenet", pattern: str = "*") -> list[Printed]:
    """The rows in the order of print.

    Args:
        table: one of TABLES.
        pattern: of the paper, the model or what it is built as, such as `LeViT` or `ceit*`; case does not matter.
    """
    rows = [_row(cells) for folder in FOLDERS for cells in _read(f"{folder}/{table}.csv")]
    wanted = pattern.lower()
    return [
        row
        for row in rows
        if any(fnmatch.fnmatchcase(text.lower(), wanted) for text in (row.paper, row.model, row.builds))
    ]


def _read(name: str) -> list[dict[str, str]]:
    """Return the rows of a table; none if this paper has no such table."""
    path = Path(__file__).parent / name
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _row(cells: dict[str, str]) -> Printed:
    def number(key: str) -> float | None:
        return float(cells[key]) if cells.get(key) else None

    return Printed(
        paper=cells["paper"],
        table=cells["table"],
        model=cells["model"],
        builds=cells["builds"],
        size=int(cells["size"]),
        params_m=number("params_m"),
        macs_g=number("macs_g"),
        params=int(cells["params"]) if cells.get("params") else None,
        macs=int(cells["macs"]) if cells.get("macs") else None,
        top1=number("top1"),
        top5=number("top5"),
        real=number("real"),
        v2=number("v2"),
        images_per_second={name: value for key, name in MACHINES.items() if (value := number(key)) is not None},
        elsewhere={name: value for key, name in DATA_SETS.items() if (value := number(key)) is not None},
        weights=cells["weights"],
        recipe=cells["recipe"],
        obstacle=cells["obstacle"],
        note=cells["note"],
    )


def papers() -> dict[str, str]:
    """Return the papers with tables: name for the command line -> name in the tables."""
    return {row.paper.lower(): row.paper for table in TABLES for row in printed_rows(table)}


def rows_of(paper: str, name: str | None = None) -> list[tuple[str, Printed]]:
    """Return the rows of a paper with their tables (of TABLES); with a name, only those of this model.

    Raises:
        UsageError: an unknown paper, or a name that its tables do not have.
    """
    if paper.lower() not in papers():
        raise unknown("paper", paper, papers(), ", ".join(papers()))
    rows = [
        (table, row) for table in TABLES for row in printed_rows(table, paper) if row.paper.lower() == paper.lower()
    ]
    if name is None:
        return rows
    named = [(table, row) for table, row in rows if row.model.lower() == name.lower()]
    if not named:
        raise unknown(
            f"row of {papers()[paper.lower()]}", name, [row.model for _, row in rows], f"weft reproduce {paper.lower()}"
        )
    return named
