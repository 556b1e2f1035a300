"""Ends of JPEG files: a missing end marker is accepted if no pixel is missing, and lost pixels never are."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import encoded, photo
from tests.data.test_decode import outcome
from weft.data.decode import image_info

IMAGES = {
    "noise": Image.fromarray(np.random.default_rng(0).integers(90, 160, (60, 81, 3), dtype=np.uint8)),
    "smooth": Image.fromarray(photo(60, 81)),
    "flat": Image.new("RGB", (161, 120), (40, 160, 60)),
}
OPTIONS = {
    "sequential": {},
    "progressive": {"progressive": True},
    "fine": {"quality": 97, "subsampling": 0},
    "coarse": {"quality": 20, "optimize": True},
    "restarts": {"restart_marker_blocks": 3},
}


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", IMAGES)
def test_an_end_marker_may_be_missing_but_no_pixel(name, options, mode):
    data = encoded(IMAGES[name].convert(mode), "JPEG", **OPTIONS[options])
    pixels, _ = outcome(data)
    film = b"\0\0\0\x18ftypmp42" + np.random.default_rng(1).bytes(5000)
    for end in (b"", b"\0" * 3, b"\0" * 5000, b"\xff" * 50, b"dhav\x59\x19\x01\x00", film, data):
        assert outcome(data + end) == (pixels, False)
    for without in (data[:-2], data[:-1], data[:-2] + b"\0" * 5000, data[:-2] + b"\xff" * 50):
        is_flat = data[:-2].endswith(b"\0" * 4)  # its last pixels look as if a disk had lost them
        assert outcome(without) == (pixels, True) or (is_flat and outcome(without) == "truncated")
    header = data.rindex(b"\xff\xda") + 14
    for lost in (3, 4, 5, 7, 10, 20, 40, 100, (len(data) - header) // 3, (len(data) - header) // 2):
        if len(data) - lost > header + 4:
            for fill in (b"", b"\0" * max(lost, 4), b"\xff" * lost):
                found = outcome(data[:-lost] + fill)
                # the last byte may be padding; such an image is whole
                assert found in ("truncated", "damaged") or (lost == 3 and found == (pixels, True)), (lost, fill[:1])


@pytest.mark.parametrize("number", range(1, 10))
def test_a_progressive_image_without_its_last_scans_is_truncated(number):
    """At a border between scans no bit is torn; the image is only coarser."""
    data = encoded(IMAGES["noise"], "JPEG", progressive=True)
    place = len(data)
    for _ in range(number):
        place = data.rindex(b"\xff\xda", 0, place)
    for end in (place, data.rindex(b"\xff\xc4", 0, place)):
        assert outcome(data[:end]) == "truncated"


def test_a_second_image_may_be_missing_its_end():
    """As a phone writes it: the first image counts."""
    images = list(IMAGES.values())
    data = encoded(images[0], "MPO", save_all=True, append_images=images[1:])
    assert image_info(data).format == "JPEG"
    whole = outcome(data)
    assert [outcome(data[:-lost]) for lost in (1, 2, 50)] == [whole] * 3
    assert whole[1] is False
