"""Kill processes that open a dataset at random moments: python benchmarks/reliability/data_kills.py [--kills N]

A folder, tar shards on the disk and tar shards on a server of this machine, of the same generated images, some of them
damaged. A process opens the data and reads every image, and is killed (SIGKILL) after a random time; the next one uses
what it left in the cache, and the server refuses some requests. After some kills, a process must find everything as one
with an empty cache does: keys, classes, sizes, hashes, bad files, and the bytes of every image.
"""

from __future__ import annotations

import argparse
import csv
import functools
import http.server
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

KILLS = 5  # one after the other, before a process may end
READ = """
import hashlib, sys
from weft.data import index, open_data, remote
index.SETTLED_NS, index.SAVE_S, index.MANY = 0, 0.05, 10
remote.WAITS_S = (0.01,) * 20
remote.FIRST_WAITS_S = (0.01,) * 20
print("started", flush=True)
splits = open_data(sys.argv[1], check=sys.argv[2], max_bad=1, cache_bytes=200_000)
digest = hashlib.sha256(repr((splits.notes[0], splits.bad, splits.sizes.tolist())).encode())
for side in (splits.train, splits.val):
    digest.update(repr((side.keys, side.labels, list(side.digests))).encode())
    for i in range(len(side)):
        digest.update(side.read(i).data)
print(digest.hexdigest())
"""


class Server(http.server.ThreadingHTTPServer):
    """Says nothing about clients that were killed."""

    def handle_error(self, *_: object) -> None:
        pass


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and refuses one of four requests."""

    def send_head(self) -> Any:
        if random.random() < 0.25:
            self.send_error(503)
            return None
        return super().send_head()

    def log_message(self, *_: object) -> None:
        pass


def make_data(folder: Path, images: int) -> None:
    """Write images of two classes into class folders, and the same into ten shards."""
    shards = [tarfile.open(folder / f"{number}.tar", "w") for number in range(10)]
    for number in range(images):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        data = file.getvalue()[: -60 if number % 50 == 7 else None]
        path = folder / "photos" / f"class{number % 2}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        member = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
        member.size = len(data)
        shards[number % 10].addfile(member, io.BytesIO(data))
    for shard in shards:
        shard.close()


def read(data: str, check: str, cache: Path, kill_after: float | None = None) -> tuple[str, float]:
    """Open data in a process; return what it found, or an empty text if it was killed, and the seconds."""
    command = [sys.executable, "-c", READ, data, check]
    environment = {**os.environ, "WEFT_CACHE": str(cache)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = time.perf_counter()
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        out, err = process.communicate()
    if process.returncode > 0:
        raise SystemExit(err)
    return out.strip(), time.perf_counter() - start


def main() -> None:
    """Kill processes, and write a CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="for each kind of data")
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, args.images)
        handler = functools.partial(Handler, directory=name)
        server = Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kinds = {
            "folder": str(folder / "photos"),
            "shards": str(folder / "{0..9}.tar"),
            "server": f"http://127.0.0.1:{server.server_address[1]}/{{0..9}}.tar",
        }
        for kind, data in kinds.items():
            for check in ("decode", "header"):
                cache, killed, outcome, left = folder / "cache", 0, "same", 0
                expected, whole = read(data, check, folder / "empty")
                while killed < args.kills // 2:
                    for _ in range(KILLS):
                        found, _ = read(data, check, cache, random.uniform(0, whole))
                        killed += not found
                        outcome = outcome if found in ("", expected) else "DIFFERENT"
                    outcome = outcome if read(data, check, cache)[0] == expected else "DIFFERENT"
                    left += len(list(cache.rglob("*.part")))
                    shutil.rmtree(cache)
                shutil.rmtree(folder / "empty")
                rows.append((kind, check, killed, outcome, left))
                print(*rows[-1], flush=True)
        server.shutdown()
    with args.csv.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("data", "check", "kills", "outcome", "left_files"), *rows])
    if any(row[3] != "same" or row[4] for row in rows):
        raise SystemExit("A killed process changed what a later one finds, or left files.")


if __name__ == "__main__":
    main()
