"""Build the same networks from other libraries, as baselines of speed measurements."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from timm.layers import BatchNormAct2d
from timm.models import reparameterize_model
from torch import Tensor, nn

from weft.errors import UsageError, need
from weft.layers.norm import absorb
from weft.models.families import VARIANTS

TOLERANCE = 1e-3  # largest difference of logits after merging BatchNorm, relative to the largest logit


@dataclass(frozen=True)
class Peer:
    """A network of another library with random weights, by one entry of peers.yaml.

    Attributes:
        label: name in tables.
        library: module to import.
        build: what makes the network there.
        config: class of its only argument, which takes the values; '' if `build` takes them.
        values: arguments.
        same_weights: whether it computes the same function of the same weights, so that weft can load them.
    """

    label: str
    library: str
    build: str
    config: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    same_weights: bool = False


class Logits(nn.Module):
    """Wrapper of a network of transformers that returns logits instead of an output object."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b num_classes) of images (b c h w)."""
        return self.model(images).logits


def peers_of(name: str) -> tuple[Peer, ...]:
    """Return the networks of other libraries that a model is compared with, the closest first.

    Args:
        name: name of a model of weft; a model of timm is its own peer.

    Raises:
        UsageError: no library has one.
    """
    if name not in VARIANTS and timm.is_model(name):
        return (Peer(f"timm {name}", "timm", "create_model", values={"model_name": name}, same_weights=True),)
    if name not in _entries():
        known = ", ".join(_entries())
        raise UsageError(f"{name} has no peer in another library. Models with a peer: {known}.")
    peers = []
    for entry in _entries()[name]:
        project = entry["library"].partition(".")[0].replace("_", "-")
        peers.append(Peer(f"{project} {entry['values'].get('model_name', name)}", **entry))
    return tuple(peers)


@functools.cache
def _entries() -> dict[str, list[dict[str, Any]]]:
    return yaml.safe_load(Path(__file__).with_name("peers.yaml").read_text(encoding="utf-8"))


def build_peer(peer: Peer) -> nn.Module:
    """Build a network of another library.

    Raises:
        UsageError: the library is not installed.
    """
    need("dev", peer.library.partition(".")[0])
    library = importlib.import_module(peer.library)
    build = getattr(library, peer.build)
    if peer.config:
        network = build(getattr(library, peer.config)(**peer.values))
    else:
        network = build(**{name: tuple(v) if isinstance(v, list) else v for name, v in peer.values.items()})
    return Logits(network) if peer.library == "transformers" else network


@torch.no_grad()
def merge_batch_norms(model: nn.Module, images: Tensor) -> nn.Module:
    """Return a copy of a network in which BatchNorm is merged into convolutions and linear layers.

    timm's own method merges what its networks offer. Then each BatchNorm that is left is merged into the convolution
    whose output it receives.

    Args:
        model: network of any library, in evaluation mode.
        images: (b c h w) of the network's size, with random values; a forward pass finds the convolution of each
            BatchNorm.

    Returns:
        The copy. Any other BatchNorm stays. If the outputs would change, because a convolution has another reader
        besides its BatchNorm, the model itself.
    """
    expected = model(images)
    twin = reparameterize_model(model).eval().to(images.device)  # timm creates the merged layers on the CPU
    written: dict[int, tuple[Tensor, nn.Conv2d]] = {}  # id of an output -> the output, so that the id stays its own
    pairs: dict[nn.Module, nn.Conv2d] = {}

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Conv2d):
            written[id(output)] = output, module
        elif isinstance(module, nn.BatchNorm2d) and id(inputs[0]) in written:
            pairs[module] = written[id(inputs[0])][1]

    hooks = [module.register_forward_hook(record) for module in twin.modules()]
    twin(images)
    for hook in hooks:
        hook.remove()
    merged: dict[nn.Module, nn.Module] = {conv: absorb(conv, norm) for norm, conv in pairs.items()}
    for norm in pairs:
        timms: Any = norm  # its BatchNorm also has a dropout and an activation
        merged[norm] = nn.Sequential(timms.drop, timms.act) if isinstance(norm, BatchNormAct2d) else nn.Identity()
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            parent._modules[name] = merged.get(child, child)
    limit = TOLERANCE * float(expected.abs().max())
    return twin if torch.allclose(twin(images), expected, rtol=0, atol=limit) else model
