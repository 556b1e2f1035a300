"""Recipes: settings of a training run as data.

`schema` has every setting, `describe` its help text and option, `load` and `yaml_reader` read files with exact errors,
and the YAML files of the papers and of common tasks state only what differs from the defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import lazy_names

if TYPE_CHECKING:
    from weft.recipes.describe import settings as settings
    from weft.recipes.load import dump as dump
    from weft.recipes.load import load_recipe as load_recipe
    from weft.recipes.load import recipe_names as recipe_names
    from weft.recipes.load import recipe_text as recipe_text
    from weft.recipes.schema import Recipe as Recipe

_HOMES = {
    "Recipe": "weft.recipes.schema",
    "dump": "weft.recipes.load",
    "load_recipe": "weft.recipes.load",
    "recipe_names": "weft.recipes.load",
    "recipe_text": "weft.recipes.load",
    "settings": "weft.recipes.describe",
}

__all__ = ["Recipe", "dump", "load_recipe", "recipe_names", "recipe_text", "settings"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
