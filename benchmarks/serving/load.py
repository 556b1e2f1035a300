"""What `weft serve` bears: 64 clients, good, broken and hostile bodies; and how much of `weft bench` is left.

    python benchmarks/serving/load.py PHOTOS --model ceit_tiny_patch16_224 --minutes 5 --out benchmarks/serving

PHOTOS: a folder of pictures. Clients and service share this machine's cores. The phases:

speed   the forward pass alone as `weft bench` times it, and 64 clients in a closed loop with good pictures, in turns;
        once more with the pictures made smaller (short side 256), which are decoded in a fifth of the time
half    requests at random moments (a Poisson process) at half of that rate
over    requests at three times that rate, whatever comes back; /live is asked meanwhile; then at half, at once
mixed   64 clients, nine of ten pictures good, the rest broken or hostile, for --minutes; memory is sampled each second

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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image

import weft
from weft.bench.records import write_csv
from weft.checkpoints import save_model_dir
from weft.serve import Predictor
from weft.train import predict

CLIENTS = 64
BATCH = 32
IDLE = 20  # seconds; the service closes a connection after 30, maybe in the moment in which it is used again
SLACK = 1e-4  # of a probability


@dataclass
class Tally:
    """What came back."""

    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of good pictures that were answered
    wrong: int = 0
    unexpected: list[str] = field(default_factory=list)

    def centile(self, percent: float) -> float:
        """Milliseconds."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


@dataclass(frozen=True)
class Body:
    """What a client sends, and what must come back: the offline answer, or codes."""

    data: bytes
    top: dict[str, float] | None = None
    codes: tuple[int, ...] = ()


def good_bodies(folder: Path, run: Path) -> list[Body]:
    """The pictures, each with its offline answer."""
    answers = predict(run, folder, top_k=5)
    return [Body(Path(answer.image).read_bytes(), dict(answer.top)) for answer in answers if answer.error is None]


def shrunk(folder: Path, out: Path) -> Path:
    """The pictures at a short side of 256."""
    out.mkdir()
    for path in sorted(folder.iterdir()):
        image = Image.open(path).convert("RGB")
        share = 256 / min(image.size)
        image.resize([round(side * share) for side in image.size]).save(out / f"{path.stem}.jpg", quality=90)
    return out


def prepared(run: Path, name: str, bodies: list[Body]) -> dict[str, str]:
    """Milliseconds of one thread from a picture's bytes to its tensor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    predictor = Predictor.open(run, runtime="torch")
    for body in bodies[:20]:
        predictor.read(body.data, max_pixels=10**8)
    begun = time.perf_counter()
    for body in bodies:
        predictor.read(body.data, max_pixels=10**8)
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


class Client:
    """One connection, kept open."""

    def __init__(self, port: int, tally: Tally) -> None:
        self.port, self.tally = port, tally
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.used = 0.0

    async def ask(self, body: Body) -> None:
        """Sends, waits, and judges what comes."""
        begun = time.perf_counter()
        try:
            code, answer = await self._exchange(body.data)
        except (OSError, asyncio.IncompleteReadError, IndexError) as error:
            self.tally.unexpected.append(f"connection: {error!r}")
            self.streams = None
            return
        self.tally.codes[code] += 1
        if code in (429, 503):
            await asyncio.sleep(0.05)
        elif body.top is None:
            if code not in body.codes:
                self.tally.unexpected.append(f"{code} for {body.data[:20]!r}, not {body.codes}: {answer[:200]!r}")
        elif code != 200:
            self.tally.unexpected.append(f"{code} for a good picture: {answer[:200]!r}")
        else:
            self.tally.seconds.append(time.perf_counter() - begun)
            found = {item["class"]: item["probability"] for item in json.loads(answer)["answers"][0]["top"]}
            same = all(abs(found.get(name, 0) - share) <= SLACK for name, share in body.top.items())
            self.tally.wrong += not same

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        if self.streams is None or time.perf_counter() - self.used > IDLE:
            self.close()
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        self.used = time.perf_counter()
        reader, writer = self.streams
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        head_back = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head_back.partition("content-length:")[2].split()[0])
        answer = await reader.readexactly(length)
        if "connection: close" in head_back:
            writer.close()
            self.streams = None
        return int(head_back.split()[1]), answer

    def close(self) -> None:
        """Leaves."""
        if self.streams is not None:
            self.streams[1].close()


async def closed_loop(port: int, bodies: list[Body], bad: list[Body], seconds: float) -> tuple[Tally, float]:
    """Clients that ask again as soon as they are answered; and answered good pictures per second."""
    tally, rng, end = Tally(), random.Random(1), time.perf_counter() + seconds

    async def one(number: int) -> None:
        client, place = Client(port, tally), number
        while time.perf_counter() < end:
            place += CLIENTS
            is_bad = bool(bad) and rng.random() < 0.1
            await client.ask(rng.choice(bad) if is_bad else bodies[place % len(bodies)])
        client.close()

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return tally, len(tally.seconds) / (time.perf_counter() - begun)


async def open_loop(port: int, bodies: list[Body], rate: float, seconds: float) -> Tally:
    """Requests at moments of their own, whatever the service does."""
    tally, rng, tasks, free = Tally(), random.Random(2), [], []
    end = time.perf_counter() + seconds

    async def one(body: Body) -> None:
        client = free.pop() if free else Client(port, tally)
        await client.ask(body)
        free.append(client)

    moment = time.perf_counter()
    while moment < end:
        await asyncio.sleep(max(moment - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(one(rng.choice(bodies))))
        moment += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    for client in free:
        client.close()
    return tally


async def overload(port: int, bodies: list[Body], rate: float) -> tuple[Tally, float, Tally]:
    """A minute of three times what can be answered; the slowest /live in ms; and ten seconds at half, 2 s later."""
    slowest, going = 0.0, True

    async def live() -> None:
        nonlocal slowest
        while going:
            begun = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            slowest = max(slowest, 1000 * (time.perf_counter() - begun))
            await asyncio.sleep(0.25)

    asking = asyncio.create_task(live())
    tally = await open_loop(port, bodies, 3 * rate, 60)
    going = False
    await asking
    await asyncio.sleep(2)
    return tally, slowest, await open_loop(port, bodies, rate / 2, 10)


def counters(port: int) -> float:
    """Requests to /predict that the service counted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(n) for n in re.findall(r'^weft_requests_total\{[^}]*path="/predict"\} (\S+)', text, re.MULTILINE))


class Service:
    """`weft serve` in a process of its own."""

    def __init__(self, run: Path, *options: str) -> None:
        self.log = tempfile.TemporaryFile("w+")
        words = [sys.executable, "-m", "weft", "serve", str(run), "--port", "0", "--max-batch", str(BATCH), *options]
        self.process = subprocess.Popen(words, stderr=self.log)
        while not (found := re.search(r"http://\S*?:(\d+)", self.said())):
            assert self.process.poll() is None, self.said()
            time.sleep(0.1)
        self.port = int(found[1])

    def said(self) -> str:
        """Its log."""
        self.log.seek(0)
        return self.log.read()

    def mib(self) -> float:
        """Memory in use."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024

    def files(self) -> int:
        """Open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        """Its exit code."""
        self.process.terminate()
        return self.process.wait(60)


def benched(run: Path, way: str) -> float:
    """Images per second of the forward pass alone, by `weft bench`."""
    words = ["bench", str(run), "--batch-size", str(BATCH), "--rounds", "3", "--json"]
    words += ["--ways", way] if way else []
    done = subprocess.run([sys.executable, "-m", "weft", *words], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["images_per_second"])


async def mixed(service: Service, bodies: list[Body], bad: list[Body], minutes: float) -> tuple[Tally, list[tuple]]:
    """The long phase, and (second, MiB, open files)."""
    samples: list[tuple] = []

    async def sample() -> None:
        begun = time.perf_counter()
        while True:
            samples.append((round(time.perf_counter() - begun), round(service.mib(), 1), service.files()))
            await asyncio.sleep(1)

    sampler = asyncio.create_task(sample())
    tally, _ = await closed_loop(service.port, bodies, bad, 60 * minutes)
    sampler.cancel()
    return tally, samples


def main() -> None:
    """Runs the phases, and writes load.csv and memory.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--model", default="ceit_tiny_patch16_224", help="a name, with random weights, or a directory")
    parser.add_argument("--way", default="folded", help="of weft bench, to compare with")
    parser.add_argument("--minutes", type=float, default=5, help="0: speed alone, to speed.csv")
    parser.add_argument("--turns", type=int, default=3)
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
        bad = bad_bodies(bodies[0].data)
        rows = []
        small = good_bodies(shrunk(args.photos, Path(folder) / "small"), run)
        sizes = [("as they are", bodies), ("short side 256", small)]
        write_csv(args.out / "prepare.csv", [prepared(run, name, pictures) for name, pictures in sizes])
        speeds = []
        for phase, pictures in [("speed", bodies), ("speed, small", small)] * args.turns:
            alone = benched(run, args.way)
            service = Service(run)
            asyncio.run(closed_loop(service.port, pictures, [], 5))
            tally, speed = asyncio.run(closed_loop(service.port, pictures, [], 25))
            rows.append(row(phase, tally, speed, alone, service))
            print(rows[-1], flush=True)
            if phase == "speed":
                speeds.append(speed)
        if args.minutes == 0:
            write_csv(args.out / "speed.csv", [dict(zip(HEADER, row, strict=True)) for row in rows])
            return
        service = Service(run)
        asyncio.run(closed_loop(service.port, bodies, [], 5))
        half = statistics.median(speeds) / 2
        tally = asyncio.run(open_loop(service.port, bodies, half, 60))
        rows.append(row("half", tally, half, None, service))
        print(rows[-1], flush=True)
        service = Service(run)
        asyncio.run(closed_loop(service.port, bodies, [], 5))
        tally, slowest, after = asyncio.run(overload(service.port, bodies, 2 * half))
        rows.append(row("over", tally, len(tally.seconds) / 60, None, service))
        print(rows[-1], f"/live took {slowest:.0f} ms at most; after it p99 {after.centile(99):.0f} ms", flush=True)
        beside = {"slowest /live ms": f"{slowest:.0f}", "p99 ms two seconds later": f"{after.centile(99):.0f}"}
        write_csv(args.out / "overload.csv", [beside])
        service = Service(run)
        tally, samples = asyncio.run(mixed(service, bodies, bad, args.minutes))
        counted = counters(service.port)
        rows.append(row("mixed", tally, len(tally.seconds) / (60 * args.minutes), None, service))
        print(rows[-1], flush=True)
    write_csv(args.out / "load.csv", [dict(zip(HEADER, row, strict=True)) for row in rows])
    write_csv(
        args.out / "memory.csv", [dict(zip(("second", "MiB", "open files"), row, strict=True)) for row in samples]
    )
    warm = [mib for second, mib, _ in samples if second >= 60]
    for phase in ("speed", "speed, small"):
        print(f"{phase}: {statistics.median(float(row[3]) for row in rows if row[0] == phase):.3f} of weft bench")
    print(f"requests counted by the service {counted:.0f}, by the clients {sum(tally.codes.values())}")
    print(f"memory after warm-up: {min(warm):.0f} to {max(warm):.0f} MiB")


HEADER = ("phase", "images/s", "bench images/s", "share", "answered", "p50 ms", "p99 ms", "wrong", "unexpected")
HEADER += ("codes", "exit code")


def row(phase: str, tally: Tally, speed: float, alone: float | None, service: Service) -> tuple:
    """A line of load.csv; ends the service."""
    for text in tally.unexpected[:5]:
        print(f"{phase}: {text}", flush=True)
    codes = " ".join(f"{code}:{count}" for code, count in sorted(tally.codes.items()))
    share = "" if alone is None else f"{speed / alone:.3f}"
    shown = "" if alone is None else f"{alone:.1f}"
    numbers = (f"{tally.centile(50):.1f}", f"{tally.centile(99):.1f}", tally.wrong, len(tally.unexpected))
    return phase, f"{speed:.1f}", shown, share, len(tally.seconds), *numbers, codes, service.stop()


if __name__ == "__main__":
    main()
