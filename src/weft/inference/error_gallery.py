"""Error gallery: the most confident errors with their attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.data import Source, open_image
from weft.data.source import pixel_limit
from weft.errors import DataError
from weft.inference.predictor import Predictor
from weft.inference.scores import Mistake
from weft.interpret.overlay import overlaid
from weft.report.markup import Card

MAX_ERRORS = 12


def explained_errors(predictor: Predictor, source: Source, mistakes: Sequence[Mistake]) -> list[Card]:
    """Return the most confident errors: the image as the network saw it, and the same under its attention map if any.

    Args:
        predictor: the model that made the errors.
        source: the images; `Mistake.place` is an index in it.
        mistakes: errors, most confident first.
    """
    transform: Any = predictor.preprocessing
    cards = []
    for mistake in mistakes[:MAX_ERRORS]:
        try:
            data, limit = source.read(mistake.place).data, pixel_limit(source)
            image = transform(open_image(data, max_pixels=limit, value_range=transform.value_range))
        except DataError:  # no longer readable
            continue
        explanation = predictor.explain(image)
        images = {f"{mistake.key}, true class {mistake.true}": explanation.image}
        if explanation.saliency is not None:
            overlay = overlaid(explanation.image, explanation.saliency)
            images[f"attention map, predicted class {mistake.predicted}"] = overlay
        lines = [f"true class: {mistake.true}", f"predicted: {mistake.predicted}, {100 * mistake.probability:.0f} %"]
        cards.append(Card(images, lines, mistake.key))
    return cards
