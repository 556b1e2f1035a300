"""Advice that exists: every option, verb, setting and extra that a message names is one of weft's; else exit code 1.

Messages are the strings of the source, without docstrings; the values in an f-string are written as a placeholder.
Commands that install weft, in messages and pages, name the distribution: on PyPI, `weft` is another project.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from weft.cli.app import VERBS, WITH_COMMANDS, commands
from weft.cli.app import option_names as names_of
from weft.errors import DISTRIBUTION
from weft.recipes.load import KEYS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "weft"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "requirements-runtime.txt")),
    *(
        page
        for name in ("Dockerfile*", "docs/**/*.md", "benchmarks/**/*.md", "examples/*.*")
        for page in ROOT.glob(name)
    ),
]
VALUE = "\N{REPLACEMENT CHARACTER}"  # in the place of a value in an f-string
OF_OTHERS = {
    "--shm-size": "docker",
    "--nproc-per-node": "torchrun",
    "--data-binary": "curl",
    "--share": "CSS",
} | dict.fromkeys(("--force-reinstall", "--no-deps", "--yes"), "pip")
OF_ALL = {"--version", "--help"}  # options of `weft` without a verb
FILES = ("csv", "json", "pkl", "npz", "png", "tar")  # endings of file names, which look like settings
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in KEYS if "." in key}))

OPTION = re.compile(r"(?<![\w\-.])--[a-z][a-z0-9]+(?:-[a-z0-9]+)*")
COMMAND = re.compile(rf"(?:(?<=`)|(?<=: )|(?<=with ))weft ([a-z]+)((?: (?!\w+s\b|is\b)[\w\-./={VALUE}\[\]]+)*)")
SETTING = re.compile(rf"(?<![\w./])((?:{SECTIONS})\.[a-z][a-z0-9_]*)(?![\w.]*\()")
SET = re.compile(r"--set ([a-z][\w.]*)=")
ARGUMENT = re.compile(r"(?:[Pp]ass|[Rr]aise|[Ll]ower|[Ss]et|with|use) ([a-z]+(?:_[a-z0-9]+)+)\b(?!\()")
EXTRA = re.compile(r"weft-vision\[([a-z,]+)\]")
INSTALL = re.compile(r"pip3? install ([^\n`]*)")
WORD = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s'\"]+")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every string that is not part of another one, nor a docstring but in the command line,
    where it is the help.
    """
    tree, skipped = ast.parse(path.read_text(encoding="utf-8")), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and path.parent.name != "cli":
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


@cache
def options_of(verb: str) -> frozenset[str]:
    of_verb = [command for command in commands() if command.partition(" ")[0] == verb]
    return frozenset(option for command in of_verb for option in names_of(command))


@cache
def arguments() -> frozenset[str]:
    """Names with an underscore that a user can pass: settings, and options as Python spells them."""
    of_options = {option[2:].replace("-", "_") for verb in VERBS for option in options_of(verb)}
    return frozenset({key.rpartition(".")[2] for key in KEYS} | set(KEYS) | of_options)


def faults(text: str) -> Iterator[str]:
    """Yield what a message names and weft has not."""
    known = {option for verb in VERBS for option in options_of(verb)} | set(OF_OTHERS) | OF_ALL
    for option in OPTION.findall(text):
        if option not in known:
            yield f"option {option}"
    for verb, rest in COMMAND.findall(text):
        if verb not in VERBS:
            yield f"verb {verb}"
            continue
        for option in OPTION.findall(rest):
            if option not in options_of(verb):
                yield f"option {option} of {verb}"
        action = re.match(r" ([a-z]+)", rest)
        if verb in WITH_COMMANDS and action and f"{verb} {action[1]}" not in commands():
            yield f"action {action[1]} of {verb}"
    for key in (*SETTING.findall(text), *SET.findall(text)):
        if key not in KEYS and not key.startswith("model_args.") and not key.endswith(FILES):
            yield f"setting {key}"
    for name in ARGUMENT.findall(text):
        if name not in arguments():
            yield f"argument {name}"
    for names in EXTRA.findall(text):
        yield from (f"extra {name}" for name in names.split(",") if name not in EXTRAS)


def faults_of_installation(text: str) -> Iterator[str]:
    """Yield the commands of a page or message that install another project or an extra that is not there."""
    for command in INSTALL.findall(text):
        for word in (quoted.strip("'\"") for quoted in WORD.findall(command.partition("#")[0])):
            match = re.fullmatch(r"(weft[\w.-]*)(?:\[([\w,-]+)\])?.*", word, re.IGNORECASE)
            if match and not re.search(r"\.whl|[{/]", word):
                if match[1] != DISTRIBUTION:
                    yield f"{word} is another project"
                yield from (f"extra {name}" for name in (match[2] or "").split(",") if name not in {*EXTRAS, ""})
    if re.search(r"(?<![\w/-])weft\[[a-z,]+\]", text):
        yield "an extra in prose has the name of the distribution"


def named_extras(code: str) -> Iterator[str]:
    """Yield the extras in calls of `need("EXTRA", ...)` and `install_command("EXTRA", ...)`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            args = {"need": node.args[:1], "install_command": node.args}.get(node.func.id, [])
            yield from (name for arg in args if isinstance(arg, ast.Constant) for name in arg.value.split(","))


def main() -> int:
    """Print what is advised and does not exist."""
    found, everything = [], []
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(ROOT)
        for line, text in texts(path):
            everything.append(text)
            wrong = [*faults(text), *faults_of_installation(text)]
            found += [f"{place}:{line}: no {fault}: {text[:200]!r}" for fault in wrong]
        extras = set(named_extras(path.read_text(encoding="utf-8"))) - set(EXTRAS)
        found += [f"{place}: no extra {name}" for name in extras]
    for page in PAGES:
        wrong = faults_of_installation(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(ROOT)}: {fault}" for fault in wrong]
    for pattern, number in ((OPTION, 150), (COMMAND, 40), (SETTING, 30), (SET, 8), (ARGUMENT, 5), (EXTRA, 1)):
        if sum(len(pattern.findall(text)) for text in everything) < number:
            found.append(f"{pattern.pattern} finds hardly anything: repair it.")
    print("\n".join(found) or "advice: every message names what exists.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
