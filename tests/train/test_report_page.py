"""The report in a browser: on a phone and a desktop, in light and dark mode, with class names in any script."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.test_report import HISTORY, evaluation
from weft.inference.conclusions import Training
from weft.inference.error_gallery import ExplainedError
from weft.inference.report import write_report
from weft.train.curves import curve_figures

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.figures,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as Debian's package of that name brings it"),
]
NAMES = ["cat", "犬", "سمكة", "🐕", "Donaudampfschifffahrtsgesellschaftskapitän", "a_name_without_a_space_" * 4]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    result = evaluation(NAMES)
    pixels = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    errors = [ExplainedError(result.mistakes[0]._replace(true=name), pixels, pixels) for name in NAMES]
    training = Training([10] * len(NAMES), HISTORY, 2)
    summary = [("repeat with", "weft train --config " + "a/long/path/" * 12)]
    write_report(folder, "model on photos", summary, result, errors, curve_figures(HISTORY, 2), training)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(browser: Any, report: Path, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # tables scroll inside the page
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert max(red, green, blue) < 60 if scheme == "dark" else min(red, green, blue) > 200
    for name in NAMES:
        assert page.get_by_text(name, exact=True).count() >= 3  # in the matrix, twice, and in the table of classes
    sides = page.evaluate(
        "[...document.querySelectorAll('.card img')].map(image => image.getBoundingClientRect().width)"
    )
    assert len(sides) == 2 * len(NAMES)
    assert min(sides) > 100
    headings = page.locator("h2").all_inner_texts()
    assert headings[:4] == ["What to do next", "Summary", "Accuracy and loss by epoch", "Confusion matrix"]
    assert all(url.startswith(("file:", "data:")) for url in requests)
    page.close()
