"""timm's registry: importing this module registers weft's models with timm as `weft_<name>`."""

from __future__ import annotations

from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from weft.errors import UsageError
from weft.models.building import build_network, default_cfg
from weft.models.families import families
from weft.models.family import Family

_FAMILIES = families()  # loads plugins, before there is a `register` to call
default_cfgs: dict[str, Any] = {}  # timm's registry reads those of the module whose entry points it registers


def register(family: Family) -> None:
    """Register the models of a family with timm, as `weft_<name>`."""
    cfgs = {name: default_cfg(name) for name in family.variants}
    tagged: dict[str, Any] = {f"weft_{name}.{cfg.get('tag', '')}".rstrip("."): cfg for name, cfg in cfgs.items()}
    default_cfgs.update(generate_default_cfgs(tagged))
    for name in family.variants:
        register_model(_entry_point(family, name))


def _entry_point(family: Family, name: str) -> Any:
    """Return the function that timm calls to build a network."""

    def entry(pretrained: bool = False, *, feature_cls: str = "getter", **kwargs: Any) -> nn.Module:
        kwargs.pop("pretrained_model_args", None)  # those of a config.json, which `kwargs` has too
        if feature_cls != "getter":
            raise UsageError(f"feature_cls of weft's models must be 'getter'; got {feature_cls!r}. Omit it.")
        return build_network(name, pretrained=pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = f"weft_{name}"
    entry.__doc__ = f"{family.name}, `{name}`."
    entry.__module__ = __name__
    return entry


for _family in _FAMILIES:
    register(_family)
