"""`weft recipes`: list and show training recipes."""

from __future__ import annotations

import re
from typing import Any

from cyclopts import App, Group

from weft.cli import options as opt
from weft.cli.options import pairs, print_json, table
from weft.errors import UsageError

app = App(name="recipes", group_commands=Group("Commands"), **opt.PANELS)


@app.default
def recipes(*, shown: opt.Shown = opt.Shown()) -> int:
    """List and show training recipes.

    Example:
        weft recipes
        weft recipes settings
        weft recipes show levit_pretrain --set batch_size=2048
        weft recipes show cvt_21_pretrain --source
        weft recipes show ceit_pretrain --source > mine.yaml
        weft train photos/ --recipe mine.yaml
    """
    from weft.recipes import recipe_names

    rows = [summary_of(name) for name in recipe_names()]
    if shown.json:
        print_json(rows)
        return 0
    cells = []
    for row in rows:
        epochs = f"{row['epochs']} epochs" if row["epochs"] else "by number of images"
        length = f"{row['steps']} steps" if row["steps"] else epochs
        cells.append((row["name"], row["model"], length, row["batch_size"], f"{row['lr']:g}", row["what"]))
    print(table(("name", "model", "length", "batch", "lr", "description"), cells))
    return 0


@app.command
def settings(*, shown: opt.Shown = opt.Shown()) -> int:
    """List all settings of a recipe, with their defaults and allowed values.

    Example:
        weft recipes settings
    """
    from weft.recipes import settings

    if shown.json:
        print_json([{name: getattr(row, name) for name in ("key", "may_be", "default", "help")} for row in settings()])
    else:
        print(table(("setting", "default", "may be"), [(row.key, str(row.default), row.may_be) for row in settings()]))
    return 0


@app.command
def show(name: str, /, *, source: bool = False, settings: opt.Settings = None) -> int:
    """Show all settings of a recipe, or its file.

    Args:
        name: recipe name or YAML file
        source: print the file itself, with its comments, to edit a copy
        settings: recipe setting, for example optim.lr=3e-4; may be repeated

    Example:
        weft recipes show levit_pretrain --set batch_size=2048
        weft recipes show ceit_pretrain --source > mine.yaml
    """
    from weft.recipes import dump, load_recipe, recipe_text
    from weft.train.schedule import peak_lr

    if source and settings:
        raise UsageError("--source prints the file of the recipe, without --set; got both. Leave one out.")
    if source:
        print(recipe_text(name), end="")
        return 0
    recipe = load_recipe(name, list(pairs(settings).items()))
    if isinstance(recipe.batch_size, int):
        print(f"# {recipe.batch_size} images per step = per device x devices x accumulate ({recipe.accumulate});")
        print(f"# peak learning rate {peak_lr(recipe):g}")
    else:
        print("# images per step: chosen when training starts (batch_size: auto), and with it the rate of lr_per_512")
    print(dump(recipe), end="")
    return 0


def summary_of(name: str) -> dict[str, Any]:
    """Return the dictionary that `--json` prints for a recipe."""
    from weft.recipes import load_recipe, recipe_text
    from weft.train.schedule import peak_lr

    recipe, text = load_recipe(name), recipe_text(name)
    source = re.search(r"^# source:\s*(.*(?:\n#  +.*)*)", text, re.MULTILINE)
    return {
        "name": name,
        "model": recipe.model,
        "epochs": recipe.epochs,
        "steps": recipe.steps,
        "batch_size": recipe.batch_size,
        "lr": peak_lr(recipe),
        "what": re.split(r"\.(\s|$)", text.splitlines()[0].removeprefix("# "))[0],  # first sentence of the file
        "source": re.sub(r"\s*\n#\s+", " ", source[1]) if source else "",
    }
