"""The page in a browser; these tests are skipped where there is no Chromium."""

import os
import shutil

import pytest
from a_run import shortened

from laplace_debias.report.page import write_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("LAPLACE_DEBIAS_CHROMIUM") or next(
    filter(None, map(shutil.which, NAMES)), None
)

pytestmark = pytest.mark.skipif(
    BROWSER is None,
    reason="there is no Chromium: install one, or say where it is in LAPLACE_DEBIAS_CHROMIUM",
)
BARE = {"shifts": False, "ood": False, "posterior": False, "pictures": False}
KINDS = ("full", "regression", "bare")


def address_of(kind, request, folder):
    """The address of the page of a run; all tests share the full page, others are written."""
    if kind == "full":
        return request.getfixturevalue("page_of_images").as_uri()
    if kind == "regression":
        run = shortened(request.getfixturevalue("run_of_rows"), folder / kind)
    else:
        run = shortened(request.getfixturevalue("run_of_images"), folder / kind, **BARE)
    return write_page(run).as_uri()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, request, tmp_path):
    """A function that opens a page; errors and requests to other addresses fail the test."""
    contexts = []
    problems = []

    def note_foreign_request(page_request):
        if not page_request.url.startswith(("file:", "data:")):
            problems.append(page_request.url)

    def open_page(kind="full", width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", note_foreign_request)
        page.goto(address_of(kind, request, tmp_path))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [390, 1200])
def test_pictures_are_drawn_and_nothing_is_wider_than_the_window(opened, kind, width):
    page = opened(kind, width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = page.evaluate(
        """[...document.querySelectorAll('figure')].map(f => [
            f.id, f.querySelectorAll('svg path').length,
            f.querySelector('svg').getBoundingClientRect().width, f.getBoundingClientRect().right
        ])"""
    )
    assert len(boxes) >= 4
    for name, paths, picture_width, right in boxes:
        assert paths > 3, name
        assert picture_width > 250, name
        assert right <= width, name
    loaded = page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert loaded
    assert page.evaluate("document.images.length") == (24 if kind == "full" else 0)


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("width", [390, 1200])
def test_every_table_that_scrolls_says_so(opened, width, script):
    """On a narrow page the main table is cards, which do not scroll."""
    page = opened("full", width, java_script_enabled=script)
    page.wait_for_timeout(200)
    tables = page.evaluate(
        """[...document.querySelectorAll('.scroll')].filter(
            r => !r.closest('details:not([open])')).map(r => [
            r.scrollWidth > r.clientWidth, r.previousElementSibling.getClientRects().length > 0,
            r.previousElementSibling.textContent, r.querySelector('table').className])"""
    )
    assert len(tables) >= 3
    for scrolls, has_hint, text, kind in tables:
        assert "Scroll sideways" in text
        if script:
            assert has_hint == scrolls
        elif width == 390:
            assert has_hint or not scrolls
        if kind == "cards" and width == 390:
            assert not scrolls
            assert not has_hint


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_has_verdict_picture_and_table(opened, scheme):
    page = opened("full", 1280, color_scheme=scheme)
    for selector in (".said li", "[id^=picture-first] svg", "#table tbody th"):
        box = page.locator(selector).first.bounding_box()
        assert box["y"] + box["height"] <= 900, selector


def shown_of(page, key):
    """The number of visible elements of a method, by picture."""
    return page.evaluate(
        """key => Object.fromEntries([...document.querySelectorAll('figure')].map(f => [f.id,
            [f, ...f.querySelectorAll('[data-method]')].filter(part => part.dataset.method === key
                && part.getClientRects().length > 0).length]))""",
        key,
    )


def test_a_method_can_be_hidden_in_every_picture_and_shown_again(opened):
    page = opened()
    shown = {key: shown_of(page, key) for key in ("laplace", "network")}
    pictures = [name for name in shown["laplace"] if name.startswith(("picture-r", "picture-s"))]
    assert sum(shown["laplace"][name] > 0 for name in pictures) >= 7
    assert shown["laplace"]["picture-severity-nll"] > 0
    page.get_by_role("checkbox", name="Laplace, all parameters").uncheck()
    assert set(shown_of(page, "laplace").values()) == {0}
    assert shown_of(page, "network") == shown["network"]
    assert not page.locator("#picture-sweep-laplace").is_visible()
    page.get_by_role("checkbox", name="Laplace, all parameters").check()
    assert shown_of(page, "laplace") == shown["laplace"]


def paper(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def stroke(page):
    return page.evaluate(
        """getComputedStyle(
            document.querySelector('#picture-severity-nll [data-method=laplace] path')).stroke"""
    )


def test_dark_mode_by_the_system_and_by_the_button(opened):
    light = opened(color_scheme="light")
    dark = opened(color_scheme="dark")
    assert paper(light) == "rgb(255, 255, 255)"
    assert paper(dark) == "rgb(21, 24, 28)"
    assert stroke(light) != stroke(dark)
    colours = paper(light), stroke(light)
    light.locator("#theme").click()
    assert (paper(light), stroke(light)) == (paper(dark), stroke(dark))
    light.locator("#theme").click()
    assert (paper(light), stroke(light)) == colours


def test_values_at_the_pointer_and_by_keys(opened):
    page = opened()
    figure = page.locator("#picture-severity-nll")
    svg = figure.locator("svg")
    tip = figure.locator(".tip")
    assert tip.text_content() == ""
    svg.focus()
    page.keyboard.press("ArrowRight")
    first = tip.text_content()
    assert first.startswith("Network, severity 0\nNLL")
    page.keyboard.press("ArrowRight")
    assert tip.text_content().startswith("Network, severity 1\nNLL")
    page.keyboard.press("Escape")
    assert tip.text_content() == ""
    box = figure.locator("[data-method=network] use").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "severity 0" in tip.text_content()
    page.get_by_role("checkbox", name="Network").uncheck()
    svg.focus()
    page.keyboard.press("ArrowRight")
    assert "Network" not in tip.text_content()


def test_it_prints(opened, tmp_path):
    page = opened(color_scheme="dark")
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
    page.set_viewport_size({"width": 680, "height": 960})  # A4 between its margins
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert paper(page) == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible()


@pytest.mark.slow
def test_without_scripts_everything_is_there_but_the_controls(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("#picture-severity-nll svg").is_visible()
    assert page.locator("#theme").count() == 1
    assert not page.locator("#theme").is_visible()
    assert page.locator("input[type=checkbox]:visible").count() == 0
    assert page.get_by_role("heading", name="Are the probabilities right?").is_visible()
