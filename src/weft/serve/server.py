"""Run the application on uvicorn, in one process or several, until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing.connection
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.supervisors import Multiprocess

from weft.errors import UsageError
from weft.inference.predictor import Predictor
from weft.processor import num_threads
from weft.serve.app import Service, create_app, load_predictor, log
from weft.serve.metrics import MULTIPROC_DIR
from weft.serve.protocol import GuardedProtocol
from weft.serve.settings import Settings
from weft.text import printable

SETTINGS_VARIABLE = "WEFT_SERVE"  # environment variable with the settings, for the worker processes


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer all accepted requests and return. SIGHUP reloads the model.

    A service that is reachable from other machines gets a random token if the settings have none.

    Raises:
        UsageError: the port is in use, the address is not one of this machine, or the runtime is not installed.
        CheckpointError: the model is missing or cannot be read.
    """
    if not (settings.is_private or settings.is_open) and settings.token is None:
        settings = replace(settings, token=secrets.token_urlsafe(24))
    with _listening_socket(settings) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{settings.host if settings.host == 'localhost' else shown}:{port}"
        if settings.workers == 1:
            app = create_app(settings)
            service = app.state.service
            _Server(_config(settings, app), service, lambda: _announce(settings, service.predictor, url)).run([sock])
        else:
            settings = replace(settings, threads=settings.threads or max(num_threads() // settings.workers, 1))
            # report a model that cannot be served once, before the workers start; they also find the chosen runtime
            predictor = load_predictor(settings)
            _serve_in_processes(settings, sock, lambda: _announce(settings, predictor, url))


def _serve_in_processes(settings: Settings, sock: socket.socket, on_start: Callable[[], None]) -> None:
    os.environ[SETTINGS_VARIABLE] = json.dumps(asdict(settings))
    with tempfile.TemporaryDirectory(prefix="weft-serve-") as folder:
        os.environ[MULTIPROC_DIR] = folder
        config = _config(settings, "weft.serve.server:from_environment")
        supervisor = _Supervisor(config, [sock])  # installs the signal handlers
        on_start()
        supervisor.run()


def from_environment() -> Any:
    """Return the application of a worker process, with the settings in the environment."""
    values = json.loads(os.environ[SETTINGS_VARIABLE])
    settings = Settings(**{**values, "names": tuple(values["names"]), "proxies": tuple(values["proxies"])})
    app = create_app(settings)
    _drain_on_sigterm(app.state.service)
    threading.Thread(target=_end_with_parent, args=(settings,), daemon=True).start()
    return app


def _end_with_parent(settings: Settings) -> None:
    """Stop this process when its parent has ended; otherwise it would run forever and keep the port."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        signal.raise_signal(signal.SIGTERM)  # os.kill would end the process immediately on Windows
        time.sleep(settings.drain + settings.grace + 1)
        os._exit(143)


def _drain_on_sigterm(service: Service) -> None:
    """Delay uvicorn's handler of SIGTERM by the drain time. uvicorn has installed its handlers already."""
    close, loop = signal.getsignal(signal.SIGTERM), asyncio.get_running_loop()

    def stop(sig: int, frame: FrameType | None) -> None:
        if callable(close) and not service.is_draining:
            service.is_draining = True
            loop.call_soon_threadsafe(loop.call_later, service.settings.drain, close, sig, frame)

    signal.signal(signal.SIGTERM, stop)


def _config(settings: Settings, app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=isinstance(app, str),
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        workers=settings.workers,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(round(settings.grace), 1),
        timeout_worker_healthcheck=30,
    )


class _Server(uvicorn.Server):
    """Server that shuts down in two steps: `/ready` returns 503, then the port is closed. The exit code is 0.

    Args:
        config: of uvicorn.
        service: the state of the application.
        on_start: called when the server accepts requests and handles signals.
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self.on_start = on_start
        self.stop_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, then call `on_start`."""
        await super().startup(sockets)
        self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal; stop immediately at the second one."""
        if self.stop_at is None:
            self.service.is_draining = True
            self.stop_at = time.monotonic() + (0 if sig == signal.SIGINT else self.service.settings.drain)
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; uvicorn calls this method ten times a second."""
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


class _Supervisor(Multiprocess):
    """Parent of the worker processes: restarts workers that have crashed, and forwards SIGHUP to all of them."""

    _pids: frozenset[int | None] = frozenset()

    def keep_subprocess_alive(self) -> None:
        """Check the health of every worker, and remove the gauges of those that have ended.

        The parent also holds the child's end of each pipe. It is closed here; otherwise the parent would not notice
        that a worker has crashed.
        """
        for process in self.processes:
            process.child_conn.close()
        known = self._pids.union(process.pid for process in self.processes)
        super().keep_subprocess_alive()
        self._pids = frozenset(process.pid for process in self.processes)
        for pid in known - self._pids:
            mark_process_dead(pid)

    def handle_hup(self) -> None:
        """Forward SIGHUP, so that every worker reloads its model while it serves."""
        for process in self.processes:
            if process.pid is not None and process.is_ready(timeout=1):  # before that, the signal would end the worker
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGHUP)


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


def _announce(settings: Settings, predictor: Predictor, url: str) -> None:
    metadata = predictor.metadata
    workers = "" if settings.workers == 1 else f", {settings.workers} workers"
    name = printable(Path(settings.run).absolute().name)
    log(
        f"serving {name} ({metadata['architecture']}), {len(metadata['classes'])} classes, {metadata['runtime']}"
        f" {metadata['precision']}{workers}."
    )
    secret = f"/#token={settings.token}" if settings.token is not None else "/"
    log(f"open {url}{secret}  (press Ctrl-C to stop)")
    if not settings.is_private:
        token = "requires a token" if settings.token is not None else "requires no token"
        log(f"the service is reachable from other machines, {token} and has no TLS; use a reverse proxy with HTTPS.")
