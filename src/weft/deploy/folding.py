"""Fold a network: a copy for inference, with everything merged that inference does not need separately.

BatchNorm goes into the convolution or linear layer next to it, LeViT's two heads become one and its bias tables are
looked up, CeiT's class token goes into its position embedding, the scale of the scores into the weights of the queries;
dropout and drop path are off. If the class token predicts, the last block of CeiT and CvT computes nothing else, which
saves 6 % of all multiply-adds. The rules are in `weft.layers` and in each family's `inference.py`; this module applies
them. The merged weights are computed in float64, so outputs differ only by the rounding of the weights.

In a network of another library, one forward pass shows which BatchNorm has the output of which convolution.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.errors import UsageError
from weft.layers import activation, norm
from weft.models.base import Backbone
from weft.models.families import families

TOLERANCE = 1e-4  # largest difference of the outputs of another library's network, as a share of the largest
Rules = Mapping[type[nn.Module], Callable[[Any], nn.Module]]


def fold(model: nn.Module, device: str | torch.device | None = None) -> nn.Module:
    """Return a folded copy of a network, for inference: `train()` does not change its outputs.

    Args:
        model: built by `weft.create_model`; unchanged.
        device: where the folded network will run; None for the device of the model. On a GPU, what is merged differs.

    Returns:
        A network with the same outputs, on that device and in the same dtype, whose parameters need no gradient. A
        classifier that predicts from its class token loses its last feature level. Save the original as a model
        directory, not the folded copy.

    Raises:
        UsageError: the network has a BatchNorm that no rule merges, or has been folded before.
    """
    if is_folded(model):
        raise UsageError("A network must not be folded twice; this one is folded already. Use it as it is.")
    if device is None:
        device = next((tensor.device for tensor in model.parameters()), "cpu")
    folded = _merged(model, torch.device(device))
    unmerged = [name for name, module in folded.named_modules() if isinstance(module, _BatchNorm)]
    if unmerged:
        raise UsageError(
            f"fold must be able to merge every BatchNorm; in {type(model).__name__} it cannot merge {len(unmerged)},"
            f" the first is {unmerged[0]}. Use timm.models.reparameterize_model, or the library of the network."
        )
    return folded


def fastest(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a network for inference, with all merged that can be; of another library, in the memory format
    that suits convolutions. A folded network, and a module of the user, which may not support being copied, stay as
    they are."""
    if is_folded(model) or getattr(model, "is_own_module", False):
        return model.to(device).eval()
    merged = _merged(model, device)
    return merged if isinstance(model, Backbone) else merged.to(memory_format=torch.channels_last)


def _merged(model: nn.Module, device: torch.device) -> nn.Module:
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    copied = copied.to("cpu" if device.type == "mps" else device)  # MPS has no float64
    merged: Any = _folded(copied, _rules())
    if not isinstance(model, Backbone):
        _merge_traced(merged)
    merged.is_folded = True
    return merged.to(device).eval()


def is_folded(model: nn.Module) -> bool:
    """Return whether `fold` made this network."""
    return bool(getattr(model, "is_folded", False))


def _rules() -> Rules:
    """Return the rules of all families whose code is loaded, by type of module: no others can have built the model."""
    rules: dict[type[nn.Module], Callable[[Any], nn.Module]] = {**norm.RULES, **activation.RULES}
    for family in families():
        if family.is_loaded:
            rules |= family.code("inference", "RULES", {})
    return rules


def _folded(module: Any, rules: Rules) -> nn.Module:
    """Apply the rules to the parts of a module, then to the module."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    elif type(module).__name__ == "DropPath":  # weft's, or timm's, whose import would take seconds
        module.drop_prob = 0.0
    for name, part in list(module.named_children()):
        module._modules[name] = _folded(part, rules)
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        _merge_pairs(module)
    rule = next((rules[kind] for kind in type(module).__mro__ if kind in rules), None)
    return module if rule is None else rule(module)


def _merge_traced(network: Any) -> None:
    """Merge each BatchNorm that has the output of a convolution; nothing if that would change the outputs, since other
    parts of the network also have the output."""
    shape = (getattr(network, "pretrained_cfg", None) or {}).get("input_size")
    first = next(network.parameters(), None)
    if shape is None or first is None:
        return
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        images = torch.randn(1, *shape).to(first)
        pairs, expected = _pairs(network, images)
        parents = {part: (module, name) for module in network.modules() for name, part in module.named_children()}
        for conv, batch_norm in pairs:
            (parent, name), (other, place) = parents[conv], parents[batch_norm]
            parent._modules[name] = norm.absorb(conv, batch_norm)
            other._modules[place] = getattr(batch_norm, "act", nn.Identity())  # of timm's BatchNorm with activation
        is_same = torch.allclose(network(images), expected, rtol=0.0, atol=TOLERANCE * float(expected.abs().max()))
        if not is_same:
            for conv, batch_norm in pairs:
                (parent, name), (other, place) = parents[conv], parents[batch_norm]
                parent._modules[name], other._modules[place] = conv, batch_norm


def _pairs(network: nn.Module, images: Tensor) -> tuple[list[tuple[nn.Conv2d, nn.BatchNorm2d]], Tensor]:
    """Return the pairs of a convolution and the BatchNorm that has its output, and the outputs of a network."""
    outputs, pairs = dict[int, tuple[nn.Conv2d, Tensor]](), list[tuple[nn.Conv2d, nn.BatchNorm2d]]()

    def keep(module: Any, _: Any, output: Tensor) -> None:
        outputs[id(output)] = module, output  # held, so that no other tensor has this id

    def find(module: Any, given: tuple[Tensor, ...]) -> None:
        if id(given[0]) in outputs:
            pairs.append((outputs[id(given[0])][0], module))

    hooks = []
    for module in network.modules():
        is_plain = type(module).forward is nn.Conv2d.forward or type(module).__name__ == "Conv2dSame"  # timm's
        if isinstance(module, nn.Conv2d) and is_plain:  # others may compute with other weights than they store
            hooks.append(module.register_forward_hook(keep))
        elif isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            hooks.append(module.register_forward_pre_hook(find))
    try:
        return pairs, network(images)
    finally:
        for hook in hooks:
            hook.remove()


def _merge_pairs(sequence: nn.Sequential) -> None:
    """Merge each BatchNorm of a sequence into the convolution before it."""
    parts = list(sequence._modules.items())
    for (name, conv), (next_name, batch_norm) in itertools.pairwise(parts):
        if isinstance(conv, nn.Conv2d) and isinstance(batch_norm, nn.BatchNorm2d) and batch_norm.track_running_stats:
            sequence._modules[name] = norm.absorb(conv, batch_norm)
            sequence._modules[next_name] = nn.Identity()
