"""Views: whole offline pages, values kept, and no token that becomes anything but text."""

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.report import views
from kvprobe.report.document import HeatMap, TokenView
from tests.browser import driven, needs_browser
from tests.refusals import refused

EVIL = "</script><img src=x onerror=alert(1)>"
HOSTILE = [
    EVIL,
    "<bos>",
    "<|im_start|>",
    "&lt;b&gt;",
    "&amp",
    "&#60;",
    "<!--",
    "<script>",
    "</span>",
    "\n",
    "\t",
    " & ",
    "",
]
GRID = HeatMap(
    "Map", ["0", "12"], ["34 ' Alice'", "35", "36"], [[-0.1, None, 0], [0.83, 0.4, -0.2]], "logits", "layer", "slot"
)
WORDS = TokenView("Words", ["a", "b"], ["K", "V"], [[0.5, -0.25], [1, 2]])


class Reader(HTMLParser):
    """What a page holds: its elements, and the text of its scripts and of the rest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)
        else:
            self.text += data

    @property
    def props(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def test_a_view_holds_a_place_and_its_data_and_nothing_else_for_any_text():
    grid = HeatMap(EVIL, [EVIL], [EVIL], [[1]], EVIL, EVIL, EVIL)
    for markup in (views.heat_map(grid), views.token_view(TokenView(EVIL, HOSTILE, [EVIL], [[1] * len(HOSTILE)]))):
        reader = Reader(markup)
        assert [tag for tag, _ in reader.tags] == ["figure", "figcaption", "div", "script"]
        assert reader.tags[-1][1] == {"type": "application/json"}
        assert EVIL in reader.text
        assert EVIL in reader.props["rows" if "rows" in reader.props else "labels"]
        assert markup.count("<div") == markup.count("</div>") == 1


@given(st.text(st.sampled_from("<>&/!?#;=\"' abltgx0\n\t")))
def test_a_token_is_plain_text_where_the_component_writes_it_as_markup(token: str):
    (written,) = Reader(views.token_view(TokenView("", [token], ["V"], [[1]]))).props["tokens"]
    shown = Reader(written)
    assert not shown.tags
    assert shown.text == written
    assert written.replace("\u2060", "") == token.replace("\t", "⇥").replace("\n", "↵\n")


def test_a_page_has_one_copy_of_each_script_however_many_views():
    page = views.page([GRID, WORDS, GRID, WORDS], "Four")
    assert page.count("var CircuitsVis=") == page.count("function heatMap(") == 1
    assert len([tag for tag, attributes in Reader(page).tags if tag == "script" and not attributes]) == 2


def test_a_page_of_maps_needs_no_library():
    page = views.page([GRID], "Map")
    assert "var CircuitsVis=" not in page
    assert len(page) < 20_000


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else():
    reader = Reader(views.page([GRID, WORDS], EVIL))
    (policy,) = [str(attributes["content"]) for tag, attributes in reader.tags if "http-equiv" in attributes]
    runs = [text for text in reader.scripts if not text.startswith("{")]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in runs]
    assert len(hashes) == 2
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("script-src " + " ".join(f"'sha256-{digest}'" for digest in hashes))
    assert not [attributes for _, attributes in reader.tags if {"src", "href"} & set(attributes)]
    assert not any("sourceMappingURL" in text for text in runs)


def test_rendering_twice_gives_the_same_page():
    assert views.page([GRID, WORDS], "x") == views.page([GRID, WORDS], "x")


def test_large_and_small_values_have_four_significant_digits_and_none_stays_none():
    values = [[0.123456, -12345.6], [1.23456e-7, None]]
    props = Reader(views.heat_map(HeatMap("", ["0", "1"], ["0", "1"], values, "", "", ""))).props
    assert props["values"] == [[0.1235, -12350.0], [1.235e-7, None]]
    assert Reader(views.token_view(TokenView("", ["a"], ["V"], [[1.23456e-7]]))).props["values"] == [[1.235e-7]]


def test_the_labels_of_a_token_view_share_one_scale_around_zero():
    props = Reader(views.token_view(WORDS)).props
    assert props["values"] == [[0.5, 1], [-0.25, 2]]
    assert props["positiveBounds"] == [2, 2]
    assert props["negativeBounds"] == [-2, -2]


def test_without_scripts_a_map_names_its_largest_cells_and_a_token_view_its_text():
    text = Reader(views.heat_map(GRID)).text
    cells = "layer 12, slot 34 ' Alice': +0.83 logits; layer 12, slot 35: +0.4 logits; layer 12, slot 36: -0.2 logits."
    assert f"Largest of 5 cells: {cells}" in text
    assert "<bos> Hi" in Reader(views.token_view(TokenView("", ["<bos>", " Hi"], ["V"], [[1, 2]]))).text


def test_a_map_of_layers_by_a_long_prompts_slots_stays_under_a_quarter_of_a_megabyte():
    values = np.random.default_rng(0).normal(size=(30, 600)).tolist()
    labels = [[str(index) for index in range(count)] for count in (30, 600)]
    assert len(views.heat_map(HeatMap("", *labels, values, "", "layer", "slot"))) < 250_000


@pytest.mark.parametrize(
    ("render", "message"),
    [
        (lambda: views.heat_map(HeatMap("", ["0"], ["0"], [[1], [2]], "", "", "")), "1 rows and 1 columns"),
        (lambda: views.heat_map(HeatMap("", ["0"], ["0", "1"], [[1]], "", "", "")), "[rows][columns]"),
        (lambda: views.heat_map(HeatMap("", [], [], [], "", "", "")), "at least one"),
        (lambda: views.heat_map(HeatMap("", ["0"], ["0"], [[float("nan")]], "", "", "")), "not finite"),
        (lambda: views.heat_map(HeatMap("", ["0"] * 400, ["0"] * 400, [[1] * 400] * 400, "", "", "")), "100,000"),
        (lambda: views.heat_map(HeatMap("", ["0"], ["0"] * 5000, [[1] * 5000], "", "", "")), "4,096"),
        (lambda: views.tokens(["a", "b"], {"K": [1.0]}), "1 labels and 2 tokens"),
        (lambda: views.tokens(["a", "b"], {}), "0 labels"),
        (lambda: views.tokens(["a"], {"K": [float("inf")]}), "not finite"),
        (lambda: views.tokens(["a"] * 5000, {"K": [1.0] * 5000}), "4,096"),
    ],
)
def test_views_that_cannot_be_drawn_are_refused_in_one_sentence(render: Callable[[], Any], message: str):
    refused(render, message)


def test_a_map_may_have_no_values():
    assert "Largest of 0 cells" in views.heat_map(HeatMap("", ["0"], ["0"], [[None]], "", "", ""))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_tokens_take_lists_arrays_and_tensors_alike(kind: Callable[[list[float]], Any]):
    (view,) = views.tokens(["a", "b"], {"K": kind([0.5, -0.25]), "V": kind([1.0, 2.0])}).parts
    assert view == TokenView("", ["a", "b"], ["K", "V"], [[0.5, -0.25], [1.0, 2.0]])


def test_a_notebook_gets_the_saved_page_in_a_frame_of_its_own(tmp_path: Path):
    shown = views.tokens(HOSTILE, {"V": range(len(HOSTILE))}, "Shown")
    ((tag, attributes),) = Reader(shown._repr_html_()).tags
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts allow-downloads")
    assert attributes["srcdoc"] == shown.save(tmp_path / "page.html").read_text()


DRIVER = """
function drive() {
  const said = {};
  const [canvas] = document.querySelectorAll("canvas");
  const [tip, box] = [document.querySelector(".map-tip"), canvas.getBoundingClientRect()];
  const press = (key) => { canvas.dispatchEvent(new KeyboardEvent("keydown", { key })); return tip.textContent; };
  said.hidden = tip.hidden;
  canvas.dispatchEvent(new FocusEvent("focus"));
  said.focus = tip.textContent;
  said.keys = [press("ArrowDown"), press("ArrowDown"), press("ArrowRight")];
  const at = { clientX: box.left + box.width * 0.99, clientY: box.top + box.height * 0.99 };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  said.mouse = tip.textContent;
  canvas.dispatchEvent(new PointerEvent("pointerleave"));
  said.left = tip.hidden;
  const { width, height } = canvas;
  said.pixels = [...canvas.getContext("2d").getImageData(0, 0, width, height).data];
  said.words = canvas.getAttribute("aria-label");
  said.images = document.images.length;
  const shown = [...document.querySelectorAll(".colored-tokens > span")];
  said.tokens = shown.map((token) => token.textContent);
  shown[0].dispatchEvent(new MouseEvent("mouseenter"));
  const note = () => {
    const title = shown[0].nextElementSibling;
    if (title.tagName !== "DIV") return setTimeout(note, 10);
    said.title = title.textContent;
    document.body.replaceChildren(JSON.stringify(said));
  };
  note();
}
const wait = () => (document.querySelector(".colored-tokens") ? drive() : setTimeout(wait, 10));
wait();
"""


@needs_browser
def test_a_browser_shows_tokens_as_text_and_a_map_answers_mouse_and_keys(tmp_path: Path):
    tokens = TokenView("", HOSTILE, ["V"], [[0.5] * len(HOSTILE)])
    page = views.page([GRID, tokens], "Both")
    said = driven(page, DRIVER, tmp_path)

    shown = [text.replace("\u2060", "").replace("\xa0", " ") for text in said["tokens"]]
    assert shown == [token.replace("\n", "↵ ").replace("\t", "⇥") for token in HOSTILE]
    assert said["images"] == 0
    assert said["title"].replace("\u2060", "") == f"{EVIL}V0.500000"

    assert said["hidden"]
    assert said["focus"] == "layer 12, slot 34 ' Alice': +0.83 logits"
    left, edge, none = said["keys"]
    assert left == edge == "layer 0, slot 34 ' Alice': -0.1 logits"
    assert none == "layer 0, slot 35: no value"
    assert said["mouse"] == "layer 0, slot 36: 0 logits"
    assert said["left"]
    assert said["words"].startswith("Largest of 5 cells: layer 12, slot 34 ' Alice': +0.83")

    red, green, blue, alpha = np.array(said["pixels"], dtype=int).reshape(2, 3, 4)[::-1].transpose(2, 0, 1)
    assert (alpha == 255).all()
    tint = blue - red
    assert tint[1, 0] > 0 > tint[1, 2]
    assert tint[0, 1] == 0
    assert (red[0, 2], green[0, 2], blue[0, 2]) == (247, 247, 247)
    assert (red[1, 0], green[1, 0], blue[1, 0]) == (5, 48, 97)
    assert red[0, 1] < 200


COLOURS = """
addEventListener("DOMContentLoaded", () => {
  const said = [...document.querySelectorAll(".map")].map((map) => {
    const canvas = map.querySelector("canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return [[...data.slice(0, 3)], map.querySelector(".map-legend").textContent];
  });
  document.body.replaceChildren(JSON.stringify(said));
});
"""


@needs_browser
def test_maps_on_one_scale_show_equal_values_in_equal_colours(tmp_path: Path):
    alone = HeatMap("K", ["0"], ["0"], [[-0.09]], "", "layer", "head")
    related = [replace(alone, scale=0.84), HeatMap("V", ["0"], ["0"], [[0.84]], "", "layer", "head", 0.84)]
    dark, light, full = driven(views.page([alone, *related], "Three"), COLOURS, tmp_path)
    assert dark[0] == [103, 0, 31]
    assert min(light[0]) > 200
    assert full[0] == [5, 48, 97]
    assert light[1] == full[1] == "-0.84+0.84 "


def test_a_scale_that_a_value_exceeds_is_refused():
    refused(lambda: views.heat_map(replace(GRID, scale=0.5)), "beyond its scale")
