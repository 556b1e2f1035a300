"""Plan of a study: variants over a base recipe, read from YAML and validated as a whole.

title: Effect of LeFF
claim: A convolution between the linear layers of the feed-forward adds two points.
source: CeiT, arXiv 2103.11816, section 4.4
scales:
  paper: {recipe: ceit_pretrain, data: imagenet}
  small: {recipe: small_images, data: cifar10, seeds: 3, set: {epochs: 10}}
variants: # the others are compared with the first, unless `against` names another
- {name: plain feed-forward, paper: 72.2, set: {model_args.leff_kernel: 0}}
- {name: 3x3, paper: 74.3, set: {model_args.leff_kernel: 3}}

A setting `run:NAME` is the best model of another variant, which is trained first, with the same seed:
`start_from: run:plain feed-forward`, or `distill.teacher: run:teacher`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from weft.errors import UsageError, unknown
from weft.models.families import VARIANTS
from weft.recipes import Recipe, load_recipe
from weft.recipes.fields import STRICT, Within
from weft.recipes.rules import check_rules
from weft.recipes.schema import Data
from weft.recipes.yaml_reader import Document, untyped
from weft.study.jobs import REFERENCE, is_reference
from weft.system import file_name
from weft.text import reason_of

Settings = Mapping[str, Any]
SCALES = ("small", "paper")
Values = Annotated[dict[str, Any], BeforeValidator(lambda values: {} if values is None else untyped(values))]
Positive = Annotated[float, Within(0, above=True)]


@dataclass(frozen=True)
class Scale:
    """Size of a study: the training of the paper, or one that two CPU cores finish in hours."""

    recipe: str | None
    """Base recipe: one of weft; null for the defaults."""

    data: str
    """Dataset, unless the caller names another."""

    seeds: Annotated[int, Within(1)] = 1
    """Number of runs per variant, with seeds from 0."""

    set: Values = field(default_factory=dict)
    """Settings of all variants."""


@dataclass(frozen=True)
class StudyVariant:
    """One row of a study's table."""

    name: str
    paper: Positive | None = None
    """Top-1 accuracy in percent that the paper reports."""

    set: Values = field(default_factory=dict)
    """Settings at every scale."""

    small: Values = field(default_factory=dict)
    """More settings at the small scale."""

    against: str | None = None
    """Variant that this one is compared with; null for the first."""

    test_ratio: Positive | None = None
    """Ratio of the evaluation size to the training size. Variants that differ only in it share their runs."""

    line: str | None = None
    """Name of a line in the figure; its variants are connected, over `at`."""

    at: Positive | None = None
    """Position on the axis `x` of the study."""

    scale: str | None = None
    """The only scale at which the variant runs; null for all."""

    recipe: Values = field(default_factory=dict)
    """Base recipe by scale, where it is not that of the scale."""

    data: str | None = None
    """Dataset; null for that of the scale."""

    seeds: Annotated[int, Within(1)] | None = None
    """Largest number of runs, such as 1 for a teacher; null for that of the scale."""


@dataclass(frozen=True)
class Study:
    """Variants to compare, with the results of the paper."""

    __pydantic_config__ = STRICT

    name: str
    title: str
    claim: str
    source: str
    scales: dict[str, Scale]
    variants: tuple[StudyVariant, ...]
    x: str | None = None
    """Label of the axis that `at` of the variants belongs to, for the figure of lines."""

    def at_scale(self, scale: str) -> Study:
        """Return the study with the variants of one scale only."""
        return dataclasses.replace(self, variants=tuple(v for v in self.variants if v.scale in (None, scale)))

    def settings(self, variant: StudyVariant, scale: str) -> dict[str, Any]:
        """Return the settings of a variant that override the base recipe."""
        more = variant.small if scale == "small" else {}
        return {**self.scales[scale].set, **variant.set, **more}

    def recipe(self, variant: StudyVariant, scale: str) -> str | None:
        """Return the base recipe of a variant."""
        return variant.recipe.get(scale, self.scales[scale].recipe)

    def data(self, variant: StudyVariant, scale: str) -> str:
        """Return the dataset of a variant."""
        return variant.data or self.scales[scale].data

    def run_key(self, variant: StudyVariant, scale: str) -> str:
        """Return a text that is the same for variants that share their runs, such as those with another test_ratio."""
        content = [self.recipe(variant, scale), self.data(variant, scale), self.settings(variant, scale)]
        return json.dumps(content, sort_keys=True)

    def references(self, variant: StudyVariant, scale: str) -> dict[str, StudyVariant]:
        """Return the variants whose best models the settings of another mean, by setting."""
        names = {other.name: other for other in self.variants}
        return {
            key: names[value.removeprefix(REFERENCE)]
            for key, value in self.settings(variant, scale).items()
            if is_reference(value)
        }

    def baseline(self, variant: StudyVariant) -> StudyVariant | None:
        """Return the variant that another is compared with, or None for the baseline itself."""
        names = [other.name for other in self.variants]
        base = self.variants[0 if variant.against is None else names.index(variant.against)]
        return None if base is variant else base


def study_names() -> list[str]:
    """Return the names of the studies in weft."""
    files = (item.name for item in resources.files("weft.study").iterdir())
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def load_study(study: str | Path) -> Study:
    """Load a study, and build its networks on the meta device, so that errors show before anything runs.

    Args:
        study: name of a study in weft, or a path to a YAML file.

    Raises:
        UsageError: an unknown name, setting or model argument, or a file that is not a study.
    """
    loaded = read_study(study)
    for scale in loaded.scales:
        study_at_scale = loaded.at_scale(scale)
        check_references(study_at_scale, scale)
        for variant in study_at_scale.variants:
            check_variant(loaded, variant, scale)
    return loaded


def read_study(study: str | Path) -> Study:
    """Read a study without a check of its settings.

    Raises:
        UsageError: an unknown name, or a file that is not a study.
    """
    path = Path(study)
    is_file = isinstance(study, Path) or path.suffix in (".yaml", ".yml") or len(path.parts) != 1
    if not is_file and str(study) not in study_names():
        raise unknown("study", str(study), study_names(), "weft study, or give a path ending in .yaml")
    place = path if is_file else resources.files("weft.study") / f"{study}.yaml"
    try:
        text = place.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"A study must be a text file that can be read; {study}: {reason_of(error)}.") from error
    document = Document.parse(text, str(study), what="a study")
    if "name" in document.values:
        raise document.error("name", "a study has the name of its file; got the key 'name'. Remove it.")
    loaded = document.read(Study, {"name": path.stem, **document.values}, "docs/studies.md")
    _check_variants(loaded, str(study))
    return loaded


def recipe_of(study: Study, variant: StudyVariant, scale: str, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """Return the recipe of a variant.

    Raises:
        UsageError: an unknown setting or invalid value, with the name of the variant.
    """
    try:
        check_no_seed({**variant.set, **variant.small})
        recipe = load_recipe(study.recipe(variant, scale), [*study.settings(variant, scale).items(), *overrides])
        check_one_fold(recipe.data)
        return recipe
    except UsageError as error:
        raise UsageError(f"Study {study.name}, variant '{variant.name}' ({scale}): {error}") from error


def check_one_fold(data: Data) -> None:
    """Raise UsageError for a cross-validation: a run of a study or comparison holds out one fold."""
    if data.folds is not None and data.fold is None:
        raise UsageError(
            "A study or comparison holds out the same images in all runs; with data.folds, choose the fold: --set"
            " data.fold=1."
        )


def check_no_seed(settings: Settings) -> None:
    """Raise UsageError for a seed in the settings of a variant: variants are compared seed by seed, on one split."""
    for key in ("seed", "data.seed"):
        if key in settings:
            raise UsageError(
                f"The variants of a study share their seeds and split; got {key}={settings[key]}. Set it for all"
                f" variants: in `set` of the scale, or --set {key}={settings[key]}."
            )


def check_references(study: Study, scale: str) -> None:
    """Check that the models that variants need are those of other variants, which can run first.

    Args:
        study: with the variants of the scale only.
        scale: name of the scale.

    Raises:
        UsageError: an unknown variant, or variants that need each other.
    """
    names = [variant.name for variant in study.variants]
    needed: dict[str, list[str]] = {}
    for variant in study.variants:
        references = {key: text for key, text in study.settings(variant, scale).items() if is_reference(text)}
        needed[variant.name] = [text.removeprefix(REFERENCE) for text in references.values()]
        for key, name in zip(references, needed[variant.name], strict=True):
            if name not in names:
                raise unknown(f"variant in {key} of '{variant.name}' ({scale})", name, names, study.name)
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        circle = " needs ".join(f"'{name}'" for name in reversed(error.args[1]))
        raise UsageError(f"Study {study.name}: no variant may need its own model; {circle} ({scale}).") from error


def check_variant(
    study: Study,
    variant: StudyVariant,
    scale: str,
    overrides: Sequence[tuple[str, Any]] = (),
    *,
    has_weights: bool = False,
) -> Recipe:
    """Build the network of a variant on the meta device, and return its recipe.

    Args:
        study, variant, scale, overrides: as in `recipe_of`.
        has_weights: it may start from weights that the recipe does not name.

    Raises:
        UsageError: as `recipe_of`, an unknown model argument, or settings that contradict each other.
    """
    import torch

    from weft.models.building import build_described

    recipe = recipe_of(study, variant, scale, overrides)
    if recipe.model is None:
        raise UsageError(f"Study {study.name}, variant '{variant.name}' ({scale}) must name a model; got none.")
    arguments = dict(recipe.model_args)
    if recipe.img_size is not None and recipe.model in VARIANTS:
        arguments["img_size"] = recipe.img_size
    try:
        check_rules(recipe, has_weights=has_weights)
        with torch.device("meta"):
            build_described(recipe.model, arguments, num_classes=10)
    except UsageError as error:
        raise UsageError(f"Study {study.name}, variant '{variant.name}' ({scale}): {error}") from error
    return recipe


def size_to_test(recipe: Recipe, variant: StudyVariant) -> int | None:
    """Return the evaluation size of a variant in pixels, a multiple of 8; None for its training size."""
    if variant.test_ratio is None or variant.test_ratio == 1:
        return None
    side = recipe.img_size or (VARIANTS[str(recipe.model)].size if recipe.model in VARIANTS else None)
    if not isinstance(side, int):
        raise UsageError(f"Variant '{variant.name}' has a test_ratio and needs img_size, one number; got {side}.")
    return 8 * round(side * variant.test_ratio / 8)


def _check_variants(study: Study, origin: str) -> None:
    """Check that the scales and variants of a study fit together."""
    scales, variants = study.scales, study.variants
    if not scales or not set(scales) <= set(SCALES):
        raise UsageError(f"{origin}: scales must be some of {', '.join(SCALES)}; got {', '.join(scales) or 'none'}.")
    if len(variants) < 2:
        raise UsageError(f"{origin}: variants must be a list of at least two; got {len(variants)}.")
    names = [variant.name for variant in variants]
    if len({slug(name) for name in names if name.strip()}) < len(names):
        shown = ", ".join(f"'{name}'" for name in names)
        raise UsageError(f"{origin}: every variant needs a name of its own; got {shown}.")
    for variant in variants:
        if variant.against is not None and variant.against not in names:
            raise unknown(f"variant in 'against' of '{variant.name}'", variant.against, names, origin)
        if variant.scale is not None and variant.scale not in scales:
            raise unknown(f"scale of '{variant.name}'", variant.scale, tuple(scales), origin)
        for scale in variant.recipe:
            if scale not in scales:
                raise unknown(f"scale in 'recipe' of '{variant.name}'", scale, tuple(scales), origin)
        base = variants[0 if variant.against is None else names.index(variant.against)]
        if base.scale not in (None, variant.scale):
            raise UsageError(f"{origin}: '{variant.name}' is compared with '{base.name}', which is not at every scale.")


def slug(name: str) -> str:
    """Return a name as a folder name: in lower case, with `-` for everything but letters and digits."""
    return file_name(re.sub(r"[\W_]+", "-", unicodedata.normalize("NFC", name).lower()).strip("-")[:60])
