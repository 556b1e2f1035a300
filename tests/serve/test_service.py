"""The routes, in this process: answers, refusals, limits, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import uvicorn.supervisors.multiprocess
from PIL import Image
from starlette.requests import Request
from uvicorn.config import STARTUP_FAILURE
from uvicorn.server import ServerState

from tests.helpers import lively
from tests.serve.running import NAMES, picture, saved
from weft.checkpoints import load_model_dir, save_model_dir
from weft.checkpoints.resolve import find_model
from weft.data.preprocessing import eval_transform
from weft.deploy import export, runtimes
from weft.deploy.model import ModelInfo
from weft.errors import CheckpointError, UsageError, WeftError
from weft.inference import open_model, opening
from weft.inference.predictor import NonFiniteError, Predictor
from weft.interpret import explain
from weft.serve import decoding, guard, server
from weft.serve import service as service_module
from weft.serve.app import create_app
from weft.serve.metrics import MULTIPROC_DIR
from weft.serve.settings import Settings
from weft.train import predict
from weft.version import __version__


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("served") / "model")


@contextlib.asynccontextmanager
async def client_of(settings: Settings, predictor: Predictor | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    app = create_app(settings, predictor)
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        client.service = app.state.service
        yield client


def with_client(
    body: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, None]],
    model_dir: Path,
    predictor: Predictor | None = None,
    **limits: Any,
) -> None:
    async def go() -> None:
        async with client_of(Settings(run=str(model_dir), **limits), predictor) as client:
            await body(client)

    asyncio.run(go())


async def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    """Waits for a condition; fails when it takes too long."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.005)


def first(run: Path, runtime: str = "auto") -> Path:
    """What answers for a run."""
    return candidates(run, runtime)[0]


def candidates(run: Path, runtime: str = "auto", log: Callable[[str], None] = print) -> list[Path]:
    """What may answer for a run, as expected of its speed."""
    return [one.path for one in opening.candidates(run, find_model(run), runtime, "fp32", log)]


class Slow(Predictor):
    """Waits to be let go before it answers; notes the sizes of its batches."""

    def __init__(self, model_dir: Path, seconds: float = 0.0) -> None:
        super().__init__(open_model(model_dir))
        self.seconds, self.sizes, self.may_go = seconds, [], threading.Event()
        self.may_go.set()

    def predict(self, photos, *, overlay=False):
        self.may_go.wait(20)
        time.sleep(self.seconds)
        self.sizes.append(len(photos))
        return super().predict(photos, overlay=overlay)


def test_one_picture_is_named_as_predict_names_it(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture(1))
    expected = predict(model_dir, path)[0].top

    async def body(client: httpx2.AsyncClient) -> None:
        for headers in ({"content-type": "image/png"}, {"content-type": "application/octet-stream"}, {}):
            response = await client.post("/predict", content=path.read_bytes(), headers=headers)
            assert response.status_code == 200, response.text
            (answer,) = response.json()["answers"]
            assert [(item["class"], item["probability"]) for item in answer["top"]] == expected  # the same bits
        response = await client.post("/predict?top_k=2", content=path.read_bytes())
        assert len(response.json()["answers"][0]["top"]) == 2

    with_client(body, model_dir)


def test_many_pictures_of_which_some_are_bad(model_dir: Path) -> None:
    files = [
        ("image", ("a.png", picture(1))),
        ("image", ("../../b\x01<b>.txt", b"no picture")),
        ("image", ("c.png", picture(3)[:300])),
        ("anything", ("d.jpg", picture(4, format="JPEG"))),
    ]

    async def body(client: httpx2.AsyncClient) -> None:
        alone = [
            (await client.post("/predict", content=picture(1))).json()["answers"][0]["top"],
            (await client.post("/predict", content=picture(4, format="JPEG"))).json()["answers"][0]["top"],
        ]
        response = await client.post("/predict", files=files)
        assert response.status_code == 200
        first, second, third, fourth = response.json()["answers"]
        assert second["error"]["code"] == "not-an-image"
        assert "/" not in second["image"]
        assert "\x01" not in second["image"]
        assert third["error"]["code"] == "truncated"
        for answer, expected in zip((first, fourth), alone, strict=True):
            assert [item["class"] for item in answer["top"]] == [item["class"] for item in expected]
            for one, other in zip(answer["top"], expected, strict=True):
                assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)

    with_client(body, model_dir)


def png_claiming(height: int, width: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


FORMED = b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\nno image\r\n--x--\r\n'
FORM = {"content-type": "multipart/form-data; boundary=x"}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "nothing": (dict(content=b""), 400, "zero-byte"),
    "one byte": (dict(content=b"x"), 415, "not-an-image"),
    "text": (dict(content=b"GET / HTTP/1.1\r\n" * 100), 415, "not-an-image"),
    "svg with a script": (dict(content=b"<svg onload='alert(1)'/>"), 415, "not-an-image"),
    "a pickle": (dict(content=b"\x80\x04\x95cos\nsystem\n(S'touch x'\ntR."), 415, "not-an-image"),
    "truncated": (dict(content=picture(0)[:200]), 400, "truncated"),
    "a header alone": (dict(content=b"\x89PNG\r\n\x1a\n" + b"\0" * 40), 400, "damaged"),
    "a bomb": (dict(content=png_claiming(60_000, 60_000)), 422, "too-many-pixels"),
    "just too many pixels": (dict(content=png_claiming(10_000, 10_001)), 422, "too-many-pixels"),
    "too many bytes": (dict(content=b"\xff" * 200_001), 413, "too-large"),
    "packed": (dict(content=zlib.compress(picture(0)), headers={"content-encoding": "gzip"}), 415, "packed"),
    "a form for a URL": (dict(data={"url": "http://169.254.169.254/"}), 415, "content-type"),
    "JSON": (dict(json={"image": "aGk="}), 415, "content-type"),
    "a form without a file": (
        dict(content=b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n', headers=FORM),
        400,
        "no-image",
    ),
    "a form without a boundary": (dict(content=b"--x", headers={"content-type": "multipart/form-data"}), 400, "form"),
    "a form of an unknown charset": (
        dict(content=FORMED, headers={"content-type": "multipart/form-data; charset=undefined; boundary=x"}),
        415,
        "not-an-image",
    ),
    "a boundary of another script": (
        dict(content=FORMED, headers={"content-type": "multipart/form-data; boundary=é".encode("latin-1")}),
        400,
        "form",
    ),
    "no form": (dict(content=b"\0" * 999, headers=FORM), 400, "form"),
    "a form that ends too early": (
        dict(content=b'--x\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n', headers=FORM),
        400,
        "form",
    ),
    "a form with endless headers": (dict(content=b"--x\r\n" + b"A: b\r\n" * 9999, headers=FORM), 400, "form"),
    "too many files": (dict(files=[("image", ("a.png", picture(0)))] * 5), 413, "too-many-images"),
    "too many fields": (
        dict(content=b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * 50 + b"--x--\r\n", headers=FORM),
        400,
        "form",
    ),
    "a long field": (
        dict(
            content=b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"b" * 9999 + b"\r\n--x--\r\n",
            headers=FORM,
        ),
        400,
        "form",
    ),
    "top_k of none": (dict(content=picture(0), params={"top_k": 0}), 422, "parameter"),
    "top_k of many": (dict(content=picture(0), params={"top_k": 10**30}), 422, "parameter"),
    "top_k of words": (dict(content=picture(0), params={"top_k": "all"}), 422, "parameter"),
}


def test_a_body_of_another_type_is_told_which(model_dir: Path) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        headers = {"content-type": "application/x-www-form-urlencoded"}  # curl's own
        response = await client.post("/predict", content=picture(0), headers=headers)
        assert response.json()["error"]["message"] == (
            "The Content-Type must be image/* or application/octet-stream for one image, or multipart/form-data for"
            " several; got application/x-www-form-urlencoded. With curl --data-binary, add -H 'Content-Type:"
            " image/jpeg'."
        )

    with_client(body, model_dir)


@pytest.mark.slow_except(
    "a form for a URL",
    "a form of an unknown charset",
    "packed",
    "text",
    "JSON",
    "a long field",
    "a bomb",
    "truncated",
    "a form without a file",
    "one byte",
    "a form without a boundary",
    "just too many pixels",
)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_a_sentence_and_disturbs_nobody(case: str, model_dir: Path) -> None:
    arguments, status, code = REFUSED[case]

    async def body(client: httpx2.AsyncClient) -> None:
        response, good = await asyncio.gather(
            client.post("/predict", **arguments), client.post("/predict", content=picture(1))
        )
        assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
        error = response.json()["error"]
        assert error["message"].endswith(".")
        assert error["request_id"] == response.headers["x-request-id"]
        assert str(model_dir) not in response.text
        assert "Traceback" not in response.text
        assert good.status_code == 200

    with_client(body, model_dir, max_bytes=200_000, max_images=4)


ATTACKS: dict[str, tuple[str, str, dict[str, str], int]] = {
    "a page of another site": ("POST", "/predict", {"origin": "http://evil.example"}, 403),
    "a page in a sandbox": ("POST", "/predict", {"origin": "null"}, 403),
    "a page of another port": ("POST", "/predict", {"origin": "http://localhost:3000"}, 403),
    "a form of another site": ("POST", "/predict", {"sec-fetch-site": "cross-site"}, 403),
    "a preflight": (
        "OPTIONS",
        "/predict",
        {"origin": "http://evil.example", "access-control-request-method": "POST"},
        403,
    ),
    "a name of another": ("GET", "/", {"host": "evil.example"}, 421),
    "a name that begins well": ("GET", "/", {"host": "localhost.evil.example"}, 421),
    "a name with a user": ("GET", "/", {"host": "localhost@evil.example"}, 421),
    "an address of another": ("GET", "/", {"host": "192.168.0.7"}, 421),
    "no name": ("GET", "/", {"host": ""}, 421),
    "a host that is none": ("GET", "/", {"host": "[::1"}, 421),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_browsers_of_this_machine_cannot_be_used_by_other_sites(case: str, model_dir: Path) -> None:
    method, path, headers, status = ATTACKS[case]

    async def body(client: httpx2.AsyncClient) -> None:
        response = await client.request(method, path, content=picture(0), headers=headers)
        assert response.status_code == status, response.text
        assert not [name for name in response.headers if name.startswith("access-control")]

    with_client(body, model_dir)


def test_its_own_page_may_ask(model_dir: Path) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        own = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
        assert (await client.post("/predict", content=picture(0), headers=own)).status_code == 200
        for host in ("127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
            assert (await client.get("/live", headers={"host": host})).status_code == 200
        page = await client.get("/")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        for name in ("app.js", "style.css", "icon.svg"):
            assert f'"/page/{name}"' in page.text
            assert (await client.get(f"/page/{name}")).status_code == 200
        for path in ("/page/index.htm", "/page/", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/docs", "/redoc"):
            assert (await client.get(path)).status_code == 404, path

    with_client(body, model_dir)


def test_a_service_for_others_asks_for_its_token(model_dir: Path) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        for path in ("/model", "/metrics", "/openapi.json"):
            response = await client.get(path)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), path
        for wrong in ("Bearer ", "Bearer secre", "bearer secret", "Basic secret", "Bearer sécret"):
            headers = {"authorization": wrong.encode()}
            assert (await client.post("/predict", content=picture(0), headers=headers)).status_code == 401
        right = {"authorization": "Bearer secret"}
        assert (await client.post("/predict", content=picture(0), headers=right)).status_code == 200
        for path in ("/", "/live", "/ready", "/health", "/page/app.js"):
            assert (await client.get(path)).status_code == 200, path

    with_client(body, model_dir, host="0.0.0.0", names=("localhost",), token="secret")


def test_pictures_of_many_clients_share_a_forward_pass(model_dir: Path) -> None:
    slow = Slow(model_dir)

    async def body(client: httpx2.AsyncClient) -> None:
        slow.may_go.clear()
        first = asyncio.create_task(client.post("/predict", content=picture(0)))
        await until(lambda: client.service.batcher.pending == 1)
        await until(lambda: client.service.batcher.pending == 0)  # the model has it
        rest = [asyncio.create_task(client.post("/predict", content=picture(i))) for i in range(20)]
        await until(lambda: client.service.batcher.waiting == 20)
        slow.may_go.set()
        responses = await asyncio.gather(first, *rest)
        assert all(response.status_code == 200 for response in responses)
        assert slow.sizes == [1, 16, 4]
        for i, response in enumerate(responses[1:]):  # each got its own answer
            alone = (await client.post("/predict", content=picture(i))).json()["answers"][0]["top"]
            together = response.json()["answers"][0]["top"]
            assert [item["class"] for item in together] == [item["class"] for item in alone]
            assert together[0]["probability"] == pytest.approx(alone[0]["probability"], abs=1e-5)

    with_client(body, model_dir, slow, max_batch=16)


def test_too_many_are_told_when_to_come_again(model_dir: Path) -> None:
    slow = Slow(model_dir, 0.05)

    async def body(client: httpx2.AsyncClient) -> None:
        slow.may_go.clear()
        asking = [asyncio.create_task(client.post("/predict", content=picture(i))) for i in range(64)]
        await until(
            lambda: 0 < client.service.batcher.waiting == client.service.batcher.pending < 16
        )  # the model has some
        asking += [asyncio.create_task(client.post("/predict", content=picture(i))) for i in range(16)]
        async with asyncio.timeout(120):
            while (await client.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
        assert (await client.get("/live")).status_code == 200  # while the model computes
        slow.may_go.set()
        responses = await asyncio.gather(*asking)
        codes = [response.status_code for response in responses]
        assert set(codes) == {200, 429}
        assert 16 < codes.count(200) <= 24  # what waited, and what the model had
        for response in responses:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "queue-full"
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/predict", content=picture(0))).status_code == 200

    with_client(body, model_dir, slow, max_batch=4, max_queue=16)


def test_a_deadline_and_a_client_that_leaves_take_their_pictures_along(model_dir: Path) -> None:
    slow = Slow(model_dir)

    async def body(client: httpx2.AsyncClient) -> None:
        slow.may_go.clear()
        first = asyncio.create_task(client.post("/predict", content=picture(0)))
        await asyncio.sleep(0.1)
        leaving = asyncio.create_task(client.post("/predict", content=picture(1)))
        late = asyncio.create_task(client.post("/predict", content=picture(2)))
        await asyncio.sleep(0.1)
        leaving.cancel()
        responses = await asyncio.gather(first, late)
        assert [response.status_code for response in responses] == [504, 504]
        assert responses[0].json()["error"]["code"] == "too-late"
        slow.may_go.set()
        await asyncio.sleep(0.1)
        assert slow.sizes == [1]  # what was begun; the others were never computed
        assert (await client.post("/predict", content=picture(3))).status_code == 200

    with_client(body, model_dir, slow, timeout=1.5, max_batch=32)


def test_a_model_that_fails_is_no_fault_of_the_picture(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Slow(model_dir)

    async def body(client: httpx2.AsyncClient) -> None:
        with torch.no_grad():
            for parameter in broken.model.running.parameters():
                parameter.fill_(float("nan"))
        response = await client.post("/predict", content=picture(0))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model-fault")
        broken.predict = lambda photos, *, overlay=False: 1 / 0
        response = await client.post("/predict", content=picture(0))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model-fault")
        assert "ZeroDivisionError" not in response.text
        assert (await client.get("/ready")).status_code == 200

    with_client(body, model_dir, broken)
    output = capsys.readouterr().err
    assert "ZeroDivisionError" in output
    assert "the model failed" in output


@pytest.mark.parametrize("name", ["ceit_nano_32", "cvt_nano_32", "levit_nano_32"])
def test_the_overlay_is_what_explain_shows(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", model=name)
    network, _ = load_model_dir(folder)
    saliency = explain(network, Image.open(io.BytesIO(picture(1))).convert("RGB"), grad_cam=False).saliency

    async def body(client: httpx2.AsyncClient) -> None:
        answer = (await client.post("/predict?overlay=true", content=picture(1))).json()["answers"][0]
        grid = np.array(answer["overlay"]["grid"])
        assert grid.min() == 0
        assert grid.max() == 1
        np.testing.assert_allclose(grid, (saliency - saliency.min()) / (saliency.max() - saliency.min()), atol=2e-3)
        plain = (await client.post("/predict", content=picture(1))).json()["answers"][0]
        assert "overlay" not in plain
        assert answer["top"][0]["probability"] == pytest.approx(plain["top"][0]["probability"], abs=1e-5)

    with_client(body, folder)


def test_the_overlay_costs_no_second_forward_pass(model_dir: Path) -> None:
    predictor = Predictor(open_model(model_dir))
    calls = []
    predictor.model.running.register_forward_hook(lambda *_: calls.append(1))
    predictor.predict([predictor.prepare(picture(0))], overlay=True)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("cfg", "size"),
    [
        (dict(input_size=(3, 32, 32), crop_pct=1.0, crop_mode="center"), (40, 80)),
        (dict(input_size=(3, 64, 64), crop_pct=0.8, crop_mode="center"), (300, 200)),
        (dict(input_size=(3, 48, 64), crop_pct=0.9, crop_mode="center"), (200, 200)),
        (dict(input_size=(3, 64, 64), crop_pct=0.8, crop_mode="squash"), (300, 150)),
        (dict(input_size=(3, 64, 64), crop_pct=1.0, crop_mode="border"), (100, 200)),
    ],
)
def test_the_region_is_what_the_transform_leaves(cfg: dict[str, Any], size: tuple[int, int]) -> None:
    height, width = size
    places = np.zeros((height, width, 3), np.uint8)  # red tells the column, green the row, blue what is picture
    places[..., 0] = np.linspace(0, 255, width)[None]
    places[..., 1] = np.linspace(0, 255, height)[:, None]
    places[..., 2] = 255
    transform: Any = eval_transform({**cfg, "mean": (0, 0, 0), "std": (1, 1, 1), "interpolation": "bilinear"})
    seen = transform(Image.fromarray(places)).numpy()
    inside = seen[2] > 0.99
    left, top, wide, high = eval_transform(cfg).region(*size)
    expected = (max(left, 0), max(top, 0), min(left + wide, 1), min(top + high, 1))
    found_there = (seen[0][inside].min(), seen[1][inside].min(), seen[0][inside].max(), seen[1][inside].max())
    assert found_there == pytest.approx(expected, abs=0.02)


def test_metrics_add_up(model_dir: Path) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        for i in range(5):
            await client.post("/predict", content=picture(i))
        await client.post("/predict", content=b"x")
        for i in range(3):
            await client.get(f"/strangers/{i}")
        text = (await client.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines['weft_requests_total{code="200",method="POST",path="/predict"}'] == "5.0"
        assert lines['weft_requests_total{code="415",method="POST",path="/predict"}'] == "1.0"
        assert lines['weft_requests_total{code="404",method="GET",path="other"}'] == "3.0"
        assert lines['weft_images_total{outcome="answered"}'] == "5.0"
        assert lines['weft_images_total{outcome="not-an-image"}'] == "1.0"
        assert lines["weft_batch_images_sum"] == "5.0"
        assert lines["weft_waiting_images"] == "0.0"
        assert "strangers" not in text

    with_client(body, model_dir)


def test_the_log_has_a_line_per_answer_and_nobody_writes_into_it(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        await client.post("/predict?top_k=1", content=picture(0))
        await client.get("/x%0aweft:%20200%20GET%20/forged")

    with_client(body, model_dir, log=True)
    first, second = [line for line in capsys.readouterr().err.splitlines() if "ms " in line]
    assert re.fullmatch(r"weft: 200 POST /predict \d+\.\d ms [0-9a-f]{12}", first)
    assert re.fullmatch(r"weft: 404 GET /x\\nweft: 200 GET /forged \d+\.\d ms [0-9a-f]{12}", second)


def test_the_description_names_every_way_in(model_dir: Path) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        described = (await client.get("/openapi.json")).json()
        assert set(described["paths"]) == {"/predict", "/model", "/live", "/ready", "/health", "/metrics"}
        assert set(described["paths"]["/predict"]["post"]["requestBody"]["content"]) == {
            "image/*",
            "application/octet-stream",
            "multipart/form-data",
        }
        fields = (await client.get("/model")).json()
        assert fields["classes"] == NAMES
        assert fields["input"] == {"channels": 3, "height": 32, "width": 32}
        assert str(model_dir) not in json.dumps([described, fields])

    with_client(body, model_dir)


def test_a_model_without_class_names_answers_in_numbers(tmp_path: Path) -> None:

    save_model_dir(lively("ceit_nano_32", num_classes=3), tmp_path / "model")

    async def body(client: httpx2.AsyncClient) -> None:
        top = (await client.post("/predict", content=picture(0))).json()["answers"][0]["top"]
        assert sorted(item["class"] for item in top) == ["0", "1", "2"]

    with_client(body, tmp_path / "model")


def test_a_picture_of_one_pixel(model_dir: Path) -> None:
    async def body(client: httpx2.AsyncClient) -> None:
        assert (await client.post("/predict?overlay=true", content=picture(0, size=1))).status_code == 200

    with_client(body, model_dir)


def test_a_neighbour_that_may_not_be_read_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /root beside /model in a container."""
    folder = saved(tmp_path / "model")
    (tmp_path / "root").mkdir()
    stat = Path.stat

    def guarded(self: Path, **more: Any) -> os.stat_result:
        if self.parent == tmp_path / "root":
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **more)

    monkeypatch.setattr(Path, "stat", guarded)
    assert first(folder) == folder


@pytest.mark.slow
def test_the_best_export_beside_the_model_answers(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    folder = saved(tmp_path / "run" / "best")
    model, names = load_model_dir(folder)
    assert first(tmp_path / "run") == folder
    export(model, tmp_path / "run" / "slow", format="onnx", label_names=names)
    assert first(tmp_path / "run") == tmp_path / "run" / "slow"
    export(model, tmp_path / "run" / "quick", format="openvino", label_names=names)
    assert first(tmp_path / "run") == tmp_path / "run" / "quick"
    assert first(tmp_path / "run", "onnx") == tmp_path / "run" / "slow"
    assert first(tmp_path / "run", "torch") == folder
    assert first(tmp_path / "run" / "slow") == tmp_path / "run" / "slow"
    with pytest.raises(UsageError, match="runtime must be that of the export, onnx; got torch"):
        first(tmp_path / "run" / "slow", "torch")
    with pytest.raises(CheckpointError, match="is neither"):
        first(tmp_path / "nowhere")
    torch_one = Predictor.open(tmp_path / "run", runtime="torch")
    for runtime in ("onnx", "openvino"):
        other = Predictor.open(tmp_path / "run", runtime=runtime)
        photos = [other.prepare(picture(i)) for i in range(3)]
        for one, two in zip(torch_one.predict(photos, overlay=True), other.predict(photos, overlay=True), strict=True):
            np.testing.assert_allclose(one.probabilities, two.probabilities, atol=1e-4)
            assert one.overlay is not None
            assert two.overlay is not None
            np.testing.assert_allclose(one.overlay.grid, two.overlay.grid, atol=1e-3)
    # trained anew: what was exported before is of another model
    saved(tmp_path / "run" / "best", seed=1)
    assert first(tmp_path / "run") == folder
    with pytest.raises(UsageError, match="runtime openvino needs an export in or next to"):
        first(tmp_path / "run", "openvino")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(runtime="tensorrt"), "runtime must be one of auto, torch, openvino, onnx; got 'tensorrt'"),
        (dict(port=70000), "port must be a whole number at least 0 and at most 65535; got 70000"),
        (dict(max_batch=0), "max_batch must be a whole number at least 1 and at most 4096; got 0"),
        (dict(max_batch=4097), "max_batch must be a whole number at least 1 and at most 4096; got 4097"),
        (dict(port=3.5), "port must be a whole number at least 0 and at most 65535; got 3.5"),
        (dict(workers=None), "workers must be a whole number at least 1 and at most 1024; got null"),
        (dict(timeout="3"), "timeout must be a number above 0 and at most 3600 s; got '3'"),
        (dict(device="tpu"), "device must be one of auto, cpu, cuda, mps; got 'tpu'"),
        (dict(precision="int3"), "precision must be one of auto, fp32, bf16; got 'int3'"),
        (dict(threads=-4), "threads must be a whole number at least 1 and at most 1024; got -4"),
        (dict(threads=5000), "threads must be a whole number at least 1 and at most 1024; got 5000"),
        (dict(reject_at_error=7.0), "reject_at_error must be a number at least 0 and below 1; got 7"),
        (dict(max_latency=0), "max_latency must be a number above 0 and at most 60 s; got 0"),
        (dict(timeout=0), "timeout must be a number above 0 and at most 3600 s; got 0"),
        (dict(timeout=float("nan")), "timeout must be a number above 0 and at most 3600 s; got nan"),
        (dict(max_wait=-1), "max_wait must be a number at least 0 and at most 1 s; got -1"),
        (dict(max_queue=8, max_images=9), "max_queue must be at least max_images, 9, so that one request fits; got 8"),
        (dict(is_open=True, token="x"), "got both WEFT_TOKEN and --no-token"),
        (dict(proxies=("bad",)), r"A proxy must be an address, a network such as 10.0.0.0/8, or \*; got 'bad'"),
        (dict(names=("a b",)), "A name must be a host name without a port; got 'a b'"),
        (dict(names="a"), "names must be a list; got 'a'"),
        (dict(is_open=1), "is_open must be true or false; got 1"),
        (dict(names=("a:80",)), "A name must be a host name without a port; got 'a:80'"),
    ],
)
def test_settings_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(run="x", **arguments)


def exported(folder: Path, name: str, seed: int = 0) -> Path:
    """A model directory in a run, and an export of it beside it."""
    best = saved(folder / "best", seed=seed)
    model, names = load_model_dir(best)
    export(model, folder / name, format="onnx", label_names=names)
    return best


@pytest.mark.slow
def test_only_an_export_of_the_same_weights_answers(tmp_path: Path) -> None:
    """Same architecture, classes and preprocessing, newer than the model, and of another training."""
    exported(tmp_path / "one", "onnx")
    other = saved(tmp_path / "two" / "best", seed=1)
    shutil.copytree(tmp_path / "one" / "onnx", tmp_path / "two" / "onnx")
    messages: list[str] = []
    assert candidates(tmp_path / "two", log=messages.append) == [other]
    assert "onnx is skipped: it does not record that it was made from these weights" in messages[0]
    assert candidates(tmp_path / "one") == [tmp_path / "one" / "onnx", tmp_path / "one" / "best"]
    with pytest.raises(UsageError, match="there is none that fits"):
        candidates(tmp_path / "two", "onnx")


@pytest.mark.slow
def test_an_export_that_does_not_record_its_weights_is_served_by_its_own_path_only(tmp_path: Path) -> None:
    best = exported(tmp_path, "onnx")
    config = json.loads((tmp_path / "onnx" / "config.json").read_text())
    del config["artefact"]["weights_sha256"]
    (tmp_path / "onnx" / "config.json").write_text(json.dumps(config))
    messages: list[str] = []
    assert candidates(tmp_path, log=messages.append) == [best]
    assert "Export the model again" in messages[0]
    assert Predictor.open(tmp_path / "onnx").metadata["runtime"] == "onnx"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_export_of_another_user_is_skipped(tmp_path: Path) -> None:
    best = exported(tmp_path, "onnx")
    os.chown(tmp_path / "onnx" / "config.json", 12345, 12345)
    messages: list[str] = []
    assert candidates(tmp_path, log=messages.append) == [best]
    assert "belongs to another user" in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["the graph", "the config", "the graph, with its checksum"])
def test_a_damaged_neighbour_is_told_and_skipped(tmp_path: Path, damage: str) -> None:
    exported(tmp_path, "onnx")
    file = tmp_path / "onnx" / ("config.json" if damage == "the config" else "model.onnx")
    file.write_bytes(file.read_bytes()[:500])
    if damage == "the graph, with its checksum":
        config = json.loads((tmp_path / "onnx" / "config.json").read_text())
        config["artefact"]["sha256"]["model.onnx"] = hashlib.sha256(file.read_bytes()).hexdigest()
        (tmp_path / "onnx" / "config.json").write_text(json.dumps(config))
    messages: list[str] = []
    assert Predictor.open(tmp_path, log=messages.append).metadata["runtime"] == "torch"
    assert len(messages) == 1
    assert "is skipped" in messages[0]
    with pytest.raises(CheckpointError):
        Predictor.open(tmp_path / "onnx")


class Ends(Exception):
    """Ends a service that is not to run."""


def test_exports_are_timed_with_the_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = []

    def choice_of(settings: Settings, is_stopping: Callable[[], bool]) -> None:
        used.append(settings.threads)
        raise Ends

    monkeypatch.setattr(server, "_choice_of", choice_of)
    monkeypatch.setattr(server, "num_threads", lambda: 6)
    with pytest.raises(Ends):
        server.serve(Settings(run="model", port=0, workers=2))
    assert used == [3]


def test_the_threads_are_set_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every server: `weft serve`, Ray Serve and others."""
    calls: list[object] = []
    monkeypatch.setattr(service_module, "set_num_threads", calls.append)
    monkeypatch.setattr(Predictor, "open", lambda run, **_: calls.append(run))
    service_module.load_predictor(Settings(run="model", threads=2))
    assert calls == [2, "model"]


def test_the_model_has_the_size_of_the_settings(model_dir: Path) -> None:
    served = service_module.load_predictor(Settings(run=model_dir, img_size=(48, 64)))
    assert served.metadata["input"] == {"channels": 3, "height": 48, "width": 64}
    assert len(served.predict([served.prepare(picture(0))])) == 1


@pytest.mark.parametrize("host", ["a..b", ".x", "a" * 64])
def test_a_host_that_is_no_host_name(host: str) -> None:
    with pytest.raises(UsageError, match=rf"name or address of this machine; {host}:0: not a host name\."):
        server.serve(Settings(run="model", host=host, port=0))


METRICS = """
import sys
from weft.serve.metrics import Metrics
metrics = Metrics()
metrics.waiting.set(int(sys.argv[1]))
print(metrics.text().decode())
"""


def test_metrics_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTIPROC_DIR, str(tmp_path))
    for waiting in ("2", "3"):  # the first process leaves its files, as one that runs
        done = subprocess.run([sys.executable, "-c", METRICS, waiting], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "weft_waiting_images 5.0" in lines
    assert f'weft_build_info{{version="{__version__}"}} 1.0' in lines


class Worker:
    """Stands for a worker process of uvicorn."""

    child_conn = SimpleNamespace(close=lambda: None)
    numbers = itertools.count(101)

    def __init__(self, *_: object, ended: int | None = None, is_ready: bool = True) -> None:
        self.pid, self.exitcode, self.ready, self.started = next(self.numbers), ended, is_ready, False

    def is_ready(self, timeout: float) -> bool:
        return self.ready and self.exitcode is None

    def wait_until_ready(self, timeout: float, should_exit: object) -> bool:
        return self.ready

    def is_alive(self, timeout: float) -> bool:
        return self.exitcode is None

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def join(self) -> None: ...

    def start(self) -> None:
        self.started = True


METADATA = {"architecture": "x", "classes": [], "runtime": "torch", "precision": "fp32"}


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> server._Supervisor:
    """One that has not installed its signal handlers, of workers that are not processes."""
    monkeypatch.setenv(MULTIPROC_DIR, str(tmp_path))
    monkeypatch.setattr(uvicorn.supervisors.multiprocess, "Process", Worker)
    monkeypatch.setattr(uvicorn.supervisors.multiprocess, "SIGNALS", {})
    monkeypatch.setattr(server, "_choice_of", lambda settings, is_stopping: (settings, METADATA))
    announced: list[Any] = []
    made = server._Supervisor(Settings(run="x", workers=2), None, announced.append)
    made.announced = announced
    return made


def test_a_worker_that_has_ended_has_no_gauges(supervisor: server._Supervisor, tmp_path: Path) -> None:
    supervisor.processes = [Worker(), Worker()]
    supervisor.keep_subprocess_alive()
    gone, other = (process.pid for process in supervisor.processes)
    for pid in (gone, other):
        (tmp_path / f"gauge_livesum_{pid}.db").touch()
    supervisor.processes[0].exitcode = 1
    supervisor.keep_subprocess_alive()
    assert [file.name for file in tmp_path.iterdir()] == [f"gauge_livesum_{other}.db"]
    assert supervisor.processes[0].started
    assert [process.pid == other for process in supervisor.processes] == [False, True]


def test_a_worker_that_cannot_start_ends_the_service(supervisor: server._Supervisor) -> None:
    supervisor.processes = [Worker(), Worker(ended=STARTUP_FAILURE)]
    supervisor.keep_subprocess_alive()
    assert supervisor.should_exit.is_set()


def test_a_service_with_workers_is_open_when_the_first_one_is_ready(supervisor: server._Supervisor) -> None:
    supervisor.processes = [Worker(is_ready=False), Worker(is_ready=False)]
    supervisor.keep_subprocess_alive()
    assert supervisor.announced == []
    supervisor.processes[1].ready = True
    for _ in range(2):
        supervisor.keep_subprocess_alive()
        assert supervisor.announced == [METADATA]


def test_a_reload_replaces_the_workers_by_those_of_the_new_choice(
    supervisor: server._Supervisor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that still start: they may have read the model before it changed."""
    supervisor.processes = first = [Worker(), Worker(is_ready=False)]
    first = list(first)
    supervisor.keep_subprocess_alive()
    chosen = Settings(run="other", workers=2)
    monkeypatch.setattr(server, "_choice_of", lambda settings, is_stopping: (chosen, METADATA))
    supervisor.handle_hup()
    assert not set(first) & set(supervisor.processes)
    assert supervisor.config.app.args[1] is chosen
    assert supervisor.config.timeout_worker_healthcheck == server.HEALTH_SECONDS
    assert "the model was reloaded." in capsys.readouterr().err


def test_signals_that_come_together_are_one_reload(supervisor: server._Supervisor) -> None:
    calls: list[str] = []
    supervisor.restart_all = lambda: calls.append("reload")
    supervisor.handle_ttou = lambda: calls.append("one less")
    uvicorn.supervisors.multiprocess.SIGNALS.update({signal.SIGHUP: "HUP", signal.SIGTTOU: "TTOU"})
    supervisor.signal_queue += [signal.SIGHUP, signal.SIGHUP, signal.SIGTTOU, signal.SIGHUP]
    supervisor.handle_signals()
    assert sorted(calls) == ["one less", "reload"]


def test_a_model_that_cannot_be_loaded_leaves_the_workers(
    supervisor: server._Supervisor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor.processes = first = [Worker(), Worker()]

    def choice_of(settings: Settings, is_stopping: Callable[[], bool]) -> None:
        raise CheckpointError("x must have weights; it has none.")

    monkeypatch.setattr(server, "_choice_of", choice_of)
    supervisor.handle_hup()
    assert supervisor.processes is first
    assert capsys.readouterr().err == (
        "weft: the model was not reloaded; the current model keeps serving: x must have weights; it has none.\n"
    )


def test_a_reload_that_is_asked_for_during_another_one_follows_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, loads = threading.Event(), []

    def load(settings: Settings) -> Any:
        loads.append(len(loads))
        go.wait(20)
        return SimpleNamespace(metadata={"runtime": "onnx", "precision": f"of load {loads[-1]}"}, warmed_up=str)

    monkeypatch.setattr(service_module, "load_predictor", load)

    async def body(client: httpx2.AsyncClient) -> None:
        client.service.begin_reload()
        await until(lambda: loads == [0])
        client.service.begin_reload()
        client.service.begin_reload()
        go.set()
        await until(lambda: not client.service.is_reloading)
        assert loads == [0, 1]
        assert client.service.predictor.metadata["precision"] == "of load 1"

    with_client(body, model_dir, max_batch=1)


def test_the_limit_of_batches_stays_for_a_model_that_runs_alike(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement during a reload would be disturbed by the requests that are answered meanwhile."""

    async def body(client: httpx2.AsyncClient) -> None:
        client.service.max_batch = 7
        monkeypatch.setattr(service_module, "_max_batch", lambda *_: 3)
        client.service.begin_reload()
        await until(lambda: not client.service.is_reloading)
        assert client.service.batcher.max_batch == client.service.max_batch == 7
        other = SimpleNamespace(metadata=client.service.predictor.metadata | {"runtime": "onnx"}, warmed_up=str)
        monkeypatch.setattr(service_module, "load_predictor", lambda settings: other)
        client.service.begin_reload()
        await until(lambda: not client.service.is_reloading)
        assert client.service.batcher.max_batch == client.service.max_batch == 3

    with_client(body, model_dir)


def test_a_service_stops_while_it_loads_a_model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    services: list[service_module.Service] = []

    async def body(client: httpx2.AsyncClient) -> None:
        services.append(client.service)
        monkeypatch.setattr(service_module, "load_predictor", lambda settings: go.wait(60))
        client.service.begin_reload()
        await until(lambda: client.service.is_loading)

    begun = time.monotonic()
    with_client(body, model_dir, max_batch=1)
    assert time.monotonic() - begun < 40
    assert services[0].is_loading
    go.set()


def test_no_process_for_decoding_can_be_started(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    async def body(client: httpx2.AsyncClient) -> None:
        for decoder in client.service.decoders._all:
            decoder.kill()
        request = dict(content=picture(0), headers={"content-type": "image/png"})
        with monkeypatch.context() as patch:
            patch.setattr(decoding.SPAWN.Process, "start", fail)
            response = await client.post("/predict", **request)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "busy")
            assert response.headers["retry-after"] == "1"
        assert (await client.post("/predict", **request)).status_code == 200

    with_client(body, model_dir, max_batch=1)


def test_the_limit_on_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    for soft, hard in ((1024, 2048), (1024, resource.RLIM_INFINITY), (1 << 20, 1 << 20), (resource.RLIM_INFINITY, -1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=(soft, hard): limits)
        server._allow_open_files()
    assert raised == [(2048, 2048), (server.OPEN_FILES, resource.RLIM_INFINITY)]


def test_a_refused_body_frees_its_memory_before_the_rest_is_read(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = guard.BodyReader(Settings(run=str(model_dir), max_bytes=1000))
    sender = Sender(4000)
    with pytest.raises(guard.RequestError, match="at most 1,000 bytes") as caught:
        asyncio.run(entered(reader, sender))
    assert (sender.received, reader.held) == (1, 0)
    parts = [frame.f_locals["parts"] for frame, _ in traceback.walk_tb(caught.tb) if "parts" in frame.f_locals]
    assert parts
    assert not any(parts)


class Sender:
    """A client that sends a body of `size` bytes in two parts; counts the parts that were received."""

    def __init__(self, size: int, **headers: str) -> None:
        self.parts, self.received = [bytes(size // 2), bytes(size - size // 2)], 0
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.request = Request({"type": "http", "headers": pairs}, self.receive)

    async def receive(self) -> dict[str, Any]:
        self.received += 1
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}


async def entered(reader: guard.BodyReader, sender: Sender) -> None:
    async with reader.body(sender.request):
        pass


async def refusal(reader: guard.BodyReader, sender: Sender) -> int:
    """The status of a refused body."""
    with pytest.raises(guard.RequestError) as caught:
        await entered(reader, sender)
    return caught.value.status


def test_a_body_that_is_refused_by_its_length_is_received_after_the_response(model_dir: Path) -> None:
    """A client that has not sent all of it would see a broken connection instead of the reason."""
    sender, order = Sender(4000, host="localhost", content_length="4000"), []

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        async with reader.body(Request(scope, receive)):
            pass

    async def receive() -> dict[str, Any]:
        order.append("received")
        return await sender.receive()

    async def send(message: dict[str, Any]) -> None:
        order.append((message["type"], message.get("status"), len(message.get("body", b"")) > 0))

    settings = Settings(run=str(model_dir), max_bytes=1000)
    reader = guard.BodyReader(settings)
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": sender.request.scope["headers"]}
    asyncio.run(guard.Guard(refuse, settings, lambda *_: None)(scope, receive, send))
    start, body, end = ("http.response.start", 413, False), ("http.response.body", None, True), ("http.response.body",)
    assert order == [start, body, "received", "received", (*end, None, False)]
    assert reader.held == 0


def test_bodies_share_their_memory_and_the_last_one_too_many_is_told_to_come_again(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, bodies may take more than one alone."""
    monkeypatch.setattr(guard, "HELD_BYTES", 2400)
    reader = guard.BodyReader(Settings(run=str(model_dir), max_bytes=1000))

    async def go() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                assert len(await stack.enter_async_context(reader.body(Sender(1000).request))) == 1000
            assert await refusal(reader, late := Sender(1000)) == 503
            assert (late.received, reader.held) == (1, 2000)
        async with reader.body(Sender(1000).request):
            assert reader.held == 1000

    asyncio.run(go())


@pytest.mark.parametrize("token", ["p\xe4sswort", " a", "a\n", "\udce4"])
def test_a_token_is_what_a_header_can_hold(token: str, model_dir: Path) -> None:
    with pytest.raises(UsageError, match="token must consist of ASCII letters, digits and punctuation"):
        Settings(run=str(model_dir), token=token)


def test_a_reload_is_counted(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = SimpleNamespace(metadata={"runtime": "onnx", "precision": "int8"}, warmed_up=str)

    async def body(client: httpx2.AsyncClient) -> None:
        monkeypatch.setattr(service_module, "load_predictor", lambda settings: new)
        client.service.begin_reload()
        await until(lambda: client.service.predictor is new)
        assert 'weft_reloads_total{outcome="done"} 1.0' in (await client.get("/metrics")).text

    with_client(body, model_dir, max_batch=1)


def test_two_requests_in_one_write_of_a_client_that_leaves_are_no_internal_error(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second one is not begun after the connection is lost; the event loop of uvloop would refuse its response."""
    uvloop = pytest.importorskip("uvloop")
    responses: list[int] = []

    async def body() -> None:
        application = create_app(Settings(run=str(model_dir), max_batch=1))
        count = application.state.service.on_response
        # of the middleware, which is built with the first request
        application.user_middleware[0].kwargs["on_response"] = lambda *args: (responses.append(args[2]), count(*args))
        config = server._config(application.state.service.settings, application)
        config.load()
        own, client = socket.socketpair()
        async with application.router.lifespan_context(application):
            own.setblocking(False)
            protocol = config.http_protocol_class(config, ServerState(), {})
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, own)
            with client:
                head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(picture(0))}\r\n\r\n"
                client.sendall(head.encode() + picture(0) + b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: len(responses) > 0)
            await asyncio.sleep(0.2)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
    assert responses == [499]
    assert "Traceback" not in capfd.readouterr().err


def test_the_parent_of_the_workers_loads_no_model(model_dir: Path) -> None:
    code = (
        "import sys\n"
        "from weft.serve import server\n"
        "from weft.serve.settings import Settings\n"
        f"chosen, metadata = server._choice_of(Settings(run={str(model_dir)!r}, workers=2), lambda: False)\n"
        "assert 'torch' not in sys.modules\n"
        "print(chosen.run, chosen.runtime, metadata['precision'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(model_dir), "torch", "fp32"]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NonFiniteError(), CheckpointError, str(NonFiniteError())),
        (UsageError("x must be y; got z."), UsageError, "x must be y; got z."),
        (MemoryError("no more"), WeftError, "There must be enough memory; there is not (no more). Choose a smaller"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), WeftError, "There must be enough memory; there is"),
    ],
)
def test_why_no_model_is_chosen_is_told(
    error: Exception, kind: type, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of the error is that of a module that the parent has imported."""
    sent: list[Any] = []

    def load(settings: Settings) -> None:
        raise error

    monkeypatch.setattr(server, "load_predictor", load)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    server._choose(Settings(run="x"), SimpleNamespace(send=sent.append))
    ((sent_kind, sent_text),) = sent
    assert sent_kind is kind
    assert sent_text.startswith(text)


@pytest.mark.parametrize("error", [UsageError("x must be y."), MemoryError("no more"), ZeroDivisionError("by zero")])
def test_a_worker_that_cannot_start_says_why_and_is_not_started_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """uvicorn starts a worker that ends with another exit code again, without end."""

    def load(settings: Settings) -> None:
        raise error

    async def start() -> None:
        settings = Settings(run="x", workers=2)
        server.worker_app(settings, settings, SimpleNamespace(is_set=lambda: False))

    monkeypatch.setattr(server, "load_predictor", load)
    monkeypatch.setattr(server.signal, "signal", lambda *_: signal.default_int_handler)
    with pytest.raises(SystemExit) as stopped:
        asyncio.run(start())
    assert stopped.value.code == STARTUP_FAILURE
    shown = capsys.readouterr().err
    assert "a process of the service cannot start: " in shown
    assert str(error).rstrip(".") in shown
    assert ("Traceback" in shown) == isinstance(error, ZeroDivisionError)


def test_a_stop_ends_a_reload(supervisor: server._Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both while the model is chosen and while a worker starts; the process that chooses ends, too."""
    processes: list[Any] = []

    class Stuck(SimpleNamespace):
        def start(self) -> None:
            processes.append(self)
            supervisor._stop(signal.SIGTERM, None)

        def kill(self) -> None:
            self.ended = True

        def join(self) -> None:
            assert self.ended
            os.close(self.pipe)

    monkeypatch.undo()
    monkeypatch.setattr(server.SPAWN, "Process", lambda args, **_: Stuck(ended=False, pipe=os.dup(args[1].fileno())))
    with pytest.raises(WeftError, match="the service stops"):
        server._choice_of(Settings(run="x", workers=2), supervisor.should_exit.is_set)
    assert [process.ended for process in processes] == [True]
    assert supervisor.should_exit.is_set()


def test_a_decoder_imports_no_file_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pickle", "socket", "struct", "types", "PIL", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    pool = decoding.DecoderPool(1, 30, 1000, 1 << 28)
    try:
        asyncio.run(pool.start())
        assert asyncio.run(pool.pixels(picture(0), None)) is not None
    finally:
        pool.close()
    assert not (tmp_path / "imported").exists()
    assert "PYTHONSAFEPATH" not in os.environ


LOADING = """
import time, uvicorn
from weft.serve import server
from weft.serve.settings import Settings

def load(settings):
    print("loading", flush=True)
    time.sleep(600)

server.load_predictor = load
settings = Settings(run="x", port=0, workers=2)
app = server.functools.partial(server.worker_app, settings, settings, server.SPAWN.Event())
uvicorn.Server(server._config(settings, app)).run()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can handle")
def test_a_worker_that_loads_stops_at_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"loading\n"
        try:
            worker.terminate()
            worker.wait(3)
        finally:
            worker.kill()


def test_batch_sizes_are_measured_on_graphs_of_the_same_kind() -> None:
    """After the warm-up of a service; OpenVINO's graph for any batch size is slower than those for one."""
    graph = runtimes.OpenVinoModel.__new__(runtimes.OpenVinoModel)
    graph.info = ModelInfo(runtime="openvino", precision="fp32", num_classes=2)
    graph.is_dynamic, graph.has_features, graph.fixed, graph._max_fixed = True, False, {}, runtimes.FIXED
    used: list[tuple[int, str]] = []

    def of(kind: str) -> Callable[[np.ndarray], list[np.ndarray]]:
        return lambda images: (used.append((len(images), kind)), [np.zeros((len(images), 2), np.float32)])[1]

    vars(graph)["dynamic"] = of("any size")
    vars(graph)["_fixed_graph"] = lambda size: graph.fixed.setdefault(size, of("one size"))
    model = Predictor(graph).warmed_up(service_module.BATCH_SIZES[-1])
    used.clear()
    limit = service_module._max_batch(Settings(run="x", runtime="openvino"), model)
    assert {size for size, _ in used} >= {1, 2}
    assert {kind for _, kind in used} == {"any size"}
    model.warmed_up(limit)  # then, the sizes of the traffic get their own
    assert {1, limit} <= set(graph.fixed)


def test_a_decoder_that_is_killed_after_its_result_was_read_decodes_no_other_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline passes between the read and the end of the timer."""
    killed = threading.Event()
    process = SimpleNamespace(is_alive=lambda: True, kill=killed.set, join=lambda: None)
    decoder = decoding._Decoder(0)
    decoder.process = process
    decoder.pipe = SimpleNamespace(send=print, send_bytes=len, close=lambda: None)
    bad = decoding.BadImage("The image", "zero-byte")
    monkeypatch.setattr(decoding, "_received", lambda *_: (killed.wait(10), bad)[1])
    assert decoder.decode(b"", None, 1, 0.01) is bad
    assert decoder.process is not process


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"[1, 2", b"123"),
        (b"{}", b"123"),
        (b"[]", b"123"),
        (b'{"reason": ["x"], "detail": ""}', b""),
        (b'{"reason": 1, "detail": ""}', b""),
        (b'{"reason": "no such reason", "detail": ""}', b""),
        (b'{"size": [1]}', b"\0" * 12),
        (b'{"size": ["one", 1]}', b"\0" * 12),
        (b'{"size": [1, 1]}', b"\0" * 11),
        (b'{"size": [1, 1]}', b"\0" * 13),
        (b" " * (decoding.MAX_HEADER_BYTES + 1), b""),
    ],
)
def test_a_decoder_that_was_taken_over_can_send_no_result(header: bytes, data: bytes) -> None:
    crop = eval_transform(dict(input_size=(3, 2, 2), mean=(0, 0, 0), std=(1, 1, 1)))
    ours, theirs = decoding.SPAWN.Pipe()
    theirs.send_bytes(header)
    theirs.send_bytes(data)
    with pytest.raises((OSError, EOFError, LookupError, TypeError, ValueError)):
        decoding._received(ours, crop)
