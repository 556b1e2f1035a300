"""Write what the pages have from the registry: python docs/settings.py

docs/settings.md is the reference of all settings, from the recipe schema; the tables of docs/models.md and
docs/recipes.md are those of `weft models` and `weft recipes`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

from weft.cli.models import HEADER, cells_of, record_of
from weft.cli.recipes import summary_of
from weft.models.families import list_models
from weft.recipes import Recipe, recipe_names, settings
from weft.recipes.describe import Setting

PAGE = Path(__file__).parent / "settings.md"
INTRODUCTION = """# Settings

All settings of a [recipe](recipes.md), with their values and defaults. A recipe file has a setting by its name;
settings with a dot are in a section:

```yaml
epochs: 30
optim:
  lr: 5.0e-4
```

On the command line, `--set optim.lr=5e-4` changes one setting; some also have an option of their own.
`weft recipes settings` prints the values and defaults. `null` is `None` in Python.
"""


def page() -> str:
    """Return the page: one section per group of settings, one heading per setting."""
    parts, group = [INTRODUCTION, "## Run\n"], ""
    for row in settings():
        section = row.key.rpartition(".")[0]
        if section != group:
            group = section
            parts.append(f"## {group}\n\n{_summary(group)}\n")
        values = ", ".join(f"`{value}`" for value in row.choices) or row.may_be
        parts.append(f"### `{row.key}`\n\n{row.help}\n\n- Values: {values}\n- Default: `{_yaml(row.default)}`")
        parts.append(f"- Option: `{f'{row.flag} {_value(row)}'.rstrip()}`\n" if row.flag else "")
    return "\n".join(parts)


def _value(setting: Setting) -> str:
    """Return what follows an option on the command line: its choices, or a placeholder."""
    return "" if setting.type is bool else "|".join(setting.choices) or setting.metavar


def _summary(group: str) -> str:
    """Return the docstring of a section of the schema."""
    kind = next(item.default_factory for item in dataclasses.fields(Recipe) if item.name == group)
    return " ".join((inspect.getdoc(kind) or "").split())


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def with_table(name: str) -> str:
    """Return docs/models.md or docs/recipes.md with its table as the registry has it."""
    if name == "models.md":
        header, rows = HEADER, [cells_of(record_of(model)) for model in list_models()]
    else:
        summaries = [summary_of(recipe) for recipe in recipe_names()]
        header = ("recipe", "use", "source")
        rows = [(f"`{row['name']}`", row["what"], row["source"]) for row in summaries]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    text = (PAGE.parent / name).read_text(encoding="utf-8")
    return re.sub(rf"(?m)^\| {header[0]} \|.*\n(?:\|.*\n)+", lambda _: "\n".join(lines) + "\n", text, count=1)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name in ("models.md", "recipes.md"):
        (PAGE.parent / name).write_text(with_table(name), encoding="utf-8")
