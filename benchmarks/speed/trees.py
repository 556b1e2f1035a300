"""Compare two source trees of weft: python benchmarks/speed/trees.py OLD_SRC IMAGES [--rounds N] [--out FILE]

OLD_SRC is the `src` of an older checkout, IMAGES an image folder. Three things that every use starts with run in fresh
processes, in turns of both trees, each with the same interpreter and threads: a model is built, one image is classified
on the command line by a model directory, and a folder is opened (every image decoded). Seconds are those of the
processor, which other work on the machine disturbs less than the clock; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

NEW_SRC = Path(__file__).parents[2] / "src"
COLUMNS = ("what", "instructions", "rounds", "old_s", "new_s", "new_over_old")
BUILD = "import weft; weft.create_model('levit_256')"
OPEN = "import sys; from weft.data import open_data; open_data(sys.argv[1])"
SAVE = """
import sys, weft
from weft.checkpoints import save_model_dir
save_model_dir(weft.create_model("levit_nano_32", num_classes=3), sys.argv[1], label_names=["a", "b", "c"])
"""


def seconds(words: list[str], src: Path) -> float:
    """Return the processor seconds of a process that imports weft from `src`, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(src), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run all cases in turns, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_src", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=9, help="of the short cases; opening runs a third of them")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("trees.csv"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        seconds(["-c", SAVE, model], NEW_SRC)
        image = next(path for path in sorted(args.images.rglob("*")) if path.suffix in (".jpg", ".jpeg", ".png"))
        cases = {
            "create_model levit_256": (["-c", BUILD], args.rounds),
            "weft predict": (["-m", "weft", "predict", model, str(image)], args.rounds),
            f"open_data, {sum(path.is_file() for path in args.images.rglob('*'))} files": (
                ["-c", OPEN, str(args.images)],
                max(args.rounds // 3, 1),
            ),
        }
        rows = []
        for what, (words, rounds) in cases.items():
            times: dict[Path, list[float]] = {args.old_src: [], NEW_SRC: []}
            for number in range(rounds + 1):
                for src, own in times.items():
                    taken = seconds(words, src)
                    own += [taken] if number else []  # the first round compiles and fills the caches of files
            old, new = (statistics.median(own) for own in times.values())
            rows.append(
                (what, torch.backends.cpu.get_cpu_capability(), rounds, f"{old:.2f}", f"{new:.2f}", f"{new / old:.3f}")
            )
            print(*rows[-1], flush=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
