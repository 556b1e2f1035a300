"""Family: the record of everything that weft knows about one family of networks.

A record is data and imports no torch, so that `weft models` and `weft --help` start quickly. Code is given as a
reference, "package.module:name", which `resolve` imports on first use; a plugin may give the objects themselves.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from weft.models.layout import Layout

Reference = Any  # an object, or "package.module:name"


def resolve(reference: Reference) -> Any:
    """Return the object that a reference names; an object is returned unchanged."""
    return _imported(reference) if isinstance(reference, str) else reference


@functools.cache
def _imported(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


class PublicWeights(NamedTuple):
    """Where the public weights of a model are.

    Attributes:
        repo: repository on the Hugging Face hub; '' if there is none.
        file: URL of the authors' own file, tried if the hub fails; its name ends in the first digits of its sha256.
        by_hand: how a person gets the file, if no hub has it.
        size: image size that the weights were trained at, in pixels.
        licence: SPDX identifier of the licence.
    """

    repo: str
    file: str = ""
    by_hand: str = ""
    size: int = 224
    licence: str = "apache-2.0"


@dataclass(frozen=True)
class Variant:
    """One model of a family.

    Attributes:
        args: constructor arguments.
        params: number of parameters, all heads included; None: not counted yet.
        macs: multiply-adds of one image in evaluation, attention included; None: not counted yet.
        top1: reported top-1 accuracy on ImageNet-1k in percent; None: not reported.
        top1_source: where that number is printed.
        printed: parameters and "FLOPs" as the source prints them; None for FLOPs that it does not print.
        weights: public weights.
        default_cfg: entries of timm's default_cfg that differ from those of the family.
    """

    args: Mapping[str, Any]
    params: int | None = None
    macs: int | None = None
    top1: float | None = None
    top1_source: str = ""
    printed: tuple[str, str | None] | None = None
    weights: PublicWeights | None = None
    default_cfg: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Image size in pixels."""
        return self.args.get("img_size", 224)


class Peer(NamedTuple):
    """The same network in another library, with random weights.

    Attributes:
        label: name in tables.
        library: module to import.
        build: makes the network from that module.
        same_weights: whether it computes the same function of the same weights, so that weft can load them.
    """

    label: str
    library: str
    build: Callable[[Any], nn.Module]
    same_weights: bool = False


class SpeedProtocol(NamedTuple):
    """How a paper measures throughput; every row of one of its tables is measured.

    Attributes:
        table: table of the paper, as in its `imagenet.csv`.
        base: model that the throughput of the others is also given relative to.
        cpu_batch: images per batch on a CPU, with one thread in fp32.
        gpu_batch: images per batch on a GPU, in mixed precision.
        gpu_batches: those of models with another one.
    """

    table: str
    base: str
    cpu_batch: int
    gpu_batch: int
    gpu_batches: Mapping[str, int]


@dataclass(frozen=True)
class Candidate:
    """A model that `weft compare` trains, and the settings that make it fit the images.

    Attributes:
        name: label in reports.
        model: model name.
        settings: recipe keys.
        weights: public weights that it starts from, as OWNER/NAME on the hub; '' for training from scratch.
    """

    name: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""


@dataclass(frozen=True)
class Family:
    """A family of networks.

    Attributes:
        name: of the family, as files and reports have it.
        network: class, a `weft.models.base.Backbone`.
        variants: models by name.
        default_cfg: entries of timm's default_cfg: `first_conv`, `classifier`, `crop_pct`, `fixed_input_size` ...
        feature_levels: function of the constructor arguments -> levels that `features_only` returns by default; None:
            all if there are at most four, else four, evenly spread.
        layouts: tuple of `weft.models.layout.Layout`: weights of other libraries that can be loaded.
        built_values: function of a built model -> constructor arguments that matter to its outputs and that no tensor
            shows; compared with what a layout asks for.
        position_keys: endings of the names of tensors that depend on the image size.
        head_keys: names of the head's weight, whose first axis is the number of classes.
        attention: function (model, weights, image size) -> `weft.layers.attention.AttentionTrace`; None: no maps.
        cam_target: function of a model -> `weft.models.base.CamTarget`, the last map for Grad-CAM; None: found by
            timm's conventions.
        fold_rules: mapping from module type, also that of the network, to a function that returns the folded module.
        peers: function of a model name -> its `Peer`s, the closest first.
        candidates: what `weft compare` trains by default, under "small" (images up to 96 pixels) and "large".
        speed_protocol: how the paper measures throughput, for `weft bench --protocol`; None: it has no such table.
        shard_units: types of modules that FSDP shards one by one, in addition to those called `Block`.
    """

    name: str
    network: Reference
    variants: Mapping[str, Variant]
    default_cfg: Mapping[str, Any] = field(default_factory=dict)
    feature_levels: Reference = None
    layouts: Reference = ()
    built_values: Reference = None
    position_keys: tuple[str, ...] = ("pos_embed",)
    head_keys: tuple[str, ...] = ("head.weight",)
    attention: Reference = None
    cam_target: Reference = None
    fold_rules: Reference = field(default_factory=dict)
    peers: Callable[[str], tuple[Peer, ...]] = lambda name: ()
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    speed_protocol: SpeedProtocol | None = None
    shard_units: Reference = ()

    def builds(self, model: object) -> bool:
        """Return whether a model is a network of this family, without importing the family's code."""
        if not isinstance(self.network, str):
            return isinstance(model, self.network)
        return self.network in (f"{kind.__module__}:{kind.__qualname__}" for kind in type(model).__mro__)

    def all_layouts(self) -> tuple[Layout, ...]:
        """Return the layouts of other libraries."""
        return resolve(self.layouts)
