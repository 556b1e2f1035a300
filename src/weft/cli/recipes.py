"""`weft recipes`: list and show training recipes."""

from __future__ import annotations

import argparse
import re
from typing import Any

from weft.cli.options import add_common, example, print_json, refuse_options_of_others, setting, table
from weft.errors import UsageError

HELP = "list and show training recipes"

ACTIONS = ("list", "settings", "show")

OPTIONS = {  # action -> options that it reads
    "list": ("--json",),
    "settings": ("--json",),
    "show": ("--source", "--set"),
}

EXAMPLE = """
weft recipes
weft recipes settings
weft recipes show levit_pretrain --set batch_size=2048
weft recipes show cvt_21_pretrain --source
weft recipes show ceit_pretrain --source > mine.yaml
weft train photos/ --recipe mine.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.usage = "weft recipes [list | settings | show NAME] [options]"
    parser.add_argument("action", nargs="?", default="list", choices=ACTIONS, help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="recipe name or YAML file")
    parser.add_argument(
        "--source", action="store_true", help="with show: print the file itself, with its comments, to edit a copy"
    )
    add_common(parser, "--set", "--json")
    example(parser, EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """List recipes or settings, or show a recipe."""
    refuse_options_of_others(args, f"recipes {args.action}", args.action, OPTIONS)
    if args.action in ("list", "settings"):
        if args.name is not None:
            see = f"weft recipes show {args.name}"
            raise UsageError(f"weft recipes {args.action} takes no name; got '{args.name}'. To show a recipe: {see}.")
        return _list(args.json) if args.action == "list" else _settings(args.json)
    if args.source and args.set:
        raise UsageError("--source prints the file of the recipe, without --set; got both. Leave one out.")
    if args.name is None:
        raise UsageError(f"weft recipes {args.action} needs the name of a recipe; got none. All names: weft recipes.")
    return _show(args)


def _list(as_json: bool) -> int:
    from weft.recipes import recipe_names

    rows = [_summary(name) for name in recipe_names()]
    if as_json:
        print_json(rows)
        return 0
    cells = []
    for row in rows:
        epochs = f"{row['epochs']} epochs" if row["epochs"] else "by number of images"
        length = f"{row['steps']} steps" if row["steps"] else epochs
        cells.append((row["name"], row["model"], length, row["batch_size"], f"{row['lr']:g}", row["what"]))
    print(table(("name", "model", "length", "batch", "lr", "description"), cells))
    return 0


def _settings(as_json: bool) -> int:
    from weft.recipes import settings

    if as_json:
        print_json([{name: getattr(row, name) for name in ("key", "may_be", "default", "help")} for row in settings()])
    else:
        print(table(("setting", "default", "may be"), [(row.key, str(row.default), row.may_be) for row in settings()]))
    return 0


def _summary(name: str) -> dict[str, Any]:
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


def _show(args: argparse.Namespace) -> int:
    from weft.recipes import dump, load_recipe, recipe_text
    from weft.train.schedule import peak_lr

    if args.source:
        print(recipe_text(args.name), end="")
        return 0
    recipe = load_recipe(args.name, [setting(text) for text in args.set])
    if isinstance(recipe.batch_size, int):
        print(f"# {recipe.batch_size} images per step = per device x devices x accumulate ({recipe.accumulate});")
        print(f"# peak learning rate {peak_lr(recipe):g}")
    else:
        print("# images per step: chosen when training starts (batch_size: auto), and with it the rate of lr_per_512")
    print(dump(recipe), end="")
    return 0
