"""Which decoder for JPEG: the same files through each, in turns, on one thread.

    python benchmarks/data/decode.py PHOTOS --csv benchmarks/data/decode.csv

PHOTOS is a folder of JPEGs. Each is decoded from memory to an array in RGB, as it is, and once more enlarged to 3000
pixels as from a phone. `weft` is weft's whole reading (checks, orientation, profile), `sample` all that a sample for
training takes (then RandomResizedCrop to 224, mirroring, and the tensor), `draft` with large pictures decoded smaller.
Decoders that are not installed (simplejpeg, opencv-python-headless, torchcodec) are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from weft.bench.records import write_csv
from weft.data import open_image, train_transform

LONG_SIDE = 3000  # pixels, of a phone's picture
MEAN = STD = (0.5, 0.5, 0.5)


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def pillow_draft(data: bytes) -> np.ndarray:
    """Decoded at the smallest of 1, 1/2, 1/4, 1/8 that leaves 448 pixels, twice what training takes."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (448, 448))
    return np.asarray(image.convert("RGB"))


def torchvision(data: bytes) -> Any:
    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


def decoders() -> dict[str, Callable[[bytes], Any]]:
    found: dict[str, Callable[[bytes], Any]] = {"pillow": pillow, "torchvision": torchvision}
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        found["simplejpeg"] = lambda data: simplejpeg.decode_jpeg(data, "RGB")
    if importlib.util.find_spec("cv2"):
        import cv2

        cv2.setNumThreads(1)
        found["opencv"] = lambda data: cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), 1), cv2.COLOR_BGR2RGB)
    if importlib.util.find_spec("torchcodec"):
        decoder = importlib.import_module("torchcodec.decoders").decode_jpeg
        found["torchcodec"] = lambda data: decoder(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    transform = train_transform(224, MEAN, STD)
    return {
        **found,
        "pillow draft": pillow_draft,
        "weft": open_image,
        "weft sample": lambda data: transform(open_image(data)),
        "weft sample, draft": lambda data: transform(open_image(data, at_least=448)),
    }


def enlarged(data: bytes) -> bytes:
    """The picture with a longer side of LONG_SIDE pixels."""
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
    files = [path.read_bytes() for path in sorted(args.photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    sets = {"as they are": files, f"enlarged to {LONG_SIDE}": [enlarged(data) for data in files[:16]]}
    ways = decoders()
    rows = []
    for name, pictures in sets.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, decode in ways.items():
                begun = time.perf_counter()
                for data in pictures:
                    decode(data)
                times[way].append((time.perf_counter() - begun) / len(pictures))
        base = statistics.median(times["pillow"])
        for way, seconds in times.items():
            middle = statistics.median(seconds)
            rows.append(
                {
                    "pictures": name,
                    "count": len(pictures),
                    "decoder": way,
                    "ms": round(1000 * middle, 2),
                    "speed_to_pillow": round(base / middle, 2),
                    "rounds": args.rounds,
                    "machine": platform.machine(),
                    **{package: version(package) for package in ("pillow", "torchvision")},
                }
            )
            print("  ".join(f"{key} {rows[-1][key]}" for key in list(rows[-1])[:5]), flush=True)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
