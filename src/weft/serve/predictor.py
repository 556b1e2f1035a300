"""Predictor: the model behind the service, from image bytes to class probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from weft.checkpoints.model_dir import (
    CONFIG,
    PREPROCESSING,
    WEIGHTS,
    load_model_dir,
    model_dir,
    read_config,
    weights_sha256,
)
from weft.data import open_image
from weft.data.images.crop import Pixels
from weft.data.loading.transforms import eval_crop, normalize
from weft.deploy import ExportedModel, fold, open_model
from weft.durable import sha256_of
from weft.errors import CheckpointError, UsageError, WeftError
from weft.grid import Grid
from weft.interpret.maps import AttentionMaps, attention_maps, has_attention, run_with_attention
from weft.models.base import Backbone
from weft.text import printable
from weft.train.build import preprocessing
from weft.train.objective import mean_logits
from weft.train.runtime import Runtime

BEST_FIRST = (("openvino", "int8"), ("openvino", "bf16"), ("openvino", "fp32"), ("openvino", "fp16"))
BEST_FIRST += (("onnx", "int8"), ("onnx", "fp32"), ("onnx", "fp16"))


class ModelFault(WeftError):
    """The model did not answer; no picture is to blame."""


@dataclass(frozen=True)
class Overlay:
    """Where the model looked.

    Attributes:
        grid: (height, width), from 0 to 1.
        region: (left, top, width, height) of what the model saw, as shares of the picture's sides.
    """

    grid: np.ndarray
    region: tuple[float, float, float, float]


@dataclass(frozen=True)
class Verdict:
    """What the model says of one picture: the probability of every class, and where it looked if that was asked."""

    probabilities: np.ndarray
    overlay: Overlay | None = None

    def top(self, names: Sequence[str], count: int) -> list[tuple[str, float]]:
        """The likeliest classes, the first first."""
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(names[int(place)], float(self.probabilities[int(place)])) for place in order]


class Predictor:
    """A model that answers. One thread at a time may ask it for answers; any number may prepare pictures.

    Attributes:
        names: of the classes; their numbers where the model has no names.
        crop: how an image becomes the pixels that the model sees.
        facts: what a client may know about the model.
    """

    def __init__(self, model: Any, names: list[str] | None, *, device: str = "auto", precision: str = "fp32") -> None:
        is_export = isinstance(model, ExportedModel)
        self.on = Runtime.of("cpu" if is_export else device, "fp32" if is_export else precision)
        self.cfg: dict[str, Any] = preprocessing(model)
        # what attention means is asked of the whole network; a folded one answers
        self.described = model.network if is_export else model
        self.model: Any = fold(model) if isinstance(model, Backbone) else model
        self.model = self.model.to(self.on.device).eval()
        self.names = names or [str(number) for number in range(model.num_classes)]
        self.crop = eval_crop(self.cfg)
        self.facts = {
            "classes": self.names,
            "architecture": type(self.described or model).__name__,
            "input": dict(zip(("channels", "height", "width"), self.cfg["input_size"], strict=True)),
            "runtime": model.format if is_export else "torch",
            "precision": model.precision if is_export else precision,
            "overlay": has_attention(self.described),
        }

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        runtime: str = "auto",
        device: str = "auto",
        precision: str = "fp32",
        warm: int = 1,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Predictor:
        """The predictor of a run, a model directory or an export.

        Args:
            run: of a run its best model is taken, or an export of it that lies in the run or beside the model.
            runtime: `auto`, `torch`, `openvino` or `onnx`; see `candidates`.
            device, precision: for torch.
            warm: batch size to be ready for.
            tell: is told of every export that is skipped, and why.

        Raises:
            UsageError: no export for that runtime, or it is not installed.
            CheckpointError: no model there, or one that cannot be read.
        """
        *exports, last = candidates(run, runtime, tell)
        for path in exports:
            try:
                return cls._warm(path, device, precision, warm)
            except WeftError as error:  # damaged, or its runtime is not installed: what comes next answers
                tell(f"the export {printable(str(path))} is skipped: {error}")
        return cls._warm(last, device, precision, warm)

    @classmethod
    def _warm(cls, path: Path, device: str, precision: str, warm: int) -> Predictor:
        model, names = open_model(path)
        predictor = cls(model, names, device=device, precision=precision)
        predictor.warm_up(warm)
        return predictor

    def warm_up(self, most: int) -> None:
        """Answers batches of the sizes that will be most frequent, so that no client pays for the first."""
        blank = self.crop.pixels(Image.new("RGB", (1, 1)))
        for count in sorted({1, most, max(most // 2, 1), max(most // 4, 1)}, reverse=True):
            self.answer([blank] * count)
        if self.facts["overlay"]:
            self.answer([blank], overlay=True)

    def read(self, data: bytes, *, max_pixels: int) -> Pixels:
        """Decodes in this process, as `weft predict` does.

        Raises:
            BadImage: bytes that are no picture, or one that cannot be used.
        """
        return self.crop.pixels(open_image(data, max_pixels=max_pixels))

    def answer(self, pictures: Sequence[Pixels], *, overlay: bool = False) -> list[Verdict]:
        """Answers a batch in one forward pass, of which the overlay is a by-product.

        Raises:
            ModelFault: it gave no numbers.
        """
        images = self.on.put(normalize(np.stack([picture.values for picture in pictures]), self.cfg))
        overlay = overlay and bool(self.facts["overlay"])
        maps = None
        with torch.inference_mode(), self.on.autocast():
            if overlay:
                answer, weights = run_with_attention(self.model, images)
                logits = mean_logits(answer)
                maps = attention_maps(self._network(), weights, Grid(*images.shape[-2:]))
            else:
                logits = mean_logits(self.model(images))
        logits = logits.float().cpu()
        if not bool(logits.isfinite().all()):
            raise ModelFault("The model gave no finite numbers; its weights are damaged.")
        shares = logits.softmax(dim=1).numpy()
        return [
            Verdict(share, None if maps is None else self._overlay(maps, i, pictures[i].size))
            for i, share in enumerate(shares)
        ]

    def _network(self) -> nn.Module:
        assert self.described is not None
        return self.described

    def _overlay(self, maps: AttentionMaps, i: int, size: tuple[int, int]) -> Overlay:
        grid = maps.focus[i].float().cpu().numpy()
        low, high = float(grid.min()), float(grid.max())
        return Overlay((grid - low) / max(high - low, 1e-12), self.crop.region(*size))


def candidates(run: str | Path, runtime: str = "auto", tell: Callable[[str], None] = lambda text: None) -> list[Path]:
    """The directories that can answer for a run: its exports, the fastest first, then its best model.

    An export counts that lies in the run, or in or beside the model's directory, was made from the same weights, names
    the same architecture, classes and preprocessing, and belongs to the same user.

    Args:
        run: a run directory, a model directory or an export.
        runtime: `auto` for all of them, else that of which there must be one.
        tell: is told of every export that is skipped, and why.

    Raises:
        UsageError: there is none for the runtime.
        CheckpointError: no model there.
    """
    model = model_dir(run)
    config = read_config(model)
    if "artefact" in config:
        format = config["artefact"]["format"]
        if runtime not in ("auto", format):
            raise UsageError(f"runtime must be that of the export, {format}; got {runtime}. Leave it out.")
        return [model]
    if runtime == "torch":
        return [model]
    exports = _exports_of(model, config, tell)
    chosen = [exports[kind] for kind in BEST_FIRST if kind in exports and runtime in ("auto", kind[0])]
    if runtime != "auto" and not chosen:
        raise UsageError(
            f"runtime {runtime} needs an export in or beside {model}; there is none that fits. Run: weft export {run}"
            f" {Path(run) / runtime} --format {runtime}"
        )
    return [*chosen, model] if runtime == "auto" else chosen


def _exports_of(model: Path, config: dict[str, Any], tell: Callable[[str], None]) -> dict[tuple[str, str], Path]:
    """Exports of a model by format and precision."""
    exports: dict[tuple[str, str], Path] = {}
    weights: str | None = None
    for folder in sorted({*model.glob("*/"), *model.parent.glob("*/"), *model.parent.glob("exports/*/")}):
        try:
            if not (folder / CONFIG).is_file():
                continue
            other = read_config(folder)
            if "artefact" not in other or _essence(other) != _essence(config):
                continue  # a model, or an export of another
            if (folder / CONFIG).stat().st_uid != (model / CONFIG).stat().st_uid:
                tell(f"the export {printable(str(folder))} is skipped: it belongs to another user than the model.")
                continue
        except OSError:  # a neighbour that may not be read, as /root beside /model in a container
            continue
        except CheckpointError as error:
            tell(f"the neighbour {printable(str(folder))} is skipped: {error}")
            continue
        weights = weights or _weights_of(model, config)
        if other["artefact"].get("weights_sha256") != weights:
            tell(
                f"the export {printable(str(folder))} is skipped: it does not record that it was made from these"
                " weights. Export once more, or serve it by its own path."
            )
            continue
        exports[other["artefact"]["format"], other["artefact"]["precision"]] = folder
    return exports


def _weights_of(model: Path, config: dict[str, Any]) -> str:
    """What an export of this model records of its weights."""
    sha256 = sha256_of(model / WEIGHTS)
    return sha256 if sha256 == config.get("weights_sha256") else weights_sha256(load_model_dir(model)[0])


def _essence(config: dict[str, Any]) -> str:
    """What an export must share with its model."""
    cfg = {key: config["pretrained_cfg"].get(key) for key in PREPROCESSING}
    parts = [config["architecture"], config["model_args"], config["num_classes"], config["label_names"], cfg]
    return json.dumps(parts, sort_keys=True)
