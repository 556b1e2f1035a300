"""The service as a process: hostile bytes on the wire, signals, reloads, several workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.helpers import examples
from tests.serve.running import Running, children, picture, read_all, running, saved
from weft.cli import main

POST = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n\r\n"
GATED = """
import time
from pathlib import Path
from weft.inference.predictor import Predictor
quick = Predictor.predict
def gated(self, pictures, *, overlay=False):
    while Path({gate!r}).exists():
        Path({gate!r}).with_name("begun").touch()
        time.sleep(0.01)
    return quick(self, pictures, overlay=overlay)
Predictor.predict = gated
"""


@pytest.fixture(scope="module")
def service(model_dir: Path) -> Iterator[Running]:
    with running(model_dir, "--read-timeout", "3", "--max-bytes", "1MB") as one:
        yield one
        assert one.stop() == 0


@pytest.fixture
def gated(model_dir: Path, tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """A service whose model waits while a file exists, and the file; it drains until a second signal.

    Beside it, the model makes a file `begun`.
    """
    gate = tmp_path / "gate"
    with running(model_dir, "--max-batch", "1", "--drain", "600", program=GATED.format(gate=str(gate))) as one:
        gate.touch()
        yield one, gate


@pytest.fixture(scope="module")
def public(model_dir: Path) -> Iterator[Running]:
    """A service for other machines that has four connections. Ctrl-C ends it without an error."""
    program = "from weft.serve import settings; settings.CONNECTIONS = 4"
    with running(model_dir, "--host", "0.0.0.0", "--name", "photos.example", program=program) as one:
        yield one
        assert one.stop(signal.SIGINT) == 0


def until(look: Callable[[], Any], seconds: float = 240) -> Any:
    """The first result that is true."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    assert found, answer[:200]
    return int(found[1])


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/model", "/metrics", "/page/app.js", "/nowhere"])
def test_head_is_get_without_its_body(path: str, service: Running) -> None:
    expected, content, headers = service.ask(path)
    answer = service.raw(f"HEAD {path} HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n".encode() + CLOSE)
    assert status_of(answer) == expected
    assert f"content-type: {headers['content-type']}".encode() in answer.lower()
    assert answer.endswith(b"\r\n\r\n")
    assert content


CHUNKED = POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
WIRE = {
    "a body in 10,000 chunks of a byte": (CHUNKED + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n", 415),
    "a body without an end or a length": (CHUNKED + b"%x\r\n" % 2_000_000 + b"x" * 2_000_000, 413),
    "a length that is a lie": (POST + b"Content-Length: 99999999999\r\n\r\nx", 413),
    "a negative length": (POST + b"Content-Length: -5\r\n\r\nx", 400),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx", 400),
    "a length and chunks": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"0\r\n\r\n", 400),
    "a body that stops": (POST + b"Content-Length: 5000\r\n\r\nxx", 408),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100, 400),
    "a header of 15,000 bytes": (GET + b"X: " + b"a" * 15_000 + b"\r\n" + CLOSE, 200),
    "a header of more than 16 KiB that does not end": (GET + b"X: " + b"a" * 20_000, 400),
    "a header without end": (GET + b"X: " + b"a" * 500_000, 400),
    "headers without end": (GET + b"X-A: b\r\n" * 100_000, 400),
    "two hosts": (GET + b"Host: localhost\r\n" + CLOSE, 400),
    "no host": (b"GET / HTTP/1.1\r\n" + CLOSE, 400),
    "another protocol": (GET + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    "a NUL in the path": (GET.replace(b"/ ", b"/page/%00 ") + CLOSE, 404),
    "a path out of the page's folder": (GET.replace(b"/ ", b"/page/../../../etc/passwd ") + CLOSE, 404),
}


@pytest.mark.parametrize("case", WIRE)
def test_hostile_bytes_are_answered_and_disturb_no_other(case: str, service: Running) -> None:
    data, status = WIRE[case]
    assert status_of(service.raw(data)) == status
    assert service.ask(body=picture(0))[0] == 200


def test_fifty_slow_clients_hold_nobody_up(service: Running) -> None:
    """Those that send their body slowly are refused; for a slow header, a proxy has the limit."""
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", service.port)
        slow = [stack.enter_context(socket.create_connection(address, timeout=120)) for _ in range(50)]
        for i, sock in enumerate(slow):
            sock.sendall(POST + b"X-" if i % 2 else POST + b"Content-Length: 1000\r\n\r\nab")
        assert service.ask(body=picture(0))[0] == 200  # while all fifty are connected
        for sock in slow[::2]:
            assert status_of(read_all(sock)) == 408
        assert service.ask(body=picture(0))[0] == 200


def test_a_stop_finishes_what_was_accepted_and_refuses_the_rest(gated: tuple[Running, Path]) -> None:
    """Without a reset of the connection, which would hide the response; and nobody is asked to send a large body."""
    service, gate = gated
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        kept = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        kept.request("GET", "/ready")
        assert kept.getresponse().read() == b'{"status":"ready","waiting":0}'
        asking = [pool.submit(service.ask, "/predict", picture(0))]
        until(gate.with_name("begun").exists)
        asking += [pool.submit(service.ask, "/predict", picture(i)) for i in range(5)]
        until(lambda: service.ask("/ready")[1]["waiting"] == 5)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.ask("/ready")[0] == 503)  # it still listens, so that a balancer hears it
        kept.request("GET", "/ready")
        assert kept.getresponse().status == 503
        kept.close()
        for size in (100, 9 << 20):
            status, found, headers = service.ask(body=bytes(size))
            assert (status, found["error"]["code"], headers["retry-after"]) == (503, "stopping", "1")
        assert status_of(service.raw(POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")) == 503
        gate.unlink()
        assert [one.result(timeout=120)[0] for one in asking] == [200] * 6
        assert service.stop() == 0
        with pytest.raises(ConnectionRefusedError):
            service.ask("/live")


def test_clients_that_leave_take_their_images_along(gated: tuple[Running, Path]) -> None:
    service, gate = gated
    data = picture(0)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=120))
            sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        until(lambda: gate.with_name("begun").exists() and service.ask("/ready")[1]["waiting"] == 9)
    until(lambda: service.metric('weft_requests_total{code="499",method="POST",path="/predict"}') == 10)
    gate.unlink()
    assert service.ask(body=data)[0] == 200
    assert service.metric("weft_batch_images_sum") == 2  # what the model had begun, and the last


WITHOUT_EXPORT = """
from dataclasses import replace
import weft.serve.server as s
choice = s._choice_of
s._choice_of = lambda settings, stops: (replace(settings, runtime='onnx'), choice(settings, stops)[1])
"""


@pytest.mark.parametrize(
    ("is_damaged", "program", "code", "words"),
    [
        (False, WITHOUT_EXPORT, 1, "a process of the service cannot start: runtime onnx needs an export"),
        (True, "", 4, "weft: "),  # before any worker starts
    ],
)
def test_workers_that_cannot_start_are_an_error(is_damaged, program, code, words, tmp_path):
    folder = saved(tmp_path / "model")
    if is_damaged:
        (folder / "model.safetensors").write_bytes(b"damaged")
    arguments = ["serve", str(folder), "--port", "0", "--workers", "2"]
    program += f"\nimport sys; from weft.cli import main; sys.exit(main({arguments!r}))"
    done = forked.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "http://" not in done.stderr


def first_class(service: Running, **headers: str) -> str:
    status, found, _ = service.ask(body=picture(0), headers=headers)
    assert status == 200
    return found["answers"][0]["top"][0]["class"]


@pytest.mark.slow
def test_a_new_model_is_taken_without_dropping_a_request(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with running(folder) as service, concurrent.futures.ThreadPoolExecutor(4) as pool:
        before = first_class(service)
        asking = pool.map(lambda _: first_class(service), range(1500))
        saved(folder, seed=1)
        service.process.send_signal(signal.SIGHUP)
        classes = list(asking)
        after = first_class(service)
        assert before != after
        assert (classes[0], classes[-1]) == (before, after)
        assert set(classes) == {before, after}
        # what cannot be loaded leaves the current model at work
        (folder / "model.safetensors").write_bytes(b"damaged")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.metric('weft_reloads_total{outcome="failed"}') == 1)
        assert first_class(service) == after


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_no_request_waits_for_long(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with running(folder, "--workers", "2", "--drain", "3", "--host", "0.0.0.0", WEFT_TOKEN="of mine") as service:
        assert "#token=of%20mine" in service.said
        own = {"Authorization": "Bearer of mine"}

        def ask() -> str | None:  # the processes begin after the address is told
            with contextlib.suppress(OSError, http.client.HTTPException):
                return first_class(service, **own)
            return None

        def both() -> list[int]:
            found = children(service.process.pid)
            return found if len(found) == 2 else []

        before = until(ask)
        first = until(both)
        os.kill(first[0], signal.SIGSTOP)  # it is asked for its health, and dies before it answers
        time.sleep(1.2)
        os.kill(first[0], signal.SIGKILL)
        until(lambda: not Path(f"/proc/{first[0]}/cmdline").exists() or first[0] not in children(service.process.pid))
        assert {first_class(service, **own) for _ in range(10)} == {before}
        until(lambda: [pid for pid in children(service.process.pid) if pid not in first])
        saved(folder, seed=1)
        for _ in range(3):  # all but the first are one reload after it
            os.kill(service.process.pid, signal.SIGHUP)
        until(lambda: before not in {first_class(service, **own) for _ in range(20)})  # both have the new one
        text = service.ask("/metrics", headers=own)[1].decode()
        counted = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("weft_images_total{")]
        assert sum(counted) >= 20
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.ask("/ready", headers=own)[0] == 503)  # all of them still listen
        assert service.process.wait(120) == 0


def test_what_cannot_be_served_is_told_before_the_service_begins(model_dir, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model_dir), "--port", port]) == 2
        assert capsys.readouterr().err == (
            "weft: --host must be an address of this machine and --port a free port;"
            f" 127.0.0.1:{port}: Address already in use. Pass another --port, or 0 for any free port.\n"
        )
    for words, code, text in (
        ([str(model_dir), "--host", "203.0.113.9"], 2, "203.0.113.9:0: Cannot assign requested address"),
        ([str(model_dir), "--runtime", "openvino"], 2, "runtime openvino needs an export in or next to"),
        ([str(model_dir), "--max-batch", "many"], 2, "--max-batch must be a whole number; got 'many'"),
        (["nowhere"], 4, "nowhere"),
    ):
        assert main(["serve", *words, "--port", "0"]) == code
        assert text in capsys.readouterr().err
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "fastapi" else find_spec(name, *more)
    )
    assert main(["serve", str(model_dir)]) == 2
    expected = "weft: fastapi is needed for this, and is not installed. Run: pip install 'weft-vision[serve]'\n"
    assert capsys.readouterr().err == expected


def test_other_machines_need_the_token_that_is_printed(public: Running) -> None:
    token = re.search(r"#token=(\S+)", public.said)[1]
    assert public.ask("/model")[0] == 401
    own = {"Authorization": f"Bearer {token}"}
    for host in ("192.168.1.5:8000", "photos.example"):
        assert public.ask("/model", headers={"Host": host, **own})[0] == 200
    assert public.ask("/live", headers={"Host": "evil.example"})[0] == 421


def test_a_connection_too_many_is_refused(public: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", public.port, timeout=120)
            stack.enter_context(contextlib.closing(connection))
            connection.request("GET", "/live")
            assert connection.getresponse().read() == b'{"status":"live"}'
        assert public.ask("/live")[:2] == (503, b"Service Unavailable")
    until(lambda: public.ask("/live")[0] == 200)


@pytest.mark.slow
def test_the_description_is_kept_under_fuzz(service: Running, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            *(f"http://127.0.0.1:{service.port}/openapi.json", "--seed", "1", "--max-examples", str(examples(160))),
            *("--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"),
            # that a string is binary does not make it a picture, which only the answer can say
            *("--exclude-checks", "positive_data_acceptance"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert service.ask(body=picture(0))[0] == 200
