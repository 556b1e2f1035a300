"""Folders of small pictures, and runs on them that many tests look at and none changes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.train import tiny
from weft.train import RunResult, train

COLOURS = {"blue": (30, 30, 220), "green": (30, 200, 30), "red": (220, 30, 30)}
PER_CLASS = 15
SHORT = dict(model="levit_nano_32", epochs=2, batch_size=12, device="cpu", quiet=True)


def paint(folder: Path, per_class: int = PER_CLASS, classes: tuple[str, ...] = tuple(COLOURS), seed: int = 0) -> Path:
    """Noisy pictures of one colour per class, 20x24 pixels."""
    random = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            noise = random.normal(0, 25, (20, 24, 3))
            pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Obey Ctrl-C also where a shell has started the tests in its background, which ignore it then."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paint(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="session")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of a few seconds that tells the colours apart."""
    settings = {"augment.color_jitter": 0, "optim.lr": 2e-3}
    return train(photos, out=tmp_path_factory.mktemp("runs") / "colours", settings=settings, **{**SHORT, "epochs": 6})


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that all differ, so that an order that is not the same shows."""
    return tiny.paint(tmp_path_factory.mktemp("data") / "noise")


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with six pictures of a class."""
    return tiny.paint(tmp_path_factory.mktemp("data") / "few", per_class=6)


@pytest.fixture(scope="session")
def undisturbed(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it, that nothing disturbs."""
    return tiny.run(noise, tmp_path_factory.mktemp("runs") / "undisturbed")


@pytest.fixture(scope="session")
def _stopped(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "stopped"
    with tiny.killed_after(4):
        tiny.run(noise, out)
    return out


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Path:
    """A copy of the same run, killed after its fourth step, the first of its second epoch."""
    return shutil.copytree(_stopped, tmp_path / "stopped")
