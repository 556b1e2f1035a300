"""`explain`: attention maps and Grad-CAM of one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from weft.checkpoints.confidence import confidence_of
from weft.data import eval_transform, open_image
from weft.data.preprocessing import visible
from weft.errors import UsageError
from weft.grid import Grid
from weft.interpret.gradcam import grad_cam as compute_grad_cam
from weft.interpret.maps import attention_maps, has_attention, run_with_attention
from weft.interpret.overlay import overlaid
from weft.models.contract import evaluation_mode, mean_logits
from weft.report import markup
from weft.report.notebook import described


@dataclass(frozen=True)
class Explanation:
    """A prediction and its explanation.

    Attributes:
        image: as the network saw it, after resizing and cropping (height width 3), uint8.
        label: index of the class that is explained.
        probabilities: of all classes; calibrated if the model is, as in `weft predict`.
        attention: feature level (`blocks.11`, `stages.2`) -> attention of its last layer (h w), which sums to 1: from
            the class token if there is one (CeiT, last stage of CvT), else the mean over all queries. Empty for
            networks of other families.
        rollout: attention rollout through all layers (h w); None if `attention` is empty.
        saliency: the map to show if there is room for one: the last attention of the class token; without a class token
            (LeViT) the rollout.
        depth: CeiT: share of each layer's class token in the prediction (LCA), which sums to 1; else None.
        grad_cam: Grad-CAM map of the class (h w), at least 0; None if not computed.
    """

    image: np.ndarray
    label: int
    probabilities: np.ndarray
    attention: dict[str, np.ndarray] = field(default_factory=dict)
    rollout: np.ndarray | None = None
    saliency: np.ndarray | None = None
    depth: np.ndarray | None = None
    grad_cam: np.ndarray | None = None

    def __repr__(self) -> str:
        """Return the class, its probability, and the names of the maps in one line."""
        height, width = self.image.shape[:2]
        maps = [
            *self.attention,
            *(name for name in ("rollout", "depth", "grad_cam") if getattr(self, name) is not None),
        ]
        probability = f"{self.probabilities[self.label]:.3f}"
        values = [("label", self.label), ("probability", probability), ("size", f"{height}x{width}"), ("maps", maps)]
        return described("Explanation", values)

    def _repr_html_(self) -> str:
        return markup.fragment(markup.gallery([self.card(f"class {self.label}")]))

    def card(self, label: str, name: str = "") -> markup.Card:
        """Return the image, and the image under its maps, for a gallery.

        Args:
            label: the class.
            name: file name of the image.
        """
        maps = {"attention": self.saliency, "attention rollout": self.rollout, "Grad-CAM": self.grad_cam}
        if self.saliency is not None and self.rollout is not None and np.array_equal(self.saliency, self.rollout):
            del maps["attention"]  # without a class token they are the same map
        images = {"image": self.image}
        images |= {caption: overlaid(self.image, fmap) for caption, fmap in maps.items() if fmap is not None}
        lines = [f"{label}, {100 * self.probabilities[self.label]:.1f} %", ", ".join(images)]
        return markup.Card(images, lines, name)


def explain(
    model: nn.Module,
    image: str | Path | Image.Image | Tensor,
    *,
    label: int | None = None,
    grad_cam: bool = True,
) -> Explanation:
    """Explain the prediction of one image: attention per level, rollout, shares of layers (LCA) and Grad-CAM.

    Runs one forward pass, and with `grad_cam` one more, forward and backward. Folded networks and all image sizes are
    supported.

    Args:
        model: CeiT, CvT or LeViT; other networks, also timm's, get Grad-CAM alone. It is unchanged.
        image: file, Pillow image, or normalized tensor (channels height width).
        label: index of the class to explain; None for the most probable one.
        grad_cam: compute the Grad-CAM map.

    Raises:
        UsageError: Grad-CAM of a network without a known map; a class that does not exist; a network that is no
            classifier.
        DataError: an image that cannot be read.
    """
    cfg: dict[str, Any] = dict(getattr(model, "pretrained_cfg", {}))
    tensor = image if isinstance(image, Tensor) else _prepared(image, cfg)
    with evaluation_mode(model):
        images = tensor[None].to(next(model.parameters()).device)
        outputs, weights = run_with_attention(model, images)
        explanation = explained(model, model, tensor, mean_logits(outputs), weights, label=label)
        cam = compute_grad_cam(model, images, explanation.label)[0] if grad_cam else None
    return explanation if cam is None else replace(explanation, grad_cam=_array(cam))


def explained(
    network: nn.Module | None,
    described: Any,
    image: Tensor,
    logits: Tensor,
    weights: Sequence[Tensor],
    *,
    label: int | None = None,
) -> Explanation:
    """Return the explanation that the outputs of one forward pass give: all except Grad-CAM.

    Args:
        network: describes the attention; of an export, the network that was exported. None for one of another library.
        described: the model, or its description: an object with `pretrained_cfg` and `confidence`.
        image: normalized (channels height width).
        logits: (1 classes).
        weights: attention weights (1 heads n m) of every layer, in order.
        label: index of the class to explain; None for the most probable one.

    Raises:
        UsageError: a class that does not exist; a network that is no classifier.
    """
    logits = logits[0].float()
    if logits.ndim != 1:
        raise UsageError(
            "explain needs a network that returns one value for each class;"
            f" {type(network).__name__} returns {'x'.join(map(str, logits.shape)) or 'one value'} for each image."
            " Build it with num_classes=N."
        )
    if label is None:
        label = int(logits.argmax())
    elif not 0 <= label < len(logits):
        raise UsageError(f"label must be a class from 0 to {len(logits) - 1}; got {label}.")
    maps = attention_maps(network, weights, Grid(*image.shape[-2:])) if has_attention(network) else None
    confidence = confidence_of(described)
    temperature = 1.0 if confidence is None else confidence.temperature
    cfg: dict[str, Any] = dict(getattr(described, "pretrained_cfg", {}))
    return Explanation(
        (255 * visible(image.cpu(), cfg)).round().byte().permute(1, 2, 0).numpy(),
        label,
        _array((logits / temperature).softmax(dim=0)),
        {} if maps is None else {name: _array(fmap[0]) for name, fmap in maps.levels.items()},
        None if maps is None else _array(maps.rollout[0]),
        None if maps is None else _array(maps.saliency[0]),
        None if maps is None or maps.depth is None else _array(maps.depth[0]),
    )


def _prepared(image: str | Path | Image.Image, cfg: dict[str, Any]) -> Tensor:
    transform: Any = eval_transform(cfg)
    return transform(image if isinstance(image, Image.Image) else open_image(image, value_range=transform.value_range))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
