"""Load test of `weft serve`: 64 clients with valid, broken and hostile bodies; throughput relative to `weft bench`.

    python benchmarks/serving/load.py PHOTOS --out benchmarks/serving                             # all phases but soak
    python benchmarks/serving/load.py PHOTOS --phases soak --minutes 30 --out benchmarks/serving

PHOTOS is a folder of images. Clients and service share the cores of this machine. The request rate of the phases half,
over, ways and soak is relative to the throughput in the phase speed, of this call or of the rows in load.csv. Phases:

speed   the forward pass alone in `weft bench`, alternating with 64 clients in a closed loop with valid images; also
        with the images resized to a short side of 256, whose decoding takes a fifth of the time
ways    as speed and half, with other numbers of processes and threads, and with a longer wait for a batch to fill:
        ways.csv
half    requests at random times (a Poisson process) at half of the throughput
over    requests at three times the throughput, with requests to /live; two seconds later, at half of the throughput
mixed   64 clients, 90 % valid images, 10 % broken or hostile ones, for --minutes; memory is sampled every second
soak    as half, with 1 % broken or hostile images, for --minutes; memory is sampled every second

Every prediction for a valid image is compared with that of `weft predict`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clients import Body, Tally, closed_loop, open_loop, overload
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.records import read_csv, replace_rows, write_csv

import weft
from weft.checkpoints import save_model_dir
from weft.checkpoints.config import read_config
from weft.machine.processor import processor_class
from weft.serve import Predictor
from weft.train import predict

BATCH = 32
WAYS = {
    "as it is": (),
    "two processes of one thread": ("--workers", "2", "--threads", "1"),
    "one thread for the model": ("--threads", "1"),
    "a wait of 20 ms": ("--max-wait", "20ms"),
}


def valid_bodies(folder: Path, run: Path) -> list[Body]:
    """Return the images of a folder with their predictions by `weft predict`."""
    predictions = predict(run, folder, top_k=5)
    return [Body(Path(one.image).read_bytes(), dict(one.top)) for one in predictions if one.error is None]


def resized(folder: Path, out: Path) -> Path:
    """Write the images of a folder with a short side of 256 pixels to another folder; return that folder."""
    for path in sorted(folder.iterdir()):
        image = Image.open(path).convert("RGB")
        scale = 256 / min(image.size)
        image.resize([round(side * scale) for side in image.size]).save(out / f"{path.stem}.jpg", quality=90)
    return out


def preparation_time(run: Path, name: str, bodies: list[Body]) -> dict[str, str]:
    """Return a row with the time of decoding and preprocessing per image in ms, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    predictor = Predictor.load(run)
    for body in bodies[:20]:
        predictor.prepare(body.data)
    begun = time.perf_counter()
    for body in bodies:
        predictor.prepare(body.data)
    seconds = time.perf_counter() - begun
    torch.set_num_threads(threads)
    size = statistics.mean(len(body.data) for body in bodies)
    milliseconds = f"{1000 * seconds / len(bodies):.2f}"
    return {"pictures": name, "bytes": f"{size:.0f}", "ms": milliseconds}


def bad_bodies(good: bytes) -> list[Body]:
    """Return broken and hostile bodies, with the status codes that are allowed for each."""
    rng = random.Random(0)
    flipped = bytearray(good)
    flipped[len(good) // 2 : len(good) // 2 + 40] = rng.randbytes(40)
    profile = io.BytesIO()
    Image.new("RGB", (64, 64)).save(profile, "JPEG", icc_profile=rng.randbytes(3000))
    return [
        Body(b"", codes=(400,)),
        Body(b"x", codes=(415,)),
        Body(b"<svg onload=alert(1)>" * 50, codes=(415,)),
        Body(b"\x80\x04cos\nsystem\n(S'true'\ntR.", codes=(415,)),
        Body(good[: len(good) // 2], codes=(400,)),
        Body(bytes(flipped), codes=(200, 400)),
        Body(rng.randbytes(100_000), codes=(415,)),
        Body(b"\xff\xd8\xff" + rng.randbytes(50_000), codes=(400,)),
        Body(b"\x89PNG\r\n\x1a\n" + rng.randbytes(5_000), codes=(400,)),
        Body(b"RIFF\xff\xff\xff\x7fWEBPVP8 " + rng.randbytes(999), codes=(400,)),
        Body(b"GIF89a" + rng.randbytes(999), codes=(200, 400, 422)),
        Body(png_of_size(60_000, 60_000), codes=(422,)),
        Body(profile.getvalue(), codes=(200, 400)),
        Body(b"\xff" * (10 << 20) + b"x", codes=(413,)),
    ]


def png_of_size(height: int, width: int) -> bytes:
    """Return a PNG of a few bytes whose header declares a size in pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def count_requests(port: int) -> float:
    """Return the number of requests to /predict in the metrics of the service."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    return sum(float(n) for n in re.findall(r'^weft_requests_total\{[^}]*path="/predict"\} (\S+)', text, re.MULTILINE))


class Service:
    """`weft serve` in a separate process."""

    def __init__(self, run: Path, *options: str) -> None:
        self.log = tempfile.TemporaryFile("w+")
        arguments = [
            sys.executable,
            "-m",
            "weft",
            "serve",
            str(run),
            "--port",
            "0",
            *options,
        ]
        self.process = subprocess.Popen(arguments, stderr=self.log)
        while not (address := re.search(r"http://\S*?:(\d+)", self.output())):
            assert self.process.poll() is None, self.output()
            time.sleep(0.1)
        self.port = int(address[1])

    def output(self) -> str:
        """Return the log."""
        self.log.seek(0)
        return self.log.read()

    def memory_mib(self) -> float:
        """Return the resident memory in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        """Return the number of open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        """Stop the service; return its exit code."""
        self.process.terminate()
        return self.process.wait(60)


def bench_throughput(run: Path) -> float:
    """Return the throughput of the forward pass alone (folded, as in the service) in images/s, by `weft bench`."""
    arguments = ["bench", str(run), "--batch-size", str(BATCH), "--rounds", "3", "--json", "--backends", "folded"]
    done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["images_per_second"])


async def run_sampled(service: Service, work: Coroutine[Any, Any, Tally]) -> tuple[Tally, list[dict]]:
    """Run a phase; return its responses, and memory and open files of the service for every second."""
    samples: list[dict] = []

    async def sample() -> None:
        begun = time.perf_counter()
        while True:
            second = round(time.perf_counter() - begun)
            samples.append(
                {"second": second, "MiB": round(service.memory_mib(), 1), "open files": service.open_files()}
            )
            await asyncio.sleep(1)

    sampler = asyncio.create_task(sample())
    tally = await work
    sampler.cancel()
    return tally, samples


@dataclass
class LoadTest:
    """Phases of the load test.

    Attributes:
        run: model directory or export.
        runtime: `torch`, or format and precision of the export.
        photos: folder of images.
        out: folder for the CSV files.
        bodies: valid images.
        bad: broken and hostile bodies.
        minutes: duration of the phases mixed and soak.
        rows: rows of load.csv, also those of earlier calls.
    """

    run: Path
    runtime: str
    photos: Path
    out: Path
    bodies: list[Body]
    bad: list[Body]
    minutes: float
    rows: list[dict[str, Any]]

    def rate(self) -> float:
        """Return the throughput of the service in images/s: the median of the phase speed."""
        own = [
            row for row in self.rows if (row["processor_class"], row["runtime"]) == (processor_class(), self.runtime)
        ]
        speeds = [float(row["images/s"]) for row in own if row["phase"] == "speed"]
        if not speeds:
            raise SystemExit("The phase speed must be run before this one.")
        return statistics.median(speeds)

    def write(self, file: str, rows: list[dict[str, Any]]) -> None:
        """Replace the rows of this processor class and runtime in a file; all others are kept."""
        own = {"processor_class": processor_class(), "runtime": self.runtime}
        replace_rows(self.out / file, [row | own for row in rows], tuple(own))

    def warm_service(self, *options: str) -> Service:
        """Return a service after five seconds of requests."""
        service = Service(self.run, *options)
        asyncio.run(closed_loop(service.port, self.bodies, [], 5))
        return service

    def add(self, phase: str, tally: Tally, speed: float, service: Service, alone: float | None = None) -> None:
        """Stop the service, and add a row for load.csv."""
        for text in tally.unexpected[:5]:
            print(f"{phase}: {text}", flush=True)
        row = {
            "processor_class": processor_class(),
            "runtime": self.runtime,
            "phase": phase,
            "images/s": f"{speed:.1f}",
            "bench images/s": "" if alone is None else f"{alone:.1f}",
            "share": "" if alone is None else f"{speed / alone:.3f}",
            "answered": tally.predictions,
            "p50 ms": f"{tally.percentile(50):.1f}",
            "p99 ms": f"{tally.percentile(99):.1f}",
            "wrong": tally.wrong,
            "unexpected": len(tally.unexpected),
            "codes": " ".join(f"{code}:{count}" for code, count in sorted(tally.codes.items())),
            "exit code": service.stop(),
        }
        print(row, flush=True)
        self.rows.append(row)

    def speed(self, turns: int) -> None:
        """Measure the forward pass alone and clients in a closed loop, alternating."""
        with tempfile.TemporaryDirectory() as folder:
            small = valid_bodies(resized(self.photos, Path(folder)), self.run)
        sizes = {"speed": self.bodies, "speed, small": small}
        self.write("prepare.csv", [preparation_time(self.run, name, bodies) for name, bodies in sizes.items()])
        for phase, bodies in [*sizes.items()] * turns:
            alone = bench_throughput(self.run)
            service = self.warm_service()
            tally, speed = asyncio.run(closed_loop(service.port, bodies, [], 25))
            self.add(phase, tally, speed, service, alone)

    def ways(self, turns: int) -> None:
        """Measure the forward pass alone and the service with each option set of WAYS, alternating."""
        rows: list[dict[str, Any]] = []
        half = self.rate() / 2
        for turn in range(turns):
            alone = bench_throughput(self.run)
            for way, options in WAYS.items():
                service = self.warm_service(*options)
                _, speed = asyncio.run(closed_loop(service.port, self.bodies, [], 20))
                tally = asyncio.run(open_loop(service.port, self.bodies, half, 30))
                service.stop()
                row = {"turn": turn, "way": way, "images/s": f"{speed:.1f}", "share": f"{speed / alone:.3f}"}
                row |= {f"p{percent} ms at half": f"{tally.percentile(percent):.1f}" for percent in (50, 99)}
                rows.append(row)
                print(rows[-1], flush=True)
        self.write("ways.csv", rows)

    def half(self) -> None:
        """Send requests at random times at half of the throughput."""
        service = self.warm_service()
        rate = self.rate() / 2
        self.add("half", asyncio.run(open_loop(service.port, self.bodies, rate, 60)), rate, service)

    def over(self) -> None:
        """Send requests at three times the throughput."""
        service = self.warm_service()
        tally, slowest, after = asyncio.run(overload(service.port, self.bodies, self.rate()))
        self.add("over", tally, tally.predictions / 60, service)
        row = {"slowest /live ms": f"{slowest:.0f}", "p99 ms two seconds later": f"{after.percentile(99):.0f}"}
        print(row, flush=True)
        self.write("overload.csv", [row])

    def mixed(self) -> None:
        """Send valid, broken and hostile images in a closed loop."""

        async def work() -> Tally:
            return (await closed_loop(service.port, self.bodies, self.bad, 60 * self.minutes))[0]

        service = Service(self.run)
        self.record_sampled("mixed", service, work(), "memory.csv")

    def soak(self) -> None:
        """Send requests at random times at half of the throughput for --minutes."""
        service = self.warm_service()
        work = open_loop(service.port, self.bodies, self.rate() / 2, 60 * self.minutes, self.bad)
        self.record_sampled("soak", service, work, "soak.csv")

    def record_sampled(self, phase: str, service: Service, work: Coroutine[Any, Any, Tally], file: str) -> None:
        """Run a phase with samples of the memory, and compare the request counts of service and clients."""
        before = count_requests(service.port)
        tally, samples = asyncio.run(run_sampled(service, work))
        self.write(file, samples)
        counted, sent = count_requests(service.port) - before, sum(tally.codes.values())
        print(f"{phase}: requests counted by the service {counted:.0f}, by the clients {sent}")
        later = [sample for sample in samples if sample["second"] >= 60]
        if len(later) > 1:
            slope = statistics.linear_regression([s["second"] / 60 for s in later], [s["MiB"] for s in later]).slope
            low, high = (f(s["MiB"] for s in later) for f in (min, max))
            print(f"{phase}: memory after the first minute {low:.0f} to {high:.0f} MiB, {slope:+.2f} MiB a minute")
            print(f"{phase}: open files at most {max(s['open files'] for s in later)}")
        self.add(phase, tally, tally.predictions / (60 * self.minutes), service)


PHASES = ("speed", "ways", "half", "over", "mixed", "soak")
WITH_TURNS = ("speed", "ways")


def main() -> None:
    """Run the phases, and replace their rows in load.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument(
        "--model", default="ceit_tiny_patch16_224", help="name (random weights), model directory or export"
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES[:-1])
    parser.add_argument("--minutes", type=float, default=5, help="duration of mixed and soak")
    parser.add_argument("--turns", type=int, default=3, help="repetitions of speed and ways")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(args.model)
        if not run.is_dir():
            torch.manual_seed(0)
            network = weft.create_model(args.model).eval()
            for module in network.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.data.mul_(1.5)  # predictions that differ between images
            run = save_model_dir(network, Path(folder) / "model")
        bodies = valid_bodies(args.photos, run)
        file = args.out / "load.csv"
        rows: list[dict[str, Any]] = [
            {**row, "processor_class": row.get("processor_class", ""), "runtime": row.get("runtime", "torch")}
            for row in read_csv(file)
        ]
        artefact = read_config(run).get("artefact")
        runtime = f"{artefact['format']} {artefact['precision']}" if artefact else "torch"
        test = LoadTest(run, runtime, args.photos, args.out, bodies, bad_bodies(bodies[0].data), args.minutes, rows)
        for phase in PHASES:
            if phase in args.phases:
                known = (phase, processor_class(), runtime)  # rows of other classes and runtimes are kept
                test.rows = [
                    row
                    for row in test.rows
                    if (row["phase"].partition(",")[0], row["processor_class"], row["runtime"]) != known
                ]
                getattr(test, phase)(*([args.turns] if phase in WITH_TURNS else []))
                write_csv(file, test.rows)


if __name__ == "__main__":
    main()
