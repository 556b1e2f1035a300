"""Exports with the interface of a model of torch, and loading of any model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.checkpoints.config import read_config
from weft.checkpoints.model_dir import build_from, load_model_dir
from weft.checkpoints.resolve import find_model
from weft.deploy.opening import Export, open_export
from weft.progress import obeys_quiet


class ExportedModel(nn.Module):
    """An export with the interface of the model that it was made from: images (b c h w) to logits (b num_classes).

    It computes on the CPU, in the runtime of the export.

    Attributes:
        export: the export.
        num_classes, pretrained_cfg, default_cfg: as in the model.
    """

    def __init__(self, export: Export) -> None:
        super().__init__()
        self.export, self.graph, self.config = export, export.graph, export.config
        self.num_classes, self.size = export.num_classes, export.size
        self.pretrained_cfg = self.default_cfg = export.pretrained_cfg
        self.confidence, self.unknown = export.confidence, export.unknown
        self.format, self.precision = export.format, export.precision
        self.set_input_size = export.set_input_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images.

        Raises:
            UsageError: the images have another size.
        """
        return torch.from_numpy(self.export(_array(x)))

    def run_with_attention(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits and attention weights, as `Export.run_with_attention`."""
        logits, weights = self.export.run_with_attention(_array(x))
        return torch.from_numpy(logits), [torch.from_numpy(weight) for weight in weights]

    @functools.cached_property
    def network(self) -> nn.Module | None:
        """The network that was exported, on the meta device (without weights), to interpret its attention.

        None if it is not one of weft's networks.
        """
        if self.export.family is None:
            return None
        with torch.device("meta"):
            return build_from(self.config).eval()


def _array(images: Tensor) -> np.ndarray:
    return images.detach().cpu().float().numpy()


@obeys_quiet
def open_model(run: str | Path, threads: int | None = None, *, quiet: bool = False) -> tuple[Any, list[str] | None]:
    """Load a model: of a run, a model directory, an export, a repository on the hub, or a public one by its name.

    Args:
        run: as in `weft.checkpoints.resolve.find_model`.
        threads: number of threads of an export; None for torch's current number. Other models use torch's.
        quiet: print no notes.

    Returns:
        The model, and its class names or None if it has none.

    Raises:
        CheckpointError: there is no such model, or a file is missing, damaged, or of another version of weft.
        UsageError: the runtime of the export is not installed.
    """
    return open_found(find_model(run), threads)


def open_found(model_source: Path | str, threads: int | None = None) -> tuple[Any, list[str] | None]:
    """Load the model that `weft.checkpoints.resolve.find_model` has found, as `open_model` does."""
    if isinstance(model_source, str):
        from weft.checkpoints.hub import load_public  # imports huggingface_hub

        return load_public(model_source)
    config = read_config(model_source)
    if "artefact" not in config:
        return load_model_dir(model_source)
    export = open_export(model_source, config, threads)
    return ExportedModel(export).eval(), export.label_names
