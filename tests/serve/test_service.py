"""The application in this process: responses, refusals, queue, metrics, reloads.

One application, with its decoders, serves nearly all tests. The parts of it that a test replaces are restored.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import signal
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from uvicorn.server import ServerState

from tests.data.pictures import png
from tests.helpers import NANO, lively
from tests.serve.running import NAMES, client_of, picture, saved, until
from weft.checkpoints import load_model_dir, save_model_dir
from weft.data.preprocessing import eval_transform
from weft.errors import CheckpointError
from weft.inference import open_model
from weft.inference.predictor import Predictor
from weft.interpret import explain
from weft.serve import decoding, server
from weft.serve import service as service_module
from weft.serve.app import create_app
from weft.serve.service import Service
from weft.serve.settings import Settings
from weft.train import predict

pytestmark = pytest.mark.anyio


PATIENT = dict(decode_timeout=600, read_timeout=600, timeout=600)  # on a busy machine


@pytest.fixture(scope="module")
async def client(model_dir: Path) -> AsyncIterator[Any]:
    limits = dict(max_bytes=200_000, max_images=4, max_batch=8, max_queue=16)
    async with client_of(Settings(run=str(model_dir), **limits, **PATIENT)) as one:
        yield one


@pytest.fixture(scope="module")
async def single(model_dir: Path) -> AsyncIterator[Any]:
    """A service with one decoder."""
    async with client_of(Settings(run=str(model_dir), max_batch=1, decoders=1, **PATIENT)) as one:
        yield one


@pytest.fixture
def service(client: Any, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service of `client`, whose model and settings a test may replace."""
    for name in ("predictor", "max_batch", "settings"):
        monkeypatch.setattr(client.service, name, getattr(client.service, name))
    monkeypatch.setattr(client.service.batcher, "max_batch", client.service.max_batch)
    return client.service


class Held(Predictor):
    """Predicts when it is released; notes the sizes of its batches when they begin."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(open_model(model_dir))
        self.sizes, self.may_go = list[int](), threading.Event()

    def predict(self, photos, *, overlay=False):
        self.sizes.append(len(photos))
        assert self.may_go.wait(120)
        return super().predict(photos, overlay=overlay)


@pytest.fixture
def held(service: Service, model_dir: Path) -> Iterator[Held]:
    service.predictor = held = Held(model_dir)
    yield held
    held.may_go.set()


def asking(client: Any, *seeds: int) -> list[asyncio.Task[Any]]:
    """Requests with an image each."""
    return [asyncio.create_task(client.post("/predict", content=picture(seed))) for seed in seeds]


def classes_of(response: Any) -> list[tuple[str, float]]:
    """Classes and probabilities of a response for one image."""
    assert response.status_code == 200, response.text
    (answer,) = response.json()["answers"]
    return [(item["class"], item["probability"]) for item in answer["top"]]


async def test_an_image_has_the_classes_and_probabilities_of_predict(client: Any, model_dir: Path, tmp_path: Path):
    path = tmp_path / "a.png"
    path.write_bytes(picture(1))
    expected = predict(model_dir, path)[0].top
    for headers in ({"content-type": "image/png"}, {"content-type": "application/octet-stream"}, {}):
        response = await client.post("/predict", content=path.read_bytes(), headers=headers)
        assert classes_of(response) == expected  # the same bits
    assert len(classes_of(await client.post("/predict?top_k=2", content=path.read_bytes()))) == 2


async def test_bad_images_of_a_request_do_not_disturb_the_others(client: Any) -> None:
    files = [
        ("image", ("a.png", picture(1))),
        ("image", ("../../b\x01<b>.txt", b"no picture")),
        ("image", ("c.png", picture(3)[:300])),
        ("anything", ("d.jpg", picture(4, format="JPEG"))),
    ]
    alone = [classes_of(await client.post("/predict", content=files[i][1][1])) for i in (0, 3)]
    first, second, third, fourth = (await client.post("/predict", files=files)).json()["answers"]
    assert second["error"]["code"] == "not-an-image"
    assert not {"/", "\x01"} & set(second["image"])
    assert third["error"]["code"] == "truncated"
    for answer, expected in zip((first, fourth), alone, strict=True):
        assert [item["class"] for item in answer["top"]] == [name for name, _ in expected]
        shares = [item["probability"] for item in answer["top"]]
        assert shares == pytest.approx([share for _, share in expected], abs=1e-5)


def form(*parts: bytes, end: bytes = b"--x--\r\n", **parameters: bytes) -> dict[str, Any]:
    """A multipart form of these parts, each of a header and a body."""
    content = b"".join(b"--x\r\n" + part + b"\r\n" for part in parts) + end
    kind = b"multipart/form-data" + b"".join(b"; %s=%s" % (key.encode(), value) for key, value in parameters.items())
    return dict(content=content, headers={"content-type": kind if parameters else kind + b"; boundary=x"})


def of_origin(**headers: str) -> dict[str, Any]:
    return dict(content=picture(0), headers={name.replace("_", "-"): value for name, value in headers.items()})


def of_host(host: str) -> dict[str, Any]:
    return dict(method="GET", url="/", headers={"host": host})


FIELD = b'Content-Disposition: form-data; name="a"\r\n\r\n'
FILE = b'Content-Disposition: form-data; name="a"; filename="b"\r\n\r\nno image'
PACKED = dict(content=zlib.compress(picture(0)), headers={"content-encoding": "gzip"})
CURL = {"content-type": "application/x-www-form-urlencoded"}  # curl's own
PREFLIGHT = {"origin": "http://evil.example", "access-control-request-method": "POST"}
REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {  # request, status, code, words of the message
    "no byte": (dict(content=b""), 400, "zero-byte", ""),
    "one byte": (dict(content=b"x"), 415, "not-an-image", ""),
    "text": (dict(content=b"GET / HTTP/1.1\r\n" * 100), 415, "not-an-image", "none of JPEG, PNG"),
    "SVG with a script": (dict(content=b"<svg onload='alert(1)'/>"), 415, "not-an-image", ""),
    "a pickle": (dict(content=b"\x80\x04\x95cos\nsystem\n(S'touch x'\ntR."), 415, "not-an-image", ""),
    "a truncated image": (dict(content=picture(0)[:200]), 400, "truncated", ""),
    "a header alone": (dict(content=b"\x89PNG\r\n\x1a\n" + b"\0" * 40), 400, "damaged", ""),
    "a bomb": (dict(content=png(60_000, 60_000, zlib.compress(bytes(100)))), 422, "too-many-pixels", ""),
    "a pixel row too many": (dict(content=png(10_001, 10_000, zlib.compress(bytes(9)))), 422, "too-many-pixels", ""),
    "a byte too many": (dict(content=b"\xff" * 200_001), 413, "too-large", "at most 200,000 bytes"),
    "a compressed body": (PACKED, 415, "packed", "without Content-Encoding"),
    "a form with a URL": (dict(data={"url": "http://169.254.169.254/"}), 415, "content-type", "multipart/form-data"),
    "curl without a type": (dict(content=picture(0), headers=CURL), 415, "content-type", "add -H 'Content-Type: ima"),
    "JSON": (dict(json={"image": "aGk="}), 415, "content-type", "got application/json"),
    "a form without a file": (form(FIELD + b"b"), 400, "no-image", "at least one file"),
    "a form without a boundary": (form(FILE, charset=b"utf-8"), 400, "form", "cannot be parsed"),
    "a form of an unknown charset": (form(FILE, charset=b"undefined", boundary=b"x"), 415, "not-an-image", ""),
    "a boundary that is not ASCII": (form(FILE, boundary="é".encode("latin-1")), 400, "form", ""),
    "no form": (form(end=b"\0" * 999), 400, "form", ""),
    "a form without an end": (form(FILE, end=b""), 400, "form", ""),
    "a form with endless headers": (form(b"A: b\r\n" * 9999), 400, "form", ""),
    "too many files": (dict(files=[("image", ("a.png", picture(0)))] * 5), 413, "too-many-images", "at most 4 images"),
    "too many fields": (form(*[FIELD + b"b"] * 50), 400, "form", ""),
    "a long field": (form(FIELD + b"b" * 9999), 400, "form", "a field has more than 1024 bytes"),
    "top_k of 0": (dict(content=picture(0), params={"top_k": 0}), 422, "parameter", "query.top_k"),
    "a large top_k": (dict(content=picture(0), params={"top_k": 10**30}), 422, "parameter", "query.top_k"),
    "top_k of words": (dict(content=picture(0), params={"top_k": "all"}), 422, "parameter", "query.top_k"),
    "a page of another site": (of_origin(origin="http://evil.example"), 403, "foreign-origin", "Pages of other sites"),
    "a page in a sandbox": (of_origin(origin="null"), 403, "foreign-origin", ""),
    "a page of another port": (of_origin(origin="http://localhost:3000"), 403, "foreign-origin", ""),
    "a form of another site": (of_origin(sec_fetch_site="cross-site"), 403, "foreign-origin", ""),
    "a preflight request": (dict(method="OPTIONS", headers=PREFLIGHT), 403, "foreign-origin", ""),
    "a foreign host name": (of_host("evil.example"), 421, "unknown-host", "--name NAME"),
    "a name that begins well": (of_host("localhost.evil.example"), 421, "unknown-host", ""),
    "a name with a user": (of_host("localhost@evil.example"), 421, "unknown-host", ""),
    "an address of another": (of_host("192.168.0.7"), 421, "unknown-host", ""),
    "no host name": (of_host(""), 421, "unknown-host", ""),
    "no valid host": (of_host("[::1"), 421, "unknown-host", ""),
    "an unknown path": (dict(method="GET", url="/docs"), 404, "not-found", "/openapi.json"),
    "another method": (dict(method="DELETE"), 405, "method", "/openapi.json"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_request_has_a_code_and_a_sentence_and_disturbs_no_other(case, client, model_dir):
    request, status, code, words = REFUSED[case]
    sent = client.request(**dict(method="POST", url="/predict") | request)
    response, good = await asyncio.gather(sent, client.post("/predict", content=picture(1)))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), response.text
    assert words in error["message"]
    assert error["message"].endswith(".")
    assert error["request_id"] == response.headers["x-request-id"]
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert str(model_dir) not in response.text
    assert "Traceback" not in response.text
    assert good.status_code == 200


async def test_the_page_of_the_service_may_ask_it(client: Any) -> None:
    own = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
    assert (await client.post("/predict", content=picture(0), headers=own)).status_code == 200
    for host in ("127.0.0.1:8000", "[::1]:8000", "LOCALHOST"):
        assert (await client.get("/live", headers={"host": host})).status_code == 200
    page = await client.get("/")
    assert {"default-src 'self'", "frame-ancestors 'none'"} <= set(page.headers["content-security-policy"].split("; "))
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in ("app.js", "style.css", "icon.svg"):
        assert f'"/page/{name}"' in page.text
        assert (await client.get(f"/page/{name}")).status_code == 200
    for path in ("/page/index.htm", "/page/", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/docs", "/redoc"):
        assert (await client.get(path)).status_code == 404, path


async def test_a_service_for_other_machines_requires_its_token(model_dir: Path) -> None:
    settings = Settings(
        run=str(model_dir), host="0.0.0.0", names=("localhost",), token="secret", max_batch=1, decoders=1
    )
    async with client_of(settings) as client:
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


async def test_images_of_many_clients_share_a_forward_pass(client: Any, held: Held) -> None:
    first = asking(client, 0)
    await until(lambda: held.sizes == [1])
    rest = asking(client, *range(12))
    await until(lambda: client.service.batcher.waiting == 12)
    held.may_go.set()
    responses = await asyncio.gather(*first, *rest)
    assert held.sizes == [1, 8, 4]
    for i, response in enumerate(responses[1:]):  # each has its own result
        alone, together = classes_of(await client.post("/predict", content=picture(i))), classes_of(response)
        assert [name for name, _ in together] == [name for name, _ in alone]
        assert together[0][1] == pytest.approx(alone[0][1], abs=1e-5)


async def test_a_full_queue_refuses_more_images_and_ready_says_so(client: Any, held: Held) -> None:
    accepted = asking(client, 0)
    await until(lambda: held.sizes == [1])
    accepted += asking(client, *range(16))
    await until(lambda: client.service.batcher.waiting == 16)
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/live")).status_code == 200  # while the model computes
    response = await client.post("/predict", content=picture(0))
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue-full")
    assert int(response.headers["retry-after"]) >= 1
    held.may_go.set()
    assert [response.status_code for response in await asyncio.gather(*accepted)] == [200] * 17
    assert (await client.get("/ready")).status_code == 200
    assert (await client.post("/predict", content=picture(0))).status_code == 200


async def test_images_leave_the_queue_with_their_client_and_at_their_deadline(client: Any, held: Held) -> None:
    loop = asyncio.get_running_loop()
    (first,) = asking(client, 0)
    await until(lambda: held.sizes == [1])
    leaving, late = asking(client, 1, 2)
    await until(lambda: client.service.batcher.waiting == 2)
    leaving.cancel()
    now = loop.time
    loop.time = lambda: now() + 1000  # all deadlines pass
    responses = await asyncio.gather(first, late)
    assert [response.status_code for response in responses] == [504, 504]
    assert "within 600 seconds" in responses[0].json()["error"]["message"]
    held.may_go.set()
    await until(lambda: client.service.batcher.waiting == 0)
    assert (await client.post("/predict", content=picture(3))).status_code == 200
    assert held.sizes == [1, 1]  # the others were never computed


async def test_a_model_that_fails_is_no_fault_of_the_image(client, service, model_dir, capsys):
    broken: Any = Predictor(open_model(model_dir))
    service.predictor = broken
    with torch.no_grad():
        for parameter in broken.model.running.parameters():
            parameter.fill_(float("nan"))
    for _ in range(2):
        response = await client.post("/predict", content=picture(0))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model-fault")
        assert "ZeroDivisionError" not in response.text
        broken.predict = lambda photos, *, overlay=False: 1 / 0
    assert (await client.get("/ready")).status_code == 200
    output = capsys.readouterr().err
    assert "ZeroDivisionError" in output
    assert "the model failed" in output


@pytest.mark.parametrize("name", NANO)
async def test_the_overlay_is_the_map_of_explain(name: str, client: Any, service: Service, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", model=name)
    service.predictor = predictor = Predictor(open_model(folder))
    image = Image.open(io.BytesIO(picture(1))).convert("RGB")
    saliency = explain(load_model_dir(folder)[0], image, grad_cam=False).saliency
    passes: list[object] = []
    predictor.model.running.register_forward_hook(lambda *_: passes.append(1))
    (answer,) = (await client.post("/predict?overlay=true", content=picture(1))).json()["answers"]
    assert len(passes) == 1
    grid = np.array(answer["overlay"]["grid"])
    assert (grid.min(), grid.max()) == (0, 1)
    np.testing.assert_allclose(grid, (saliency - saliency.min()) / (saliency.max() - saliency.min()), atol=2e-3)
    plain = await client.post("/predict", content=picture(1))
    assert answer["top"][0]["probability"] == pytest.approx(classes_of(plain)[0][1], abs=1e-5)
    assert "overlay" not in plain.text
    assert (await client.post("/predict?overlay=true", content=picture(0, size=1))).status_code == 200


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
def test_the_region_of_an_overlay_is_what_the_transform_leaves(cfg: dict[str, Any], size: tuple[int, int]) -> None:
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


async def metrics_of(client: Any) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def test_metrics_count_requests_and_images(client: Any) -> None:
    before = await metrics_of(client)
    for content in (*map(picture, range(5)), b"x"):
        await client.post("/predict", content=content)
    for i in range(3):
        await client.get(f"/strangers/{i}")
    after = await metrics_of(client)
    counted = {name: value - before.get(name, 0) for name, value in after.items() if "_total{" in name}
    assert {name: count for name, count in counted.items() if count and "/metrics" not in name} == {
        'weft_requests_total{code="200",method="POST",path="/predict"}': 5,
        'weft_requests_total{code="415",method="POST",path="/predict"}': 1,
        'weft_requests_total{code="404",method="GET",path="other"}': 3,
        'weft_images_total{outcome="answered"}': 5,
        'weft_images_total{outcome="not-an-image"}': 1,
    }
    assert after["weft_batch_images_sum"] - before["weft_batch_images_sum"] == 5
    assert after["weft_waiting_images"] == 0


async def test_the_log_has_a_line_per_response_and_no_client_writes_into_it(client, service, capsys):
    service.settings = replace(service.settings, log=True)
    await client.post("/predict?top_k=1", content=picture(0))
    await client.get("/x%0aweft:%20200%20GET%20/forged")
    first, second = [line for line in capsys.readouterr().err.splitlines() if "ms " in line]
    assert re.fullmatch(r"weft: 200 POST /predict \d+\.\d ms [0-9a-f]{12}", first)
    assert re.fullmatch(r"weft: 404 GET /x\\nweft: 200 GET /forged \d+\.\d ms [0-9a-f]{12}", second)


async def test_the_description_names_every_path_and_type(client: Any, model_dir: Path) -> None:
    described = (await client.get("/openapi.json")).json()
    assert set(described["paths"]) == {"/predict", "/model", "/live", "/ready", "/health", "/metrics"}
    types = set(described["paths"]["/predict"]["post"]["requestBody"]["content"])
    assert types == {"image/*", "application/octet-stream", "multipart/form-data"}
    fields = (await client.get("/model")).json()
    assert fields["classes"] == NAMES
    assert fields["input"] == {"channels": 3, "height": 32, "width": 32}
    assert str(model_dir) not in json.dumps([described, fields])


async def test_classes_without_names_have_numbers(client: Any, service: Service, tmp_path: Path) -> None:
    save_model_dir(lively("ceit_nano_32", num_classes=3), tmp_path / "model")
    service.predictor = Predictor(open_model(tmp_path / "model"))
    names = [name for name, _ in classes_of(await client.post("/predict", content=picture(0)))]
    assert sorted(names) == ["0", "1", "2"]


def test_the_model_of_a_service_has_the_threads_and_the_size_of_its_settings(model_dir, monkeypatch):
    """The threads are set before it is loaded, on every server: `weft serve`, Ray Serve and others."""
    calls: list[object] = []
    opened = Predictor.open
    monkeypatch.setattr(service_module, "set_num_threads", calls.append)
    monkeypatch.setattr(Predictor, "open", lambda run, **more: (calls.append(run), opened(run, **more))[1])
    served = service_module.load_predictor(Settings(run=model_dir, threads=2, img_size=(48, 64)))
    assert calls == [2, model_dir]
    assert served.metadata["input"] == {"channels": 3, "height": 48, "width": 64}
    assert len(served.predict([served.prepare(picture(0))])) == 1


def another(**metadata: str) -> Any:
    """Stands for the predictor of a model that is loaded."""
    return SimpleNamespace(metadata=metadata, warmed_up=str)


async def reload(service: Service) -> None:
    service.begin_reload()
    await until(lambda: not service.is_reloading)


async def test_a_reload_replaces_the_model_unless_it_cannot_be_loaded(client, service, monkeypatch, capsys):
    def fail(settings: Settings) -> None:
        raise CheckpointError("x must have weights.")

    before, counts = service.predictor, await metrics_of(client)
    monkeypatch.setattr(service_module, "load_predictor", fail)
    await reload(service)
    assert service.predictor is before
    assert "not reloaded; the current model keeps serving: x must have weights." in capsys.readouterr().err
    new = another(runtime="onnx", precision="int8")
    monkeypatch.setattr(service_module, "load_predictor", lambda settings: new)
    await reload(service)
    assert service.predictor is new
    after = await metrics_of(client)
    for outcome in ("done", "failed"):
        name = f'weft_reloads_total{{outcome="{outcome}"}}'
        assert after[name] - counts.get(name, 0) == 1


async def test_a_reload_that_is_requested_during_another_one_follows_it(service, monkeypatch):
    go, loads = threading.Event(), []

    def load(settings: Settings) -> Any:
        loads.append(len(loads))
        assert go.wait(120)
        return another(runtime="onnx", precision=f"of load {loads[-1]}")

    monkeypatch.setattr(service_module, "load_predictor", load)
    service.begin_reload()
    await until(lambda: loads == [0])
    service.begin_reload()
    service.begin_reload()
    go.set()
    await until(lambda: not service.is_reloading)
    assert loads == [0, 1]
    assert service.predictor.metadata["precision"] == "of load 1"


async def test_the_limit_of_batches_stays_for_a_model_that_runs_alike(service, monkeypatch):
    """A measurement during a reload would be disturbed by the requests that are answered meanwhile."""
    service.max_batch, alike = 7, service.predictor.metadata
    monkeypatch.setattr(service_module, "_max_batch", lambda *_: 3)
    for metadata, limit in ((alike, 7), (alike | {"runtime": "onnx"}, 3)):
        monkeypatch.setattr(service_module, "load_predictor", lambda settings, given=metadata: another(**given))
        await reload(service)
        assert service.batcher.max_batch == service.max_batch == limit


async def test_a_service_stops_while_it_loads_a_model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    async with client_of(Settings(run=str(model_dir), max_batch=1, decoders=1)) as client:
        service, decoders = client.service, [decoder.process for decoder in client.service.decoders._all]
        monkeypatch.setattr(service_module, "load_predictor", lambda settings: go.wait(120))
        service.begin_reload()
        await until(lambda: service.is_loading)
    assert service.is_loading
    go.set()
    assert decoders
    assert not any(process.is_alive() for process in decoders)


async def test_images_are_refused_while_no_decoder_can_be_started(single: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    for decoder in single.service.decoders._all:
        decoder.kill()
    with monkeypatch.context() as patch:
        patch.setattr(decoding.SPAWN.Process, "start", fail)
        response = await single.post("/predict", content=picture(0))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "busy")
        assert response.headers["retry-after"] == "1"
    assert (await single.post("/predict", content=picture(0))).status_code == 200


class HandTimer:
    """A timer that a test fires."""

    def __init__(self, seconds: float, fire: Any) -> None:
        HandTimer.last, self.seconds, self.fire = self, seconds, fire

    def start(self) -> None: ...

    cancel = join = start


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
async def test_a_stuck_decoder_is_killed_at_the_deadline_and_ready_says_so(single, monkeypatch):
    (decoder,) = single.service.decoders._all
    process = decoder.start()
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(decoding, "STUCK_SECONDS", 0)
    monkeypatch.setattr(decoding.threading, "Timer", HandTimer)
    stuck, waiting = asking(single, 0, 1)
    await until(lambda: decoder.busy_seconds > 0)
    ready = await single.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "busy")
    assert HandTimer.last.seconds == single.service.settings.decode_timeout
    HandTimer.last.fire()
    response = await stuck
    assert (response.status_code, response.json()["error"]["code"]) == (422, "too-slow")
    assert (await waiting).status_code == 200  # by the process that took its place
    assert decoder.process is not process
    assert (await single.get("/ready")).status_code == 200


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
async def test_a_decoder_that_crashes_takes_one_image_with_it(single: Any) -> None:
    (decoder,) = single.service.decoders._all
    pid = decoder.start().pid
    os.kill(pid, signal.SIGSTOP)
    (asked,) = asking(single, 0)
    await until(lambda: decoder.busy_seconds > 0)
    os.kill(pid, signal.SIGKILL)
    response = await asked
    assert (response.status_code, response.json()["error"]["code"]) == (422, "crashed")
    assert (await single.post("/predict", content=picture(0))).status_code == 200


def test_two_requests_in_one_write_of_a_client_that_leaves_are_no_internal_error(model_dir, capsys):
    """The second one is not begun after the connection is lost; the event loop of uvloop would refuse its response."""
    uvloop = pytest.importorskip("uvloop")
    responses: list[int] = []

    async def body() -> None:
        application = create_app(Settings(run=str(model_dir), max_batch=1, decoders=1))
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
            await until(lambda: len(responses) > 0 and own.fileno() == -1)
            for _ in range(1000):  # turns of the loop, in which the second request would begin and fail
                await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
    assert responses == [499]
    assert "Traceback" not in capsys.readouterr().err
