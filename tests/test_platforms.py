"""weft as on Windows and macOS: without the modules and calls of POSIX, and with spawned processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]  # for the programs that import `tests`

WITHOUT_POSIX = """
import builtins, importlib, os, pathlib, pkgutil, signal, sys, types, warnings
import fastapi, matplotlib.pyplot, psutil, sklearn.datasets, timm, torchvision, uvicorn
from tests.machine.test_system import simulate_windows_locks

simulate_windows_locks(lambda *_: None)  # the module that Windows has
blocked, real = {"fcntl", "resource", "pwd", "grp", "termios"}, builtins.__import__

def without_posix(name, scope=None, *more):
    if name.partition(".")[0] in blocked and str((scope or {}).get("__name__")).startswith("weft"):
        raise ImportError(name)
    return real(name, scope, *more)

builtins.__import__ = without_posix
for module in [name for name in sys.modules if name.partition(".")[0] == "weft"]:
    del sys.modules[module]
for name in ("fork", "forkpty", "killpg", "getuid", "geteuid", "getpgid", "setsid", "pread", "posix_fadvise",
             "sched_getaffinity", "getloadavg", "sysconf", "sysconf_names", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK"):
    delattr(os, name)
for name in ("SIGHUP", "pthread_sigmask", "sigwaitinfo"):
    delattr(signal, name)
import weft.machine.system
assert weft.machine.system.fcntl is None
weft.machine.system.IS_WINDOWS = True
for found in pkgutil.walk_packages(weft.__path__, "weft."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)

from weft.cli import main
out = pathlib.Path(sys.argv[1])
words = ["--model", "levit_nano_32", "--epochs", "1", "--limit", "40", "--workers", "0", "--device", "cpu", "--quiet"]
assert main(["train", "digits", "--out", str(out / "run"), *words]) == 0
assert main(["train", "digits", "--out", str(out / "run"), "--force", *words]) == 0
sklearn_image = out / "image.png"
from PIL import Image
Image.new("RGB", (40, 30), "red").save(sklearn_image)
assert main(["predict", str(out / "run"), str(sklearn_image), "--json", "--quiet"]) == 0
assert main(["doctor"]) == 0
"""

START = """
import asyncio, hashlib, json, multiprocessing, sys
from pathlib import Path

def main(method, out):
    multiprocessing.set_start_method(method)
    import httpx2
    import weft
    from weft.serve.app import create_app
    from weft.serve.settings import Settings
    from weft.train import evaluate, predict, train

    settings = {"augment.rand_augment": "rand-m9-mstd0.5-inc1", "augment.mixup": 0.5}
    train("digits", "levit_nano_32", epochs=1, limit=60, workers=1, device="cpu", out=out / "run", settings=settings,
          quiet=True)
    score = evaluate(out / "run", "digits", limit=60, workers=1, quiet=True)
    (guess,) = predict(out / "run", out / "image.png", quiet=True)

    async def served():
        app = create_app(Settings(run=str(out / "run")))
        transport = httpx2.ASGITransport(app)
        async with app.router.lifespan_context(app):
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                reply = await client.post("/predict", content=(out / "image.png").read_bytes())
                assert reply.status_code == 200, reply.text
                return reply.json()["answers"][0]["top"]

    weights = hashlib.sha256((out / "run" / "last" / "model.safetensors").read_bytes()).hexdigest()
    print(json.dumps([weights, score.as_dict()["loss"], guess.top, asyncio.run(served())]))

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
"""


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run a program in a new process, and return the last line that it prints."""
    file = folder / "program.py"  # spawned processes import it
    file.write_text(program, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(file), *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_weft_without_posix(tmp_path):
    run(tmp_path, WITHOUT_POSIX, str(tmp_path))
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_spawned_processes_give_the_same_bits(tmp_path):
    from PIL import Image

    results = []
    for method in ("fork", "spawn"):
        folder = tmp_path / method
        folder.mkdir()
        Image.linear_gradient("L").convert("RGB").save(folder / "image.png")
        results.append(run(folder, START, method, str(folder)))
    assert results[0] == results[1]
