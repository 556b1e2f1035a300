"""The papers' tables: every network is counted again, and every contradiction has its note.

Weft's own networks are counted in tests/bench/test_cost.py; the commands are in tests/cli/test_papers.py.
"""

import json

import pytest
import timm
import torch
import transformers
from benchmarks.common.peers import Logits

from weft.bench.cost import cost
from weft.cli import main
from weft.models.building import create_model
from weft.models.families import VARIANTS
from weft.models.papers import TABLES, printed_rows

PVT_DEPTHS = {  # the rest is transformers' default
    "pvt_tiny": [2, 2, 2, 2],
    "pvt_small": [3, 4, 6, 3],
    "pvt_medium": [3, 4, 18, 3],
    "pvt_large": [3, 8, 27, 3],
}
ROWS = [row for table in TABLES for row in printed_rows(table)]
NETWORKS = sorted(
    {(row.builds, row.size) for row in ROWS if row.builds}
    - {(name, variant.size) for name, variant in VARIANTS.items()}
)


def network_of(builds):
    """Build the network of a row, from the library that has it."""
    if builds in PVT_DEPTHS:
        config = transformers.PvtConfig(depths=PVT_DEPTHS[builds], num_labels=1000)
        return Logits(transformers.PvtForImageClassification(config))
    if builds == "vit_huge_patch16_384":  # timm has it with smaller patches
        return timm.create_model("vit_huge_patch14_224", patch_size=16, img_size=384)
    return create_model(builds)


@pytest.mark.slow_except("deit_small_patch16_224-224")
@pytest.mark.parametrize(("builds", "size"), NETWORKS)
def test_every_network_is_counted_again(builds, size):
    with torch.device("meta"):
        counted = cost(network_of(builds), size)
    for row in ROWS:
        if (row.builds, row.size) == (builds, size):
            assert (row.params, row.macs) == counted


def test_rows_that_nobody_has_say_why():
    missing = [row for row in printed_rows() if not row.builds]
    models = {row.model for row in missing if not row.model.startswith("T2T-ViT")}
    assert models == {"CvT-13-NAS", "BoT-S1-50", "VT-R34", "VT-R50", "VT-R101"}
    assert all(row.note and row.params is None for row in missing)


def test_contradictions_have_notes():
    """Of the same network, trained alike as far as the tables say; multiply-adds count from 3.5 %."""
    rows, found = printed_rows(), 0
    for row in rows:
        for other in rows:
            is_same = row.builds and (row.builds, row.size) == (other.builds, other.size)
            trained = [("1000" in name, "22k" in name) for name in (row.model, other.model)]
            if row.paper == other.paper or not is_same or trained[0] != trained[1]:
                continue
            pairs = [(row.top1, other.top1), (row.real, other.real), (row.v2, other.v2)]
            differs = any(None not in pair and pair[0] != pair[1] for pair in pairs)
            if row.macs_g and other.macs_g:
                differs |= abs(row.macs_g / other.macs_g - 1) > 0.035
            if differs:
                found += 1
                assert row.note, (row.paper, row.model, other.paper)
    assert found > 20


def test_counts_are_near_the_printed_ones_or_have_a_note():
    for row in printed_rows():
        if row.params_m and row.params:
            assert abs(row.params / 1e6 / row.params_m - 1) < 0.03 or row.note, row
        if row.macs_g and row.macs:
            assert abs(row.macs / 1e9 / row.macs_g - 1) < 0.05 or row.note or row.macs_g < 1, row


def test_a_row_is_printed_with_its_counts_and_its_note(capsys):
    assert main(["models", "LeViT", "--papers"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "LeViT-128S" in line)
    assert row.split() == "LeViT LeViT-128S 224 7.8 7.78 0.305 0.305 76.6 92.9 83.1 64.3 12880 131.1 39.1".split()
    assert "LeViT-192: two re-evaluations" in out
    assert main(["models", "cvt-13*", "--papers", "--json"]) == 0
    found = [row for row in json.loads(capsys.readouterr().out) if row["elsewhere"]]
    assert [row["elsewhere"]["CIFAR-10"] for row in found] == [98.83]
    assert main(["models", "levitt", "--papers"]) == 2
    assert "Unknown paper or model 'levitt'. Nearest: CeiT, DeiT, LeViT." in capsys.readouterr().err
