"""Text of strangers: in every error, note and table it is one line, printable, and of bounded length."""

from __future__ import annotations

import csv
import inspect
import io
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from tests.helpers import lively
from tests.train import tiny
from weft import errors
from weft.checkpoints import save_model_dir
from weft.cli import main
from weft.cli.options import table
from weft.data import BadImage
from weft.errors import WeftError
from weft.progress import say
from weft.text import MAX_TEXT, csv_cell, one_line, printable

HOSTILE = "\x1b[31m\x07:bomb:[red]\u202eevil\u2066\x9b2J\u2028<b>"
KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, WeftError)]


@given(st.text(max_size=3_000))
def test_any_text_is_one_printable_line_and_stays_so(text):
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT
    assert one_line(shown) == shown
    assert printable(text) == text or not text.isprintable()


def test_what_is_short_and_plain_is_untouched():
    for text in ("", "A dataset must be …; got 'ä'. See: weft --help", "/a/long/path/" + "x" * 300, "猫 cat"):
        assert one_line(text) == text


def test_of_a_long_text_the_beginning_and_the_end_stay():
    shown = one_line("key must hold; got " + "x" * 1_000_000 + ". Leave it out.")
    assert shown.startswith("key must hold; got xxx")
    assert shown.endswith("xxx. Leave it out.")
    assert len(one_line("a b " * 10_000 + "Leave it out.")) <= MAX_TEXT
    assert one_line("a b " * 10_000 + "Leave it out.").endswith("Leave it out.")


@pytest.mark.parametrize("kind", [*KINDS, BadImage], ids=lambda kind: kind.__name__)
def test_every_error_is_one_printable_line(kind):
    made = kind(HOSTILE * 999, "damaged", HOSTILE * 99) if kind is BadImage else kind(HOSTILE * 999)
    assert str(made).isprintable()
    assert len(str(made)) <= MAX_TEXT
    assert "evil" in str(made)


def test_notes_and_tables_are_printable(capsys):
    say(HOSTILE)
    print(table(("name", "value"), [(HOSTILE, 1)]))
    out, err = capsys.readouterr()
    for text in (out, err):
        assert ":bomb:" in text
        assert "[red]" in text
        assert re.sub(r"[\n ]", "", text).isprintable()


@given(st.text(max_size=20), st.sampled_from(["", "=", "+", "-", "@", "\t", "\r", "=cmd|' /C calc'!A0"]))
def test_no_text_in_a_csv_is_a_formula(text, start):
    cell = str(csv_cell(start + text))
    assert not cell.startswith(("=", "@", "\t", "\r"))
    if cell.startswith(("+", "-")):
        float(cell)
    assert cell in (start + text, f"'{start}{text}")


@pytest.mark.parametrize("number", [-0.5, 3, "-0.5", "+1", "-1e-3", None])
def test_a_number_in_a_csv_stays_one(number):
    assert csv_cell(number) == number


def test_a_class_name_is_no_formula_in_the_csv_of_predictions(tmp_path, capsys):
    names = ["=HYPERLINK(1)", "@SUM(1)", "+1+1", "-2+3"]
    model = save_model_dir(lively("levit_nano_32", num_classes=4), tmp_path / "m", label_names=names)
    data = tiny.paint(tmp_path / "data", per_class=1)
    assert main(["predict", str(model), str(data), "--csv", "--top-k", "4"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert {row[2] for row in rows[1:]} == {f"'{name}" for name in names}
    assert all(0 <= float(row[3]) <= 1 for row in rows[1:])


@pytest.mark.slow
def test_hostile_names_reach_no_terminal_as_they_are(tmp_path, capsys):
    """Of tensors, models, settings, files and folders; through the verbs that show them."""
    name = HOSTILE.replace("/", "")
    save_file({name: torch.zeros(1), "x" * 100_000: torch.zeros(1)}, tmp_path / "w.safetensors")
    (tmp_path / "r.yaml").write_text(f'model: "{HOSTILE.encode("unicode_escape").decode()}"\n')
    folder = tmp_path / name
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
    (folder / f"{name}.jpg").write_bytes(b"none")
    model = save_model_dir(lively("levit_nano_32", num_classes=2), tmp_path / "m", label_names=["[red]", ":bomb:"])
    data = tiny.paint(tmp_path / "data", per_class=2)
    (data / "class0" / f"{name}.png").write_bytes(b"none")
    for arguments in (
        ["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "out")],
        ["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "out"), "--model", HOSTILE],
        ["train", "digits", "--recipe", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "run")],
        ["train", "digits", "--set", f"{HOSTILE}={HOSTILE}", "--out", str(tmp_path / "run")],
        ["train", str(folder), "--out", str(tmp_path / "run")],
        ["predict", str(model), str(folder)],
        ["predict", str(model), str(folder), "--json"],
        ["predict", HOSTILE, HOSTILE],
        ["evaluate", str(model), str(data)],
        ["data", "check", str(folder)],
        ["data", "check", str(data)],
        ["models", HOSTILE],
        ["recipes", HOSTILE],
        ["study", HOSTILE],
        ["bench", HOSTILE],
        ["serve", HOSTILE],
        [HOSTILE],
        ["export", str(model), str(tmp_path / "e"), "--format", HOSTILE],
        ["explain", str(model), str(folder), "--out", str(tmp_path / "explained")],
    ):
        main(arguments)
        for text in capsys.readouterr():
            assert text.replace("\n", "").replace("\r", "").isprintable(), ascii(text)
            assert "💣" not in text
