"""Whatever a file or an override says: a recipe comes out, or one clear line, and nothing else."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import examples
from weft.errors import UsageError
from weft.recipes import Recipe, dump, load_recipe
from weft.recipes.load import KEYS

PIECES = [
    "epochs", "optim", "lr", "augment", "scale", "model_args", "environment", "img_size", "name", ":", ": ", "\n",
    "\n  ", "- ", "[", "]", "{", "}", ",", "1", "1e-3", ".nan", "null", "~", "yes", "'", '"', "&a", "*a", "!!int", "!x",
    "<<", "#", "|", ">", "%", "@", "`", "---", "...", "\t", "é", "\x00", "\ud800", "2020-01-01", "0x1F", "1_000", "?",
]  # fmt: skip


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_text_is_a_recipe_or_a_usage_error(tmp_path: Path, text: str) -> None:
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
def test_any_override_is_taken_or_refused(key: str, value: object) -> None:
    try:
        recipe = load_recipe(overrides=[(key, value)])
    except UsageError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - as above
    else:
        assert isinstance(recipe, Recipe)
