"""Run a model over labelled images, and keep of each what the metrics need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data import ImageDataset, Source, eval_transform, make_loader
from weft.data.loader import ImageLoader
from weft.data.order import WHOLE, Share
from weft.deploy.model import ModelInfo
from weft.errors import DataError
from weft.inference.arguments import InferenceOptions
from weft.inference.feature_map import drawn_of
from weft.inference.inputs import name_of
from weft.inference.metrics import Evaluation
from weft.inference.predictor import NonFiniteError, Predictor
from weft.inference.probabilities import ranked, softmax
from weft.machine.runtime import Runtime
from weft.models.contract import preprocessing
from weft.progress import Work


def evaluation_batches(
    source: Source,
    model: nn.Module | ModelInfo,
    batch_size: int,
    workers: int | Literal["auto"],
    *,
    share: Share = WHOLE,
    device: torch.device | str = "cpu",
) -> ImageLoader:
    """Load all images in their order, with the preprocessing of a model; with several processes, the share of this one.

    Raises:
        DataError: `source` is empty.
    """
    if len(source) == 0:
        raise DataError("An evaluation needs at least one image; got none. Give every class two images or more.")
    transform = eval_transform(preprocessing(model))
    images = ImageDataset(source, transform, value_range=transform.value_range)
    return make_loader(images, batch_size, shuffle=False, workers=workers, share=share, device=device)


def measured(
    predictor: Predictor,
    source: Source,
    classes: list[str],
    options: InferenceOptions,
    among: Sequence[int] | None,
    *,
    with_features: bool,
) -> tuple[Evaluation, np.ndarray]:
    """Run the model of a predictor over the images of a source.

    Args:
        predictor, source, classes: model, images and names of its outputs.
        options: batch size and workers.
        among: as in `measure`.
        with_features: also return the features of the images that are drawn on the feature map.

    Returns:
        The results, and the features (drawn images, features).

    Raises:
        NonFiniteError: an output is not finite.
    """
    size = len(source)
    is_drawn, done = np.isin(np.arange(size), drawn_of(size if with_features else 0)), 0
    features: list[np.ndarray] = []

    def logits_of(images: Tensor) -> Tensor:
        nonlocal done
        outputs = predictor.run(images.numpy(), features=with_features)
        if outputs.features is not None:
            features.append(outputs.features[is_drawn[done : done + len(images)]])
        done += len(images)
        return torch.from_numpy(outputs.logits)

    with Work("evaluating", size) as work:
        result = measure(
            logits_of,
            evaluation_batches(source, predictor.model.info, options.batch_size, options.workers),
            classes,
            among=among,
            temperature=predictor.temperature,
            key_of=lambda place: name_of(source, place),
            on_batch=work.advance,
        )
    if not math.isfinite(result.loss):
        raise NonFiniteError
    return result, np.concatenate(features) if features else np.empty((0, 0), np.float32)


def measure(
    logits_of: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: Sequence[str],
    runtime: Runtime | None = None,
    *,
    among: Sequence[int] | None = None,
    temperature: float = 1.0,
    key_of: Callable[[int], str] = str,
    excluded: Sequence[tuple[str, str]] = (),
    on_batch: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Run a model over images. With several processes each runs its share, and every image counts once.

    Args:
        logits_of: function from images (b c h w) to logits (b classes), float32 on the CPU.
        batches: (images (b c h w), labels (b)) pairs; with several processes an `ImageLoader`, which knows its share.
        classes: names of the model's outputs.
        runtime: processes that share the images; None for this one alone.
        among: outputs to compare, ascending, which include all labels; the results are over these classes alone. None:
            all outputs.
        temperature: divisor of the logits in probabilities; the loss is without it.
        key_of: function from the index of an image in `batches` to its name.
        excluded: (name, reason) of images that are not in `batches`; copied to the result.
        on_batch: called with the number of images of every batch; it may raise to stop.

    Returns:
        The results; `loss` is nan if an output is not finite.
    """
    columns: list[tuple[np.ndarray, ...]] = []
    for images, labels in batches:
        columns.append(_columns(logits_of(images), labels, among, temperature))
        on_batch(len(labels))
    mine = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    places = batches.places() if isinstance(batches, ImageLoader) else np.arange(sum(len(part[0]) for part in columns))
    shares = [[places, *mine]] if runtime is None else runtime.gather([places, *mine])
    gathered = [own for own in shares if len(own) > 1]  # a process may have no image
    places, *values = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    order = np.argsort(places)
    true, predicted, confidence, rank, losses, is_top_of_all = (column[order] for column in values)
    is_part = among is not None and len(among) < len(classes)
    return Evaluation(
        classes=list(classes) if among is None else [classes[number] for number in among],
        keys=[key_of(int(place)) for place in places[order]],
        places=places[order],
        true=true,
        predicted=predicted,
        confidence=confidence,
        rank=rank,
        losses=losses,
        excluded=list(excluded),
        num_outputs=len(classes) if is_part else None,
        top1_of_all=100 * float(is_top_of_all.mean()) if is_part else None,
    )


def _columns(logits: Tensor, labels: Tensor, among: Sequence[int] | None, temperature: float) -> tuple[np.ndarray, ...]:
    """Return true class, predicted class, its probability, rank of the true class, loss, and whether the true class is
    on top of all outputs."""
    is_top_of_all = torch.from_numpy(ranked(logits.numpy())[:, 0].copy()) == labels
    if among is not None:
        place_of = torch.full((logits.shape[1],), -1)
        place_of[list(among)] = torch.arange(len(among))
        labels = place_of[labels]
        logits = logits[:, list(among)]
    order = torch.from_numpy(ranked(softmax(logits.numpy())).copy())
    predicted, rank = order[:, 0], (order == labels[:, None]).int().argmax(dim=1)
    confidence = torch.from_numpy(softmax(logits.numpy(), temperature)).gather(1, predicted[:, None])[:, 0]
    loss = F.cross_entropy(logits, labels, reduction="none").double()
    loss[~logits.isfinite().all(dim=1)] = math.nan  # also where the loss itself would be finite
    return tuple(column.numpy() for column in (labels, predicted, confidence, rank, loss, is_top_of_all))
