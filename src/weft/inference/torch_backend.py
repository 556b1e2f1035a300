"""Backend of the predictor for networks in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.checkpoints.unknown import detector_of
from weft.deploy.folding import fold
from weft.grid import Grid
from weft.inference.features import classifier_inputs
from weft.inference.probabilities import ModelOutputs
from weft.interpret.maps import attention_maps, has_attention, run_with_attention
from weft.models.base import Backbone
from weft.models.contract import mean_logits
from weft.runtime import Runtime


class TorchBackend:
    """A network.

    Args:
        network: any classifier under timm's contract.
        runtime: device and precision; None for the CPU in float32.
        is_folded: merge BatchNorm into the weights of weft's networks.
        mirror: average the logits of each image and of its mirror image.
    """

    def __init__(self, network: Any, runtime: Runtime | None, is_folded: bool, mirror: bool) -> None:
        self.runtime = Runtime.of("cpu") if runtime is None else runtime
        self.name, self.precision = "torch", self.runtime.precision
        # attention maps are described by the network as it was trained, and computed by the one that runs
        self.network = network
        self.architecture = type(network).__name__
        self.has_attention = has_attention(network) and not mirror
        has_detector = (is_folded or not isinstance(network, Backbone)) and not mirror
        self.detector = detector_of(network) if has_detector else None
        running = fold(network, self.runtime.device) if is_folded and isinstance(network, Backbone) else network
        self.model: Any = (Mirrored(running) if mirror else running).to(self.runtime.device).eval()

    def run(self, images: Float[np.ndarray, "b c h w"], *, attention: bool) -> ModelOutputs:
        """Run one forward pass."""
        batch, saliency = torch.from_numpy(images), None
        with classifier_inputs(self.model) as inputs:
            if attention:
                logits, saliency = self._with_attention(batch)
            else:
                logits = infer(self.model, batch, self.runtime)
        return ModelOutputs(logits.numpy(), saliency, torch.cat(inputs, dim=1).numpy() if inputs else None)

    def _with_attention(self, batch: Tensor) -> tuple[Float[Tensor, "b classes"], np.ndarray]:
        with torch.inference_mode(), self.runtime.autocast():
            outputs, weights = run_with_attention(self.model, self.runtime.put(batch))
            maps = attention_maps(self.network, weights, Grid(*batch.shape[-2:]))
            return mean_logits(outputs).float().cpu(), maps.saliency.float().cpu().numpy()


class Mirrored(nn.Module):
    """A model that also receives the mirror image of each image, and returns the mean of the two logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return (b classes), also for a model with two heads."""
        return (mean_logits(self.model(images)) + mean_logits(self.model(images.flip(-1)))) / 2


def infer(model: nn.Module, images: Float[Tensor, "b c h w"], runtime: Runtime) -> Float[Tensor, "b classes"]:
    """Run a forward pass without gradients; return float32 logits on the CPU, of several heads their mean."""
    with torch.inference_mode(), runtime.autocast():
        return mean_logits(model(runtime.put(images))).float().cpu()


def infer_with_features(
    model: nn.Module, images: Float[Tensor, "b c h w"], runtime: Runtime
) -> tuple[Float[np.ndarray, "b classes"], Float[np.ndarray, "b features"]]:
    """Run a forward pass as `infer`; return the logits, and the inputs of all classifiers side by side.

    A network without linear classifiers has no features: (b 0).
    """
    with classifier_inputs(model) as inputs:
        logits = infer(model, images, runtime).numpy()
    return logits, torch.cat(inputs, dim=1).numpy() if inputs else np.empty((len(logits), 0), np.float32)


def saliency_of(network: nn.Module, weights: Sequence[np.ndarray], shape: Sequence[int]) -> Float[np.ndarray, "b h w"]:
    """Return the attention map to show of each image, from the attention weights of an export.

    Args:
        network: the network that was exported.
        weights: (b heads n m) of every layer, in order.
        shape: of the images (b c h w).
    """
    maps = attention_maps(network, [torch.from_numpy(weight) for weight in weights], Grid(*shape[-2:]))
    return maps.saliency.float().numpy()
