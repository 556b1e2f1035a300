"""The papers' own tables, row by row: what they print, next to parameters and multiply-adds counted by weft.

Each paper's folder has its tables: `imagenet.csv` with accuracy on ImageNet, `transfer.csv` with fine-tuning on other
datasets; `baselines/` has those of DeiT, which all three papers compare with. `note` says where the papers contradict
each other or themselves. Rows without a paper count the networks of weft that no paper has. Data only, no torch; a test
builds every network and counts again.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
from dataclasses import dataclass, field
from pathlib import Path

from weft.models.families import FOLDERS, VARIANTS

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


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A row of a paper. Accuracies in percent; None where the paper has nothing.

    Attributes:
        paper, table: where it is printed.
        model: as the paper calls it.
        builds: what the library calls it that has it (weft, timm or transformers); '' where none does.
        size: image side in pixels.
        params_m, macs_g: in print, millions and 10^9.
        params, macs: counted here, all heads and the matrix multiplications of attention included.
        top1, top5, real, v2: on ImageNet's validation set, with ReaL labels, and on ImageNet-V2.
        images_per_second: in print, by machine.
        elsewhere: top-1 after fine-tuning, by dataset.
        weights: public weights of this row: `own` for those of the variant `builds`, or OWNER/NAME on the hub, with
            settings of the evaluation that differ from the model's, such as `crop_pct=0.875`; '' for none.
        recipe: recipe of weft that trains it, with settings that differ from the recipe's; '' for none.
        obstacle: why it cannot be trained; '' if `recipe` or `note` says it.
        note: what does not agree.
    """

    paper: str = ""
    table: str = ""
    model: str = ""
    builds: str = ""
    size: int
    params_m: float | None = None
    macs_g: float | None = None
    params: int | None = None
    macs: int | None = None
    top1: float | None = None
    top5: float | None = None
    real: float | None = None
    v2: float | None = None
    images_per_second: dict[str, float] = field(default_factory=dict)
    elsewhere: dict[str, float] = field(default_factory=dict)
    weights: str = ""
    recipe: str = ""
    obstacle: str = ""
    note: str = ""

    @property
    def preprocessing(self) -> dict[str, str | float]:
        """Settings of `weights`, as in `pretrained_cfg`."""
        values = (setting.partition("=") for setting in self.weights.split()[1:])
        return {key: value if key == "crop_mode" else float(value) for key, _, value in values}

    @property
    def source(self) -> str:
        """Where the row is printed, such as `LeViT paper, Table 3`; '' for no paper."""
        place = {"main": "paper, main table", "README": "released README"}.get(self.table, f"paper, Table {self.table}")
        training = ", ImageNet-22k first" if "(22k)" in self.model else "".join(self.model.partition(",")[1:])
        return f"{self.paper} {place}{training}" if self.paper else ""


def printed_rows(table: str = "imagenet", pattern: str = "*") -> list[Printed]:
    """Return the rows of the papers in the order of print.

    Args:
        table: one of TABLES.
        pattern: of the paper, the model or what it is built as, such as `LeViT` or `ceit*`; case does not matter.
    """
    wanted = pattern.lower()
    return [
        row
        for row in _rows(table)
        if row.paper and any(fnmatch.fnmatchcase(text.lower(), wanted) for text in (row.paper, row.model, row.builds))
    ]


def row_of(name: str) -> Printed | None:
    """Return the first row that has a model of weft at its own image size; None: a plugin's, which is not counted."""
    size = VARIANTS[name].size
    return next((row for row in _rows("imagenet") if (row.builds, row.size) == (name, size)), None)


@functools.cache
def _rows(table: str) -> list[Printed]:
    from pydantic import TypeAdapter  # an import that `weft models --help` need not wait for

    cells: list[dict[str, object]] = []
    for folder in FOLDERS:
        path = Path(__file__).parent / folder / f"{table}.csv"
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ():
            filled = {key: cell for key, cell in row.items() if cell}
            machines = {name: filled.pop(key) for key, name in MACHINES.items() if key in filled}
            elsewhere = {name: filled.pop(key) for key, name in DATA_SETS.items() if key in filled}
            cells.append({**filled, "images_per_second": machines, "elsewhere": elsewhere})
    return TypeAdapter(list[Printed]).validate_python(cells)
