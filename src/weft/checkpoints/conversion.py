"""Convert a third-party checkpoint to a weft model directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from weft.checkpoints.files import read_contents
from weft.checkpoints.layout import convert
from weft.checkpoints.load import LoadReport, load_checkpoint, recognise
from weft.checkpoints.model_dir import save_model_dir
from weft.errors import UsageError
from weft.models.families import VARIANTS, families, family_of
from weft.models.registry import create_model
from weft.models.registry import switches as switches_of


@dataclass(frozen=True)
class Conversion:
    """What was made.

    Attributes:
        out: the model directory.
        model: name of the network.
        switches: constructor values that the layout of the weights asked for.
        report: what was loaded.
    """

    out: Path
    model: str
    switches: dict[str, Any]
    report: LoadReport

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {"out": str(self.out), "model": self.model, "switches": self.switches, **vars(self.report)}


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
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Conversion:
    """Reads weights in any layout that `load_checkpoint` knows and writes a model directory.

    Args:
        source: the file.
        out: the model directory.
        model: name of the network; None: the one of ours that the weights fit.
        num_classes: width of the head; None: that of the weights.
        img_size: pixels; None: the network's own. Positions are resized.
        head: 'drop' leaves the head of the weights out and writes a fresh one.
        which, import_foreign: as in `load_checkpoint`.
        settings: constructor values beside those that the layout asks for.
        force: take the place of a model directory that is there.

    Raises:
        UsageError: no network, or more than one, fits; or `out` is taken.
        CheckpointError: the file is refused, or does not fit.
    """
    out = Path(out)
    if out.exists() and not force:
        raise UsageError(f"A model directory must be new; {out} is there already. Pass --force or another path.")
    state, part, others = read_contents(source, which=which, import_foreign=import_foreign)
    layout = recognise(state)
    asked = {k: v for k, v in (layout.switches(state) if layout else {}).items() if v is not None}
    switches = {**asked, **(settings or {})}
    ours = convert(layout, state).state if layout else state
    classes = num_classes if num_classes is not None else _classes_of(ours)
    if model is None:
        model = guess_model(ours, switches, img_size, source)
    if img_size is not None:
        switches["img_size"] = img_size
    network = create_model(model, num_classes=classes, **_fitting(model, ours, switches))
    # A value that was given against the layout's own is meant: the weights may have been trained with it.
    against = any(asked.get(key, value) != value for key, value in (settings or {}).items())
    report = load_checkpoint(network, state, head=head, switches="ignore" if against else "check")
    save_model_dir(network, out, force=force)
    return Conversion(out, model, switches, replace(report, part=part, others=others))


def guess_model(
    state: Mapping[str, Tensor], switches: Mapping[str, Any], img_size: Any = None, source: str | Path = "the file"
) -> str:
    """The one network of ours that a state dict under our names fits.

    Args:
        state: our names.
        switches: constructor values that the network needs.
        img_size: size that was asked for: it decides between networks that differ in positions alone.
        source: what to call the state in a message.

    Raises:
        UsageError: none fits, or several.
    """
    fits: dict[str, bool] = {}
    for name, row in VARIANTS.items():
        if not set(switches) <= set(switches_of(name)):
            continue
        values = _fitting(name, state, switches)
        try:
            network = create_model(name, num_classes=_classes_of(state), device="meta", **values)
        except (UsageError, TypeError, ValueError, RuntimeError):
            continue
        if _fits(network, state):
            same_size = all(state[key].shape == value.shape for key, value in network.state_dict().items())
            fits[name] = same_size if img_size is None else row.size == img_size
    candidates = [name for name, exact in fits.items() if exact] or list(fits)
    if len(candidates) != 1:
        found = f"it fits {', '.join(candidates)}" if candidates else "it fits none of them"
        raise UsageError(
            f"{source} must fit exactly one model for its name to be guessed; {found}."
            " Pass --model NAME; all names: weft models."
        )
    return candidates[0]


def _fits(network: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether names and shapes agree; positions may belong to another image size."""
    own = network.state_dict()
    learned = {name for name in own if not name.endswith("num_batches_tracked")}
    if not learned <= set(state) <= set(own):
        return False
    family = family_of(network)
    positions = family.position_keys if family else ()
    return all(own[name].shape == state[name].shape or name.endswith(positions) for name in learned)


def _fitting(name: str, state: Mapping[str, Tensor], switches: Mapping[str, Any]) -> dict[str, Any]:
    """The switches that this network has; and one head where the weights have one."""
    if name not in VARIANTS:
        return dict(switches)
    known = switches_of(name)
    values = {key: value for key, value in switches.items() if key in known}
    if "distilled" in known and not any(key.startswith("head_dist.") for key in state):
        values.setdefault("distilled", False)
    return values


def _classes_of(state: Mapping[str, Tensor]) -> int:
    """Width of the head; 0 where there is none."""
    heads = (name for family in families() for name in family.head_keys)
    return next((state[name].shape[0] for name in heads if name in state), 0)
