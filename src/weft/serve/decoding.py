"""Decode uploads in separate processes, which can be killed.

A decoder is C code that reads untrusted bytes. In a process of its own it has a deadline and a memory limit, and a
crash affects only one image. The processes import Pillow and NumPy but not torch, so they are small and start in a
quarter of a second. One thread of the service uses a process at a time, over pipes that no other process shares, so a
process that is killed while it writes cannot damage another result. Its results are validated like untrusted input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from weft.data.decode import REASONS, BadImage, open_image
from weft.data.preprocessing import Pixels, Preprocessing

STUCK_SECONDS = 2.0  # on one image; after that, a decoder counts as not available


class NoDecoderError(Exception):
    """No process can be started, for lack of memory, processes or open files."""


class DecoderPool:
    """Pool of processes that decode images.

    Args:
        count: number of processes.
        seconds: maximum time for one image; then its process is killed and another one started.
        max_pixels: maximum height x width of an image.
        memory: limit on the memory of one process, in bytes beyond what it uses at rest; not on Windows.
    """

    def __init__(self, count: int, seconds: float, max_pixels: int, memory: int) -> None:
        self.seconds, self.max_pixels = seconds, max_pixels
        self._idle = [_DecoderProcess(memory) for _ in range(count)]
        self._all = tuple(self._idle)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="weft-decoder")

    async def start(self) -> None:
        """Start the processes, and wait until each has answered a test request.

        Raises:
            RuntimeError: a process cannot be started.
        """
        for decoder in self._all:
            decoder.start()
        loop = asyncio.get_running_loop()
        trials = [loop.run_in_executor(self._threads, self._decode, b"", None) for _ in self._all]
        for result in await asyncio.gather(*trials):
            if not isinstance(result, BadImage) or result.reason != "zero-byte":
                raise RuntimeError(f"An image decoder process must start; it does not: {result}")

    async def pixels(self, data: bytes | bytearray, crop: Preprocessing) -> Pixels | BadImage:
        """Return the pixels of an uploaded file, or the reason why it cannot be used.

        Raises:
            NoDecoderError: the process has ended, and no other one can be started.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, data, crop)

    @property
    def is_stuck(self) -> bool:
        """Whether every process has been busy with one image for more than STUCK_SECONDS."""
        return all(decoder.busy_seconds > STUCK_SECONDS for decoder in self._all)

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._all:
            decoder.kill()

    def _decode(self, data: bytes | bytearray, crop: Preprocessing | None) -> Pixels | BadImage:
        decoder = self._idle.pop()  # never empty: there are as many threads as processes
        try:
            return decoder.decode((data, crop, self.max_pixels), self.seconds)
        finally:
            self._idle.append(decoder)


class _DecoderProcess:
    """One decoder process; restarted when it has ended."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.process: subprocess.Popen[bytes] | None = None
        self._busy_since: float | None = None

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        code = f"from weft.serve.decoding import decoder_main; decoder_main({self.memory})"
        self.process = subprocess.Popen(
            # -P: do not import modules from the current folder, for example a file numpy.py
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            # Ctrl-C must not reach the decoders, only the service
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # of Windows
        )

    @property
    def busy_seconds(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def decode(self, task: tuple[bytes | bytearray, Preprocessing | None, int], seconds: float) -> Pixels | BadImage:
        try:
            self.start()
            process = self.process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            deadline = threading.Timer(seconds, process.kill)
            deadline.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            raise NoDecoderError from error
        self._busy_since = begun = time.monotonic()
        try:
            data, crop, max_pixels = task
            _send(process.stdin, {"crop": crop and asdict(crop), "max_pixels": max_pixels}, data)
            return _validated(*_receive(process.stdout), crop)
        except (OSError, EOFError, LookupError, RecursionError, TypeError, ValueError):
            # killed, crashed, or an invalid message
            self.kill()
            is_late = time.monotonic() - begun >= seconds
            return BadImage("The image", "too-slow" if is_late else "crashed", f"{seconds:g} s" if is_late else "")
        finally:
            deadline.cancel()
            self._busy_since = None

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # the pipe holds unwritten data
                    pipe.close()  # type: ignore[union-attr]


def decoder_main(memory: int) -> None:
    """Decode images from the standard input until it is closed; the main function of a decoder process.

    Args:
        memory: limit on its memory, in bytes beyond what it uses at rest.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to all processes of a service; the service ends them
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)  # text that a library prints must not get into a result
    _limit_memory(memory)
    while True:
        try:
            task, data = _receive(sys.stdin.buffer)
        except EOFError:
            return
        crop = task["crop"] and Preprocessing(**{key: _tuple(value) for key, value in task["crop"].items()})
        match _decode_image(data, crop, task["max_pixels"]):
            case Pixels(values, size):
                _send(output, {"size": size}, values.tobytes())
            case BadImage() as bad:
                _send(output, {"reason": bad.reason, "detail": bad.detail}, b"")


def _decode_image(data: bytes | bytearray, crop: Preprocessing | None, max_pixels: int) -> Pixels | BadImage:
    try:
        image = open_image(bytes(data), max_pixels=max_pixels, value_range=crop and crop.value_range)
        assert crop is not None  # only the empty test request has no crop
        return crop.pixels(image)
    except BadImage as bad:
        return bad
    except MemoryError:
        return BadImage("The image", "out-of-memory")


def _send(pipe: IO[bytes], header: Any, data: bytes | bytearray) -> None:
    text = json.dumps(header).encode()
    pipe.write(struct.pack("<IQ", len(text), len(data)) + text)
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[Any, bytes]:
    """Read one message.

    Raises:
        EOFError: the other process has ended.
        ValueError: the message is not valid.
    """
    lengths = pipe.read(12)
    if len(lengths) < 12:
        raise EOFError
    header, count = struct.unpack("<IQ", lengths)
    if header > 1 << 16 or count > 1 << 32:
        raise ValueError("the lengths of the message are not valid")
    text, data = pipe.read(header), pipe.read(count)
    if len(text) + len(data) < header + count:
        raise EOFError
    return json.loads(text), data


def _validated(header: Any, data: bytes, crop: Preprocessing | None) -> Pixels | BadImage:
    """Return the result in a message of a decoder; raises the error of the lookup if a part is missing or wrong."""
    if "reason" in header:
        if header["reason"] not in REASONS:
            raise ValueError("the reason of the message is not valid")
        return BadImage("The image", header["reason"], str(header["detail"]))
    height, width = header["size"]
    assert crop is not None
    shape = (*crop.size, 3) if crop.color == "RGB" else crop.size
    return Pixels(np.frombuffer(data, np.uint8).reshape(shape), (int(height), int(width)))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _limit_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no memory limit, but has the deadline
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limit = _data_bytes() + memory
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _data_bytes() -> int:
    """Return the private memory of this process as RLIMIT_DATA counts it on Linux; 0 on other systems."""
    status = Path("/proc/self/status")
    lines: list[Any] = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)
