"""Run the application on uvicorn, in one process or several, until a signal ends it."""

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
from types import FrameType
from typing import Any

import torch
import uvicorn
from uvicorn.supervisors import Multiprocess

from weft.errors import UsageError
from weft.serve.app import Service, create_app, opened, say
from weft.serve.metrics import SHARED
from weft.serve.predictor import Predictor
from weft.serve.protocol import GuardedProtocol
from weft.serve.settings import Settings

ENVIRONMENT = "WEFT_SERVE"  # holds the settings for the processes that this one starts


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT; then finishes what it accepted. SIGHUP loads the model anew.

    A service that other machines can reach gets a token, if it has none.

    Raises:
        UsageError: a port in use, an address that is not this machine's, a runtime that is missing.
        CheckpointError: no model there, or one that cannot be read.
    """
    if not (settings.is_private or settings.is_open) and settings.token is None:
        settings = replace(settings, token=secrets.token_urlsafe(24))
    with _listening(settings) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{settings.host if settings.host == 'localhost' else shown}:{port}"
        if settings.workers == 1:
            _use_threads(settings)
            app = create_app(settings)
            service = app.state.service
            _Server(_config(settings, app), service, lambda: _tell(settings, service.predictor, url)).run([sock])
        else:
            facts = opened(settings)  # what cannot be served is told here, once
            _serve_in_processes(settings, sock, lambda: _tell(settings, facts, url))


def _serve_in_processes(settings: Settings, sock: socket.socket, on_start: Callable[[], None]) -> None:
    threads = settings.threads or max((os.cpu_count() or 1) // settings.workers, 1)
    os.environ[ENVIRONMENT] = json.dumps(asdict(replace(settings, threads=threads)))
    with tempfile.TemporaryDirectory(prefix="weft-serve-") as folder:
        os.environ[SHARED] = folder
        config = _config(settings, "weft.serve.server:from_environment")
        processes = _Processes(config, [sock])  # hears signals from here on
        on_start()
        processes.run()


def from_environment() -> Any:
    """The application of one of several processes."""
    words = json.loads(os.environ[ENVIRONMENT])
    settings = Settings(**{**words, "names": tuple(words["names"]), "proxies": tuple(words["proxies"])})
    _use_threads(settings)
    app = create_app(settings)
    _drain_first(app.state.service)
    threading.Thread(target=_end_with_parent, args=(settings,), daemon=True).start()
    return app


def _end_with_parent(settings: Settings) -> None:
    """Stops this process when the one that started it is gone: nobody else could, and it would keep the port."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(settings.drain + settings.grace + 1)
        os._exit(143)


def _drain_first(service: Service) -> None:
    """Puts the time between unready and closed before what uvicorn, whose handlers are in place, does on SIGTERM."""
    close, loop = signal.getsignal(signal.SIGTERM), asyncio.get_running_loop()

    def stop(sig: int, frame: FrameType | None) -> None:
        if callable(close) and not service.is_draining:
            service.is_draining = True
            loop.call_soon_threadsafe(loop.call_later, service.settings.drain, close, sig, frame)

    signal.signal(signal.SIGTERM, stop)


def _use_threads(settings: Settings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


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
    """Stops in two steps: first it says that it is not ready, then it closes its door. Its end is no error.

    Args:
        config: uvicorn's.
        service: what it runs.
        on_start: called when it answers, and signals are heard.
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self.service = service
        self.on_start = on_start
        self.stop_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the door, and tells of it."""
        await super().startup(sockets)
        self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end, a second one hurries it."""
        if self.stop_at is None:
            self.service.is_draining = True
            self.stop_at = time.monotonic() + (0 if sig == signal.SIGINT else self.service.settings.drain)
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Asked every tenth of a second whether it is time to go."""
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


class _Processes(Multiprocess):
    """Starts one anew that dies. SIGHUP goes to all of them: each changes its model while it answers."""

    def keep_subprocess_alive(self) -> None:
        """Asks each for its health. The child's end of the line is open here, too, and would hide that it is gone."""
        for process in self.processes:
            process.child_conn.close()
        super().keep_subprocess_alive()

    def handle_hup(self) -> None:
        """Hands it on."""
        for process in self.processes:
            if process.pid is not None and process.is_ready(timeout=1):  # before, the signal would end it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGHUP)


@contextlib.contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """The socket; it listens from the first moment, so that who calls while a model is loaded waits and is answered."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise UsageError(f"host must be a name or address of this machine; {where}: {error.strerror}.") from error
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise UsageError(
                f"host and port must be free and this machine's; {where}: {error.strerror}. Pass another --port, or 0"
                " for any."
            ) from error
        sock.listen(2048)
        sock.set_inheritable(True)
        yield sock


def _tell(settings: Settings, predictor: Predictor, url: str) -> None:
    facts = predictor.facts
    by = "" if settings.workers == 1 else f", by {settings.workers} processes"
    say(f"{facts['architecture']}, {len(facts['classes'])} classes, {facts['runtime']} {facts['precision']}{by}.")
    secret = f"/#token={settings.token}" if settings.token is not None else "/"
    say(f"open {url}{secret}  (Ctrl-C ends it)")
    if not settings.is_private:
        guarded = "asks for a token" if settings.token is not None else "asks for no token"
        say(f"other machines can reach this service; it {guarded} and has no TLS: put a proxy with HTTPS before it.")
