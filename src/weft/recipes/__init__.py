"""Recipes: what a training run does, as data.

One typed schema with its defaults (`schema`), one careful reader (`load`), and files that say only what differs.
Read by hand rather than by a configuration framework: an error can then name the file, the line and the nearest key.
"""

from __future__ import annotations

from weft.recipes.load import dump, load_recipe, recipe_names, recipe_text, settings
from weft.recipes.schema import Recipe

__all__ = ["Recipe", "dump", "load_recipe", "recipe_names", "recipe_text", "settings"]
