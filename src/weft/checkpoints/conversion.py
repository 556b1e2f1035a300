"""Convert a third-party checkpoint to a weft model directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from weft.checkpoints.files import read_contents
from weft.checkpoints.layout import convert
from weft.checkpoints.load import (
    LoadReport,
    family_of_layout,
    find_prefix,
    given_prefix,
    head_prefixes,
    load_checkpoint,
    prefixes,
    recognise,
    to_weft,
    under,
)
from weft.checkpoints.model_dir import save_model_dir
from weft.checkpoints.source_folder import SourceMetadata, read_metadata, weights_in
from weft.errors import CheckpointError, UsageError
from weft.models.building import create_model
from weft.models.building import switches as switches_of
from weft.models.contract import preprocessing, resized
from weft.models.families import VARIANTS, families, family_of
from weft.models.layout import Layout, State


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        out: the model directory.
        model: name of the model.
        switches: constructor arguments that the weights require, and those that were given.
        report: what was loaded.
        label_names: class names that were next to the weights; None for none.
        files: names of the files next to the weights that were used.
    """

    out: Path
    model: str
    switches: dict[str, Any]
    report: LoadReport
    label_names: list[str] | None = None
    files: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary that `--json` prints."""
        return {
            "out": str(self.out),
            "model": self.model,
            "switches": self.switches,
            **vars(self.report),
            "files": self.files,
        }


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    head: Literal["keep", "drop"] = "keep",
    which: str | None = None,
    import_foreign: bool = False,
    prefix: str | None = None,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Conversion:
    """Read weights in any layout that `load_checkpoint` supports, and write a model directory.

    Args:
        source: the checkpoint file, or a folder with one. Class names and preprocessing next to it, as transformers,
            timm and weft write them, are kept.
        out: the model directory.
        model: name of the model; None to find weft's model that matches the weights.
        num_classes: number of classes of the head; None for that of the weights.
        img_size: input size in pixels; None for that of the model. Position embeddings are resized.
        head: 'drop' replaces the head by a new one with random weights.
        which, import_foreign, prefix: as in `load_checkpoint`.
        settings: constructor arguments, in addition to those that the layout requires.
        force: replace an existing model directory.

    Returns:
        The model that was written, and what was loaded into it.

    Raises:
        UsageError: no model or several models match the weights, or `out` exists.
        CheckpointError: the file is refused, or does not match the model.
    """
    out = Path(out)
    if out.exists() and not force:
        raise UsageError(f"The output directory must be new; {out} exists already. Pass --force or another path.")
    file = weights_in(Path(source))
    state, part, others = read_contents(file, which=which, import_foreign=import_foreign)
    if prefix is not None:
        prefix = given_prefix(state, prefix)
    elif model is None:
        prefix, model = _matching(state, settings or {}, img_size, source)
    else:
        prefix = find_prefix(create_model(model, device="meta"), state, head=head)
    weights = under(state, prefix)
    layout = recognise(weights)
    required = {k: v for k, v in (layout.switches(weights) if layout else {}).items() if v is not None}
    switches = {**required, **(settings or {})}
    converted = convert(layout, weights).state if layout else weights
    if model is None:
        model = find_model(converted, switches, img_size, source, layout)
    beside = read_metadata(file.parent)
    size = img_size if img_size is not None else _size_of(beside, model)
    if size is not None and model in VARIANTS:
        switches["img_size"] = size
    classes = num_classes if num_classes is not None else _classes_of(converted, model)
    network: Any = create_model(model, num_classes=classes, **_arguments_for(model, converted, switches))
    if size is not None and model not in VARIANTS:
        network = resized(network, size)
    # a setting that contradicts the layout is intended: the weights may have been trained with it
    contradicts = any(required.get(key, value) != value for key, value in (settings or {}).items())
    report = load_checkpoint(network, state, head=head, switches="ignore" if contradicts else "check", prefix=prefix)
    cfg = {key: value for key, value in beside.preprocessing.items() if key != "input_size"}
    network.pretrained_cfg = network.default_cfg = {**dict(network.pretrained_cfg), **cfg}
    names = beside.label_names if head == "keep" and len(beside.label_names or ()) == classes else None
    save_model_dir(network, out, label_names=names, force=force)
    return Conversion(out, model, switches, replace(report, part=part, others=others), names, beside.files)


def _size_of(beside: SourceMetadata, model: str) -> tuple[int, int] | None:
    """Return the size of the images next to the weights; None if it is that of the model."""
    size = tuple(beside.preprocessing.get("input_size", ())[1:])
    default = preprocessing(create_model(model, device="meta"))["input_size"][1:]
    return None if not size or size == tuple(default) else (size[0], size[1])


def _matching(state: State, settings: Mapping[str, Any], img_size: Any, source: str | Path) -> tuple[str, str]:
    """Return the only prefix under which weights match a model of weft, and the model.

    Raises:
        UsageError: none matches, or several do.
    """
    found: dict[str, str] = {}
    first: UsageError | None = None
    for prefix in prefixes(state, len(state) // 3):
        if any(prefix.startswith(outer) for outer in found):  # a part of a network that was found
            continue
        weights = under(state, prefix)
        try:
            layout = recognise(weights)
            required = {k: v for k, v in (layout.switches(weights) if layout else {}).items() if v is not None}
            found[prefix] = find_model(to_weft(weights), {**required, **settings}, img_size, source, layout)
        except UsageError as error:
            first = first or error
        except CheckpointError:  # the tensors do not fit together
            if not prefix:
                raise
    if not found:
        assert first is not None
        raise first
    if len(found) > 1:
        raise UsageError(
            f"{source} must have one set of weights; it has some under {' and '.join(map(repr, found))}. Choose one"
            " with prefix=NAME (--prefix NAME)."
        )
    return next(iter(found.items()))


def find_model(
    state: Mapping[str, Tensor],
    switches: Mapping[str, Any],
    img_size: Any = None,
    source: str | Path = "the file",
    layout: Layout | None = None,
) -> str:
    """Return the name of weft's only model that matches a state dict.

    Args:
        state: state dict under weft's keys.
        switches: constructor arguments that the weights require.
        img_size: requested input size; it decides between models that differ only in their position embeddings.
        source: name of the state dict in messages.
        layout: layout that the state dict was in; only models of its family match.

    Raises:
        UsageError: no model matches, or several.
    """
    matches: dict[str, bool] = {}
    for name, row in (family_of_layout(layout).variants if layout else VARIANTS).items():
        if not set(switches) <= set(switches_of(name)):
            continue
        values = _arguments_for(name, state, switches)
        try:
            network = create_model(name, num_classes=_classes_of(state), device="meta", **values)
        except (UsageError, TypeError, ValueError, RuntimeError):
            continue
        if _matches(network, state):
            same_size = all(state[key].shape == value.shape for key, value in network.state_dict().items())
            matches[name] = same_size if img_size is None else row.size == img_size
    candidates = [name for name, exact in matches.items() if exact] or list(matches)
    if len(candidates) != 1:
        matched = f"it matches {', '.join(candidates)}" if candidates else "it matches none"
        raise UsageError(
            f"Without --model, {source} must match exactly one model of weft; {matched}. Pass --model NAME (see `weft"
            " models`)."
        )
    return candidates[0]


def _matches(network: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Return whether keys and shapes match; position embeddings may be of another image size."""
    own = network.state_dict()
    required = {name for name in own if not name.endswith("num_batches_tracked")}
    if not required <= set(state) <= set(own):
        return False
    family = family_of(network)
    positions = family.position_keys if family else ()
    return all(own[name].shape == state[name].shape or name.endswith(positions) for name in required)


def _arguments_for(name: str, state: Mapping[str, Tensor], switches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the switches that a model supports as constructor arguments; one head if the weights have one."""
    if name not in VARIANTS:
        return dict(switches)
    known = switches_of(name)
    values = {key: value for key, value in switches.items() if key in known}
    if "distilled" in known and not any(key.startswith("head_dist.") for key in state):
        values.setdefault("distilled", False)
    return values


def _classes_of(state: Mapping[str, Tensor], model: str | None = None) -> int:
    """Return the number of classes of the head; 0 if there is none.

    Args:
        state: state dict under weft's keys, or those of a model of timm.
        model: name of the model; None for any model of weft.
    """
    if model is None or model in VARIANTS:
        heads = [name for family in families() for name in family.head_keys]
    else:  # a head can be several layers: the last one has the classes
        network = create_model(model, device="meta")
        prefixes_of_heads = tuple(f"{name}." for name in head_prefixes(network))
        heads = [name for name in network.state_dict() if name.startswith(prefixes_of_heads)][::-1]
    return next((len(state[name]) for name in heads if name in state and state[name].ndim), 0)
