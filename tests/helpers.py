"""What several test files need. Helpers assert or build; none answers yes or no."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import weft
from weft.deploy.model import Model

# `make fuzz` sets it: every count in full.
FULL = bool(os.environ.get("WEFT_NIGHTLY"))
NANO = ("ceit_nano_32", "cvt_nano_32", "levit_nano_32")
# The others in `make test-nightly`.
ONE_OF_NANO = [*(pytest.param(name, marks=pytest.mark.nightly) for name in NANO[:2]), NANO[2]]


def free_port() -> int:
    """A port that nothing uses now and that no system assigns by itself: those begin at 32,768.

    A port of `bind(("", 0))` that is closed again can be assigned to the next process that asks. Ray's workers take
    10,000 to 19,999.
    """
    for port in range(20_000 + os.getpid() % 5_000, 32_768):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def show_wandb() -> None:
    """Let wandb be imported, which is hidden from timm in all tests."""
    if sys.modules.get("wandb", sys) is None:
        del sys.modules["wandb"]


def noise_images(folder: Path, *names: str, size: tuple[int, int] = (32, 32), seed: int = 0) -> Path:
    """Write an image of noise under each name in a folder; `size` is (height, width) in pixels."""
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / name)
    return folder


def unpack(file: Path, folder: Path) -> None:
    """Unpack a tar file, with the filter of Python 3.11.4 and later, which later ones require."""
    filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(file) as archive:
        archive.extractall(folder, **filtered)


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a passwd entry, as in a container that runs under any number."""
    for name in ("WEFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)


def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random BatchNorm statistics and scales, random positions: fresh ones hide mistakes (zero scales, zero means)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(0.1 * torch.randn(module.running_mean.shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
                module.weight.copy_(1 + 0.1 * torch.randn(module.weight.shape, generator=generator))
                module.bias.copy_(0.1 * torch.randn(module.bias.shape, generator=generator))
        for name, parameter in model.named_parameters():
            if name.endswith(("attention_biases", "layer_embed")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def lively(name: str, **switches: object) -> nn.Module:
    """A model of ours in evaluation mode whose every part matters to its output."""
    torch.manual_seed(0)
    return enliven(weft.create_model(name, **switches)).eval()


def images(model: nn.Module, batch: int = 2, seed: int = 0) -> Tensor:
    """Standard normal images of the model's size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *model.default_cfg["input_size"], generator=generator)


def put_in_cache(cache: Path, repo: str, file: str, state: dict[str, torch.Tensor]) -> None:
    """Write a state dict where huggingface_hub keeps the files that it downloaded."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    revision = "0" * 40
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, snapshot / file) if file.endswith(".safetensors") else torch.save(state, snapshot / file)


BLANK = "WEFT_TESTS_BLANK_FIGURES"  # set in the environment of processes that save blank figures


def blank_figures(setattr: Callable[[object, str, object], None]) -> None:
    """Make matplotlib save every figure as one white pixel, and skip the t-SNE of the feature maps."""
    from matplotlib.figure import Figure

    from weft.inference import feature_map

    def save(self: Figure, file: Path | io.StringIO, **_: object) -> None:
        if isinstance(file, io.StringIO):
            file.write('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>')
        else:
            Image.new("RGB", (1, 1), "white").save(file)

    setattr(Figure, "savefig", save)
    setattr(feature_map, "two_dimensions", lambda features: features[:, :2])


def examples(full: int) -> int:
    """Number of examples that Hypothesis tries: an eighth of the full number, which `make fuzz` takes."""
    return full if FULL else full // 8


class Calls:
    """Number of calls, of Python's functions and of C's."""

    count = 0


@contextlib.contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count calls: work without a clock, the same on every machine."""
    calls, before = Calls(), sys.getprofile()

    def count(frame: object, event: str, arg: object) -> None:
        calls.count += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def baselines() -> list[dict[str, str]]:
    """Networks of timm that the papers use as teachers and baselines: the rows of the table in docs/recipes.md."""
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    lines = page[page.index("| name | role |") :].partition("\n\n")[0].splitlines()
    keys = ("name", "role", "size", "params", "paper_top1", "paper_source", "tag_top1", "tag_source")
    return [dict(zip(keys, line.strip("| ").split(" | "), strict=True)) for line in lines[2:]]


def outputs_of(model: Model, images: torch.Tensor) -> torch.Tensor:
    """The logits of a model of any runtime, as a tensor."""
    return torch.from_numpy(model.run(images.numpy()).logits)
