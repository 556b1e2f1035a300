"""Check and measure weft on a GPU, in parts that can be interrupted.

    make gpu                                             # all parts; call it again until no cell is left
    python benchmarks/gpu/run.py --part speed --seconds 420
    make gpu DEVICE=cpu SCALE=small                      # rehearse on the CPU, in runs/gpu-rehearsal/cpu-small

Every call takes at most `--seconds`, continues after the last finished cell, and writes a CSV per part, README.md next
to them, and the table of weft's README. A cell that fails is recorded in failures.csv, and the others continue;
`--retry` measures it again. Nothing is downloaded or installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import write_pages
from settings import (
    HERE,
    OPTIONAL,
    REQUIRED,
    ROOT,
    SCALES,
    Options,
    at_once,
    machine,
    missing,
    run,
    stop_running,
)

from weft.bench.records import read_csv, write_csv
from weft.errors import CheckpointError, WeftError
from weft.files import write_text

PART_NAMES = (
    "parity",
    "tests",
    "resume",
    "compile",
    "speed",
    "profile",
    "choices",
    "steps",
    "loop",
    "cifar10",
    "other_ways",
)
CORES = os.cpu_count() or 1
AT_ONCE = {"parity": CORES // 2, "resume": CORES // 2, "compile": 3}  # cells at the same time: nothing is timed
LEAST = 20  # no cell is started with fewer seconds left in the call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PART_NAMES, default=list(PART_NAMES))
    parser.add_argument("--seconds", type=float, default=420, help="duration of this call (default: 420)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu; in a rehearsal runs/gpu-rehearsal")
    parser.add_argument("--cifar10", type=Path, default=os.environ.get("CIFAR10") or None, help="folder of CIFAR-10")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="only cells with all these texts in their names"
    )
    parser.add_argument("--retry", action="store_true", help="measure failed cells again")
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
    from parts import PARTS

    if cell == "":
        result: Any = PARTS[part].cells(options)
    else:
        result = PARTS[part].measure(cell, options)
    _result_file(options, part, cell).write_text(json.dumps(result, default=str))
    return 0


def _result_file(options: Options, part: str, cell: str) -> Path:
    return options.scratch / f"{_file_name(part, cell)}.result.json"


def _file_name(part: str, cell: str) -> str:
    return f"{part} {cell}".strip().replace(" ", "-").replace("/", "-")


def _read_state(file: Path) -> dict[str, dict[str, str]]:
    """Return the results of the cells of each part, which an earlier call has written.

    Raises:
        CheckpointError: the file is damaged.
    """
    from weft.reading import read_json

    try:
        return read_json(file, dict[str, dict[str, str]]) if file.exists() else {}
    except CheckpointError as error:
        raise CheckpointError(f"{error} Restore it, or delete it to measure all cells again.") from error


class Session:
    """A call that measures the open cells until its time is over.

    Args:
        options: of the command line; `seconds` is the duration of the call.
        parts: names of the parts.
        retry: also measure the cells that failed in an earlier call.
        only: texts that are in the names of the cells.
    """

    def __init__(self, options: Options, parts: list[str], retry: bool = False, only: Sequence[str] = ()) -> None:
        self.options, self.parts, self.retry, self.only = options, parts, retry, only
        self.until = time.monotonic() + options.seconds
        options.out.mkdir(parents=True, exist_ok=True)
        options.scratch.mkdir(parents=True, exist_ok=True)
        self.least = dict.fromkeys(PART_NAMES, float(LEAST))  # seconds; no less than the longest cell so far took
        self.file = options.out / "state.json"
        self.state = _read_state(self.file)

    def work(self) -> int:
        """Measure open cells. Return 0 if all are done, 1 if some failed, 3 if the next call continues."""
        n_open = 0
        for part in self.parts:
            cells = self._cells(part)
            n_open += cells is None
            still = [cell for cell in cells or () if self._is_open(part, cell)]
            measure, count = functools.partial(self._timed, part), max(1, AT_ONCE.get(part, 1))
            for index, (result, error) in at_once(measure, still, count, stop_running):
                n_open += self._record(part, still[index], result, error)
        write_pages(self.options.out, publish=self.options.out == HERE)
        failed = [f"{part} {cell}" for part, cells in self.state.items() for cell, v in cells.items() if v != "done"]
        print(f"{n_open} cells are left: call this command again." if n_open else "No cell is left.")
        if failed:
            print(
                f"Failed or unfinished ({len(failed)}): {', '.join(failed)}; see {self.options.out / 'failures.csv'}."
            )
        return 3 if n_open else int(bool(failed))

    def _cells(self, part: str) -> list[str] | None:
        """Return the cells of a part; None if the time of the call is over."""
        if self.until - time.monotonic() < LEAST:
            return None
        result, error = self._child(part, "")
        if error == OUT_OF_TIME:
            return None
        if error:
            self._note(part, "*", f"failed: {error}")
            return []
        return result

    def _is_open(self, part: str, cell: str) -> bool:
        known = self.state.get(part, {}).get(cell)
        is_chosen = all(text in cell for text in self.only)
        return is_chosen and (known is None or (known.startswith("failed") and self.retry))

    def _timed(self, part: str, cell: str) -> tuple[Any, str | None]:
        """Measure a cell in a process of its own; return (None, None) if a later call has to do it."""
        begun, left = time.monotonic(), self.until - time.monotonic()
        if left < self.least[part]:
            return None, None
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
        if error is None:
            self._append(part, cell, result)
        self._note(part, cell, "done" if error is None else f"failed: {error}")
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

    def _append(self, part: str, cell: str, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a cell, in place of those from a call that was killed before it noted the cell as done."""
        file, where = self.options.out / f"{part}.csv", machine(self.options.device)
        if rows:
            rows_before = [{"cell": "", **row} for row in read_csv(file)]
            others = [row for row in rows_before if (row["cell"], row["device"]) != (cell, where["device"])]
            write_csv(file, [*others, *({"cell": cell, **row, **where} for row in rows)])

    def _note(self, part: str, cell: str, result: str) -> None:
        self.state.setdefault(part, {})[cell] = result
        self.state[part] = {key: value for key, value in self.state[part].items() if key != "*" or cell == "*"}
        write_text(self.file, json.dumps(self.state, indent=1) + "\n")
        failures = [
            {"part": name, "cell": key, "error": value.removeprefix("failed: "), **machine(self.options.device)}
            for name, cells in self.state.items()
            for key, value in cells.items()
            if value != "done"
        ]
        file = self.options.out / "failures.csv"
        if failures:
            write_csv(file, failures)
        else:
            file.unlink(missing_ok=True)


OUT_OF_TIME = "took longer than the time of the call"

if __name__ == "__main__":
    sys.exit(main())
