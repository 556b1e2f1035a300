"""A recipe from a friend is read as meant; a recipe from a stranger can do nothing but be refused, with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import counted_calls, examples
from weft.errors import UsageError
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import KEYS, overrides_of


def written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_only_differences_need_to_be_written(tmp_path):
    recipe = load_recipe(written(tmp_path, "epochs: 3\noptim:\n  lr: 1e-3\n\nschedule:\nloss.label_smoothing: 0\n"))
    assert (recipe.epochs, recipe.optim.lr, recipe.loss.label_smoothing) == (3, pytest.approx(1e-3), 0)
    assert recipe.schedule == Recipe().schedule
    for text in ("", "# nothing yet\n"):
        assert load_recipe(written(tmp_path, text)) == Recipe()


def test_later_overrides_win(tmp_path):
    path = written(tmp_path, "epochs: 3\nseed: 5\n")
    recipe = load_recipe(path, [("epochs", "4"), ("epochs", 6), ("img_size", "48x64"), ("pretrained", "yes")])
    assert (recipe.epochs, recipe.seed, recipe.img_size, recipe.pretrained) == (6, 5, (48, 64), True)
    args = [("model_args", {"a": 1}), ("model_args.b", "x"), ("model_args.c", "2024-13-99")]  # no date
    recipe = load_recipe(path, [("optim", "{lr: 0.5, clip_grad: 0}"), *args])
    assert (recipe.optim.lr, recipe.optim.clip_grad) == (0.5, 0)
    assert recipe.model_args == {"a": 1, "b": "x", "c": "2024-13-99"}
    assert load_recipe("digits", [("model", "null"), ("epochs", None)]).model is None
    assert load_recipe("digits", [("model", "'null'")]).model == "null"


def test_a_recipe_is_laid_over_its_base(tmp_path):
    base = written(tmp_path, "epochs: 3\nseed: 5\noptim:\n  lr: 0.1\n", "base.yaml")
    recipe = load_recipe(written(tmp_path, "steps: 40\noptim.lr_per_512: 0.2\n"), [("seed", 6)], base=base)
    assert (recipe.epochs, recipe.steps, recipe.seed) == (None, 40, 6)
    assert (recipe.optim.lr, recipe.optim.lr_per_512) == (None, 0.2)


STRANGE = {  # what is written -> what the one line must say
    "seed: 1\nmodel: !!python/object/apply:os.system ['touch owned']": "line 2.*python/object/apply:os.system",
    "model: !!python/name:os.system": "line 1.*python/name:os.system",
    "model: !run ceit": "line 1.*tag '!run'",
    "optim:\n  _target_: os.system": r"line 2: Unknown setting 'optim\._target_'\. Nearest: optim",
    "epochs: __import__('os')": 'line 1: epochs must be a whole number .* or null; got "__import__',
    "a: &x [1]\nb: *x": "line 1.*no anchors or aliases; got 'x'",
    "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]": "line 1.*no anchors or aliases; got 'a'",
    "optim:\n  <<: {lr: 1}": r"line 2: .* 'optim\.<<'",
    "optim:\n  lrr: 0.1": r"line 2: .* 'optim\.lrr'\. Nearest: optim\.lr, ",
    "lr: 0.1": r"line 1: .* 'lr'\. Nearest: optim\.lr\.",
    "epochs.x: 1": r"line 1: .* 'epochs\.x'\. Nearest: epochs",
    "optim:\n  lr: .nan": r"line 2: optim\.lr .* or null; got '\.nan'",
    "optim:\n  lr: nan": r"line 2: optim\.lr .* at most 10 or null; got 'nan'",
    "batch_size: 0": "line 1: batch_size .* at most 65536 or auto; got '0'",
    "name: ../../etc/passwd": r"line 1: name .*no path.*got '\.\./\.\./etc/passwd'",
    "name: /tmp/x": "line 1: name .*got '/tmp/x'",
    "seed: 1\nseed: 2": "line 2: .* once; got 'seed' again",
    "model_args: {a: {b: 1, b: 2}}": "line 1: .* once; got 'model_args\\.a\\.b' again",
    "- a\n- b": r"line 1: .* `key: value` lines; got \['a', 'b'\]",
    "optim: fast": "line 1: optim .* `key: value` lines; got 'fast'",
    "[a, b]: 1": "line 1: a key must be a plain word",
    "optim: {lr: 1": "line 1: a recipe must be YAML",
    "seed: 1\n---\nseed: 2": "line 2: a recipe must be YAML",
    "name: a\x00b": "a recipe must be YAML",
    "model_args: " + "{a: " * 40 + "1" + "}" * 40: "line 1: a recipe nests at most 20 levels deep",
    "#" * 1_000_001: "at most 1,000,000 characters; got 1,000,001",
    "optim:\n  lr: fast\nseed: x\nname: /x": r"line 2: optim\.lr .*; got 'fast'",  # the first error
    "augment:\n  scale: [0.9]": r"line 2: augment\.scale .* 2 values in brackets.*got \['0\.9'\]",
    "img_size: [1, 2, 3]": r"line 1: img_size .*2 values in brackets.*got \['1', '2', '3'\]",
    "precision: fp16": "line 1: precision must be one of auto, fp32, bf16; got 'fp16'",
    "pretrained: perhaps": "line 1: pretrained must be true or false; got 'perhaps'",
}


@pytest.mark.parametrize("text", STRANGE, ids=lambda text: text[:20])
def test_what_is_no_recipe_is_refused_with_its_line_and_does_nothing(text, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    path = written(tmp_path, text)
    with counted_calls() as calls, pytest.raises(UsageError, match=STRANGE[text]) as caught:
        load_recipe(path)
    assert calls.count < 100_000
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == [home, path]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lr", "&a 1", "optim.lr line 1: .* no anchors or aliases; got 'a'"),
        ("optim.lr", "!!python/name:os.system x", "optim.lr line 1: .*python/name:os.system"),
        ("optim.lrr", 1, r"'optim\.lrr'\. Nearest: optim\.lr, "),
        ("epochs", 2.5, r"^epochs must be a whole number at least 0 and at most 100000; got '2\.5'"),
        ("epochs", object, r"^epochs .* plain value; got <class 'object'>"),
        ("optim", "{lr: 1, lr: 2}", r"once; got 'optim\.lr' again"),
        ("img_size", "4x4", r"^img_size must be a whole number .* or 2 values in brackets, each a whole number at"),
    ],
)
def test_an_override_is_read_as_carefully(key, value, message):
    with pytest.raises(UsageError, match=message):
        load_recipe(overrides=[(key, value)])


@pytest.mark.parametrize(
    "text", ["photos #2", "[a-z]+_", "(.*): 1", "*.jpg", "null", "123", "1e-3", "it's", "a\\d", "&a *b !c"]
)
def test_an_argument_that_is_text_is_taken_literally(text):
    given = {"start_from": text, "unknown_images": Path(text), "group": text}
    recipe = load_recipe(overrides=overrides_of(text, {"distill.teacher": Path(text)}, given))
    assert (recipe.start_from, recipe.data.unknown_images, recipe.data.group, recipe.distill.teacher) == (text,) * 4
    assert recipe.data.source == text


def test_an_argument_that_is_no_text_may_be_written_as_text_and_wins_over_settings():
    given = {"epochs": "3", "img_size": "48x64", "batch_size": "auto", "start_from": "", "seed": None}
    recipe = load_recipe(overrides=overrides_of(None, {"epochs": 2}, given))
    assert (recipe.epochs, recipe.img_size, recipe.batch_size, recipe.start_from) == (3, (48, 64), "auto", None)


def test_a_recipe_that_is_not_there_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()  # a folder of images does not hide the recipe of its name
    assert load_recipe("cifar10").model == "ceit_nano_32"
    (tmp_path / "bytes.yaml").write_bytes(b"model: \xff\xfe")
    for recipe, words in (
        ("digts", r"'digts'\. Nearest: digits"),
        ("nowhere/x.yaml", r"nowhere/x\.yaml must be readable; No such file"),
        (".", "Is a directory"),
        ("bytes.yaml", "must be UTF-8 text; byte 7 is not"),
    ):
        with pytest.raises(UsageError, match=words):
            load_recipe(recipe)


PIECES = [
    "epochs", "optim", "lr", "augment", "scale", "model_args", "environment", "img_size", "name", ":", ": ", "\n",
    "\n  ", "- ", "[", "]", "{", "}", ",", "1", "1e-3", ".nan", "null", "~", "yes", "'", '"', "&a", "*a", "!!int", "!x",
    "<<", "#", "|", ">", "%", "@", "`", "---", "...", "\t", "é", "\x00", "\ud800", "2020-01-01", "0x1F", "1_000", "?",
]  # fmt: skip


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_text_is_a_recipe_or_one_line(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    try:
        recipe = load_recipe(path)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - most texts raise, some do not; both are right
    else:
        path.write_text(dump(recipe), encoding="utf-8")
        assert load_recipe(path) == recipe


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from([*KEYS, "optim", "model_args.x", "nothing"]), plain)
def test_any_override_is_taken_or_refused_in_one_line(key, value):
    try:
        recipe = load_recipe(overrides=[(key, value)])
    except UsageError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - as above
    else:
        assert isinstance(recipe, Recipe)
