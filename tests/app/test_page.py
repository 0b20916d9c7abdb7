"""The page in a real browser: with the mouse, with keys alone, wide and narrow, shared, and with hostile text."""

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvprobe.app.address import Edit
from kvprobe.app.microscope import look
from kvprobe.app.page import example, save_session
from kvprobe.app.server_backend import MISSING
from kvprobe.engines.served_model import NO_ATTENTION, ServedModel
from kvprobe.engines.server import LlamaServer
from kvprobe.inference.model import Model
from kvprobe.probes.scan import LEAK, NONE
from tests.app.made_up import HOSTILE, START, serving
from tests.browser import needs_browser
from tests.devtools import Browser, Tab, browsing

pytestmark = needs_browser
READY = "document.querySelector('.slot') && !document.body.hasAttribute('aria-busy')"
REPLY = "document.querySelector('[data-arm=now] .reply-text')?.textContent ?? ''"
STATUS = "document.querySelector('#status').textContent"


@pytest.fixture(scope="module")
def address(tiny_llama: Model) -> Iterator[str]:
    with serving(tiny_llama) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def opened(browser: Browser, address: str, width: int = 1280) -> Tab:
    tab = browser.tab(address, width)
    tab.until(READY)
    return tab


def settled(tab: Tab, words: str) -> None:
    tab.until(f"{READY} && {STATUS}.includes({json.dumps(words)})")


def click(tab: Tab, selector: str) -> None:
    tab.do(f"document.querySelector({json.dumps(selector)}).click()")


def turn(name: str) -> str:
    number = START.names.index(name)
    return f"[...document.querySelectorAll('.turn-name:not([disabled])')][{number}]"


def disabled(tab: Tab) -> set[str]:
    """The edits that cannot be clicked, though something is chosen."""
    return set(tab.do("[...document.querySelectorAll('[data-edit]:disabled')].map(({ dataset }) => dataset.edit)"))


def edits(tab: Tab) -> list[dict[str, object]]:
    at = tab.do("new URLSearchParams(location.hash.slice(1)).get('at')")
    return json.loads(at or "{}").get("edits", [])


def shared(browser: Browser, tab: Tab, folder: Path) -> Tab:
    """The session in a tab, saved and opened as a file."""
    browser.downloads(folder)
    click(tab, "#share")
    settled(tab, "Saved")
    file = folder / "kvprobe.html"
    while not file.exists():
        tab.do("new Promise((done) => setTimeout(done, 20))")
    return opened(browser, file.as_uri())


def reply_without_m1(tab: Tab, model: Model) -> str:
    """Hides a turn by clicks; the reply is that of the model."""
    tab.do(f"{turn('m1')}.click()")
    click(tab, "[data-edit=mask]")
    settled(tab, "mask m1")
    masked = model.generate(model.prefill(START.chat).mask("m1"), START.ask, max_new_tokens=START.new).text
    assert tab.do(REPLY) == masked
    return masked


def test_a_turn_is_hidden_and_damaged_and_undone_and_the_session_opens_offline(
    browser: Browser, address: str, tiny_llama: Model, tmp_path: Path
):
    tab = opened(browser, address)
    masked = reply_without_m1(tab, tiny_llama)
    assert "cache = cache.mask('m1')" in tab.do("document.querySelector('#python').textContent")
    assert tab.do("document.querySelectorAll('#remembered canvas').length") == 1
    assert tab.do("document.querySelectorAll('.arcs path').length") >= 1

    tab.drag("#slot-4", "#slot-9")
    assert tab.do("document.querySelector('#chosen').textContent") == "Chosen: slots 4 to 9."
    click(tab, "[data-edit=damage]")
    settled(tab, "damage zeros at 30 % slots 4–9")
    assert edits(tab) == [{"kind": "mask", "segments": ["m1"]},
                          {"kind": "damage", "slots": [4, 10], "fault": "zeros", "rate": 0.3}]  # fmt: skip
    damaged = tab.do("[...document.querySelectorAll('.slots .damaged')].map(({ id }) => Number(id.slice(5)))")
    assert damaged
    assert set(damaged) <= set(range(4, 10))
    click(tab, "#undo")
    settled(tab, "mask m1")
    assert len(edits(tab)) == 1
    tab.do(f"{turn('m1')}.click()")
    tab.do("document.querySelector('#request').value = 'so it is'")
    click(tab, "[data-edit=compact]")
    settled(tab, "compact (evict) m1")
    tab.do("[...document.querySelectorAll('.turn-name')].at(-1).click()")
    assert tab.do("document.querySelector('#chosen').textContent") == "Chosen: summary."
    click(tab, "#undo")
    settled(tab, "mask m1")
    tab.do(f"{turn('m2')}.click()")
    tab.do("document.querySelector('#instead').value = 'the mill has 7.'")
    click(tab, "[data-edit=patch]")
    settled(tab, "patch from m0 “the mill has 7.” into m2")
    click(tab, "#undo")
    settled(tab, "mask m1")
    assert tab.do("document.querySelectorAll('#states li').length") == 5
    click(tab, "#show-attention")
    tab.until("document.querySelector('#attention .heads-pattern svg')")
    click(tab, "#show-readings")
    tab.until("document.querySelectorAll('.exchange').length === 1")
    tab.until("document.querySelector('#attention .heads-pattern svg')")  # it is drawn again, a moment later

    browser.downloads(tmp_path)
    for place, file in (("#strip-saving", "conversation"), ("#remembered", "what-later-slots-hold-of-what-is-hidden")):
        for kind in ("svg", "png"):
            click(tab, f"{place} .saving button:nth-child({1 + (kind == 'png')})")
            for _ in range(500):
                if (tmp_path / f"{file}.{kind}").exists():
                    break
                tab.do("new Promise((done) => setTimeout(done, 20))")
        picture = ElementTree.parse(tmp_path / f"{file}.svg").getroot()
        assert len(picture) > 80
        assert {element.tag.rpartition("}")[2] for element in picture.iter()} == {"svg", "rect", "text"}
        assert (tmp_path / f"{file}.png").read_bytes().startswith(b"\x89PNG")
    offline = shared(browser, tab, tmp_path)
    assert offline.do(REPLY) == masked
    offline.until("document.querySelector('#attention .heads-pattern svg')")
    assert offline.do("document.querySelectorAll('[data-edit]:not([disabled])').length") == 0
    assert not browser.complaints


def test_keys_alone_hide_a_run_of_slots_and_ask_again(browser: Browser, address: str):
    tab = opened(browser, address)
    tab.until("document.activeElement === document.body")
    for _ in range(3):  # the first turn that can be chosen, then its slots
        tab.press("Tab")
        if tab.do("document.activeElement.classList.contains('slots')"):
            break
    tab.press("ArrowRight", 2)
    tab.press("ArrowRight", 3, shift=True)
    assert tab.do("document.querySelectorAll('[aria-selected=true]').length") == 4
    for _ in range(30):
        tab.press("Tab")
        if tab.do("document.activeElement.dataset.edit === 'evict'"):
            break
    tab.press("Enter")
    settled(tab, "evict slots")
    assert edits(tab)[0]["kind"] == "evict"
    tab.do("document.activeElement.blur()")
    tab.press("z", ctrl=True)
    settled(tab, "Everything in view")
    assert edits(tab) == []
    assert not browser.complaints


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_text_is_shown_and_runs_nothing_and_nothing_is_wider_than_the_page(
    browser: Browser, address: str, width: int
):
    tab = opened(browser, address + "#at=" + "%7B%22edits%22%3A%5B%7B%22kind%22%3A%22mask%22%2C%22segments%22%3A%5B"
                 "%22m0%22%5D%7D%5D%7D", width)  # fmt: skip
    settled(tab, "mask m0")
    assert HOSTILE in tab.do("document.querySelector('#python').textContent")
    assert tab.do("document.querySelectorAll('img, main script').length") == 0
    assert tab.do("document.documentElement.scrollWidth") <= width
    assert not browser.complaints


def test_two_tabs_do_not_mix_and_an_address_that_is_none_is_refused(browser: Browser, address: str):
    one, two = opened(browser, address), opened(browser, address)
    for tab, name in ((one, "m1"), (two, "m0")):
        tab.do(f"{turn(name)}.click()")
        click(tab, "[data-edit=evict]")
    settled(one, "evict m1")
    settled(two, "evict m0")
    for tab, name in ((one, "m1"), (two, "m0")):
        named = "slot.closest('.turn').querySelector('button').firstChild.textContent"
        gone = f"new Set([...document.querySelectorAll('.slots .gone')].map((slot) => {named}))"
        assert tab.do(f"[...{gone}]") == [name]
    shown = edits(one)
    for wrong in ("[]", "{", '{"messages": "all"}', '{"edits": [{"kind": "exec"}]}', '{"edits": 3}'):
        one.do(f"location.hash = '#' + new URLSearchParams({{ at: {json.dumps(wrong)} }})")
        one.until("document.querySelector('#status').classList.contains('wrong')")
        assert edits(one) == shown
        shown = []
        one.do("location.hash = ''")
        settled(one, "Everything in view")
    again = browser.tab(address + "#at=%7Bbroken")
    again.until(f"{READY} && {STATUS}.includes('cannot be read')")
    assert HOSTILE in again.do("document.querySelector('#python').textContent")  # that of the start
    one.do(f"{turn('m1')}.click()")
    one.do("document.querySelector('#rate').value = '700'")
    click(one, "[data-edit=damage]")
    one.until(f"{STATUS}.startsWith('rate is 7')")
    one.do("document.querySelector('#rate').value = '30'")
    click(one, "[data-edit=damage]")
    settled(one, "damage zeros at 30 % m1")
    assert len(edits(one)) == 1
    assert not browser.complaints


def test_a_turn_is_hidden_in_a_llama_server_and_what_that_cannot_show_is_said(
    browser: Browser, tiny_llama: Model, tiny_server: LlamaServer, tmp_path: Path
):
    with serving(ServedModel(tiny_server)) as (address, _):
        tab = opened(browser, address)
        masked = reply_without_m1(tab, tiny_llama)
        assert "f32 in a llama-server" in tab.do("document.querySelector('#model').textContent")
        for place, what in (("attention", "attention"), ("remembered", "contamination"), ("readings", "readings")):
            assert tab.do(f"document.querySelector('#{place}').lastElementChild.textContent") == MISSING[what]
        tab.do(f"{turn('m2')}.click()")
        assert disabled(tab) == {"mask", "evict"}
        assert "the last one cannot be hidden" in tab.do("document.querySelector('#why-what-is-chosen').textContent")
        tab.do("document.querySelector('#request').value = 'so it is'")
        click(tab, "[data-edit=compact]")
        settled(tab, "compact (evict) m2")
        assert tab.do("document.querySelector('#policy').value") == "SinkWindow(4, 32)"
        tab.do("document.querySelector('#policy').value = 'SnapKV(20)'")
        tab.do("document.querySelector('#policy').dispatchEvent(new Event('input'))")
        assert "policy" in disabled(tab)
        assert NO_ATTENTION in tab.do("document.querySelector('#why-the-whole-cache').textContent")
        assert tab.do("[...document.querySelector('#fault').options].filter(({ disabled }) => disabled).length") == 1
        click(tab, "#undo")
        settled(tab, "mask m1")
        assert tab.do("document.querySelectorAll('#states li').length") == 3
        offline = shared(browser, tab, tmp_path)
        assert offline.do(REPLY) == masked
    assert not browser.complaints


def test_the_example_shows_readings_beside_chance_and_which_the_reply_uses(browser: Browser, tmp_path: Path):
    tab = opened(browser, save_session(example(), tmp_path / "example.html").as_uri())
    lights = (
        "[...document.querySelectorAll('.exchange')]"
        ".map((box) => [...box.querySelectorAll('.light')].map(({ textContent }) => textContent))"
    )
    assert tab.do(lights) == [["readable", "used"], ["neither readable nor used"], ["used"]]
    (state,) = (state for state in example()["states"] if state["readings"])
    for number, row in enumerate(state["readings"]["exchanges"][0]["probes"]):
        cells = (
            f"[...document.querySelectorAll('.exchange tbody tr')[{number}].children].map((cell) => cell.textContent)"
        )
        *_, least, verdict = tab.do(cells)
        assert verdict == row["verdict"]
        if verdict in (LEAK, NONE):
            assert (verdict == LEAK) == (least != "–" and 100 * row["probability"] >= float(least.split()[0]))
    assert not browser.complaints


def test_a_state_is_shown_in_a_notebooks_frame(browser: Browser, tiny_llama: Model, tmp_path: Path):
    state = look(tiny_llama, START.chat, START.ask, Edit("mask", ("m1",)), new=START.new)
    notebook = tmp_path / "notebook.html"
    notebook.write_text(state._repr_html_().replace("sandbox=", "data-sandbox="))  # so that the test may look inside
    tab = browser.tab(notebook.as_uri())
    within = "document.querySelector('iframe')?.contentDocument"
    tab.until(f"{within}?.querySelector('[data-arm=now]')")
    for _ in range(2):  # before and after its only link was followed
        assert tab.do(f"{within}.querySelector('[data-arm=now] .reply-text').textContent") == state.replies[1].text
        tab.do(f"{within}.querySelector('#states a').click()")
    assert tab.do(f"{within}.querySelector('#python').textContent") == state.python
    assert not browser.complaints
