"""Options and scales of a measurement on a GPU, and the machine columns of every row."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.errors import CheckpointError
from weft.machine.processor import processor_class
from weft.reading import read_json

Item, Result = TypeVar("Item"), TypeVar("Result")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
REQUIRED = ("jaxtyping", "pydantic", "safetensors", "timm", "torch", "torchvision", "yaml")
SOURCES = ("src", "tests", "benchmarks/common", "benchmarks/gpu/*.py", "benchmarks/training/*.py")
MACHINE = ("device", "torch", "cuda", "timm", "transformers", "commit", "processor_class", "cores")
DONE, IN_PROGRESS = "done", "in progress"  # results of cells, besides "partial: ..." and "failed: ..."
OPTIONAL = {
    "transformers": "the peer of CvT",
    "onnx": "ONNX",
    "onnxscript": "ONNX",
    "onnxruntime": "ONNX Runtime",
    "pytest": "the parts tests and parity",
    "matplotlib": "the report of a training run",
}


@dataclass(frozen=True)
class Scale:
    """Amount of the measurement.

    Attributes:
        models, batches, rounds: of inference; models have peers.
        ways, other_ways: of inference, of the parts speed and other_ways.
        modes: of training steps.
        families: of resumed runs.
        pairs, step_batch, step_rounds: of training steps, see benchmarks/training/step.py.
        loop_model, loop_images, loop_batch: of the part loop (`weft train` on JPEGs).
        cifar10: options of `weft train --recipe cifar10`.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...]
    rounds: int
    ways: tuple[str, ...]
    other_ways: tuple[str, ...]
    families: tuple[str, ...]
    modes: tuple[str, ...]
    pairs: tuple[str, ...]
    step_batch: int
    step_rounds: int
    loop_model: str
    loop_images: int
    loop_batch: int
    cifar10: tuple[str, ...]


NANO = ("ceit_nano_32", "cvt_nano_32", "levit_nano_32")
SCALES = {
    "full": Scale(
        models=("levit_128s", "levit_256", "ceit_tiny_patch16_224", "cvt_13"),
        batches=(1, 256),
        rounds=4,
        ways=("eager", "folded", "graphed"),
        other_ways=("compiled", "aotinductor"),
        families=NANO,
        modes=("eager", "compiled"),
        pairs=("levit", "ceit", "cvt"),
        step_batch=128,
        step_rounds=20,
        loop_model="levit_256",
        loop_images=4096,
        loop_batch=256,
        cifar10=(),
    ),
    "small": Scale(
        models=("ceit_tiny_patch16_224", "levit_128s", "cvt_13"),
        batches=(1,),
        rounds=1,
        ways=("eager", "folded", "graphed"),
        other_ways=("compiled", "aotinductor"),
        families=("levit_nano_32",),
        modes=("eager", "compiled"),
        pairs=("ceit",),
        step_batch=2,
        step_rounds=1,
        loop_model="levit_nano_32",
        loop_images=64,
        loop_batch=16,
        cifar10=("--epochs", "1", "--limit", "256", "--set", "evaluate_every=1", "--set", "save.every_steps=1"),
    ),
}


@dataclass(frozen=True)
class Options:
    """Options of the command line: device, scale, output folder, CIFAR-10, seconds for a cell."""

    device: str
    scale_name: str
    out: Path
    cifar10: Path | None
    seconds: float

    @property
    def scale(self) -> Scale:
        return SCALES[self.scale_name]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of the device, in the order of the cells; only GPUs have TF32."""
        return ("bf16", "fp32", "tf32") if self.device == "cuda" else ("fp32", "bf16")

    @property
    def setup(self) -> str:
        """Device and version of PyTorch, whose measurements replace each other."""
        return "{device}, torch {torch}".format(**machine(self.device))

    @property
    def scratch(self) -> Path:
        """Folder for runs and logs, which are not committed."""
        return ROOT / "runs" / "gpu" if self.out == HERE else self.out / "runs"


def run(arguments: list[str], log: Path, seconds: float | None = None, grace: float = 0) -> int | None:
    """Run a process with this Python and weft's sources, with its output in a file.

    Args:
        arguments: of Python.
        log: file for the output.
        seconds: time after which the process group is killed; None for no limit.
        grace: seconds between SIGTERM, on which a cell kills the groups that it started, and SIGKILL; 0 for no SIGTERM.

    Returns:
        The exit code; None if it was killed.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "HF_HUB_OFFLINE": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        _running.add(process)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                if grace:
                    os.killpg(process.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=grace)
                with contextlib.suppress(ProcessLookupError):  # all processes have ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _running.discard(process)


_running: set[subprocess.Popen[bytes]] = set()


def stop_running() -> None:
    """Ask the processes that threads have started with `run` to end; a cell kills the groups that it started."""
    for process in list(_running):
        if process.poll() is None:
            process.terminate()


def at_once(
    function: Callable[[Item], Result], items: Sequence[Item], count: int, stop: Callable[[], None]
) -> Iterator[tuple[int, Result]]:
    """Yield the index and the result of each item as they complete, up to `count` at a time in threads.

    If this process is told to stop, or the caller ends the loop, `stop` is called until no thread waits.
    """
    with ThreadPoolExecutor(count) as pool:
        futures = {pool.submit(function, item): index for index, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):  # a thread may be about to start a process
                stop()
                time.sleep(0.05)
            raise


State = dict[str, dict[str, dict[str, str]]]  # setup -> part -> cell -> result


def read_state(folder: Path) -> State:
    """Return the results of the cells that earlier calls have written to state.json.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = folder / "state.json"
    try:
        return read_json(file, State) if file.exists() else {}
    except CheckpointError as error:
        raise CheckpointError(f"{error} Restore it, or delete it to measure all cells again.") from error


def missing(names: Any) -> list[str]:
    """Return the packages that cannot be imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


@functools.cache
def machine(device: str) -> dict[str, str]:
    """Return the last columns of every row: device, versions, commit of weft's sources, processor of the host."""
    versions = {}
    for name in ("timm", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "" if device == "cuda" else "",
        **versions,
        "commit": _commit(),
        "processor_class": processor_class(),
        "cores": str(os.cpu_count() or ""),
    }


def _commit() -> str:
    """Return the commit, with `-dirty` if a file that decides what is measured differs from it."""
    try:
        commit = _git("describe", "--always", "--exclude=*")
        return commit + ("-dirty" if _git("status", "--porcelain", "--", *SOURCES) else "")
    except (OSError, subprocess.CalledProcessError):  # a copy without git history
        return os.environ.get("WEFT_COMMIT", "unknown")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
