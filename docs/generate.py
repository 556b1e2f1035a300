"""Generated pages of the documentation site, and the hooks of its build: see conf.py.

Generated: the reference of the command line (from the signatures of its functions), the Python reference (from
`__all__`), and copies of the Markdown files outside docs/. A new verb or public name needs no edit here.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

import weft
from weft.cli import app as cli
from weft.cli.app import EXIT_CODES, example_of, find
from weft.models.families import families
from weft.recipes import Recipe

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "_generated"
# Pages from outside docs/ that are part of the site, and their names there.
COPIED = {
    "README.md": "readme",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "benchmarks/README.md": "benchmarks",
    "benchmarks/speed/README.md": "speed",
}
NAVIGATION = {
    "Start": ("Overview and installation <_generated/readme>",),
    "Tasks": (
        "few-images",
        "series",
        "more-images",
        "embed",
        "data",
        "review",
        "recipes",
        "studies",
        "resume",
        "your-own-network",
        "deploy",
        "serve",
        "explain",
        "cluster",
        "imagenet",
    ),
    "Networks": ("ceit", "cvt", "levit", "models", "arguments"),
    "Reference": ("_generated/commands", "settings", "_generated/api", "platforms", "security"),
    "Project": ("_generated/benchmarks", "_generated/speed", "_generated/changelog", "_generated/contributing"),
}
# Public modules in packages whose `__all__` does not have their names.
MODULES = (
    *("weft.bench.speed", "weft.errors", "weft.models.base", "weft.models.family", "weft.models.layout"),
    "weft.models.building",
    "weft.models.registry",
)
PRIVATE_PACKAGES = ("weft.cli",)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
HIDDEN_COLON = "\0"

_documented: dict[str, str] = {}  # where an object is defined -> name of its entry


def write_pages() -> None:
    """Write all generated pages, and remove those of an earlier build that no longer exist."""
    pages = {f"{name}.md": with_links((ROOT / file).read_text(encoding="utf-8"), (ROOT / file).parent, GENERATED)
             for file, name in COPIED.items()}  # fmt: skip
    pages |= {"commands.md": commands(), **python_reference()}
    for path in GENERATED.rglob("*.*"):
        if path.relative_to(GENERATED).as_posix() not in pages:
            path.unlink()
    for name, text in pages.items():
        path = GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx does not read unchanged files again
            path.write_text(text, encoding="utf-8")


# Command line


def commands() -> str:
    """Return the reference of the command line: usage, options and example of every verb and its commands."""
    rows = [
        f"| [`weft {name}`](#weft-{name.replace(' ', '-')}) | {_sentence(find(name).help.partition(chr(10))[0])} |"
        for name in cli.commands()
    ]
    codes = inspect.cleandoc(EXIT_CODES.partition("\n")[2])
    parts = [
        "# Command line",
        "`weft VERB --help` prints the same options and examples.",
        "\n".join(["| verb | what it does |", "|---|---|", *rows]),
        *map(verb_section, cli.commands()),
        "## Exit codes",
        _code(codes),
    ]
    return "\n\n".join(parts) + "\n"


def verb_section(name: str) -> str:
    """Return the reference of one verb or command."""
    command = find(name)
    usage = (command.usage or "").removeprefix("Usage: ")
    parts = [f"## weft {name}", _sentence(command.help.partition("\n")[0]), _code(usage)]
    parts.append(f"```{{program}} weft {name.replace(' ', '-')}\n```")
    for argument in cli.arguments(name):
        is_flag = bool in (argument.hint, *typing.get_args(argument.hint))
        value = "" if is_flag else argument.parameter.metavar or "VALUE"
        names = [f"{word} {value}".strip() for word in argument.names]
        if not argument.name.startswith("-"):
            names = [argument.name.upper()]
        parts.append(f":::{{option}} {', '.join(names)}\n{argument.parameter.help or ''}\n:::")
    title, _, example = example_of(command).partition("\n")
    parts.append(f"{title.capitalize()}\n\n```{{code-block}} text\n:class: wrap\n\n{inspect.cleandoc(example)}\n```")
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return f"```{{code-block}} text\n:class: wrap\n\n{text}\n```"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


# Python reference


def packages() -> list[str]:
    """Return weft and its packages that have `__all__`."""
    names = ["weft", *(f"weft.{item.name}" for item in pkgutil.iter_modules(weft.__path__) if item.ispkg)]
    return [
        name for name in names if name not in PRIVATE_PACKAGES and hasattr(importlib.import_module(name), "__all__")
    ]


def public_names(module: str) -> list[str]:
    """Return `__all__` of a package; of a module, its public functions and classes."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__path__"):
        return list(loaded.__all__)
    return [
        name
        for name, item in vars(loaded).items()
        if not name.startswith("_") and callable(item) and getattr(item, "__module__", "") == module
    ]


def python_reference() -> dict[str, str]:
    """Return the pages of the Python reference, by path: an overview, and one page per package, module or network."""
    classes = {family.network_class.__module__: family.network_class for family in families()}
    networks = {module: kind.__name__ for module, kind in classes.items()}
    modules = [*packages(), *filter(_exists, MODULES)]
    _documented.clear()
    names = {module: [f"{module}.{name}" for name in public_names(module)] for module in (*modules, *networks)}
    for module, kind in classes.items():  # the network, then its parts
        names[module].sort(key=f"{module}.{kind.__name__}".__ne__)
    for name in itertools.chain.from_iterable(names.values()):
        _documented.setdefault(_home(_item(name), name), name)
    pages = {f"api/{module}.rst": api_page(module, networks.get(module, module), names[module]) for module in names}
    parts = ["Python reference", "================", ""]
    for heading, listed in {"Packages and modules": modules, "Networks": networks}.items():
        rows = [(f":doc:`{networks.get(name, name)} <api/{name}>`", _summary(_item(name))) for name in listed]
        parts += [heading, "-" * len(heading), "", *_table(rows)]
    parts += [".. toctree::", "   :hidden:", "", *(f"   api/{module}" for module in names), ""]
    return {"api.rst": "\n".join(parts), **pages}


def api_page(module: str, title: str, names: list[str]) -> str:
    """Return the reference of a module: its public names, then other classes that their signatures mention."""
    parts = [title, "=" * len(title), "", f".. py:module:: {module}", "", _summary(_item(module)), ""]
    entries = {name: _documented[_home(_item(name), name)] for name in names}
    parts += _table(
        (f":py:obj:`{name.rpartition('.')[2]} <{entry}>`", _summary(_item(name))) for name, entry in entries.items()
    )
    parts += itertools.chain.from_iterable(map(_entry, (name for name, entry in entries.items() if name == entry)))
    others: list[str] = []
    waiting = [_item(name) for name, entry in entries.items() if name == entry]
    while waiting:
        for kind in _classes(waiting.pop(0)):
            home = _home(kind, "")
            if home not in _documented:
                _documented[home] = home
                others.append(home)
                waiting.append(kind)
    if others:
        parts += ["Types in these signatures", "-------------------------", ""]
        parts += itertools.chain.from_iterable(map(_entry, others))
    return "\n".join(parts)


def _entry(name: str) -> list[str]:
    """Return the directive that makes the entry of a public name."""
    item = _item(name)
    if inspect.isclass(item):
        kind = "autoexception" if issubclass(item, Exception) else "autoclass"
        if item is Recipe:  # its settings have a page of their own
            return [f".. {kind}:: {name}(**settings)", "", "   Its attributes are the :doc:`settings </settings>`.", ""]
        bases = ["   :show-inheritance:"] if item.__base__ not in (object, tuple) else []
        return [f".. {kind}:: {name}", "   :members:", *bases, ""]
    if callable(item):
        return [f".. autofunction:: {name}", ""]
    return [f".. py:data:: {name}", f"   :value: {item!r}", ""]


def _classes(item: Any) -> Iterator[type]:
    """Yield the classes of weft in the annotations and bases of a public object, and the exceptions that it raises."""
    if item is Recipe:
        return
    if inspect.isclass(item):
        yield from (base for base in item.__mro__[1:] if base.__module__.startswith("weft."))
        members = [getattr(member, "fget", member) for name, member in vars(item).items() if not name.startswith("_")]
        sources = [item, vars(item).get("__init__"), *(getattr(member, "__func__", member) for member in members)]
    else:
        sources = [inspect.unwrap(item)] if callable(item) else []
    hints: list[Any] = []
    for source in sources:
        with contextlib.suppress(NameError, TypeError):  # imported under TYPE_CHECKING only; without annotations
            hints += typing.get_type_hints(source, include_extras=True).values()
        module = inspect.getmodule(source)
        names = re.findall(r"^ +(\w+Error): ", inspect.getdoc(source) or "", re.MULTILINE) if source else ()
        hints += [getattr(module, name) for name in names if hasattr(module, name)]
    while hints:
        hint = hints.pop(0)
        hints += typing.get_args(hint)
        kind = hint if inspect.isclass(hint) else type(hint)  # Annotated has objects
        if kind.__module__.startswith("weft.") and not kind.__name__.startswith("_"):
            yield kind


def _item(name: str) -> Any:
    """Return the module or the object of a module with this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _home(item: Any, name: str) -> str:
    """Return where an object is defined."""
    return f"{item.__module__}.{item.__qualname__}" if hasattr(item, "__qualname__") else name


def _summary(item: Any) -> str:
    """Return the first sentence of a docstring, as reStructuredText; of data, the value."""
    if not callable(item) and not inspect.ismodule(item):
        return f"``{item!r}``"
    paragraph = " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())
    return _escaped(re.split(r"(?<=[a-z)`])\. (?=[A-Z])", paragraph)[0].rstrip(".")) + "."


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = itertools.chain.from_iterable((f"   * - {name}", f"     - {text}") for name, text in rows)
    return [".. list-table::", "   :class: names", "", *lines, ""]


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Links


def with_links(text: str, folder: Path, page: Path) -> str:
    """Rewrite the relative links of a Markdown file for a page in another folder of the site.

    A link to a page of the site leads there, and a link to another file downloads it. A link to a folder, or to a
    Markdown file that is not in the site, becomes text.

    Args:
        text: Markdown.
        folder: folder that the links are relative to.
        page: folder of the page in the site.
    """

    def rewritten(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path or target.startswith("mailto:"):
            return match[0]
        place = (folder / path).resolve()
        if place.is_relative_to(ROOT) and (name := COPIED.get(str(place.relative_to(ROOT)))):
            place = GENERATED / f"{name}.md"
        elif not place.is_file() or (place.suffix == ".md" and not place.is_relative_to(DOCS)):
            return label
        return f"{image}[{label}]({os.path.relpath(place, page)}{hash_}{anchor})"

    return LINK.sub(rewritten, text)


# Hooks of the build


def on_read(app: Any, name: str, source: list[str]) -> None:
    """Rewrite links to files outside docs/, and add the navigation to the first page."""
    if name.startswith("_generated"):
        return
    source[0] = with_links(source[0], DOCS, DOCS)
    if name == "index":
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def on_doctree(app: Any, doctree: nodes.document) -> None:
    """Write a dash between an argument and its description; link no builtin type to an attribute of the same name.

    Without smartquotes, Sphinx writes two hyphens.
    """
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- "):
            text.parent.replace(text, nodes.Text(f" \N{EN DASH} {text[4:]}"))
    for reference in doctree.findall(addnodes.pending_xref):
        if hasattr(builtins, reference.get("reftarget", "")):
            reference.attributes.pop("refspecific", None)


def on_missing_reference(app: Any, env: Any, node: Any, contents: nodes.TextElement) -> nodes.reference | None:
    """Resolve a name by the module that defines it, such as a bare `UsageError`, to its entry."""
    target = node.get("reftarget", "")
    known = {home.rpartition(".")[2]: entry for home, entry in _documented.items()}
    entry = _documented.get(target) or ("." not in target and known.get(target))
    if node.get("refdomain") != "py" or not entry:
        return None
    page = env.domains["py"].objects[entry].docname
    return make_refnode(app.builder, node["refdoc"], page, entry, contents, entry)


def before_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape markup, and hide colons of an attribute's docstring: napoleon takes the text before one for a type."""
    lines[:] = map(_escaped, lines)
    if what in ("attribute", "property"):
        lines[:] = [line.replace(":", HIDDEN_COLON) for line in lines]


def after_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show the hidden colons."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def _escaped(line: str) -> str:
    """Escape characters that reStructuredText would take for markup, outside of code."""
    parts = line.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<!\\)[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", parts[i])
        if i and parts[i][:1].isalnum():  # a plural, such as `Sample`s
            parts[i] = "\\ " + parts[i]
    return "`".join(parts)


def on_signature(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str) -> Any:
    """Write `...` for a default that is no Python expression, such as `<factory>`."""
    return None if signature is None else (re.sub(r"= <.*?>(?=[,)])", "= ...", signature), returns)


def on_member(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which the docstring of the class describes; list `forward` for its shapes."""
    if type(obj).__name__ == "_tuplegetter":
        return True
    return False if name == "forward" else None
