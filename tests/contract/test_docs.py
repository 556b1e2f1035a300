"""What the pages about the papers tell to type is typed here."""

import re
from pathlib import Path

import pytest
import torch

import weft

DOCS = Path(__file__).parents[2] / "docs"
BASES = {"ceit": "ceit_tiny_patch16_224", "cvt": "cvt_13", "levit": "levit_128s"}
# A component of CeiT is tested alone: the other two are off.
OFF = {
    "I2T": dict(leff_kernel=0, lca=False),
    "LeFF": dict(stem_convs=(), lca=False),
    "LCA": dict(stem_convs=(), leff_kernel=0),
}
ALL_OFF = dict(stem_convs=(), leff_kernel=0, lca=False)


def rows():
    for page, base in BASES.items():
        component = ""
        for line in (DOCS / f"{page}.md").read_text().partition("## The ablations")[2].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            component = cells[0] or component
            values = next((cell.strip("`") for cell in cells if cell.startswith("`") and "=" in cell), None)
            if values:
                yield pytest.param(base, component, values, id=f"{page}: {values}")


def looks(model):
    return str(model), {key: tuple(value.shape) for key, value in model.state_dict().items()}


@pytest.mark.parametrize(("base", "component", "values"), list(rows()))
def test_ablations_of_the_tables_are_built(base, component, values):
    switches = OFF.get(component, {}) | eval(f"dict({values})")
    without = ALL_OFF if component in OFF else {}
    model = weft.create_model(base, **switches, device="meta").eval()
    assert model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    plain = weft.create_model(base, **without, device="meta").eval()
    assert (looks(model) == looks(plain)) == (switches == without)


def test_every_table_was_found():
    assert len(list(rows())) == 11 + 9 + 7


@pytest.mark.parametrize("page", BASES)
def test_code_blocks_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        with torch.device("meta"):
            exec(block, {"weft": weft})
