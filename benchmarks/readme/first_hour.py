"""Run the commands of a new user, and measure when they print and end.

    python benchmarks/readme/first_hour.py PHOTOS OTHER --work FOLDER --csv benchmarks/readme/first_hour.csv

Writes a row per command, in place of the rows of this processor class: seconds to the first output, to the first
accuracy (training commands), of the longest time without output, and to the end. PHOTOS has a folder of images per
class, OTHER photos that show none of the classes. The output of all commands is in FOLDER/log.txt. Needs a quiet
machine, and the extras deploy and offline.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, replace_rows

from weft.machine.processor import processor_class

# Commands in the order of the README, then commands with invalid input.
COMMANDS = """
weft --help
weft models levit
weft recipes
weft doctor
weft data check photos
weft train photos --out runs/photos
weft train photos --out runs/again
weft train photos --recipe probe --out runs/probe
weft predict runs/photos six
weft evaluate runs/photos photos
weft evaluate runs/photos photos --unknown-images other
weft explain runs/photos six --out explained
weft embed runs/photos six --out features.npy
weft similar runs/photos six/0.jpg photos
weft label runs/photos other --out chosen
weft data review photos --out review
weft export runs/photos deploy/onnx --format onnx --precision int8 --data photos
weft export runs/photos deploy/auto --format auto --data photos
weft predict deploy/auto six
weft evaluate deploy/auto photos
weft bench levit_128s --backends eager folded openvino --batch-size 1 --rounds 3
weft models --papers levit
weft study transfer --plan
weft compare photos --budget 5s
weft compare digits --models levit_nano_32 ceit_nano_32 --budget 5s
weft compare digits --models levit_nano_32 ceit_nano_32 --budget 3m --out compared
weft train digits --epochs 1 --out runs/digits
weft predict runs/digits six
weft train --resume runs/photos
weft train nowhere
weft train photos --model levit_256x
weft train photos --out runs/photos
weft predict runs/photos nowhere.jpg
weft predict levit_256 six
weft evaluate runs/nowhere photos
weft embed runs/photos nowhere --out other.npy
weft export runs/photos deploy/onnx
weft data review nowhere
weft bench nowhere
weft compare nowhere
"""


ACCURACY = re.compile(r"cross-validation over|held out +\d")  # first accuracy in the output of `weft train`


def run(command: str, folder: Path) -> tuple[dict[str, object], str]:
    """Run a command; return its row, and its output with the time of each part."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "WEFT_CACHE": str(folder / "cache")}
    arguments = [sys.executable, "-m", *shlex.split(command)]
    begun = time.perf_counter()
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    times, parts, accuracy = [0.0], [], ""
    while part := os.read(process.stdout.fileno(), 1 << 16):
        times.append(time.perf_counter() - begun)
        parts.append(f"[{times[-1]:.1f} s] {part.decode(errors='replace')}")
        if not accuracy and ACCURACY.search(parts[-1]):
            accuracy = f"{times[-1]:.1f}"
    code, end = process.wait(), time.perf_counter() - begun
    silence = max(after - before for before, after in zip(times, [*times[1:], end], strict=True))
    row = {
        "command": command,
        "first_output_s": f"{times[1] if len(times) > 1 else end:.1f}",
        "first_accuracy_s": accuracy,
        "longest_silence_s": f"{silence:.1f}",
        "end_s": f"{end:.1f}",
        "exit_code": code,
        "processor_class": processor_class(),
    }
    return row, "".join(parts)


def main() -> None:
    """Run all commands in a new folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--only", metavar="TEXT", help="run only the commands that contain TEXT")
    args = parser.parse_args()
    if args.only is None or not args.work.exists():
        prepare(args.photos, args.other, args.work)
    own = [row for row in read_csv(args.csv) if row["processor_class"] == processor_class()]
    rows: list[Mapping[str, object]] = list(own) if args.only else []
    for index, command in enumerate(COMMANDS.strip().splitlines()):
        if args.only is None or args.only in command:
            row, text = run(command, args.work)
            print(*list(row.values())[1:6], command, flush=True)
            with (args.work / "log.txt").open("a", encoding="utf-8") as log:
                log.write(f"\n$ {command}\n{text}\n")
            rows[index : index + 1] = [row]
            replace_rows(args.csv, rows)


def prepare(photos: Path, other: Path, work: Path) -> None:
    """Copy the images to a new folder, six of them also to a separate folder."""
    work.mkdir(parents=True)
    shutil.copytree(photos, work / "photos")
    shutil.copytree(other, work / "other")
    (work / "six").mkdir()
    for number, file in enumerate(sorted(path for path in photos.rglob("*") if path.is_file())[::40][:6]):
        shutil.copyfile(file, work / "six" / f"{number}.jpg")


if __name__ == "__main__":
    main()
