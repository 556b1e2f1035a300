"""Family: the record of everything that weft knows about one family of networks.

A record is data and imports no torch, so that `weft models` and `weft --help` start quickly. The code of a family is in
files with fixed names, which `Family.code` imports on first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class PublicWeights(NamedTuple):
    """Where the public weights of a model are.

    Attributes:
        repo: repository on the Hugging Face hub; '' if there is none.
        file: URL of the authors' own file, tried if the hub fails; its name ends in the first digits of its sha256.
        by_hand: how a person gets the file, if no hub has it.
        licence: SPDX identifier of the licence.
    """

    repo: str
    file: str = ""
    by_hand: str = ""
    licence: str = "apache-2.0"


@dataclass(frozen=True)
class Variant:
    """One model of a family.

    Attributes:
        args: constructor arguments.
        weights: public weights.
        default_cfg: entries of timm's default_cfg that differ from those of the family.
    """

    args: Mapping[str, Any]
    weights: PublicWeights | None = None
    default_cfg: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Image size in pixels."""
        return self.args.get("img_size", 224)


@dataclass(frozen=True)
class Family:
    """A family of networks.

    Its code is in the package of its network, in files that are optional but for the first. A module of another name
    than `network`, as in a plugin of one file, has all of it itself.

    - `network.py`: the class, a `weft.models.base.Backbone`.
    - `weights.py`: `LAYOUTS`, a tuple of `weft.models.layout.Layout`: weights of other libraries that can be loaded.
    - `inference.py`: `RULES`, from a module type, that of the network included, to a function that returns the folded
      module.
    - `attention.py`: `attention`, a function (model, weights, image size) -> `weft.layers.attention.AttentionTrace`,
      and `cam_target`, a function of a model -> `weft.models.base.CamTarget`, its last map for Grad-CAM.

    Attributes:
        name: of the family, as files and reports have it.
        network: class, or "package.network:Class", so that no torch is imported.
        variants: models by name.
        default_cfg: entries of timm's default_cfg: `first_conv`, `classifier`, `crop_pct`, `fixed_input_size` ...
        candidates: recipe settings, `model` included, of the run that `weft compare` makes by default, under "small"
            (images up to 96 pixels) and "large".
        has_attention: whether there is a function `attention`; an export reads this without importing torch.
    """

    name: str
    network: type[nn.Module] | str
    variants: Mapping[str, Variant]
    default_cfg: Mapping[str, Any] = field(default_factory=dict)
    candidates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_attention: bool = False

    @property
    def reference(self) -> str:
        """Module and class of the network, as "package.network:Class"."""
        network = self.network
        return network if isinstance(network, str) else f"{network.__module__}:{network.__qualname__}"

    @property
    def network_class(self) -> type[nn.Module]:
        """Class of the network; imports torch."""
        return self.code("network", self.reference.partition(":")[2])

    @property
    def is_loaded(self) -> bool:
        """Whether the code of the network is imported."""
        return self._module("network") in sys.modules

    def code(self, file: str, name: str, default: Any = None) -> Any:
        """Return what a file of the family defines, such as `code("weights", "LAYOUTS")`; else the default."""
        module = self._module(file)
        try:
            return getattr(importlib.import_module(module), name, default)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return default

    def _module(self, file: str) -> str:
        module = self.reference.partition(":")[0]
        package, _, own = module.rpartition(".")
        return f"{package}.{file}" if own == "network" else module
