"""Kills training a hundred times per family, and looks whether one bit changed.

    python benchmarks/torture/torture.py --kills 100 --csv benchmarks/torture/results.csv

Each run has worker processes, mixup, cutmix, repeated augmentation, RandAugment, drop-path, accumulation and averaging,
and saves at every step. It is killed (SIGKILL) at a random moment, or at a named point of writing a state, goes on, is
killed again, until it ends; then all that it left is compared, bit by bit, with a run that nothing disturbed. Children
are forked from one process that has imported everything, so that a kill costs a second and not five.

Controls, which must fail: a file that is written in place, and a resume that forgets the average of the weights.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.killpoints import CALLS, killpoints
from tests.train import tiny

from weft import files
from weft.bench.records import write_csv
from weft.errors import CheckpointError
from weft.train import run_loop as session
from weft.train import state, train
from weft.train.state import load_state, newest_step

MAX_PASSES = 40  # a point is passed about five times for each state


def in_child(work: Callable[[], Any], kill_after: float | None = None) -> int:
    """Runs something in a process of its own, perhaps not for long. Returns its exit code, or -9."""
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


def begin(data: Path, out: Path, model: str, workers: int) -> None:
    settings = {**tiny.EVERYTHING, **tiny.ARGUMENTS[model], "workers": workers}
    train(data, model, settings=settings, out=out, force=out.exists(), quiet=True)


def go_on(out: Path, workers: int) -> None:
    train(resume=out, settings={"workers": workers}, quiet=True)


def die_when(is_time: Callable[[str], bool], work: Callable[[], Any]) -> None:
    """Do some work; this process kills itself at the first kill point for which `is_time` is true."""

    def at(name: str) -> None:
        if is_time(name):
            os.kill(os.getpid(), signal.SIGKILL)

    with killpoints(at):
        work()


def nth(point: str, number: int) -> Callable[[str], bool]:
    """Return a predicate that is true when a kill point is passed for the n-th time."""
    counter = itertools.count(1)
    return lambda name: name == point and next(counter) == number


def has_state(out: Path) -> bool:
    return bool(list((out / "state").glob("step-*.json")))


class Count:
    """What happened to one family."""

    def __init__(self) -> None:
        self.kills = self.runs = self.lost = self.different = 0


def disturbed(
    data: Path, out: Path, model: str, chance: random.Random, seconds: float, count: Count, point: str | None = None
) -> None:
    """One run, killed until it ends."""
    while True:
        workers = chance.choice((0, 0, 2))
        fresh = not has_state(out)
        first, again = functools.partial(begin, data, out, model, workers), functools.partial(go_on, out, workers)
        work: Callable[[], Any] = first if fresh else again
        if point is not None:
            is_time, plain = nth(point, chance.randint(1, MAX_PASSES)), work
            code = in_child(lambda is_time=is_time, plain=plain: die_when(is_time, plain))
            point = None if code != -9 or chance.random() < 0.5 else point
        else:
            code = in_child(work, chance.uniform(0.05, seconds))
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


def control_in_place(folder: Path, chance: random.Random, times: int, write: Callable[[Path, bytes], Any]) -> int:
    """How often a file of 16 MB, written again and again, is neither the old nor the new after a kill."""
    contents = [bytes([fill]) * (16 << 20) for fill in (1, 2)]
    broken = 0
    for _ in range(times):
        path = folder / "file"
        path.write_bytes(contents[0])

        def work(path: Path = path) -> None:
            while True:
                for content in contents:
                    write(path, content)

        in_child(work, chance.uniform(0.05, 0.3))
        broken += path.read_bytes() not in contents
    return broken


def control_forgetful(data: Path, folder: Path, reference: Path) -> bool:
    """Whether a resume that forgets the average is noticed."""
    out = folder / "forgetful"
    has_four = lambda name: (newest_step(out / "state") or 0) >= 4  # noqa: E731
    in_child(lambda: die_when(has_four, lambda: begin(data, out, "levit_nano_32", 0)))

    def forget() -> None:
        restore = session.Session.restore

        def faulty(self: session.Session, state: state.State) -> None:
            restore(self, state)
            self.learner.ema.module.load_state_dict(self.learner.model.state_dict())

        session.Session.restore = faulty
        go_on(out, 0)

    assert in_child(forget) == 0
    return not _is_same(reference, out)


def _is_same(one: Path, other: Path) -> bool:
    try:
        tiny.assert_same_run(one, other)
    except AssertionError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="per family, at random moments")
    parser.add_argument("--points", type=int, default=4, help="runs per family and named point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, chance = Path(temporary), random.Random(args.seed)
        data = tiny.paint(folder / "data")
        for model in tiny.ARGUMENTS:
            whole = folder / f"whole-{model}"
            begun = time.perf_counter()
            assert in_child(lambda model=model, whole=whole: begin(data, whole, model, 0)) == 0
            seconds = time.perf_counter() - begun
            plans: list[tuple[str, str | None, int]] = [("random moment", None, args.kills)]
            plans += [(f"point: {point}", point, args.points) for point in CALLS]
            for what, point, wanted in plans:
                count = Count()
                while (count.kills if point is None else count.runs) < wanted:
                    out = folder / "run"
                    shutil.rmtree(out, ignore_errors=True)
                    disturbed(data, out, model, chance, seconds, count, point)
                    count.different += not _is_same(whole, out)
                rows.append(dict(model=model, what=what, kills=count.kills, runs=count.runs, lost=count.lost,
                                 different=count.different))  # fmt: skip
                print(rows[-1], flush=True)
        for what, write in (("control: in place", lambda path, data: path.write_bytes(data)),
                            ("beside, flushed, moved", files.write_whole)):  # fmt: skip
            broken = control_in_place(folder, chance, 12, write)
            rows.append(dict(model="a file of 16 MB", what=what, kills=12, runs=0, lost=broken, different=0))
            print(rows[-1], flush=True)
        noticed = control_forgetful(data, folder, folder / "whole-levit_nano_32")
        what = "control: a resume that forgets the average"
        rows.append(dict(model="levit_nano_32", what=what, kills=1, runs=1, lost=0, different=int(noticed)))
        print(rows[-1], flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    ours = [row for row in rows if not row["what"].startswith("control")]
    if any(row["lost"] or row["different"] for row in ours) or not noticed:
        sys.exit("Something was lost, or changed.")


if __name__ == "__main__":
    main()
