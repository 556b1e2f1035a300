"""Grad-CAM (arXiv 1610.02391), also for networks whose layers return tokens or channels-last maps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any, NamedTuple

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


class _Output(NamedTuple):
    """A tensor that a call of a module returned: the module, its arguments, the place among its tensors."""

    module: nn.Module
    args: tuple[Any, ...]
    place: int
    tensor: Tensor


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
    levels = _feature_levels(model) if target is None else {target.module: 0}
    calls: dict[nn.Module, list[_Output]] = {}  # those of the last call

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found = [_Output(module, args, place, tensor) for place, tensor in enumerate(_tensors(output))]
        calls[module] = [each for each in found if each.tensor.requires_grad]

    with torch.inference_mode(False), torch.enable_grad():
        _clone_inference_tensors(model)
        with _hooked(levels, keep):
            # a gradient of the images keeps one for frozen layers
            logits = mean_logits(model(images.detach().clone().requires_grad_()))
        outputs = [output for call in calls.values() for output in call]
        tensors = [output.tensor for output in outputs]
        gradients = torch.autograd.grad(logits[:, label].sum(), tensors, allow_unused=True) if outputs else ()
    cams = []
    for output, gradient in reversed(list(zip(outputs, gradients, strict=True))):
        if gradient is None:
            continue
        as_map = (
            _own_layout(model, images[:1], levels[output.module], output)
            if target is None
            else _layout(output.tensor, target.prefix, target.grid_of(output.args))
        )
        if as_map is not None:
            fmap, slope = as_map(output.tensor.detach()), as_map(gradient)
            cams.append((slope.mean(dim=(2, 3), keepdim=True) * fmap).sum(dim=1).relu())
            if slope.any():
                return cams[-1]
    if not cams:
        raise _no_map(model, images, [tuple(tensor.shape) for tensor in tensors])
    return cams[0]  # without any gradient, as of a classifier of zeros, the map of the last level is zero


def _cam_target(model: nn.Module) -> CamTarget | None:
    """Return the last map that a family of weft names; None for other networks."""
    family = family_of(model)
    cam_target = None if family is None else family.code("attention", "cam_target")
    return None if cam_target is None else cam_target(model)


def _feature_levels(model: Any) -> dict[nn.Module, int]:
    """Return the modules whose outputs are feature levels of a network, with the number of the level, by timm's
    `feature_info`; levels inside a module have none (`stem` of HRNet)."""
    names = {name.replace("/", "."): module for name, module in model.named_modules()}
    info = getattr(model, "feature_info", None) or ()
    modules = {names[level["module"]]: number for number, level in enumerate(info) if level.get("module") in names}
    if not modules:
        raise UsageError(
            f"Grad-CAM needs to know where {type(model).__name__} has a map; it has no feature_info that names modules."
            " Leave it out (--no-grad-cam, grad_cam=False)."
        )
    # a list of modules is not called itself: its last module is
    return {
        module[-1] if isinstance(module, nn.ModuleList) and len(module) else module: number
        for module, number in modules.items()
    }


@contextlib.contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[[nn.Module, tuple[Any, ...], Any], Any]) -> Iterator[None]:
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


def _own_layout(model: Any, images: Tensor, level: int, output: _Output) -> AsMap | None:
    """Return how the network itself lays an output of a feature level out as a map; None if it does not tell.

    The output is replaced by the numbers of its elements, and the network asked for its map, in which they have moved.
    Tokens can be in another order than row by row (Hiera), which only the network knows. A map (b c h w) that the
    network changes before it returns it (HRNet) is one by its aspect.
    """
    shape, module = output.tensor[:1].shape, output.module
    if output.tensor.dtype != torch.float:  # bfloat16 cannot count the elements
        name = next(name for name, each in model.named_modules() if each is module)
        model, images = copy.deepcopy(model).float(), images.float()
        module = model.get_submodule(name)
    if hasattr(model, "forward_intermediates"):
        numbers = torch.arange(shape.numel(), dtype=torch.float, device=output.tensor.device).view(shape)
        with torch.no_grad(), _hooked([module], lambda *call: _with_tensor(call[-1], output.place, numbers)):
            (fmap,) = model.forward_intermediates(images, indices=[level], intermediates_only=True)
        index = fmap.long()
        if fmap.ndim == 4 and (index == fmap).all() and len(index.unique()) == index.numel():
            # CrossViT makes images square
            layout: AsMap = lambda x: x.flatten(1)[:, index.flatten()].unflatten(1, index.shape[1:])  # noqa: E731
            return layout if _has_aspect(fmap.shape[2:], images.shape[2:]) else None
    is_map = len(shape) == 4 and getattr(model, "output_fmt", "NCHW") == "NCHW"
    return (lambda x: x) if is_map and _has_aspect(shape[2:], images.shape[2:]) else None


def _has_aspect(grid: Sequence[int], size: Sequence[int]) -> bool:
    """Return whether one stride leads from an image to a grid on both axes, up to one place for padding."""
    least, most = ([(side + more) / pixels for side, pixels in zip(grid, size, strict=True)] for more in (-1, 1))
    return max(least) < min(most) and all(side <= pixels for side, pixels in zip(grid, size, strict=True))


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _with_tensor(output: Any, place: int, new: Tensor) -> Any:
    """Return an output of a layer with another tensor at a place among its tensors."""
    old = _tensors(output)[place]
    return tree_map(lambda leaf: new if leaf is old else leaf, output)


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
