"""Recipes: settings of a training run as data.

`schema` has every setting, declared by `fields`, and `describe` its help text and option; `checks` validates values.
`load` and `yaml_reader` read files with exact errors. The YAML files of the papers and of common tasks state only what
differs from the defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import attach

if TYPE_CHECKING:
    from weft.recipes.describe import settings as settings
    from weft.recipes.load import dump as dump
    from weft.recipes.load import load_recipe as load_recipe
    from weft.recipes.load import recipe_names as recipe_names
    from weft.recipes.load import recipe_text as recipe_text
    from weft.recipes.schema import Recipe as Recipe

__getattr__, __dir__, __all__ = attach(__name__, __file__)
