"""What `weft serve` bears: 64 clients, good, broken and hostile bodies; and how much of `weft bench` is left.

    python benchmarks/serving/load.py PHOTOS --out benchmarks/serving                             # but for soak
    python benchmarks/serving/load.py PHOTOS --phases soak --minutes 30 --out benchmarks/serving

PHOTOS: a folder of pictures. Clients and service share this machine's cores. The phases, of which `speed` says how fast
the others ask, now or when it was last run:

speed   the forward pass alone as `weft bench` times it, and 64 clients in a closed loop with good pictures, in turns;
        once more with the pictures made smaller (short side 256), which are decoded in a fifth of the time
ways    as `speed`, with other divisions of the cores and a longer wait for company: ways.csv
half    requests at random moments (a Poisson process) at half of that rate
over    requests at three times that rate, whatever comes back; /live is asked meanwhile; then at half, at once
mixed   64 clients, nine of ten pictures good, the rest broken or hostile, for --minutes; memory is sampled each second
soak    as `half`, one of a hundred pictures broken or hostile, for --minutes; memory is sampled, too

Every answer to a good picture is compared with what `weft predict` says of it.
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

import weft
from weft.bench.records import read_csv, write_csv
from weft.checkpoints import save_model_dir
from weft.processor import processor_class
from weft.serve import Predictor
from weft.train import predict

BATCH = 32
WAYS = {
    "as it is": (),
    "two processes of one thread": ("--workers", "2", "--threads", "1"),
    "one thread for the model": ("--threads", "1"),
    "a wait of 20 ms": ("--max-wait-ms", "20"),
}


def good_bodies(folder: Path, run: Path) -> list[Body]:
    """The pictures, each with its offline answer."""
    answers = predict(run, folder, top_k=5)
    return [Body(Path(answer.image).read_bytes(), dict(answer.top)) for answer in answers if answer.error is None]


def shrunk(folder: Path, out: Path) -> Path:
    """The pictures at a short side of 256."""
    for path in sorted(folder.iterdir()):
        image = Image.open(path).convert("RGB")
        share = 256 / min(image.size)
        image.resize([round(side * share) for side in image.size]).save(out / f"{path.stem}.jpg", quality=90)
    return out


def prepared(run: Path, name: str, bodies: list[Body]) -> dict[str, str]:
    """Milliseconds of one thread from a picture's bytes to its tensor."""
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
    return {"pictures": name, "bytes": f"{size:.0f}", "ms": f"{1000 * seconds / len(bodies):.2f}"}


def bad_bodies(good: bytes) -> list[Body]:
    """Broken and hostile ones."""
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
        Body(png_claiming(60_000, 60_000), codes=(422,)),
        Body(profile.getvalue(), codes=(200, 400)),
        Body(b"\xff" * (10 << 20) + b"x", codes=(413,)),
    ]


def png_claiming(height: int, width: int) -> bytes:
    """A PNG of a few bytes that says it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def counters(port: int) -> float:
    """Requests to /predict that the service counted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(n) for n in re.findall(r'^weft_requests_total\{[^}]*path="/predict"\} (\S+)', text, re.MULTILINE))


class Service:
    """`weft serve` in a process of its own."""

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
        while not (found := re.search(r"http://\S*?:(\d+)", self.output())):
            assert self.process.poll() is None, self.output()
            time.sleep(0.1)
        self.port = int(found[1])

    def output(self) -> str:
        """Its log."""
        self.log.seek(0)
        return self.log.read()

    def mib(self) -> float:
        """Memory in use."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def files(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        """Its exit code."""
        self.process.terminate()
        return self.process.wait(60)


def benched(run: Path) -> float:
    """Images per second of the forward pass alone, folded as the service has it, by `weft bench`."""
    arguments = ["bench", str(run), "--batch-size", str(BATCH), "--rounds", "3", "--json", "--ways", "folded"]
    arguments += ["--allocator", "keep"]  # the service keeps memory as well
    done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["images_per_second"])


async def sampled(service: Service, work: Coroutine[Any, Any, Tally]) -> tuple[Tally, list[dict]]:
    """A phase, and each second of it: memory and open files of the service."""
    samples: list[dict] = []

    async def sample() -> None:
        begun = time.perf_counter()
        while True:
            second = round(time.perf_counter() - begun)
            samples.append({"second": second, "MiB": round(service.mib(), 1), "open files": service.files()})
            await asyncio.sleep(1)

    sampler = asyncio.create_task(sample())
    tally = await work
    sampler.cancel()
    return tally, samples


@dataclass
class Bench:
    """What the phases share.

    Attributes:
        rows: the lines of load.csv, of former runs, too.
    """

    run: Path
    photos: Path
    out: Path
    bodies: list[Body]
    bad: list[Body]
    minutes: float
    rows: list[dict[str, Any]]

    def rate(self) -> float:
        """Pictures a second that the service answers."""
        speeds = [float(row["images/s"]) for row in self.rows if row["phase"] == "speed"]
        if not speeds:
            raise SystemExit("The phase speed must be run before this one.")
        return statistics.median(speeds)

    def warm(self, *options: str) -> Service:
        """A service that has answered for five seconds."""
        service = Service(self.run, *options)
        asyncio.run(closed_loop(service.port, self.bodies, [], 5))
        return service

    def add(self, phase: str, tally: Tally, speed: float, service: Service, alone: float | None = None) -> None:
        """A line of load.csv; ends the service."""
        for text in tally.unexpected[:5]:
            print(f"{phase}: {text}", flush=True)
        row = {
            "processor_class": processor_class(),
            "phase": phase,
            "images/s": f"{speed:.1f}",
            "bench images/s": "" if alone is None else f"{alone:.1f}",
            "share": "" if alone is None else f"{speed / alone:.3f}",
            "answered": tally.answered,
            "p50 ms": f"{tally.centile(50):.1f}",
            "p99 ms": f"{tally.centile(99):.1f}",
            "wrong": tally.wrong,
            "unexpected": len(tally.unexpected),
            "codes": " ".join(f"{code}:{count}" for code, count in sorted(tally.codes.items())),
            "exit code": service.stop(),
        }
        print(row, flush=True)
        self.rows.append(row)

    def speed(self, turns: int) -> None:
        """In turns: the forward pass alone, and clients in a closed loop."""
        with tempfile.TemporaryDirectory() as folder:
            small = good_bodies(shrunk(self.photos, Path(folder)), self.run)
        sizes = {"speed": self.bodies, "speed, small": small}
        write_csv(self.out / "prepare.csv", [prepared(self.run, name, pictures) for name, pictures in sizes.items()])
        for phase, pictures in [*sizes.items()] * turns:
            alone = benched(self.run)
            service = self.warm()
            tally, speed = asyncio.run(closed_loop(service.port, pictures, [], 25))
            self.add(phase, tally, speed, service, alone)

    def ways(self, turns: int) -> None:
        """In turns: the forward pass alone, and every way to divide the cores."""
        rows = []
        for turn in range(turns):
            alone = benched(self.run)
            for way, options in WAYS.items():
                service = self.warm(*options)
                _, speed = asyncio.run(closed_loop(service.port, self.bodies, [], 20))
                service.stop()
                rows.append({"turn": turn, "way": way, "images/s": f"{speed:.1f}", "share": f"{speed / alone:.3f}"})
                print(rows[-1], flush=True)
        write_csv(self.out / "ways.csv", rows)

    def half(self) -> None:
        """At random moments, half of what it can answer."""
        service = self.warm()
        rate = self.rate() / 2
        self.add("half", asyncio.run(open_loop(service.port, self.bodies, rate, 60)), rate, service)

    def over(self) -> None:
        """Three times what it can answer."""
        service = self.warm()
        tally, slowest, after = asyncio.run(overload(service.port, self.bodies, self.rate()))
        self.add("over", tally, tally.answered / 60, service)
        beside = {"slowest /live ms": f"{slowest:.0f}", "p99 ms two seconds later": f"{after.centile(99):.0f}"}
        print(beside, flush=True)
        write_csv(self.out / "overload.csv", [beside])

    def mixed(self) -> None:
        """Good, broken and hostile, as fast as they are answered."""

        async def work() -> Tally:
            return (await closed_loop(service.port, self.bodies, self.bad, 60 * self.minutes))[0]

        service = Service(self.run)
        self.watched("mixed", service, work(), "memory.csv")

    def soak(self) -> None:
        """At random moments, half of what it can answer, for long."""
        service = self.warm()
        work = open_loop(service.port, self.bodies, self.rate() / 2, 60 * self.minutes, self.bad)
        self.watched("soak", service, work, "soak.csv")

    def watched(self, phase: str, service: Service, work: Coroutine[Any, Any, Tally], file: str) -> None:
        """A phase whose memory is sampled, and whose requests the service must have counted, too."""
        before = counters(service.port)
        tally, samples = asyncio.run(sampled(service, work))
        write_csv(self.out / file, samples)
        counted, asked = counters(service.port) - before, sum(tally.codes.values())
        print(f"{phase}: requests counted by the service {counted:.0f}, by the clients {asked}")
        warm = [sample for sample in samples if sample["second"] >= 60]
        if len(warm) > 1:
            slope = statistics.linear_regression([s["second"] / 60 for s in warm], [s["MiB"] for s in warm]).slope
            low, high = (f(s["MiB"] for s in warm) for f in (min, max))
            print(f"{phase}: memory after the first minute {low:.0f} to {high:.0f} MiB, {slope:+.2f} MiB a minute")
            print(f"{phase}: open files at most {max(s['open files'] for s in warm)}")
        self.add(phase, tally, tally.answered / (60 * self.minutes), service)


PHASES = ("speed", "ways", "half", "over", "mixed", "soak")
IN_TURNS = ("speed", "ways")


def main() -> None:
    """Runs the phases, and writes their lines of load.csv anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--model", default="ceit_tiny_patch16_224", help="a name, with random weights, or a directory")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES[:-1])
    parser.add_argument("--minutes", type=float, default=5, help="of mixed, and of soak")
    parser.add_argument("--turns", type=int, default=3, help="of speed and of ways")
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
                    module.weight.data.mul_(1.5)  # answers that differ from picture to picture
            run = save_model_dir(network, Path(folder) / "model")
        bodies = good_bodies(args.photos, run)
        file = args.out / "load.csv"
        rows: list[dict[str, Any]] = [
            {**row, "processor_class": row.get("processor_class", "")} for row in read_csv(file)
        ]
        bench = Bench(run, args.photos, args.out, bodies, bad_bodies(bodies[0].data), args.minutes, rows)
        for phase in PHASES:
            if phase in args.phases:
                bench.rows = [row for row in bench.rows if row["phase"].partition(",")[0] != phase]
                getattr(bench, phase)(*([args.turns] if phase in IN_TURNS else []))
                write_csv(file, bench.rows)


if __name__ == "__main__":
    main()
