import pytest

from weft.errors import UsageError
from weft.grid import Grid


@pytest.mark.parametrize(("given", "grid"), [(224, Grid(224, 224)), ((192, 256), Grid(192, 256)), ([8, 9], Grid(8, 9))])
def test_of(given, grid):
    assert Grid.of(given) == grid


@pytest.mark.parametrize("given", [0, -1, (1, 0), (1, 2, 3), (1.5, 2), (), (True, 2)])
def test_of_refuses(given):
    with pytest.raises(UsageError, match="img_size must be a positive int or"):
        Grid.of(given)


@pytest.mark.parametrize(
    ("size", "window", "after"),
    [
        (224, (7, 2, 3), 112),
        (112, (3, 2, 1), 56),
        (56, (4, 4, 0), 14),
        (225, (3, 2, 1), 113),
        (3, (4, 4, 0), 0),
        (2, (7, 2, 2), 0),
    ],
)
def test_conv_counts_windows(size, window, after):
    assert Grid(size, size).conv(*window) == Grid(after, after)


@pytest.mark.parametrize(("size", "after"), [(14, 7), (7, 4), (4, 2), (1, 1)])
def test_strided_keeps_the_first(size, after):
    assert Grid(size, 2 * size).strided(2) == Grid(after, (2 * size - 1) // 2 + 1)
    assert len(range(0, size, 2)) == after


def test_reads_as_height_by_width():
    assert str(Grid(192, 256)) == "192x256"
    assert Grid(3, 5).tokens == 15
