"""Model directories: weights and everything needed to use them, readable by timm's `local-dir:`.

model.safetensors   the state dict
config.json         architecture, constructor values, classes, preprocessing, the sha256 of the weights
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import timm
from pydantic import Field, with_config
from safetensors.torch import save
from timm.models._hub import save_config_for_hf
from torch import nn
from typing_extensions import TypedDict

from weft.checkpoints.files import read_state_dict
from weft.checkpoints.hub_dir import PREFIX, fetched
from weft.checkpoints.load import load_checkpoint
from weft.durable import flush_file, flush_folder, sha256_of
from weft.errors import CheckpointError, StorageError, UsageError, nearest
from weft.models.families import VARIANTS, plugin_of
from weft.models.registry import build_described, create_model
from weft.reading import read_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PREPROCESSING = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


Size = Annotated[int, Field(ge=1, le=65536)]
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1e6)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@with_config(extra="allow")
class Preprocessing(TypedDict, total=False):
    """How images are prepared, in timm's words."""

    input_size: tuple[Annotated[int, Field(ge=1, le=64)], Size, Size]
    mean: Annotated[list[Finite], Field(min_length=1, max_length=64)]
    std: Annotated[list[Positive], Field(min_length=1, max_length=64)]
    interpolation: Literal["bicubic", "bilinear", "nearest", "lanczos", "random"]
    crop_pct: Annotated[float, Field(gt=0, le=10)]
    crop_mode: Literal["center", "squash", "border"]
    label_names: list[str]


@with_config(extra="allow")
class Export(TypedDict):
    """What an export is: see `weft.deploy.exporting`."""

    version: int
    format: str
    precision: str
    input: tuple[Annotated[int, Field(ge=1, le=64)], Size, Size]
    sha256: dict[str, Sha256]
    weights_sha256: NotRequired[Sha256]


@with_config(extra="allow")
class ModelConfig(TypedDict):
    """config.json, as timm writes it and weft adds to it."""

    architecture: str
    plugin: NotRequired[str]
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    pretrained_cfg: NotRequired[Preprocessing]
    model_args: NotRequired[dict[str, Any]]
    label_names: NotRequired[list[str] | None]
    weights_sha256: NotRequired[Sha256]
    artefact: NotRequired[Export]


def save_model_dir(
    model: nn.Module, path: str | Path, *, label_names: Sequence[str] | None = None, force: bool = False
) -> Path:
    """Writes a model directory; it is whole, or not there.

    Args:
        model: one that `weft.create_model` built.
        path: the directory.
        label_names: one name per class, in the order of the logits.
        force: take the place of a model directory that is there.

    Raises:
        UsageError: `path` is taken, or the names do not fit the classes.
        StorageError: the disk did not take it.
    """
    if getattr(model, "is_folded", False):
        raise UsageError(
            f"{path} must get a model as it was trained; a folded one is for answering. Save the original."
        )
    path = Path(path)
    with new_directory(path, (WEIGHTS, CONFIG), force=force) as beside:
        weights = _serialized(model)
        (beside / WEIGHTS).write_bytes(weights)
        config = describe(model, beside, label_names, {"weights_sha256": hashlib.sha256(weights).hexdigest()})
        _check_rebuilds(model, config)
        (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return path


def weights_sha256(model: nn.Module) -> str:
    """What `config.json` of the model's directory says of its weights; two models of one value are the same."""
    return hashlib.sha256(_serialized(model)).hexdigest()


def _serialized(model: nn.Module) -> bytes:
    return save({name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()})


@contextlib.contextmanager
def new_directory(path: Path, contents: Sequence[str], *, force: bool) -> Iterator[Path]:
    """A directory to fill, which takes its place when all went well, and is gone when something did not.

    Args:
        path: its place.
        contents: names that a directory in that place may hold if it is to be replaced.
        force: take the place of one that is there.

    Raises:
        UsageError: `path` is taken.
        StorageError: the disk did not take it.
    """
    _check_place(path, contents, force)
    beside, before = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for file in beside.iterdir():
            flush_file(file)
        _swap(beside, path, before)
    except OSError as err:
        raise StorageError(
            f"{path} must be writable; {err.strerror or err}. Free some space or choose another."
        ) from err
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _check_place(path: Path, contents: Sequence[str], force: bool) -> None:
    """`path` is free, or holds a model directory and nothing else that could be lost."""
    if not path.exists():
        return
    if not force:
        raise UsageError(f"A model directory must be new; {path} is there already. Pass --force or another path.")
    if not path.is_dir():
        raise UsageError(f"force replaces a model directory and nothing else; {path} is a file.")
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in contents)
    if foreign:
        raise UsageError(f"force replaces a model directory and nothing else; {path} also holds {foreign[0]!r}.")


def _swap(beside: Path, path: Path, before: Path) -> None:
    """Puts a finished directory in its place; what was there goes once the new one stands, or comes back."""
    if path.exists():
        os.replace(path, before)
    try:
        os.replace(beside, path)
    except OSError:
        if before.exists():
            os.replace(before, path)
        raise
    flush_folder(path.parent)
    shutil.rmtree(before, ignore_errors=True)


def _check_rebuilds(model: nn.Module, config: dict[str, Any]) -> None:
    """A network that was changed after it was built (pruned, folded ...) cannot be described by its name."""
    name = config["architecture"].removeprefix("weft_")
    again = create_model(name, device="meta", **arguments_of(config))
    want, have = ({n: t.shape for n, t in m.state_dict().items()} for m in (again, model))
    if want != have:
        changed = sorted(set(want.items()) ^ set(have.items()))[0][0]
        raise UsageError(
            f"A model directory must be able to build its model again; this {name} has been changed since it was built"
            f" ({changed}). Build it with create_model as it should be, and load the weights into it."
        )


def model_dir(run: str | Path) -> Path:
    """The model directory that a run stands for: its best one, or itself; of `hf-hub:OWNER/NAME`, one fetched.

    Raises:
        CheckpointError: neither is there.
    """
    if str(run).startswith(PREFIX):
        return fetched(str(run), (WEIGHTS, CONFIG))
    for path in (Path(run) / "best", Path(run)):
        if (path / CONFIG).is_file():
            return path
    raise CheckpointError(
        f"A run directory (with best/) or a model directory (with config.json) is needed; {run} is neither."
        " Make one with weft train or weft convert."
    )


def load_model_dir(path: str | Path) -> tuple[Any, list[str] | None]:
    """The model of a directory, in evaluation mode, and the names of its classes if it has any.

    Raises:
        CheckpointError: something is missing, damaged, or names what does not exist.
    """
    path = Path(path)
    config = read_config(path)
    if "artefact" in config:
        raise CheckpointError(
            f"{path} must hold weights to go on with; it is an export, for answering."
            " Take the run or model directory that it was made from; weft predict and evaluate take the export, too."
        )
    name = config["architecture"].removeprefix("weft_")
    if name not in VARIANTS and not timm.is_model(name):
        if plugin := config.get("plugin"):
            raise CheckpointError(
                f"{path} needs the plugin {plugin}, which has the model {name}; it is not loaded. Pass --plugin FILE"
                " (in Python: weft.load_plugin), if you trust the file: it is run."
            )
        likely = ", ".join(nearest(name, VARIANTS))
        raise CheckpointError(f"{path / CONFIG} must name a model that exists; got {name!r}. Nearest: {likely}.")
    weights = path / WEIGHTS
    expected = config.get("weights_sha256")
    if expected is not None and weights.is_file():
        found = sha256_of(weights)
        if found != expected:
            raise CheckpointError(
                f"{weights} must have the sha256 that {CONFIG} states, {expected[:12]}...; got {found[:12]}..."
                " The file is damaged or not the one that was saved."
            )
    state = read_state_dict(weights)
    cfg = config["pretrained_cfg"]
    try:
        model: Any = build_described(name, config["model_args"], **more_arguments(config))
    except UsageError as err:
        raise CheckpointError(f"{path / CONFIG} does not describe a model: {err}") from err
    load_checkpoint(model, state, switches="ignore")
    model.pretrained_cfg = model.default_cfg = {
        **dict(model.pretrained_cfg),
        **{key: cfg[key] for key in PREPROCESSING if key in cfg},
        "num_classes": config["num_classes"],
    }
    return model.eval(), config.get("label_names")


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    """What `create_model` needs to build the model of a config again."""
    return {**config["model_args"], **more_arguments(config)}


def more_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """What it needs beside the constructor values."""
    arguments = {"num_classes": config["num_classes"]}
    if "input_size" in config["pretrained_cfg"]:
        arguments["in_chans"] = config["pretrained_cfg"]["input_size"][0]
    return arguments


def describe(model: Any, folder: Path, label_names: Sequence[str] | None, extra: dict[str, Any]) -> dict[str, Any]:
    """What timm writes about a model, with the constructor values as `create_model` was given them.

    Raises:
        UsageError: the names do not fit the classes.
    """
    names = checked_names(label_names, getattr(model, "num_classes", None))
    plugin = plugin_of(model)
    extra = ({"label_names": names} if names else {}) | ({"plugin": plugin} if plugin else {}) | extra
    file = folder / CONFIG
    may_have_changed = ("num_classes", "in_chans", "global_pool")  # timm looks at the model itself for these
    given = {k: v for k, v in getattr(model, "model_args", {}).items() if k not in may_have_changed}
    save_config_for_hf(model, str(file), model_config=dict(extra), model_args=given)
    config = json.loads(file.read_text())
    not_switches = ("num_classes", "in_chans", "features_only", "cache_dir")
    config["model_args"] = {k: v for k, v in config.get("model_args", {}).items() if k not in not_switches}
    if len(getattr(model, "pretrained_cfg", {})):
        config["pretrained_cfg"] |= {k: model.pretrained_cfg[k] for k in PREPROCESSING if k in model.pretrained_cfg}
    return config


def read_config(path: Path) -> dict[str, Any]:
    """config.json, with everything in it of the kind that it must be."""
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"A model directory must hold {CONFIG} and {WEIGHTS}; {path} has no {CONFIG}.")
    config: dict[str, Any] = {"pretrained_cfg": {}, "model_args": {}, **read_json(file, ModelConfig)}
    config["label_names"] = config.get("label_names") or config["pretrained_cfg"].get("label_names")
    try:
        checked_names(config["label_names"], config["num_classes"])
    except UsageError as err:
        raise CheckpointError(f"{file}: {err}") from err
    return config


_CONTROL = ("Cc", "Zl", "Zp")  # controls, line and paragraph separators
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they reorder the text that follows


def checked_names(names: Any, num_classes: int | None = None, what: str = "label_names") -> list[str] | None:
    """Class names as a list, all different and fit to be shown.

    Args:
        names: one text per class; None for none.
        num_classes: how many there must be; None for any number.
        what: what the message calls them.

    Raises:
        UsageError: they are not that.
    """
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{what} must be a list of texts; got {names!r}.")
    names = list(names)
    if num_classes is not None and len(names) != num_classes:
        raise UsageError(f"{what} must have one name per class, {num_classes}; got {len(names)}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{what} must differ from each other; {twice!r} comes twice.")
    for name in names:
        if any(unicodedata.category(letter) in _CONTROL or letter in _DIRECTIONS for letter in name):
            raise UsageError(f"{what} must hold no control characters; got {name!r}.")
    return names
