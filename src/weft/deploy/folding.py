"""A copy of a network for evaluation, with everything merged that evaluation does not need apart.

What goes, in every variant and with every switch: BatchNorm into the convolution or linear layer next to it, LeViT's
two heads into one, its tables of biases expanded, CeiT's class token into its position embedding, the scale of the
scores into the weights of the queries, the factors of QuickGELU into the MLP around it, dropout and drop path; and,
where the class token answers, what the last block of CeiT and CvT would compute for the other tokens (6 % of all). What
a module turns into is said by its own method `folded`; here is only the walk. Products are formed in float64, so
outputs differ by the rounding of the weights alone.
"""

from __future__ import annotations

import copy
from typing import Protocol, runtime_checkable

from timm.layers import DropPath
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.errors import UsageError
from weft.models.base import Backbone


@runtime_checkable
class Foldable(Protocol):
    """A module that can do with less in evaluation."""

    def folded(self) -> nn.Module:
        """What stands in its place, with the same outputs; itself, changed, or another."""
        ...


def fold(model: nn.Module) -> nn.Module:
    """A folded copy, in evaluation for good: `train()` changes nothing about it.

    Args:
        model: one that `weft.create_model` built; it stays as it is. (Of another library, one without BatchNorm.)

    Returns:
        A network with the same outputs, on the same device and in the same dtype. Its parameters ask for no gradient;
        it is for answering and exporting, not for training or saving as a model directory: save the original.

    Raises:
        UsageError: it holds a BatchNorm that nothing here knows how to merge, or has been folded before.
    """
    if getattr(model, "is_folded", False):
        raise UsageError("A network can be folded once; this one has been. Use it as it is.")
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    twin = _folded(twin).eval()
    left = [name for name, module in twin.named_modules() if isinstance(module, _BatchNorm)]
    if left:
        raise UsageError(
            f"fold knows where BatchNorm goes in the networks of weft; {type(model).__name__} keeps {len(left)}, the "
            f"first {left[0]}. Use timm.models.reparameterize_model or the tools of the library it is from."
        )
    if isinstance(twin, Backbone):
        twin.is_folded = True
    return twin


def _folded(module: nn.Module) -> nn.Module:
    """Its parts first: what a part turns into may be what the whole needs."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    elif isinstance(module, DropPath):
        module.drop_prob = 0.0
    for name, part in list(module.named_children()):
        module._modules[name] = _folded(part)
    return module.folded() if isinstance(module, Foldable) else module
