"""Check and measure weft on a GPU, in parts that can be interrupted.

    make gpu                                             # all parts; call it again until no cell is left
    python benchmarks/gpu/run.py --part speed --seconds 420
    make gpu DEVICE=cpu SCALE=small                      # rehearse on the CPU, in runs/gpu-rehearsal/cpu-small

Every call takes at most `--seconds`, continues after the last finished cell, and writes a CSV per part, README.md next
to them, and the table of weft's README. state.json has the results of the cells for each device and version of PyTorch:
on another one, all are measured again. A cell that fails, also in some rows only, is recorded in failures.csv, and the
others continue; `--retry` measures it again. Nothing is downloaded or installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # weft need not be installed

from benchmarks.common.records import read_csv, write_csv
from cells import CELLS
from settings import (
    DONE,
    HERE,
    IN_PROGRESS,
    OPTIONAL,
    REQUIRED,
    ROOT,
    SCALES,
    Options,
    at_once,
    machine,
    missing,
    read_state,
    run,
    stop_running,
)

from report import write_pages
from weft.errors import WeftError
from weft.files import write_file

CORES = os.cpu_count() or 1
AT_ONCE = {"parity": CORES // 2, "resume": CORES // 2, "compile": 3}  # cells at the same time: nothing is timed
LEAST = 20  # no cell is started with fewer seconds left in the call
LEAST_OF_RUN = 120  # nor the run on CIFAR-10, which must save a state before it is stopped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--seconds", type=float, default=420, help="duration of this call (default: 420)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu; in a rehearsal runs/gpu-rehearsal")
    parser.add_argument("--cifar10", type=Path, default=os.environ.get("CIFAR10") or None, help="folder of CIFAR-10")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only cells with all these texts in their names"
    )
    parser.add_argument("--retry", action="store_true", help="measure failed and partial cells again")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    setting = f"{args.device}-{args.scale}"
    out = args.out or (HERE if setting == "cuda-full" else ROOT / "runs" / "gpu-rehearsal" / setting)
    cifar10 = None if args.cifar10 is None else Path(args.cifar10).absolute()
    options = Options(args.device, args.scale, out.absolute(), cifar10, args.seconds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # kills the processes that this one started
    if args.cell is not None:
        return _measure(args.part[0], args.cell, options)
    if absent := missing(REQUIRED):
        print(f"Packages are missing: {', '.join(absent)}. Install them, or add a folder with them to PYTHONPATH.")
        return 2
    if args.device == "cuda" and not _has_cuda():
        print("PyTorch finds no CUDA device. Rehearse on the CPU with: make gpu DEVICE=cpu SCALE=small")
        return 2
    for name in missing(OPTIONAL):
        print(f"{name} is not installed; unavailable: {OPTIONAL[name]}.")
    try:
        return Session(options, args.part, args.retry, args.only).work()
    except WeftError as error:
        print(error)
        return error.exit_code


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure(part: str, cell: str, options: Options) -> int:
    """Measure a cell in this process, and write the result for the calling process."""
    from parts import MEASURES

    from weft.bench.worker import cause

    try:
        result = MEASURES[part](cell, options)
    except Exception as error:
        traceback.print_exc()
        print(cause(error), flush=True)  # the last line of the log is the error of the cell
        return 1
    _result_file(options, part, cell).write_text(json.dumps(result, default=str))
    return 0


def _result_file(options: Options, part: str, cell: str) -> Path:
    return options.scratch / f"{_file_name(part, cell)}.result.json"


def _file_name(part: str, cell: str) -> str:
    return f"{part} {cell}".strip().replace(" ", "-").replace("/", "-")


class Session:
    """A call that measures the open cells until its time is over.

    Args:
        options: of the command line; `seconds` is the duration of the call.
        parts: names of the parts.
        retry: also measure the cells that failed in an earlier call, or have rows with an error.
        only: texts that are in the names of the cells.
    """

    def __init__(self, options: Options, parts: list[str], retry: bool = False, only: Sequence[str] = ()) -> None:
        self.options, self.parts, self.retry, self.only = options, parts, retry, only
        self.until = time.monotonic() + options.seconds
        options.out.mkdir(parents=True, exist_ok=True)
        options.scratch.mkdir(parents=True, exist_ok=True)
        self.least = dict.fromkeys(CELLS, float(LEAST))  # seconds; no less than the longest cell so far took
        self.least["cifar10"] = LEAST_OF_RUN
        self.states = read_state(options.out)
        self.state = self.states.setdefault(options.setup, {})

    def work(self) -> int:
        """Measure open cells. Return 0 if all are done, 1 if some failed, 3 if the next call continues."""
        n_open = 0
        for part in self.parts:
            cells = [cell for cell in CELLS[part](self.options) if self._is_open(part, cell)]
            if cells and part == "cifar10" and self.options.cifar10 is None:
                print("cifar10 is left out: set CIFAR10=FOLDER (train/ and test/ with a folder per class).")
                continue
            measure, count = functools.partial(self._timed, part), max(1, AT_ONCE.get(part, 1))
            for index, (result, error) in at_once(measure, cells, count, stop_running):
                n_open += self._record(part, cells[index], result, error)
        write_pages(self.options, publish=self.options.out == HERE)
        ended = (DONE, IN_PROGRESS)
        failed = [f"{part} {cell}" for part, cells in self.state.items() for cell, v in cells.items() if v not in ended]
        print(f"{n_open} cells are left: call this command again." if n_open else "No cell is left.")
        if failed:
            print(f"Failed or partial ({len(failed)}): {', '.join(failed)}; see {self.options.out / 'failures.csv'}.")
            print("--retry (make gpu RETRY=1) measures them again.")
        return 3 if n_open else int(bool(failed))

    def _is_open(self, part: str, cell: str) -> bool:
        known = self.state.get(part, {}).get(cell)
        if not all(text in cell for text in self.only):
            return False
        if part == "compile":  # only for open cells; the cache is a part of the machine, unlike the state
            if not self._is_open(*cell.split(" ", 1)):
                return False
            if known == DONE and not _result_file(self.options, part, cell).exists():
                known = None
        return known in (None, IN_PROGRESS) or (self.retry and known != DONE)

    def _timed(self, part: str, cell: str) -> tuple[Any, str | None]:
        """Measure a cell in a process of its own; return (None, None) if a later call has to do it."""
        begun, left = time.monotonic(), self.until - time.monotonic()
        if left < self.least[part]:
            return None, None
        if part == "cifar10" and self.state.get(part, {}).get(cell) != IN_PROGRESS:
            shutil.rmtree(self.options.scratch / part, ignore_errors=True)  # a run in progress is resumed, no other one
            self._note(part, cell, IN_PROGRESS)
        result, error = self._child(part, cell)
        self.least[part] = max(self.least[part], time.monotonic() - begun)
        print(f"{part} {cell}: {time.monotonic() - begun:.0f} s {error or ''}", flush=True)
        if error == OUT_OF_TIME and left < 0.8 * self.options.seconds:  # a call that starts with it has more time
            return None, None
        return result, error

    def _record(self, part: str, cell: str, result: Any, error: str | None) -> int:
        """Write the rows of a cell or its failure; return 1 if it is not finished."""
        if error is None and result is None:
            return 1
        self._replace_rows(part, cell, result or [])
        errors = [row["error"] for row in result or [] if row.get("error")]
        self._note(part, cell, f"failed: {error}" if error else f"partial: {errors[0]}" if errors else DONE)
        return 0

    def _child(self, part: str, cell: str) -> tuple[Any, str | None]:
        options, seconds = self.options, self.until - time.monotonic()
        file, log = _result_file(options, part, cell), options.scratch / f"{_file_name(part, cell)}.log.txt"
        file.unlink(missing_ok=True)
        arguments = [str(HERE / "run.py"), "--part", part, "--cell", cell, "--device", options.device]
        arguments += [
            "--scale",
            options.scale_name,
            "--out",
            str(options.out),
            "--seconds",
            f"{max(seconds - 10, 10):.0f}",
        ]
        arguments += ["--cifar10", str(options.cifar10)] if options.cifar10 else []
        code = run(arguments, log, seconds, grace=5)
        if code is None:
            return None, OUT_OF_TIME
        if code != 0 or not file.exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            return None, f"exit code {code}: {lines[-1][:300]}"
        return json.loads(file.read_text()), None

    def _replace_rows(self, part: str, cell: str, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a cell in place of earlier ones of the same device and version of PyTorch."""
        file, where = self.options.out / f"{part}.csv", machine(self.options.device)
        others = [row for row in read_csv(file) if not _is_of(row, {"cell": cell, **where})]
        _write(file, [*others, *({"cell": cell, **row, **where} for row in rows)])

    def _note(self, part: str, cell: str, result: str) -> None:
        self.state.setdefault(part, {})[cell] = result
        write_file(self.options.out / "state.json", json.dumps(self.states, indent=1) + "\n")
        file, new = self.options.out / "failures.csv", {"part": part, "cell": cell, **machine(self.options.device)}
        others = [row for row in read_csv(file) if not (row["part"] == part and _is_of(row, new))]
        failed = [] if result in (DONE, IN_PROGRESS) else [{"part": part, "cell": cell, "error": result} | new]
        _write(file, others + failed)


def _is_of(row: dict[str, str], other: dict[str, str]) -> bool:
    """Return whether two rows are of the same cell, device and version of PyTorch."""
    return all(row[key] == other[key] for key in ("cell", "device", "torch"))


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file; without rows, there is none."""
    if rows:
        write_csv(file, rows)
    else:
        file.unlink(missing_ok=True)


OUT_OF_TIME = "took longer than the time of the call"

if __name__ == "__main__":
    sys.exit(main())
