"""Build the same networks from other libraries, as baselines of speed measurements."""

from __future__ import annotations

import importlib
from typing import Any

import timm
import torch
from timm.layers import BatchNormAct2d
from timm.models import reparameterize_model
from torch import Tensor, nn

from weft.errors import UsageError, need
from weft.layers.norm import absorb
from weft.models.families import families, family_named
from weft.models.family import Peer

TOLERANCE = 1e-3  # largest difference of logits after merging BatchNorm, relative to the largest logit


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
    family = family_named(name)
    peers = family.peers(name) if family else ()
    if family is None and timm.is_model(name):
        peers = (Peer(f"timm {name}", "timm", lambda library: library.create_model(name), same_weights=True),)
    if not peers:
        known = ", ".join(other for family in families() for other in family.variants if family.peers(other))
        raise UsageError(f"{name} has no peer in another library. Models with a peer: {known}.")
    return peers


def build_peer(peer: Peer) -> nn.Module:
    """Build a network of another library.

    Raises:
        UsageError: the library is not installed.
    """
    need("peers", peer.library.partition(".")[0])
    network = peer.build(importlib.import_module(peer.library))
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
