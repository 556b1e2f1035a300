"""Stops, kills and fuzzes `weft serve`, as often as it takes to believe it.

    python benchmarks/serving/battery.py --csv benchmarks/serving/battery.csv

stop    SIGTERM with 16 pictures in flight: all are answered, /ready is 503 before the door closes, the exit code is 0
kill    SIGKILL to one of two processes: the other answers; two again within seconds
leave   16 clients that close their connections in the middle of a request: the next one is answered at once
fuzz    schemathesis from the service's own description, all phases, with a fixed seed

A line for each turn; the exit code is 1 where one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.serve.running import SLOW, Running, children, picture, running, saved

from weft.bench.records import write_csv

IN_FLIGHT = 16


def stop(folder: Path, turn: int) -> str:
    """SIGTERM with pictures in flight."""
    slow = SLOW.format(seconds=0.3)
    with running(folder, "--max-batch", "4", "--drain", "0.5", program=slow) as service:
        want = [_top(service, i) for i in range(IN_FLIGHT)]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            asking = [pool.submit(_top, service, i) for i in range(IN_FLIGHT)]
            time.sleep(0.4 + 0.02 * turn)
            begun = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            heard = _until(lambda: service.ask("/ready")[0] == 503, 0.5)
            got = [one.result(20) for one in asking]
        code = service.process.wait(20)
        seconds = time.monotonic() - begun
    wrong = sum(not _same(a, b) for a, b in zip(want, got, strict=True))
    return "" if (heard, wrong, code) == (True, 0, 0) and seconds < 20 else f"503 {heard}, {wrong} wrong, exit {code}"


def kill(folder: Path, turn: int) -> str:
    """SIGKILL to one of two processes."""
    with running(folder, "--workers", "2") as service:
        _until(lambda: len(children(service.process.pid)) == 2 and bool(_top(service, 0)), 60)
        before = children(service.process.pid)
        os.kill(before[turn % 2], signal.SIGKILL)
        begun = time.monotonic()
        lost = sum(not _top(service, i) for i in range(20))
        again = _until(lambda: len([pid for pid in children(service.process.pid) if pid not in before]) == 1, 5)
        seconds = time.monotonic() - begun
        code = service.stop()
    # a request that was on its way to the process that died is lost with it
    return "" if lost <= 1 and again and code == 0 else f"{lost} lost, new one {again}, {seconds:.1f} s, exit {code}"


def leave(folder: Path, turn: int) -> str:
    """Clients that close their connections in the middle of a request."""
    with running(folder) as service:
        data = picture(turn)
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
        for i in range(IN_FLIGHT):
            with socket.create_connection(("127.0.0.1", service.port)) as sock:
                sock.sendall((head + data)[: len(head) + i * len(data) // (IN_FLIGHT - 1)])
        begun = time.monotonic()
        answered = bool(_top(service, 0))
        seconds = time.monotonic() - begun
        code = service.stop()
    return "" if answered and seconds < 1 and code == 0 else f"answered {answered} in {seconds:.1f} s, exit {code}"


def fuzz(folder: Path, examples: int) -> tuple[str, str]:
    """Requests that the description allows, and that it does not."""
    with running(folder) as service, tempfile.TemporaryDirectory() as there:
        arguments = [str(Path(sys.executable).with_name("schemathesis")), "run", "--seed", "2"]
        arguments += [f"http://127.0.0.1:{service.port}/openapi.json", "--max-examples", str(examples)]
        arguments += ["--phases", "examples,coverage,fuzzing,stateful", "--suppress-health-check", "all"]
        arguments += [
            "--exclude-checks",
            "positive_data_acceptance",
        ]  # that a string is binary does not make it a picture
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=there)
        cases = re.search(r"([\d,]+) generated", done.stdout)
        alive = bool(_top(service, 0))
    print(done.stdout[-1500:], flush=True)
    output = f"{cases[1]} cases" if cases else "no count of cases"
    return output, "" if done.returncode == 0 and alive else f"exit {done.returncode}, alive {alive}"


def _top(service: Running, seed: int) -> dict[str, float] | None:
    """Probabilities by class, none where it was refused, or None where the connection broke."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, found, _ = service.ask(body=picture(seed))
        return {item["class"]: item["probability"] for item in found["answers"][0]["top"]} if status == 200 else {}
    return None


def _same(one: dict[str, float] | None, other: dict[str, float] | None) -> bool:
    return bool(one and other) and all(abs(one[name] - other.get(name, 0)) <= 1e-4 for name in one)


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.02)
    return False


def main() -> None:
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--leaves", type=int, default=10)
    parser.add_argument("--examples", type=int, default=5000, help="of each operation")
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as there:
        folder = saved(Path(there) / "model")
        for what, count in ((stop, args.stops), (kill, args.kills), (leave, args.leaves)):
            for turn in range(count):
                begun = time.monotonic()
                fault = what(folder, turn)
                seconds = f"{time.monotonic() - begun:.1f}"
                rows.append({"what": what.__name__, "turn": turn, "seconds": seconds, "fault": fault})
                print(rows[-1], flush=True)
                write_csv(args.csv, rows)
        begun = time.monotonic()
        output, fault = fuzz(folder, args.examples)
        seconds = f"{time.monotonic() - begun:.1f}"
        rows.append({"what": f"fuzz, {output}", "turn": 0, "seconds": seconds, "fault": fault})
    write_csv(args.csv, rows)
    sys.exit(any(row["fault"] for row in rows))


if __name__ == "__main__":
    main()
