"""`explain`: what a network looked at when it named a picture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from weft.data import eval_transform, open_image
from weft.data.transforms import visible
from weft.deploy import ExportedModel
from weft.errors import UsageError
from weft.grid import Grid
from weft.interpret.gradcam import check_captum
from weft.interpret.gradcam import grad_cam as compute_grad_cam
from weft.interpret.maps import answer_watched, attention_maps, has_attention


@dataclass(frozen=True)
class Explanation:
    """An answer, and what it came from.

    Attributes:
        picture: as the network saw it, after resizing and cutting: (height width 3), uint8.
        label: the class that is explained.
        probabilities: of all classes.
        attention: by feature level (`blocks.11`, `stages.2`): how its last layer spread its attention, of the class
            token where there is one (CeiT, last stage of CvT), else the mean of all; each (h w), its sum 1. Empty for
            networks of other families.
        rollout: the same through all layers; None where `attention` is empty.
        focus: the map to show where there is room for one: what the class token looked at last; where none answers
            (LeViT), the rollout.
        depth: CeiT: how much the answer took from the class token of each layer (LCA), its sum 1; else None.
        grad_cam: where the last map speaks for the class: (h w), from 0 up; None where it was not asked for.
    """

    picture: np.ndarray
    label: int
    probabilities: np.ndarray
    attention: dict[str, np.ndarray] = field(default_factory=dict)
    rollout: np.ndarray | None = None
    focus: np.ndarray | None = None
    depth: np.ndarray | None = None
    grad_cam: np.ndarray | None = None


def explain(
    model: nn.Module,
    image: str | Path | Image.Image | Tensor,
    *,
    label: int | None = None,
    grad_cam: bool = True,
) -> Explanation:
    """Attention per level, rollout, layers of LCA and Grad-CAM of one picture.

    One forward pass, and with `grad_cam` one more, backwards too. Folded networks and every size do.

    Args:
        model: CeiT, CvT or LeViT; of others, timm's among them, there is Grad-CAM alone, and of exports all but that.
            It is left as it was.
        image: a file, a picture, or a tensor (channels height width) that is prepared already.
        label: the class to explain; None for the likeliest.
        grad_cam: compute it, by captum.

    Raises:
        UsageError: Grad-CAM of an export, which has no gradients, or a class that is not there.
        DataError: a picture that cannot be read.
    """
    check_explainable(model, grad_cam)
    cfg: dict[str, Any] = dict(getattr(model, "pretrained_cfg", {}))
    tensor = image if isinstance(image, Tensor) else _prepared(image, cfg)
    network = model.network if isinstance(model, ExportedModel) else model
    with _answering(model):
        images = tensor[None] if isinstance(model, ExportedModel) else tensor[None].to(next(model.parameters()).device)
        answer, weights = answer_watched(model, images)
        logits = answer[0].float()
        if label is None:
            label = int(logits.argmax())
        elif not 0 <= label < len(logits):
            raise UsageError(f"label must be a class from 0 to {len(logits) - 1}; got {label}.")
        maps = attention_maps(network, weights, Grid(*images.shape[-2:])) if has_attention(network) else None
        cam = compute_grad_cam(model, images, label)[0] if grad_cam else None
    return Explanation(
        (255 * visible(tensor.cpu(), cfg)).round().byte().permute(1, 2, 0).numpy(),
        label,
        _array(logits.softmax(dim=0)),
        {} if maps is None else {name: _array(found[0]) for name, found in maps.levels.items()},
        None if maps is None else _array(maps.rollout[0]),
        None if maps is None else _array(maps.focus[0]),
        None if maps is None or maps.depth is None else _array(maps.depth[0]),
        None if cam is None else _array(cam),
    )


def check_explainable(model: nn.Module, grad_cam: bool) -> None:
    """Raises a UsageError where Grad-CAM is asked of an export, or needs captum, which is not installed."""
    if grad_cam and isinstance(model, ExportedModel):
        raise UsageError(
            "Grad-CAM needs gradients, which an export has not. Leave it out (--no-grad-cam, grad_cam=False), or"
            " explain the run or the model directory that it was made of."
        )
    if grad_cam:
        check_captum()


def _prepared(image: str | Path | Image.Image, cfg: dict[str, Any]) -> Tensor:
    transform: Any = eval_transform(cfg)
    return transform(image if isinstance(image, Image.Image) else open_image(image))


@contextlib.contextmanager
def _answering(model: nn.Module) -> Iterator[None]:
    """In evaluation meanwhile."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
