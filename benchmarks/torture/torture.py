"""Kill and resume training runs a hundred times per family, and check that they resume bit-exactly.

    python benchmarks/torture/torture.py --kills 100 --csv benchmarks/torture/results.csv

Each run uses worker processes, Mixup, CutMix, repeated augmentation, RandAugment, drop-path, gradient accumulation and
weight averaging, and saves its state at every step. It is killed (SIGKILL) at a random moment, or at a named point
while a state is written, and resumed, until it is finished. Then its files are compared bit by bit with those of an
uninterrupted run. Runs are forked from a process that has imported the modules of a run, so that a kill takes one
second instead of five.

Two controls must fail: a file that is written in place, and a resume that omits the average of the weights.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import functools
import importlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import write_csv
from tests.killpoints import CALLS, killpoints
from tests.train import tiny

from weft import files
from weft.errors import CheckpointError
from weft.machine.system import hide_wandb
from weft.train import run as running
from weft.train import train
from weft.train.resume import SavedRun
from weft.train.state import load_state, newest_step


def in_child(work: Callable[[], Any], kill_after: float | None = None) -> int:
    """Run a function in a separate process, killed after some seconds if given; return its exit code, -9 if killed."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sink = os.open(os.environ.get("TORTURE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        try:
            work()
        except BaseException as error:
            traceback.print_exc()
            os._exit(error.exit_code if isinstance(error, CheckpointError) else 1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def start(data: Path, out: Path, model: str, workers: int) -> None:
    """Start a run; a run without a state in the same folder is replaced."""
    settings = {**tiny.EVERYTHING, **tiny.ARGUMENTS[model], "workers": workers}
    train(data, model, settings=settings, out=out, force=out.exists(), quiet=True)


def resume(out: Path, workers: int) -> None:
    """Resume a run."""
    train(resume=out, settings={"workers": workers}, quiet=True)


def import_modules(data: Path, folder: Path) -> None:
    """Import all modules that a run imports."""
    names = folder / "modules"

    def run() -> None:
        start(data, folder / "first", "levit_nano_32", 0)
        names.write_text("\n".join(sys.modules))

    assert in_child(run) == 0
    for name in names.read_text().splitlines():
        with contextlib.suppress(ImportError):  # of a module that another name stands for
            importlib.import_module(name)


def kill_when(condition: Callable[[str], bool], work: Callable[[], Any]) -> None:
    """Run a function; kill this process at the first kill point whose name satisfies a condition."""

    def check(name: str) -> None:
        if condition(name):
            os.kill(os.getpid(), signal.SIGKILL)

    with killpoints(check):
        work()


def passes(data: Path, folder: Path, model: str) -> dict[str, int]:
    """Return how often an uninterrupted run passes each kill point."""
    log = folder / f"passes-{model}"

    def count(name: str) -> None:
        with builtins.open(log, "a") as file:  # not one of the calls that are counted
            file.write(f"{name}\n")

    def run() -> None:
        with killpoints(count):
            start(data, folder / f"counted-{model}", model, 0)

    assert in_child(run) == 0
    return Counter(log.read_text().split())


def nth(point: str, number: int) -> Callable[[str], bool]:
    """Return a predicate that is true when a kill point is passed for the n-th time."""
    counter = itertools.count(1)
    return lambda name: name == point and next(counter) == number


def has_state(out: Path) -> bool:
    return bool(list((out / "state").glob("step-*.safetensors")))


class Counts:
    """Numbers of kills, finished runs, lost states and runs that differ, of a family."""

    def __init__(self) -> None:
        self.kills = self.runs = self.lost = self.different = 0


def run_with_kills(
    data: Path,
    out: Path,
    model: str,
    rng: random.Random,
    seconds: float,
    count: Counts,
    point: str | None = None,
    passed: int = 1,
) -> None:
    """Start a run, kill and resume it until it is finished or its state is lost, and count.

    Args:
        data, out, model: of the run.
        rng: source of the kill times and of the numbers of workers.
        seconds: duration of an uninterrupted run, the largest time before a kill.
        count: counts to update.
        point: name of the kill point; None for random moments.
        passed: how often an uninterrupted run passes it.
    """
    while True:
        workers = rng.choice((0, 0, 2))
        work: Callable[[], Any] = functools.partial(start, data, out, model, workers)
        if has_state(out):
            work = functools.partial(resume, out, workers)
        if point is not None:
            condition = nth(point, rng.randint(1, passed))
            code = in_child(functools.partial(kill_when, condition, work))
            point = None if code != -9 or rng.random() < 0.5 else point
        else:
            code = in_child(work, rng.uniform(0.05, seconds))
        count.kills += code == -9
        if has_state(out):
            try:
                load_state(out / "state")
            except CheckpointError:
                count.lost += 1
                return
        if code == 0:
            count.runs += 1
            return
        if code not in (-9, 0):
            raise SystemExit(f"{model}: a run ended with exit code {code}")


def control_in_place(folder: Path, rng: random.Random, times: int, write: Callable[[Path, bytes], Any]) -> int:
    """Return how often a file of 16 MB that is rewritten repeatedly is neither the old nor the new one after a kill."""
    contents = [bytes([fill]) * (16 << 20) for fill in (1, 2)]
    broken = 0
    for _ in range(times):
        path = folder / "file"
        path.write_bytes(contents[0])

        def work(path: Path = path) -> None:
            while True:
                for content in contents:
                    write(path, content)

        in_child(work, rng.uniform(0.05, 0.3))
        broken += path.read_bytes() not in contents
    return broken


def control_without_average(data: Path, folder: Path, reference: Path) -> bool:
    """Return whether the comparison detects a resume that omits the average of the weights."""
    out = folder / "without-average"
    has_four = lambda name: (newest_step(out / "state") or 0) >= 4  # noqa: E731
    in_child(lambda: kill_when(has_four, lambda: start(data, out, "levit_nano_32", 0)))

    def resume_without_average() -> None:
        restore = running.Run.restore

        def faulty(self: running.Run, saved: SavedRun) -> None:
            restore(self, saved)
            self.learner.ema.module.load_state_dict(self.learner.model.state_dict())

        running.Run.restore = faulty
        resume(out, 0)

    assert in_child(resume_without_average) == 0
    return not _is_same(reference, out)


def _is_same(one: Path, other: Path) -> bool:
    try:
        tiny.assert_same_run(one, other)
    except AssertionError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills at random moments per family")
    parser.add_argument("--points", type=int, default=4, help="runs per family and named point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    hide_wandb()  # timm would import it in every run
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, rng = Path(temporary), random.Random(args.seed)
        data = tiny.paint(folder / "data")
        import_modules(data, folder)
        for model in tiny.ARGUMENTS:
            uninterrupted = folder / f"uninterrupted-{model}"
            begun = time.perf_counter()
            assert in_child(lambda model=model, uninterrupted=uninterrupted: start(data, uninterrupted, model, 0)) == 0
            seconds = time.perf_counter() - begun
            passed = passes(data, folder, model)
            plans: list[tuple[str, str | None, int]] = [("random moment", None, args.kills)]
            plans += [(f"point: {point}", point, args.points) for point in CALLS]
            for what, point, wanted in plans:
                count = Counts()
                while (count.kills if point is None else count.runs) < wanted:
                    out = folder / "run"
                    shutil.rmtree(out, ignore_errors=True)
                    run_with_kills(data, out, model, rng, seconds, count, point, passed.get(point or "", 1))
                    count.different += not _is_same(uninterrupted, out)
                rows.append(dict(model=model, what=what, kills=count.kills, runs=count.runs, lost=count.lost,
                                 different=count.different))  # fmt: skip
                print(rows[-1], flush=True)
        for what, write in (("control: in place", lambda path, data: path.write_bytes(data)),
                            ("beside, flushed, moved", files.write_file)):  # fmt: skip
            broken = control_in_place(folder, rng, 12, write)
            rows.append(dict(model="a file of 16 MB", what=what, kills=12, runs=0, lost=broken, different=0))
            print(rows[-1], flush=True)
        is_detected = control_without_average(data, folder, folder / "uninterrupted-levit_nano_32")
        what = "control: a resume that forgets the average"
        rows.append(dict(model="levit_nano_32", what=what, kills=1, runs=1, lost=0, different=int(is_detected)))
        print(rows[-1], flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    runs = [row for row in rows if not row["what"].startswith("control")]
    if any(row["lost"] or row["different"] for row in runs) or not is_detected:
        sys.exit("A state was lost, a run differs from the uninterrupted one, or a control was not detected.")


if __name__ == "__main__":
    main()
