"""A network in torch under the interface of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.checkpoints.confidence import confidence_of
from weft.checkpoints.unknown import detector_of
from weft.deploy.folding import fastest
from weft.deploy.model import Model, ModelInfo, Outputs
from weft.errors import UsageError
from weft.inference.features import classifier_inputs
from weft.layers.attention import record_attention
from weft.machine.runtime import Runtime
from weft.models.base import Backbone
from weft.models.contract import mean_logits
from weft.models.families import family_of


class TorchModel:
    """A network on a device.

    Args:
        network: any classifier under timm's contract.
        classes: one name per output; None for their numbers.
        runtime: device and precision; None for the CPU in float32.
        fold: merge BatchNorm into the weights.
        path: directory that the network was loaded from.

    Attributes:
        info: description of the model.
        network: as it was given; attention maps and Grad-CAM are of it.
        running: the network that runs, on its device and in evaluation mode: folded, or `network` itself.
        runtime: device and precision.
    """

    def __init__(
        self,
        network: Any,
        classes: list[str] | None = None,
        *,
        runtime: Runtime | None = None,
        fold: bool = True,
        path: Path | None = None,
    ) -> None:
        self.network, self.runtime = network, Runtime.of("cpu") if runtime is None else runtime
        is_own = isinstance(network, Backbone)
        running = fastest(network, self.runtime.device) if fold else network
        self.running: Any = running.to(self.runtime.device).eval()
        self.info = ModelInfo(
            runtime="torch",
            precision=self.runtime.precision,
            architecture=type(network).__name__,
            num_classes=network.num_classes,
            label_names=classes,
            pretrained_cfg=getattr(network, "pretrained_cfg", {}),
            family=family_of(network),
            confidence=confidence_of(network),
            detector=detector_of(network),
            is_folded=fold or not is_own,
            path=path,
        )

    def run(self, images: Float[np.ndarray, "b c h w"], *, features: bool = False, attention: bool = False) -> Outputs:
        """Run one forward pass, as `weft.deploy.model.Model.run`."""
        batch, nothing = torch.from_numpy(np.ascontiguousarray(images)), contextlib.nullcontext([])
        with (
            classifier_inputs(self.running) if features else nothing as inputs,
            record_attention() if attention else nothing as weights,
        ):
            logits = infer(self.running, batch, self.runtime)
        return Outputs(
            logits.numpy(),
            torch.cat(inputs, dim=1).numpy() if inputs else None,
            [weight.float().cpu().numpy() for weight in weights],
        )

    def compile_for(self, batch_sizes: Sequence[int]) -> None:
        """Do nothing: torch runs all batch sizes alike."""


def torch_model(model: Model) -> TorchModel:
    """Return the model of a verb that needs its features.

    Raises:
        UsageError: it is an export.
    """
    if isinstance(model, TorchModel):
        return model
    raise UsageError(
        "Features are computed by a network; an export gives class scores only. Pass the run directory or the model"
        " directory that it was made from."
    )


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
