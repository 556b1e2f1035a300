"""Compare JPEG decoders on the same files, alternating, on one thread.

    python benchmarks/data/decode.py PHOTOS --csv benchmarks/data/decode.csv

PHOTOS is a folder of JPEGs. Each is decoded from memory to an array in RGB at its size; 16 of them are also enlarged to
3000 pixels, the size of a phone photo. `max_difference` is the largest difference from Pillow's pixels. `weft` is
weft's reader for training, with its checks, orientation and color profile. `sample` is a complete training sample: the
reader, RandomResizedCrop to 224, horizontal flip and normalising. `draft` decodes large images at a smaller size.
Decoders that are not installed (opencv-python-headless, torchcodec) are skipped. The memory that is freed stays in the
process, as under the command `weft`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv

from weft.data import train_transform
from weft.data.crops import batch_of, normalized
from weft.data.decode import open_picture
from weft.machine.memory import keep_memory
from weft.machine.processor import processor_class

LONG_SIDE = 3000  # pixels, of a phone photo
MEAN = STD = (0.5, 0.5, 0.5)


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def pillow_draft(data: bytes) -> np.ndarray:
    """Decode at the smallest scale of 1, 1/2, 1/4 and 1/8 with at least 448 pixels, twice the training size."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (448, 448))
    return np.asarray(image.convert("RGB"))


def torchvision(data: bytes) -> Any:
    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


def libraries_here() -> dict[str, Callable[[bytes], Any]]:
    """Return the installed libraries that decode a JPEG to all of its pixels, by name."""
    libraries: dict[str, Callable[[bytes], Any]] = {"pillow": pillow, "torchvision": torchvision}
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        libraries["simplejpeg"] = lambda data: simplejpeg.decode_jpeg(data, "RGB")
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
        libraries["opencv"] = lambda data: cv2.cvtColor(
            cv2.imdecode(np.frombuffer(data, np.uint8), 1), cv2.COLOR_BGR2RGB
        )
    if importlib.util.find_spec("torchcodec"):
        decoder = importlib.import_module("torchcodec.decoders").decode_jpeg
        libraries["torchcodec"] = lambda data: decoder(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return libraries


def ways_of(libraries: dict[str, Callable[[bytes], Any]]) -> dict[str, Callable[[bytes], Any]]:
    """Return all ways to decode that are timed, by name."""
    transform = train_transform(224, MEAN, STD)

    def sample(data: bytes, at_least: int | None = None) -> torch.Tensor:
        crop = transform.draw(open_picture(data, at_least=at_least))
        return normalized(batch_of([crop], [0]), MEAN, STD)

    return {
        **libraries,
        "pillow draft": pillow_draft,
        "weft": lambda data: open_picture(data).whole(),
        "weft sample": sample,
        "weft sample, draft": lambda data: sample(data, 448),
    }


def largest_difference(decode: Callable[[bytes], Any], images: list[bytes]) -> int:
    """Return the largest difference from Pillow's pixels, of 255 levels."""

    def difference(data: bytes) -> int:
        pixels, expected = np.asarray(decode(data)), pillow(data)
        pixels = pixels if pixels.shape == expected.shape else pixels.transpose(1, 2, 0)
        return int(np.abs(pixels.astype(int) - expected).max())

    return max(map(difference, images))


def enlarged(data: bytes) -> bytes:
    """Return an image as JPEG with a longer side of LONG_SIDE pixels."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = LONG_SIDE / max(image.size)
    file = io.BytesIO()
    image.resize((round(image.width * scale), round(image.height * scale))).save(file, "JPEG", quality=90)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    files = [path.read_bytes() for path in sorted(args.photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    sets = {"as they are": files, f"enlarged to {LONG_SIDE}": [enlarged(data) for data in files[:16]]}
    libraries = libraries_here()
    ways = ways_of(libraries)
    rows = []
    for name, images in sets.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, decode in ways.items():
                begun = time.perf_counter()
                for data in images:
                    decode(data)
                times[way].append((time.perf_counter() - begun) / len(images))
        base = statistics.median(times["pillow"])
        for way, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(
                {
                    "pictures": name,
                    "count": len(images),
                    "decoder": way,
                    "ms": round(1000 * median, 2),
                    "speed_to_pillow": round(base / median, 2),
                    "max_difference": largest_difference(ways[way], images) if way in libraries else "",
                    "rounds": args.rounds,
                    "processor_class": processor_class(),
                    **{package: version(package) for package in ("pillow", "torchvision")},
                }
            )
            print("  ".join(f"{key} {rows[-1][key]}" for key in list(rows[-1])[:5]), flush=True)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
