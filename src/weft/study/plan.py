"""Plan of a study: a list of variants over a base recipe, read from YAML and validated as a whole.

title: What LeFF brings
claim: A convolution between the linear layers of the feed-forward brings two points.
source: CeiT, arXiv 2103.11816, section 4.4
scales:
  paper: {recipe: ceit_pretrain, data: imagenet}
  small: {recipe: small_images, data: cifar10, seeds: 3, set: {epochs: 10}}
variants: # the first is what the others are compared with, unless `against` names another
- {name: plain feed-forward, paper: 72.2, set: {model_args.leff_kernel: 0}}
- {name: 3x3, paper: 74.3, set: {model_args.leff_kernel: 3}}
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml

from weft.errors import UsageError, unknown
from weft.models.families import VARIANTS
from weft.models.registry import build_described
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import compose

Settings = Mapping[str, Any]
SCALES = ("small", "paper")


@dataclass(frozen=True)
class Scale:
    """How large a study is run: the paper's own training, or one that two cores finish in hours."""

    recipe: str | None
    """The base: a recipe that comes with weft."""

    data: str
    """What is learned from, unless the caller names something else."""

    seeds: int = 1
    """Runs of each variant, with seeds from 0."""

    set: dict[str, Any] = field(default_factory=dict)
    """Settings of all variants."""

    teacher: dict[str, Any] = field(default_factory=dict)
    """Settings of a run that comes first, whose best model teaches the others; none without."""


@dataclass(frozen=True)
class Variant:
    """One line of a study's table."""

    name: str
    paper: float | None = None
    """Top-1 in percent that the paper reports."""

    set: dict[str, Any] = field(default_factory=dict)
    """Settings at every scale."""

    small: dict[str, Any] = field(default_factory=dict)
    """Further settings at the small scale."""

    against: str | None = None
    """The variant that it is compared with; None for the first."""

    test_ratio: float | None = None
    """Side at which the trained model is measured, over that of its training. Variants that differ in nothing else
    share their runs."""

    line: str | None = None
    """Variants of one line are joined in the picture, over `at`."""

    at: float | None = None
    """Place on the axis `x` of the study."""

    scale: str | None = None
    """The one scale that it is run at; None for every one."""


@dataclass(frozen=True)
class Study:
    """What is compared, and what the paper found."""

    name: str
    title: str
    claim: str
    source: str
    scales: dict[str, Scale]
    variants: tuple[Variant, ...]
    x: str | None = None
    """What `at` of the variants counts, for a picture of lines."""

    def at_scale(self, scale: str) -> Study:
        """With the variants of one scale alone."""
        return dataclasses.replace(self, variants=tuple(v for v in self.variants if v.scale in (None, scale)))

    def settings(self, variant: Variant, scale: str) -> dict[str, Any]:
        """All that is laid over the base recipe."""
        more = variant.small if scale == "small" else {}
        return {**self.scales[scale].set, **variant.set, **more}

    def baseline(self, variant: Variant) -> Variant | None:
        """What a variant is compared with; None where that is itself."""
        names = [other.name for other in self.variants]
        base = self.variants[0 if variant.against is None else names.index(variant.against)]
        return None if base is variant else base


def study_names() -> list[str]:
    """The studies that come with weft."""
    files = (item.name for item in resources.files("weft.study").iterdir())
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def load_study(study: str | Path) -> Study:
    """Reads a study, and builds every network of it without memory, so that a mistake shows before anything runs.

    Args:
        study: name of one that comes with weft, or a path to a YAML file.

    Raises:
        UsageError: an unknown name, a file that is no study, an unknown setting or switch.
    """
    path = Path(study)
    is_file = isinstance(study, Path) or path.suffix in (".yaml", ".yml") or len(path.parts) != 1
    if not is_file and str(study) not in study_names():
        raise unknown("study", str(study), study_names(), "weft study, or give a path ending in .yaml")
    place = path if is_file else resources.files("weft.study") / f"{study}.yaml"
    try:
        text = place.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"A study must be a text file that can be read; {study}: {error}.") from error
    node = compose(text, str(study), what="a study")
    facts = None if node is None else yaml.constructor.SafeConstructor().construct_document(node)
    found = _study(path.stem, facts, str(study))
    for scale in found.scales:
        for variant in found.at_scale(scale).variants:
            check_variant(found, variant, scale)
    return found


def recipe_of(study: Study, variant: Variant, scale: str, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """The recipe of one variant.

    Raises:
        UsageError: an unknown setting, or a value that it cannot have; the variant is named.
    """
    try:
        return load_recipe(study.scales[scale].recipe, [*study.settings(variant, scale).items(), *overrides])
    except UsageError as error:
        raise UsageError(f"Study {study.name}, variant '{variant.name}' ({scale}): {error}") from error


def check_variant(study: Study, variant: Variant, scale: str, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """The recipe of one variant, after its network was built without memory.

    Raises:
        UsageError: as `recipe_of`, or a switch that the network does not have.
    """
    recipe = recipe_of(study, variant, scale, overrides)
    if recipe.model is None:
        raise UsageError(f"Study {study.name}, variant '{variant.name}' ({scale}) must name a model; got none.")
    arguments = dict(recipe.model_args)
    if recipe.img_size is not None and recipe.model in VARIANTS:
        arguments["img_size"] = recipe.img_size
    try:
        with torch.device("meta"):
            build_described(recipe.model, arguments, num_classes=10)
    except UsageError as error:
        raise UsageError(f"Study {study.name}, variant '{variant.name}' ({scale}): {error}") from error
    return recipe


def size_to_test(recipe: Recipe, variant: Variant) -> int | None:
    """Side in pixels at which a variant is measured, in steps of 8; None for that of its training."""
    if variant.test_ratio is None or variant.test_ratio == 1:
        return None
    side = recipe.img_size or (VARIANTS[str(recipe.model)].size if recipe.model in VARIANTS else None)
    if not isinstance(side, int):
        raise UsageError(f"Variant '{variant.name}' has a test_ratio and needs img_size, one number; got {side}.")
    return 8 * round(side * variant.test_ratio / 8)


def _study(name: str, facts: Any, origin: str) -> Study:
    facts = _known(facts, ("title", "claim", "source", "x", "scales", "variants"), origin)
    scales = _mapping(facts.get("scales"), f"{origin}: scales")
    if not scales or not set(scales) <= set(SCALES):
        raise UsageError(f"{origin}: scales must be some of {', '.join(SCALES)}; got {', '.join(scales) or 'none'}.")
    rows = facts.get("variants")
    if not isinstance(rows, list) or len(rows) < 2:
        raise UsageError(f"{origin}: variants must be a list of at least two; got {rows!r:.80}.")
    variants = tuple(_made(Variant, row, f"{origin}: variant {number}") for number, row in enumerate(rows, start=1))
    names = [variant.name for variant in variants]
    if len({slug(name) for name in names}) < len(names):
        raise UsageError(f"{origin}: every variant needs a name of its own; got {', '.join(map(str, names))}.")
    for variant in variants:
        if variant.against is not None and variant.against not in names:
            raise unknown(f"variant in 'against' of '{variant.name}'", variant.against, names, origin)
        if variant.scale is not None and variant.scale not in scales:
            raise unknown(f"scale of '{variant.name}'", variant.scale, tuple(scales), origin)
        base = variants[0 if variant.against is None else names.index(variant.against)]
        if base.scale not in (None, variant.scale):
            raise UsageError(f"{origin}: '{variant.name}' is compared with '{base.name}', which is not at every scale.")
    words = {key: _text(facts.get(key, ""), f"{origin}: {key}") for key in ("title", "claim", "source")}
    made = {scale: _made(Scale, row, f"{origin}: scale {scale}") for scale, row in scales.items()}
    return Study(name, **words, scales=made, variants=variants, x=facts.get("x"))


def _made(kind: Any, row: Any, where: str) -> Any:
    """A `Scale` or a `Variant` of a mapping, every value of its type."""
    fields = {item.name: str(item.type) for item in dataclasses.fields(kind)}
    row = _known(row, tuple(fields), where)
    required = [item.name for item in dataclasses.fields(kind) if item.default is item.default_factory]
    if missing := [key for key in required if key not in row]:
        raise UsageError(f"{where} must have {', '.join(required)}; {', '.join(missing)} is missing.")
    for key, value in row.items():
        hint = fields[key]
        if hint.startswith("dict"):
            row[key] = {str(name): inner for name, inner in _mapping(value, f"{where}: {key}").items()}
        elif "str" in hint:
            row[key] = _text(value, f"{where}: {key}")
        elif isinstance(value, bool) or not isinstance(value, (int, float) if "float" in hint else int) or value <= 0:
            raise UsageError(f"{where}: {key} must be a number above 0; got {value!r}.")
    return kind(**row)


def _known(row: Any, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    row = _mapping(row, where)
    for key in row:
        if key not in keys:
            raise unknown(f"key of {where}", str(key), keys, "docs/studies.md")
    return dict(row)


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must hold `key: value` lines; got {value!r:.80}.")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be text; got {value!r:.80}.")
    return value


def slug(name: str) -> str:
    """A name as a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
