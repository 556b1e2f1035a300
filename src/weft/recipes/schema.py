"""The recipe schema: every setting with its type, range, default and meaning."""

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
    """An image folder, a table, tar shards, `torchvision:NAME`, `hf:NAME` or `digits`; the command line's DATA."""

    val_fraction: Annotated[float, Within(0, 0.9, above=True)] = 0.2
    """Share of each class held out where the data brings no split of its own."""

    train_fraction: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Share of each class's training images to learn from; all that are held out stay. What more images would bring."""

    max_bad: Share = 0.1
    """Share of unusable files above which training refuses to start."""

    limit: Annotated[int, Within(1)] | None = None
    """Use at most this many images for training, and as many held out; None for all."""

    on_lost: Literal["stop", "exclude"] = "stop"
    """What to do when an image vanishes or breaks while training: stop, or go on without it and say so."""

    draft: bool = True
    """Decode large JPEGs for training at a half, a quarter or an eighth of their size while both sides keep twice the
    model's input: several times as fast for a phone's photos; images of ImageNet's size are decoded whole."""


@dataclass(frozen=True)
class Augment:
    """How training images are varied. Each choice is a function of (seed, epoch, index) alone."""

    crop: Literal["auto", "resized", "shift", "cut", "none"] = "auto"
    """resized cuts out a random part and resizes it; shift pads and cuts; cut resizes both sides to 32 pixels more and
    cuts (CvT's fine-tuning); none prepares as for evaluation; auto shifts up to 48 pixels and resizes above."""

    scale: tuple[Annotated[float, Within(0, 1, above=True)], Annotated[float, Within(0, 1, above=True)]] = (0.35, 1.0)
    """For resized: smallest and largest share of the image's area that is kept. The papers' is [0.08, 1]."""

    ratio: tuple[Annotated[float, Within(0.1, 1)], Annotated[float, Within(1, 10)]] = (0.75, 4 / 3)
    """For resized: narrowest and widest shape, width by height."""

    interpolation: Literal["auto", "bicubic", "bilinear", "random"] = "auto"
    """How training images are resized; auto as the model's evaluation does. CvT-21's released file says bilinear."""

    hflip: bool = True
    """Mirror half of the images. Off where mirror images mean something else, as with digits and letters."""

    color_jitter: Share = 0.2
    """Largest relative change of brightness, contrast and saturation."""

    rand_augment: str | None = None
    """A policy in timm's words, such as rand-m9-mstd0.5-inc1; it may turn and shear, too."""

    erase_prob: Share = 0.0
    """Probability that a rectangle of the image is replaced by noise."""

    repeats: Annotated[int, Within(1, 16)] = 1
    """Repeated augmentation (arXiv 1902.05509): every image comes this many times in a row, each varied otherwise, and
    an epoch, as long as without, sees only one in so many of the images. The papers' is 3."""

    mixup: Annotated[float, Within(0, 10)] = 0.0
    """Alpha of mixup (arXiv 1710.09412), which adds pairs of images; 0 for none. The papers' is 0.8."""

    cutmix: Annotated[float, Within(0, 10)] = 0.0
    """Alpha of cutmix (arXiv 1905.04899), which pastes a part of one image into another; 0 for none."""

    mix_prob: Share = 1.0
    """Share of the batches that are mixed at all."""

    mix_switch: Share = 0.5
    """Where both are on: share of the mixed batches that get cutmix."""


@dataclass(frozen=True)
class Optim:
    """How the weights move."""

    opt: Literal["adamw", "sgd", "lamb", "lion", "muon"] = "adamw"
    """Optimiser, by timm's name. Muon moves matrices and kernels along orthogonal directions, the rest as AdamW does;
    its steps are scaled to be as long as AdamW's, so that a learning rate fits both (arXiv 2502.16982)."""

    lr: Annotated[float, Within(0, 10, above=True)] | None = None
    """Highest learning rate, reached at the end of the warm-up; None for 1e-3, or what `lr_per_512` makes it."""

    lr_per_512: Annotated[float, Within(0, 10, above=True)] | None = None
    """Instead of `lr`: the learning rate of 512 images per step; it grows in proportion to `batch_size`."""

    weight_decay: Share = 0.05
    """Decay of matrices and kernels; vectors and the model's own no-decay list are left alone."""

    momentum: Share = 0.9
    """Momentum of SGD and Muon; beta 1 of AdamW, LAMB and Lion."""

    beta2: Share = 0.999
    """Beta 2 of AdamW, LAMB and Lion."""

    eps: Annotated[float, Within(0, 1, above=True)] = 1e-8
    """Epsilon of AdamW and LAMB."""

    clip_grad: Annotated[float, Within(0)] = 1.0
    """Where the gradient is clipped; 0 for nowhere. LeViT's training has 0.01 with `agc`."""

    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """What clip_grad limits: the norm of the whole gradient, each of its values, or for every output unit the ratio of
    its norm to that of the weights (adaptive gradient clipping, arXiv 2102.06171)."""

    layer_decay: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Factor from the learning rate of each block to that of the block before it; 1 for the same everywhere."""

    freeze: Literal["none", "backbone"] = "none"
    """backbone: only the head learns, and BatchNorm keeps its statistics."""

    ema_decay: Share = 0.0
    """Decay per step of an average over the weights, which is then what is evaluated and kept; 0 for none. The released
    trainings of CeiT and LeViT keep one (0.99996) and never evaluate it."""


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: a linear warm-up, then down a half cosine, or on as it is."""

    kind: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up."""

    warmup_epochs: Annotated[float, Within(0, 1000)] = 2.0
    """Length of the warm-up, but never more than a fifth of the run."""

    warmup_lr: Annotated[float, Within(0, 10)] = 1e-6
    """Learning rate of the first step. Not scaled with the batch, in the released trainings neither."""

    min_lr: Annotated[float, Within(0, 10)] = 1e-5
    """Learning rate of the last step. Not scaled with the batch, in the released trainings neither."""

    update: Literal["step", "epoch", "epoch_late"] = "step"
    """When the rate moves. step: at every step, smoothly from the warm-up's end to the run's end. epoch: once an epoch,
    on a cosine that began with the warm-up, as CvT's released code. epoch_late: the same one epoch late, as in the
    released code of DeiT, CeiT and LeViT, which trains both of the first two epochs at `warmup_lr`."""


@dataclass(frozen=True)
class Loss:
    """What is made small."""

    label_smoothing: Annotated[float, Within(0, 0.9)] = 0.1
    """Share of each target spread over all classes."""

    class_weights: Literal["none", "balanced"] = "none"
    """balanced: an image counts the more, the fewer there are of its class; each class then weighs the same."""


@dataclass(frozen=True)
class Distill:
    """Learning from a teacher beside the labels (DeiT, arXiv 2012.12877, section 4). A model with two heads learns the
    labels with one and the teacher with the other; a model with one head learns both with it."""

    teacher: str | None = None
    """A model's name (its public weights are taken) or a model directory; None for no teacher. LeViT's is
    regnety_160.deit_in1k."""

    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's answer is a label. soft: its probabilities are the target."""

    alpha: Share = 0.5
    """Weight of the teacher; the labels have the rest. DeiT: 0.5 where hard, 0.1 where soft."""

    temperature: Annotated[float, Within(0, 100, above=True)] = 1.0
    """For soft: both sides' logits are divided by it. DeiT: 3."""

    soft_mean: Literal["images", "released"] = "images"
    """For soft: released divides the divergence by the number of classes, too, as the released code of DeiT, CeiT and
    LeViT does, which makes the teacher's part so many times smaller than the papers' formula."""

    cache: bool = True
    """Ask the teacher once about every image, before training, wherever its answer cannot change from epoch to epoch
    (no random augmentation and no mixing); else it is asked at every step."""


@dataclass(frozen=True)
class Save:
    """When the state that a killed run goes on from is written. The result does not depend on it."""

    every_minutes: Annotated[float, Within(0, 10_000)] = 10.0
    """Within an epoch, after so many minutes; 0 for at the ends of epochs only."""

    every_steps: Annotated[int, Within(1)] | None = None
    """Within an epoch, after so many steps."""

    keep: Annotated[int, Within(2, 1000)] = 2
    """How many of the newest are kept."""


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

    start_from: str | None = None
    """Start from the weights of a run, a model directory or a checkpoint file of any known layout; a head of other
    classes begins anew, positions are resized. The command line's --from."""

    train_mode: Literal["train", "eval"] = "train"
    """eval: BatchNorm keeps its statistics, and drop-path and dropout rest. So do the released fine-tunings of DeiT,
    CeiT and LeViT, whose author calls it needed for the reported numbers; the papers do not mention it."""

    epochs: Annotated[int, Within(1, 100_000)] | None = None
    """Times that as many images are seen as there are; None to choose by their number."""

    steps: Annotated[int, Within(1)] | None = None
    """Instead of `epochs`: length of the run in steps; the last epoch may be shorter."""

    batch_size: Annotated[int, Within(1, 65_536)] | Literal["auto"] = 64
    """Images of one step, all devices together; auto for the largest that fits on a GPU, the fastest on a CPU."""

    accumulate: Annotated[int, Within(1, 65_536)] = 1
    """Parts in which each device computes its share of a step, one after the other, to need less memory."""

    seed: Annotated[int, Within(0, 2**31 - 1)] = 0
    """Where all randomness of the run comes from."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto takes a GPU if there is one."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of matrix products and convolutions; weights stay in fp32."""

    compile: bool = False
    """Compile the model with torch.compile: minutes at the start, faster steps."""

    grad_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, a third more time."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: ddp keeps the whole model in each; fsdp spreads weights, gradients and moments over them
    (FSDP2), for models that do not fit otherwise. One process has nothing to spread."""

    sync_bn: bool = False
    """With several processes: BatchNorm takes its statistics over all of them. One process has nothing to share."""

    workers: Annotated[int, Within(0, 1024)] = 0
    """Processes that read images, for each device; 0 reads in the training process. Results do not depend on it."""

    evaluate_every: Annotated[int, Within(1, 100_000)] = 1
    """Epochs from one evaluation to the next; the last epoch is always evaluated."""

    patience: Annotated[int, Within(1, 100_000)] | None = None
    """Stop after so many evaluations without a better one; None to go on to the end."""

    skip_nonfinite: Annotated[int, Within(0)] = 0
    """Steps whose loss or gradient may be infinite or not a number, and are left out; one more stops the run."""

    deterministic: bool = False
    """On a GPU: only algorithms that give the same bits every time, which is slower. A CPU needs no such thing."""

    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    distill: Distill = field(default_factory=Distill)
    save: Save = field(default_factory=Save)

    environment: dict[str, Plain] = field(default_factory=dict)
    """Versions and machine of the run that wrote this file: a record, never read back."""


EXCLUSIVE = (("epochs", "steps"), ("optim.lr", "optim.lr_per_512"))
"""Two ways to say one thing. In one place they contradict each other; a later place wins over an earlier one."""
