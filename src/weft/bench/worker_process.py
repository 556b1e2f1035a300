"""Handle of a worker process of a speed measurement, as the measuring process sees it.

Thread pools of torch, ONNX Runtime and OpenVINO in the same process slow each other down by a fifth; separate
processes, of which only one computes at a time, do not.
"""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weft.bench import worker
from weft.bench.worker import OutOfMemoryError, Subject
from weft.errors import UsageError, WeftError

# The process imports what this one can, but nothing from the current folder, which may have a file numpy.py.
PROGRAM = """
import pickle, sys
try:
    sys.path[:] = pickle.load(sys.stdin.buffer)
except EOFError:
    sys.exit()  # the parent was stopped meanwhile
from weft.machine.system import hide_wandb
hide_wandb()
from weft.bench.worker import main
main()
"""
CALLS, SECONDS = 3, 0.25  # minimum calls and seconds of a turn, after as many seconds of warm-up
MAX_BATCH = 512  # largest batch size in the search for the best one
MIN_GAIN = 1.03  # speedup that a doubled batch size must have for the search to continue


class WorkerProcess:
    """Handle of a worker process, which builds one model and waits between its turns.

    Args:
        model, way, precision, device, threads: what runs, and how.
        folder: directory for temporary files of the process, which is killed at the end and does not remove them.
        build: function of a module that returns the `Subject`, called in the process with model, way, precision, device
            and the further arguments.
        label: model in messages and rows; '' for its name.
        is_compiled: code that torch.compile generates is kept in its usual cache.

    Attributes:
        subject: the model without its `call`, once it is built.
    """

    subject: Subject

    def __init__(
        self,
        model: str,
        way: str,
        precision: str,
        *,
        folder: Path,
        threads: int,
        device: str = "cpu",
        build: Callable[..., Subject] = worker.build,
        label: str = "",
        is_compiled: bool = False,
        **more: Any,
    ) -> None:
        self.model, self.way, self.precision, self.label = model, way, precision, label or model
        self.threads, self.device = threads, device
        self.name = f"{self.label} {way} {precision}"
        self.folder, self.is_compiled, self._build = folder, is_compiled, build
        self._arguments = {"model": model, "way": way, "precision": precision, "device": device, **more}
        self.process: Any = None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def build(self) -> None:
        """Start the process, and wait until it has built its model.

        Raises:
            WeftError: the model cannot be built.
        """
        # on a CPU, torch.compile's pool of compiler processes would keep polling, and slow all workers down by a fifth
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1" if self.device == "cpu" else "4"}
        if self.is_compiled:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.folder))
        # a session of its own: Ctrl-C on a terminal does not reach it while it starts; this process ends it
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._send([place for place in sys.path if place])
        self.subject = self._ask((self.name, self.threads, self._build, self._arguments))

    def run(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Return what a function of a module returns for the subject and further arguments, in the process.

        Raises:
            OutOfMemoryError: the memory of the device does not suffice.
            WeftError: the function fails in another way.
        """
        return self._ask((function, arguments))

    def turn(
        self, batch_size: int, *, calls: int = CALLS, seconds: float = SECONDS, warm_up: float = SECONDS
    ) -> list[float]:
        """Run one turn, and return the seconds of each timed call; see `weft.bench.worker.timed`."""
        return self.run(worker.timed, batch_size=batch_size, calls=calls, seconds=seconds, warm_up=warm_up)

    def logits(self, batch_size: int) -> np.ndarray:
        """Run one call, and return its logits."""
        return self.run(worker.logits, batch_size=batch_size)

    def memory(self, batch_size: int) -> float:
        """Run one call, and return the memory in use after it, in MB; see `weft.bench.worker.memory`."""
        return self.run(worker.memory, batch_size=batch_size)

    def best_batch(self) -> int:
        """Return the batch size from which doubling it no longer increases the throughput, or exceeds the memory.

        Raises:
            OutOfMemoryError: the memory of the device does not suffice for one image.
        """
        best, batch_size = 0.0, 1
        while True:
            try:
                per_second = batch_size / statistics.median(self.turn(batch_size))
            except OutOfMemoryError:
                if batch_size == 1:
                    raise
                return batch_size // 2
            if per_second < MIN_GAIN * best:
                return batch_size // 2
            if batch_size == MAX_BATCH:
                return MAX_BATCH
            best, batch_size = per_second, 2 * batch_size

    def _ask(self, request: tuple[Any, ...]) -> Any:
        self._send(request)
        try:
            reply = pickle.load(self.process.stdout)  # from a process that this one started
        except EOFError:
            self._fail()
        if isinstance(reply, WeftError):
            raise reply
        return reply

    def _send(self, value: Any) -> None:
        try:
            pickle.dump(value, self.process.stdin)
            self.process.stdin.flush()
        except OSError:  # a broken pipe, which Windows also reports as an invalid argument
            self._fail()

    def _fail(self) -> NoReturn:
        code = self.process.wait()
        raise UsageError(
            f"{self.name} cannot be measured: its process ended with exit code {code}; see its messages above."
            " Leave it out, or use smaller batches if it ran out of memory (-9)."
        )
