"""Grid: integer height and width of images and maps, and the sizes after convolutions and strides."""

from __future__ import annotations

from typing import NamedTuple

from weft.errors import UsageError


class Grid(NamedTuple):
    """Height and width of a map of pixels or tokens."""

    height: int
    width: int

    @classmethod
    def of(cls, size: int | tuple[int, int] | list[int], what: str = "img_size") -> Grid:
        """Reads an int (square) or (height, width), both at least 1.

        Raises:
            UsageError: anything else.
        """
        pair = (size, size) if isinstance(size, int) else size
        if len(pair) != 2 or not all(
            isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair
        ):
            raise UsageError(f"{what} must be a positive int or (height, width) of them; got {size!r}.")
        return cls(*pair)

    @property
    def tokens(self) -> int:
        """Number of positions."""
        return self.height * self.width

    def conv(self, kernel_size: int, stride: int, padding: int) -> Grid:
        """The grid behind a convolution or pooling window, 0 where the window no longer fits."""
        return Grid(*(max(0, (side + 2 * padding - kernel_size) // stride + 1) for side in self))

    def strided(self, stride: int) -> Grid:
        """The grid that is left when every `stride`-th row and column is taken, the first included."""
        return Grid(*((side - 1) // stride + 1 for side in self))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"
