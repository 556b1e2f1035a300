import pytest

from weft.errors import UsageError
from weft.grid import Grid


@pytest.mark.parametrize(("given", "grid"), [(224, Grid(224, 224)), ((192, 256), Grid(192, 256)), ([8, 9], Grid(8, 9))])
def test_a_grid_is_height_by_width(given, grid):
    assert Grid.of(given) == grid
    assert str(grid) == f"{grid.height}x{grid.width}"
    assert grid.tokens == grid.height * grid.width


@pytest.mark.parametrize("given", [0, -1, (1, 0), (1, 2, 3), (1.5, 2), (), (True, 2)])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(UsageError, match="img_size must be a positive int or"):
        Grid.of(given)


@pytest.mark.parametrize("window", [(7, 2, 3), (3, 2, 1), (4, 4, 0), (7, 2, 2), (3, 1, 0)])
def test_the_grid_of_a_convolution_is_the_number_of_its_windows(window):
    kernel, stride, padding = window
    for size in (2, 3, 56, 112, 224, 225):
        after = len(range(0, size + 2 * padding - kernel + 1, stride))
        assert Grid(size, size).conv(*window) == Grid(after, after)


@pytest.mark.parametrize("size", [14, 7, 4, 1])
def test_strides_keep_the_first(size):
    assert Grid(size, 2 * size).strided(2) == Grid(len(range(0, size, 2)), len(range(0, 2 * size, 2)))
