"""Error gallery: the most confident errors with their attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from weft.data import Source, open_image
from weft.data.source import pixel_limit
from weft.errors import DataError
from weft.inference.metrics import Mistake
from weft.inference.predictor import Predictor
from weft.interpret.overlay import overlaid
from weft.report import markup

MAX_ERRORS = 12


class ExplainedError(NamedTuple):
    """An error with its image (height width 3), uint8, and the same image under its attention map; None without one."""

    mistake: Mistake
    image: np.ndarray
    overlay: np.ndarray | None


def explained_errors(predictor: Predictor, source: Source, mistakes: Sequence[Mistake]) -> list[ExplainedError]:
    """Return the most confident errors with the image as the network saw it, and its attention map if there is one.

    Args:
        predictor: the model that made the errors.
        source: the images; `Mistake.place` is an index in it.
        mistakes: errors, most confident first.
    """
    transform: Any = predictor.preprocessing
    errors = []
    for mistake in mistakes[:MAX_ERRORS]:
        try:
            data, limit = source.read(mistake.place).data, pixel_limit(source)
            image = transform(open_image(data, max_pixels=limit, value_range=transform.value_range))
        except DataError:  # no longer readable
            continue
        explanation = predictor.explain(image)
        overlay = None if explanation.saliency is None else overlaid(explanation.image, explanation.saliency)
        errors.append(ExplainedError(mistake, explanation.image, overlay))
    return errors


def gallery_html(errors: Sequence[ExplainedError]) -> str:
    """Return a gallery of errors as HTML."""
    cards = []
    for error in errors:
        mistake = error.mistake
        images = [(*markup.encoded(error.image), f"{mistake.key}, true class {mistake.true}")]
        if error.overlay is not None:
            images.append((*markup.encoded(error.overlay), f"attention map, predicted class {mistake.predicted}"))
        lines = [
            f"true class: {mistake.true}",
            f"predicted: {mistake.predicted}, {100 * mistake.probability:.0f} %",
        ]
        cards.append(markup.Card(images, lines, mistake.key, is_small=min(error.image.shape[:2]) <= markup.SMALL))
    return markup.gallery(cards)
