"""Load weights into a model: recognise the layout, check every key and shape, load all tensors or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from weft.checkpoints.files import read_contents, unwrap
from weft.checkpoints.layout import RenamedState, convert
from weft.errors import CheckpointError, UsageError
from weft.models.base import Backbone
from weft.models.families import families, family_of
from weft.models.family import Family, resolve
from weft.models.layout import Layout, State

_NOTHING_LOADED = "Nothing was loaded."
_MAX_EXAMPLES = 3


@dataclass(frozen=True)
class LoadReport:
    """Result of loading weights.

    Attributes:
        source: description of the layout of the weights.
        tensors: number of tensors that were loaded.
        resized: keys of position embeddings that were resized to the image size of the model.
        dropped: keys in the file that were not loaded: those of the head, with head='drop'.
        part: top-level key of the state dict in the file; '' if the file is a state dict itself.
        others: top-level keys of other state dicts in the file, for example of averaged weights.
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
    """Load weights into a model. If a tensor is missing or has the wrong shape, the model is unchanged.

    Every public layout of CeiT, CvT and LeViT is recognised by its keys. Position embeddings for another image size are
    resized. For other models, the keys must be those of the model.

    Args:
        model: a model of weft or timm.
        checkpoint: a file, or a state dict.
        head: 'keep' loads the head; 'drop' does not load it, and leaves the head of the model unchanged.
        switches: 'check' refuses weights of a network that computes differently from `model`, for example with another
            activation; 'ignore' loads them.
        which: key of the state dict in the file, such as 'model_ema'.
        import_foreign: accept a pickle that names unknown classes; they become inert placeholders.

    Returns:
        What was loaded, resized and dropped.

    Raises:
        CheckpointError: the file is refused, or the weights do not match the model.
        UsageError: `head` or `switches` has another value.
    """
    for name, value, choices in (("head", head, ("keep", "drop")), ("switches", switches, ("check", "ignore"))):
        if value not in choices:
            raise UsageError(f"{name} must be {' or '.join(map(repr, choices))}; got {value!r}.")
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
    renamed = convert(layout, theirs) if layout else RenamedState(theirs, {name: name for name in theirs})

    state, origins, dropped = renamed.state, renamed.origins, []
    own = model.state_dict()
    if head == "drop":
        kept = {name: tensor for name, tensor in state.items() if not _is_head(model, name)}
        dropped = [origins[name] for name in state if name not in kept]
        state = kept | {name: tensor for name, tensor in own.items() if _is_head(model, name)}
    resized: list[str] = []
    if isinstance(model, Backbone):
        state, resized = model.resize_state_dict(state)
    # BatchNorm's batch counter does not affect inference; files of old versions of torch do not have it
    state = {name: own[name] for name in own if name.endswith("num_batches_tracked")} | state
    _check_match(model, own, RenamedState(state, origins), layout, theirs)
    model.load_state_dict(state)
    loaded = len(theirs) - len(dropped)
    return LoadReport(layout.name if layout else "the model's own names", loaded, resized, dropped, part, others)


def recognise(state: Mapping[str, Tensor]) -> Layout | None:
    """Return the layout of a state dict, or None if it is not that of another library."""
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
    """Return the name of a model for messages."""
    return getattr(model, "weft_name", "") or type(model).__name__


def _checked(state: Mapping[str, Any]) -> State:
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"A state dict must contain names and tensors; got {name!r}: {type(tensor).__name__}. {_NOTHING_LOADED}"
            )
    return unwrap(state)


def head_prefixes(model: nn.Module) -> list[str]:
    """Return the names of the modules that are the heads of a model."""
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
            f"The weights of {layout.name} need a {family.name}; the model is {describe_model(model)}, a "
            f"{type(model).__name__}. Build a model of `weft models '{family.name.lower()}*'`. {_NOTHING_LOADED}"
        )


def _check_switches(model: nn.Module, layout: Layout, theirs: State) -> None:
    wanted, built = layout.switches(theirs), _built_values(model, layout)
    wrong = {name: value for name, value in wanted.items() if name in built and built[name] != value}
    if not wrong:
        return
    differences = ", ".join(f"{name}={value!r} (this model: {built[name]!r})" for name, value in wrong.items())
    raise CheckpointError(
        f"The weights of {layout.name} need a model with {differences}. Build it with {_call(model, wanted)}, or pass"
        f" switches='ignore' to load the weights nevertheless. {_NOTHING_LOADED}"
    )


def _call(model: nn.Module, switches: dict[str, Any]) -> str:
    arguments = "".join(f", {name}={value!r}" for name, value in switches.items())
    return f"weft.create_model({getattr(model, 'weft_name', 'NAME')!r}{arguments})"


def _check_match(model: nn.Module, own: State, renamed: RenamedState, layout: Layout | None, theirs: State) -> None:
    """Compare keys, shapes and dtypes, before any tensor is copied."""
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
    differences = [
        _difference("missing", missing),
        _difference("unexpected", unexpected),
        _difference("of different shape", shapes),
        _difference("of different type", kinds),
    ]
    hint = _hint(model, missing, unexpected, reshaped, state, layout, theirs)
    raise CheckpointError(
        f"The checkpoint must match the model {describe_model(model)}: {', '.join(filter(None, differences))}."
        f" {hint}{_NOTHING_LOADED}"
    )


def _difference(what: str, examples: list[str]) -> str:
    if not examples:
        return ""
    more = ", ..." if len(examples) > _MAX_EXAMPLES else ""
    return f"{len(examples)} {what} ({', '.join(examples[:_MAX_EXAMPLES])}{more})"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


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
    """Return advice on how to load the checkpoint, if there is any."""
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
