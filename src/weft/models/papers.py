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
        elsewhere: top-1 after fine-tuning, by data set.
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
    note: str


class Baseline(NamedTuple):
    """A network of timm whose public weights weft loads, by its explicit tag, and its accuracy in the papers.

    timm resolves a name without a tag to the tag that it prefers, which may be another training than the papers'.

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
        note=cells["note"],
    )
