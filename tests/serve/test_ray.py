"""The lines of docs/serve.md for Ray Serve, on a local cluster of one machine and two copies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import free_port
from tests.serve.running import picture, saved
from weft.train import predict

pytest.importorskip("ray.serve")
DOCS = Path(__file__).parents[2] / "docs" / "serve.md"

PROGRAM = """
import json, sys, urllib.error, urllib.request
import ray
from ray import serve
from ray.serve._private import api
from service import app

def ask(data):
    headers = {"content-type": "image/png", "authorization": "Bearer SECRET"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

port, *paths = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
api.HTTP_PROXY_TIMEOUT = 300  # of a busy machine
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(app, name="weft", route_prefix="/")
pictures = [open(path, "rb").read() for path in paths]
open("responses.json", "w").write(json.dumps([ask(data) for data in [*pictures, b"no picture"]]))
serve.shutdown()
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_two_copies_answer_as_one(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for i, path in enumerate(paths):
        path.write_bytes(picture(i))
    (code,) = re.findall(r"```python\n(from ray import serve\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(code.split("\n\n")[-1].splitlines()) == 3
    code = code.replace("/shared/runs/photos", str(folder)).replace("num_replicas=4", "num_replicas=2")
    (tmp_path / "service.py").write_text(code)
    (tmp_path / "program.py").write_text(PROGRAM)
    patient = {f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S": "120" for check in ("READY", "HEALTH")}  # of a busy machine
    command = [sys.executable, "program.py", str(free_port()), *map(str, paths)]
    environment = {
        **os.environ,
        **patient,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    *good, bad = json.loads((tmp_path / "responses.json").read_text())
    for (status, found), expected in zip(good, predict(folder, paths), strict=True):
        assert status == 200
        top = found["answers"][0]["top"]
        assert [item["class"] for item in top] == [name for name, _ in expected.top]
        assert [item["probability"] for item in top] == pytest.approx([share for _, share in expected.top], abs=1e-5)
    assert (bad[0], bad[1]["error"]["code"]) == (415, "not-an-image")
