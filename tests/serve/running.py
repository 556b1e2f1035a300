"""A service in a process of its own or in this one, and clients that say exactly what goes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image
from torch import nn

from tests import forked
from tests.data.pictures import png
from tests.helpers import lively
from weft.checkpoints import save_model_dir
from weft.serve.settings import Settings

NAMES = ["left", "right", "up", "down"]
SLOW = """
import time
from weft.inference.predictor import Predictor
quick = Predictor.predict
def slow(self, pictures, *, overlay=False):
    time.sleep({seconds})
    return quick(self, pictures, overlay=overlay)
Predictor.predict = slow
"""


def saved(folder: Path, seed: int = 0, model: str = "ceit_nano_32") -> Path:
    """A model directory; another seed, other answers."""
    network = lively(model, num_classes=len(NAMES))
    linear = [module for module in network.head.modules() if isinstance(module, nn.Linear)][-1]
    linear.weight.data.mul_(20 if seed == 0 else -20)  # sure of itself, and of the opposite with another seed
    return save_model_dir(network, folder, label_names=NAMES, force=True)


def picture(seed: int, size: int = 40, format: str = "PNG") -> bytes:
    """A picture file: soft colours, different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((size, size)).save(file, format)
    return file.getvalue()


def deep_png(side: int) -> bytes:
    """A PNG of 16 bits and four channels: 8 bytes per pixel, of which almost nothing is sent."""
    return png(side, side, zlib.compress(bytes((1 + 8 * side) * side)), depth=16, colour=6)


class Running:
    """`weft serve` at work."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, output: str) -> None:
        self.process, self.port, self.said = process, port, output

    def ask(
        self,
        path: str = "/predict",
        body: Any = None,
        headers: dict[str, str] | None = None,
        method: str | None = None,
        **arguments: Any,
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, body (JSON where it is) and headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            method = method or ("POST" if body is not None else "GET")
            connection.request(method, path, body=body, headers=headers or {}, **arguments)
            response = connection.getresponse()
            raw = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(raw) if is_json else raw, response.headers

    def raw(self, data: bytes, timeout: float = 120) -> bytes:
        """What comes back for these bytes, until the other side closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
            return read_all(sock)

    def metric(self, name: str) -> float:
        """Value of a metric, with its labels in the name; 0 if it has none yet."""
        lines = self.ask("/metrics")[1].decode().splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 120) -> int:
        """Its exit code."""
        self.process.send_signal(sig)
        return self.process.wait(timeout)


def children(pid: int) -> list[int]:
    """Processes that answer: those that Python spawned, its resource tracker aside."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if is_spawned(int(child))]


def is_spawned(pid: int) -> bool:
    """Whether `multiprocessing` spawned a process."""
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def read_all(sock: socket.socket) -> bytes:
    """Until the other side closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def running(run: Path, *options: str, program: str = "", **env: str) -> Iterator[Running]:
    """A service on a free port; `program` is Python that runs before it, to change what it is made of."""
    arguments = ["serve", str(run), "--port", "0", *options]
    code = f"{program}\nimport sys\nfrom weft.cli import main\nsys.exit(main({arguments!r}))"
    with tempfile.TemporaryFile("w+") as errors:
        process = forked.Popen(
            [sys.executable, "-c", code], stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1", **env}
        )
        try:
            output = _said(process, errors, "http://")
            yield Running(process, int(re.search(r"http://\S*?:(\d+)", output)[1]), output)
        finally:
            process.kill()
            process.wait()


def _said(process: subprocess.Popen[bytes], errors: IO[str], word: str, seconds: float = 120) -> str:
    """What it said up to a word."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        errors.seek(0)
        output = errors.read()
        if word in output and output.endswith("\n"):
            return output
        assert process.poll() is None, f"weft serve ended: {output}"
        time.sleep(0.02)
    raise AssertionError(f"weft serve did not start: {output}")


@contextlib.asynccontextmanager
async def client_of(settings: Settings) -> AsyncIterator[Any]:
    """A client of an application in this process, with the state of the service as `service`."""
    import httpx2

    from weft.serve.app import create_app

    app = create_app(settings)
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        client.service = app.state.service
        yield client


async def until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.005)
