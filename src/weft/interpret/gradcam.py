"""Grad-CAM (arXiv 1610.02391), also for networks whose layers return tokens or channels-last maps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.tokens import to_map
from weft.models.base import CamTarget
from weft.models.contract import mean_logits
from weft.models.families import family_of

AsMap = Callable[[Tensor], Tensor]  # lays an output of a layer, or its gradient, out as a map (b c h w)


def grad_cam(model: nn.Module, images: Float[Tensor, "b c height width"], label: int) -> Float[Tensor, "b h w"]:
    """Return the Grad-CAM map of a class: how much each place of the last map supports it, at least 0.

    The last map is that of the last feature level whose places reach the prediction. If a class token predicts, the
    other tokens of the last block do not, and the map is that of the block before. Threads can share a network.

    Args:
        model: in evaluation mode: of weft, folded or not, or of timm.
        images: normalized images.
        label: index of the class.

    Raises:
        UsageError: no feature level of the network is known to be a map of the image.
    """
    target = _cam_target(model)
    modules = _feature_modules(model) if target is None else [target.module]
    calls: dict[nn.Module, tuple[tuple[Any, ...], Tensor]] = {}  # arguments and output of the last call

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        output = _last_tensor(output)
        if output is not None and output.requires_grad:
            calls[module] = args, output

    with torch.inference_mode(False), torch.enable_grad():
        _clone_inference_tensors(model)
        with _hooked(modules, keep):
            # a gradient of the images keeps one for frozen layers
            logits = mean_logits(model(images.detach().clone().requires_grad_()))
        outputs = [output for _, output in calls.values()]
        gradients = torch.autograd.grad(logits[:, label].sum(), outputs, allow_unused=True) if outputs else ()
    cams = []
    for (module, (args, output)), gradient in reversed(list(zip(calls.items(), gradients, strict=True))):
        if gradient is None:
            continue
        as_map = (
            _own_layout(model, images[:1], modules.index(module), module, output[:1])
            if target is None
            else _layout(output, target.prefix, target.grid_of(args))
        )
        if as_map is not None:
            fmap, slope = as_map(output.detach()), as_map(gradient)
            cams.append((slope.mean(dim=(2, 3), keepdim=True) * fmap).sum(dim=1).relu())
            if slope.any():
                return cams[-1]
    if not cams:
        raise _no_map(model, images, [tuple(output.shape) for output in outputs])
    return cams[0]  # without any gradient, as of a classifier of zeros, the map of the last level is zero


def _cam_target(model: nn.Module) -> CamTarget | None:
    """Return the last map that a family of weft names; None for other networks."""
    family = family_of(model)
    cam_target = None if family is None else family.code("attention", "cam_target")
    return None if cam_target is None else cam_target(model)


def _feature_modules(model: Any) -> list[nn.Module]:
    """Return the modules whose outputs are the feature levels of a network, by timm's `feature_info`."""
    names = {name.replace("/", "."): module for name, module in model.named_modules()}
    info = getattr(model, "feature_info", None) or ()
    modules = [names[level["module"]] for level in info if level.get("module") in names]
    if len(modules) < len(info) or not modules:
        raise UsageError(
            f"Grad-CAM needs to know where {type(model).__name__} has a map; it has no feature_info that names modules."
            " Leave it out (--no-grad-cam, grad_cam=False)."
        )
    # a list of modules is not called itself: its last module is
    return [module[-1] if isinstance(module, nn.ModuleList) and len(module) else module for module in modules]


@contextlib.contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[[nn.Module, tuple[Any, ...], Any], Any]) -> Iterator[None]:
    """Call a hook after each call of the modules in this thread; what it returns replaces the output."""
    thread = get_ident()

    def own(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return hook(module, args, output) if get_ident() == thread else None

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(own))
        yield


def _layout(output: Tensor, prefix: int, grid: tuple[int, int]) -> AsMap:
    return (lambda x: x) if output.ndim == 4 else (lambda x: to_map(x[:, prefix:], grid))


def _own_layout(model: Any, images: Tensor, level: int, module: nn.Module, output: Tensor) -> AsMap | None:
    """Return how the network itself lays an output of a feature level out as a map; None if it does not tell.

    The output is replaced by the numbers of its elements, and the network asked for its map, in which they have moved.
    Tokens can be in another order than row by row (Hiera), which only the network knows.
    """
    if not hasattr(model, "forward_intermediates"):
        return (lambda x: x) if output.ndim == 4 else None
    numbers = torch.arange(output.numel(), dtype=torch.float, device=output.device).view(output.shape)
    with torch.no_grad(), _hooked([module], lambda *call: _with_last_tensor(call[-1], numbers)):
        (fmap,) = model.forward_intermediates(images, indices=[level], intermediates_only=True)
    index = fmap.long()
    is_moved = fmap.ndim == 4 and (index == fmap).all() and len(index.unique()) == index.numel()
    return (lambda x: x.flatten(1)[:, index.flatten()].unflatten(1, index.shape[1:])) if is_moved else None


def _last_tensor(output: Any) -> Tensor | None:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return tensors[-1] if tensors else None


def _with_last_tensor(output: Any, new: Tensor) -> Any:
    """Return an output of a layer with another last tensor."""
    last = _last_tensor(output)
    return tree_map(lambda leaf: new if leaf is last else leaf, output)


def _clone_inference_tensors(model: nn.Module) -> None:
    """Replace tensors that a network keeps from a pass in inference mode (ConViT): no gradient goes through them."""
    for module in model.modules():
        for tensors in (vars(module), module._buffers):
            for name, value in tensors.items():
                if isinstance(value, Tensor) and value.is_inference():
                    tensors[name] = value.clone()


def _no_map(model: nn.Module, images: Tensor, shapes: list[tuple[int, ...]]) -> UsageError:
    shown = f"the last of its feature levels has the shape {shapes[-1]}" if shapes else "none of its levels is a tensor"
    return UsageError(
        f"Grad-CAM needs a map of the image in {type(model).__name__}; for {Grid(*images.shape[-2:])} images {shown},"
        " whose rows and columns are not known. Leave it out (--no-grad-cam, grad_cam=False)."
    )
