"""The parent of the workers, in this process: it chooses the model, watches, reloads and stops."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn.supervisors.multiprocess
from uvicorn.config import STARTUP_FAILURE

from weft.errors import CheckpointError, UsageError, WeftError
from weft.inference.predictor import NonFiniteError
from weft.serve import server
from weft.serve.metrics import MULTIPROC_DIR
from weft.serve.settings import Settings
from weft.version import __version__


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

    terminate = join = kill

    def start(self) -> None:
        self.started = True


METADATA = {"architecture": "x", "classes": [], "runtime": "torch", "precision": "fp32"}
TWO = Settings(run="x", workers=2)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> server._Supervisor:
    """One that has not installed its signal handlers, of two workers that are not processes."""
    monkeypatch.setenv(MULTIPROC_DIR, str(tmp_path))
    monkeypatch.setattr(uvicorn.supervisors.multiprocess, "Process", Worker)
    monkeypatch.setattr(uvicorn.supervisors.multiprocess, "SIGNALS", {})
    monkeypatch.setattr(server, "_choice_of", lambda settings, is_stopping: (settings, METADATA))
    announced: list[Any] = []
    made = server._Supervisor(TWO, None, announced.append)
    made.announced, made.processes = announced, [Worker(), Worker()]
    return made


def test_a_worker_that_has_ended_is_replaced_and_has_no_gauges(supervisor: server._Supervisor, tmp_path: Path) -> None:
    supervisor.keep_subprocess_alive()
    gone, other = (process.pid for process in supervisor.processes)
    for pid in (gone, other):
        (tmp_path / f"gauge_livesum_{pid}.db").touch()
    supervisor.processes[0].exitcode = 1
    supervisor.keep_subprocess_alive()
    assert [file.name for file in tmp_path.iterdir()] == [f"gauge_livesum_{other}.db"]
    assert supervisor.processes[0].started
    assert [process.pid == other for process in supervisor.processes] == [False, True]


def test_a_service_with_workers_is_open_when_the_first_one_is_ready(supervisor: server._Supervisor) -> None:
    supervisor.processes = [Worker(is_ready=False), Worker(is_ready=False)]
    supervisor.keep_subprocess_alive()
    assert supervisor.announced == []
    supervisor.processes[1].ready = True
    for _ in range(2):
        supervisor.keep_subprocess_alive()
        assert supervisor.announced == [METADATA]


def test_a_reload_replaces_the_workers_by_those_of_the_new_choice(supervisor, monkeypatch, capsys):
    """Also those that still start: they may have read the model before it changed."""
    supervisor.processes[1].ready = False
    first = list(supervisor.processes)
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


def test_a_model_that_cannot_be_loaded_leaves_the_workers(supervisor, monkeypatch, capsys):
    def choice_of(*_: object) -> None:
        raise CheckpointError("x must have weights; it has none.")

    first = list(supervisor.processes)
    monkeypatch.setattr(server, "_choice_of", choice_of)
    supervisor.handle_hup()
    assert supervisor.processes == first
    text = "the model was not reloaded; the current model keeps serving: x must have weights; it has none."
    assert capsys.readouterr().err == f"weft: {text}\n"


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
        server._choice_of(TWO, supervisor.should_exit.is_set)
    assert [process.ended for process in processes] == [True]
    assert supervisor.should_exit.is_set()


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


class Ends(Exception):
    """Ends a service that is not to run."""


def test_exports_are_timed_with_the_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = []

    def choice_of(settings: Settings, *_: object) -> None:
        used.append(settings.threads)
        raise Ends

    monkeypatch.setattr(server, "_choice_of", choice_of)
    monkeypatch.setattr(server, "num_threads", lambda: 6)
    with pytest.raises(Ends):
        server.serve(Settings(run="model", port=0, workers=2))
    assert used == [3]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (NonFiniteError(), CheckpointError, str(NonFiniteError())),
        (UsageError("x must be y; got z."), UsageError, "x must be y; got z."),
        (MemoryError("no more"), WeftError, "There must be enough memory; there is not (no more). Choose a smaller"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), WeftError, "There must be enough memory; there is"),
    ],
)
def test_the_process_that_chooses_sends_why_it_cannot(error, kind, text, monkeypatch):
    """The type of the error is that of a module that the parent has imported."""
    sent: list[Any] = []
    monkeypatch.setattr(server, "load_predictor", raiser(error))
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    server._choose(Settings(run="x"), SimpleNamespace(send=sent.append))
    assert [type(result) for result in sent] == [kind]
    assert str(sent[0]).startswith(text)


def raiser(error: Exception) -> Any:
    def load(settings: Settings) -> None:
        raise error

    return load


@pytest.mark.parametrize("error", [UsageError("x must be y."), MemoryError("no more"), ZeroDivisionError("by zero")])
def test_a_worker_that_cannot_start_says_why_and_is_not_started_again(error, monkeypatch, capsys):
    """uvicorn starts a worker that ends with another exit code again, without end."""

    async def start() -> None:
        server.worker_app(TWO, TWO, SimpleNamespace(is_set=lambda: False))

    monkeypatch.setattr(server, "load_predictor", raiser(error))
    monkeypatch.setattr(server.signal, "signal", lambda *_: signal.default_int_handler)
    with pytest.raises(SystemExit) as stopped:
        asyncio.run(start())
    assert stopped.value.code == STARTUP_FAILURE
    shown = capsys.readouterr().err
    assert "a process of the service cannot start: " in shown
    assert str(error).rstrip(".") in shown
    assert ("Traceback" in shown) == isinstance(error, ZeroDivisionError)


def test_the_limit_on_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    for soft, hard in ((1024, 2048), (1024, resource.RLIM_INFINITY), (1 << 20, 1 << 20), (resource.RLIM_INFINITY, -1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=(soft, hard): limits)
        server._allow_open_files()
    assert raised == [(2048, 2048), (server.OPEN_FILES, resource.RLIM_INFINITY)]


METRICS = """
import sys
from weft.serve.metrics import Metrics
metrics = Metrics()
metrics.waiting.set(int(sys.argv[1]))
print(metrics.text().decode())
"""


def test_metrics_of_several_processes_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTIPROC_DIR, str(tmp_path))
    for waiting in ("2", "3"):  # the first process leaves its files, as one that runs
        done = subprocess.run([sys.executable, "-c", METRICS, waiting], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "weft_waiting_images 5.0" in lines
    assert f'weft_build_info{{version="{__version__}"}} 1.0' in lines


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
            assert worker.wait(120) == -signal.SIGTERM
        finally:
            worker.kill()
