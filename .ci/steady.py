"""Does the fast suite pass beside other work? Runs it several times while processes keep the cores busy.

    .venv/bin/python .ci/steady.py                     # five runs beside a load of two
    .venv/bin/python .ci/steady.py --runs 1 --load 4 tests/serve

Prints one line per run, and writes it to benchmarks/reliability/steady.csv unless only some tests run. The exit code is
1 if a test failed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "reliability" / "steady.csv"
FIELDS = ("date", "run", "load", "minutes", "passed", "failed", "skipped", "failures")


def spin() -> None:
    """Keep one core busy."""
    while True:
        sum(range(100_000))


def run(number: int, load: int, tests: list[str]) -> dict[str, object]:
    """Run the fast suite once."""
    workers = min((os.cpu_count() or 1) + 1, 5)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "worksteal", "-m", "not slow"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    start = time.monotonic()
    result = subprocess.run(
        [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    last = result.stdout.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return {
        "date": datetime.date.today().isoformat(),
        "run": number,
        "load": load,
        "minutes": f"{(time.monotonic() - start) / 60:.1f}",
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "failures": " ".join(failures) or ("" if result.returncode == 0 else last),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="tests to run (default: the whole fast suite)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load", type=int, default=2, help="busy processes beside the suite")
    args = parser.parse_args()
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(args.load)]
    for process in busy:
        process.start()
    rows = []
    for number in range(1, args.runs + 1):
        rows.append(run(number, args.load, args.tests))
        print(*(f"{name}: {rows[-1][name]}" for name in FIELDS), sep="  ", flush=True)
    if not args.tests:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
