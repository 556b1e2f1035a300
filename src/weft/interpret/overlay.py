"""Images under attention maps and Grad-CAM maps."""

from __future__ import annotations

import numpy as np
from PIL import Image

OPACITY = 0.6  # of the map


def overlaid(image: np.ndarray, fmap: np.ndarray) -> np.ndarray:
    """Return an image under a map, from its lowest value (dark) to its highest (bright).

    Args:
        image: (height width 3), uint8.
        fmap: (h w), of any size.
    """
    from matplotlib import colormaps

    spread = float(np.ptp(fmap)) or 1.0
    colors = (255 * colormaps["inferno"]((fmap - fmap.min()) / spread)[..., :3]).astype(np.uint8)
    height, width = image.shape[:2]
    over = np.asarray(Image.fromarray(colors).resize((width, height), Image.Resampling.BILINEAR))
    return ((1 - OPACITY) * image + OPACITY * over).round().astype(np.uint8)
