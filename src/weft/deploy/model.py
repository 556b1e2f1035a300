"""Interface of a model: images in, logits out, in every runtime. No torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from weft.checkpoints.confidence import Confidence
from weft.checkpoints.unknown import UnknownDetector
from weft.models.family import Family


class Outputs(NamedTuple):
    """Outputs of one forward pass.

    Attributes:
        logits: (b classes), float32.
        features: inputs of the classifiers side by side (b features), float32; None if they were not requested, of a
            network without linear classifiers, and of an export that was opened without them.
        attention: weights (b heads n m) of every attention layer in order, float32; empty if they were not requested.
    """

    logits: Float[np.ndarray, "b classes"]
    features: Float[np.ndarray, "b features"] | None = None
    attention: Sequence[Float[np.ndarray, "b heads n m"]] = ()


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Description of a model.

    Attributes:
        runtime: `torch`, `onnx` or `openvino`.
        precision: number format in which it computes.
        architecture: name of the class of the network; of an export of another library the name of the model.
        num_classes: number of outputs.
        label_names: names of the outputs; None if the model has none.
        pretrained_cfg: preprocessing, under timm's keys.
        family: of the network; None if it is not one of weft's networks.
        confidence: calibration on held-out images; None if it was not measured.
        detector: of unknown images, by the features of the folded network; None without one.
        is_folded: whether it computes the features of the detector.
        config: config.json of an export; None of a network in torch.
        path: directory that it was loaded from; None of a public model and of a network of the caller.
    """

    runtime: str
    precision: str
    architecture: str = ""
    num_classes: int = 0
    label_names: list[str] | None = None
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)
    family: Family | None = None
    confidence: Confidence | None = None
    detector: UnknownDetector | None = None
    is_folded: bool = True
    config: dict[str, Any] | None = None
    path: Path | None = None

    @property
    def classes(self) -> list[str]:
        """Names of the outputs; their numbers if the model has no names."""
        return self.label_names or [str(number) for number in range(self.num_classes)]


class Model(Protocol):
    """A classifier that is ready to run: `OnnxModel` and `OpenVinoModel` (`weft.deploy.runtimes`), `TorchModel`
    (`weft.inference.torch_model`).

    Attributes:
        info: its description.
    """

    info: ModelInfo

    def run(self, images: Float[np.ndarray, "b c h w"], *, features: bool = False, attention: bool = False) -> Outputs:
        """Run one forward pass.

        Args:
            images: normalised, float32.
            features: also return the inputs of the classifiers, if the model has linear ones.
            attention: also return the attention weights.

        Raises:
            UsageError: the images do not have the size of the export.
        """
        ...

    def compile_for(self, batch_sizes: Sequence[int]) -> None:
        """Prepare for batches of these sizes; without sizes, all sizes run alike. Only OpenVINO makes a difference."""
        ...
