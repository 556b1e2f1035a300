"""A network that every runtime exports in a second, for tests of exports in which the network does not matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import weft
from tests.helpers import enliven
from weft.deploy import exporting
from weft.deploy.runtimes import FILES
from weft.train.own_module import register_module

CLASSES = ("left", "right", "up")


class Dots(nn.Module):
    """Convolution, BatchNorm, ReLU, mean, linear."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, *size)}
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(images)).relu().mean((2, 3)))


def dots(classes: int = len(CLASSES), size: tuple[int, int] = (32, 32), seed: int = 0) -> Any:
    """In evaluation mode; the classes are far enough apart that rounding does not swap them."""
    torch.manual_seed(seed)
    network = weft.create_model(register_module(enliven(Dots(classes, size))))
    with torch.no_grad():
        network.head.weight.mul_(30)
    return network.eval()


def noise(root: Path) -> Path:
    """A folder with 8 training images and 7 held-out ones of each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 7)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def fake_graphs(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[np.ndarray, str], np.ndarray] = lambda logits, format: logits
) -> None:
    """Let exports write a text in place of a graph; they return the logits of the network, changed."""

    def write_graph(network: Any, file: Path, format: str, *_: Any) -> Callable[[np.ndarray], np.ndarray]:
        for name in FILES[format]:
            (file.parent / name).write_text("graph")
        return lambda images: changed(network(torch.from_numpy(images)).detach().numpy(), format)

    monkeypatch.setattr(exporting, "write_graph", write_graph)
