"""Attention views: weights survive packing, pages stay small, and a browser draws them without a network."""

import base64
import dataclasses
import json
import re
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Int
from matplotlib.image import imread
from torch import Tensor

from kvprobe.attention import Patterns, attend
from kvprobe.inference.model import Model
from kvprobe.plain_data import filled
from kvprobe.report import views
from kvprobe.report.document import LIMITS, AttentionView
from kvprobe.report.views.attend import attend_page
from kvprobe.text.transcript import Transcript
from tests.browser import driven, needs_browser
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


def test_a_page_of_several_views_has_one_copy_of_each_script_and_no_library():
    view = views.heads_view(causal(1, 1, 3), ["a"] * 3)
    page = views.page([view, view], "Two")
    assert "CircuitsVis=" not in page
    assert (
        page.count("function heatMap(") == page.count("function picture(") == page.count("function attentionView(") == 1
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
        (lambda: views.attention_view(dataclasses.replace(SMALL, index=None, heads=["a", "b"])), "are not 12"),
        (lambda: views.attention_view(dataclasses.replace(SMALL, index=None, layers=["a", "b"])), "of each layer"),
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


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "packed",
    [
        lambda: "</script><img src=x onerror=alert(1)>",
        lambda: encoded(b"not deflated"),
        lambda: encoded(zlib.compress(bytes(7))),
        lambda: encoded(zlib.compress(bytes(5))),
        lambda: encoded(zlib.compress(bytes(2**28))),
        lambda: encoded(zlib.compress(bytes(6))[:-4]),
    ],
)
def test_untrusted_packed_weights_are_refused_before_they_fill_the_memory(packed: Callable[[], str]):
    view = dataclasses.replace(views.heads_view(causal(1, 1, 3), ["a"] * 3), weights=[packed()])
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
    view = views.patterns_view(patterns, damaged=[0])
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
    (view,) = attend_page(tiny_llama, chat, ["m0"]).parts
    assert isinstance(view, AttentionView)
    assert view.queries == read
    assert view.masked == list(range(hidden.start, hidden.stop))
    assert view.segments[0] == "m0 · user"
    assert unpacked(view)[..., hidden].amax((2, 3)).min() > 0
    assert unpacked(dataclasses.replace(view, weights=view.after))[..., hidden].max() == 0
    (whole,) = attend_page(tiny_llama, chat).parts
    assert isinstance(whole, AttentionView)
    assert torch.allclose(unpacked(whole)[:, :, read], unpacked(view), atol=0.008)


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


# Messages let no virtual time pass, unlike timers, while the browser decodes images in real time.
UNTIL = """
  const turn = (done) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = done;
    port2.postMessage(0);
  };
  const until = async (holds) => { while (!holds()) await new Promise(turn); };
"""
DRIVER = """
addEventListener("DOMContentLoaded", async () => {
  const said = {};
  UNTIL
  const [square, rows] = document.querySelectorAll(".heads");
  const picture = () => square.querySelector(".panel image")?.getAttribute("href");
  const status = () => square.querySelector(".heads-status").textContent;
  const drawn = async (before) => {
    await until(() => picture() && picture() !== before);
    return { picture: picture(), status: status(), shown: square.dataset.shown };
  };
  const heads = square.querySelectorAll("[type=radio]");
  said.first = await drawn();
  const tokens = [...square.querySelectorAll(".heads-text span")];
  said.tokens = tokens.map((token) => token.textContent);
  said.struck = tokens.map((token) => getComputedStyle(token).textDecorationLine === "line-through");
  said.marked = tokens.map((token) => getComputedStyle(token).borderBottomStyle === "double");
  said.numbers = [...square.querySelectorAll(".heads-choice b")].map((number) => number.textContent);
  said.legend = square.querySelector(":scope > .heads-legend").textContent;
  heads[1].click();
  said.head = await drawn(said.first.picture);
  const layer = square.querySelector("select");
  layer.selectedIndex = 1;
  layer.dispatchEvent(new Event("change"));
  said.layer = await drawn(said.head.picture);
  said.pictures = square.querySelectorAll("svg").length;
  tokens[2].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  said.hovered = status();
  const text = square.querySelector(".heads-text");
  text.dispatchEvent(new PointerEvent("pointerleave"));
  said.left = status();
  text.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
  said.key = status();
  square.querySelector(".heads-pattern").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
  said.cell = status();
  await until(() => rows.querySelector("svg"));
  said.follows = rows.dataset.shown;
  rows.querySelectorAll(".heads-text span")[0].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
  said.slot = rows.querySelector(".heads-status").textContent;
  square.querySelector(".heads-all canvas").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
  square.querySelector(".heads-all canvas").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  await until(() => square.dataset.shown.startsWith("layer 0, head 0"));
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
    said = driven(views.page([square, rows], "Both"), DRIVER.replace("UNTIL", UNTIL), tmp_path)

    assert said["tokens"] == [token.replace("\n", "↵\n").replace("\t", "⇥") for token in HOSTILE]
    assert (said["images"], said["requests"]) == (0, [])
    assert [slot for slot, struck in enumerate(said["struck"]) if struck] == [1, 7]
    assert [slot for slot, marked in enumerate(said["marked"]) if marked] == [0]
    assert said["numbers"] == ["+0.5", "-0.25"]
    assert f"Beside each head: π {EVIL}" in said["legend"]

    pictures = [said[step]["picture"] for step in ("first", "head", "layer")]
    assert len(set(pictures)) == 3
    assert said["pictures"] == 1
    last = len(HOSTILE) - 1
    for step, (layer, head) in {"first": (0, 0), "head": (0, 1), "layer": (1, 1)}.items():
        assert said[step]["shown"] == f"layer {layer}, head {head}, attention, attention"
        most = int(weights[layer, head, last].argmax())
        paid = float(re.findall(r"spends ([\d.e-]+) on", said[step]["status"])[0])
        assert f"on {most} '" in said[step]["status"].split(", ", 2)[1]
        assert abs(paid - float(weights[layer, head, last, most])) < 0.004
    assert f"on 2 '{HOSTILE[2]}'." in said["hovered"]
    assert f"slot {last} '{HOSTILE[last]}' spends" in said["left"]
    assert f"slot {last - 1} '{HOSTILE[last - 1]}' spends" in said["key"]
    assert f"on {last - 2} '" in said["cell"]
    assert said["follows"] == "layer 1, head 1, attention, attention"
    assert f"slot 4 '{HOSTILE[4]}' spends" in said["slot"]
    assert f"on 0 '{EVIL}'" in said["slot"]


# ---- before and after


def reread(model: Model, change: str) -> tuple[Patterns, Patterns]:
    """Before and after the middle message of a chat was masked, or evicted."""
    chat = Transcript.from_messages(CHAT)
    tokens = model.prompts(chat, None)[0]
    start = tokens.span("m2").start
    past = model.extend(None, tokens[:start])[0]
    changed = {
        "masked": past.mask("m1"),
        "masked in one layer and head": past.mask("m1", layers=[1], heads=[1]),
        "evicted": past.evict("m1"),
        "re-indexed": past.evict("m1").reindex(),
        "evicted in part": past.evict(slots=torch.arange(past.slots)[None] == tokens.span("m1").start + 1),
    }[change]
    read = tokens[start:]
    queries = range(len(read))
    shifted = read.shifted(int(changed.ledger.following[0]))
    return attend(model, read, past, queries=queries), attend(model, shifted, changed, queries=queries)


def hidden_from(view: AttentionView, packed: Sequence[str]) -> Tensor:
    """Which slots are hidden, [layers][heads][slots]."""
    levels = [list(zlib.decompress(base64.b64decode(layer))) for layer in packed]
    return torch.tensor(levels).view(len(view.layers), len(view.heads), -1) == 0


@pytest.mark.parametrize("change", ["masked", "evicted", "re-indexed", "evicted in part"])
def test_slots_that_are_gone_are_hidden_and_the_others_are_in_their_places(tiny_llama: Model, change: str):
    before, after = reread(tiny_llama, change)
    view = views.patterns_view(before, after)
    span = before.slots("m1").tolist()
    lost = span[1:2] if change == "evicted in part" else span
    assert view.masked == lost
    kept = [slot for slot in range(before.cache.slots) if slot not in lost]
    assert not hidden_from(view, view.values).any()
    assert hidden_from(view, view.values_after)[..., lost].all()
    assert not hidden_from(view, view.values_after)[..., kept].any()
    shown = unpacked(dataclasses.replace(view, weights=view.after))
    assert torch.allclose(
        shown[..., kept], after.weights[..., kept] if change == "masked" else after.weights, atol=0.004
    )
    assert view.index is not None
    moved = (shown - unpacked(view)).abs().sum(-1).mean(-1) / 2
    assert torch.allclose(torch.tensor(view.index), moved, atol=0.05)


def test_slots_that_one_head_may_not_see_are_hidden_from_it_alone(tiny_llama: Model):
    view = views.patterns_view(*reread(tiny_llama, "masked in one layer and head"))
    hidden = hidden_from(view, view.values_after).any(-1)
    assert hidden.nonzero().tolist() == [[1, 2], [1, 3]]
    assert view.masked == []


def test_segments_are_named_with_the_roles_of_the_chat(tiny_llama: Model):
    chat = Transcript.from_messages(CHAT)
    view = views.patterns_view(*reread(tiny_llama, "masked"), chat=chat)
    assert list(dict.fromkeys(view.segments)) == ["m0 · user", "m1 · assistant", "m2 · user", "generation"]


def test_patterns_of_different_texts_queries_or_layers_are_not_compared(tiny_llama: Model):
    before, after = reread(tiny_llama, "masked")
    other = attend(tiny_llama, "Another text")
    last = attend(tiny_llama, Transcript.from_messages(CHAT))
    for wrong in (other, last, after.of_layers([0])):
        refused(lambda wrong=wrong: views.patterns_view(before, wrong), "not of the same layers and queries")
    pair = views.patterns_view(before, after)
    refused(lambda: views.attention_view(dataclasses.replace(pair, values_after=[])), "norms of both")
    refused(lambda: views.attention_view(dataclasses.replace(pair, segments=["a"])), "one for each token")
    refused(lambda: views.attention_view(dataclasses.replace(pair, values=pair.after)), "packed weights")


PAIR = """
addEventListener("DOMContentLoaded", async () => {
  const said = {};
  UNTIL
  const view = document.querySelector(".heads");
  await until(() => view.querySelector(".panel"));
  const status = () => view.querySelector(".heads-status").textContent;
  const spans = [...view.querySelectorAll(".heads-text span")];
  const hover = (span) => { span.dispatchEvent(new PointerEvent("pointerover", { bubbles: true })); return status(); };
  const [layer, show, weights] = view.querySelectorAll("select");
  const choose = async (select, value) => {
    const before = view.dataset.shown;
    select.value = value;
    select.dispatchEvent(new Event("change"));
    await until(() => view.dataset.shown !== before);
  };
  said.shown = view.dataset.shown;
  said.titles = [...view.querySelectorAll(".panel > text:first-child")].map((title) => title.textContent);
  const extent = (box) => ["x", "width"].map((name) => Number(box.getAttribute(name)));
  said.hatched = [...view.querySelectorAll(".panel")].map((panel) => [...panel.querySelectorAll(".hatch")].map(extent));
  said.width = Number(view.querySelector(".panel image").getAttribute("width"));
  said.images = [...view.querySelectorAll(".panel image")].map((image) => image.getAttribute("href"));
  said.cells = spans.map(hover);
  await choose(weights, "value-weighted");
  said.weighted = spans.map(hover);
  await choose(show, "after");
  await choose(layer, "2");
  said.changed = view.dataset.shown;
  said.address = location.hash;
  said.panels = view.querySelectorAll(".panel").length;
  const saved = {};
  HTMLAnchorElement.prototype.click = function () { saved[this.download] = this.href; };
  for (const button of view.querySelectorAll("button")) button.click();
  await until(() => Object.keys(saved).length === 2);
  said.files = Object.keys(saved);
  const [svg, png] = Object.values(saved);
  const parsed = new DOMParser().parseFromString(decodeURIComponent(svg.slice(svg.indexOf(",") + 1)), "image/svg+xml");
  said.texts = [...parsed.querySelectorAll("text")].map((text) => text.textContent);
  said.elements = [...new Set([...parsed.querySelectorAll("*")].map((element) => element.tagName))].sort();
  said.png = png;
  said.size = ["width", "height"].map((name) => Number(parsed.documentElement.getAttribute(name)));
  said.elsewhere = document.images.length;
  document.body.replaceChildren(JSON.stringify(said));
});
"""
SHOWN = """
addEventListener("DOMContentLoaded", async () => {
  const view = document.querySelector(".heads");
  UNTIL
  await until(() => view.querySelector(".panel"));
  const asked = [...view.querySelectorAll(".heads-text span")].findIndex((span) => span.classList.contains("asked"));
  document.body.replaceChildren(JSON.stringify([view.dataset.shown, asked]));
});
"""


@needs_browser
def test_a_browser_shows_both_patterns_and_their_difference_and_restores_an_address(tiny_llama: Model, tmp_path: Path):
    before, after = reread(tiny_llama, "masked")
    view = views.patterns_view(before, after)
    tokens = [*view.tokens]
    tokens[: len(HOSTILE)] = HOSTILE
    segments = [EVIL if name == "m0" else name for name in view.segments]
    page = views.page([dataclasses.replace(view, tokens=tokens, segments=segments)], "Two")
    said = driven(page, PAIR.replace("UNTIL", UNTIL), tmp_path)

    moved = (after.weights - before.weights).abs().sum(-1).mean(-1)
    layer, head = divmod(int(moved.argmax()), moved.shape[1])
    assert said["shown"] == f"layer {layer}, head {head}, all three, attention"
    where = f"layer {layer}, head {head}"
    assert said["titles"] == [f"before: {where}", f"after: {where}", f"after − before: {where}"]

    slots, hidden = before.cache.slots, before.slots("m1").tolist()
    cell = said["width"] / slots
    assert said["hatched"][0] == []
    for ((left, wide),) in said["hatched"][1:]:
        assert (round(left / cell), round((left + wide) / cell)) == (hidden[0], hidden[-1] + 1)
    colours = [picture(address) for address in said["images"]]
    visible = np.arange(slots) <= before.queries.numpy()[:, None]
    for pixels in colours:
        assert ((pixels[..., 3] == 255) == visible).all()
    grey = (colours[1][..., :3] == 168).all(-1)
    assert (grey == np.isin(np.arange(slots), hidden)[None] & visible).all()
    assert not (colours[0][..., :3] == 168).all(-1).any()
    change = (after.weights - before.weights)[layer, head].numpy()
    tint = colours[2][..., 2] - colours[2][..., 0]
    assert (tint[change > 0.02] > 0).all()
    assert (tint[change < -0.02] < 0).all()
    assert (change < -0.02).any()

    one, two = (patterns.weights[layer, head, -1] for patterns in (before, after))
    check_cells(said["cells"], one, two, hidden, 0.004)
    norms = [patterns.value_norms[layer, head] for patterns in (before, after)]
    shares = [weights * norm / (weights * norm).sum() for weights, norm in zip((one, two), norms, strict=True)]
    check_cells(said["weighted"], *shares, hidden, 0.02)

    assert said["changed"] == f"layer 2, head {head}, after, value-weighted"
    assert said["panels"] == 1
    assert said["files"] == [f"attention-layer-2-head-{head}-after-value-weighted.{kind}" for kind in ("svg", "png")]
    assert any(text.startswith("0 </script>") for text in said["texts"])
    assert set(said["elements"]) <= {
        *("svg", "defs", "pattern", "path", "rect", "g", "text", "image", "linearGradient", "stop")
    }
    assert picture(said["png"]).shape[1::-1] == pytest.approx([2 * side for side in said["size"]], abs=1)
    assert said["elsewhere"] == 0

    restored = SHOWN.replace("UNTIL", UNTIL)
    assert driven(page, restored, tmp_path, said["address"]) == [said["changed"], slots - 1]
    asked = int(before.queries[1])
    fragment = f"#layer=1&head=3&show=difference&weights=nonsense&slot={asked}"
    assert driven(page, restored, tmp_path, fragment) == ["layer 1, head 3, difference, attention", asked]


def picture(address: str) -> Int[np.ndarray, "rows columns colours"]:
    """The pixels of a picture in an address."""
    assert address.startswith("data:image/png;base64,")
    return np.rint(255 * imread(BytesIO(base64.b64decode(address.split(",")[1])))).astype(int)


def check_cells(said: list[str], before: Tensor, after: Tensor, hidden: list[int], off: float) -> None:
    """The status of each slot under the mouse states both weights and their difference."""
    for slot, text in enumerate(said):
        one, two, change = re.findall(r"spends (\S+) before, (\S+) after \(([^)]+)\) on ", text)[0]
        assert float(one) == pytest.approx(float(before[slot]), abs=off)
        assert (two == "hidden") == (slot in hidden)
        later = 0 if slot in hidden else float(two)
        assert later == pytest.approx(float(after[slot]), abs=off)
        assert float(change) == pytest.approx(later - float(one), abs=0.006 * max(later, float(one)) + 1e-6)


# ---- showing patterns


def test_patterns_show_themselves_in_a_file_or_in_a_notebook(
    tiny_llama: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    before, after = reread(tiny_llama, "masked")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    before.show(after)
    written = Path(capsys.readouterr().out.strip())
    assert written.parent == tmp_path
    assert written.read_text() == views.page(views.attention(before, after).parts, "")

    displayed: list[Any] = []
    notebook: Any = ModuleType("IPython")
    notebook.get_ipython = lambda: SimpleNamespace(kernel=None)
    notebook.display = SimpleNamespace(display=displayed.append)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    before.show()
    assert displayed == [views.attention(before)]
    assert capsys.readouterr().out == ""
