"""Build the container image of Dockerfile.runtime without a daemon or a registry, run it, and measure its size.

    apt install mmdebstrap buildah                                  # Debian; run as root
    python benchmarks/deploy/image.py EXPORT IMAGE --runtime onnx --model levit_256 --csv benchmarks/deploy/image.csv

The base is a minimal Debian with Python, made by mmdebstrap; `docker build` uses python:3.12-slim. The size is that of
all files in the image, uncompressed. The service runs in a container with EXPORT as /model, read-only; the script
measures the time from its start to the first prediction.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from weft.machine.processor import processor_class

ROOT = Path(__file__).parents[2]
BASE = "localhost/debian-python"
PORT = 8765
ENVIRONMENT = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
DEADLINE = 120  # seconds until the service must be ready


def buildah(*arguments: str) -> str:
    """Run buildah; return its output."""
    command = ["buildah", *arguments]
    return subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True).stdout.strip()


def make_base() -> None:
    """Make the base image, unless it exists."""
    if subprocess.run(["buildah", "inspect", BASE], env=ENVIRONMENT, capture_output=True).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/base.tar"
        packages = "--include=python3-minimal,python3-venv,ca-certificates"
        subprocess.run(["mmdebstrap", "--variant=minbase", packages, "bookworm", archive], check=True)
        container = buildah("from", "scratch")
        buildah("add", container, archive, "/")
        buildah("commit", container, BASE)
        buildah("rm", container)


def build(runtime: str, volumes: list[str]) -> tuple[str, int]:
    """Build the image; return its name and its size in bytes."""
    name = f"localhost/weft-runtime-{runtime}"
    options = ["--build-arg", f"BASE={BASE}", "--build-arg", f"RUNTIME={runtime}", "--network", "host"]
    for volume in volumes:
        options += ["--volume", volume]
    buildah("bud", "-q", *options, "-f", str(ROOT / "Dockerfile.runtime"), "-t", name, str(ROOT))
    container = buildah("from", name)
    root = Path(buildah("mount", container))
    files = (path.lstat() for path in root.rglob("*") if not path.is_dir() or path.is_symlink())
    size = sum({(file.st_ino, file.st_dev): file.st_size for file in files}.values())
    buildah("rm", container)
    return name, size


def predict(image: bytes) -> dict[str, object] | None:
    """Return the prediction of the service; None if it is not ready."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/predict", data=image, headers={"Content-Type": "image/jpeg"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def serve(name: str, export: Path, image: bytes) -> float:
    """Return the seconds from the start of the container to the first prediction."""
    container = buildah("from", name)
    volume = f"{export.resolve()}:/model:ro"
    entry = ["weft", "serve", "/model", "--port", str(PORT)]
    command = ["buildah", "run", "--network", "host", "--volume", volume, container, "--", *entry]
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        while (prediction := predict(image)) is None:
            if time.perf_counter() - begun > DEADLINE or process.poll() is not None:
                raise SystemExit(f"The service returned no prediction within {DEADLINE} seconds.")
            time.sleep(0.02)
        seconds = time.perf_counter() - begun
        print(f"{seconds:.2f} s: {prediction}", flush=True)
        return seconds
    finally:
        process.terminate()
        process.wait()
        buildah("rm", container)


def main() -> None:
    """Build, run and measure the image; append a row to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("image", type=Path, help="JPEG to predict")
    parser.add_argument("--runtime", choices=("onnx", "openvino"), required=True)
    parser.add_argument("--model", required=True, help="name of the model in EXPORT")
    parser.add_argument("--volume", action="append", default=[], help="volume of the build, such as certificates")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    make_base()
    name, size = build(args.runtime, args.volume)
    seconds = [serve(name, args.export, args.image.read_bytes()) for _ in range(args.runs)]
    values = {
        "runtime": args.runtime,
        "model": args.model,
        "base": "debian bookworm, python 3.11",
        "image_mb": round(size / 1e6),
        "first_prediction_s": f"{sorted(seconds)[len(seconds) // 2]:.2f}",
        "runs": args.runs,
        "load": f"{os.getloadavg()[0]:.1f}",
        "processor_class": processor_class(),
    }
    is_new = not args.csv.exists()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(values)


if __name__ == "__main__":
    main()
