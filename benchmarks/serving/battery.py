"""Stop, kill, disconnect from and fuzz `weft serve` repeatedly, and check every response and exit code.

    python benchmarks/serving/battery.py --csv benchmarks/serving/battery.csv

stop    SIGTERM with 16 requests in progress: all get a correct prediction, /ready is 503 before the service stops
        accepting connections, and the exit code is 0
kill    SIGKILL to one of two processes: the other one serves requests, and a new process starts within seconds
leave   16 clients that close their connections during a request: the next request gets a response within a second
fuzz    schemathesis on the OpenAPI description of the service, all phases, with a fixed seed

Writes a row per repetition. The exit code is 1 if one of them failed.
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

from benchmarks.common.records import write_csv
from tests.serve.running import SLOW, Running, children, picture, running, saved

IN_FLIGHT = 16


def stop(folder: Path, turn: int) -> str:
    """Stop the service with requests in progress; return the error, or ''."""
    slow = SLOW.format(seconds=0.3)
    with running(folder, "--max-batch", "4", "--drain", "0.5", program=slow) as service:
        expected = [_predict(service, i) for i in range(IN_FLIGHT)]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            requests = [pool.submit(_predict, service, i) for i in range(IN_FLIGHT)]
            time.sleep(0.4 + 0.02 * turn)
            begun = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            is_draining = _wait_for(lambda: service.ask("/ready")[0] == 503, 0.5)
            predictions = [request.result(20) for request in requests]
        code = service.process.wait(20)
        seconds = time.monotonic() - begun
    wrong = sum(not _is_close(a, b) for a, b in zip(expected, predictions, strict=True))
    return (
        ""
        if (is_draining, wrong, code) == (True, 0, 0) and seconds < 20
        else f"503 {is_draining}, {wrong} wrong, exit {code}"
    )


def kill(folder: Path, turn: int) -> str:
    """Kill one of two processes of the service; return the error, or ''."""
    with running(folder, "--workers", "2") as service:
        _wait_for(lambda: len(children(service.process.pid)) == 2 and bool(_predict(service, 0)), 60)
        before = children(service.process.pid)
        os.kill(before[turn % 2], signal.SIGKILL)
        begun = time.monotonic()
        lost = sum(not _predict(service, i) for i in range(20))
        is_replaced = _wait_for(
            lambda: len([pid for pid in children(service.process.pid) if pid not in before]) == 1, 5
        )
        seconds = time.monotonic() - begun
        code = service.stop()
    # one request may be lost: the one that the killed process was handling
    return (
        ""
        if lost <= 1 and is_replaced and code == 0
        else f"{lost} lost, new one {is_replaced}, {seconds:.1f} s, exit {code}"
    )


def leave(folder: Path, turn: int) -> str:
    """Close connections during a request; return the error, or ''."""
    with running(folder) as service:
        data = picture(turn)
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
        for i in range(IN_FLIGHT):
            with socket.create_connection(("127.0.0.1", service.port)) as sock:
                sock.sendall((head + data)[: len(head) + i * len(data) // (IN_FLIGHT - 1)])
        begun = time.monotonic()
        is_served = bool(_predict(service, 0))
        seconds = time.monotonic() - begun
        code = service.stop()
    return "" if is_served and seconds < 1 and code == 0 else f"answered {is_served} in {seconds:.1f} s, exit {code}"


def fuzz(folder: Path, examples: int) -> tuple[str, str]:
    """Send generated requests, valid and invalid ones; return the number of cases as text, and the error, or ''."""
    with running(folder) as service, tempfile.TemporaryDirectory() as temporary:
        arguments = [str(Path(sys.executable).with_name("schemathesis")), "run", "--seed", "2"]
        arguments += [f"http://127.0.0.1:{service.port}/openapi.json", "--max-examples", str(examples)]
        arguments += ["--phases", "examples,coverage,fuzzing,stateful", "--suppress-health-check", "all"]
        # the description says that a body is binary, but most binary strings are no images
        arguments += ["--exclude-checks", "positive_data_acceptance"]
        completed = subprocess.run(arguments, capture_output=True, text=True, cwd=temporary)
        cases = re.search(r"([\d,]+) generated", completed.stdout)
        is_alive = bool(_predict(service, 0))
    print(completed.stdout[-1500:], flush=True)
    output = f"{cases[1]} cases" if cases else "no count of cases"
    return output, "" if completed.returncode == 0 and is_alive else f"exit {completed.returncode}, alive {is_alive}"


def _predict(service: Running, seed: int) -> dict[str, float] | None:
    """Return the probabilities by class; empty if the request was rejected, None if the connection failed."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, content, _ = service.ask(body=picture(seed))
        return {item["class"]: item["probability"] for item in content["answers"][0]["top"]} if status == 200 else {}
    return None


def _is_close(one: dict[str, float] | None, other: dict[str, float] | None) -> bool:
    return bool(one and other) and all(abs(one[name] - other.get(name, 0)) <= 1e-4 for name in one)


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition becomes true within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def main() -> None:
    """Run all tests, and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20, help="repetitions of stop")
    parser.add_argument("--kills", type=int, default=10, help="repetitions of kill")
    parser.add_argument("--leaves", type=int, default=10, help="repetitions of leave")
    parser.add_argument("--examples", type=int, default=5000, help="test cases per operation in fuzz")
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = saved(Path(temporary) / "model")
        for test, count in ((stop, args.stops), (kill, args.kills), (leave, args.leaves)):
            for turn in range(count):
                begun = time.monotonic()
                fault = test(folder, turn)
                seconds = f"{time.monotonic() - begun:.1f}"
                rows.append({"what": test.__name__, "turn": turn, "seconds": seconds, "fault": fault})
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
