"""Load weights into a model: recognise their layout, check every name and shape, load all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from weft.checkpoints.files import read_contents, unwrap
from weft.checkpoints.layout import Renamed, convert
from weft.errors import CheckpointError, UsageError
from weft.models.base import Backbone
from weft.models.families import families, family_of
from weft.models.family import Family, resolve
from weft.models.layout import Layout, State

_UNTOUCHED = "Nothing was loaded."
_EXAMPLES = 3


@dataclass(frozen=True)
class LoadReport:
    """What was loaded.

    Attributes:
        source: whose layout the weights were in.
        tensors: number of tensors that went into the model.
        resized: names of positions that were fitted to the model's image size.
        dropped: names in the file that were left out: the head, when asked.
        part: key of the file's top level that the weights were under; '' for the top itself.
        others: keys of other state dicts in the file, such as an average.
    """

    source: str
    tensors: int
    resized: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    part: str = ""
    others: list[str] = field(default_factory=list)


def load_checkpoint(
    model: nn.Module,
    checkpoint: str | Path | Mapping[str, Tensor],
    *,
    head: Literal["keep", "drop"] = "keep",
    switches: Literal["check", "ignore"] = "check",
    which: str | None = None,
    import_foreign: bool = False,
) -> LoadReport:
    """Loads weights into a model; the model is as before if anything does not fit.

    Every public layout of CeiT, CvT and LeViT is recognised by its names. Positions learned for another image size are
    resized. Any other model takes weights under its own names.

    Args:
        model: one of ours, or any timm model.
        checkpoint: a file, or a state dict.
        head: 'keep' needs the head's weights to fit; 'drop' leaves them out and the model's own head as it is.
        switches: 'check' refuses weights of a network that computes otherwise than `model` was built to (another
            activation, say); 'ignore' loads them all the same.
        which: key of the state dict in the file, such as 'model_ema'.
        import_foreign: open a pickle that names unknown classes, with inert stand-ins for them.

    Raises:
        CheckpointError: the file is refused, or the weights do not fit.
        UsageError: `head` or `switches` has another value.
    """
    for name, value, offered in (("head", head, ("keep", "drop")), ("switches", switches, ("check", "ignore"))):
        if value not in offered:
            raise UsageError(f"{name} must be {' or '.join(map(repr, offered))}; got {value!r}.")
    part, others = "", []
    if isinstance(checkpoint, Mapping):
        theirs = _checked(checkpoint)
    else:
        theirs, part, others = read_contents(checkpoint, which=which, import_foreign=import_foreign)
    layout = recognise(theirs) if isinstance(model, Backbone) else None
    if layout is not None:
        _check_family(model, layout)
        if switches == "check":
            _check_switches(model, layout, theirs)
    renamed = convert(layout, theirs) if layout else Renamed(theirs, {name: name for name in theirs})

    state, origins, dropped = renamed.state, renamed.origins, []
    own = model.state_dict()
    if head == "drop":
        kept = {name: tensor for name, tensor in state.items() if not _is_head(model, name)}
        dropped = [origins[name] for name in state if name not in kept]
        state = kept | {name: tensor for name, tensor in own.items() if _is_head(model, name)}
    resized: list[str] = []
    if isinstance(model, Backbone):
        state, resized = model.resize_state_dict(state)
    # A count of batches says nothing about the network; files older than it have none.
    state = {name: own[name] for name in own if name.endswith("num_batches_tracked")} | state
    _check_fit(model, own, Renamed(state, origins), layout, theirs)
    model.load_state_dict(state)
    loaded = len(theirs) - len(dropped)
    return LoadReport(layout.name if layout else "the model's own names", loaded, resized, dropped, part, others)


def recognise(state: Mapping[str, Tensor]) -> Layout | None:
    """The layout of a state dict; None: not one of somebody else's."""
    return next((layout for layout in layouts() if layout.recognises(dict(state))), None)


def layouts() -> tuple[Layout, ...]:
    """Return all known layouts of other libraries."""
    return tuple(layout for family in families() for layout in family.all_layouts())


def _family_of_layout(layout: Layout) -> Family:
    return next(family for family in families() if layout in family.all_layouts())


def _built_values(model: nn.Module, layout: Layout) -> dict[str, Any]:
    """Return the constructor arguments of a built model that no tensor shows."""
    built_values = resolve(_family_of_layout(layout).built_values)
    return built_values(model) if built_values else {}


def to_weft(state: Mapping[str, Tensor]) -> State:
    """Convert a state dict of any known layout to weft's names and shapes; one under weft's own names is unchanged."""
    layout = recognise(state)
    return convert(layout, dict(state)).state if layout else dict(state)


def describe_model(model: nn.Module) -> str:
    """What to call a model in a message."""
    return getattr(model, "weft_name", "") or type(model).__name__


def _checked(state: Mapping[str, Any]) -> State:
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"A state dict must hold names and tensors; got {name!r}: {type(tensor).__name__}. {_UNTOUCHED}"
            )
    return unwrap(state)


def head_prefixes(model: nn.Module) -> list[str]:
    """Names of the modules that are a model's head, or heads."""
    get_classifier = getattr(model, "get_classifier", None)
    heads = get_classifier() if get_classifier else ()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return [name for name, module in model.named_modules() if any(module is head for head in heads)]


def _is_head(model: nn.Module, name: str) -> bool:
    return any(name.startswith(f"{prefix}.") for prefix in head_prefixes(model))


def _check_family(model: nn.Module, layout: Layout) -> None:
    family = _family_of_layout(layout)
    if family_of(model) is not family:
        raise CheckpointError(
            f"The weights are {layout.name}; they need a {family.name}, and this is {describe_model(model)}, a "
            f"{type(model).__name__}. Build a model of `weft models '{family.name.lower()}*'`. {_UNTOUCHED}"
        )


def _check_switches(model: nn.Module, layout: Layout, theirs: State) -> None:
    wanted, built = layout.switches(theirs), _built_values(model, layout)
    wrong = {name: value for name, value in wanted.items() if name in built and built[name] != value}
    if not wrong:
        return
    differences = ", ".join(f"{name}={value!r} (this model: {built[name]!r})" for name, value in wrong.items())
    raise CheckpointError(
        f"The weights are {layout.name}, which computes with {differences}. Build the model with "
        f"{_call(model, wanted)}, or pass switches='ignore' to load them all the same. {_UNTOUCHED}"
    )


def _call(model: nn.Module, switches: dict[str, Any]) -> str:
    arguments = "".join(f", {name}={value!r}" for name, value in switches.items())
    return f"weft.create_model({getattr(model, 'weft_name', 'NAME')!r}{arguments})"


def _check_fit(model: nn.Module, own: State, renamed: Renamed, layout: Layout | None, theirs: State) -> None:
    """Compares names, shapes and kinds of numbers, before anything is copied."""
    state, origins = renamed
    missing = [name for name in own if name not in state]
    unexpected = [origins.get(name, name) for name in state if name not in own]
    common = [name for name in own if name in state]
    reshaped = [name for name in common if own[name].shape != state[name].shape]
    retyped = [n for n in common if n not in reshaped and own[n].is_floating_point() != state[n].is_floating_point()]
    if not (missing or unexpected or reshaped or retyped):
        return
    shapes = [f"{name}: file {_shape(state[name])}, model {_shape(own[name])}" for name in reshaped]
    kinds = [f"{name}: file {_kind(state[name])}, model {_kind(own[name])}" for name in retyped]
    complaints = [
        _complaint("missing", missing),
        _complaint("unexpected", unexpected),
        _complaint("of different shape", shapes),
        _complaint("of different type", kinds),
    ]
    hint = _hint(model, missing, unexpected, reshaped, state, layout, theirs)
    raise CheckpointError(
        f"Checkpoint does not fit {describe_model(model)}: {', '.join(filter(None, complaints))}. {hint}{_UNTOUCHED}"
    )


def _complaint(what: str, examples: list[str]) -> str:
    if not examples:
        return ""
    more = ", ..." if len(examples) > _EXAMPLES else ""
    return f"{len(examples)} {what} ({', '.join(examples[:_EXAMPLES])}{more})"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _hint(
    model: nn.Module,
    missing: list[str],
    unexpected: list[str],
    reshaped: list[str],
    state: State,
    layout: Layout | None,
    theirs: State,
) -> str:
    """The way out, where there is one."""
    only_heads = [*missing, *reshaped] and all(_is_head(model, name) for name in [*missing, *reshaped])
    if reshaped and only_heads and not unexpected:
        classes = state[next(name for name in reshaped)].shape[0]
        return f"Pass num_classes={classes}, or head='drop'. "
    if only_heads and not unexpected and all(name.startswith("head_dist.") for name in missing):
        return "The file has one head: pass distilled=False. "
    if only_heads and not unexpected:
        return "The file has no head: pass head='drop'. "
    if not missing and not reshaped and all(name.startswith(("head", "classifier", "mlp_head")) for name in unexpected):
        return "The model has fewer heads: pass head='drop'. "
    if layout is None:
        return ""
    switches, checked = layout.switches(theirs), _built_values(model, layout)
    return f"Weights of {layout.name} need {_call(model, switches)}. " if set(switches) - set(checked) else ""
