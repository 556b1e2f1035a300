"""Build the same networks from other libraries, as baselines of speed measurements."""

from __future__ import annotations

import importlib

import timm
from torch import Tensor, nn

from weft.errors import UsageError, need
from weft.models.families import families, family_named
from weft.models.family import Peer


class Logits(nn.Module):
    """A network of transformers, which returns an object, as a function from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (b c h w) to logits (b num_classes)."""
        return self.model(images).logits


def peers_of(name: str) -> tuple[Peer, ...]:
    """Return the networks of other libraries that a model is compared with, the closest first.

    Args:
        name: of one of weft's models; a model of timm has itself as its peer.

    Raises:
        UsageError: no library has one.
    """
    family = family_named(name)
    peers = family.peers(name) if family else ()
    if family is None and timm.is_model(name):
        peers = (Peer(f"timm {name}", "timm", lambda library: library.create_model(name), same_weights=True),)
    if not peers:
        known = ", ".join(other for family in families() for other in family.variants if family.peers(other))
        raise UsageError(f"{name} has no peer in another library. Models with one: {known}.")
    return peers


def build_peer(peer: Peer) -> nn.Module:
    """Build a network of another library.

    Raises:
        UsageError: the library is not installed.
    """
    need("peers", peer.library.partition(".")[0])
    network = peer.build(importlib.import_module(peer.library))
    return Logits(network) if peer.library == "transformers" else network
