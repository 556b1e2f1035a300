"""Run every script of this folder in its smallest form, to see that it still runs: `make benchmarks-smoke`.

    python benchmarks/smoke.py                 # all scripts: about an hour on two cores
    python benchmarks/smoke.py speed/ few9     # only the scripts whose path contains one of these texts

The scripts run in a copy of the checkout in a temporary folder, on a few generated images and untrained or tiny
networks. They write their CSV files and tables there, so that no committed file changes. The numbers mean nothing. A
script fails with another exit code than 0, or after its time; the end of its log is printed. The exit code is 1 if one
of them failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")  # of CIFAR-10


class Script(NamedTuple):
    """A script, the arguments of its calls one after the other, the seconds for all of them, and programs it needs."""

    file: str
    calls: tuple[str, ...]
    seconds: int = 300
    needs: tuple[str, ...] = ()


# photos: three classes; other: images of no class; cifar10: train/ and test/ of ten classes; run, onnx: of PREPARE;
# released: a stand-in for the released code; work: a folder for outputs; python: the folder of this environment
SCRIPTS = (
    Script("data/decode.py", ("{photos} --rounds 1 --csv {work}/decode.csv",)),
    Script(
        "data/index.py",
        (
            "{photos} --files 600 --classes 3 --csv {work}/index.csv",
            "{photos} --files 600 --shards 9 --classes 3 --csv {work}/x.csv",
        ),
    ),
    Script("data/loader.py", ("{photos} {photos} --workers 0 2 --rounds 1 --csv {work}/loader.csv",)),
    Script("data/memory.py", ("--images 4000",)),
    Script("deploy/auto.py", ("{run} {cifar10}/train --csv {work}/auto.csv",), 1500),
    Script("deploy/cold_start.py", ("--models levit_nano_32 --rounds 1", "--table"), 600),
    Script(
        "deploy/image.py",
        ("{onnx} {photo} --runtime onnx --model x --runs 1 --csv {work}/image.csv",),
        900,
        ("buildah", "mmdebstrap"),
    ),
    Script("deploy/sizes.py", ("{python} {onnx} {photo} --name x --model x --runs 1 --csv {work}/sizes.csv",)),
    Script("faults/faults.py", ("draw", "reach tests/test_text.py --workers 1", "run --most 1 --workers 1"), 600),
    Script("few-images/few9.py", ("{photos} {other} --methods probe default --seeds 0 --runs {work}/few9",), 1800),
    Script("few-images/coverage_attempts.py", ("{work}/few9 --seeds 0",), 600),
    Script("few-images/int8_attempts.py", ("{photos} --runs {work}/few9 --seeds 0",), 1800),
    Script("few-images/calibration.py", ("{run} {cifar10}",)),
    Script("few-images/curves.py", ("{photos} --methods probe scratch --sizes 2 --seeds 7",), 600),
    Script("few-images/duplicates.py", ("{photos} --others {other}",)),
    Script("few-images/race.py", ("{photos} --seeds 1 --csv {work}/race.csv",), 600),
    Script(
        "few-images/series.py",
        ("{photos} --photos {photos} --every 1 --signs 3 --csv {work}/series.csv",),
        600,
    ),
    Script("few-images/label.py", ("{photos}",), 600),
    Script(
        "few-images/review.py",
        (
            "features {cifar10} {work}/random.npz --images 100 --epochs 1",
            "photos {photos} {work}/photos.npz",
            "rank {work}/random.npz {work}/photos.npz",
        ),
        600,
    ),
    Script("few-images/review_attempts.py", ("{work}/random.npz",), 600),
    Script("few-images/tools.py", ("{photos} --tools 'weft probe' sklearn_timm timm_loop",), 1200),
    Script("gpu/run.py", ("--device cpu --scale small --seconds 1500 --out {work}/gpu --cifar10 {cifar10}",), 1800),
    Script(
        "readme/first_hour.py", ("{photos} {other} --only runs/photos --work {work}/hour --csv {work}/x.csv",), 1800
    ),
    Script("reliability/data_kills.py", ("--kills 4 --images 200 --csv {work}/kills.csv",)),
    Script("reliability/group_stops.py", ("--stops 1",), 600),
    Script("reliability/service_attacks.py", ("--only none --seconds 6 --csv {work}/attacks.csv",)),
    Script("serving/battery.py", ("--stops 1 --kills 1 --leaves 1 --examples 5 --csv {work}/battery.csv",), 600),
    Script(
        "serving/load.py",
        ("{photos}/red --model levit_nano_32 --phases speed mixed --turns 1 --minutes 0.1 --out {work}/load",),
        600,
    ),
    Script("serving/threads.py", ("--rounds 1",)),
    Script("speed/attempts.py", ("levit_nano_32 --rounds 1 --batch-size 1",), 1800),
    Script("speed/choices.py", ("--models levit_256 --rounds 1 --out {work}",), 900),
    Script(
        "speed/figures.py",
        (
            "--models levit_128s --ways eager folded --precision fp32 --allocators keep --rounds 1 --out {work}/class",
            "--tables",
        ),
        900,
    ),
    Script("speed/growth.py", ("--limit 2 --out {work}",)),
    Script("speed/int8.py", ("--models levit_nano_32 --epochs 1 --seeds 1 --out {work}",), 600),
    Script("speed/int8_linear.py", ("--models levit_128s --rounds 1",), 900),
    Script("speed/levit_block.py", ("--rounds 1",)),
    Script("speed/protocol.py", ("levit_128s --seconds 1 --rounds 1",)),
    Script("speed/released.py", ("{released} --batch-size 1 --rounds 1",), 600),
    Script("speed/saturation.py", ("{photos}/red --models levit_128s --images 2 --out {work}",), 900),
    Script("speed/shares.py", ("--models ceit_tiny_patch16_224 --batch-size 1 --out {work}",), 600),
    Script(
        "speed/trees.py",  # its case of `weft bench` runs in speed/figures.py
        tuple(f"src {{photos}} --since now --rounds 1 --only {case}" for case in ("predict", "serve", "open", "nano")),
        900,
    ),
    Script("studies/costs.py", ("ceit-lca {cifar10}/train --only without",), 600),
    Script("studies/tables.py", ("",)),
    Script("torture/torture.py", ("--kills 1 --points 1",), 1800),
    Script("training/kernels.py", ("--rounds 1",), 900),
    Script("training/overhead.py", ("--rounds 1 --threads 1",), 1200),
    Script("training/precision.py", ("steps --rounds 1 --only digits", "accuracy digits --seeds 1 --limit 40"), 600),
    Script(
        "training/step.py",
        ("--pairs levit --precisions fp32 --allocators default --batch-size 2 --rounds 1 --warmup 1",),
    ),
)
PREPARE = (
    "-m weft train {cifar10}/train --recipe small_images --model levit_nano_32 --epochs 1 --out {run} --quiet",
    "-m weft export {run} {onnx} --format onnx",
)
RELEASED = '''"""A stand-in for the released code."""

import weft


def ceit_tiny_patch16_224(pretrained):
    return weft.create_model("ceit_tiny_patch16_224")
'''


def copy_checkout(folder: Path) -> None:
    """Copy the files of the checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def write_images(folder: Path, count: int, size: int, color: Sequence[int], suffix: str) -> None:
    """Write images of noise around a color."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(list(color))
    for number in range(count):
        pixels = rng.normal(color, 40, (size, size + 16 * (number % 2), 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR).save(folder / f"{number:02}.{suffix}")


def prepare(folder: Path) -> dict[str, str]:
    """Write the images and the stand-in for the released code; return all places that the calls name."""
    for number, name in enumerate(("blue", "green", "red")):
        write_images(folder / "photos" / name, 12, 96, [200 if number == i else 60 for i in (2, 1, 0)], "jpg")
    write_images(folder / "other", 6, 96, (128, 128, 128), "jpg")
    for part, count in (("train", 12), ("test", 4)):
        for number, name in enumerate(CLASSES):
            color = (25 * number, 255 - 25 * number, 128)
            write_images(folder / "cifar10" / part / name, count, 32, color, "png")
    (folder / "released").mkdir()
    (folder / "released" / "ceit_model.py").write_text(RELEASED)
    (folder / "work").mkdir()
    names = ("photos", "other", "cifar10", "released", "work", "run", "onnx")
    places = {name: str(folder / name) for name in names}
    return places | {"photo": str(folder / "photos" / "red" / "00.jpg"), "python": sys.prefix}


def finished(command: list[str], checkout: Path, log: Path, seconds: float) -> str:
    """Run a command with a time limit; return '' or why it failed."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout / "src"),
        "TMPDIR": str(checkout.parent),
        "WEFT_CACHE": str(checkout.parent / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("a") as file:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(max(seconds, 1))
            return f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def results(scripts: Sequence[Script], folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield each script with '' or why it failed, and its seconds."""
    checkout, places = folder / "checkout", prepare(folder)
    copy_checkout(checkout)
    preparation = Script("", PREPARE, 600)
    for script in (preparation, *scripts):
        log = folder / f"{script.file.replace('/', '-') or 'prepare'}.log"
        begun, outcome = time.monotonic(), ""
        absent = [program for program in script.needs if shutil.which(program) is None]
        if absent:
            yield script.file, f"skipped: needs {' and '.join(absent)}", 0
            continue
        for call in script.calls:
            program = [str(checkout / "benchmarks" / script.file)] if script.file else []
            words = [word.format(**places) for word in shlex.split(call)]
            left = script.seconds - (time.monotonic() - begun)
            outcome = finished([sys.executable, *program, *words], checkout, log, left)
            if outcome:
                print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:]), flush=True)
                outcome += f", called with {call!r}"
                break
        yield script.file or "prepare", outcome, time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the paths of the scripts to run (default: all)")
    args = parser.parse_args()
    scripts = [one for one in SCRIPTS if not args.names or any(name in one.file for name in args.names)]
    if not scripts:
        parser.error(f"no script has one of these texts in its path: {', '.join(args.names)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="weft-smoke-", ignore_cleanup_errors=True) as folder:
        for name, outcome, seconds in results(scripts, Path(folder)):
            rows.append((name, outcome, seconds))
            print(f"{name}: {outcome or 'ok'}, {seconds:.0f} s", flush=True)
    failed = [f"  {name}: {outcome}" for name, outcome, _ in rows if outcome and not outcome.startswith("skipped")]
    print(f"{len(rows) - len(failed)} of {len(rows)} without failure, {sum(seconds for *_, seconds in rows):.0f} s.")
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
