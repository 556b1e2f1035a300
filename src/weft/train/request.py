"""Request of a user for a training run, and its recipe; everything that is checked without torch and the images."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.checkpoints.config import CONFIG, WEIGHTS
from weft.checkpoints.resolve import PREFIX
from weft.data.open import check_exists
from weft.errors import CheckpointError, UsageError
from weft.inference.arguments import check_unknown_images
from weft.recipes import Recipe, load_recipe
from weft.recipes.load import default_recipe, named_in, overrides_of, recipe_names
from weft.recipes.rules import check_rules

FINETUNE = "finetune"  # the recipe for public weights; its model is downloaded, if the hub can be reached


@dataclass(frozen=True)
class Request:
    """A training run that a user asks for: what was named, and nothing that weft decides.

    `train`, `find_lr`, `planned_run` and `preview` make their plan from a request alone, so that all have the same.

    Attributes:
        data: the dataset; None for that of the recipe.
        recipe: name of a recipe of weft, or a YAML file; None if none was named.
        settings: dotted keys of settings, and their values.
        given: arguments of `train` that are settings, by name; None if not given. They win over `settings`.
        from_scratch: start from random weights also where weft would use public ones.
        candidates: names of the networks among which the images choose; none for those of weft.
        budget: time for a run whose number of epochs is left to weft, in seconds.
        began: time of the request, by the clock of `time.monotonic`.
        option: option of `weft train` to name in errors.
    """

    data: str | Path | None = None
    recipe: str | Path | None = None
    settings: Mapping[str, Any] | None = None
    given: Mapping[str, Any] | None = None
    from_scratch: bool = False
    candidates: Sequence[str] = ()
    budget: float | None = None
    option: str = ""
    began: float = field(default_factory=time.monotonic)

    @cached_property
    def overrides(self) -> list[tuple[str, Any]]:
        """(Dotted key, value) of every setting that was named."""
        return overrides_of(self.data, self.settings or {}, self.given or {})

    def says(self, key: str) -> bool:
        """Return whether a setting was named, other than in a recipe."""
        return any(known == key for known, _ in self.overrides)

    def names(self, key: str) -> bool:
        """Return whether a setting was named, by the user or by the recipe that the settings are applied to."""
        return self.says(key) or (self.base is not None and key in named_in(self.base))

    @property
    def base(self) -> str | Path | None:
        """The recipe that the settings are applied to: the named one, or that of a dataset with one of its own."""
        return self.recipe or default_recipe(self.data)

    @property
    def has_model_of_weft(self) -> bool:
        """Whether the user named a recipe of weft, and no model: another one may then take its place."""
        return self.recipe in recipe_names() and not self.says("model")

    def leaves_weights(self, recipe: Recipe) -> bool:
        """Return whether the weights to start from are left to weft: neither they nor a recipe are named."""
        is_named = self.base is not None or self.from_scratch or recipe.start_from is not None or recipe.pretrained
        return not is_named

    def leaves_network(self, recipe: Recipe) -> bool:
        """Return whether the network of a decided recipe is left to weft, among those with public weights."""
        is_of_weft = self.has_model_of_weft and load_recipe(self.recipe).model == load_recipe(FINETUNE).model
        is_open = is_of_weft or (self.base is None and not self.says("model"))
        return is_open and recipe.pretrained and recipe.start_from is None

    @property
    def leaves_length(self) -> bool:
        """Whether the length of a fine-tuning is left to weft: it is that of a recipe of weft, or none is named."""
        return (self.base is None or self.base in recipe_names()) and not (self.says("epochs") or self.says("steps"))

    def load(self, base: str | Path | None, **settings: Any) -> Recipe:
        """Load the recipe for another base, with more settings.

        Weights to start from replace public weights, and their network replaces that of a recipe of weft.

        Raises:
            UsageError: an invalid setting, or no dataset.
            CheckpointError: there are no such weights to start from.
        """
        loaded = load_recipe(base, [*self.overrides, *settings.items()])
        if loaded.data.source is None:
            raise UsageError(
                f"Training needs images; got none. Name a folder or `digits`: weft train DATA {self.option}".rstrip()
                + "."
            )
        if loaded.pretrained and loaded.start_from is not None:
            start = loaded.start_from
            is_described = start.startswith(PREFIX) or (start_file(start).parent / CONFIG).is_file()
            model = None if is_described and self.has_model_of_weft else loaded.model
            loaded = dataclasses.replace(loaded, model=model, pretrained=False)
        return loaded

    @cached_property
    def resolved(self) -> Recipe:
        """The recipe as far as it is known without the images, checked.

        Raises:
            UsageError: an invalid setting, a device that this machine does not have, settings that
                contradict each other, or no dataset.
            DataError: there is no such dataset, or none of the images of `data.unknown_images` can be read.
            CheckpointError: there are no such weights to start from.
        """
        recipe = self.load(self.base)
        if recipe.data.unknown_images is not None:
            check_unknown_images(recipe.data.unknown_images, recipe.data.max_pixels)
        if self.from_scratch:
            recipe = self._without_weights(recipe)
        if recipe.start_from is not None and not recipe.start_from.startswith(PREFIX):
            start_file(recipe.start_from)
        check_exists(str(recipe.data.source))
        is_open = recipe.model is None and self.leaves_weights(recipe)  # the images may choose another recipe
        if not is_open:
            check_rules(recipe)
        return recipe

    def _without_weights(self, recipe: Recipe) -> Recipe:
        """Return a recipe that starts from random weights, unless the user contradicts it."""
        if recipe.start_from is not None:
            raise UsageError("--from-scratch and --from exclude each other; omit one of them.")
        if recipe.epochs == 0:
            raise UsageError(
                "--from-scratch needs epochs, since a linear probe needs trained weights; got epochs 0. Omit it, or"
                " pass --epochs N."
            )
        named = {"pretrained": recipe.pretrained, "head_init": recipe.head_init == "probe"}
        for key, is_on in named.items():
            if is_on and self.says(key):
                raise UsageError(
                    f"--from-scratch and {key}: {str(getattr(recipe, key)).lower()} exclude each other, since the"
                    " latter needs trained weights; omit one of them."
                )
        return dataclasses.replace(recipe, pretrained=False, head_init="random")


NOTHING = Request()
"""Request that names nothing."""


def start_file(source: str | Path) -> Path:
    """Return the file of the weights that `--from` names.

    Args:
        source: a run directory (its best model), a model directory, or a checkpoint file.

    Raises:
        CheckpointError: it is none of these.
    """
    folders = (Path(source) / "best", Path(source))
    path = next((folder / WEIGHTS for folder in folders if (folder / WEIGHTS).is_file()), Path(source))
    if path.is_dir() or not path.exists():
        raise CheckpointError(
            f"--from must name a run, a model directory or a checkpoint file; {source} is none of these."
        )
    return path


def recipe_file(run: Path) -> Path:
    """Return the recipe of a run directory.

    Raises:
        CheckpointError: it has none.
    """
    file = run / "recipe.yaml"
    if not file.is_file():
        raise CheckpointError(
            f"--resume must name a run directory; {run} has no recipe.yaml."
            " To start a new run from its weights: weft train DATA --from PATH."
        )
    return file
