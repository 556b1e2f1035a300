"""Decode uploads in separate processes, which can be killed.

A decoder is C code that works on a stranger's bytes. Here it has a deadline and a bound on its memory, and takes
nothing with it when it crashes. The processes import Pillow and NumPy but not torch, so they are small and start in a
quarter of a second. A process belongs to one thread of the service at a time, and talks to it over a pair of pipes of
its own: one that is killed in the middle of an answer leaves nobody else's answer damaged. What it answers is checked
like a stranger's bytes.
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

from weft.data.images.crop import EvalCrop, Pixels
from weft.data.images.decode import REASONS, BadImage, open_image

STUCK_SECONDS = 2.0  # on one image, after which a decoder does not count as one that new images may wait for


class Decoders:
    """A pool of processes that decode images.

    Args:
        count: processes.
        seconds: that one image may take; then its process is killed and another one started.
        max_pixels: of an image (height x width).
        memory: bytes that one process may take beyond its own code, where the system can bound them.
    """

    def __init__(self, count: int, seconds: float, max_pixels: int, memory: int) -> None:
        self.seconds, self.max_pixels = seconds, max_pixels
        self._idle = [_Decoder(memory) for _ in range(count)]
        self._all = tuple(self._idle)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="weft-decoder")

    async def start(self) -> None:
        """Starts the processes, and waits until they work.

        Raises:
            RuntimeError: one does not.
        """
        for decoder in self._all:
            decoder.start()
        loop = asyncio.get_running_loop()
        trials = [loop.run_in_executor(self._threads, self._decoded, b"", None) for _ in self._all]
        for answer in await asyncio.gather(*trials):
            if not isinstance(answer, BadImage) or answer.reason != "zero-byte":
                raise RuntimeError(f"A process that decodes images cannot be started: {answer}")

    async def pixels(self, data: bytes | bytearray, crop: EvalCrop) -> Pixels | BadImage:
        """The pixels of an uploaded file, or why there are none."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decoded, data, crop)

    @property
    def is_stuck(self) -> bool:
        """Whether every process has been busy with one image for longer than images take."""
        return all(decoder.busy_seconds > STUCK_SECONDS for decoder in self._all)

    def close(self) -> None:
        """Ends all processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._all:
            decoder.kill()

    def _decoded(self, data: bytes | bytearray, crop: EvalCrop | None) -> Pixels | BadImage:
        decoder = self._idle.pop()  # there are as many threads
        try:
            return decoder.ask((data, crop, self.max_pixels), self.seconds)
        finally:
            self._idle.append(decoder)


class _Decoder:
    """One process, started again whenever it has ended."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.process: subprocess.Popen[bytes] | None = None
        self._since: float | None = None

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        code = f"from weft.serve.decoding import work; work({self.memory})"
        self.process = subprocess.Popen(
            # -P: a file `numpy.py` in the current folder must not be imported
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for the service, which lets it finish
        )

    @property
    def busy_seconds(self) -> float:
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def ask(self, task: tuple[bytes | bytearray, EvalCrop | None, int], seconds: float) -> Pixels | BadImage:
        self.start()
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._since = begun = time.monotonic()
        deadline = threading.Timer(seconds, process.kill)
        deadline.start()
        try:
            data, crop, max_pixels = task
            _send(process.stdin, {"crop": crop and asdict(crop), "max_pixels": max_pixels}, data)
            return _checked(*_received(process.stdout), crop)
        except (OSError, EOFError, LookupError, TypeError, ValueError):  # it was killed, crashed or talks nonsense
            self.kill()
            is_late = time.monotonic() - begun >= seconds
            return BadImage("The image", "too-slow" if is_late else "crashed", f"{seconds:g} s" if is_late else "")
        finally:
            deadline.cancel()
            self._since = None

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not written yet
                    pipe.close()  # type: ignore[union-attr]


def work(memory: int) -> None:
    """Decodes what comes in, until nothing comes: the service has ended. The whole program of a process.

    Args:
        memory: bytes that it may take, where the system can bound them.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to all processes of a service: the others finish first
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a library that prints must not print into an answer
    _bound_memory(memory)
    while True:
        try:
            task, data = _received(sys.stdin.buffer)
        except EOFError:
            return
        crop = task["crop"] and EvalCrop(**{key: _tuple(value) for key, value in task["crop"].items()})
        match _answer(data, crop, task["max_pixels"]):
            case Pixels(values, size):
                _send(answers, {"size": size}, values.tobytes())
            case BadImage() as bad:
                _send(answers, {"reason": bad.reason, "detail": bad.detail}, b"")


def _answer(data: bytes | bytearray, crop: EvalCrop | None, max_pixels: int) -> Pixels | BadImage:
    try:
        image = open_image(bytes(data), max_pixels=max_pixels)
        assert crop is not None  # only what is empty comes without
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


def _received(pipe: IO[bytes]) -> tuple[Any, bytes]:
    """Raises an EOFError where the other side has ended, a ValueError where it says nonsense."""
    lengths = pipe.read(12)
    if len(lengths) < 12:
        raise EOFError
    header, count = struct.unpack("<IQ", lengths)
    if header > 1 << 16 or count > 1 << 32:
        raise ValueError("no message of this protocol")
    text, data = pipe.read(header), pipe.read(count)
    if len(text) + len(data) < header + count:
        raise EOFError
    return json.loads(text), data


def _checked(header: Any, data: bytes, crop: EvalCrop | None) -> Pixels | BadImage:
    """An answer; raises what the lookup of a missing or wrong part raises."""
    if "reason" in header:
        return BadImage("The image", next(word for word in REASONS if word == header["reason"]), str(header["detail"]))
    height, width = header["size"]
    assert crop is not None
    shape = (*crop.size, 3) if crop.color == "RGB" else crop.size
    return Pixels(np.frombuffer(data, np.uint8).reshape(shape), (int(height), int(width)))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _bound_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the deadline holds there as well, this does not
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limit = _own_bytes() + memory
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _own_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it on Linux; 0 elsewhere."""
    status = Path("/proc/self/status")
    lines: list[Any] = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)
