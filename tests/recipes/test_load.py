"""A recipe from a friend is read as meant; a recipe from a stranger can do nothing but be refused, with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import counted_calls
from weft.errors import UsageError
from weft.recipes import Recipe, load_recipe, recipe_names
from weft.recipes.load import overrides_of


def written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_only_differences_need_to_be_written(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "epochs: 3\noptim:\n  lr: 1e-3\n\nschedule:\nloss.label_smoothing: 0\n"))
    assert recipe.epochs == 3
    assert recipe.optim.lr == pytest.approx(1e-3)
    assert recipe.loss.label_smoothing == 0
    assert recipe.schedule == Recipe().schedule
    assert load_recipe(written(tmp_path, "")) == Recipe()
    assert load_recipe(written(tmp_path, "# nothing yet\n")) == Recipe()


def test_later_overrides_win(tmp_path: Path) -> None:
    path = written(tmp_path, "epochs: 3\nseed: 5\n")
    recipe = load_recipe(path, [("epochs", "4"), ("epochs", 6), ("img_size", "48x64"), ("pretrained", "yes")])
    assert (recipe.epochs, recipe.seed, recipe.img_size, recipe.pretrained) == (6, 5, (48, 64), True)


def test_a_recipe_is_laid_over_its_base(tmp_path: Path) -> None:
    base = written(tmp_path, "epochs: 3\nseed: 5\noptim:\n  lr: 0.1\n", "base.yaml")
    recipe = load_recipe(written(tmp_path, "steps: 40\noptim.lr_per_512: 0.2\n"), [("seed", 6)], base=base)
    assert (recipe.epochs, recipe.steps, recipe.seed) == (None, 40, 6)
    assert (recipe.optim.lr, recipe.optim.lr_per_512) == (None, 0.2)


def test_none_can_be_asked_for() -> None:
    assert load_recipe("digits", [("model", "null"), ("epochs", None)]).model is None
    assert load_recipe("digits", [("model", "'null'")]).model == "null"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_that_comes_with_weft_is_one(name: str) -> None:
    assert load_recipe(name) != Recipe()


# Battery row C4: what was written, then what the one line must say.
STRANGE = {
    "python object": (
        "seed: 1\nmodel: !!python/object/apply:os.system ['touch owned']",
        "line 2.*python/object/apply:os.system",
    ),
    "python name": ("model: !!python/name:os.system", "line 1.*python/name:os.system"),
    "local tag": ("model: !run ceit", "line 1.*tag '!run'"),
    "hydra target": ("optim:\n  _target_: os.system", r"line 2: Unknown setting 'optim\._target_'\. Nearest: optim"),
    "import as a number": (
        "epochs: __import__('os')",
        'line 1: epochs must be a whole number .* or null; got "__import__',
    ),
    "anchor": ("a: &x [1]\nb: *x", "line 1.*no anchors or aliases; got 'x'"),
    "alias bomb": ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]", "line 1.*no anchors or aliases; got 'a'"),
    "merge": ("optim:\n  <<: {lr: 1}", r"line 2: Unknown setting 'optim\.<<'"),
    "unknown key": ("optim:\n  lrr: 0.1", r"line 2: Unknown setting 'optim\.lrr'\. Nearest: optim\.lr, "),
    "key in the wrong place": ("lr: 0.1", r"line 1: Unknown setting 'lr'\. Nearest: optim\.lr\."),
    "nan": ("optim:\n  lr: .nan", r"line 2: optim\.lr must be a number .* or null; got '\.nan'"),
    "not a number": (
        "optim:\n  lr: nan",
        r"line 2: optim\.lr must be .* at most 10 or null; got 'nan'",
    ),
    "out of range": (
        "batch_size: 0",
        "line 1: batch_size must be .* at most 65536 or auto; got '0'",
    ),
    "path in the name": (
        "name: ../../etc/passwd",
        r"line 1: name must be letters.*no path.*got '\.\./\.\./etc/passwd'",
    ),
    "absolute name": ("name: /tmp/x", "line 1: name must be letters.*got '/tmp/x'"),
    "twice": ("seed: 1\nseed: 2", "line 2: a key must occur once; got 'seed' again"),
    "list at the top": ("- a\n- b", r"line 1: a recipe must hold `key: value` lines; got \['a', 'b'\]"),
    "section as value": ("optim: fast", "line 1: optim must hold `key: value` lines; got 'fast'"),
    "key that is a list": ("[a, b]: 1", "line 1: a key must be a plain word"),
    "unclosed": ("optim: {lr: 1", "line 1: a recipe must be YAML"),
    "two documents": ("seed: 1\n---\nseed: 2", "line 2: a recipe must be YAML"),
    "control character": ("name: a\x00b", "a recipe must be YAML"),
    "too deep": ("model_args: " + "{a: " * 40 + "1" + "}" * 40, "line 1: a recipe nests at most 20 levels deep"),
    "too long": ("#" * 1_000_001, "at most 1,000,000 characters; got 1,000,001"),
    "first error": ("optim:\n  lr: fast\nseed: x\nname: /x", r"line 2: optim\.lr must be .*; got 'fast'"),
    "one size": ("augment:\n  scale: [0.9]", r"line 2: augment\.scale must be 2 values in brackets.*got \['0\.9'\]"),
    "twice below": ("model_args: {a: {b: 1, b: 2}}", "line 1: a key must occur once; got 'model_args\\.a\\.b' again"),
    "key of a value": ("epochs.x: 1", r"line 1: Unknown setting 'epochs\.x'\. Nearest: epochs"),
    "three sizes": ("img_size: [1, 2, 3]", r"line 1: img_size must be .*2 values in brackets.*got \['1', '2', '3'\]"),
    "wrong word": ("precision: fp16", "line 1: precision must be one of auto, fp32, bf16; got 'fp16'"),
    "wrong truth": ("pretrained: perhaps", "line 1: pretrained must be true or false; got 'perhaps'"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_does_not_fit_is_refused_with_its_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = STRANGE[case]
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    path = written(tmp_path, text)
    with counted_calls() as calls, pytest.raises(UsageError, match=message) as caught:
        load_recipe(path)
    assert calls.count < 100_000
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == [home, path]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lr", "&a 1", "optim.lr line 1: a recipe has no anchors or aliases; got 'a'"),
        ("optim.lr", "!!python/name:os.system x", "optim.lr line 1: .*python/name:os.system"),
        ("optim.lrr", 1, r"^Unknown setting 'optim\.lrr'\. Nearest: optim\.lr, "),
        ("epochs", 2.5, r"^epochs must be a whole number at least 0 and at most 100000; got '2\.5'"),
        ("epochs", object, r"^epochs must be a plain value; got <class 'object'>"),
        ("optim", "{lr: 1, lr: 2}", r"^a key must occur once; got 'optim\.lr' again"),
        ("img_size", "4x4", r"^img_size must be a whole number .* or 2 values in brackets, each a whole number at"),
    ],
)
def test_an_override_is_read_as_carefully(key: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(overrides=[(key, value)])


@pytest.mark.parametrize("text", ["photos #2", "[a-z]+_", "(.*): 1", "*.jpg", "null", "123", "1e-3", "it's", "a\\d"])
def test_an_argument_that_is_text_is_taken_literally(text: str) -> None:
    given = {"start_from": text, "unknown_images": Path(text), "group": text}
    recipe = load_recipe(overrides=overrides_of(None, {"distill.teacher": Path(text)}, given))
    assert (recipe.start_from, recipe.data.unknown_images, recipe.data.group, recipe.distill.teacher) == (text,) * 4


def test_an_argument_that_is_no_text_may_be_written_as_text() -> None:
    given = {"epochs": "3", "img_size": "48x64", "batch_size": "auto", "start_from": ""}
    recipe = load_recipe(overrides=overrides_of(None, {}, given))
    assert (recipe.epochs, recipe.img_size, recipe.batch_size, recipe.start_from) == (3, (48, 64), "auto", None)


def test_a_section_may_be_given_at_once() -> None:
    recipe = load_recipe(
        overrides=[("optim", "{lr: 0.5, clip_grad: 0}"), ("model_args", {"a": 1}), ("model_args.b", "x")]
    )
    assert (recipe.optim.lr, recipe.optim.clip_grad, recipe.model_args) == (0.5, 0, {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("digts", r"Unknown recipe 'digts'\. Nearest: digits"),
        ("nowhere/x.yaml", r"nowhere/x\.yaml must be readable; No such file"),
        (".", "Is a directory"),
    ],
)
def test_a_recipe_that_is_not_there(recipe: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(recipe)


def test_a_folder_of_pictures_does_not_hide_the_recipe_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cifar10").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_recipe("cifar10").model == "ceit_nano_32"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(UsageError, match=re.escape("must be UTF-8 text; byte 7 is not")):
        load_recipe(path)
