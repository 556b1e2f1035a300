"""What a recipe may say: every setting with its type, range, default and meaning. Defaults live here and only here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

Plain = Any  # what JSON can say: None, bool, int, float, str, and lists and dicts of them


@dataclass(frozen=True)
class Within:
    """A closed range for a number; `above` leaves the lower end out."""

    low: float
    high: float = math.inf
    above: bool = False

    def allows(self, value: float) -> bool:
        """Whether a finite value lies in the range."""
        return math.isfinite(value) and (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        words = [f"{'above' if self.above else 'at least'} {self.low:g}"]
        words += [f"at most {self.high:g}"] if math.isfinite(self.high) else []
        return "a number " + " and ".join(words)


@dataclass(frozen=True)
class Matching:
    """A text with a shape: `pattern` must match it whole."""

    pattern: str
    words: str

    def allows(self, value: str) -> bool:
        """Whether the text has the shape."""
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


Side = Annotated[int, Within(8, 4096)]
Share = Annotated[float, Within(0, 1)]
RunName = Annotated[
    str,
    Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "letters, digits, '.', '_' and '-', no path and at most 100 of them"),
]


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    source: str | None = None
    """An image folder or `digits`; the command line's DATA."""

    val_fraction: Annotated[float, Within(0, 0.9, above=True)] = 0.2
    """Share of each class held out where the data brings no split of its own."""

    max_bad: Share = 0.1
    """Share of unusable files above which training refuses to start."""

    limit: Annotated[int, Within(1)] | None = None
    """Use at most this many images for training, and as many held out; None for all."""


@dataclass(frozen=True)
class Augment:
    """How training images are varied. Each choice is a function of (seed, epoch, index) alone."""

    crop: Literal["auto", "resized", "shift"] = "auto"
    """resized cuts out a random part and resizes it; shift pads and cuts; auto shifts up to 48 pixels."""

    scale: tuple[Annotated[float, Within(0, 1, above=True)], Annotated[float, Within(0, 1, above=True)]] = (0.35, 1.0)
    """For resized: smallest and largest share of the image's area that is kept."""

    ratio: tuple[Annotated[float, Within(0.1, 1)], Annotated[float, Within(1, 10)]] = (0.75, 4 / 3)
    """For resized: narrowest and widest shape, width by height."""

    hflip: bool = True
    """Mirror half of the images. Off where mirror images mean something else, as with digits and letters."""

    color_jitter: Share = 0.2
    """Largest relative change of brightness, contrast and saturation."""

    rand_augment: str | None = None
    """A policy in timm's words, such as rand-m9-mstd0.5-inc1; it may turn and shear, too."""

    erase_prob: Share = 0.0
    """Probability that a rectangle of the image is replaced by noise."""


@dataclass(frozen=True)
class Optim:
    """How the weights move."""

    opt: Literal["adamw", "sgd", "lamb", "lion"] = "adamw"
    """Optimiser, by timm's name."""

    lr: Annotated[float, Within(0, 10, above=True)] = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""

    weight_decay: Share = 0.05
    """Decay of matrices and kernels; vectors and the model's own no-decay list are left alone."""

    momentum: Share = 0.9
    """Momentum of SGD; beta 1 of AdamW, LAMB and Lion."""

    beta2: Share = 0.999
    """Beta 2 of AdamW, LAMB and Lion."""

    clip_grad: Annotated[float, Within(0)] = 1.0
    """Largest norm of the whole gradient; 0 for no clipping."""

    ema_decay: Share = 0.0
    """Decay of an average over the weights, which is then what is evaluated and kept; 0 for none."""


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: a linear warm-up, then half a cosine, both counted in steps."""

    warmup_epochs: Annotated[float, Within(0, 1000)] = 2.0
    """Length of the warm-up, but never more than a fifth of the run."""

    warmup_lr: Annotated[float, Within(0, 10)] = 1e-6
    """Learning rate of the first step."""

    min_lr: Annotated[float, Within(0, 10)] = 1e-5
    """Learning rate of the last step."""


@dataclass(frozen=True)
class Loss:
    """What is made small."""

    label_smoothing: Annotated[float, Within(0, 0.9)] = 0.1
    """Share of each target spread over all classes."""


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    name: RunName | None = None
    """Name of the run directory under `runs/`; None for MODEL-DATA."""

    model: str | None = None
    """Name of a model; None to choose by the size and number of the images."""

    model_args: dict[str, Plain] = field(default_factory=dict)
    """Constructor values of the model, such as ablation switches."""

    img_size: Side | tuple[Side, Side] | None = None
    """Side, or (height, width), in pixels; None for the model's own."""

    pretrained: bool = False
    """Start from the public weights."""

    epochs: Annotated[int, Within(1, 100_000)] | None = None
    """Times that every training image is seen; None to choose by their number."""

    batch_size: Annotated[int, Within(1, 65_536)] = 64
    """Images of one step."""

    seed: Annotated[int, Within(0, 2**31 - 1)] = 0
    """Where all randomness of the run comes from."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto takes a GPU if there is one."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of matrix products and convolutions; weights stay in fp32."""

    workers: Annotated[int, Within(0, 1024)] = 0
    """Processes that read images; 0 reads in the training process. Results do not depend on it."""

    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)

    environment: dict[str, Plain] = field(default_factory=dict)
    """Versions and machine of the run that wrote this file: a record, never read back."""
