"""Backends of the predictor: an export in its runtime, without torch, or a network in torch."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from weft.checkpoints.unknown import UnknownDetector, detector_of
from weft.deploy.opening import Export
from weft.errors import is_installed
from weft.inference.probabilities import ModelOutputs


class Backend(Protocol):
    """Interface between the predictor and a model.

    Attributes:
        model: the module of torch that runs; imports torch.
        network: the network that the attention maps are read from; None for an export of an unknown network.
        runtime: device and precision; imports torch.
        detector: of unknown images; None if the model has none that can be used.
        name, precision: of the inference runtime.
        architecture: name of the class of the network.
        has_attention: whether `run` can return attention maps.
    """

    @property
    def model(self) -> Any: ...
    @property
    def network(self) -> Any: ...
    @property
    def runtime(self) -> Any: ...
    @property
    def detector(self) -> UnknownDetector | None: ...
    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def has_attention(self) -> bool: ...

    def run(self, images: Float[np.ndarray, "b c h w"], *, attention: bool) -> ModelOutputs:
        """Run one forward pass."""
        ...


class ExportBackend:
    """An export. torch is imported for attention maps, and for the attributes that are of torch.

    Args:
        export: the export.
        mirror: average the logits of each image and of its mirror image.
    """

    def __init__(self, export: Export, mirror: bool) -> None:
        self.export, self.mirror = export, mirror
        self.name, self.precision = export.format, export.precision
        self.detector = None if mirror else detector_of(export)
        family = export.family
        self.architecture = "ExportedModel" if family is None else family.reference.rpartition(":")[2]
        self.has_attention = family is not None and family.has_attention and not mirror and is_installed("torch")

    def run(self, images: Float[np.ndarray, "b c h w"], *, attention: bool) -> ModelOutputs:
        """Run one forward pass; with a detector and attention, or with `mirror`, two."""
        if self.mirror:
            return ModelOutputs((self.export(images) + self.export(images[..., ::-1])) / np.float32(2))
        features = None
        if self.detector is not None:
            logits, features = self.export.run_with_features(images)
            if not attention:
                return ModelOutputs(logits, None, features)
        if not attention:
            return ModelOutputs(self.export(images))
        from weft.inference.torch_backend import saliency_of

        logits, weights = self.export.run_with_attention(images)
        return ModelOutputs(logits, saliency_of(self.network, weights, images.shape), features)

    @functools.cached_property
    def model(self) -> Any:
        """The export as a module of torch."""
        from weft.deploy.exported import ExportedModel
        from weft.inference.torch_backend import Mirrored

        model = ExportedModel(self.export).eval()
        return Mirrored(model).eval() if self.mirror else model

    @functools.cached_property
    def network(self) -> Any:
        """The network that was exported, without weights; None if it is not one of weft's."""
        from weft.deploy.exported import ExportedModel

        return ExportedModel(self.export).network

    @functools.cached_property
    def runtime(self) -> Any:
        """The CPU."""
        from weft.runtime import Runtime

        return Runtime.of("cpu")
