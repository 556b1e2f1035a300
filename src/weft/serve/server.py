"""Run the application on uvicorn, in one process or several, until a signal stops it."""

from __future__ import annotations

import asyncio
import atexit
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
from urllib.parse import quote

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from weft.errors import UsageError, WeftError
from weft.inference.predictor import Predictor
from weft.processor import num_threads
from weft.serve.app import Service, create_app, load_predictor, log
from weft.serve.metrics import MULTIPROC_DIR
from weft.serve.protocol import GuardedProtocol
from weft.serve.settings import CONNECTIONS, Settings
from weft.text import printable

SETTINGS_VARIABLE = "WEFT_SERVE"  # environment variable with the settings, for the worker processes
OPEN_FILES = 4 * CONNECTIONS
RESTART_SECONDS = 1.0  # before a worker that could not start is started again


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer all accepted requests and return. SIGHUP reloads the model.

    A service that is reachable from other machines gets a random token if the settings have none.

    Raises:
        UsageError: the port is in use, the address is not one of this machine, or the runtime is not installed.
        CheckpointError: the model is missing or cannot be read.
        WeftError: a worker process cannot start.
    """
    _allow_open_files()
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
            if service.is_loading:
                atexit.register(os._exit, 0)  # Python may crash if it ends while another thread computes
        else:
            settings = replace(settings, threads=settings.threads or max(num_threads() // settings.workers, 1))
            # report a model that cannot be served once, before the workers start; they also find the chosen runtime
            predictor = load_predictor(settings)
            _serve_in_processes(settings, sock, lambda: _announce(settings, predictor, url))


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


def _serve_in_processes(settings: Settings, sock: socket.socket, on_start: Callable[[], None]) -> None:
    os.environ[SETTINGS_VARIABLE] = json.dumps(asdict(settings))
    with tempfile.TemporaryDirectory(prefix="weft-serve-") as folder:
        os.environ[MULTIPROC_DIR] = folder
        config = _config(settings, "weft.serve.server:from_environment")
        supervisor = _Supervisor(config, [sock])  # installs the signal handlers
        on_start()
        supervisor.run()
        if supervisor.has_failed:
            raise WeftError(
                "The processes of the service must start; one does not. Its messages above have the reason."
            )


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
    """Parent of the worker processes: restarts workers that have ended, and forwards SIGHUP to all of them.

    Attributes:
        has_failed: a worker could not start although none had started before: the service ends.
    """

    has_failed = False
    _has_served = False  # a worker has started
    _to_reload: frozenset[int] = frozenset()  # workers that have not received the last SIGHUP

    def keep_subprocess_alive(self) -> None:
        """Check every worker: replace one that has ended or hangs, remove its gauges, and pass a SIGHUP on.

        The parent also holds the child's end of each pipe. It is closed here; otherwise the parent would not notice
        that a worker has crashed.
        """
        for index, process in enumerate(self.processes):
            process.child_conn.close()
            pid = process.pid
            assert pid is not None
            is_due = pid in self._to_reload
            if (is_due or not self._has_served) and process.is_ready(timeout=1):
                self._has_served = True
                self._to_reload -= {pid}
                if is_due:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGHUP)
            if self.should_exit.is_set() or process.is_alive(timeout=self.config.timeout_worker_healthcheck):
                continue
            process.kill()
            process.join()
            mark_process_dead(pid)
            if process.exitcode == STARTUP_FAILURE and not self._has_served:
                self.has_failed = True
                self.should_exit.set()
                return
            if process.exitcode == STARTUP_FAILURE and self.should_exit.wait(RESTART_SECONDS):
                return
            self.processes[index] = Process(self.config, self.sockets)
            self.processes[index].start()

    def handle_hup(self) -> None:
        """Have every worker reload its model while it serves; one that still starts does so when it is ready."""
        self._to_reload = frozenset(process.pid for process in self.processes if process.pid is not None)


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
    secret = f"/#token={quote(settings.token, safe='')}" if settings.token is not None else "/"
    log(f"open {url}{secret}  (press Ctrl-C to stop)")
    if not settings.is_private:
        token = "requires a token" if settings.token is not None else "requires no token"
        log(f"the service is reachable from other machines, {token} and has no TLS; use a reverse proxy with HTTPS.")
