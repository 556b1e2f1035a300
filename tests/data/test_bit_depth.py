"""Peak of the values of an image of more than 8 bits."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from weft.data.bit_depth import PEAK, PEAK_PIXELS, values_of


@pytest.mark.parametrize("count", [1, 1_000, PEAK_PIXELS, 2 * PEAK_PIXELS + 1])
def test_the_peak_is_a_quantile_of_all_values(count: int) -> None:
    """Also of a large image, of which a part is looked at."""
    values = np.linspace(0, 60_000, count).round().astype(np.uint16)[None]
    found = values_of(Image.new("I;16", (count, 1)), values)
    assert found is not None
    assert (found.low, found.high) == (values[0, 0], values[0, -1])
    assert found.peak == pytest.approx(np.quantile(values, PEAK), abs=60_000 / min(count, PEAK_PIXELS) + 1)
