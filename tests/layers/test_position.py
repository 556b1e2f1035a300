import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from weft.errors import CheckpointError
from weft.grid import Grid
from weft.layers.position import OffsetLookup, guess_grid, offset_index, resize_embedding, resize_offsets


def first_seen_index(side: int, stride: int) -> list[list[int]]:
    """The released numbering: offsets numbered in the order in which pairs of places show them."""
    queries = list(itertools.product(range((side - 1) // stride + 1), repeat=2))
    keys = list(itertools.product(range(side), repeat=2))
    numbers: dict[tuple[int, int], int] = {}
    return [
        [
            numbers.setdefault((abs(stride * y - v), abs(stride * x - u)), len(numbers))
            for v, u in keys
        ]
        for y, x in queries
    ]  # fmt: skip


@pytest.mark.parametrize(("side", "stride"), [(14, 1), (7, 1), (4, 1), (14, 2), (7, 2)])
def test_offset_index_numbers_as_released(side, stride):
    grid = Grid(side, side)
    assert offset_index(grid.strided(stride), grid, stride).tolist() == first_seen_index(side, stride)


def test_offset_index_on_a_wide_grid():
    index = offset_index(Grid(2, 3), Grid(3, 5), 2)
    assert index.shape == (6, 15)
    for (q, (y, x)), (k, (v, u)) in itertools.product(
        enumerate(itertools.product(range(2), range(3))), enumerate(itertools.product(range(3), range(5)))
    ):
        assert index[q, k] == abs(2 * y - v) * 5 + abs(2 * x - u)


@pytest.mark.parametrize("new", [Grid(14, 14), Grid(9, 5), Grid(14, 10), Grid(28, 56)])
def test_the_offsets_at_both_ends_are_kept_and_offset_zero_to_the_bit(new):
    table = torch.randn(3, 49)
    assert resize_offsets(table, Grid(7, 7), Grid(7, 7)) is table
    resized = resize_offsets(table, Grid(7, 7), new)
    assert resized.shape == (3, new.tokens)
    assert torch.equal(resized[:, 0], table[:, 0])
    torch.testing.assert_close(resized[:, -1], table[:, -1])
    assert torch.equal(resize_offsets(table, Grid(7, 7), Grid(1, 3))[:, 0], table[:, 0])


def test_resized_offsets_follow_a_smooth_table():
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 14), torch.linspace(0, 1, 14), indexing="ij")
    table = (rows + 2 * columns).reshape(1, -1)
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 20), torch.linspace(0, 1, 9), indexing="ij")
    resized = resize_offsets(table, Grid(14, 14), Grid(20, 9)).reshape(20, 9)
    torch.testing.assert_close(resized, rows + 2 * columns, atol=0.03, rtol=0)  # the cubic bends at the border


def test_an_embedding_is_resized_as_torch_resizes_a_map_and_keeps_prefix_tokens():
    embed = torch.randn(1, 1 + 16, 6)
    assert resize_embedding(embed, Grid(4, 4), Grid(4, 4)) is embed
    resized = resize_embedding(embed, Grid(4, 4), Grid(6, 5))
    assert torch.equal(resized[:, 0], embed[:, 0])
    fmap = embed[:, 1:].reshape(1, 4, 4, 6).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(fmap, size=(6, 5), mode="bicubic", align_corners=False)
    torch.testing.assert_close(resized[:, 1:], expected.flatten(2).transpose(1, 2))
    torch.testing.assert_close(resize_embedding(embed[:, 1:], Grid(4, 4), Grid(6, 5)), resized[:, 1:])


def test_guess_grid():
    assert guess_grid(196, "x") == Grid(14, 14)
    for count in (195, 0, -1):
        with pytest.raises(CheckpointError, match=rf"pos_embed must hold positions of a square grid.*got {count},"):
            guess_grid(count, "pos_embed")


def changed(table: nn.Parameter, change: str) -> nn.Parameter:
    match change:
        case "in place":
            with torch.no_grad():
                table.mul_(0.5)
        case "of the data":
            table.data.mul_(0.5)  # no version counter records it
        case "to NaN":
            table.data[0, 0] = torch.nan
        case "another table":
            return nn.Parameter(table.detach() + 1)
        case "another type":
            return nn.Parameter(table.detach().to(torch.bfloat16))
    return table


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("change", ["none", "in place", "of the data", "to NaN", "another table", "another type"])
def test_looked_up_biases_are_those_of_the_table(change, mode):
    grid, look_up = Grid(4, 3), OffsetLookup()
    offsets = offset_index(grid, grid, 1)
    table = nn.Parameter(torch.randn(2, grid.tokens))
    for _ in range(2):
        with torch.inference_mode():
            look_up(table, offsets)
    table = changed(table, change)
    with mode():
        biases = look_up(table, offsets)
        torch.testing.assert_close(biases, table[:, offsets], rtol=0, atol=0, equal_nan=True)
        assert biases.is_inference() == torch.is_inference_mode_enabled()
        other = offset_index(grid.strided(2), grid, 2)
        torch.testing.assert_close(look_up(table, other), table[:, other], rtol=0, atol=0, equal_nan=True)


def test_looked_up_biases_are_kept_only_for_inference():
    grid, look_up = Grid(4, 4), OffsetLookup()
    offsets, table = offset_index(grid, grid, 1), nn.Parameter(torch.randn(2, grid.tokens))

    def biases() -> Tensor:
        return look_up(table, offsets)

    with torch.inference_mode():
        assert biases() is biases()
    with torch.no_grad():
        kept = biases()
    assert biases() is not kept
    biases().sum().backward()
    assert table.grad is not None
    assert copy.deepcopy(look_up)._last is None
