"""Processes that decode: what they may use, import and send. How a service survives them is in test_service."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace

import pytest

from tests.serve.running import deep_png, picture
from weft.data.preprocessing import eval_transform
from weft.serve import decoding

CROP = eval_transform(dict(input_size=(3, 2, 2), mean=(0, 0, 0), std=(1, 1, 1)))


def test_a_decoder_has_a_bound_on_its_memory_and_imports_no_file_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("pickle", "socket", "struct", "types", "PIL", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    pool = decoding.DecoderPool(1, 120, 12_000_000, 16 << 20)
    try:
        asyncio.run(pool.start())
        large = asyncio.run(pool.pixels(deep_png(3464), CROP))
        assert isinstance(large, decoding.BadImage)
        assert large.reason == "out-of-memory"
        for setting in (None, ""):  # of the program that starts the decoder
            assert os.environ.get("PYTHONSAFEPATH") == setting
            assert not isinstance(asyncio.run(pool.pixels(picture(0), CROP)), decoding.BadImage)
            monkeypatch.setenv("PYTHONSAFEPATH", "")
            pool._all[0].kill()
    finally:
        pool.close()
    assert not (tmp_path / "imported").exists()


def test_a_decoder_that_is_killed_after_its_result_was_read_decodes_no_other_image(monkeypatch):
    """The deadline passes between the read and the end of the timer."""
    killed = threading.Event()
    process = SimpleNamespace(is_alive=lambda: True, kill=killed.set, join=lambda: None)
    decoder = decoding._Decoder(0)
    decoder.process = process
    decoder.pipe = SimpleNamespace(send=print, send_bytes=len, close=lambda: None)
    bad = decoding.BadImage("The image", "zero-byte")
    monkeypatch.setattr(decoding, "_received", lambda *_: (killed.wait(120), bad)[1])
    assert decoder.decode(b"", None, 1, 0.01) is bad
    assert decoder.process is not process


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"[1, 2", b"123"),
        (b"{}", b"123"),
        (b"[]", b"123"),
        (b'{"reason": ["x"], "detail": ""}', b""),
        (b'{"reason": 1, "detail": ""}', b""),
        (b'{"reason": "no such reason", "detail": ""}', b""),
        (b'{"size": [1]}', b"\0" * 12),
        (b'{"size": ["one", 1]}', b"\0" * 12),
        (b'{"size": [1, 1]}', b"\0" * 11),
        (b'{"size": [1, 1]}', b"\0" * 13),
        (b" " * (decoding.MAX_HEADER_BYTES + 1), b""),
    ],
)
def test_a_decoder_that_was_taken_over_can_send_no_result(header: bytes, data: bytes) -> None:
    ours, theirs = decoding.SPAWN.Pipe()
    theirs.send_bytes(header)
    theirs.send_bytes(data)
    with pytest.raises((OSError, EOFError, LookupError, TypeError, ValueError)):
        decoding._received(ours, CROP)
