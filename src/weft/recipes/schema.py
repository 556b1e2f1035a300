"""Recipe schema: every setting with its type, range, default and meaning.

One setting is one edit: recipe files, `--set`, command line options, `weft recipes settings` and the reference in the
documentation are derived from these fields. The first sentence below a field is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from weft.machine.processor import MAX_THREADS
from weft.recipes.fields import STRICT, Matching, Within, option

Positive = Annotated[int, Within(1)]
Side = Annotated[int, Within(8, 4096)]
ImageSize = Side | tuple[Side, Side]
BatchSize = Annotated[int, Within(1, 65_536)]
Workers = Annotated[int, Within(0, 1024)] | Literal["auto"]
Threads = Annotated[int, Within(1, MAX_THREADS)]
Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16"]
Share = Annotated[float, Within(0, 1)]
Value = Annotated[int, Within(-(2**31), 2**32 - 1)]
RunName = Annotated[
    str,
    Matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "letters, digits, '.', '_' and '-', no path and at most 100 of them"),
]


@dataclass(frozen=True)
class Data:
    """Dataset."""

    source: str | None = None
    """Image folder, table, tar shards, `torchvision:NAME`, `hf:NAME` or `digits`: DATA on the command line."""

    val_fraction: Annotated[float, Within(0, 0.9, above=True)] = 0.2
    """Fraction of each class in the validation set, if the dataset has no split of its own."""

    folds: Annotated[int, Within(2, 1000)] | None = option(None)
    """Cross-validation: train once per fold of the images, and report the accuracy over all folds. Each run holds out
    another fold; the dataset must have no split of its own. None: hold out val_fraction of the images once."""

    fold: Annotated[int, Within(1, 1000)] | None = None
    """With `folds`: train with this fold as validation set only. None: with every fold in turn."""

    group: str | None = option(None, "COLUMN|PATTERN|FILE|RULE")
    """Keep images of a group on one side of the split. Column of a table, pattern in the path, file of `weft data check
    --series`, or a rule. A pattern is a regular expression, such as `patient(\\d+)`. Rules: `similar`, similar images;
    `exif`, photos of a camera with pauses of at most a minute; `name`, names that differ by a number at their end;
    `none`, a random split. None: `similar`, if similar images are found."""

    image: str | None = None
    """Column of a table, or of a dataset of `hf:`, that has the images or their paths. None: recognised by its name."""

    label: str | None = None
    """Column that has the classes. None: recognised by its name."""

    unknown_images: str | None = option(None, "FOLDER")
    """Folder of images that show none of the classes. They set the threshold below which an image is unknown; without
    them, at most 5 % of the held-out images are below it."""

    seed: Annotated[int, Within(0, 2**31 - 1)] | None = None
    """Random seed of the split and of `limit`. None: that of the run, `seed`. The runs of a comparison or study share
    it, so that all seeds hold out the same images."""

    train_fraction: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Fraction of the training images of each class that are used; the validation set stays complete."""

    sampling: Literal["shuffled", "balanced"] = "shuffled"
    """Training images of an epoch. shuffled: each one once. balanced: as many of every class, so that images of small
    classes are drawn several times, with different augmentation."""

    check: Literal["auto", "none", "header", "decode"] = "auto"
    """How images are checked before training. decode: every image is decoded once. header: the header of its file is
    read. none: images are recognised by their names. auto: decode for up to 20,000 images, else header. The results
    are kept in the cache, and a file is only read again if it changed."""

    cache_gb: Annotated[int, Within(1, 100_000)] = 50
    """Disk space, in GiB, for shards that are fetched from a server. It should have room for 40 shards."""

    damaged: Literal["stop", "next"] = "stop"
    """An image that turns out to be damaged in training. stop: end with its name. next: use the next image of its class
    instead; the report counts these."""

    max_bad: Share = 0.1
    """Maximum fraction of unreadable files; with more, training does not start."""

    limit: Positive | None = option(None)
    """Maximum number of images of each split. None uses all."""

    follow_links: bool = option(False)
    """Also read class folders that are links to outside the dataset."""

    max_pixels: Positive | None = option(None)
    """Maximum pixels (height x width) of an image; larger ones count as bad files. None: 100 million."""

    value_range: tuple[Value, Value] | None = None
    """Values of black and white in images of more than 8 bits per channel, such as [0, 4095] for 12 bits; stored with
    the model. None: those of the dataset."""

    draft: bool = True
    """Decode large JPEGs for training at 1/2, 1/4 or 1/8 of their size, if both sides stay at least twice the input
    size. Several times as fast for photos of a phone; images of ImageNet's size are decoded in full."""


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images: a function of (seed, epoch, index)."""

    crop: Literal["auto", "resized", "shift", "cut", "none"] = "auto"
    """Random crop. resized: random area and aspect ratio, resized to the input size. shift: pad and crop. cut: resize
    both sides to 32 pixels more and crop (fine-tuning of CvT). none: as in evaluation. auto: shift for inputs of up to
    48 pixels, else resized."""

    scale: tuple[Annotated[float, Within(0, 1, above=True)], Annotated[float, Within(0, 1, above=True)]] = (0.35, 1.0)
    """For resized: smallest and largest fraction of the image area; [0.08, 1] in the papers."""

    ratio: tuple[Annotated[float, Within(0.1, 1)], Annotated[float, Within(1, 10)]] = (0.75, 4 / 3)
    """For resized: smallest and largest aspect ratio (width / height)."""

    interpolation: Literal["auto", "bicubic", "bilinear", "random"] = "auto"
    """Interpolation of training images; auto: that of evaluation. The released file of CvT-21 has bilinear."""

    hflip: bool = True
    """Mirror half of the images horizontally. Switch it off for digits, text and other directed content."""

    color_jitter: Share = 0.2
    """Maximum relative change of brightness, contrast and saturation."""

    rand_augment: str | None = None
    """RandAugment policy of timm, such as rand-m9-mstd0.5-inc1; it includes rotation and shear."""

    erase_prob: Share = 0.0
    """Probability of random erasing, which replaces a rectangle of the image by noise."""

    repeats: Annotated[int, Within(1, 16)] = 1
    """Repeated augmentation (arXiv 1902.05509): sample each image N times per batch with different augmentations; an
    epoch then covers 1/N of the images. The papers use 3."""

    mixup: Annotated[float, Within(0, 10)] = 0.0
    """Alpha of mixup (arXiv 1710.09412), which blends pairs of images; 0 for none. The papers use 0.8."""

    cutmix: Annotated[float, Within(0, 10)] = 0.0
    """Alpha of cutmix (arXiv 1905.04899), which pastes a rectangle of one image into another; 0 for none."""

    mix_prob: Share = 1.0
    """Probability that a batch is mixed."""

    mix_switch: Share = 0.5
    """With both mixup and cutmix: probability that a mixed batch gets cutmix."""


@dataclass(frozen=True)
class Optim:
    """Optimizer."""

    opt: Literal["adamw", "sgd", "lamb", "lion", "muon"] = "adamw"
    """Optimizer, by its name in timm. Muon updates matrices and kernels along orthogonal directions and other weights
    as AdamW does; its steps are scaled to the length of AdamW's, so that a learning rate fits both (arXiv
    2502.16982)."""

    lr: Annotated[float, Within(0, 10, above=True)] | None = option(None, "RATE")
    """Peak learning rate, reached at the end of the warm-up; None: 1e-3, or by `lr_per_512`."""

    lr_per_512: Annotated[float, Within(0, 10, above=True)] | None = None
    """Instead of `lr`: peak learning rate for a batch size of 512; it scales in proportion to `batch_size`."""

    weight_decay: Share = 0.05
    """Weight decay of matrices and kernels; not of vectors and of the no-decay list of the model."""

    momentum: Share = 0.9
    """Momentum of SGD and Muon; beta 1 of AdamW, LAMB and Lion."""

    beta2: Share = 0.999
    """Beta 2 of AdamW, LAMB and Lion."""

    eps: Annotated[float, Within(0, 1, above=True)] = 1e-8
    """Epsilon of AdamW and LAMB."""

    clip_grad: Annotated[float, Within(0)] = 1.0
    """Gradient clipping threshold; 0 for none. The training of LeViT uses 0.01 with `agc`."""

    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """Quantity that clip_grad limits: norm of the whole gradient, each value, or ratio of gradient norm to weight norm
    of every output unit (adaptive gradient clipping, arXiv 2102.06171)."""

    layer_decay: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Layer-wise learning rate decay: factor per block from the last to the first; 1 for none."""

    freeze: Literal["none", "backbone"] = "none"
    """backbone: train only the head; the BatchNorm statistics do not change."""

    ema_decay: Share = 0.0
    """Decay per step of an exponential moving average of the weights, which is then evaluated and saved; 0 for none.
    The released training code of CeiT and LeViT keeps one (0.99996) and never evaluates it."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule: linear warm-up, then half a cosine or constant."""

    kind: Literal["cosine", "constant"] = "cosine"
    """Schedule after the warm-up."""

    warmup_epochs: Annotated[float, Within(0, 1000)] = 2.0
    """Length of the warm-up in epochs, at most a fifth of the run."""

    warmup_lr: Annotated[float, Within(0, 10)] = 1e-6
    """Learning rate of the first step; not scaled with the batch size, as in the released code."""

    min_lr: Annotated[float, Within(0, 10)] = 1e-5
    """Learning rate of the last step; not scaled with the batch size, as in the released code."""

    update: Literal["step", "epoch", "epoch_late"] = "step"
    """When the rate changes. step: every step, from the end of the warm-up to the end of the run. epoch: once per
    epoch, on a cosine that starts with the warm-up, as in the released code of CvT. epoch_late: the same, one epoch
    later, as in the released code of DeiT, CeiT and LeViT, which trains the first two epochs at `warmup_lr`."""


@dataclass(frozen=True)
class Loss:
    """Loss."""

    label_smoothing: Annotated[float, Within(0, 0.9)] = 0.1
    """Label smoothing: fraction of each target that is spread over all classes."""

    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight images by the inverse frequency of their class, so that every class counts the same."""


@dataclass(frozen=True)
class Distill:
    """Distillation from a teacher (DeiT, arXiv 2012.12877, section 4). With two heads, one is trained on the labels and
    the other on the teacher; a single head is trained on both."""

    teacher: str | None = None
    """Teacher: model name (with its public weights) or model directory; None for no teacher. LeViT was trained with
    regnety_160.deit_in1k."""

    kind: Literal["hard", "soft"] = "hard"
    """hard: the predicted class of the teacher is the label. soft: its probabilities are the target."""

    alpha: Share = 0.5
    """Weight of the teacher loss; the label loss has the rest. DeiT: 0.5 for hard, 0.1 for soft."""

    temperature: Annotated[float, Within(0, 100, above=True)] = 1.0
    """For soft: temperature that divides the logits of student and teacher. DeiT: 3."""

    soft_mean: Literal["images", "released"] = "images"
    """For soft: mean of the divergence over images, or over images and classes (released). The latter is that of the
    released code of DeiT, CeiT and LeViT; it makes the teacher loss smaller than the formula of the papers by the
    number of classes."""

    cache: bool = True
    """Run the teacher once per image before training, if its outputs cannot change between epochs (no random
    augmentation, no mixing); otherwise it runs at every step."""


@dataclass(frozen=True)
class Save:
    """When training states are saved. The result of a run does not depend on it."""

    every_minutes: Annotated[float, Within(0, 10_000)] = 10.0
    """Interval within an epoch in minutes; 0: only at the end of epochs."""

    every_steps: Annotated[int, Within(1)] | None = None
    """Interval within an epoch in steps."""

    keep: Annotated[int, Within(2, 1000)] = 2
    """Number of newest states to keep."""


@dataclass(frozen=True)
class Recipe:
    """Training run."""

    __pydantic_config__ = STRICT

    name: RunName | None = None
    """Name of the run directory under `runs/`; None for MODEL-DATA."""

    model: str | None = option(None, "NAME")
    """Network: name from `weft models`, or any model of timm. None: chosen by the size and number of the images."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the network, such as ablation switches."""

    img_size: ImageSize | None = option(None, "N|HxW")
    """Input size in pixels: one side, or height x width. None: that of the network."""

    pretrained: bool = False
    """Start from the public weights of the network."""

    start_from: str | None = option(None, "CKPT", flag="--from")
    """Start from the weights of a run, model directory or checkpoint file. Positions are resized; a head for other
    classes is initialised at random."""

    head_init: Literal["random", "probe"] = "random"
    """probe: before the first epoch, fit the classifier to the features of the initial weights, by logistic regression
    with cross-validation. With `epochs: 0`, this is the whole training."""

    train_mode: Literal["train", "eval"] = "train"
    """eval: train with fixed BatchNorm statistics and without drop-path and dropout, as the released fine-tuning of
    DeiT, CeiT and LeViT does. The papers do not mention it; the author of DeiT calls it necessary for the reported
    numbers."""

    epochs: Annotated[int, Within(0, 100_000)] | None = option(None)
    """Number of epochs. None: chosen by the number of images. 0 only with `head_init: probe`."""

    steps: Annotated[int, Within(1)] | None = None
    """Instead of `epochs`: number of optimizer steps; the last epoch may be shorter."""

    batch_size: BatchSize | Literal["auto"] = option(64)
    """Images per batch, over all devices. auto: the largest that fits on a GPU, the fastest on a CPU (training
    only)."""

    accumulate: Annotated[int, Within(1, 65_536)] = 1
    """Gradient accumulation: number of micro-batches per step and device, to need less memory."""

    seed: Annotated[int, Within(0, 2**31 - 1)] = option(0)
    """Random seed of split (unless `data.seed` is set), initialisation, order and augmentation."""

    device: Device = option("auto")
    """Device; auto uses a CUDA GPU if there is one. mps is the GPU of a Mac, on which weft has not been tested yet."""

    precision: Precision = option("fp32")
    """Number format of matrix multiplications and convolutions; weights stay in fp32. auto: bf16 if a training step of
    the network is faster with it here, by a measurement of seconds; the run records the format. On a GPU, auto is the
    default of recipes that name none."""

    compile: bool = False
    """Compile the network with torch.compile: minutes at the start, faster steps."""

    grad_checkpointing: bool = False
    """Gradient checkpointing: recompute activations in the backward pass; less memory, a third more time."""

    sync_bn: bool = False
    """With several processes on GPUs: compute BatchNorm statistics over all of them. On a CPU it is refused."""

    workers: Workers = option("auto")
    """Data loader processes per device; 0 loads in the main process. auto: as many as the first batches show to be
    needed to load images in time; 0 where processes are not forked (macOS, Windows, Python 3.14). Results do not depend
    on it."""

    evaluate_every: Annotated[int, Within(1, 100_000)] = 1
    """Evaluate after every N epochs; the last epoch is always evaluated."""

    best: Literal["top1", "balanced", "loss"] = "top1"
    """Measure on the validation set that chooses the model of `best/`, and that `patience` counts. top1: accuracy.
    balanced: balanced accuracy (mean recall of the classes), for data with rare classes. loss: cross-entropy. A linear
    probe chooses its penalty by the loss; with balanced, every class counts the same in it."""

    patience: Annotated[int, Within(1, 100_000)] | None = None
    """Early stopping: stop after this many evaluations without an improvement. None: never."""

    deterministic: bool = False
    """On a GPU: use deterministic algorithms only, which is slower. On a CPU, training is always deterministic."""

    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    distill: Distill = field(default_factory=Distill)
    save: Save = field(default_factory=Save)

    environment: dict[str, Any] = field(default_factory=dict)
    """Record of the software and machine of the run that wrote the file; it is not read as a setting."""

    @property
    def split_seed(self) -> int:
        """Seed of the split."""
        return self.seed if self.data.seed is None else self.data.seed
