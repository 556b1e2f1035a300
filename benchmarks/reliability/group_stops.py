"""Stop training runs by signals to their process group, resume them, and check that they resume bit-exactly.

    python benchmarks/reliability/group_stops.py --stops 200 --csv benchmarks/reliability/group_stops.csv

`timeout`, the scheduler of a cluster and a closed terminal signal all processes of a run at the same time: the training
process, the data loader workers, both ranks under torchrun and torchrun itself. Each run here (three networks with
BatchNorm, 0 or 2 workers, one process or two ranks; Mixup, repeated augmentation, RandAugment, drop-path, weight
averaging) is stopped at random moments by SIGTERM, SIGINT or SIGHUP and resumed until it is finished. Then weights,
average, optimizer moments, models and the loss of every step are compared with those of an uninterrupted run. A run may
also refuse to resume with a message, but must not end with different bits. `--source DIR` measures another checkout of
weft.

Single-process runs are forked from this process, which has imported all modules, so that a stop takes one second; runs
of two ranks are started by torchrun.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONWARNINGS"] = "ignore"
ROOT = Path(__file__).parents[2]
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
MODELS = ("ceit_nano_32", "cvt_nano_32", "levit_nano_32")
SETUPS = ((1, 0), (1, 2), (1, 2), (2, 0), (2, 2))  # processes, workers; the case of the bug report twice
STOPS_PER_RUN = 4
MORE = {"epochs": 5, "accumulate": 1, "batch_size": 12}


def command(data: Path | None, out: Path, model: str, processes: int, workers: int) -> list[str]:
    """Return the command of `weft train`, under torchrun for two processes; without `data`, the one that resumes."""
    from tests.train import tiny

    arguments = tiny.command(data, out, workers=workers) if data is None else tiny.command(
        data, out, model, workers=workers, **MORE
    )  # fmt: skip
    if processes == 1:
        return arguments
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*run, "--no-python", *arguments]


class Process:
    """A run in a separate process group."""

    def __init__(self, arguments: list[str], log: Path, is_forked: bool) -> None:
        self.is_forked = is_forked
        if not is_forked:
            with log.open("ab") as sink:
                self.process = subprocess.Popen(arguments, stdout=sink, stderr=sink, start_new_session=True)
            self.pid = self.process.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            from weft.cli import main

            try:
                code = main(arguments[3:])  # python -m weft
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)

    def wait(self, seconds: float) -> int | None:
        """Wait for at most some seconds; return the exit code, None if the process still runs."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.is_forked:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
            elif (code := self.process.poll()) is not None:
                return code
            time.sleep(0.005)
        return None

    def signal(self, name: str) -> None:
        """Send a signal to all processes of the group."""
        os.killpg(self.pid, getattr(signal, name))

    def end(self) -> None:
        """Kill the remaining processes of the group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def steps_on_disk(out: Path) -> int:
    """Return the step of the newest state; 0 without one."""
    steps = [int(path.stem.rpartition("-")[2]) for path in out.glob("state/step-*.safetensors")]
    return max(steps, default=0)


def run_with_stops(setup: tuple[int, int], model: str, data: Path, folder: Path, rng: random.Random) -> dict[str, Any]:
    """Stop and resume a run several times, then let it finish; return signals, exit codes, outcome and folder."""
    processes, workers = setup
    out, log, codes, used = folder / "run", folder / "log.txt", list[int | str](), list[str]()
    is_forked = processes == 1
    for number in range(STOPS_PER_RUN + 1):
        has_state = bool(list(out.glob("state/step-*.safetensors")))
        if not has_state and out.exists():
            shutil.rmtree(out)
        process = Process(command(None if has_state else data, out, model, processes, workers), log, is_forked)
        is_last = number == STOPS_PER_RUN
        if not is_last:
            step = steps_on_disk(out)
            # wait for the first new state or the end of the process, then for a random time
            until = time.monotonic() + 90
            while steps_on_disk(out) == step and process.wait(0) is None and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.6 if is_forked else 1.0))
            name = rng.choice(SIGNALS)
            try:
                process.signal(name)
                used.append(name)
            except ProcessLookupError:
                pass
        code = process.wait(180)
        process.end()
        codes.append("hung" if code is None else code)
        if code == 0:
            break
        if is_last:
            return {"stops": used, "codes": codes, "outcome": "refused to resume", "log": log.read_text()[-500:]}
    return {"stops": used, "codes": codes, "outcome": "", "out": out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=200, help="number of stops of all runs")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--source", type=Path, default=ROOT, help="checkout of weft to measure")
    parser.add_argument("--label", default="after", help="value of the column weft")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(args.source / "src")
    sys.path[:0] = [str(args.source / "src"), str(ROOT)]
    from benchmarks.common.records import read_csv, write_csv
    from tests.train import tiny

    import weft.train  # noqa: F401  # the runs are forked from this process

    rng, rows, count = random.Random(args.seed), [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = tiny.paint(folder / "noise")
        uninterrupted: dict[tuple[int, str], Path] = {}
        number = 0
        while count < args.stops:
            setup, model = SETUPS[number % len(SETUPS)], MODELS[number % len(MODELS)]
            key = (setup[0], model)
            if key not in uninterrupted:
                uninterrupted[key] = folder / f"uninterrupted-{setup[0]}-{model}"
                done = tiny.finish(command(data, uninterrupted[key], model, setup[0], 0))
                assert done.returncode == 0, done.stderr
            run_folder = folder / f"run-{number}"
            run_folder.mkdir()
            result = run_with_stops(setup, model, data, run_folder, rng)
            if not result["outcome"]:
                try:
                    tiny.assert_same_run(uninterrupted[key], result["out"])
                    result["outcome"] = "same bits"
                except AssertionError as error:
                    result["outcome"] = f"DIFFERENT: {str(error).splitlines()[0]}"
            count += len(result["stops"])
            rows.append(
                {
                    "weft": args.label,
                    "run": number,
                    "model": model,
                    "processes": setup[0],
                    "workers": setup[1],
                    "signals": " ".join(result["stops"]),
                    "exit_codes": " ".join(map(str, result["codes"])),
                    "outcome": result["outcome"],
                }
            )
            print(count, *rows[-1].values(), sep="  ", flush=True)
            if args.csv:
                others = [row for row in read_csv(args.csv) if row["weft"] != args.label]
                write_csv(args.csv, [*others, *rows])
            shutil.rmtree(run_folder)
            number += 1
    wrong = sum(row["outcome"].startswith("DIFFERENT") for row in rows)
    print(f"{count} stops in {len(rows)} runs: {wrong} runs ended with different bits.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
