"""The same application under Ray Serve, on a local cluster of one machine and two copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import free_port
from tests.serve.running import picture, saved
from weft.errors import UsageError
from weft.train import predict

pytest.importorskip("ray.serve")

PROGRAM = """
import json, sys, urllib.error, urllib.request
import ray
from ray import serve
from ray.serve._private import api
from weft.serve.on_ray import application

def ask(data):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data, {"content-type": "image/png"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

folder, port, *paths = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
api.HTTP_PROXY_TIMEOUT = 300  # of a busy machine
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(application({"run": folder, "replicas": "2", "max_batch": "8"}), name="weft", route_prefix="/")
pictures = [open(path, "rb").read() for path in paths]
open(folder + ".json", "w").write(json.dumps([ask(data) for data in [*pictures, b"no picture"]]))
serve.shutdown()
"""


@pytest.mark.slow
def test_two_copies_answer_as_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for i, path in enumerate(paths):
        path.write_bytes(picture(i))
    patient = {f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S": "120" for check in ("READY", "HEALTH")}  # of a busy machine
    command = [sys.executable, "-c", PROGRAM, str(folder), str(free_port()), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | patient)
    assert done.returncode == 0, done.stderr[-3000:]
    *good, bad = json.loads((tmp_path / "model.json").read_text())
    for (status, found), expected in zip(good, predict(folder, paths), strict=True):
        assert status == 200
        top = found["answers"][0]["top"]
        assert [item["class"] for item in top] == [name for name, _ in expected.top]
        assert [item["probability"] for item in top] == pytest.approx([share for _, share in expected.top], abs=1e-5)
    assert (bad[0], bad[1]["error"]["code"]) == (415, "not-an-image")


def test_what_does_not_fit_is_said() -> None:
    from weft.serve.on_ray import application

    with pytest.raises(UsageError, match=r"Unknown setting 'max_btch'\. Nearest: max_batch"):
        application({"run": "x", "max_btch": "3"})
    with pytest.raises(UsageError, match="Unknown setting 'token'"):
        application({"run": "x", "token": "secret"})
    with pytest.raises(UsageError, match="max_batch must be a number; got many"):
        application({"run": "x", "max_batch": "many"})
    with pytest.raises(UsageError, match="replicas must be a number; got abc"):
        application({"run": "x", "replicas": "abc"})
    with pytest.raises(UsageError, match="replicas must be at least 1; got 0"):
        application({"run": "x", "replicas": "0"})
    with pytest.raises(UsageError, match="device must be one of auto, cpu, cuda, mps; got 'tpu'"):
        application({"run": "x", "device": "tpu"})
    with pytest.raises(UsageError, match="run must be the run or model directory to serve; got none"):
        application({})
