"""Grad-CAM (arXiv 1610.02391), also for networks whose layers return tokens or channels-last maps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.errors import UsageError
from weft.grid import Grid
from weft.layers.tokens import to_map
from weft.models.base import CamTarget
from weft.models.contract import mean_logits
from weft.models.families import family_of


class _Level(NamedTuple):
    """An output of a layer, and the function that lays it, or its gradient, out as a map (b c h w)."""

    output: Tensor
    as_map: Callable[[Tensor], Tensor]


def grad_cam(model: nn.Module, images: Float[Tensor, "b c height width"], label: int) -> Float[Tensor, "b h w"]:
    """Return the Grad-CAM map of a class: how much each place of the last map supports it, at least 0.

    The last map is that of the last feature level whose places reach the prediction. If a class token predicts, the
    other tokens of the last block do not, and the map is that of the block before.

    Args:
        model: in evaluation mode: of weft, folded or not, or of timm.
        images: normalized images.
        label: index of the class.

    Raises:
        UsageError: no feature level of the network is known to be a map of the image.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...], Any]] = []
    target = _cam_target(model)
    modules = [target.module] if target is not None else _feature_modules(model)
    handles = [module.register_forward_hook(lambda *call: calls.append(call)) for module in dict.fromkeys(modules)]
    with torch.inference_mode(False), torch.enable_grad():
        _clone_inference_tensors(model)
        try:
            # a gradient of the images keeps one for frozen layers
            logits = mean_logits(model(images.detach().clone().requires_grad_()))
        finally:
            for handle in handles:
                handle.remove()
        own_maps = functools.cache(lambda: _own_maps(model, images))
        size = Grid(*images.shape[-2:])
        levels = [level for call in calls for level in _levels(model, target, size, own_maps, *call)]
        if not levels:
            raise _no_map(model, images, [shape for *_, output in calls for shape in _shapes(output)])
        outputs = [level.output for level in levels]
        gradients = torch.autograd.grad(logits[:, label].sum(), outputs, allow_unused=True)
    maps = [
        (level.as_map(level.output.detach()), level.as_map(gradient))
        for level, gradient in zip(levels, gradients, strict=True)
        if gradient is not None
    ]
    if not maps:
        raise _no_map(model, images, [tuple(output.shape) for output in outputs])
    # without any gradient, as of a classifier of zeros, the map of the last level is zero
    fmap, gradient = next(((fmap, gradient) for fmap, gradient in reversed(maps) if gradient.any()), maps[-1])
    return (gradient.mean(dim=(2, 3), keepdim=True) * fmap).sum(dim=1).relu()


def _clone_inference_tensors(model: nn.Module) -> None:
    """Replace tensors that a network keeps from a pass in inference mode (ConViT): no gradient goes through them."""
    for module in model.modules():
        for tensors in (vars(module), module._buffers):
            for name, value in tensors.items():
                if isinstance(value, Tensor) and value.is_inference():
                    tensors[name] = value.clone()


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
    if not modules:
        raise UsageError(
            f"Grad-CAM needs to know where {type(model).__name__} has a map; it has no feature_info that names modules."
            " Leave it out (--no-grad-cam, grad_cam=False)."
        )
    # a list of modules is not called itself: its last module is
    return [module[-1] if isinstance(module, nn.ModuleList) and len(module) else module for module in modules]


def _levels(
    model: Any,
    target: CamTarget | None,
    size: Grid,
    own_maps: Callable[[], list[Tensor]],
    module: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> Iterator[_Level]:
    """Yield the outputs of a call of a module that are maps of the images, which have the given size."""
    if target is not None:
        yield _Level(output, _fixed_layout(output, target.prefix, Grid(*target.grid_of(args))))
        return
    for tensor in _tensors(output):
        as_map = (
            _layout_of_map(model, tensor, size)
            if tensor.ndim == 4
            else _layout_of_tokens(model, tensor, size, own_maps)
        )
        if as_map is not None and tensor.requires_grad:
            yield _Level(tensor, as_map)


def _fixed_layout(output: Tensor, prefix: int, grid: Grid) -> Callable[[Tensor], Tensor]:
    return (lambda x: x) if output.ndim == 4 else (lambda x: to_map(x[:, prefix:], grid))


def _layout_of_map(model: Any, output: Tensor, size: Grid) -> Callable[[Tensor], Tensor] | None:
    """Return how a tensor with four axes is laid out as a map: channels first, or last; None: it has another shape."""
    first, last = Grid(*output.shape[2:]), Grid(*output.shape[1:3])
    layouts: list[Callable[[Tensor], Tensor]] = []
    if _is_aspect(first, size):
        layouts.append(lambda x: x)
    if _is_aspect(last, size):
        layouts.append(lambda x: x.permute(0, 3, 1, 2))
    is_last_preferred = getattr(model, "output_fmt", "NCHW") == "NHWC"
    return layouts[-1 if is_last_preferred else 0] if layouts else None


def _layout_of_tokens(
    model: Any, output: Tensor, size: Grid, own_maps: Callable[[], list[Tensor]]
) -> Callable[[Tensor], Tensor] | None:
    """Return how tokens (b n c) are laid out as a map; None if the network does not tell.

    The number of tokens and the aspect of the image give the grid. Tokens can be in another order than row by row
    (Hiera), which only the network knows: one of its own maps must be the same.
    """
    if output.ndim != 3:
        return None
    for prefix in sorted({0, 1, int(getattr(model, "num_prefix_tokens", 0) or 0)}):
        if (grid := _grid_of(output.shape[1] - prefix, size)) is not None:
            layout = _fixed_layout(output, prefix, grid)
            fmap = layout(output.detach())
            if any(fmap.shape == own.shape and torch.allclose(fmap, own, rtol=1e-3, atol=1e-4) for own in own_maps()):
                return layout
    return None


def _own_maps(model: Any, images: Tensor) -> list[Tensor]:
    """Return the feature levels as maps (b c h w), as the network itself lays them out; empty if it cannot."""
    if not hasattr(model, "forward_intermediates"):
        return []
    with torch.no_grad():
        return list(model.forward_intermediates(images, intermediates_only=True))


def _grid_of(tokens: int, size: Grid) -> Grid | None:
    """Return the grid of a number of tokens that has the aspect of an image; None if there is none."""
    if tokens < 1:
        return None
    height = round(sqrt(tokens * size.height / size.width))
    for rows in (height, height - 1, height + 1):
        if rows > 0 and tokens % rows == 0 and _is_aspect(grid := Grid(rows, tokens // rows), size):
            return grid
    return None


def _is_aspect(grid: Grid, size: Grid) -> bool:
    """Return whether a grid has the aspect of an image: one step fits both axes, up to one place for padding."""
    least, most = ([(side + more) / pixels for side, pixels in zip(grid, size, strict=True)] for more in (-1, 1))
    return max(least) < min(most) and min(grid) > 0 and grid.height <= size.height and grid.width <= size.width


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, (list, tuple)) else []


def _shapes(output: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in _tensors(output)]


def _no_map(model: nn.Module, images: Tensor, shapes: list[tuple[int, ...]]) -> UsageError:
    shown = f"the last of its feature levels has the shape {shapes[-1]}" if shapes else "none of its levels is a tensor"
    return UsageError(
        f"Grad-CAM needs a map of the image in {type(model).__name__}; for {Grid(*images.shape[-2:])} images {shown},"
        " whose rows and columns are not known. Leave it out (--no-grad-cam, grad_cam=False)."
    )
