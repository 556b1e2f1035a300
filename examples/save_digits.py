"""Writes some held-out digits as PNG files, `DIRECTORY/<digit>/<number>.png`: pictures for `weft predict` to name.

python examples/save_digits.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from weft.data import open_data

PER_DIGIT = 1


def main(directory: Path) -> None:
    held_out = open_data("digits").val
    written = dict.fromkeys(held_out.classes, 0)
    for place in range(len(held_out)):
        sample = held_out.read(place)
        name = held_out.classes[sample.label]
        if written[name] < PER_DIGIT:
            written[name] += 1
            path = directory / name / f"{Path(sample.key).name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sample.data)


main(Path(sys.argv[1]))
