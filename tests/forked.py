"""Processes that start in milliseconds: forked from a process that has already imported weft, torch and timm.

`Popen` and `run` have the interface of `subprocess`. A command `python -m MODULE ...` or `python -c CODE ...` runs in a
process of its own, with its own signals, environment, output and exit code; only the imports are shared. Tests of the
start of a process (import times, `LD_PRELOAD`, `PYTHONMALLOC`) use `subprocess` itself. The workers of pytest-xdist are
forked from the same process. All end with the tests, also where those are killed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SERVER = "WEFT_TESTS_FORK_SERVER"  # in workers of xdist: file descriptor of the connection to the process that forks


@functools.cache
def _server() -> int:
    """File descriptor of the connection to the process that forks, which ends with its last connection."""
    if SERVER in os.environ:
        return int(os.environ[SERVER])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=environment,
        start_new_session=True,
    )
    process.returncode = 0  # nobody waits for it, and no test is blamed for that
    theirs.close()
    return ours.detach()


def fork_workers() -> None:
    """Let pytest-xdist fork its workers, each of which would spend most of the time of its start on imports."""
    from execnet import gateway_io

    def start(io: Any, args: list[str], execmodel: Any) -> None:
        words = [word for word in args if word != "-u"]
        io.popen = Worker(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        gateway_io.Popen2IO.__init__(io, io.popen.stdin, io.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster.__init__ = start


class Popen(subprocess.Popen):
    """`subprocess.Popen` of a Python command, forked.

    Attributes:
        is_worker: whether the process may itself ask for forks.
    """

    is_worker = False

    def _execute_child(self, args: list[str], executable: Any, preexec_fn: Any, *more: Any) -> None:
        _, pass_fds, cwd, env, _, _, _, stdin, to_stdin, of_stdout, stdout, of_stderr, stderr, *_ = more
        assert args[0] == sys.executable, args[0]
        assert args[1] in ("-m", "-c"), args[1]
        assert preexec_fn is None
        assert not pass_fds
        self._status, theirs = socket.socketpair()
        files = [theirs.fileno(), *(own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr)))]
        request = {
            "args": [os.fspath(arg) for arg in args[1:]],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or Path.cwd()),
            "umask": os.umask(0),
        }
        os.umask(request["umask"])
        if self.is_worker:
            files.append(_server())
        with socket.socket(fileno=os.dup(_server())) as server:
            socket.send_fds(server, [json.dumps(request).encode()], files)
        theirs.close()
        devnull = getattr(self, "_devnull", None)
        for fd, other in ((stdin, to_stdin), (stdout, of_stdout), (stderr, of_stderr)):
            if other != -1 and fd not in (-1, devnull):
                os.close(fd)
        if devnull is not None:
            os.close(devnull)
        self._closed_child_pipe_fds = self._child_created = True
        self.pid = array.array("i", self._status.recv(4, socket.MSG_WAITALL))[0]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            status = self._status.recv(4, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else socket.MSG_WAITALL)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        assert status, "the process that forks has ended"
        return self.pid, array.array("i", status)[0]


class Worker(Popen):
    """A worker of pytest-xdist."""

    is_worker = True


def run(
    args: list[str], *, capture_output: bool = False, timeout: float = 300, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, forked."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def serve(control: socket.socket) -> list[str] | None:
    """Fork a child for each request. Returns the child's arguments in the child, None at the end of the tests."""
    woken, wake = socket.socketpair()
    for one in (control, woken, wake):
        one.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ready = selectors.DefaultSelector()
    ready.register(control, selectors.EVENT_READ)
    ready.register(woken, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        ready.select()
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with running.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(array.array("i", [status]).tobytes())
        try:
            message, files, _, _ = socket.recv_fds(control, 1 << 20, 5)
        except BlockingIOError:
            continue
        if not message:
            return None
        request, connection = json.loads(message), socket.socket(fileno=files[0])
        pid = os.fork()
        if pid:
            running[pid] = connection
            connection.sendall(array.array("i", [pid]).tobytes())
            for fd in files[1:]:
                os.close(fd)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for kept in (control, woken, wake, connection, *running.values(), ready):
            kept.close()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: when the process that forks has ended
        for own, fd in enumerate(files[1:4]):
            os.dup2(fd, own)
        for fd in files[1:4]:
            os.close(fd)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.setsid()  # a group of its own: signals to the group of the tests do not reach it
        os.environ.clear()
        os.environ.update(request["env"])
        if files[4:]:
            os.environ[SERVER] = str(files[4])
        os.chdir(request["cwd"])
        os.umask(request["umask"])
        tempfile.tempdir = None
        return request["args"]


def command(args: list[str]) -> int:
    """Run `python ARGS`; the exit code."""
    code: object = 0
    from tests.helpers import BLANK, blank_figures

    if BLANK in os.environ:
        blank_figures(setattr)
    try:
        if args[0] == "-c":
            sys.argv = ["-c", *args[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(args[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def main() -> None:
    """Import what the commands need, then fork."""
    from weft.machine.system import hide_wandb

    hide_wandb()  # from timm
    import fastapi
    import matplotlib.backends.backend_agg
    import sklearn.datasets
    import timm
    import torch
    import uvicorn

    import weft
    import weft.cli.train
    import weft.train.run

    assert all((fastapi, matplotlib, sklearn, timm, torch, uvicorn, weft.create_model, weft.fold, weft.load_checkpoint))
    gc.collect()
    gc.freeze()  # children do not copy the pages of these objects
    args = serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0 if args is None else command(args))  # the end of an interpreter with torch in it takes half a second


if __name__ == "__main__":
    main()
