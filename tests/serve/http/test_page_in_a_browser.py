"""The page at GET / in a real Chromium, over the fake engine. It is skipped without Playwright (the `browser` extra) or
without a Chromium on the path."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from described import check_events
from fakes import STORY, UNICODE_STORY, FakeEngine, wait_for
from fixed_text import CALL, THOUGHT, serving

from specserve.serve.engine.interface import EngineStats
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
LIGHT = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"}
DARK = LIGHT | {"color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
SMALL_PHONE = {"viewport": {"width": 320, "height": 640}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, server: HttpServer) -> Iterator[Any]:
    """Opens the page; in the end nothing may have gone wrong, nor to another origin."""
    contexts, wrong = [], []

    def open_page(options: dict[str, Any] = LIGHT, url: str = server.url, *, loses_server: bool = False) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        if not loses_server:  # a browser reports that on its own
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        own = httpx.URL(url).netloc
        page.on("request", lambda request: None if httpx.URL(request.url).netloc == own else wrong.append(request.url))
        page.goto(url)
        expect(page.locator("#state")).to_have_text(re.compile("Ready|Compiling|Needs a key"))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def _ask(page, text: str, answer: int = 1) -> None:
    page.get_by_label("Prompt").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".assistant:not([aria-busy])")).to_have_count(answer)


def test_chat_streams_tokens_coloured_by_their_origin(open_page, fake_engine: FakeEngine) -> None:
    page = open_page()
    page.get_by_label("Seed").fill("0")
    _ask(page, "hi")
    tokens = page.locator(".assistant [data-d]")
    assert tokens.all_text_contents() == list(STORY)
    assert [token.get_attribute("data-d") for token in tokens.all()] == ["1", "0", "1", "0", "1", "0", "1", "0", "1"]
    expect(page.locator(".assistant .note")).to_have_text("9 tokens in 4 forwards, 5 of them guessed by the draft")
    expect(page.locator("#announce")).to_contain_text(STORY)
    _ask(page, "unicode", answer=2)
    assert bytes(fake_engine.requests[-1].prompt_ids).startswith(f"<user>hi<assistant>{STORY}<user>unicode".encode())
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".assistant")).to_have_count(0)


@pytest.mark.parametrize("options", [LIGHT, PHONE], ids=["desk", "phone"])
def test_reasoning_folds_and_calls_are_cards_that_take_results(open_page, options: dict[str, Any]) -> None:
    """Every token stands somewhere with its colour, also the marks; results go back to the model."""
    with serving() as (engine, url):
        engine.answers = True
        page = open_page(options, url.removesuffix("/v1"))
        page.get_by_text("Tools", exact=True).click()
        page.get_by_label("Tools, a JSON list").fill("[{")
        page.get_by_label("Prompt").fill("What will the weather be?")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("The tools are not JSON")
        page.get_by_role("button", name="Insert an example").click()
        page.get_by_label("Prompt").focus()
        page.keyboard.press("Enter")
        expect(page.locator(".assistant:not([aria-busy])")).to_have_count(1)
        thought, call = page.locator(".thought"), page.get_by_role("region", name="Call of weather")
        expect(thought).not_to_have_attribute("open", "")
        thought.locator("summary").click()
        expect(thought.locator(".tokens")).to_be_visible()
        shown = "".join(thought.locator("[data-d]:not(.mark)").all_text_contents()).strip()
        assert shown == "They want weather."
        assert call.locator("dt").all_text_contents() == ["city", "days"]
        assert call.locator("dd").all_text_contents() == ["Genève", "2"]
        assert "tool_call" not in call.locator("h4").text_content()
        written = "".join(page.locator(".assistant [data-d]").all_text_contents())
        assert written == THOUGHT + CALL
        depths = [token.get_attribute("data-d") for token in page.locator(".assistant [data-d]").all()]
        assert depths[:6] == ["1", "2", "0"] * 2
        page.get_by_label("Result of weather").fill("21 degrees")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant:not([aria-busy])")).to_have_count(2)
        expect(page.locator(".assistant .content").last).to_have_text("It will be fine.")
        assert b"<tool>21 degrees" in bytes(engine.requests[-1].prompt_ids)
        assert page.evaluate(OVERFLOW) <= 0
        page.close()


def test_the_tree_of_every_step_can_be_seen(open_page) -> None:
    page = open_page()
    page.get_by_label("Seed").fill("0")
    _ask(page, "hi")
    expect(page.locator("#tree-step")).to_have_text("step 5 of 5")
    page.locator(".assistant [data-step]").nth(1).hover()
    expect(page.locator("#tree-step")).to_have_text("step 2 of 5")
    texts = {kind: page.locator(f"#tree .{kind} text").all_text_contents() for kind in ("root", "accepted", "rejected")}
    assert texts == {"root": ["b"], "accepted": ["c"], "rejected": ["!", "?"]}
    assert page.locator("#tree .own text").all_text_contents() == ["d"]
    expect(page.locator("#tree svg")).to_have_attribute("aria-label", re.compile("3 tokens proposed, 1 accepted"))


def test_a_race_runs_twice_and_says_equal(open_page, fake_engine: FakeEngine) -> None:
    page = open_page()
    page.get_by_role("tab", name="Race").click()
    page.get_by_label("Prompt").fill("paced")
    page.get_by_role("button", name="Start race").click()
    expect(page.locator("#verdict b")).to_have_text("Equal")
    expect(page.locator("#verdict")).to_contain_text("× the tokens per second")
    off, on = fake_engine.requests[-2:]
    assert (off.params.speculation, on.params.speculation) == (0, None)
    assert off.params == dataclasses.replace(on.params, speculation=0)
    assert off.cache_salt != on.cache_salt
    texts = [page.locator(f"{lane} .said").text_content() for lane in ("#lane-off", "#lane-on")]
    assert texts[0] == texts[1] != ""
    assert page.locator('#lane-off [data-d]:not([data-d="0"])').count() == 0
    assert page.locator('#lane-on [data-d="1"]').count() > 0
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#lane-on .said")).to_have_text(texts[1] or "")
    expect(page.locator("#lane-off .said")).to_have_text(texts[0] or "")


@pytest.mark.parametrize(
    ("state", "why"), [({"num_programs_left": 3}, "still compiling"), ({"num_waiting": 5}, "Other requests")]
)
def test_a_disturbed_race_tells_no_times(open_page, fake_engine: FakeEngine, monkeypatch, state, why: str) -> None:
    monkeypatch.setattr(fake_engine, "state", EngineStats(**state))
    page = open_page()
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("button", name="Start race").click()
    expect(page.locator("#verdict b")).to_have_text("Equal")
    expect(page.locator("#verdict")).to_contain_text(why)
    expect(page.locator("#verdict")).not_to_contain_text("×")


def test_the_keyboard_alone_is_enough(open_page, fake_engine: FakeEngine) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # skips to the prompt
    page.keyboard.press("Tab") if page.evaluate("document.activeElement.id") != "prompt" else None
    page.keyboard.type("slow")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("down")
    page.keyboard.press("Enter")
    wait_for(lambda: fake_engine.num_active == 1)
    assert b"<user>slow\ndown" in bytes(fake_engine.requests[-1].prompt_ids)
    expect(page.locator(".assistant .said")).to_contain_text("aaa")
    page.keyboard.press("Escape")
    wait_for(lambda: fake_engine.num_active == 0)  # a client that stops reading frees the slot
    expect(page.locator(".assistant .note")).to_contain_text("tokens in")
    page.locator("#steps").focus()
    page.keyboard.press("Home")
    expect(page.locator("#tree-step")).to_contain_text("step 1 of")
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#race")).to_be_visible()
    focusable = ", ".join(f"{kind}:visible" for kind in FOCUSABLE)
    names = [item.evaluate(NAME) for item in page.locator(focusable).all()]
    assert all(names), f"something that can be focused has no name: {names}"


FOCUSABLE = ("button", "input", "select", "textarea", "summary", "[tabindex='0']")
NAME = """e => e.getAttribute('aria-label') || e.labels?.[0]?.textContent
  || e.getAttribute('aria-labelledby') || e.textContent"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("phone", [PHONE, SMALL_PHONE], ids=["phone", "small phone"])
def test_a_phone_need_not_scroll_sideways(open_page, phone: dict[str, Any]) -> None:
    page = open_page(phone)
    _ask(page, "unicode " + "long" * 60)
    page.get_by_text("This request in code").click()
    assert page.evaluate(OVERFLOW) <= 0
    for part in ("#send", "#prompt", "#speculation"):
        box = page.locator(part).bounding_box()
        assert box
        assert 0 <= box["x"] <= box["x"] + box["width"] <= phone["viewport"]["width"]
        assert box["height"] >= 32
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("button", name="Start race").click()
    expect(page.locator("#verdict b")).to_have_text("Equal")
    assert page.evaluate(OVERFLOW) <= 0


CONTRASTS = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = parts(color).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    const color = getComputedStyle(e).backgroundColor;
    return (parts(color)[3] ?? 1) === 0 && e.parentElement ? behind(e.parentElement) : color;
  };
  const found = {};
  const texts = ".ramp b, .own, .hint, .note, .said span span, h2, .figures dt, button, .chart h3";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.checkVisibility() || e.disabled) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    found[`${e.tagName}.${e.className} ${e.dataset.d ?? ""} ${e.textContent}`.slice(0, 60)] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read_in_both_schemes(open_page, scheme: dict[str, Any]) -> None:
    page = open_page(scheme)
    _ask(page, "hi")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128")
    assert light == (scheme is LIGHT)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}


def test_a_key_is_asked_for_and_kept_in_the_tab(open_page, fake_engine: FakeEngine) -> None:
    server = HttpServer(create_app(fake_engine, api_keys=["secret"]), port=0)
    server.start()
    try:
        page = open_page(url=server.url)
        expect(page.locator("#state")).to_have_text("Needs a key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("Ready")
        _ask(page, "hi")
        page.reload()
        expect(page.locator("#state")).to_have_text("Ready")
        assert "secret" not in page.content()
        page.goto(server.url.replace("//", "//any:secret@"))  # browsers fetch nothing from such an address
        expect(page.locator("#state")).to_have_text("Ready")
        _ask(page, "hi")
        page.get_by_text("This request in code").click()
        expect(page.locator("#code")).to_contain_text(server.url)
        assert "secret" not in page.content()
        page.close()
    finally:
        server.stop()


def test_a_model_without_a_chat_template_continues_texts(open_page, fake_engine, monkeypatch) -> None:
    monkeypatch.setattr(type(fake_engine.tokenizer), "has_chat_template", False)
    server = HttpServer(create_app(fake_engine), port=0)
    server.start()
    try:
        page = open_page(url=server.url)
        _ask(page, "once upon")
        assert bytes(fake_engine.requests[-1].prompt_ids) == b"once upon"
        page.close()
    finally:
        server.stop()


def test_the_state_of_the_server_is_shown(open_page, fake_engine: FakeEngine, monkeypatch) -> None:
    state = EngineStats(num_programs_left=12, num_pages=64, num_pages_held=16)
    monkeypatch.setattr(fake_engine, "state", state)
    page = open_page()
    expect(page.locator("#state")).to_have_text("Compiling, 12 programs left")
    expect(page.get_by_role("progressbar", name="Programs compiled")).to_be_visible()
    expect(page.locator("#live")).to_contain_text("16 / 64")
    monkeypatch.setattr(fake_engine, "state", EngineStats())
    expect(page.locator("#state")).to_have_text("Ready")


def test_the_next_prompt_may_be_typed_while_an_answer_streams(open_page, fake_engine: FakeEngine) -> None:
    page = open_page()
    page.get_by_label("Prompt").fill("paced unicode")
    page.keyboard.press("Enter")
    page.get_by_label("Prompt").fill("the next")
    expect(page.locator(".assistant:not([aria-busy])")).to_have_count(1)
    expect(page.get_by_label("Prompt")).to_have_value("the next")


def test_a_server_that_goes_away_is_reported_and_found_again(open_page, fake_engine: FakeEngine) -> None:
    server = HttpServer(create_app(fake_engine), port=0)
    server.start()
    page = open_page(url=server.url, loses_server=True)
    page.get_by_label("Prompt").fill("slow")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .said")).to_contain_text("aaa")
    server.stop()
    expect(page.get_by_role("alert")).to_contain_text("The connection was lost")
    expect(page.locator("#state")).to_have_text("Not reachable")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    server = HttpServer(create_app(fake_engine), port=server.port)
    server.start()
    try:
        expect(page.locator("#state")).to_have_text("Ready")
    finally:
        server.stop()


def test_what_the_server_refuses_is_said(open_page) -> None:
    page = open_page()
    page.get_by_label("Prompt").fill("explode")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("the engine failed on this request")
    expect(page.get_by_label("Prompt")).to_have_value("explode")  # not lost
    _ask(page, "hi")
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize("language", ["curl", "Python"])
def test_the_request_in_code_is_the_request(open_page, fake_engine: FakeEngine, language: str, key: str) -> None:
    """Run as it stands, it asks the engine for what the page asks, and prints what the page shows."""
    server = HttpServer(create_app(fake_engine, api_keys=[key] if key else []), port=0)
    server.start()
    try:
        page = open_page(url=server.url)
        if key:
            page.get_by_label("API key").fill(key)
            page.keyboard.press("Enter")
            expect(page.locator("#state")).to_have_text("Ready")
        page.get_by_label("Seed").fill("0")
        page.get_by_label("Prompt").fill('it\'s a "test" of true, $HOME and \\n: unicode')
        page.get_by_text("This request in code").click()
        page.get_by_role("tab", name=language).click()
        code = page.locator("#code").text_content() or ""
        page.get_by_label("Prompt").focus()
        page.keyboard.press("Enter")
        expect(page.locator(".assistant:not([aria-busy])")).to_have_count(1)
        shown = page.locator(".assistant .content").text_content()
        command = [sys.executable, "-c", code] if language == "Python" else ["bash", "-euc", code]
        environment = os.environ | {"SPECSERVE_API_KEY": key}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        page.close()
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    said = done.stdout
    if language == "curl":
        choices = [choice for event in check_events("/v1/chat/completions", said) for choice in event["choices"]]
        said = "".join(choice["delta"].get("content", "") for choice in choices)
    assert said == shown == UNICODE_STORY
    of_page, of_code = fake_engine.requests[-2:]
    assert of_code.params == of_page.params
    assert of_code.prompt_ids == of_page.prompt_ids
    assert key not in code or not key


SAMPLES = """async () => {
  const { Live } = await import("./page/live.js");
  const live = new Live(document.querySelector("#live"));
  const same = { running: 2, waiting: 1, usage: 0.25, pages: 64, cached: 8, cut: 0, adapters: {}, versions: {} };
  const adapters = { fr: { steps: 10, accepted: 9, cut: 1 } }, drift = 0.125;
  const versions = { "0": { tau: 1.5 }, "001": { tau: 1.75, isServing: 1 } };
  live.push({ time: 0, tokens: 0, steps: 0, accepted: 0, perDepth: [], ...same });
  live.push({ time: 30, tokens: 300, steps: 100, accepted: 100, perDepth: [70, 30], ...same });
  const last = { ...same, adapters, versions, drift };
  live.push({ time: 60, tokens: 900, steps: 200, accepted: 400, perDepth: [180, 150, 70], ...last });
  return live.element.innerHTML;
}"""


def test_charts_draw_what_was_measured(open_page, browser) -> None:
    """20 tokens/s behind 10; tau 4 behind 2, and 3 of all; of 200 steps, 180, 150 and 70 accept at depths 1 to 3. An
    adapter whose 10 steps emitted 18 tokens, and the versions of a head that learns."""
    page = open_page()
    drawn = page.evaluate(SAMPLES)
    page.close()
    still = browser.new_page()  # where no new sample comes
    still.set_content(drawn)
    chart = {each.locator("h3").text_content(): each for each in still.locator(".chart").all()}
    for name, value, note, line in [
        ("Tokens per second", "20", "peak 20", "M80.0 19.0L160.0 4.0"),
        ("Tokens per forward, tau", "3.00", "last minute", "M80.0 19.0L160.0 4.0"),
        ("Pages held", "16 / 64", "8 cached", "M0.0 26.5L80.0 26.5L160.0 26.5"),
    ]:
        assert chart[name].locator(".value b").text_content() == value
        assert chart[name].locator(".value .note").text_content() == note
        assert chart[name].locator("path.line").get_attribute("d") == line
    for name, value, note, taus in [
        ("Adapters", "1 adapter", "tokens per forward since start", ["fr1.80"]),
        ("Head that learns", "version 001", "tau of each; drift 0.13", ["version 01.50", "version 0011.75"]),
    ]:
        assert chart[name].locator(".value b").text_content() == value
        assert chart[name].locator(".value .note").text_content() == note
        assert chart[name].locator(".taus li").all_text_contents() == taus
    bars = chart["Acceptance by depth"]
    assert bars.locator(".value b").text_content() == "90%"
    assert bars.locator(".share").all_text_contents() == ["90%", "75%", "35%"]
    widths = [fill.evaluate("e => e.style.width") for fill in bars.locator(".track i").all()]
    assert widths == ["90%", "75%", "35%"]
    still.close()


def test_charts_tell_what_the_server_counts(open_page, fake_engine: FakeEngine) -> None:
    """Every answer of the fake engine takes 3 steps, of which 3 accept a token at depth 1, and one at depth 2."""
    server = HttpServer(create_app(fake_engine), port=0)
    server.start()
    try:
        page = open_page(url=server.url)
        live = page.locator("#live")
        expect(live).to_contain_text("after the first answer")
        _ask(page, "hi")
        tau = live.locator(".chart", has_text="tau").locator(".value b")
        expect(tau).to_have_text(f"{1 + 4 / 3:.2f}")
        bars = live.locator(".chart", has_text="Acceptance by depth")
        expect(bars.locator(".share")).to_have_text(["100%", "33%"])
        full, track = (bars.locator(".bars li").first.locator(part).bounding_box() for part in (".track i", ".track"))
        assert full
        assert track
        assert full["width"] == pytest.approx(track["width"], abs=1.0)
        rate = live.locator(".chart", has_text="Tokens per second")
        expect(rate.locator(".value .note")).to_have_text(re.compile(r"peak [1-9]"))
        expect(rate.locator("path.line")).to_have_count(1)
        page.close()
    finally:
        server.stop()
