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

import contextlib
import dataclasses
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from weft.errors import UsageError, unknown
from weft.machine.system import file_name
from weft.models.families import VARIANTS
from weft.progress import loading
from weft.recipes import Recipe, load_recipe
from weft.recipes.fields import STRICT, Within
from weft.recipes.rules import check_rules
from weft.recipes.schema import Data
from weft.recipes.yaml_reader import Document, names_in, text_of, untyped
from weft.study.jobs import REFERENCE, is_reference

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

    @cached_property
    def common(self) -> Recipe:
        """Recipe without the settings of a variant. All runs have its seeds.

        Raises:
            UsageError: an unknown setting or invalid value.
        """
        return load_recipe(self.recipe, self.set.items())


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

    def at_scale(self, scale: str, places: Mapping[str, str] | None = None) -> list[ResolvedVariant]:
        """Return the variants of one scale, with all their settings.

        Args:
            scale: name of the scale.
            places: places of the datasets, by the names that the study calls them.

        Raises:
            UsageError: a variant has a seed of its own, needs the model of an unknown one, or its own model.
        """
        size, rows = self.scales[scale], [row for row in self.variants if row.scale in (None, scale)]
        variants = []
        for row in rows:
            own, against = {**row.set, **(row.small if scale == "small" else {})}, row.against or rows[0].name
            data = row.data or size.data
            variant = ResolvedVariant(
                row.name,
                row.recipe.get(scale, size.recipe),
                (places or {}).get(data, data),
                {**size.set, **own},
                None if against == row.name else against,
                row.seeds,
                row.paper,
                row.test_ratio or 1,
                f"Study {self.name}, variant '{row.name}' ({scale})",
            )
            with variant.named_in_errors():
                _check_no_seed(own)
            variants.append(variant)
        _check_references(variants, self.name, scale)
        return variants


@dataclass(frozen=True)
class ResolvedVariant:
    """Variant of a study at one scale: what its runs have in common.

    Attributes:
        name: in reports.
        base: base recipe; None for the defaults.
        data: dataset.
        settings: override the base recipe. `run:NAME` is the best model of another variant.
        against: variant that it is compared with; None for a baseline.
        seeds: largest number of runs; None for no limit.
        paper: top-1 accuracy in percent that the paper reports.
        test_ratio: ratio of the evaluation size to the training size.
        origin: of errors.
    """

    name: str
    base: str | None
    data: str
    settings: dict[str, Any]
    against: str | None = None
    seeds: int | None = None
    paper: float | None = None
    test_ratio: float = 1
    origin: str = ""

    @property
    def run_key(self) -> str:
        """Text that is the same for variants that share their runs, such as those with another test_ratio."""
        return json.dumps([self.base, self.data, self.settings], sort_keys=True)

    @property
    def references(self) -> dict[str, str]:
        """Variants whose best models the settings mean, by setting."""
        texts = {key: value for key, value in self.settings.items() if is_reference(value)}
        return {key: text.removeprefix(REFERENCE) for key, text in texts.items()}

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of its runs, before the choices of the machine.

        Raises:
            UsageError: an unknown setting or invalid value.
        """
        with self.named_in_errors():
            recipe = load_recipe(self.base, self.settings.items())
            check_one_fold(recipe.data)
        return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, source=self.data))

    @cached_property
    def test_size(self) -> int | None:
        """Evaluation size in pixels, a multiple of 8; None for the training size."""
        recipe = self.recipe
        side = recipe.img_size or (VARIANTS[str(recipe.model)].size if recipe.model in VARIANTS else None)
        if self.test_ratio == 1:
            return None
        if not isinstance(side, int):
            raise UsageError(f"Variant '{self.name}' has a test_ratio and needs img_size, one number; got {side}.")
        return 8 * round(side * self.test_ratio / 8)

    def check(self, *, has_weights: bool = False) -> None:
        """Build the network on the meta device.

        Args:
            has_weights: it may start from weights that the recipe does not name.

        Raises:
            UsageError: as `recipe`, an unknown model argument, or settings that contradict each other.
        """
        with loading():
            import torch

            from weft.train.network import build_model

        recipe = self.recipe
        with self.named_in_errors():
            if recipe.model is None:
                raise UsageError("A variant must name a model; got none.")
            check_rules(recipe, has_weights=has_weights)
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                build_model(dataclasses.replace(recipe, pretrained=False), num_classes=10)

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add the name of the variant to errors."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"{self.origin}: {error}") from error


def study_names() -> list[str]:
    """Return the names of the studies in weft."""
    return names_in("weft.study")


def load_study(study: str | Path) -> Study:
    """Load a study, and build its networks on the meta device, so that errors show before anything runs.

    Args:
        study: name of a study in weft, or a path to a YAML file.

    Raises:
        UsageError: an unknown name, setting or model argument, or a file that is not a study.
    """
    loaded = read_study(study)
    for scale in loaded.scales:
        for variant in loaded.at_scale(scale):
            variant.check()
    return loaded


def read_study(study: str | Path) -> Study:
    """Read a study without a check of its settings.

    Raises:
        UsageError: an unknown name, or a file that is not a study.
    """
    document = Document.parse(text_of(study, "study", "weft.study", "weft study"), str(study), what="a study")
    if "name" in document.values:
        raise document.error("name", "a study has the name of its file; got the key 'name'. Remove it.")
    loaded = document.read(Study, {"name": Path(study).stem, **document.values}, "docs/studies.md")
    _check_variants(loaded, str(study))
    return loaded


def check_one_fold(data: Data) -> None:
    """Raise UsageError for a cross-validation: a run of a study or comparison holds out one fold."""
    if data.folds is not None and data.fold is None:
        raise UsageError(
            "A study or comparison holds out the same images in all runs; with data.folds, choose the fold: --set"
            " data.fold=1."
        )


def slug(name: str) -> str:
    """Return a name as a folder name: in lower case, with `-` for everything but letters and digits."""
    return file_name(re.sub(r"[\W_]+", "-", unicodedata.normalize("NFC", name).lower()).strip("-")[:60])


def _check_no_seed(settings: Mapping[str, Any]) -> None:
    """Refuse a seed in the settings of a variant: variants are compared seed by seed, on one split."""
    for key in ("seed", "data.seed"):
        if key in settings:
            raise UsageError(
                f"The variants of a study share their seeds and split; got {key}={settings[key]}. Set it for all"
                f" variants: in `set` of the scale, or --set {key}={settings[key]}."
            )


def _check_references(variants: Sequence[ResolvedVariant], study: str, scale: str) -> None:
    """Check that the models that variants need are those of other variants, which can run first."""
    names = [variant.name for variant in variants]
    for variant in variants:
        for key, name in variant.references.items():
            if name not in names:
                raise unknown(f"variant in {key} of '{variant.name}' ({scale})", name, names, study)
    try:
        TopologicalSorter({variant.name: variant.references.values() for variant in variants}).prepare()
    except CycleError as error:
        circle = " needs ".join(f"'{name}'" for name in reversed(error.args[1]))
        raise UsageError(f"Study {study}: no variant may need its own model; {circle} ({scale}).") from error


def _check_variants(study: Study, origin: str) -> None:
    """Check that the scales and variants of a study fit together."""
    scales, variants = study.scales, study.variants
    if not scales or not set(scales) <= set(SCALES):
        raise UsageError(f"{origin}: scales must be some of {', '.join(SCALES)}; got {', '.join(scales) or 'none'}.")
    if len(variants) < 2:
        raise UsageError(f"{origin}: variants must be a list of at least two; got {len(variants)}.")
    by_name = {variant.name: variant for variant in variants}
    if len({slug(name) for name in by_name if name.strip()}) < len(variants):
        shown = ", ".join(f"'{variant.name}'" for variant in variants)
        raise UsageError(f"{origin}: every variant needs a name of its own; got {shown}.")
    for variant in variants:
        named = [("variant in 'against'", variant.against, by_name), ("scale", variant.scale, scales)]
        for kind, name, names in [*named, *(("scale in 'recipe'", scale, scales) for scale in variant.recipe)]:
            if name is not None and name not in names:
                raise unknown(f"{kind} of '{variant.name}'", name, list(names), origin)
        base = by_name[variant.against or variants[0].name]
        if base.scale not in (None, variant.scale):
            raise UsageError(f"{origin}: '{variant.name}' is compared with '{base.name}', which is not at every scale.")
