"""Attack the service with hostile requests, and measure its memory and the latency of other clients.

    python benchmarks/reliability/service_attacks.py --label after --csv benchmarks/reliability/service_attacks.csv

Each attack has a separate service (`ceit_nano_32`, default limits) and 60 seconds (`--seconds`). At the same time, one
client requests `/live` and another the prediction for a small image, repeatedly. Memory is that of all processes of the
service (shared pages counted once) above its idle memory. The last two attacks hold connections, which a proxy prevents
(docs/serve.md). `--source DIR` measures another checkout of weft.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import csv
import os
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
HOLD_SECONDS = 20.0


def attacks() -> dict[str, tuple[int, Callable[[Any], object]]]:
    """Return the attacks by name: number of clients at the same time, and the function that each calls."""
    from tests.data.pictures import png, progressive
    from tests.serve.test_attacks import POST, deep_png, profiled, trailers

    thin = png(1, 1_000_000, zlib.compress(bytes(4) * 1_000_000))
    deep, slow = deep_png(5000), progressive(6000, side=5000)
    files = [profiled(seed) for seed in range(64)]
    form = b"--BB\r\n" + b"\r\n--BBx" * 1_400_000
    chunks = POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1;" + b"a=b;" * 1000 + b"\r\nx\r\n") * 1000
    pipeline = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000
    unread = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    boundary = {"Content-Type": "multipart/form-data; boundary=BB"}
    return {
        "none": (1, lambda service: time.sleep(5)),
        "a thin PNG": (1, lambda service: service.ask(body=thin)[0]),
        "two progressive JPEGs of many scans": (2, lambda service: service.ask(body=slow)[0]),
        "16 PNGs of 16 bits": (16, lambda service: service.ask(body=deep)[0]),
        "64 colour profiles": (4, lambda service: [service.ask(body=file)[0] for file in files[::4]]),
        "16 forms of almost boundaries": (16, lambda service: service.ask(body=form, headers=boundary)[0]),
        "4 trailers of 85 MB": (4, trailers),
        "16 chunked bodies with extensions": (16, lambda service: service.raw(chunks)[9:12]),
        "16 pipelines of 20,000 requests": (16, lambda service: service.raw(pipeline)[9:12]),
        "1,100 headers without end": (1, lambda service: _held(service, b"GET /live HTTP/1.1\r\nX-", 1100)),
        "400 clients that read no response": (1, lambda service: _held(service, unread, 400)),
    }


def _held(service: Any, data: bytes, count: int) -> int:
    """Open connections, send what each takes at once, and hold them for HOLD_SECONDS; return their number."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", service.port))
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.send(data)
        time.sleep(HOLD_SECONDS)
    return count


class Monitor:
    """Context that records the memory of a service and the latency of other clients.

    Attributes:
        memory: peak memory in bytes.
        live, predict: largest latency of /live and of /predict in seconds.
        lost: number of requests without a response of status 200.
    """

    def __init__(self, service: Any) -> None:
        self.service, self.memory, self.live, self.predict, self.lost = service, 0, 0.0, 0.0, 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._sample_memory, self._live, self._predict)]

    def __enter__(self) -> Monitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        time.sleep(1)
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _sample_memory(self) -> None:
        from tests.serve.test_attacks import memory

        while not self._end.wait(0.02):
            self.memory = max(self.memory, memory(self.service.process.pid))

    def _live(self) -> None:
        while not self._end.wait(0.05):
            self.live = max(self.live, self._timed(path="/live"))

    def _predict(self) -> None:
        from tests.serve.running import picture

        body = picture(0)
        while not self._end.wait(0.05):
            self.predict = max(self.predict, self._timed(body=body))

    def _timed(self, **arguments: Any) -> float:
        begun = time.monotonic()
        try:
            self.lost += self.service.ask(**arguments)[0] != 200
        except OSError:
            self.lost += 1
        return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="", help="value of the column label")
    parser.add_argument("--source", type=Path, default=ROOT, help="checkout of weft to measure")
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--only", default="", help="run only the attacks whose name contains this")
    parser.add_argument("--seconds", type=float, default=60, help="time for an attack (default: 60)")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(args.source / "src"), os.environ.get("PYTHONPATH", "")])
    from tests.serve.running import picture, running, saved
    from tests.serve.test_attacks import memory

    from weft.machine.processor import processor_class

    with tempfile.TemporaryDirectory() as folder:
        model = saved(Path(folder) / "model")
        for name, (clients, attack) in attacks().items():
            if args.only not in name:
                continue
            with running(model) as service:
                for i in range(8):
                    assert service.ask(body=picture(i))[0] == 200
                idle, begun = memory(service.process.pid), time.monotonic()
                pool = concurrent.futures.ThreadPoolExecutor(clients)
                with Monitor(service) as monitor:
                    futures = [pool.submit(attack, service) for _ in range(clients)]
                    done, unfinished = concurrent.futures.wait(futures, args.seconds)
                seconds = time.monotonic() - begun
                is_alive = service.process.poll() is None
            row = {
                "label": args.label,
                "attack": name,
                "memory_mb": round(max(monitor.memory - idle, 0) / 1e6),
                "live_s": round(monitor.live, 2),
                "answer_s": round(monitor.predict, 2),
                "lost": monitor.lost,
                "attack_s": round(seconds, 1),
                "unfinished": len(unfinished),
                "outcomes": " ".join(sorted({_outcome(future) for future in done})),
                "alive": is_alive,
                "processor": processor_class(),
            }
            print(row, flush=True)
            is_new = not args.csv.exists()
            with args.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, row)
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
            with contextlib.suppress(RuntimeError):
                pool.shutdown(wait=False, cancel_futures=True)


def _outcome(future: concurrent.futures.Future[Any]) -> str:
    if future.exception() is not None:
        return type(future.exception()).__name__
    value = future.result()
    if isinstance(value, list):
        return "/".join(sorted({str(status) for status in value}))
    return value.decode() if isinstance(value, bytes) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
