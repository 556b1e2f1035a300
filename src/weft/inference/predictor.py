"""Predictor: the one way from images to predictions, for `predict`, `evaluate`, `explain`, `serve` and Python."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from weft.checkpoints.confidence import Rejection, confidence_of
from weft.checkpoints.config import CONFIG, read_config
from weft.checkpoints.resolve import find_model
from weft.data.decode import open_image
from weft.data.formats import MAX_PIXELS
from weft.data.preprocessing import Pixels, eval_transform
from weft.deploy import choosing
from weft.deploy.opening import Export, open_export
from weft.deploy.select import candidates
from weft.errors import CheckpointError, UsageError, WeftError, is_installed, need_torch
from weft.files import sha256_of
from weft.inference.arguments import recipe_of
from weft.inference.backends import Backend, ExportBackend
from weft.inference.probabilities import ranked, softmax
from weft.models.contract import preprocessing
from weft.processor import bf16_note, num_threads
from weft.progress import loading, obeys_quiet, say
from weft.text import printable, reason_of

if TYPE_CHECKING:
    from torch import Tensor

    from weft.runtime import Runtime

NO_DETECTOR = (
    "Unknown images are detected by a model that stored features of its training images; this one has none, or no"
    " linear classifier. Train it again with this version of weft."
)


class _WarmUpError(UsageError):
    """A model cannot run a batch, mostly for lack of memory at this time."""


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
    """A model, its preprocessing and its device.

    Any number of threads may prepare images; one thread at a time may call `predict` or `logits`.

    For equal batches, threads, precision, `fold` and `overlay`, all verbs compute the same bits. Across batch sizes,
    and between a folded and an unfolded network, logits differ by rounding, by at most 1e-5 of the largest logit in
    float32 (tests/inference/test_predictor.py).

    Args:
        model: any classifier under timm's contract, or an export.
        classes: one name per output; None for their numbers.
        runtime: device and precision; an export runs on the CPU in its own precision.
        fold: merge BatchNorm into the weights of weft's networks. `predict` and `serve` fold; `evaluate` and `explain`
            do not.
        mirror: average the logits of each image and of its mirror image (test-time augmentation).
        max_pixels: maximum pixels (height x width) of an image file.

    Attributes:
        backend: what runs the model: torch, or the runtime of an export, which needs no torch.
        label_names: the class names of the model, or None if it has none.
        classes: names of the outputs; their numbers if the model has no names.
        cfg: preprocessing, under timm's keys.
        confidence: calibration of the model on held-out images; None if it has none. Probabilities use its temperature.
        detector: of unknown images, by the features of the folded network; None if the model has none.
        crop: first step of the preprocessing, from PIL image to pixels.
        metadata: description of the model for clients of a service.
        path: directory that the model was loaded from, by `load`; None of a public model.
    """

    path: Path | None = None

    def __init__(
        self,
        model: Any,
        classes: list[str] | None = None,
        *,
        runtime: Runtime | None = None,
        fold: bool = True,
        mirror: bool = False,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        export = model if isinstance(model, Export) else getattr(model, "export", None)
        self.backend: Backend = (
            ExportBackend(export, mirror)
            if isinstance(export, Export)
            else _torch_backend(model, runtime, fold, mirror)
        )
        self.label_names, self.max_pixels = classes, max_pixels
        self.classes = classes or [str(number) for number in range(model.num_classes)]
        self.cfg: dict[str, Any] = preprocessing(model)
        self.confidence = confidence_of(model)
        self.temperature = 1.0 if self.confidence is None else self.confidence.temperature
        self.detector = self.backend.detector
        self.preprocessing = eval_transform(self.cfg)
        self._source_model = model
        self.metadata = {
            "classes": self.classes,
            "architecture": self.backend.architecture,
            "input": dict(zip(("channels", "height", "width"), self.cfg["input_size"], strict=True)),
            "runtime": self.backend.name,
            "precision": self.backend.precision,
            "overlay": self.backend.has_attention,
        }

    @property
    def model(self) -> Any:
        """Module of torch that runs: folded, mirrored or `source_model` itself."""
        return self.backend.model

    @property
    def source_model(self) -> Any:
        """The model as it was given; of an export, as a module of torch."""
        if isinstance(self._source_model, Export):
            from weft.deploy.exported import ExportedModel

            self._source_model = ExportedModel(self._source_model).eval()
        return self._source_model

    @property
    def network(self) -> Any:
        """Network that the attention maps are read from; None for an export of an unknown network."""
        return self.backend.network

    @property
    def runtime(self) -> Runtime:
        """Device and precision of torch."""
        return self.backend.runtime

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
        is_fixed: bool = False,
        max_pixels: int | None = None,
        quiet: bool = False,
    ) -> Predictor:
        """Load the best model of a run, a model directory, an export or a public model.

        Args:
            run: a run directory, a model directory, an export, `hf-hub:OWNER/NAME`, or the name of a public model.
            img_size: input size in pixels, or (height, width); None for that of the model.
            device: auto, cpu, cuda or mps; of an export auto or cpu.
            precision: auto, fp32 or bf16.
            fold, mirror: as in the constructor.
            is_fixed: of a directory of format auto, load the export in the directory itself.
            max_pixels: as in the constructor; None for that of the training run, which is 100 million by default.
            quiet: print no notes.

        Raises:
            UsageError: an unsupported device, precision or image size.
            CheckpointError: the model is missing or cannot be read.
        """
        max_pixels = max_pixels or _pixel_limit(run)
        model_source = find_model(run)  # once: the newest commit of a repository on the hub
        if (export := _export(model_source, is_fixed=is_fixed)) is not None:
            _check_export_device(device)
            if precision == "bf16" != (own := export.config["artefact"]["precision"]):
                raise UsageError(
                    f"precision must be that of the export, {own}; got bf16. Leave it out, or export with --precision"
                    " bf16."
                )
            if img_size is not None:
                export.set_input_size(img_size)
            predictor = cls(export, export.label_names, mirror=mirror, max_pixels=max_pixels)
            predictor.path = Path(model_source)
            return predictor
        need_torch(f"{run} is not an export, and its network runs in torch.{_exports_text(run)}")
        with loading():
            from weft.deploy.exported import open_found
            from weft.models.contract import resized
            from weft.runtime import Runtime
        runtime = Runtime.of(device, precision)
        if (emulated := bf16_note(runtime.device.type, runtime.precision)) is not None:
            say(emulated)
        model, classes = open_found(model_source)
        if img_size is not None:
            model = resized(model, img_size)
        predictor = cls(model, classes, runtime=runtime, fold=fold, mirror=mirror, max_pixels=max_pixels)
        predictor.path = model_source if isinstance(model_source, Path) else None
        return predictor

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        runtime: str = "auto",
        device: str = "auto",
        precision: str = "fp32",
        batch_size: int = 1,
        log: Callable[[str], None] = lambda text: None,
    ) -> Predictor:
        """Load the fastest of a run's exports and its best model, and warm it up.

        The first call on a machine times them, at batch sizes 1 and `batch_size`; the result is stored in the cache
        directory.

        Args:
            run: a run directory, a model directory, an export, `hf-hub:OWNER/NAME`, or the name of a public model.
            runtime: `auto`, `torch`, `openvino` or `onnx`; see `weft.deploy.select.candidates`.
            device, precision: for torch.
            batch_size: largest batch to warm up.
            log: called with a message for every export that is skipped.

        Raises:
            UsageError: there is no export for `runtime`, or `runtime` is not installed.
            CheckpointError: the model is missing or cannot be read.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1; got {batch_size}.")
        paths = candidates(run, runtime, log)
        if len(paths) == 1:
            is_fixed = runtime not in ("auto", "torch")
            return cls.load(paths[0], device=device, precision=precision, is_fixed=is_fixed).warmed_up(batch_size)
        folders = [Path(path) for path in paths]
        settings = (runtime, device, precision, batch_size, num_threads(), torch_version())
        hashes = {str(path): sha256_of(path / CONFIG) for path in folders}
        known = choosing.recall(folders, *settings)
        opened: dict[str, Predictor] = {}
        errors: list[WeftError] = []
        for path in sorted(folders, key=lambda path: hashes[str(path)] != known):
            try:
                is_export = "artefact" in read_config(path)
                own = ("auto", "auto") if is_export else (device, precision)  # device and precision are those of torch
                one = cls.load(path, device=own[0], precision=own[1], is_fixed=True)
                opened[str(path)] = one.warmed_up(batch_size)
            except WeftError as error:  # damaged, or its runtime is not installed
                errors.append(error)
                log(f"{printable(str(path))} is skipped: {error}")
                continue
            if hashes[str(path)] == known:
                return opened[str(path)]
        if not opened:
            raise errors[-1]
        is_complete = not any(isinstance(error, (CheckpointError, _WarmUpError)) for error in errors)
        if len(opened) == 1:
            (chosen,) = opened
            choosing.remember(hashes[chosen], folders, *settings, is_final=is_complete)
            return opened[chosen]
        calls = {path: predictor.timed_call() for path, predictor in opened.items()}
        reasons: dict[int, str] = {}
        seconds = choosing.time_sizes(calls, {1, batch_size}, reasons.__setitem__, choosing.MAX_SECONDS)
        if not all(seconds.values()):
            chosen = next(iter(opened))
            log(f"the models cannot be timed here ({next(iter(reasons.values()))}); {printable(chosen)} is used.")
            return opened[chosen]
        chosen = choosing.fastest(seconds)
        choosing.remember(hashes[chosen], folders, *settings, is_final=is_complete)
        named = {
            f"{one.metadata['runtime']} {one.metadata['precision']}": seconds[path] for path, one in opened.items()
        }
        log(f"measured on this machine: {choosing.speeds_text(named)}.")
        return opened[chosen]

    def timed_call(self) -> Callable[[int], object]:
        """Return a function that predicts a batch of blank images of the given size, to measure its time."""
        blank = self.preprocessing.pixels(Image.new("RGB", (1, 1)))
        return lambda count: self.predict([blank] * count)

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
                " again with this version of weft; exports made after that keep the calibration."
            )
        if not 0 <= error < 1:
            raise UsageError(f"reject_at_error must be a share of errors from 0 to below 1; got {error:g}.")
        return self.confidence.rejection(error)

    def warmed_up(self, batch_size: int) -> Predictor:
        """Run the most frequent batch sizes up to `batch_size` once, and return the predictor.

        Raises:
            UsageError: the model fails, mostly because memory does not suffice for a batch.
        """
        blank = self.preprocessing.pixels(Image.new("RGB", (1, 1)))
        sizes = sorted({1, batch_size, max(batch_size // 2, 1), max(batch_size // 4, 1)}, reverse=True)
        if batch_size > 4:
            sizes.append(3)  # another one, for which OpenVINO compiles its graph for any batch size
        for count in sizes:
            try:
                self.predict([blank] * count)
            except WeftError:
                raise
            except Exception as error:  # mostly too little memory; each runtime has its own exception types
                raise _WarmUpError(
                    f"The model must run with batches of {count} images; it fails ({type(error).__name__}:"
                    f" {reason_of(error)}). Lower --max-batch."
                ) from error
        if self.metadata["overlay"]:
            self.predict([blank], overlay=True)
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
        """Predict one batch of prepared images in one forward pass.

        Args:
            images: results of `prepare`.
            overlay: also return attention maps, where the network has them.

        Raises:
            NonFiniteError: the outputs are not finite.
        """
        if not images:
            return []
        with_attention = overlay and self.backend.has_attention
        probabilities, saliency, features = self._probabilities(self.array(images), attention=with_attention)
        unknown: list[bool | None] = [None] * len(images)
        if self.detector is not None and features is not None:
            unknown = self.detector.is_unknown(features, probabilities).tolist()
        return [
            ImagePrediction(row, None if saliency is None else self._overlay(saliency[i], images[i].size), unknown[i])
            for i, row in enumerate(probabilities)
        ]

    def scores(self, images: Float[Tensor, "b c h w"] | Float[np.ndarray, "b c h w"]) -> Float[np.ndarray, " b"]:
        """Return the scores of one batch of images by the detector of unknown images.

        Raises:
            UsageError: the model has no detector.
            NonFiniteError: the outputs are not finite.
        """
        if self.detector is None:
            raise UsageError(NO_DETECTOR)
        probabilities, _, features = self._probabilities(np.asarray(images), attention=False)
        assert features is not None
        return self.detector.scores(features, probabilities)

    def _probabilities(
        self, images: Float[np.ndarray, "b c h w"], *, attention: bool
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return the probabilities (b classes), the attention map of each image (b h w), and the features."""
        logits, saliency, features = self.backend.run(images, attention=attention)
        if not np.isfinite(logits).all():
            raise NonFiniteError
        return softmax(logits, self.temperature), saliency, features

    def _overlay(self, saliency: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Overlay:
        low, high = float(saliency.min()), float(saliency.max())
        return Overlay((saliency - low) / max(high - low, 1e-12), self.preprocessing.region(*size))


def _pixel_limit(run: str | Path) -> int:
    """Return the largest number of pixels of an image in the training run of a model."""
    recipe = recipe_of(Path(run))
    return (recipe and recipe.data.max_pixels) or MAX_PIXELS


def _export(model_source: Path | str, *, is_fixed: bool) -> Export | None:
    """Load an export; None if it is another model."""
    if not isinstance(model_source, Path) or "artefact" not in (config := read_config(model_source)):
        return None
    return open_export(model_source, config, is_fixed=is_fixed)


def torch_version() -> str | None:
    """Return the version of torch; None if it is not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _exports_text(run: str | Path) -> str:
    """Return the exports of a run as a sentence; empty if it has none."""
    if is_installed("torch"):
        return ""
    try:
        exports = [path for path in candidates(run) if "artefact" in read_config(Path(path))]
    except WeftError:
        return ""
    return f" It has an export: {printable(str(exports[0]))}." if exports else ""


def _torch_backend(model: Any, runtime: Runtime | None, fold: bool, mirror: bool) -> Backend:
    from weft.inference.torch_backend import TorchBackend

    return TorchBackend(model, runtime, fold, mirror)


def _check_export_device(device: str) -> None:
    if device not in ("auto", "cpu"):
        raise UsageError(f"device of an export must be auto or cpu; got {device!r}. Pass the run that was exported.")
