"""Parameters and multiply-adds are those of the tables and of the released code, counted without weights."""

import pytest
import torch

import weft
from weft.bench.cost import cost
from weft.models.families import VARIANTS, family_named, family_of
from weft.models.papers import row_of


@pytest.mark.parametrize("name", VARIANTS)
def test_the_tables_tell_what_is_counted(name):
    row = row_of(name)
    assert row is not None
    with torch.device("meta"):
        model = weft.create_model(name)
    assert cost(model, row.size) == (row.params, row.macs)
    assert model.default_cfg["input_size"] == (3, row.size, row.size)
    assert family_of(model) is family_named(name)


def test_nano_models_are_small():
    nano = {row.builds: row.params for name in VARIANTS if name.endswith("nano_32") and (row := row_of(name))}
    assert len(nano) == 3
    assert max(nano.values()) < 1_200_000


@pytest.mark.parametrize(
    ("name", "switches", "img_size", "params", "mmacs"),
    [  # derived from the released code by counting; multiply-adds in millions
        ("ceit_tiny_patch16_224", {}, 224, 6_356_904, 1395.3),
        ("ceit_tiny_patch16_224", {"stem_chans": 32}, 224, 6_253_832, None),
        ("ceit_small_patch16_224", {}, 224, 24_204_840, 4759.5),
        ("ceit_small_patch16_224", {"stem_chans": 32}, 224, 24_003_464, None),
        ("ceit_base_patch16_224", {}, 224, 94_405_416, 17748.9),
        ("ceit_base_patch16_224", {"stem_chans": 32}, 224, 94_007_432, None),
        ("ceit_tiny_patch16_384", {}, 384, 6_429_864, 5102.8),
        ("ceit_small_patch16_384", {}, 384, 24_350_760, 15980.2),
        ("cvt_13", {}, 224, 19_997_480, 4566.1),
        ("cvt_21", {}, 224, 31_622_696, 7178.0),
        ("cvt_w24", {"img_size": 224}, 224, 277_196_392, 60917.3),
        ("cvt_13", {}, 384, 19_997_480, 16269.4),
        ("cvt_21", {}, 384, 31_622_696, 24849.1),
        ("cvt_w24", {}, 384, 277_196_392, 194221.7),
        ("cvt_13", {"kv_stride": 1}, 224, 19_997_480, 6643.1),
        ("cvt_13", {"embed_kernel": (4, 2, 2), "embed_padding": (0, 0, 0)}, 224, 19_561_064, 4425.8),
        ("cvt_13", {"pos_embed": True}, 224, 19_997_480 + 200_704 + 150_528 + 75_264, None),
        ("levit_128s", {"distilled": False}, 224, 7_391_290, None),
        ("levit_128", {"distilled": False}, 224, 8_828_168, None),
        ("levit_192", {"distilled": False}, 224, 10_561_301, None),
        ("levit_256", {"distilled": False}, 224, 18_379_852, None),
        ("levit_384", {"distilled": False}, 224, 38_358_300, None),
        ("levit_384", {"down_num_heads": (12, 18), "distilled": True}, 224, 39_522_918, None),
    ],
)
def test_counts_of_the_released_code(name, switches, img_size, params, mmacs):
    counted = row_of(name)  # which the test above counts
    if switches or img_size != counted.size:
        with torch.device("meta"):
            counted = cost(weft.create_model(name, **switches), img_size)
    assert counted.params == params
    if mmacs is not None:
        assert round(counted.macs / 1e6, 1) == mmacs
