"""Downloads: files of one commit, and one short attempt where the hub cannot be reached."""

from __future__ import annotations

import contextlib
import hashlib
import io
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
from huggingface_hub import constants

import weft
from tests.helpers import put_in_cache
from weft import progress
from weft.checkpoints import hub, hub_client
from weft.cli import main
from weft.errors import CheckpointError
from weft.models.family import PublicWeights
from weft.train import decisions

COMMIT = "1" * 40
REPO = "me/net"


class FakeHub:
    """A server that answers as the hub does, or refuses every connection."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, list[tuple[str, str]]()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                fake.answer(self)

            def do_GET(self) -> None:
                fake.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append((request.command, request.path))
        content = self.files.get(request.path.rpartition("/")[2])
        if request.path == "/":
            content = b""
        request.send_response(404 if content is None else 200)
        if content is None:
            request.send_header("X-Error-Code", "EntryNotFound")
        else:
            request.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", str(len(content or b"")))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content or b"")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_client, "_ask_from", 0.0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub({"config.json": b"{}", "model.safetensors": bytes(3_000_000)})
    monkeypatch.setattr(constants, "ENDPOINT", fake.endpoint)
    address = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.endpoint + address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An endpoint on which nobody listens; the requests to it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # refuses connections: nobody listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        asked: list[str] = []
        session = hub_client.get_session()
        head = session.head
        monkeypatch.setattr(session, "head", lambda url, **more: (asked.append(url), head(url, **more))[1])
        monkeypatch.setattr(hub_client, "get_session", lambda: session)
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits for another attempt"))
        yield asked


def test_files_are_of_one_commit(served: FakeHub) -> None:
    folder = hub_client.fetch_files(REPO, ("model.safetensors", "config.json", "nothing.json"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").stat().st_size == 3_000_000
    assert folder.name == COMMIT
    later = [path for command, path in served.asked if path.endswith("config.json")]
    assert all(f"/{COMMIT}/" in path for path in later)
    with pytest.raises(CheckpointError, match=r"me/net on the hub must hold a\.bin; it has none of them"):
        hub_client.fetch_files(REPO, ("a.bin",))


@pytest.mark.parametrize("is_quiet", [False, True])
def test_the_bar_of_the_hub_unless_progress_is_quiet(
    is_quiet: bool, served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # the bar is shown without a terminal
    with progress.quietly() if is_quiet else contextlib.nullcontext():
        hub_client.hub_file(REPO, "model.safetensors")
    assert ("3.00M/3.00M" in capsys.readouterr().err) is not is_quiet


def test_a_hub_that_cannot_be_reached_is_asked_once_a_minute(
    unreachable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(hub_client.time, "monotonic", lambda: now)
    advice = "Connect to the internet, set HF_HOME to a cache that has them, or download"
    for name, weights in (("resnet18.a1_in1k", "timm/resnet18.a1_in1k"), ("cvt_13", "microsoft/cvt-13")):
        with pytest.raises(CheckpointError) as raised:
            weft.create_model(name, pretrained=True)
        assert f"{weights} must be on the hub or in its cache; they are not in the cache" in str(raised.value)
        assert advice in str(raised.value)
    with pytest.raises(CheckpointError, match=r"me/net must be on the hub or in its cache; it is not in the cache"):
        hub_client.fetch_files("me/net", ("config.json",))
    assert len(unreachable) == 1
    assert constants.HF_HUB_OFFLINE is False
    now += hub_client.UNREACHABLE_SECONDS
    assert not hub_client.is_reachable()
    assert len(unreachable) == 2


def test_the_cache_needs_no_hub(unreachable: list[str], tmp_path: Path) -> None:
    theirs = timm.create_model("resnet18.a1_in1k")
    put_in_cache(tmp_path / "cache", "timm/resnet18.a1_in1k", "model.safetensors", theirs.state_dict())
    ours = weft.create_model("resnet18.a1_in1k", pretrained=True)
    assert ours.state_dict()["fc.bias"].equal(theirs.state_dict()["fc.bias"])
    assert len(unreachable) <= 1


def test_without_replies_the_start_weights_are_chosen_after_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops all packets: the connection is accepted, and no reply comes."""
    limits: list[float] = []
    join = threading.Thread.join

    def join_soon(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout == hub_client.REPLY_SECONDS:
            limits.append(timeout)
            timeout = 0.1
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_soon)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(decisions, "bundle_of", decisions.BUNDLES.get)
        assert [decisions.model_with_weights() for _ in range(3)] == ["tf_efficientnet_lite0"] * 3
        with pytest.raises(CheckpointError, match="they are not in the cache, and the hub cannot be reached"):
            weft.create_model("resnet18.a1_in1k", pretrained=True)
    assert limits == [hub_client.REPLY_SECONDS]


def test_training_from_weights_that_cannot_be_had_is_one_line(
    unreachable: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "resnet18.a1_in1k", "--set", "pretrained=true", "--limit", "40", "--epochs", "1", "--quiet"]
    assert main(["train", "digits", *arguments, "--out", str(tmp_path / "run")]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "the hub cannot be reached. Connect to the internet" in line
    assert not (tmp_path / "run").exists()


def test_a_file_of_authors_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(hub, "urlopen", lambda url, timeout: (limits.append(timeout), io.BytesIO(b"weights"))[1])
    sha256 = hashlib.sha256(b"weights").hexdigest()[:8]
    source = PublicWeights("", f"https://authors.example/x-{sha256}.pth")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = Path(hub.download_weights(source, tmp_path, files=()))
    assert path.read_bytes() == b"weights"
    assert limits == [hub_client.REPLY_SECONDS]
