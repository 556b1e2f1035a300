"""The page in a browser: predictions, attention maps and error messages; no requests to other servers."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.serve.running import Running, picture, running, saved

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as Debian's package of that name brings it")
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(saved(tmp_path_factory.mktemp("served") / "model"), "--max-bytes", "300kB") as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, service: Running) -> Iterator[Any]:
    """The page, opened; at the end nothing may have come from elsewhere, and no script have failed."""
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    page = context.new_page()
    page.set_default_timeout(20_000)
    elsewhere, failures = [], []
    own = (f"http://127.0.0.1:{service.port}/", "blob:")
    page.on("request", lambda request: None if request.url.startswith(own) else elsewhere.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("filechooser", lambda _: None)  # from now on no dialog opens: asked for late, it comes after the key
    page.goto(own[0])
    page.get_by_text("4 classes").wait_for()
    yield page
    assert elsewhere == []
    assert failures == []
    context.close()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two pictures, one of which has a name that is HTML, and a broken one."""
    paths = [tmp_path / "one.png", tmp_path / "<img src=x onerror=alert(1)>.png", tmp_path / "broken.png"]
    for i, path in enumerate(paths):
        path.write_bytes(picture(i) if i < 2 else b"no picture")
    return paths


def cards(page: Any, count: int) -> Any:
    page.locator(".card").nth(count - 1).wait_for()
    return page.locator(".card")


def test_pictures_are_answered_with_bars_and_an_overlay(page: Any, service: Running, files: list[Path]) -> None:
    page.get_by_text("CeiT, 32").wait_for()
    assert page.locator("h1").inner_text().strip() == page.title() == "model"  # the name of the directory
    assert not page.get_by_text("left", exact=True).first.is_visible()
    page.get_by_text("4 classes").click()
    assert len(page.locator("#classes li").all_inner_texts()) == 4
    page.set_input_files("#files", [str(path) for path in files[:2]])
    page.locator(".bars li").nth(7).wait_for()
    last, first = (page.locator(".card").nth(i) for i in range(2))  # the newest stands first
    for card, path in ((first, files[0]), (last, files[1])):
        assert card.locator("h3").inner_text() == path.name  # shown, not obeyed
        top = service.ask(body=path.read_bytes())[1]["answers"][0]["top"]
        rows = [row.split("\n") for row in card.locator(".bars li").all_inner_texts()]
        assert card.locator(".headline").inner_text() == top[0]["class"]
        assert rows == [[item["class"], f"{100 * item['probability']:.1f} %"] for item in top]
        assert card.locator(".note").inner_text().startswith("Predicted in ")
        assert card.locator("img").get_attribute("alt").startswith(f"{path.name}: {top[0]['class']}, ")
        canvas = card.locator("canvas")
        assert canvas.is_visible()
        box, image = canvas.bounding_box(), card.locator("img").bounding_box()
        for side in ("x", "y", "width", "height"):  # this model sees the whole picture
            assert box[side] == pytest.approx(image[side], abs=1.5)
        assert len({_pixel(canvas, x) for x in (0.1, 0.4, 0.6, 0.9)}) > 1
        card.get_by_label("Show attention map").uncheck()
        assert not canvas.is_visible()


def test_the_session_is_listed_and_copied(page: Any, files: list[Path]) -> None:
    """The list stays after a reload, and shows names of files as text."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.set_input_files("#files", [str(path) for path in files[:2]])
    page.locator("#session tbody tr").nth(1).wait_for()
    shown = page.locator("#session tbody tr").all_inner_texts()
    assert sorted(row.split("\t")[1] for row in shown) == sorted(path.name for path in files[:2])
    page.get_by_role("button", name="Copy all as JSON").click()
    page.get_by_text("Copied as JSON").wait_for()
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert [item["picture"] for item in copied][::-1] == [row.split("\t")[1] for row in shown]
    page.locator(".card").first.get_by_role("button", name="Copy as JSON").click()
    one = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert one["picture"] == page.locator("h3").first.inner_text()
    assert one["top"][0]["class"] == page.locator(".headline").first.inner_text()
    page.reload()
    page.locator("#session tbody tr").nth(1).wait_for()
    assert page.locator("#session tbody tr").all_inner_texts() == shown
    page.get_by_role("button", name="Clear the list").click()
    assert not page.locator("#session").is_visible()


def test_an_attention_map_lies_over_the_crop(browser: Any, tmp_path: Path) -> None:
    """Of a wide picture, the network sees the middle: the map covers it, and the rest is darkened."""
    wide = tmp_path / "wide.png"
    Image.new("RGB", (160, 80), "white").save(wide)
    with running(saved(tmp_path / "model")) as service:
        context = browser.new_context(viewport={"width": 1000, "height": 800})
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{service.port}/")
        page.set_input_files("#files", str(wide))
        canvas, image = page.locator(".map.crop"), page.locator(".original")
        canvas.wait_for()
        region = service.ask("/predict?overlay=true", body=wide.read_bytes())[1]["answers"][0]["overlay"]["region"]
        assert region[2] < 1
        box, whole = canvas.bounding_box(), image.bounding_box()
        expected = [
            whole["x"] + region[0] * whole["width"],
            whole["y"] + region[1] * whole["height"],
            region[2] * whole["width"],
            region[3] * whole["height"],
        ]
        assert [box[side] for side in ("x", "y", "width", "height")] == pytest.approx(expected, abs=1.5)
        context.close()


def _pixel(canvas: Any, share: float) -> tuple[int, ...]:
    code = "(c, s) => [...c.getContext('2d').getImageData(s * c.width, s * c.height, 1, 1).data]"
    return tuple(canvas.evaluate(code, share))


def test_a_broken_file_shows_its_sentence(page: Any, files: list[Path]) -> None:
    page.set_input_files("#files", [str(files[2]), str(files[0])])
    page.locator(".bars li").nth(3).wait_for()
    bad = page.locator(".card.bad")
    bad.wait_for()
    assert bad.count() == 1
    assert "its content is none of JPEG, PNG" in bad.locator(".message").inner_text()
    assert not bad.locator(".picture").is_visible()


def test_what_is_too_large_is_not_even_sent(page: Any, tmp_path: Path) -> None:
    page.get_by_text("4 classes").wait_for()
    large = tmp_path / "large.png"
    large.write_bytes(picture(0) + b"\0" * 400_000)
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    page.set_input_files("#files", str(large))
    page.get_by_text("This file is larger than").first.wait_for()
    assert not [url for url in sent if "/predict" in url]


def test_a_picture_is_dropped_and_one_is_pasted(page: Any, files: list[Path]) -> None:
    data = base64.b64encode(files[0].read_bytes()).decode()
    code = """([kind, data]) => {
        const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
        const carried = new DataTransfer();
        carried.items.add(new File([bytes], kind + '.png', { type: 'image/png' }));
        const event = kind === 'drop'
            ? new DragEvent('drop', { dataTransfer: carried, bubbles: true, cancelable: true })
            : new ClipboardEvent('paste', { clipboardData: carried, bubbles: true });
        document.getElementById('drop').dispatchEvent(event);
    }"""
    for i, kind in enumerate(("drop", "paste")):
        page.evaluate(code, [kind, data])
        cards(page, i + 1)
    page.locator(".bars li").nth(7).wait_for()
    assert page.locator("h3").all_inner_texts() == ["paste.png", "drop.png"]
    page.get_by_role("button", name="Clear", exact=True).click()
    assert page.locator(".card").count() == 0


def test_the_keyboard_reaches_everything(page: Any, files: list[Path]) -> None:
    reached = []
    for _ in range(4):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert reached[:3] == ["SUMMARY", "pick", "overlay"]
    page.get_by_role("button", name="Choose pictures").focus()
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(str(files[0]))
    page.locator(".bars li").nth(3).wait_for()
    assert "one.png: " in page.get_by_role("status").inner_text()  # read out


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_whole_in_light_and_dark(
    browser: Any, service: Running, files: list[Path], scheme: str
) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True, color_scheme=scheme
    )
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{service.port}/")
    assert page.get_by_role("button", name="Take a photo").is_visible()
    page.set_input_files("#camera", str(files[1]))
    page.locator(".bars li").nth(3).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    background, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (_light(background) > _light(ink)) == (scheme == "light")
    assert _contrast(background, ink) > 7
    context.close()


def _light(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    channels = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_light(one), _light(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_token_leaves_the_address_bar(browser: Any, tmp_path: Path, files: list[Path]) -> None:
    folder = saved(tmp_path / "model")
    with running(folder, "--host", "0.0.0.0", WEFT_TOKEN="secret") as service:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{service.port}/")
        page.get_by_text("This service requires a token").wait_for()
        page.goto(f"http://127.0.0.1:{service.port}/#token=secret")
        page.reload()
        page.get_by_text("4 classes").wait_for()
        assert page.url == f"http://127.0.0.1:{service.port}/"
        page.set_input_files("#files", str(files[0]))
        page.locator(".bars li").nth(3).wait_for()
        context.close()
