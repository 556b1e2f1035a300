"""Load weights into a model: recognise the layout, check every key and shape, load all tensors or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from weft.checkpoints.files import read_contents
from weft.errors import CheckpointError, UsageError
from weft.models.base import Backbone
from weft.models.families import families, family_of
from weft.models.family import Family
from weft.models.layout import Layout, State

OWN = Layout("the model's own names", signature="")  # for which nothing changes
_NOTHING_LOADED = "Nothing was loaded."
_MAX_EXAMPLES = 3


@dataclass(frozen=True)
class LoadReport:
    """Result of loading or converting weights.

    Attributes:
        source: description of the layout of the weights.
        tensors: number of the model's tensors that were loaded.
        resized: keys of position embeddings that were resized to the image size of the model.
        dropped: keys in the file that were not loaded: those without the prefix, and with head='drop' the head.
        part: top-level key of the state dict in the file; '' if the file is a state dict itself.
        others: top-level keys of other state dicts in the file, for example of averaged weights.
        prefix: beginning of the keys that were loaded, such as 'module.'; '' for none.
        model: of a conversion, the name of the model.
        switches: of a conversion, the constructor arguments that the weights require, and those that were given.
        files: of a conversion, the names of the files next to the weights that were used.
        label_names: of a conversion, the class names in these files; None for none.
    """

    source: str
    tensors: int
    resized: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    part: str = ""
    others: list[str] = field(default_factory=list)
    prefix: str = ""
    model: str = ""
    switches: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    label_names: list[str] | None = None


def load_checkpoint(
    model: nn.Module,
    checkpoint: str | Path | Mapping[str, Tensor],
    *,
    head: Literal["keep", "drop"] = "keep",
    switches: Literal["check", "ignore"] = "check",
    state_dict: str | None = None,
    import_foreign: bool = False,
    prefix: str | None = None,
) -> LoadReport:
    """Load weights into a model. If a tensor is missing or has the wrong shape, the model is unchanged.

    Every public layout of CeiT, CvT and LeViT is recognised by its keys. Position embeddings for another image size are
    resized. For other models, the keys must be those of the model. A wrapper, such as a module of Lightning, adds a
    prefix to them, and may have tensors of its own, such as weights of a loss, which are not loaded.

    Args:
        model: a model of weft or timm.
        checkpoint: a file, or a state dict.
        head: 'keep' loads the head; 'drop' does not load it, and leaves the head of the model unchanged.
        switches: 'check' refuses weights of a network that computes differently from `model`, for example with another
            activation; 'ignore' loads them.
        state_dict: key of the state dict in the file, such as 'model_ema'.
        import_foreign: accept a pickle that names unknown classes; they become inert placeholders.
        prefix: beginning of the keys to load, such as 'net'; None for that under which all keys of the model are.

    Returns:
        What was loaded, resized and dropped.

    Raises:
        CheckpointError: the file is refused, or the weights do not match the model, or under several prefixes.
        UsageError: `head` or `switches` has another value.
    """
    for name, value, choices in (("head", head, ("keep", "drop")), ("switches", switches, ("check", "ignore"))):
        if value not in choices:
            raise UsageError(f"{name} must be {' or '.join(map(repr, choices))}; got {value!r}.")
    part, others = "", []
    if isinstance(checkpoint, Mapping):
        theirs = _checked(checkpoint)
    else:
        theirs, part, others = read_contents(checkpoint, state_dict=state_dict, import_foreign=import_foreign)
    prefix = find_prefix(model, theirs, head=head) if prefix is None else given_prefix(theirs, prefix)
    outside = [name for name in theirs if not name.startswith(prefix)]
    theirs = under(theirs, prefix)
    layout = _layout_for(model, theirs)
    needs = _checked_switches(model, layout, theirs, switches)
    state, origins = layout.convert(theirs)

    own, heads = model.state_dict(), head_prefixes(model) if head == "drop" else ()
    origins = {name: prefix + origin for name, origin in origins.items()}
    dropped = [*outside, *(origins[name] for name in state if name.startswith(heads))]
    state = {name: tensor for name, tensor in state.items() if not name.startswith(heads)}
    num_loaded = len(state)
    resized: list[str] = []
    if isinstance(model, Backbone):
        state, resized = model.resize_state_dict(state)
    # BatchNorm's batch counter does not affect inference; files of old versions of torch do not have it
    unchanged = {name: own[name] for name in own if name.startswith(heads) or name.endswith("num_batches_tracked")}
    state = unchanged | state
    _check_match(model, state, origins, needs)
    model.load_state_dict(state)
    return LoadReport(layout.name, num_loaded, resized, dropped, part, others, prefix)


def find_prefix(model: nn.Module, state: State, *, head: Literal["keep", "drop"] = "keep") -> str:
    """Return the prefix of a state dict under which all keys of a model are; the best one if some are missing."""
    left_out = head_prefixes(model) if head == "drop" else ()
    names = [name for name in model.state_dict() if not name.endswith("num_batches_tracked")]
    wanted = [name for name in names if not name.startswith(left_out)]
    missing: dict[str, int] = {}
    for prefix in prefixes(state, len(wanted) // 3):
        try:
            part = to_weft(under(state, prefix)) if isinstance(model, Backbone) else under(state, prefix)
        except CheckpointError:  # of another layout
            part = {}
        missing[prefix] = sum(name not in part for name in wanted)
    complete = [prefix for prefix, count in missing.items() if not count and wanted]
    if len(complete) > 1:
        raise CheckpointError(
            f"The checkpoint must have one set of weights of {_name(model)}; it has them under"
            f" {' and '.join(map(repr, complete[:_MAX_EXAMPLES]))}. Choose one with prefix=NAME (--prefix NAME)."
            f" {_NOTHING_LOADED}"
        )
    return min(missing, key=lambda prefix: missing[prefix])


def given_prefix(state: State, prefix: str) -> str:
    """Return a prefix that was asked for, as the keys of a state dict have it."""
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""
    if not any(name.startswith(prefix) for name in state):
        available = ", ".join(repr(name.removesuffix(".")) for name in prefixes(state, 1) if name.count(".") == 1)
        raise CheckpointError(
            f"prefix must be the beginning of keys of the checkpoint; got {prefix.removesuffix('.')!r}. It has"
            f" {available[:200] or 'none'}. {_NOTHING_LOADED}"
        )
    return prefix


def prefixes(state: State, least: int) -> list[str]:
    """Return '' and the beginnings, up to a dot, that at least `least` keys share, the shortest first."""
    counts = Counter(name[: i + 1] for name in state for i, letter in enumerate(name) if letter == ".")
    return ["", *sorted((prefix for prefix, count in counts.items() if count >= least), key=len)]


def under(state: State, prefix: str) -> State:
    """Return the tensors whose keys begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def recognise(state: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a state dict; `OWN` if it is not that of another library."""
    return next((layout for layout in layouts() if layout.recognises(dict(state))), OWN)


def layouts() -> tuple[Layout, ...]:
    """Return all known layouts of other libraries."""
    return tuple(layout for family in families() for layout in family.code("weights", "LAYOUTS", ()))


def family_of_layout(layout: Layout) -> Family:
    """Return the family whose networks have weights in this layout."""
    return next(family for family in families() if layout in family.code("weights", "LAYOUTS", ()))


def to_weft(state: Mapping[str, Tensor]) -> State:
    """Convert a state dict of any known layout to weft's names and shapes; one under weft's own names is unchanged."""
    return recognise(state).convert(dict(state))[0]


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings, up to a dot, of the keys of the heads of a model."""
    get_classifier = getattr(model, "get_classifier", None)
    heads = get_classifier() if get_classifier else ()
    heads = heads if isinstance(heads, tuple) else (heads,)
    return tuple(f"{name}." for name, module in model.named_modules() if any(module is head for head in heads))


def _checked(state: Mapping[str, Any]) -> State:
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"A state dict must contain names and tensors; got {name!r}: {type(tensor).__name__}. {_NOTHING_LOADED}"
            )
    return dict(state)


def _name(model: nn.Module) -> str:
    return getattr(model, "weft_name", "") or type(model).__name__


def _layout_for(model: nn.Module, theirs: State) -> Layout:
    """Return the layout of weights for this model."""
    layout = recognise(theirs) if isinstance(model, Backbone) else OWN
    if layout is OWN or (family := family_of_layout(layout)) is family_of(model):
        return layout
    if model.state_dict().keys() <= theirs.keys():  # some networks share names with a layout of another family
        return OWN
    raise CheckpointError(
        f"The weights of {layout.name} need a {family.name}; the model is {_name(model)}, a {type(model).__name__}."
        f" Build one of its models, such as {next(iter(family.variants))}. {_NOTHING_LOADED}"
    )


def _checked_switches(model: Any, layout: Layout, theirs: State, switches: Literal["check", "ignore"]) -> str:
    """Check what no tensor shows of a network; return the call that builds one for all that tensors show, if any."""
    wanted, built = layout.switches(theirs), getattr(model, "arguments", {})
    known = [name for name in layout.hidden if name in wanted and name in built]  # a subclass may have other arguments
    wrong = {name: wanted[name] for name in known if built[name] != wanted[name]}
    arguments = "".join(f", {name}={value!r}" for name, value in wanted.items())
    call = f"weft.create_model({getattr(model, 'weft_name', 'NAME')!r}{arguments})"
    if wrong and switches == "check":
        differences = ", ".join(f"{name}={value!r} (this model: {built[name]!r})" for name, value in wrong.items())
        raise CheckpointError(
            f"The weights of {layout.name} need a model with {differences}. Build it with {call}, or pass"
            f" switches='ignore' to load the weights nevertheless. {_NOTHING_LOADED}"
        )
    return f"Weights of {layout.name} need {call}. " if set(wanted) - set(layout.hidden) else ""


def _check_match(model: nn.Module, state: State, origins: Mapping[str, str], needs: str) -> None:
    """Compare keys, shapes and dtypes, before any tensor is copied; `needs` is advice for weights of their layout."""
    own, heads = model.state_dict(), head_prefixes(model)
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    common = [name for name in own if name in state]
    reshaped = [name for name in common if own[name].shape != state[name].shape]
    retyped = [n for n in common if n not in reshaped and own[n].is_floating_point() != state[n].is_floating_point()]
    if not (missing or unexpected or reshaped or retyped):
        return
    kinds = {
        "missing": missing,
        "unexpected": [origins[name] for name in unexpected],
        "of different shape": [f"{n}: file {_shape(state[n])}, model {_shape(own[n])}" for n in reshaped],
        "of different type": [f"{n}: file {_dtype(state[n])}, model {_dtype(own[n])}" for n in retyped],
    }
    differences = ", ".join(
        f"{len(names)} {kind} ({', '.join(names[:_MAX_EXAMPLES])}{', ...' if len(names) > _MAX_EXAMPLES else ''})"
        for kind, names in kinds.items()
        if names
    )
    different, names_of_heads = (*missing, *reshaped), ("head", "classifier", "mlp_head", *heads)
    if retyped:
        hint = ""
    elif different and not unexpected and all(name.startswith(heads) for name in different):
        if reshaped:
            hint = f"Pass num_classes={state[reshaped[0]].shape[0]}, or head='drop'. "
        elif all(name.startswith("head_dist.") for name in missing):
            hint = "The file has one head: pass distilled=False. "
        else:
            hint = "The file has no head: pass head='drop'. "
    elif not different and all(name.startswith(names_of_heads) for name in unexpected):
        hint = "The model has fewer heads: pass head='drop'. "
    else:
        hint = needs
    raise CheckpointError(f"The checkpoint must match the model {_name(model)}: {differences}. {hint}{_NOTHING_LOADED}")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
