"""Run the application on uvicorn, in one process or several, until a signal stops it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import multiprocessing.connection
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess, multiprocess

from weft.errors import UsageError, WeftError
from weft.machine.memory import known_error
from weft.machine.processor import call_in_thread, num_threads
from weft.serve.app import create_app
from weft.serve.metrics import MULTIPROC_DIR
from weft.serve.service import Service, load_predictor, log
from weft.serve.settings import CONNECTIONS, Settings
from weft.text import printable, reason_of

SPAWN = multiprocessing.get_context("spawn")
HANGUP = getattr(signal, "SIGHUP", 0)  # Windows has none
OPEN_FILES = 4 * CONNECTIONS
HEALTH_SECONDS, LOAD_SECONDS = 30, 600  # for a worker to answer its parent, and to load a model during a reload


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer all accepted requests and return. SIGHUP reloads the model.

    A service that is reachable from other machines gets a random token if the settings have none.

    Raises:
        UsageError: the port is in use, the address is not one of this machine, or the runtime is not installed.
        CheckpointError: the model is missing or cannot be read.
        WeftError: a worker process cannot start.
    """
    _allow_open_files()
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that `spawn` starts would import files of the current folder
    if not (settings.is_private or settings.is_open) and settings.token is None:
        settings = replace(settings, token=secrets.token_urlsafe(24))
    with _listening_socket(settings) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{settings.host if settings.host == 'localhost' else shown}:{port}"
        if settings.workers > 1:
            _serve_in_workers(settings, sock, url)
            return
        app = create_app(settings)
        service: Service = app.state.service
        _Server(_config(settings, app), service, lambda: _announce(settings, service.predictor.metadata, url)).run(
            [sock]
        )
        if service.is_loading:
            atexit.register(os._exit, 0)  # Python may crash if it ends while another thread computes


def _allow_open_files() -> None:
    """Raise the limit on open files as far as this user may, since each connection and each decoder needs some."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # of macOS, whose limit can be lower than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _config(settings: Settings, app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=settings.workers > 1,
        http="h11",  # limits headers, trailers and pipelined requests; httptools does not
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        workers=settings.workers,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(round(settings.grace), 1),
        timeout_worker_healthcheck=HEALTH_SECONDS,
    )


class _Server(uvicorn.Server):
    """Server that shuts down in two steps: `/ready` returns 503, then the port is closed. The exit code is 0."""

    def __init__(self, config: uvicorn.Config, service: Service, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self.service, self.on_start = service, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, then call `on_start`."""
        await super().startup(sockets)
        self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal; stop immediately at the second one."""
        if self.service.is_draining:
            self.should_exit = self.force_exit = True
        else:
            seconds = 0 if sig == signal.SIGINT else self.service.settings.drain
            _drain(asyncio.get_running_loop(), self.service, seconds, lambda: setattr(self, "should_exit", True))


def _drain(loop: asyncio.AbstractEventLoop, service: Service, seconds: float, close: Callable[[], object]) -> None:
    """Refuse new images, and close the port after some seconds; called by a signal handler."""
    service.is_draining = True
    loop.call_soon_threadsafe(loop.call_later, seconds, close)


def _serve_in_workers(settings: Settings, sock: socket.socket, url: str) -> None:
    """Serve in processes of uvicorn, which starts those again that crash. This process loads no model."""
    settings = replace(settings, threads=settings.threads or max(num_threads() // settings.workers, 1))
    with tempfile.TemporaryDirectory(prefix="weft-serve-") as folder:
        os.environ[MULTIPROC_DIR] = folder
        try:
            supervisor = _Supervisor(settings, sock, lambda metadata: _announce(settings, metadata, url))
            supervisor.run()
        finally:
            del os.environ[MULTIPROC_DIR]
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise WeftError("The processes of the service must start; one does not. Its messages above have the reason.")


class _Supervisor(Multiprocess):
    """Parent of the worker processes. It chooses the model of all of them, also before a reload."""

    def __init__(self, settings: Settings, sock: socket.socket, on_start: Callable[[dict[str, Any]], None]) -> None:
        self.settings, self.on_start = settings, on_start
        self.stopping = SPAWN.Event()
        self._is_open, self._pids = False, set[int | None]()
        config = _config(settings, self._choose(lambda: False))
        super().__init__(config, [sock])  # installs the signal handlers
        for number in {signal.SIGINT, signal.SIGTERM} & multiprocess.SIGNALS.keys():
            signal.signal(number, self._stop)  # that of uvicorn waits for the end of a reload

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.should_exit.set()

    def _choose(self, is_stopping: Callable[[], bool]) -> Callable[[], FastAPI]:
        """Choose the inference runtime; return the application for new workers."""
        chosen, self.metadata = _choice_of(self.settings, is_stopping)
        return functools.partial(worker_app, self.settings, chosen, self.stopping)

    def keep_subprocess_alive(self) -> None:
        """Replace workers that have ended or hang, remove their gauges, and announce the service once."""
        for process in self.processes:
            process.child_conn.close()  # with an end of the pipe here, a crash during a check is seen at its timeout
        super().keep_subprocess_alive()
        pids = {process.pid for process in self.processes}
        for pid in self._pids - pids:
            mark_process_dead(pid)
        self._pids = pids
        if not self._is_open and any(process.is_ready(timeout=1) for process in self.processes):
            self._is_open = True
            self.on_start(self.metadata)

    def handle_signals(self) -> None:
        """Handle the signals since the last check; several SIGHUP are one reload."""
        while self.signal_queue.count(HANGUP) > 1:
            self.signal_queue.remove(HANGUP)
        super().handle_signals()

    def handle_hup(self) -> None:
        """Choose again, then replace one worker after another; each serves until its replacement is ready."""
        try:
            self.config.app = self._choose(self.should_exit.is_set)
        except WeftError as error:
            log(f"the model was not reloaded; the current model keeps serving: {error}")
            return
        self.config.timeout_worker_healthcheck = LOAD_SECONDS
        self.restart_all()
        self.config.timeout_worker_healthcheck = HEALTH_SECONDS
        if self._pids.isdisjoint(process.pid for process in self.processes):
            log("the model was reloaded.")

    def terminate_all(self) -> None:
        """Stop the service: tell the workers to drain, unlike those that are replaced."""
        self.stopping.set()
        super().terminate_all()


def _choice_of(settings: Settings, is_stopping: Callable[[], bool]) -> tuple[Settings, dict[str, Any]]:
    """Find the fastest model in a process of its own, whose memory then is free; return its settings and metadata."""
    receiver, sender = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_choose, args=(settings, sender))
    process.start()
    sender.close()
    try:
        while not receiver.poll(0.2):
            if is_stopping():
                raise WeftError("the service stops.")
        result = receiver.recv()
    except EOFError:
        process.join()
        raise WeftError(
            f"The model must load in a process of its own; the process ended with exit code {process.exitcode}. Its"
            " messages above have the reason; without any, there is too little memory."
        ) from None
    finally:
        process.kill()
        process.join()
    if isinstance(result, WeftError):
        raise result
    return result


def _choose(settings: Settings, sender: Connection) -> None:
    """Send the choice, or the error, of a type that the parent has imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also receives Ctrl-C, and then ends this process
    try:
        predictor = load_predictor(settings)
    except Exception as error:
        if (known := known_error(error)) is None:
            raise
        kind = next(kind for kind in type(known).__mro__ if kind.__module__ == WeftError.__module__)
        sender.send(kind(str(known)))
        return
    run = str(predictor.path or settings.run)
    sender.send((replace(settings, run=run, runtime=predictor.metadata["runtime"]), predictor.metadata))


def worker_app(settings: Settings, chosen: Settings, stopping: Event) -> FastAPI:
    """Return the application of a worker process, which uvicorn calls in its event loop.

    Args:
        settings: of the service.
        chosen: the same, with the path and the runtime of the model that all workers serve.
        stopping: set before all workers are stopped. Otherwise SIGTERM comes when this one is replaced; then it
            finishes its requests without a drain.
    """
    close = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a process that loads ends immediately
    assert callable(close)
    loop = asyncio.get_running_loop()
    threading.Thread(target=_end_with_parent, args=(settings,), daemon=True).start()
    try:
        app = create_app(settings, call_in_thread(lambda: load_predictor(chosen)))
    except Exception as error:  # with another exit code, uvicorn would start it again and again
        if (known := known_error(error)) is None:
            traceback.print_exc()
        log(f"a process of the service cannot start: {reason_of(known or error)}")
        sys.exit(STARTUP_FAILURE)
    service: Service = app.state.service

    def stop(sig: int, frame: FrameType | None) -> None:
        if not stopping.is_set():
            close(sig, frame)
        elif not service.is_draining:
            _drain(loop, service, settings.drain, lambda: close(sig, frame))

    signal.signal(signal.SIGTERM, stop)
    return app


def _end_with_parent(settings: Settings) -> None:
    """Stop this process when its parent has ended; otherwise it would run forever and keep the port."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        signal.raise_signal(signal.SIGTERM)  # os.kill would end the process immediately on Windows
        time.sleep(settings.drain + settings.grace + 1)
        os._exit(143)


@contextlib.contextmanager
def _listening_socket(settings: Settings) -> Iterator[socket.socket]:
    """Yield a socket that already listens, so that clients that connect while the model is loaded wait for it."""
    address_text = f"{settings.host}:{settings.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:  # UnicodeError: of a label without characters, or with more than 63
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(f"--host must be a name or address of this machine; {address_text}: {reason}.") from error
    with sock:
        # on Windows SO_REUSEADDR lets another process take over the port
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise UsageError(
                f"--host must be an address of this machine and --port a free port; {address_text}: {error.strerror}."
                " Pass another --port, or 0 for any free port."
            ) from error
        sock.listen(2048)
        sock.set_inheritable(True)
        yield sock


def _announce(settings: Settings, metadata: dict[str, Any], url: str) -> None:
    workers = "" if settings.workers == 1 else f", {settings.workers} workers"
    name = printable(Path(settings.run).absolute().name)
    log(
        f"serving {name} ({metadata['architecture']}), {len(metadata['classes'])} classes, {metadata['runtime']}"
        f" {metadata['precision']}{workers}."
    )
    secret = f"/#token={quote(settings.token, safe='')}" if settings.token is not None else "/"
    log(f"open {url}{secret}  (press Ctrl-C to stop)")
    if not settings.is_private:
        token = "requires a token" if settings.token is not None else "requires no token"
        log(f"the service is reachable from other machines, {token} and has no TLS; use a reverse proxy with HTTPS.")
