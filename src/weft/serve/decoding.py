"""Decode uploads in separate processes, which can be killed.

A decoder is C code that reads untrusted bytes. In a process of its own it has a deadline and a memory limit, and a
crash affects only one image. The processes import Pillow and NumPy but not torch, so they are small and start in a
quarter of a second. One thread of the service uses a process at a time, over a pipe that no other process shares, so a
process that is killed while it writes cannot damage another result. Its results are bytes and JSON, which are validated
like untrusted input; nothing that comes from it is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.decode import REASONS, BadImage, open_image
from weft.data.preprocessing import Pixels, Preprocessing

SPAWN = multiprocessing.get_context("spawn")
STUCK_SECONDS = 2.0  # on one image; after that, a decoder counts as not available
MAX_HEADER_BYTES = 1 << 16  # of a result


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
        self._idle = [_Decoder(memory) for _ in range(count)]
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
        for _ in range(2):  # a thread may have replaced the process that was killed first
            for decoder in self._all:
                decoder.kill()
            self._threads.shutdown()

    def _decode(self, data: bytes | bytearray, crop: Preprocessing | None) -> Pixels | BadImage:
        decoder = self._idle.pop()  # never empty: there are as many threads as processes
        try:
            return decoder.decode(data, crop, self.max_pixels, self.seconds)
        finally:
            self._idle.append(decoder)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Let the Python that is started in the block import no file of the current folder: `spawn` starts it with `-c`."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONSAFEPATH", None)


class _Decoder:
    """One decoder process; restarted when it has ended."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.process: SpawnProcess | None = None
        self.pipe: Connection
        self._busy_since: float | None = None

    def start(self) -> SpawnProcess:
        if self.process is None or not self.process.is_alive():
            self.kill()
            self.pipe, pipe = SPAWN.Pipe()
            with pipe:
                process = SPAWN.Process(target=decoder_main, args=(pipe, self.memory), daemon=True)
                with _safe_path():
                    process.start()
            self.process = process
        return self.process

    @property
    def busy_seconds(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def decode(
        self, data: bytes | bytearray, crop: Preprocessing | None, max_pixels: int, seconds: float
    ) -> Pixels | BadImage:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        try:
            process, pipe = self.start(), self.pipe
            # a thread, because sending also waits for a decoder that does not read
            deadline = threading.Timer(seconds, end)
            deadline.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            raise NoDecoderError from error
        self._busy_since = time.monotonic()
        try:
            pipe.send((crop, max_pixels))
            pipe.send_bytes(data)
            return _received(pipe, crop)
        except (OSError, EOFError, LookupError, RecursionError, TypeError, ValueError):
            # killed, crashed, or an invalid message
            self.kill()
            late = is_late.is_set()
            return BadImage("The image", "too-slow" if late else "crashed", f"{seconds:g} s" if late else "")
        finally:
            deadline.cancel()
            deadline.join()
            if is_late.is_set():  # also where the result came just before; the next image starts a new process
                self.kill()
            self._busy_since = None

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.join()
            self.pipe.close()


def decoder_main(pipe: Connection, memory: int) -> None:
    """Decode images from a pipe until it is closed; the main function of a decoder process.

    Args:
        pipe: connection to the service.
        memory: limit on the memory of this process, in bytes beyond what it uses at rest.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to all processes of a service; the service ends them
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with open(os.devnull, "wb") as null:
        for output in (1, 2):  # text that a library prints about an image
            os.dup2(null.fileno(), output)
    _limit_memory(memory)
    while True:
        try:
            crop, max_pixels = pipe.recv()
            result = _decode_image(pipe.recv_bytes(), crop, max_pixels)
        except (EOFError, OSError):
            return
        is_bad = isinstance(result, BadImage)
        header = {"reason": result.reason, "detail": result.detail} if is_bad else {"size": result.size}
        pipe.send_bytes(json.dumps(header).encode())
        pipe.send_bytes(b"" if is_bad else result.values.tobytes())


def _decode_image(data: bytes, crop: Preprocessing | None, max_pixels: int) -> Pixels | BadImage:
    try:
        image = open_image(data, max_pixels=max_pixels, value_range=crop and crop.value_range)
        assert crop is not None  # only the empty test request has no crop
        return crop.pixels(image)
    except BadImage as bad:
        return bad
    except MemoryError:
        return BadImage("The image", "out-of-memory")


def _received(pipe: Connection, crop: Preprocessing | None) -> Pixels | BadImage:
    """Return the result in a message of a decoder; raises the error of the lookup if a part is missing or wrong."""
    shape = () if crop is None else (*crop.size, 3) if crop.color == "RGB" else crop.size
    header = json.loads(pipe.recv_bytes(MAX_HEADER_BYTES))
    data = pipe.recv_bytes(math.prod(shape))
    if "reason" in header:
        if header["reason"] not in REASONS:
            raise ValueError("the reason of the message is not valid")
        return BadImage("The image", header["reason"], str(header["detail"]))
    height, width = header["size"]
    return Pixels(np.frombuffer(data, np.uint8).reshape(shape), (int(height), int(width)))


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
