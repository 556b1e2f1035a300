"""What strangers may send to a service: its memory, its time and its answers stay within bounds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import itertools
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageCms

from tests.data.pictures import png, progressive
from tests.serve.running import Running, children, deep_png, is_spawned, picture, running
from weft.serve.settings import CONNECTIONS, HELD_BYTES, Settings

POST = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc")


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += family(int(child))
    for task in Path(f"/proc/{pid}/task").glob("*/children"):  # started by another thread
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split() if int(child) not in found]
    return list(dict.fromkeys(found))


def memory(pid: int) -> int:
    """Bytes that a process and all that it started take, shared ones counted once."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
            total += int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) << 10
    return total


def data_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmData:"))) << 10


class Watch:
    """The most memory that a service takes, and how often `/live` answers, while this is open."""

    def __init__(self, service: Running) -> None:
        self.service, self.memory, self.answers = service, 0, 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._weigh), threading.Thread(target=self._ask)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _weigh(self) -> None:
        while not self._end.wait(0.02):
            self.memory = max(self.memory, memory(self.service.process.pid))

    def _ask(self) -> None:
        is_over = False
        while not is_over:
            assert self.service.ask("/live")[0] == 200
            self.answers += 1
            is_over = self._end.wait(0.05)


def profiled(seed: int) -> bytes:
    """A JPEG with a colour profile like no other, of a megabyte."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profile += random.Random(seed).randbytes(1 << 20)
    profile = struct.pack(">I", len(profile)) + profile[4:]
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (seed, 0, 0)).save(file, "JPEG", icc_profile=profile)
    return file.getvalue()


def trailers(service: Running) -> int:
    """A chunked body whose trailer does not end: bytes that could be sent."""
    sent, part = 0, b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(64))
    with socket.create_connection(("127.0.0.1", service.port), timeout=120) as sock, contextlib.suppress(OSError):
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        for _ in range(1300):
            sock.sendall(part)
            sent += len(part)
    return sent


SETTINGS = Settings(run="", max_pixels=12_000_000, decoders=2)
CONNECTION_BYTES = 512 << 10  # unread bytes and buffers of one connection
# bodies, of forms a second copy; connections; decoders
MOST = 2 * HELD_BYTES + CONNECTIONS * CONNECTION_BYTES + SETTINGS.decoder_count * SETTINGS.decoder_memory


@pytest.fixture(scope="module")
def bounded(model_dir: Path) -> Iterator[tuple[Running, int]]:
    """A service that may take what it says that it may take, and the memory that it takes at rest."""
    with running(model_dir, "--max-pixels", "12000000", "--decoders", "2", "--proxy", "127.0.0.1") as service:
        for i in range(8):
            assert service.ask(body=picture(i))[0] == 200
        limit = data_bytes(service.process.pid) + MOST
        resource.prlimit(service.process.pid, resource.RLIMIT_DATA, (limit, limit))
        yield service, memory(service.process.pid)


LARGE = png(60_000, 60_000, zlib.compress(bytes(100)))
REFUSED = [b"", b"x", LARGE, b"\xff" * 11_000_000, picture(0)[:150], random.Random(0).randbytes(50_000)]
AMPLIFIED: dict[str, Any] = {
    "refused bodies": lambda service: [service.ask(body=body) for body in REFUSED for _ in range(3)],
    "a trailer without end": lambda service: trailers(service),
    "chunks with extensions": lambda service: service.raw(
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1;" + b"a=b;" * 1000 + b"\r\nx\r\n") * 1000
    ),
    "a form of almost boundaries": lambda service: service.ask(
        body=b"--BB\r\n" + b"\r\n--BBx" * 1_400_000,
        headers={"Content-Type": "multipart/form-data; boundary=BB"},
    ),
    "pipelined requests": lambda service: service.raw(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5_000),
    "a thin image": lambda service: service.ask(body=png(1, 1_000_000, zlib.compress(bytes(4_000_000)))),
    "a progressive JPEG of many scans": lambda service: service.ask(body=progressive(2_000, side=3_000)),
    "16-bit images": lambda service: service.ask(body=deep_png(3464)),
}


@pytest.mark.slow_except("a form of almost boundaries", "refused bodies")
@pytest.mark.parametrize("case", AMPLIFIED)
def test_memory_and_the_wait_of_others_are_bounded(case: str, bounded: tuple[Running, int]) -> None:
    service, rest = bounded
    if case == "refused bodies":  # of which nothing may stay
        rest, limit = memory(service.process.pid), 100 << 20
    else:
        limit = MOST if case == "16-bit images" else 400 << 20  # whose decoding is what they are there for
    with Watch(service) as watch, concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(AMPLIFIED[case], [service] * 16))
    assert watch.memory - rest < limit
    assert watch.answers  # benchmarks/reliability has the waits
    assert service.ask(body=picture(0))[0] == 200


def test_colour_profiles_are_forgotten(bounded: tuple[Running, int]) -> None:
    service, _ = bounded
    rest = memory(service.process.pid)
    files = [profiled(seed) for seed in range(60)]
    with Watch(service) as watch, concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert {status for status, _, _ in pool.map(lambda file: service.ask(body=file), files)} <= {200, 400, 422}
    assert watch.memory - rest < 150 << 20


NAMES = [
    *("host", "origin", "sec-fetch-site", "content-type", "content-length", "content-encoding", "transfer-encoding"),
    *("expect", "authorization", "connection", "upgrade", "accept", "range", "if-none-match", "cookie", "referer"),
    *("x-forwarded-for", "x-forwarded-proto", "x-request-id", "te", "trailer", "access-control-request-method", "via"),
]
VALUES = [
    *("", " ", ",", ";", ":", "=", "/", "[", "]", "[::1", "http://[::1", "http://[", "//", "http://a:b", "null", "*"),
    *("localhost:99999999", "localhost:-1", "multipart/form-data", "multipart/form-data; boundary=", "image/"),
    *("multipart/form-data; charset=undefined; boundary=x", "multipart/form-data; boundary=\xe9", "0", "-1", "1e9"),
    *("multipart/form-data; boundary=" + "x" * 5000, 'multipart/form-data; boundary="\\', "chunked, chunked", "gzip"),
    *("Bearer " + "\xff" * 50, "100-continue", "close, upgrade", "h2c", "bytes=0-9999999999999999999", "%00", "\x7f"),
    *("127.0.0.1, [::1", "999.999.999.999", "\xa0", "a" * 20_000),
]
PART_VALUES = [
    *('form-data; name="a"; filename="b"', "form-data", "form-data; name=", 'form-data; name="a"; filename*=x', "\xff"),
    *("attachment", "form-data; name=\"a\"; filename*=undefined''%ff", 'form-data; name="\\', ""),
    *('form-data; filename="%00%0A\xff"', 'form-data; name="a"; filename="' + "../" * 1000 + '"'),
    'form-data; name="a"; filename="\u202e"',
]
PART_NAMES = ["Content-Disposition", "Content-Type", "Content-Length", "Content-Transfer-Encoding", "X", "", "\xe9"]


@pytest.mark.parametrize("token", ["", pytest.param("of mine", marks=pytest.mark.slow)])
def test_no_header_and_no_field_makes_the_service_fail(token: str, request: pytest.FixtureRequest, model_dir: Path):
    with contextlib.ExitStack() as stack:
        if token:
            service = stack.enter_context(running(model_dir, "--proxy", "127.0.0.1", WEFT_TOKEN=token))
        else:
            service, _ = request.getfixturevalue("bounded")
        rng = random.Random(0)
        for name, value in itertools.product(NAMES, VALUES):
            method = rng.choice([b"POST", b"GET", b"OPTIONS", b"HEAD"])
            host = b"" if name == "host" else b"Host: localhost\r\n"
            length = b"" if name in ("content-length", "transfer-encoding") else b"Content-Length: 4\r\n"
            head = method + b" /predict?top_k=2 HTTP/1.1\r\n" + host + length + b"Connection: close\r\n"
            answer = service.raw(head + f"{name}: {value}\r\n\r\nbody".encode("latin-1", "replace"))
            assert not answer.startswith(b"HTTP/1.1 5"), (name, value)
        for name, value in itertools.product(PART_NAMES, (*PART_VALUES, *VALUES)):
            part = f"--x\r\n{name}: {value}\r\n\r\nbody\r\n--x--\r\n".encode("utf-8", "surrogateescape")
            headers = {"Content-Type": "multipart/form-data; boundary=x", "Authorization": f"Bearer {token}"}
            assert service.ask(body=part, headers=headers)[0] < 500, (name, value)
        text = service.ask("/metrics", headers={"Authorization": f"Bearer {token}"})[1].decode()
        assert 'code="5' not in text


def decoders(service: Running) -> list[int]:
    """The processes that Python spawned and that have spawned none."""
    spawned = [pid for pid in family(service.process.pid)[1:] if is_spawned(pid)]
    return [pid for pid in spawned if not any(is_spawned(child) for child in family(pid)[1:])]


@pytest.mark.slow
def test_the_processes_end_with_the_one_that_started_them(model_dir: Path) -> None:
    with running(model_dir, "--workers", "2", "--drain", "0") as service:
        end = time.monotonic() + 240
        while len(workers := children(service.process.pid)) < 2 or not set(workers).isdisjoint(decoders(service)):
            assert time.monotonic() < end
            time.sleep(0.1)
        members = family(service.process.pid)[1:]
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.wait()
        while any(is_alive(pid) for pid in members):
            assert time.monotonic() < end
            time.sleep(0.1)
        with socket.create_server(("127.0.0.1", service.port)):
            pass


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False
