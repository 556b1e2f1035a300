"""The service as a process: abuse over the wire, signals, reloads, several workers."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.helpers import examples
from tests.serve.running import SLOW, Running, children, picture, read_all, running, saved
from weft.cli import main
from weft.train import predict

POST = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def service(model_dir: Path) -> Iterator[Running]:
    with running(model_dir, "--read-timeout", "3", "--max-bytes", "1MB") as one:
        yield one
        assert one.stop() == 0


def chunked(parts: Iterator[bytes] | list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    assert found, answer[:200]
    return int(found[1])


def test_the_same_answers_through_every_door(service: Running, model_dir: Path, tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}.png").write_bytes(picture(i))
    offline = {Path(answer.image).name: answer.top for answer in predict(model_dir, tmp_path)}

    def ask(path: Path) -> tuple[str, list[tuple[str, float]]]:
        status, found, _ = service.ask(body=path.read_bytes())
        assert status == 200
        return path.name, [(item["class"], item["probability"]) for item in found["answers"][0]["top"]]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        online = dict(pool.map(ask, sorted(tmp_path.iterdir())))
    for name, top in offline.items():
        assert [word for word, _ in online[name]] == [word for word, _ in top]
        assert [share for _, share in online[name]] == pytest.approx([share for _, share in top], abs=1e-4)


@pytest.mark.parametrize("path", ["/", "/live", "/ready", "/model", "/metrics", "/page/app.js", "/nowhere"])
def test_head_is_get_without_its_body(path: str, service: Running) -> None:
    expected, content, headers = service.ask(path)
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as sock:
        request = f"HEAD {path} HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\nConnection: close\r\n\r\n"
        sock.sendall(request.encode())
        answer = read_all(sock)
    assert status_of(answer) == expected
    assert f"content-type: {headers['content-type']}".encode() in answer.lower()
    assert answer.endswith(b"\r\n\r\n")
    assert content


@pytest.mark.parametrize("size", [15_000, 20_000, 400_000])
def test_a_header_has_at_most_16_kib_besides_what_is_read_at_once(size: int, service: Running) -> None:
    header = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: " + b"a" * size
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(header)
            time.sleep(0.3)  # read before the end
            sock.sendall(b"\r\n\r\n")
        answer = read_all(sock)
    assert status_of(answer) == (200 if size < 16_000 else 400)


WIRE = {
    "a body in 10,000 pieces of a byte": (
        POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunked([b"x"] * 10_000),
        415,
    ),
    "a body without an end or a length": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % 2_000_000 + b"x" * 2_000_000,
        413,
    ),
    "a length that is a lie": (POST + b"Content-Length: 99999999999\r\n\r\nx", 413),
    "a length below none": (POST + b"Content-Length: -5\r\n\r\nx", 400),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx", 400),
    "a length and pieces": (
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a body that stops": (POST + b"Content-Length: 5000\r\n\r\nxx", 408),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100, 400),
    "a header without end": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 500_000, 400),
    "headers without end": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 100_000, 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    "another protocol": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n",
        200,
    ),
    "a NUL in the path": (b"GET /page/%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    "a path out of the house": (
        b"GET /page/../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        404,
    ),
    "another method": (b"DELETE /predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
}


@pytest.mark.parametrize("case", WIRE)
def test_what_no_client_should_send(case: str, service: Running) -> None:
    data, status = WIRE[case]
    assert status_of(service.raw(data)) == status
    assert service.ask(body=picture(0))[0] == 200


def test_memory_stays_under_abuse(service: Running) -> None:
    from tests.serve.test_service import png_claiming

    hostile = [b"", b"x", png_claiming(60_000, 60_000), b"\xff" * 1_100_000, picture(0)[:150], os.urandom(50_000)]

    def ask(i: int) -> int:
        return service.ask(body=hostile[i % len(hostile)])[0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(60)))
        before = service.rss()
        codes = set(pool.map(ask, range(300)))
    assert codes == {400, 413, 415, 422}
    assert service.rss() - before < 50 << 20


def test_fifty_slow_clients_hold_nobody_up(service: Running) -> None:
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=120)) for _ in range(50)
        ]
        for i, sock in enumerate(slow):
            sock.sendall(POST + b"X-" if i % 2 else POST + b"Content-Length: 1000\r\n\r\nab")
        assert service.ask(body=picture(0))[0] == 200  # while all fifty are connected
        for _ in range(3):  # a byte now and then does not buy time for a body; for a header, a proxy has the limit
            time.sleep(0.8)
            for sock in slow[::2]:
                with contextlib.suppress(OSError):
                    sock.sendall(b"x")
        for sock in slow[::2]:
            assert status_of(read_all(sock)) == 408
        assert service.ask(body=picture(0))[0] == 200


def test_it_finishes_what_it_accepted(model_dir: Path) -> None:
    with (
        running(model_dir, "--max-batch", "1", "--drain", "0.6", program=SLOW.format(seconds=0.15)) as service,
        concurrent.futures.ThreadPoolExecutor(20) as pool,
    ):
        kept = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        kept.request("GET", "/ready")
        assert kept.getresponse().read() == b'{"status":"ready","waiting":0}'
        asking = [pool.submit(service.ask, "/predict", picture(i)) for i in range(16)]
        time.sleep(0.5)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        kept.request("GET", "/ready")  # it still listens, so that a balancer hears it
        assert kept.getresponse().status == 503
        late = service.ask(body=picture(0))
        assert (late[0], late[1]["error"]["code"], late[2]["retry-after"]) == (503, "stopping", "1")
        assert [one.result(timeout=120)[0] for one in asking] == [200] * 16
        kept.close()
        assert service.process.wait(120) == 0
        with pytest.raises(ConnectionRefusedError):
            service.ask("/live")


def test_clients_that_leave_take_their_pictures_along(model_dir: Path) -> None:
    with running(model_dir, "--max-batch", "1", program=SLOW.format(seconds=0.3)) as service:
        before = _computed(service)
        for i in range(10):
            with socket.create_connection(("127.0.0.1", service.port)) as sock:
                data = picture(i)
                sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
                time.sleep(0.03)
        assert service.ask(body=picture(0))[0] == 200
        assert _computed(service) - before <= 4  # what the model had begun, and the last


def _computed(service: Running) -> float:
    text = service.ask("/metrics")[1].decode()
    return float(re.search(r"^weft_batch_images_sum (\S+)", text, re.MULTILINE)[1])


def test_ctrl_c_is_no_error(model_dir: Path) -> None:
    with running(model_dir) as service:
        assert service.stop(signal.SIGINT) == 0


def test_who_sends_a_large_body_learns_that_the_service_stops(model_dir: Path) -> None:
    """Without a reset of the connection, which would hide the response; and nobody is asked to send one."""
    with running(model_dir, "--drain", "5") as service:
        service.process.send_signal(signal.SIGTERM)
        _until(lambda: [503] * (service.ask("/ready")[0] == 503), 1)
        status, found, headers = service.ask(body=bytes(9 << 20))
        assert (status, found["error"]["code"], headers["retry-after"]) == (503, "stopping", "1")
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        assert service.raw(head).startswith(b"HTTP/1.1 503 ")
        assert service.process.wait(60) == 0


def test_workers_that_cannot_start_are_an_error(model_dir: Path) -> None:
    program = (
        "import sys\n"
        "from dataclasses import replace\n"
        "import weft.serve.server as s\n"
        "from weft.cli import main\n"
        "choice = s._choice_of\n"
        "s._choice_of = lambda settings, stops: (replace(settings, runtime='onnx'), choice(settings, stops)[1])\n"
        f"sys.exit(main(['serve', {str(model_dir)!r}, '--port', '0', '--workers', '2']))"
    )
    done = forked.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "a process of the service cannot start: runtime onnx needs an export" in done.stderr
    assert "http://" not in done.stderr


def test_a_model_that_cannot_be_loaded_is_an_error_before_any_worker_starts(model_dir: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"damaged")
    arguments = ["serve", str(folder), "--port", "0", "--workers", "2"]
    code = f"import sys; from weft.cli import main; sys.exit(main({arguments!r}))"
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (4, False)
    assert done.stderr.splitlines()[-1].startswith("weft: "), done.stderr


@pytest.mark.slow
def test_a_new_model_is_taken_without_dropping_a_request(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with running(folder) as service, concurrent.futures.ThreadPoolExecutor(4) as pool:
        before = service.ask(body=picture(0))[1]["answers"][0]["top"]

        def ask(_: int) -> str:
            status, found, _ = service.ask(body=picture(0))
            assert status == 200
            return found["answers"][0]["top"][0]["class"]

        asking = pool.map(ask, range(1500))
        saved(folder, seed=1)
        service.process.send_signal(signal.SIGHUP)
        classes = list(asking)
        after = service.ask(body=picture(0))[1]["answers"][0]["top"]
        assert after[0]["class"] != before[0]["class"]
        assert classes[0] == before[0]["class"]
        assert classes[-1] == after[0]["class"]
        assert set(classes) == {before[0]["class"], after[0]["class"]}
        # what cannot be loaded leaves the old one at work
        (folder / "model.safetensors").write_bytes(b"damaged")
        service.process.send_signal(signal.SIGHUP)
        for _ in range(100):
            text = service.ask("/metrics")[1].decode()
            if 'weft_reloads_total{outcome="failed"} 1.0' in text:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(text)
        assert service.ask(body=picture(0))[1]["answers"][0]["top"][0]["class"] == after[0]["class"]


@pytest.mark.slow
def test_a_worker_that_dies_is_missed_by_nobody_for_long(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with running(folder, "--workers", "2", "--drain", "3", "--host", "0.0.0.0", WEFT_TOKEN="of mine") as service:
        assert "#token=of%20mine" in service.said
        own = {"Authorization": "Bearer of mine"}

        def ask() -> str:
            status, found, _ = service.ask(body=picture(0), headers=own)
            assert status == 200
            return found["answers"][0]["top"][0]["class"]

        begun = time.monotonic()
        while True:  # the processes begin after the address is told
            with contextlib.suppress(OSError, http.client.HTTPException):
                before = ask()
                break
            assert time.monotonic() - begun < 120
        first = _until(lambda: children(service.process.pid), 2)
        os.kill(first[0], signal.SIGSTOP)  # it is asked for its health, and dies before it answers
        time.sleep(1.2)
        os.kill(first[0], signal.SIGKILL)
        time.sleep(0.2)
        assert {ask() for _ in range(10)} == {before}
        _until(lambda: [pid for pid in children(service.process.pid) if pid not in first], 1)
        saved(folder, seed=1)
        for _ in range(3):  # all but the first are one reload after it
            os.kill(service.process.pid, signal.SIGHUP)
        begun = time.monotonic()
        while before in {ask() for _ in range(20)}:  # until both have the new one
            time.sleep(1)
            assert time.monotonic() - begun < 240
        text = service.ask("/metrics", headers=own)[1].decode()
        counted = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("weft_images_total{")]
        assert sum(counted) >= 20
        service.process.send_signal(signal.SIGTERM)
        _until(lambda: [503] * (service.ask("/ready", headers=own)[0] == 503), 1)  # all of them still listen
        assert service.process.wait(120) == 0


def _until(look, count: int, seconds: float = 120) -> list[int]:
    end = time.monotonic() + seconds
    while len(found := look()) < count:
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def test_a_port_in_use_and_a_place_that_is_not_here(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*arguments: str) -> tuple[int, str]:
        return main(["serve", *arguments]), capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert output(str(model_dir), "--port", port) == (
            2,
            "weft: --host must be an address of this machine and --port a free port;"
            f" 127.0.0.1:{port}: Address already in use. Pass another --port, or 0 for any free port.\n",
        )
    code, text = output(str(model_dir), "--host", "203.0.113.9", "--port", "0")
    assert code == 2
    assert "203.0.113.9:0: Cannot assign requested address" in text
    code, text = output(str(model_dir), "--runtime", "openvino", "--port", "0")
    assert code == 2
    assert "runtime openvino needs an export in or next to" in text
    code, text = output("nowhere", "--port", "0")
    assert code == 4
    code, text = output(str(model_dir), "--max-batch", "many")
    assert code == 2
    assert "--max-batch must be a whole number; got 'many'" in text


def test_other_machines_need_the_token_that_is_printed(model_dir: Path) -> None:
    with running(model_dir, "--host", "0.0.0.0") as service:
        token = re.search(r"#token=(\S+)", service.said)[1]
        assert service.ask("/model")[0] == 401
        assert service.ask("/model", headers={"Authorization": f"Bearer {token}"})[0] == 200
        assert service.ask("/live", headers={"Host": "192.168.1.5:8000"})[0] == 200
        assert service.ask("/live", headers={"Host": "evil.example"})[0] == 421
    with running(model_dir, "--host", "0.0.0.0", "--name", "pictures.example", WEFT_TOKEN="of mine") as service:
        assert "#token=of%20mine" in service.said
        arguments = {"Host": "pictures.example", "Authorization": "Bearer of mine"}
        assert service.ask("/model", headers=arguments)[0] == 200


@pytest.mark.slow
def test_the_description_is_kept_under_fuzz(service: Running, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    report = tmp_path / "report.json"
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
    report.write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert service.ask(body=picture(0))[0] == 200


def test_what_is_not_installed_is_said(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "fastapi" else real(name, *more)
    )
    assert main(["serve", str(model_dir)]) == 2
    expected = "weft: fastapi is needed for this, and is not installed. Run: pip install 'weft-vision[serve]'\n"
    assert capsys.readouterr().err == expected
