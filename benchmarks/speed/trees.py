"""Compare two source trees of weft: python benchmarks/speed/trees.py OLD_SRC IMAGES --since "part 2" [--out FILE]

OLD_SRC is the `src` of an older checkout, IMAGES an image folder. Fresh processes, in turns of both trees, each with
the same interpreter and threads, do what every use starts with: build a model, classify an image on the command line by
a model directory and by an ONNX export, open a folder (every image decoded). They train on digits: the time of the
training steps alone, and of the loop with its data, log and progress, without the first two steps. And they serve: the
time of the clock of 600 requests by 8 clients, with an image of 32 pixels, where HTTP counts most, and with one of
IMAGES. `weft bench` prints the time of the clock of one batch in each of its ways. All others are seconds of the
processor, which other work on the machine disturbs less than the clock; the ratio is that of the medians. Rows of the
file under another `--since`, or of other cases, are kept.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import replace_rows

NEW_SRC = Path(__file__).parents[2] / "src"
COLUMNS = ("since", "what", "instructions", "rounds", "old_s", "new_s", "new_over_old")
BUILD = "import weft; weft.create_model('levit_256')"
OPEN = "import sys; from weft.data import open_data; open_data(sys.argv[1])"
TRAIN = """
import contextlib, sys, tempfile, time
from weft.train import loop, train
times, step = [], loop.Learner.train_step
class Done(BaseException):
    pass
def timed(*arguments):
    if len(times) == 42:
        raise Done
    start = time.process_time()
    result = step(*arguments)
    times.append((start, time.process_time()))
    return result
loop.Learner.train_step = timed
settings = {"steps": 44, "batch_size": 32, "save.every_minutes": 60, "device": "cpu", "precision": "fp32"}
with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Done):
    train("digits", sys.argv[1], settings=settings, out=f"{folder}/run", quiet=True)
print(sum(end - start for start, end in times[2:]), times[-1][1] - times[1][1])
"""
SAVE = """
import sys, weft
from weft.checkpoints import save_model_dir
model = weft.create_model("levit_nano_32", num_classes=3).eval()
save_model_dir(model, sys.argv[1], label_names=["a", "b", "c"])
weft.export(model, sys.argv[2], format="onnx", label_names=["a", "b", "c"])
"""
SERVE = """
import concurrent.futures, http.client, subprocess, sys, threading, time
command = [sys.executable, "-m", "weft", "serve", sys.argv[1], "--port", "0", "--max-batch", "8"]
service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
address = next(line for line in service.stderr if "open http" in line).split("//")[1].split("/")[0]
own = threading.local()
with open(sys.argv[2], "rb") as file:
    image = file.read()

def ask(_):
    own.client = getattr(own, "client", None) or http.client.HTTPConnection(address)
    own.client.request("POST", "/predict", image, {"Content-Type": "image/png"})
    reply = own.client.getresponse()
    assert (reply.status, len(reply.read()) > 0) == (200, True)

with concurrent.futures.ThreadPoolExecutor(8) as clients:
    list(clients.map(ask, range(100)))
    start = time.perf_counter()
    list(clients.map(ask, range(600)))
    print(time.perf_counter() - start)
service.terminate()
service.wait()
"""

BATCHES = (1, 16)
BACKENDS = ("eager", "folded", "compiled", "onnx", "openvino")
BENCH = """
import csv, subprocess, sys
words = ["--precision", "fp32", "--batch-size", *sys.argv[1].split(), "--rounds", "3", "--csv"]
for flag in ("--backends", "--ways"):  # its name before part 3
    command = [sys.executable, "-m", "weft", "bench", "levit_128s", flag, *sys.argv[2].split(), *words]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        break
rows = csv.DictReader(result.stdout.splitlines())
print(*(float(row["p50_ms"]) / 1000 for row in rows))
"""


def output_of(words: list[str], src: Path) -> str:
    """Return the output of a process that imports weft from `src`."""
    cache = tempfile.mkdtemp(prefix="weft-cache-")  # nothing is known about any file
    environment = {
        **os.environ,
        "WEFT_CACHE": cache,
        "PYTHONPATH": str(src),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    return subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, text=True).stdout


def seconds(words: list[str], src: Path) -> tuple[float, ...]:
    """Return the processor seconds of a process that imports weft from `src`, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output_of(words, src)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,)


def printed_seconds(words: list[str], src: Path) -> tuple[float, ...]:
    """Return the seconds that a process measures and prints: of training steps and the loop, or of requests."""
    return tuple(map(float, output_of(words, src).split()))


def main() -> None:
    """Run all cases in turns, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_src", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--since", required=True, help="name of the older tree, for the table")
    parser.add_argument("--rounds", type=int, default=9, help="of the short cases; opening runs a third of them")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("trees.csv"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, export, small = f"{folder}/model", f"{folder}/export", f"{folder}/small.png"
        seconds(["-c", SAVE, model, export], NEW_SRC)
        Image.effect_noise((32, 32), 60).convert("RGB").save(small)
        image = next(
            path for path in sorted(args.images.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg", ".png")
        )
        few, count = max(args.rounds // 3, 1), sum(path.is_file() for path in args.images.rglob("*"))
        cases: list[tuple[tuple[str, ...], Callable[[list[str], Path], tuple[float, ...]], list[str], int]] = [
            (("create_model levit_256",), seconds, ["-c", BUILD], args.rounds),
            (("weft predict",), seconds, ["-m", "weft", "predict", model, str(image)], args.rounds),
            (("weft predict EXPORT",), seconds, ["-m", "weft", "predict", export, str(image)], args.rounds),
            (("weft serve, 600 images of 32 pixels",), printed_seconds, ["-c", SERVE, model, small], args.rounds),
            (("weft serve, 600 photos",), printed_seconds, ["-c", SERVE, model, str(image)], args.rounds),
            ((f"open_data, {count} files",), seconds, ["-c", OPEN, str(args.images)], few),
        ]
        for name in ("ceit_nano_32", "cvt_nano_32", "levit_nano_32"):
            names = (f"{name}, 40 training steps", f"{name}, loop of 40 steps")
            cases.append((names, printed_seconds, ["-c", TRAIN, name], few))
        ways = tuple(f"weft bench {backend}, batches of {size}" for size in BATCHES for backend in BACKENDS)
        words = ["-c", BENCH, " ".join(map(str, BATCHES)), " ".join(BACKENDS)]
        cases.append((ways, printed_seconds, words, few))
        rows = []
        for names, measure, words, rounds in cases:
            if args.only not in names[0]:
                continue
            times: dict[Path, list[tuple[float, ...]]] = {args.old_src: [], NEW_SRC: []}
            for number in range(rounds + 1):
                for src, own in list(times.items())[:: 1 if number % 2 else -1]:  # none is always the second
                    taken = measure(words, src)
                    own += [taken] if number else []  # the first round compiles and fills the caches of files
            for place, what in enumerate(names):
                old, new = (statistics.median(taken[place] for taken in own) for own in times.values())
                instructions = torch.backends.cpu.get_cpu_capability()
                row = (args.since, what, instructions, rounds, f"{old:.4g}", f"{new:.4g}", f"{new / old:.3f}")
                rows.append(dict(zip(COLUMNS, row, strict=True)))
                print(*row, flush=True)
    replace_rows(args.out, rows, ("since", "what"))


if __name__ == "__main__":
    main()
