"""Shards on a server: the same images as from the disk, in bounded space, while the server comes and goes."""

from __future__ import annotations

import errno
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.data.pictures import jpeg, tar
from weft.data import ImageDataset, index, make_loader, open_data, remote, train_transform
from weft.data.order import FILES, Order
from weft.data.prepare import prepare_data
from weft.data.seeding import sliding_order
from weft.data.source import KeyedSource, Splits
from weft.errors import DataError, UsageError
from weft.files import cache_dir

SHARDS, IMAGES = 8, 6
VARIED = train_transform(16, (0.5,) * 3, (0.5,) * 3)


HOLD = """
import sys
from weft.machine.system import lock_file
file = open(sys.argv[1], "wb")
print(lock_file(file.fileno()), flush=True)
sys.stdin.read()
"""


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; refuses the next `refusals` requests, cuts the next `cuts` files in half, counts the others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.refusals, self.cuts, self.asked = folder, 0, 0, Counter[str]()
        self.tag: str | None = "ETag"
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if self.server.refusals > 0:
            self.server.refusals -= 1
            self.send_error(503)
            return
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        if self.server.tag is not None:
            self.send_header(self.server.tag, str(path.stat().st_mtime_ns))
        self.end_headers()
        if self.command == "GET":
            self.server.asked[path.name] += 1
            if self.server.cuts > 0:
                self.server.cuts -= 1
                data = data[: len(data) // 2]
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(SHARDS):
        names = [f"{name}/{shard}-{i}.jpg" for name in ("a", "b") for i in range(IMAGES // 2)]
        members = [(name, jpeg(100 * shard + i)) for i, name in enumerate(names)]
        tar(tmp_path / "shards" / f"{shard}.tar", members)
    return tmp_path / "shards"


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "SETTLED_NS", 0)
    monkeypatch.setattr(remote, "WAITS_S", (0.01,) * 4)
    monkeypatch.setattr(remote, "FIRST_WAITS_S", (0.01,) * 2)
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def opened(server: Server, **options: Any) -> Splits:
    return open_data(f"{server.url}/{{0..{SHARDS - 1}}}.tar", **options)


def fetched() -> list[Path]:
    return [path for path in (cache_dir() / remote.FOLDER).iterdir() if not path.suffix]


def forget() -> None:
    for path in fetched():
        path.unlink()


def epoch_of(source: KeyedSource, workers: int = 0, *, step: int = 0) -> torch.Tensor:
    loader = make_loader(ImageDataset(source, VARIED), 4, shuffle=True, workers=workers)
    loader.start_at(1, step)
    return torch.cat([images for images, _ in loader])


def test_images_are_those_of_the_disk(server, folder):
    there, here = opened(server), open_data(folder)
    for of_server, of_disk in ((there.train, here.train), (there.val, here.val)):
        assert (of_server.keys, of_server.labels) == (of_disk.keys, of_disk.labels)
        assert list(of_server.digests) == list(of_disk.digests)
        assert [of_server.read(i) for i in range(len(of_server))] == [of_disk.read(i) for i in range(len(of_disk))]
    assert server.asked == {f"{shard}.tar": 1 for shard in range(SHARDS)}


def test_lists_are_made_once(server):
    first = opened(server)
    forget()
    server.asked.clear()
    again = opened(server)
    assert again.train.keys == first.train.keys
    assert list(again.train.digests) == list(first.train.digests)
    assert not server.asked


@pytest.mark.parametrize("workers", [0, 2])
def test_the_space_is_bounded_and_the_bits_are_the_same(server, folder, workers):
    expected = epoch_of(opened(server).train)
    size = max(path.stat().st_size for path in folder.iterdir())
    train = opened(server, cache_bytes=2 * size).train
    forget()
    assert torch.equal(epoch_of(train, workers), expected)
    assert sum(path.stat().st_size for path in fetched()) <= (2 + workers) * size  # each may be fetching one
    assert torch.equal(epoch_of(train, workers, step=3), expected[12:])
    assert not list((cache_dir() / remote.FOLDER).glob("*.part"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_stops_and_comes_back_changes_no_bit(server, workers):
    train = opened(server).train
    expected = epoch_of(train)
    forget()
    server.refusals, server.cuts = 5, 1
    assert torch.equal(epoch_of(train, workers), expected)
    assert server.refusals == 0


@pytest.mark.parametrize("takes_next", [None, True])
def test_a_shard_that_stays_away_is_named_and_no_damaged_image(takes_next, server, folder):
    train = opened(server, takes_next=takes_next).train
    forget()
    server.refusals = 1_000
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:\d+/\d\.tar must be reachable; .*a run can be resumed"):
        epoch_of(train)
    server.refusals = 0
    (folder / "3.tar").unlink()
    with pytest.raises(DataError, match=r"/3\.tar must be reachable"):
        opened(server)


def test_a_shard_that_changed_is_listed_again_and_refused_in_a_run(server, folder):
    train = opened(server).train
    forget()
    tar(folder / "5.tar", [("a/new.jpg", jpeg(999))])
    with pytest.raises(DataError, match=r"/5\.tar must be as it was when the data was opened; it has changed since"):
        epoch_of(train)
    keys = [*(splits := opened(server)).train.keys, *splits.val.keys]
    assert [key for key in keys if key.startswith("5.tar")] == ["5.tar/a/new.jpg"]


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified", None])
def test_a_changed_shard_of_the_same_size_is_seen_by_the_next_start(server, folder, tag):
    server.tag = tag
    opened(server)
    size = (folder / "5.tar").stat().st_size
    tar(folder / "5.tar", [("a/new.jpg", jpeg(999))])
    assert (folder / "5.tar").stat().st_size == size
    splits = opened(server)
    keys = [*splits.train.keys, *splits.val.keys]
    assert [key for key in keys if key.startswith("5.tar")] == ["5.tar/a/new.jpg"]


def test_what_a_killed_process_left_is_removed_but_no_file_that_another_process_fetches(server):
    """Its number says nothing: it may run on another host, or in another container."""
    cache = cache_dir() / remote.FOLDER
    cache.mkdir(parents=True)
    for name in ("0123.99-abcd.part", "4567.99-abcd.part"):
        (cache / name).write_bytes(b"half")
    command = [sys.executable, "-c", HOLD, str(cache / "0123.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        opened(server)
        assert [path.name for path in cache.glob("*.part")] == ["0123.99-abcd.part"]
        other.communicate()


def test_a_cache_that_cannot_be_used_is_named(server):
    train = opened(server).train
    shutil.rmtree(cache_dir() / remote.FOLDER)
    (cache_dir() / remote.FOLDER).touch()
    with pytest.raises(DataError, match=r"\d\.tar needs a place in the cache; .*remote cannot be written \("):
        epoch_of(train)


def test_a_full_disk_is_not_waited_for(server, monkeypatch):
    train = opened(server).train
    forget()
    monkeypatch.setattr(remote, "WAITS_S", (600.0,))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(remote, "_fetch", side_effect=full),
        pytest.raises(DataError, match="No space left on device"),
    ):
        epoch_of(train)


@pytest.mark.parametrize("workers", [0, 2])
def test_prepare_says_in_one_line_that_a_server_is_away(server, tmp_path, workers):
    opened(server)
    forget()
    answer = Handler.answer

    def answer_heads(handler: Handler) -> None:
        if handler.command == "GET":
            handler.server.refusals = 1
        answer(handler)

    with mock.patch.object(Handler, "answer", answer_heads), pytest.raises(DataError) as caught:
        prepare_data(f"{server.url}/{{0..{SHARDS - 1}}}.tar", tmp_path / "packed", 8, workers=workers, quiet=True)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\d\.tar must be reachable; [^\n]*", str(caught.value))


def test_a_protocol_without_its_library_is_refused(monkeypatch):
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(UsageError, match=r"must be a URL that fsspec reads; Install s3fs to access S3\. .*\[remote\]"):
        open_data("s3://bucket/x.tar")


def test_an_order_over_files_uses_few_at_a_time():
    blocks = np.repeat(np.arange(400), 25)
    order = sliding_order(blocks, FILES, seed=3, epoch=2)
    assert sorted(order.tolist()) == list(range(len(blocks)))
    assert np.array_equal(order, sliding_order(blocks, FILES, seed=3, epoch=2))
    assert not np.array_equal(order, sliding_order(blocks, FILES, seed=3, epoch=3))
    span: dict[int, tuple[int, int]] = {}
    for place, block in enumerate(blocks[order].tolist()):
        span[block] = span.get(block, (place, place))[0], place
    in_use = Counter(place // 25 for first, last in span.values() for place in range(first, last + 25, 25))
    assert max(in_use.values()) <= 1.3 * FILES
    assert np.mean([len(set(blocks[order[start : start + 100]])) for start in range(0, 10_000, 100)]) > FILES / 2
    plain, local = (Order(10_000, 100, shuffle=True, seed=3, blocks=one) for one in (None, blocks))
    assert {key[1] for key in plain.keys(0, 0)} != {key[1] for key in local.keys(0, 0)}
