"""Write docs/settings.md, the reference of all settings, from the recipe schema: python docs/settings.py"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

from weft.recipes import Recipe, settings
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
