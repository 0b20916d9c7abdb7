"""Attention views: weights survive packing, pages stay small, and a browser draws them without a network."""

import base64
import dataclasses
import hashlib
import html
import json
import re
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvprobe.attention import attend
from kvprobe.inference.model import Model
from kvprobe.plain_data import filled
from kvprobe.report import views
from kvprobe.report.document import LIMITS, AttentionView
from kvprobe.report.views.attend import attend_page
from kvprobe.text.transcript import Transcript
from tests.browser import browse, needs_browser
from tests.refusals import refused
from tests.report.test_views import EVIL, HOSTILE, Reader

MANY = torch.ones(30, 9, 1, 1)


def causal(layers: int, heads: int, slots: int, seed: int = 0) -> Tensor:
    scores = torch.randn(layers, heads, slots, slots, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(~torch.ones(slots, slots).tril().bool(), -torch.inf).softmax(-1)


def unpacked(view: AttentionView) -> Tensor:
    """What the browser reads: [layers][heads][queries][slots], 0 after the query."""
    shown = torch.zeros(len(view.layers), len(view.heads), len(view.queries), len(view.tokens))
    for layer, packed in enumerate(view.weights):
        levels = iter(zlib.decompress(base64.b64decode(packed)))
        for head in range(len(view.heads)):
            for row, query in enumerate(view.queries):
                shown[layer, head, row, : query + 1] = torch.tensor(
                    [(next(levels) / 255) ** 2 for _ in range(query + 1)]
                )
        assert next(levels, None) is None
    return shown


SMALL = views.heads_view(causal(1, 1, 3), ["a"] * 3)


@pytest.mark.parametrize("queries", [[0, 1, 2, 3, 4, 5, 6], [6], [1, 4]])
def test_weights_are_shown_within_the_stated_rounding(queries: list[int]):
    weights = causal(3, 2, 7)[:, :, queries]
    weights[0, 0, -1] = torch.tensor([1.0, *[0.0] * 6])
    off = (unpacked(views.heads_view(weights, ["a"] * 7, queries=queries)) - weights).abs()
    assert (off <= weights.sqrt() / 255 + 1 / 260_000).all()
    assert off.max() <= 0.004
    assert off[0, 0, -1].max() == 0


def test_rows_are_those_of_the_last_slots_by_default():
    assert views.heads_view(causal(1, 1, 5)[:, :, 3:], ["a"] * 5).queries == [3, 4]


def test_a_view_survives_json():
    index = np.array([[0.25, np.nan]])
    view = views.heads_view(causal(1, 2, 4), HOSTILE[:4], EVIL, masked=[1], damaged=[2], index=index, index_name="π")
    assert view.index == [[0.25, None]]
    assert filled(AttentionView, json.loads(json.dumps(dataclasses.asdict(view))), "a view", LIMITS) == view


def test_a_view_holds_words_and_inert_data_for_any_text():
    view = views.heads_view(causal(2, 1, len(HOSTILE)), HOSTILE, EVIL, masked=[0], damaged=[0], index_name=EVIL)
    reader = Reader(views.attention_view(dataclasses.replace(view, layers=[EVIL, "b"], heads=[EVIL])))
    packed = ("script", {"type": "application/octet-stream;base64"})
    figure = ["figure", "figcaption", "div", "s", "mark", "script"]
    assert [tag for tag, _ in reader.tags[:-2]] == figure
    assert reader.tags[-3:] == [("script", {"type": "application/json"}), packed, packed]
    assert "".join(HOSTILE) in reader.text
    assert reader.props["tokens"] == HOSTILE


def test_without_scripts_a_view_says_what_the_last_query_attends_to_most():
    weights = torch.zeros(2, 2, 1, 3)
    weights[..., 0] = 1
    weights[1, 0, 0] = torch.tensor([0.1, 0.9, 0.0])
    text = Reader(views.attention_view(views.heads_view(weights, ["<bos>", " a", " b"], layers=[4, 7]))).text
    assert text.strip().startswith("<bos> a b\n")
    assert "Slot 2 ' b' attends most, except to slot 0, in layer 7, head 0: 0.90 on slot 1 ' a'." in text


def test_a_page_of_30_layers_of_9_heads_and_256_tokens_is_under_10_megabytes():
    page = views.heads(causal(30, 9, 256), ["a token"] * 256, "Large")
    assert len(views.page(page.parts, page.title).encode()) < 10_000_000


def test_a_page_of_several_views_has_one_copy_of_each_script():
    view = views.heads_view(causal(1, 1, 3), ["a"] * 3)
    page = views.page([view, view], "Two")
    assert (
        page.count("var CircuitsVis=") == page.count("function heatMap(") == page.count("function attentionView(") == 1
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: views.heads_view(causal(1, 1, 3) * 2, ["a"] * 3), "not between 0 and 1"),
        (lambda: views.heads_view(causal(1, 1, 3) * torch.nan, ["a"] * 3), "not between 0 and 1"),
        (lambda: views.heads_view(causal(1, 1, 3).mT, ["a"] * 3), "after its query"),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 2), re.compile("not slots of the 2 tokens|are not 3")),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 3, queries=[0, 1]), "give the slot of each row"),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 3, queries=[0, 2, 1]), "in order"),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 3, queries=[1, 2, 3]), "in order"),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 3, masked=[3]), "masked slot"),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 3, damaged=[-1]), "damaged slot"),
        (lambda: views.attention_view(dataclasses.replace(SMALL, index=[[1], [1]])), "[layers][heads]"),
        (lambda: views.attention_view(dataclasses.replace(SMALL, heads=["a", "b"])), "are not 12"),
        (lambda: views.attention_view(dataclasses.replace(SMALL, layers=["a", "b"])), "of each layer"),
        (lambda: views.heads_view(causal(1, 1, 3), ["a"] * 3, index=torch.full((1, 1), torch.inf)), "not finite"),
        (lambda: views.heads_view(torch.ones(1, 1, 0, 3), ["a"] * 3), "at least one"),
        (lambda: views.heads_view(MANY.expand(-1, -1, 259, 259), ["a"] * 259), "9,000,000 weights"),
        (lambda: views.heads_view(MANY.expand(-1, -1, 1, 5000), ["a"] * 5000), "4,096 tokens"),
    ],
)
def test_attention_that_cannot_be_shown_is_refused_in_one_sentence(
    make: Callable[[], Any], message: str | re.Pattern[str]
):
    refused(make, message)


@pytest.mark.parametrize(
    "packed",
    [
        "</script><img src=x onerror=alert(1)>",
        base64.b64encode(b"not deflated").decode(),
        base64.b64encode(zlib.compress(bytes(7))).decode(),
        base64.b64encode(zlib.compress(bytes(5))).decode(),
        base64.b64encode(zlib.compress(bytes(2**28))).decode(),
        base64.b64encode(zlib.compress(bytes(6))[:-4]).decode(),
    ],
)
def test_untrusted_packed_weights_are_refused_before_they_fill_the_memory(packed: str):
    view = dataclasses.replace(views.heads_view(causal(1, 1, 3), ["a"] * 3), weights=[packed])
    tracemalloc.start()
    refused(lambda: views.attention_view(view), "packed weights")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_patterns_are_shown_with_their_tokens_and_masked_slots(tiny_llama: Model):
    past = tiny_llama.prefill("A cat sat")
    hidden = torch.zeros(1, past.slots, dtype=torch.bool)
    hidden[0, 1] = True
    patterns = attend(tiny_llama, " on it", past.mask(slots=hidden))
    view = views.patterns_view(patterns, tiny_llama.tokenizer, damaged=[0])
    assert view.queries == [len(view.tokens) - 1]
    assert (view.masked, view.damaged) == ([1], [0])
    assert "".join(view.tokens[-len(" on it") :]).endswith("it")
    assert torch.allclose(unpacked(view), patterns.weights, atol=0.004)
    assert unpacked(view)[..., 1].max() == 0


CHAT = [
    {"role": "user", "content": "The code is 48213."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "Which code?"},
]


def test_a_chat_is_shown_before_and_after_its_mask(tiny_llama: Model):
    chat = Transcript.from_messages(CHAT)
    tokens = tiny_llama.prompts(chat, None)[0]
    hidden, read = tokens.span("m0"), list(range(tokens.span("m2").start, len(tokens)))
    before, after = attend_page(tiny_llama, chat, ["m0"]).parts
    assert isinstance(before, AttentionView)
    assert isinstance(after, AttentionView)
    assert before.queries == after.queries == read
    assert (before.masked, after.masked) == ([], list(range(hidden.start, hidden.stop)))
    assert unpacked(before)[..., hidden].amax((2, 3)).min() > 0
    assert unpacked(after)[..., hidden].max() == 0
    (whole,) = attend_page(tiny_llama, chat).parts
    assert torch.allclose(unpacked(whole)[:, :, read], unpacked(before), atol=0.008)


def test_only_the_chosen_number_of_last_tokens_attends(tiny_llama: Model):
    (view,) = attend_page(tiny_llama, "One two three four", last=2).parts
    assert view.queries == [len(view.tokens) - 2, len(view.tokens) - 1]


@pytest.mark.parametrize(
    ("mask", "last", "message"),
    [
        (["m2"], None, "mask an earlier one"),
        (["m9"], None, "known are 'm0', 'm1'"),
        ([], 0, "give 1 to"),
        ([], 10_000, "give 1 to"),
    ],
)
def test_impossible_masks_and_numbers_of_tokens_are_refused(
    tiny_llama: Model, mask: list[str], last: int | None, message: str
):
    refused(lambda: attend_page(tiny_llama, Transcript.from_messages(CHAT), mask, last), message)


def test_an_empty_text_and_a_mask_of_a_text_are_refused(tiny_llama: Model):
    refused(lambda: attend_page(tiny_llama, "Hello", ["m0"]), "no message to mask")
    refused(lambda: attend_page(tiny_llama, ""), "no tokens")


def test_a_text_too_long_for_a_page_is_refused_before_it_is_read(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvprobe.report.views.attend.attend", None)
    refused(lambda: attend_page(tiny_llama, "a " * 5_000), "give fewer layers or queries")


DRIVER = """
addEventListener("DOMContentLoaded", async () => {
  const said = {};
  const until = async (holds) => { while (!holds()) await new Promise((done) => setTimeout(done, 20)); };
  const [square, rows] = document.querySelectorAll(".heads");
  const chart = () => square.querySelector(".heads-pattern canvas");
  const picture = () => chart()?.toDataURL();
  const inks = () => [...square.querySelectorAll(".heads-text span")].map((span) => span.style.background);
  const status = () => square.querySelector(".heads-status").textContent;
  const drawn = async (before) => {
    const pixels = () => chart().getContext("2d").getImageData(0, 0, chart().width, chart().height).data;
    await until(() => chart() && picture() !== before && pixels().some(Boolean));
    return { picture: picture(), status: status(), inks: inks(), shown: square.dataset.shown };
  };
  const heads = square.querySelectorAll("[type=radio]");
  const blank = document.createElement("canvas");
  said.first = await drawn(blank.toDataURL());
  const tokens = [...square.querySelectorAll(".heads-text span")];
  said.tokens = tokens.map((token) => token.textContent);
  said.struck = tokens.map((token) => getComputedStyle(token).textDecorationLine === "line-through");
  said.marked = tokens.map((token) => getComputedStyle(token).borderBottomStyle === "double");
  said.numbers = [...square.querySelectorAll("b")].map((number) => number.textContent);
  said.legend = square.querySelector(".map-legend").textContent;
  heads[1].click();
  said.head = await drawn(said.first.picture);
  const layer = square.querySelector("select");
  layer.selectedIndex = 1;
  layer.dispatchEvent(new Event("change"));
  await until(() => square.dataset.shown.startsWith("layer 1"));
  said.layer = await drawn(said.head.picture);
  said.charts = square.querySelectorAll(".heads-pattern canvas").length;
  tokens[2].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  said.hovered = status();
  const text = square.querySelector(".heads-text");
  text.dispatchEvent(new PointerEvent("pointerleave"));
  said.left = status();
  text.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
  said.key = status();
  await until(() => rows.querySelector(".map"));
  said.follows = rows.dataset.shown;
  rows.querySelectorAll(".heads-text span")[0].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  said.slot = rows.querySelector(".heads-status").textContent;
  said.images = document.images.length;
  said.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.replaceChildren(JSON.stringify(said));
});
"""


@needs_browser
def test_a_browser_draws_the_chosen_head_shows_tokens_as_text_and_asks_no_network(tmp_path: Path):
    weights = causal(2, 2, len(HOSTILE))
    index = [[0.5, -0.25], [0.0, 0.125]]
    settings: dict[str, Any] = {"masked": [1, 7], "damaged": [0], "index_name": f"π {EVIL}"}
    square = views.heads_view(weights, HOSTILE, index=torch.tensor(index), **settings)
    rows = views.heads_view(weights[:, :, 3:5], HOSTILE, queries=[3, 4])
    page = views.page([square, rows], "Both")
    may = base64.b64encode(hashlib.sha256(DRIVER.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src &#39;sha256-{may}&#39; ", 1)
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")
    done = browse(path, tmp_path / "profile", "--dump-dom")
    assert "Content Security Policy" not in done.stderr
    assert "Uncaught" not in done.stderr
    said = json.loads(html.unescape(re.findall(r"<body>(.*)</body>", done.stdout, flags=re.DOTALL)[0]))

    assert said["tokens"] == [token.replace("\n", "↵\n").replace("\t", "⇥") for token in HOSTILE]
    assert (said["images"], said["requests"]) == (0, [])
    assert [slot for slot, struck in enumerate(said["struck"]) if struck] == [1, 7]
    assert [slot for slot, marked in enumerate(said["marked"]) if marked] == [0]
    assert said["numbers"] == ["+0.5", "-0.25"]
    assert f"beside each head: π {EVIL}" in said["legend"]

    pictures = [said[step]["picture"] for step in ("first", "head", "layer")]
    assert len(set(pictures)) == 3
    assert said["charts"] == 1
    last = len(HOSTILE) - 1
    for step, (layer, head) in {"first": (0, 0), "head": (0, 1), "layer": (1, 1)}.items():
        assert said[step]["shown"] == f"layer {layer}, head {head}"
        most = int(weights[layer, head, last].argmax())
        paid = float(re.findall(r"spends ([\d.e-]+) on", said[step]["status"])[0])
        assert f"on {most} '" in said[step]["status"].split(", ", 2)[1]
        assert abs(paid - float(weights[layer, head, last, most])) < 0.004
    assert f"slot 2 '{HOSTILE[2]}' spends" in said["hovered"]
    assert f"slot {last} '{HOSTILE[last]}' spends" in said["left"]
    assert f"slot {last - 1} '{HOSTILE[last - 1]}' spends" in said["key"]
    assert said["follows"] == "layer 1, head 1"
    assert f"slot 4 '{HOSTILE[4]}' spends" in said["slot"]
    assert f"on 0 '{EVIL}'" in said["slot"]
