"""Handle of a worker process of a speed measurement, as the measuring process sees it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weft.bench.choices import COMPILED
from weft.bench.worker import Task
from weft.errors import UsageError

WORKER = "from weft.system import hide_wandb; hide_wandb(); from weft.bench.worker import main; main()"
CALLS, SECONDS = 3, 0.25  # minimum calls and seconds of a turn, after as many seconds of warm-up
MAX_BATCH = 512  # largest batch size in the search for the best one
MIN_GAIN = 1.03  # speedup that a doubled batch size must have for the search to continue


class OutOfMemoryError(UsageError):
    """The memory of the device does not suffice for a batch."""


class WorkerProcess:
    """Handle of a worker process, which runs one task and waits between its turns.

    Attributes:
        task, outputs: the task, and the file for logits. The folder of the file is temporary: it also has the temporary
            files of the process, which is killed at the end and does not remove them.
        info: names and cost of the model, once it is built.
        peak_mib: largest memory of PyTorch on the GPU with the batch size of the last turn; None on a CPU, and for ONNX
            Runtime, which has memory of its own.
    """

    def __init__(self, task: Task, outputs: Path) -> None:
        self.task, self.outputs = task, outputs
        self.process: Any = None
        self.info: dict[str, Any] = {}
        self.peak_mib: float | None = None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def try_build(self) -> bool:
        """Build the model; return False, with a warning, if a peer cannot be built."""
        if self.task.peer is None:
            self.build()
            return True
        try:
            self.build()
        except UsageError as error:
            warnings.warn(f"One way of a peer is left out. {error}", stacklevel=2)
            return False
        return True

    def build(self) -> None:
        """Start the process, and wait until it has built its model."""
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", bufsize=1)
        # on a CPU, torch.compile's pool of compiler processes would keep polling, and slow all workers down by a fifth
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1" if self.task.device == "cpu" else "4"}
        if self.task.way in COMPILED:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # compiled code is kept
        environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.outputs.parent))
        command = [sys.executable, "-P", "-c", WORKER]
        # a session of its own: Ctrl-C on a terminal does not reach it while it starts; this process ends it
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self.info = self._request(asdict(self.task))

    @property
    def name(self) -> str:
        """Model, way and precision, for progress lines."""
        allocator = f", allocator {self.task.allocator}" if self.task.allocator != "default" else ""
        return f"{self.info['model']} {self.info['way']} {self.info['precision']}{allocator}"

    @property
    def precision(self) -> str:
        """Precision of the task; for an export, that of the export."""
        return str(self.info["precision"])

    def turn(
        self, batch_size: int, *, calls: int = CALLS, seconds: float = SECONDS, warm_up: float = SECONDS
    ) -> list[float]:
        """Run one turn, and return the seconds of each timed call.

        Args:
            batch_size: images per call.
            calls, seconds: minimum number of timed calls, and minimum of their total time.
            warm_up: seconds of calls before, at least one.

        Raises:
            OutOfMemoryError: the memory of the device does not suffice.
        """
        reply = self._request(dict(batch_size=batch_size, calls=calls, seconds=seconds, warm_up=warm_up))
        self.peak_mib = reply["peak_mib"]
        return reply["seconds"]

    def logits(self, batch_size: int) -> np.ndarray:
        """Run one call, and return its logits."""
        self._request(dict(batch_size=batch_size, calls=1, seconds=0, warm_up=0, outputs=str(self.outputs)))
        return np.load(self.outputs)

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

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
        except OSError:  # a broken pipe, which Windows also reports as an invalid argument
            self._fail()
        line = self.process.stdout.readline()
        reply = json.loads(line) if line else self._fail()
        if "error" in reply:
            raise (OutOfMemoryError if reply.get("out_of_memory") else UsageError)(reply["error"])
        return reply

    def _fail(self) -> NoReturn:
        code = self.process.wait()
        raise UsageError(
            f"{self.task.label} cannot be measured: its process ended with exit code {code}; see its messages above."
            " Leave it out, or use smaller batches if it ran out of memory (-9)."
        )
