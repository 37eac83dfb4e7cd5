"""The page in a real browser, before the real server with a tiny model. Skipped without chromium."""

import re
from contextlib import contextmanager
from itertools import product

import httpx
import pytest
from browser import chromium
from pydantic import SecretStr
from raw_http import served, wait_until

from attncache_core import native

TEXT = "where is my lost card today"
KEY = "operator-key-0123456789"
EXPLAINED = "document.querySelector('.explanation') !== null"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def url(exact_engine):
    with served(exact_engine, admin=True) as server:
        yield server.url


@contextmanager
def opened(browser, url):
    """Yield the page of the server, once the page knows the model."""
    with browser.page(url) as page:
        page.wait("document.getElementById('model').textContent.includes('tiny-bert')")
        yield page


def compute(page, text):
    page.type("#text", text)
    page.click("#send")
    page.wait(EXPLAINED)


def embed(url, *texts):
    assert httpx.post(f"{url}/embed", json={"inputs": texts}).status_code == 200


COMPILED_OFF_IS_HIDDEN = "document.getElementById('compiled-off').hidden"


def test_page_loads_without_problems_and_asks_nobody_else(browser, url, monkeypatch):
    monkeypatch.setattr(native, "compiled_off", lambda: None)
    with browser.page(url) as page:
        page.wait("document.getElementById('state').textContent === 'live'")
        assert page.text("#model").startswith("tiny-bert · float32")
        assert page.run(COMPILED_OFF_IS_HIDDEN)
        assert page.problems() == []
        assert [address for address in page.requested() if not address.startswith(url)] == []


def test_page_says_why_no_compiled_code_computes(browser, url, monkeypatch):
    reason = "the compiler failed; install again"
    monkeypatch.setattr(native, "compiled_off", lambda: reason)
    with opened(browser, url) as page:
        assert not page.run(COMPILED_OFF_IS_HIDDEN)
        said = f"This server computes slowly, without compiled code: {reason}."
        assert page.text("#compiled-off") == said


def test_numbers_move_after_requests(browser, url):
    with browser.page(url) as page:
        page.wait("document.getElementById('texts').textContent === '0'")
        before = int(page.text("#start-miss"))
        embed(url, "my new card", "the old bank", "please close it")
        embed(url, "my new card")
        page.wait(f"Number(document.getElementById('start-miss').textContent) === {before + 3}")
        page.wait("document.getElementById('p50').textContent !== '–'")
        assert page.text("#texts") != "0"
        assert page.text("#recent-miss").endswith("%")
        page.wait("document.getElementById('saved-kept').textContent !== '0%'")
        assert re.fullmatch("1 text|[02-9] texts", page.text("#saved-kept + td"))
        assert page.problems() == []


def test_box_embeds_a_text_and_shows_both_maps_and_why(browser, url):
    with opened(browser, url) as page:
        compute(page, TEXT)
        assert "32 dimensions" in page.text("#answer")
        assert "0/1 reused attention maps" in page.text("#answer")
        assert page.text(".verdict").startswith("miss")
        assert "Databases hold no texts" in page.text(".found")
        assert page.text(".chips").split() == ["[CLS]", *TEXT.split(), "[SEP]"]
        assert page.run("document.querySelectorAll('.thumbnail').length") == 12  # 3 layers of 4 heads
        assert page.run(COLOURS_OF_LARGE_MAPS) == [True, True]
        assert page.problems() == []
        assert_every_field_and_button_has_a_name(page)


def assert_every_field_and_button_has_a_name(page):
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [
        bool(node.get("name", {}).get("value"))
        for node in nodes
        if node.get("role", {}).get("value") in ("button", "textbox", "radio", "img")
    ]
    assert len(named) > 15
    assert all(named)


# Whether each of the two large maps has many colours.
COLOURS_OF_LARGE_MAPS = """
[...document.querySelectorAll(".map canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(pixels.buffer)).size > 20;
})
"""


def test_recorded_text_is_shown_as_a_hit(browser, url, tiny_corpus):
    with opened(browser, url) as page:
        compute(page, tiny_corpus[5].text)
        assert page.text(".verdict").startswith("hit")
        assert "This very text is recorded" in page.text(".checks")


def test_maps_are_read_by_keyboard(browser, url):
    with opened(browser, url) as page:
        compute(page, TEXT)
        page.click('.thumbnail[data-layer="0"][data-head="0"]')
        page.run("document.querySelector('.thumbnail[aria-pressed=true]').focus()")
        page.press("ArrowRight")
        page.press("ArrowDown")
        assert page.text(".maps h4") == "Layer 2, head 2"
        page.run("document.querySelector('.map canvas').focus()")
        page.press("ArrowDown")
        assert page.text(".readout").startswith("“where” attends to “[CLS]”: own 0.")


def test_box_classifies_by_labels(browser, url):
    with opened(browser, url) as page:
        page.click('input[value="classify"]')
        page.type("#labels", "card, transfer")
        compute(page, TEXT)
        assert sorted(
            page.run("[...document.querySelectorAll('.scores th')].map((cell) => cell.textContent)")
        ) == ["card", "transfer"]


def test_text_is_shown_and_never_run(browser, url):
    with opened(browser, url) as page:
        compute(page, "<img src=x onerror=alert(1)> card <b>lost</b>")
        assert page.run("document.querySelectorAll('.explanation img, .explanation b').length") == 0
        assert page.problems() == []


def test_error_of_the_server_is_shown(browser, url):
    with opened(browser, url) as page:
        page.run("document.getElementById('text').value = String.fromCharCode(0)")
        page.click("#send")
        page.wait("!document.getElementById('problem').hidden")
        assert "null bytes" in page.text("#problem")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(browser, url, dark):
    with browser.page(url, dark=dark) as page:
        grounds, fronts = (
            {name: page.run(LUMINANCE % name) for name in names}
            for names in (("--surface", "--page"), ("--ink", "--muted", "--accent", "--bad"))
        )
        assert (fronts["--ink"] > grounds["--surface"]) == dark
        for (front, light), (ground, other) in product(fronts.items(), grounds.items()):
            # The contrast that WCAG asks for.
            assert (max(light, other) + 0.05) / (min(light, other) + 0.05) >= 4.5, (front, ground)


# The relative luminance of a colour of the style sheet, as WCAG defines it.
LUMINANCE = """
(() => {
  const colour = getComputedStyle(document.documentElement).getPropertyValue("%s").trim();
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = colour.match(/\\w\\w/g).map((part) => linear(parseInt(part, 16) / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
})()
"""


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_page_does_not_scroll_sideways(browser, url, width):
    with browser.page(url, width=width, height=740) as page:
        page.wait("document.getElementById('state').textContent === 'live'")
        assert page.run("document.documentElement.scrollWidth") <= width
        compute(page, "my card is lost and " * 11)
        assert page.run("document.documentElement.scrollWidth") <= width


def test_hidden_or_paused_page_asks_for_nothing(browser, url):
    with browser.page(url) as page:
        page.wait("document.getElementById('state').textContent === 'live'")
        page.click("#pause")
        assert page.text("#state") == "paused"
        assert_asks_for_nothing(page)
        page.click("#pause")
        page.wait("document.getElementById('state').textContent === 'live'")
        page.run(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        before = assert_asks_for_nothing(page)
        page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        wait_until(lambda: len(page.requested()) > before)


def assert_asks_for_nothing(page):
    """Check two polls, after the last one has ended. Return how often the page has asked."""
    page.run("new Promise((resolve) => setTimeout(resolve, 500))")
    before = len(page.requested())
    page.run("new Promise((resolve) => setTimeout(resolve, 1600))")
    assert len(page.requested()) == before
    return before


def test_page_asks_for_a_key_and_forgets_it(browser, exact_engine):
    with (
        served(exact_engine, admin=True, api_key=SecretStr(KEY)) as server,
        browser.page(server.url) as page,
    ):
        page.wait("document.getElementById('key-dialog').open")
        assert page.run("document.getElementById('key-unknown').hidden")
        for wrong in ("another key", "\u201ca key in a letter\u2019s quotes\u201d"):
            page.type("#key", wrong)
            page.click("#key-form button[type=submit]")
            page.wait("document.getElementById('key-dialog').open")
            page.wait("!document.getElementById('key-unknown').hidden")
        page.type("#key", KEY)
        page.click("#key-form button[type=submit]")
        page.wait("document.getElementById('state').textContent === 'live'")
        compute(page, TEXT)
        assert (
            page.run("JSON.stringify([localStorage.length, sessionStorage.length, document.cookie])")
            == '[0,0,""]'
        )
        page.open(server.url)
        page.wait("document.getElementById('key-dialog').open")


def test_without_admin_the_box_says_how_to_see_more(browser, exact_engine):
    with served(exact_engine) as server, opened(browser, server.url) as page:
        page.type("#text", TEXT)
        page.click("#send")
        page.wait("document.getElementById('explanation').textContent.includes('--admin')")
        assert "32 dimensions" in page.text("#answer")
        assert page.problems() == []


def test_page_to_try_the_routes_shows_them_and_asks_nobody_else(browser, url):
    with browser.page(f"{url}/docs") as page:
        page.wait("document.querySelectorAll('.opblock').length > 5")
        assert "/embed" in page.text("#routes")
        page.click("[id$='embed_post'] .opblock-summary-control")
        page.wait("document.querySelector('.try-out__btn') !== null")
        assert page.problems() == []
        asked = page.requested()
        assert f"{url}/openapi.json" in asked
        # Pictures of the style sheet are data, and nothing is asked of any other server.
        assert [address for address in asked if not address.startswith((url, "data:"))] == []
