"""Damages pictures and reads them: `python -W error -m tests.data.fuzz COUNT [FIRST]`.

Runs in a process of its own, whose memory is limited, and prints one line of JSON. A mutant is a function of its
number: `mutant(i)` brings back one that went wrong.
"""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import struct
import sys
import zlib
from functools import cache

from tests.data.pictures import variants
from tests.data.zoo import GOOD
from weft.data.bit_depth import ValueRange, common_range
from weft.data.decode import BadImage, ImageInfo, image_info, open_image

MAX_PIXELS = 25_000_000
MEMORY = 300 << 20
NUM_SEEDS = 10 if os.environ.get("WEFT_NIGHTLY") else 4
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@cache
def seeds() -> list[bytes]:
    """Good files of all formats, modes and ways of packing."""
    files = [animal.content for animal in GOOD if isinstance(animal.content, bytes) and len(animal.content) < 20_000]
    return files + [data for seed in range(NUM_SEEDS) for data in variants(seed)]


def mutant(index: int) -> bytes:
    """One of the seeds with one to eight faults."""
    rng = random.Random(f"weft/{index}")
    data = bytearray(rng.choice(seeds()))
    is_png = data.startswith(b"\x89PNG")
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if data:
            _add_fault(data, rng)
    return _with_checksums(bytes(data)) if is_png and rng.random() < 0.7 else bytes(data)


def _add_fault(data: bytearray, rng: random.Random) -> None:
    """Headers are where it hurts: half of all faults go into the first 200 bytes."""
    at = rng.randrange(min(len(data), 200) if rng.random() < 0.5 else len(data))
    match rng.choice(("flip", "byte", "number", "cut", "repeat", "end", "splice")):
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "byte":
            data[at] = rng.randrange(256)
        case "number":
            width, order = rng.choice((2, 4)), rng.choice("<>")
            value = rng.choice(EXTREMES) & (1 << 8 * width) - 1
            data[at : at + width] = struct.pack(order + ("H" if width == 2 else "I"), value)
        case "cut":
            del data[at : at + rng.randrange(1, 64)]
        case "repeat":
            data[at:at] = data[at : at + rng.randrange(1, 200)] * rng.choice((1, 2, 50))
        case "end":
            del data[rng.randrange(len(data)) :]
        case "splice":
            other = rng.choice(seeds())
            data[at:] = other[min(at, len(other)) :]


def _with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks have right checksums again, as far as its lengths make sense: else all faults end there."""
    fixed, at = data[:8], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : at + 8 + length]
        if len(body) < length + 4 or at + 12 + length > len(data):
            break
        fixed += data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return fixed + data[at:]


def read(data: bytes) -> str:
    """What both readers say: `good`, or the reason; anything else is a finding."""
    answers, seen, problem, info = [], None, None, None
    for reader in (image_info, open_image):
        try:
            if reader is image_info:
                info = reader(data, max_pixels=MAX_PIXELS)
            else:
                seen = reader(data, max_pixels=MAX_PIXELS, value_range=range_of(info))
            answers.append("good")
        except BadImage as err:
            problem, answers = err, [*answers, err.reason]
    assert answers[0] == answers[1], answers
    assert problem is None or str(problem).isprintable()
    assert problem is not None or (seen.mode == "RGB" and seen.width * seen.height <= MAX_PIXELS)
    return answers[0]


def range_of(info: ImageInfo | None) -> ValueRange | None:
    """The value range of a dataset of this image alone."""
    return None if info is None or info.values is None else common_range([info.values])


def main(count: int, first: int = 0) -> None:
    """Reads `count` mutants; faults of ours and of the budget go into `findings`."""
    for data in seeds():
        assert read(data) == "good"
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    verdicts, findings = collections.Counter(), []
    for index in range(first, first + count):
        data = mutant(index)
        print(index, file=sys.stderr, flush=True)  # the last one printed is the one that took the process down
        try:
            verdicts[read(data)] += 1
        except Exception as err:
            findings.append(f"mutant({index}): {type(err).__name__}: {err}")
    print(json.dumps({"verdicts": verdicts, "findings": findings}))


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
