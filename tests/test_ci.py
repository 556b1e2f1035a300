"""The scripts of `make check` and `make audit` find what they look for."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SOUND = {"name": "rich", "version": "15.0.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.15.0+cpu)"}
BAD = {"name": "pillow", "version": "12.1.0", "vulns": [{"id": "GHSA-8g5g-8vmr-9782"}, {"id": "PYSEC-2026-1"}]}


@functools.cache
def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(*packages: dict[str, Any]) -> str:
    """What pip-audit prints."""
    return json.dumps({"dependencies": packages, "fixes": []})


@pytest.mark.parametrize(
    ("answer", "errors", "code", "text"),
    [
        (recorded(SOUND, UNKNOWN), "", 0, "1 of 2 packages audited, none with known vulnerabilities"),
        (recorded(SOUND, BAD), "", 1, "pillow 12.1.0 has GHSA-8g5g-8vmr-9782, PYSEC-2026-1."),
        (recorded(SOUND, BAD), "", 1, "2 of 2 packages audited, 1 with known vulnerabilities"),
        (recorded(UNKNOWN, UNKNOWN), "", 2, "0 of 2 packages audited: the advisory service knows none of them"),
        (recorded(), "", 2, "0 of 0 packages audited"),
        ("", "ERROR: connection failed\nConnectionError: no route", 2, "cannot be reached (ConnectionError: no route)"),
        *((answer, "", 2, "0 packages audited") for answer in ("<html>", "[]", "{}")),
    ],
)
def test_an_audit_passes_only_what_was_audited_and_has_no_known_vulnerability(answer, errors, code, text):
    lines, found = script("audit").verdict(answer, errors)
    assert found == code
    assert text in "\n".join(lines)


def test_banned_phrases_are_found_with_their_lines(tmp_path, monkeypatch):
    lint = script("lint")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("# Page\n\n```sh\nweft at once\n```\n\nThe run `goes on` as\nusual, and it goes\non. Cats, too.\n")
    module.write_text('"""Read pictures."""\n\nx = 1  # one data\n# set; `beside`\n')
    found = lint.faults([*lint.of_page(page), *lint.of_module(module)])
    assert [fault.partition(" in ")[0] for fault in found] == [
        "page.md:8: 'goes on'",
        "page.md:9: ', too'",
        "module.py:1: 'pictures'",
        "module.py:3: 'data set'",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from weft.models.ceit.network import CeiT",
        "from weft.models import cvt",
        "import weft.models.levit",
        "def f(model): return isinstance(model, CvT)",
        "def f(model): return type(model).__name__ == 'LeViT'",
        "default = 'ceit_nano_32'",
        "home = 'weft.models.levit.network:LeViT'",
        "def f(model): return model.lca is None",
    ],
)
def test_a_file_that_knows_a_family_is_found(source):
    assert list(script("lint").breaches(source))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Fine-tune it: weft train DATA --pretrained.", "option --pretrained"),
        ("Move the folders there, or pass follow_the_links.", "argument follow_the_links"),
        ("List them with `weft data chekc`.", "action chekc of data"),
        ("Run: weft trian DATA", "verb trian"),
        ("Start again: weft predict RUN --epochs 3", "option --epochs of predict"),
        ("Set --set optim.learning_rate=1", "setting optim.learning_rate"),
        ("Lower optim.rate, please.", "setting optim.rate"),
        ("pip install 'weft-vision[deploi]'", "extra deploi"),
        ("pip install weft", "weft is another project"),
        (
            "Resume with: weft train --resume runs/x, or pass batch_size; `weft data check photos/`; --set optim.lr=1;"
            " lower data.max_bad. weft trains a network, and weft cannot read data.csv or call data.open(x)."
            " pip install 'weft-vision[deploy,serve]'",
            None,
        ),
    ],
)
def test_advice_that_does_not_exist_is_found(text, fault):
    advice = script("advice")
    found = {*advice.faults(text), *advice.faults_of_installation(text)}
    assert fault in found if fault else not found


def test_faults_of_modules_are_found(tmp_path, monkeypatch):
    lint = script("lint")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "SOURCE", tmp_path)
    (tmp_path / "a.py").write_text('"""Read images of a folder."""\n\nclass Reader: ...\n')
    calls = (
        'path.read_text()\npath.write_text("x", newline="")\nos.fdopen(3, "w", buffering=1)\n'
        'subprocess.run(command, text=True)\npath.read_text(encoding="utf-8")\nos.fdopen(3, "wb")\n'
    )
    (tmp_path / "b.py").write_text(f"class Reader: ...\n{calls}import weft.models.levit\n")
    found = [fault.partition(": ")[0] for fault in lint.faults_of_modules()]
    assert found == ["b.py:2", "b.py:3", "b.py:4", "b.py:5", "b.py:1", "b.py:8", "b.py"]
