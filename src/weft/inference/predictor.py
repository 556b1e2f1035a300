"""Predictor: the one way from images to predictions, for `predict`, `evaluate`, `explain`, `serve` and Python.

Temperature, test-time augmentation, detector of unknown images and attention maps are here, for all models alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from weft.checkpoints.confidence import Rejection
from weft.data.decode import open_image
from weft.data.formats import MAX_PIXELS
from weft.data.preprocessing import Pixels, eval_transform
from weft.deploy.choosing import run_blank
from weft.deploy.model import Model, Outputs
from weft.errors import CheckpointError, UsageError, is_installed
from weft.grid import Grid
from weft.inference.arguments import recipe_of
from weft.inference.opening import open_fastest, open_model
from weft.inference.probabilities import ranked, softmax
from weft.models.contract import preprocessing
from weft.progress import obeys_quiet

if TYPE_CHECKING:
    from torch import Tensor

    from weft.interpret import Explanation

NO_DETECTOR = (
    "Unknown images are detected by a model that stored features of its training images; this one has none, or no"
    " linear classifier. Train it again."
)
NO_GRADIENTS = (
    "Grad-CAM needs gradients, which an export does not have. Leave it out (--no-grad-cam, grad_cam=False), or explain"
    " the run or the model directory that it was made from."
)


class NonFiniteError(CheckpointError):
    """The outputs of a model are not finite: its weights are damaged."""

    def __init__(self) -> None:
        super().__init__("The outputs of the model must be finite; they are not. Its weights are damaged: train again.")


@dataclass(frozen=True)
class Overlay:
    """Attention map of one image.

    Attributes:
        grid: (height, width) values from 0 to 1.
        region: (left, top, width, height) of the part of the image that the model received, as fractions of its sides.
    """

    grid: np.ndarray
    region: tuple[float, float, float, float]


@dataclass(frozen=True)
class ImagePrediction:
    """Prediction for one image.

    Attributes:
        probabilities: (classes).
        overlay: the attention map, if requested.
        unknown: whether the image resembles no training image; None if the model cannot tell.
    """

    probabilities: np.ndarray
    overlay: Overlay | None = None
    unknown: bool | None = None

    def top(self, classes: Sequence[str], k: int) -> list[tuple[str, float]]:
        """Return the `k` most probable classes with their probabilities; ties in the order of the classes."""
        return [(classes[int(i)], float(self.probabilities[int(i)])) for i in ranked(self.probabilities)[:k]]


class Predictor:
    """A model and its preprocessing.

    Any number of threads may prepare images; one thread at a time may run the model.

    For equal batches, threads, precision, `fold` and `overlay`, all verbs compute the same bits. Across batch sizes,
    and between a folded and an unfolded network, logits differ by rounding, by at most 1e-5 of the largest logit in
    float32 (tests/inference/test_predictor.py).

    Args:
        model: from `open_model`, or a `TorchModel` of a network.
        mirror: average the logits of each image and of its mirror image (test-time augmentation).
        max_pixels: maximum pixels (height x width) of an image file.

    Attributes:
        classes: names of the outputs; their numbers if the model has no names.
        confidence: calibration of the model on held-out images; None if it has none.
        temperature: divisor of the logits in probabilities.
        cfg: preprocessing, under timm's keys.
        detector: of unknown images, by the features of the folded network; None if there is none that can be used.
        preprocessing: from PIL image to pixels, and from pixels to arrays.
        metadata: description of the model for clients of a service.
    """

    def __init__(self, model: Model, *, mirror: bool = False, max_pixels: int = MAX_PIXELS) -> None:
        self.model, self.mirror, self.max_pixels, info = model, mirror, max_pixels, model.info
        self.classes, self.confidence = info.classes, info.confidence
        self.temperature = 1.0 if info.confidence is None else info.confidence.temperature
        self.detector = info.detector if info.is_folded and not mirror else None
        self.cfg: dict[str, Any] = preprocessing(info)
        self.preprocessing = eval_transform(self.cfg)
        has_attention = info.family is not None and info.family.has_attention
        self.metadata = {
            "classes": self.classes,
            "architecture": info.architecture,
            "input": dict(zip(("channels", "height", "width"), self.cfg["input_size"], strict=True)),
            "runtime": info.runtime,
            "precision": info.precision,
            "overlay": has_attention and not mirror and is_installed("torch"),
        }

    @property
    def path(self) -> Path | None:
        """Directory that the model was loaded from; None of a public model."""
        return self.model.info.path

    @classmethod
    @obeys_quiet
    def load(
        cls,
        run: str | Path,
        *,
        img_size: int | tuple[int, int] | None = None,
        device: str = "auto",
        precision: str = "fp32",
        fold: bool = True,
        mirror: bool = False,
        max_pixels: int | None = None,
        quiet: bool = False,
    ) -> Predictor:
        """Load the best model of a run, a model directory, an export or a public model.

        Args:
            run, img_size, device, precision: as in `open_model`.
            fold: merge BatchNorm into the weights of weft's networks. `predict` and `serve` fold; `evaluate` and
                `explain` do not.
            mirror: as in the constructor.
            max_pixels: as in the constructor; None for that of the training run, which is 100 million by default.
            quiet: print no notes.

        Raises:
            UsageError: an unsupported device, precision or image size.
            CheckpointError: the model is missing or cannot be read.
        """
        max_pixels = max_pixels or _pixel_limit(run)
        model = open_model(run, img_size=img_size, device=device, precision=precision, fold=fold)
        return cls(model, mirror=mirror, max_pixels=max_pixels)

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        runtime: str = "auto",
        img_size: int | tuple[int, int] | None = None,
        device: str = "auto",
        precision: str = "fp32",
        batch_size: int = 1,
    ) -> Predictor:
        """Load the fastest of a run's exports and its best model, as `weft.inference.opening.open_fastest`."""
        how: dict[str, Any] = {"runtime": runtime, "img_size": img_size, "device": device, "precision": precision}
        model = open_fastest(run, **how, batch_size=batch_size)
        return cls(model, max_pixels=_pixel_limit(run))

    def reject_at(self, error: float) -> Rejection:
        """Return the threshold below which predictions are rejected.

        Args:
            error: share of errors among the accepted held-out images, from 0 to below 1.

        Raises:
            UsageError: the model was not calibrated, or its held-out images show no such threshold.
        """
        if self.confidence is None:
            raise UsageError(
                "--reject-at-error needs a model that was calibrated on held-out images; this one was not. Train it"
                " again; exports made after that keep the calibration."
            )
        if not 0 <= error < 1:
            raise UsageError(f"reject_at_error must be a share of errors from 0 to below 1; got {error:g}.")
        return self.confidence.rejection(error)

    def warmed_up(self, batch_size: int) -> Predictor:
        """Prepare for the most frequent batch sizes up to `batch_size`, run each once, and return the predictor.

        Raises:
            UsageError: the model fails, mostly because memory does not suffice for a batch.
        """
        sizes = sorted({1, batch_size, max(batch_size // 2, 1), max(batch_size // 4, 1)}, reverse=True)
        self.model.compile_for(sizes)
        if batch_size > 4:
            sizes.append(3)  # another one, for which OpenVINO compiles its graph for any batch size
        for count in sizes:
            run_blank(self.model, count)
        blank = self.preprocessing.pixels(Image.new("RGB", (1, 1)))
        self.predict([blank], overlay=self.metadata["overlay"])
        return self

    def prepare(self, image: bytes | Path) -> Pixels:
        """Decode, resize and crop one image.

        Raises:
            BadImage: the file is not an image, or exceeds a limit.
        """
        return self.preprocessing.pixels(
            open_image(image, max_pixels=self.max_pixels, value_range=self.preprocessing.value_range)
        )

    def array(self, images: Sequence[Pixels]) -> Float[np.ndarray, "b c h w"]:
        """Stack and normalise prepared images; equal to `eval_transform` bit by bit."""
        return self.preprocessing.normalize(np.stack([image.values for image in images]))

    def tensor(self, images: Sequence[Pixels]) -> Float[Tensor, "b c h w"]:
        """Return `array` as a tensor of torch."""
        import torch

        return torch.from_numpy(self.array(images))

    def predict(self, images: Sequence[Pixels], *, overlay: bool = False) -> list[ImagePrediction]:
        """Predict one batch of prepared images in one forward pass; with `mirror` in two.

        Args:
            images: results of `prepare`.
            overlay: also return attention maps, where the network has them.

        Raises:
            NonFiniteError: the outputs are not finite.
        """
        if not images:
            return []
        attention = overlay and bool(self.metadata["overlay"])
        outputs = self.run(self.array(images), features=self.detector is not None, attention=attention)
        probabilities = self.probabilities(outputs.logits)
        saliency = self._saliency(outputs) if attention else None
        unknown: list[bool | None] = [None] * len(images)
        if self.detector is not None and outputs.features is not None:
            unknown = self.detector.is_unknown(outputs.features, probabilities).tolist()
        return [
            ImagePrediction(row, None if saliency is None else self._overlay(saliency[i], images[i].size), unknown[i])
            for i, row in enumerate(probabilities)
        ]

    def run(self, images: Float[np.ndarray, "b c h w"], *, features: bool = False, attention: bool = False) -> Outputs:
        """Run the model on one batch as `Model.run`; with `mirror`, the logits are the mean of two passes."""
        outputs = self.model.run(images, features=features, attention=attention)
        if not self.mirror:
            return outputs
        mirrored = self.model.run(images[..., ::-1])
        return outputs._replace(logits=(outputs.logits + mirrored.logits) / np.float32(2))

    def probabilities(self, logits: Float[np.ndarray, "b classes"]) -> Float[np.ndarray, "b classes"]:
        """Return calibrated probabilities.

        Raises:
            NonFiniteError: the logits are not finite.
        """
        if not np.isfinite(logits).all():
            raise NonFiniteError
        return softmax(logits, self.temperature)

    def scores(self, images: Float[np.ndarray, "b c h w"]) -> Float[np.ndarray, " b"]:
        """Return the scores of one batch of images by the detector of unknown images.

        Raises:
            UsageError: the model has no detector.
            NonFiniteError: the outputs are not finite.
        """
        if self.detector is None:
            raise UsageError(NO_DETECTOR)
        outputs = self.run(images, features=True)
        assert outputs.features is not None
        return self.detector.scores(outputs.features, self.probabilities(outputs.logits))

    def explain(
        self, image: Float[Tensor, "c h w"], label: int | None = None, *, grad_cam: bool = False
    ) -> Explanation:
        """Explain the prediction of one image, as `weft.explain`; of an export without Grad-CAM.

        Raises:
            UsageError: Grad-CAM of an export, which has no gradients.
        """
        from weft.interpret.explaining import explain, explained

        self.check_gradients(grad_cam)
        if self.model.info.config is None:
            return explain(self._network, image, label=label, grad_cam=grad_cam)
        outputs = self.model.run(image[None].numpy(), attention=bool(self.metadata["overlay"]))
        return explained(self._network, self.model.info, image, *_tensors(outputs), label=label)

    def check_gradients(self, grad_cam: bool) -> None:
        """Raise a UsageError if Grad-CAM of an export is requested."""
        if grad_cam and self.model.info.config is not None:
            raise UsageError(NO_GRADIENTS)

    @functools.cached_property
    def _network(self) -> Any:
        """The network that describes the attention; of an export without weights, or None if it is not weft's."""
        model: Any = self.model
        if model.info.config is None:
            return model.network
        if model.info.family is None:
            return None
        import torch

        from weft.checkpoints.model_dir import build_from

        with torch.device("meta"):
            return build_from(model.info.config).eval()

    def _saliency(self, outputs: Outputs) -> Float[np.ndarray, "b h w"]:
        """Return the attention map to show of each image."""
        from weft.interpret.maps import attention_maps

        _, weights = _tensors(outputs)
        return attention_maps(self._network, weights, Grid(*self.preprocessing.size)).saliency.numpy()

    def _overlay(self, saliency: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Overlay:
        low, high = float(saliency.min()), float(saliency.max())
        return Overlay((saliency - low) / max(high - low, 1e-12), self.preprocessing.region(*size))


def _pixel_limit(run: str | Path) -> int:
    """Return the largest number of pixels of an image in the training run of a model."""
    recipe = recipe_of(Path(run))
    return (recipe and recipe.data.max_pixels) or MAX_PIXELS


def _tensors(outputs: Outputs) -> tuple[Tensor, list[Tensor]]:
    """Return logits and attention weights as tensors."""
    import torch

    return torch.from_numpy(outputs.logits), [torch.from_numpy(weights) for weights in outputs.attention]
