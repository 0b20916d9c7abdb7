"""States of addresses: what the library's own calls give, whatever was computed before."""

import json
from dataclasses import replace

import jsonschema
import pytest
import torch

import kvprobe as kv
from kvprobe.app.address import OFFERED, Address, Edit, SaidMessage, address_of
from kvprobe.app.microscope import AppState, Microscope
from kvprobe.app.readings import ExchangeReadings
from kvprobe.app.refusals import OBSERVERS
from kvprobe.cache.differences import vectors_apart
from kvprobe.comparison import replies_under
from kvprobe.editing import summarise
from kvprobe.errors import UserError
from kvprobe.exported import json_schema
from kvprobe.inference.model import Model, load
from kvprobe.inference.trials import struck
from kvprobe.inference.under_policy import tokens_at
from kvprobe.probes.card import ProbeInput
from tests.app.made_up import HOSTILE, START
from tests.models import tiny_tokenizer
from tests.models.every import tiny
from tests.probes.made_probes import made_probe
from tests.refusals import refused

EDITS: dict[str, tuple[Edit, ...]] = {
    "nothing": (),
    "mask": (Edit("mask", ("m1",)),),
    "evict a run, then mask": (Edit("evict", slots=(3, 9)), Edit("mask", slots=(5, 20))),
    "re-index, then damage": (
        Edit("re-index", ("m1",)),
        Edit("damage", ("m2",), fault="zeros", rate=0.5),
    ),
    "restart after damage": (Edit("damage", fault="gaussian", rate=0.3, seed=2), Edit("restart", ("m1",))),
    "donor": (Edit("mask", ("m1",)), Edit("damage", fault="distractor", rate=0.5)),
    "quantise": (Edit("quantise", bits=2), Edit("evict", ("m1",))),
    "policy": (Edit("policy", policy="SinkWindow(2, 30)"), Edit("mask", ("m2",))),
    "compact after a mask, and again": (
        Edit("mask", ("m1",)),
        Edit("compact", ("m0", "m1"), then="re-index"),
        Edit("compact", ("summary",), text="so it is"),
        Edit("mask", ("summary 2",)),
    ),
    "patch after an eviction": (
        Edit("re-index", slots=(5, 9)),
        Edit("patch", ("m1", "m2"), of="m0", text="the mill has 7."),
        Edit("mask", ("m0",)),
        Edit("patch", slots=(20, 25), of="m0", text="the mill has 8."),
    ),
    "compact what is quantised": (Edit("quantise", bits=2), Edit("compact", slots=(3, 9))),
    "policy that observes": (Edit("policy", policy="SnapKV(50%, window=2)"), Edit("damage", fault="zeros", rate=0.2)),
}


@pytest.fixture(scope="module")
def microscope(tiny_llama: Model) -> Microscope:
    return Microscope(tiny_llama)


def at(*edits: Edit) -> Address:
    return replace(START, edits=edits)


def without_time(state: AppState) -> dict[str, object]:
    return {name: value for name, value in state.to_plain().items() if name != "seconds"}


@pytest.mark.parametrize("name", EDITS)
def test_a_state_is_that_of_its_edits_from_scratch_and_of_its_python(
    tiny_llama: Model, microscope: Microscope, name: str, monkeypatch: pytest.MonkeyPatch
):
    edits = EDITS[name]
    for count in range(len(edits)):  # so that the last state begins at one that was kept
        microscope.state(at(*edits[:count]))
    state = microscope.state(at(*edits))
    assert without_time(state) == without_time(Microscope(tiny_llama).state(at(*edits)))
    jsonschema.validate(json.loads(state.to_json()), json_schema())

    printed: list[str] = []
    monkeypatch.setattr("kvprobe.inference.model.load", lambda *_, **__: tiny_llama)
    loads = list[object]()
    monkeypatch.setattr(kv, "load", lambda *given, **named: loads.append((given, named)) or tiny_llama, raising=False)
    looked: list[AppState] = []
    monkeypatch.setattr("kvprobe.app.microscope.Microscope", lambda model: microscope)
    monkeypatch.setattr(AppState, "show", lambda state: looked.append(state))
    exec(state.python, {"print": printed.append})
    assert [replace(one, address=state.address, seconds=state.seconds) for one in looked] == [state]
    assert printed == [state.replies[-1].text]
    assert loads == [((tiny_llama.name,), {})]
    rounded = Microscope(tiny_llama, "kv.load('tiny', dtype='bfloat16')").state(at())
    assert "model = kv.load('tiny', dtype='bfloat16')\n" in rounded.python


def test_a_policy_that_observes_is_the_first_edit_and_the_page_is_told(microscope: Microscope):
    snap = Edit("policy", policy="SnapKV(50%, window=2)")
    refused(lambda: microscope.state(at(snap, snap)), "make it the first")
    before, after = (microscope.state(at(*edits)).refused for edits in ((), (snap,)))
    assert not before
    assert {(one.kind, one.what) for one in after} == {("restart", ""), *(("policy", name) for name in OBSERVERS)}
    assert microscope.state(at(Edit("quantise"))).refused[0].kind == "patch"
    for text in OFFERED:
        microscope.state(at(Edit("policy", policy=text)))


def test_an_eviction_frees_slots_of_a_hybrid_and_nothing_of_its_states():
    hybrid = load(tiny("qwen3_next"), tokenizer=tiny_tokenizer())
    full, left = (Microscope(hybrid).state(at(*edits)) for edits in ((), (Edit("evict", ("m1",)),)))
    states = {len(hybrid.geometry.recurrent) * 4 * (80 * 3 + 384)}  # the last inputs of the convolution; 2 × 8 × 24
    assert {state.memory[when]["state"] for state in (full, left) for when in ("full", "held")} == states
    assert left.memory["held"]["slots"] * full.memory["of"] == left.memory["full"]["slots"] * left.memory["slots"]
    assert [(one.kind, one.what) for one in full.refused] == [("quantise", ""), ("damage", "gaussian-effect")]


def test_slots_say_what_was_done_to_them(tiny_llama: Model, microscope: Microscope):
    edits = (Edit("evict", ("m0",)), Edit("mask", slots=(30, 33)), Edit("damage", ("m2",), fault="zeros", rate=1.0))
    state = microscope.state(at(*edits))
    slots = state.slots
    of_m0 = [slot for slot, name in enumerate(slots["segment"]) if name == "m0"]
    assert [slot for slot, position in enumerate(slots["position"]) if position is None] == of_m0
    assert set(state.hidden) == {*of_m0, 30, 31, 32}
    assert all(damaged == (name == "m2") for damaged, name in zip(slots["damaged"], slots["segment"], strict=True))
    assert not any(slots["recomputed"])
    assert (state.memory["slots"], state.memory["of"]) == (len(slots["text"]) - len(state.hidden), len(slots["text"]))
    for layer in state.change:
        for slot, value in enumerate(layer):
            struck_here = slots["segment"][slot] == "m2"
            # A vector that is shorter than most counts as long as most.
            assert value is None if slot in of_m0 else 0.2 < value <= 1.001 if struck_here else value == 0


def test_what_later_slots_hold_is_measured_against_the_same_text_read_without_it(
    tiny_llama: Model, microscope: Microscope
):
    masked = microscope.state(at(Edit("mask", ("m0",))))
    assert masked.contamination is not None
    chat = START.chat
    full, restart = tiny_llama.prefill(chat), tiny_llama.prefill(chat.without("m0"))
    first = full.slots - restart.slots
    for layer, row in enumerate(masked.contamination):
        assert row[:first] == [None] * first
        for part in ("K", "V"):
            apart = (full.part(part)[layer][0, :, first:] - restart.part(part)[layer][0]).abs().amax((0, 2))
            changed = [value > 1e-3 for value in row[first:] if value is not None]
            assert layer == 0 or sum(changed) > 0.9 * len(changed)
            assert (layer == 0) == (not any(changed)) == bool((apart < 1e-5).all())
    assert microscope.state(at(Edit("restart", ("m0",)))).contamination is None
    assert microscope.state(at()).contamination is None


def test_a_summary_holds_what_was_in_view_while_it_was_written(tiny_llama: Model, microscope: Microscope):
    edits = (Edit("mask", ("m1",)), Edit("compact", ("m0",), text="so it is"))
    state = microscope.state(at(*edits))
    slots = {
        name: [n for n, one in enumerate(state.slots["segment"]) if one == name] for name in ("m0", "m1", "summary")
    }
    cache = summarise(tiny_llama, tiny_llama.prefill(START.chat).mask("m1"), request="so it is")
    assert cache.ledger.tokens.shape[1] == len(state.slots["text"]) == slots["summary"][-1] + 1
    assert {name: list(unseen) for name, unseen in state.written.items()} == {"summary": slots["m1"]}
    assert set(state.hidden) == {*slots["m0"], *slots["m1"]}
    assert not any(value for row in state.change for value in row)
    assert state.contamination is not None
    left = cache.evict("m0", "m1")
    fresh = tiny_llama.prefill(tokens_at(left.ledger, 0, torch.arange(left.slots)))
    apart = [
        [float(vectors_apart(one[name][0], two[name][0]).mean(0)[-1]) for name in "KV"]
        for one, two in zip(left.layers, fresh.layers, strict=True)
    ]
    assert [row[-1] for row in state.contamination] == pytest.approx([sum(pair) / 2 for pair in apart], abs=1e-3)
    assert max(map(max, apart)) > 0.01
    shown = microscope.state(at(*edits), attention=True).attention
    assert shown is not None
    assert len(shown.tokens) > len(state.slots["text"])
    assert shown.after


def test_a_patched_slot_is_that_of_the_other_conversation(tiny_llama: Model, microscope: Microscope):
    other = [{"role": "user", "content": "the mill has 7."}, *(vars(said) for said in START.messages[1:])]
    donor = tiny_llama.prefill([{"role": said["role"], "content": said["content"]} for said in other])
    for segments in (("m2",), tuple(START.names)):
        state = microscope.state(at(Edit("patch", segments, of="m0", text="the mill has 7.")))
        assert state.slots["patched"] == [name in segments for name in state.slots["segment"]]
    asked = microscope.state(at()).replies[0]
    given = replies_under(
        tiny_llama, {"full": donor}, tiny_llama.prompts(donor, START.ask)[0], max_new_tokens=START.new
    )
    assert state.replies[1].text == given[1]["full"].text
    assert state.replies[1].own_logprobs == pytest.approx(given[1]["full"].own_logprobs, abs=1e-4)
    assert asked.own_logprobs != pytest.approx(given[1]["full"].own_logprobs, abs=1e-4)


def test_a_summary_after_a_gap_was_closed_stands_where_the_conversation_has_it(microscope: Microscope):
    state = microscope.state(at(Edit("re-index", ("m0",)), Edit("compact", ("m1",), text="so it is")))
    assert state.contamination is not None
    first, *_, last = state.contamination
    later = [slot for slot, name in enumerate(state.slots["segment"]) if name == "summary"]
    # The first layer knows nothing but a token and its position.
    assert max(first[slot] or 0 for slot in later) < 1e-3 < max(last[slot] or 0 for slot in later)


def test_a_slot_may_be_patched_and_then_damaged(microscope: Microscope):
    patch = Edit("patch", ("m1",), of="m0", text="the mill has 7.")
    damage = Edit("damage", ("m1",), fault="zeros")
    state = microscope.state(at(patch, damage, replace(patch, segments=("m2",))))
    of_segment = dict(
        zip(state.slots["segment"], zip(state.slots["patched"], state.slots["damaged"], strict=True), strict=True)
    )
    assert (of_segment["m0"], of_segment["m1"], of_segment["m2"]) == ((False, False), (True, True), (True, False))
    again = microscope.state(at(patch, damage, patch))
    assert not any(again.slots["damaged"])


def test_a_restart_forgets_what_a_mask_remembers(tiny_llama: Model, microscope: Microscope):
    restarted = microscope.state(at(Edit("restart", ("m1",))))
    cache = tiny_llama.prefill(START.chat.without("m1", mode="contiguous"))
    assert restarted.replies[1].text == tiny_llama.generate(cache, START.ask, max_new_tokens=START.new).text
    masked = microscope.state(at(Edit("mask", ("m1",))))
    compared = kv.compare(tiny_llama, START.chat, "m1", START.ask, max_new_tokens=START.new)
    for arm, state in (("masked", masked), ("restarted", restarted)):
        assert state.replies[1].kl == pytest.approx(compared.replies[arm].kl, abs=1e-4)


def test_attention_is_recorded_where_it_is_asked_for(microscope: Microscope):
    state = microscope.state(at(Edit("evict", ("m1",))), attention=True)
    assert state.attention is not None
    assert state.attention.after
    assert {"m1 · assistant"} == {state.attention.segments[slot] for slot in state.hidden}
    jsonschema.validate(json.loads(state.to_json()), json_schema())
    assert microscope.state(at(Edit("evict", ("m1",)))).attention is None


def test_what_later_messages_know_is_taken_out_by_the_restart(
    tiny_llama: Model, microscope: Microscope, monkeypatch: pytest.MonkeyPatch
):
    def known(*edits: Edit) -> ExchangeReadings:
        asked = Microscope(tiny_llama)  # what was read once is kept
        state = asked.state(at(*edits), read=True)
        assert asked.state(at(*edits), read=True).readings is state.readings
        jsonschema.validate(json.loads(state.to_json()), json_schema())
        assert state.readings is not None, state.readings_left_out
        return state.readings

    cache = tiny_llama.prefill(START.chat).evict("m0")
    restart = tiny_llama.prefill(START.chat.without("m0"))
    question = tiny_llama.prompts(cache, START.ask)[0]
    arms = {"now": cache, "restart": restart}
    replies = replies_under(tiny_llama, arms, question, max_new_tokens=START.new)[1]
    for edit in ("mask", "re-index"):
        alone = known(Edit(edit, ("m0",)))
        assert [one.segments for one in alone.exchanges] == [("m1",), ("m2",), ("m1", "m2")]
        assert "No published probe" in alone.left_out
        assert {one.readable for one in alone.exchanges} == {None}
        assert alone.exchanges[-1].kl == pytest.approx(replies["restart"].kl, rel=0.01)
        assert alone.exchanges[-1].kl > 1e-3
        assert alone.exchanges[-1].reply == replies["restart"].text
    written = known(Edit("compact", ("m0",), text="so it is"))
    assert [one.segments for one in written.exchanges][-2:] == [("summary",), ("m1", "m2", "summary")]

    for promise, readable in (({"gain": 0.1}, True), ({"gain": 1e9}, False), ({"far": 0.0}, None)):
        probe = made_probe(tiny_llama, ProbeInput("v", 2, None, "mean"), arm="direct", scale=10, **promise)
        monkeypatch.setattr("kvprobe.probes.scan.published_for", lambda model, probe=probe: [probe])
        read = known(Edit("mask", ("m0",)))
        assert not read.left_out
        assert readable in {one.readable for one in read.exchanges[:-1]} <= {readable, False if readable else readable}
        assert {row["place"] for row in read.exchanges[0].probes} == {"first", "second"}
    for edit in (Edit("quantise"), Edit("mask", ("m2",)), Edit("mask", slots=(3, 9))):
        state = microscope.state(at(edit), read=True)
        assert state.readings is None
        assert state.readings_left_out.endswith((".", "undo the rest."))


def test_a_damage_is_the_one_of_the_library(tiny_llama: Model, microscope: Microscope):
    state = microscope.state(at(Edit("damage", ("m1",), fault="zeros", rate=0.5, seed=3)))
    fault = kv.faults.Zeros(scope=kv.faults.Scope(rate=0.5, segments="m1"))
    full = tiny_llama.prefill(START.chat)
    cache = struck(tiny_llama, full, fault, seed=3)
    zeroed = (cache.values[0][0] == 0).all(0).all(-1)
    assert state.slots["damaged"] == zeroed.tolist()
    assert torch.equal(cache.ledger.live, full.ledger.live)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "must be a mapping"),
        ({"messages": [], "ask": "so", "more": 1}, "no key of the address"),
        ({"messages": [{"role": "user", "content": 3}], "ask": "so"}, "expected a str"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}], "ask": "so"}, "at most 20,000"),
        ({"messages": [], "ask": " "}, "The question is empty"),
        ({"messages": [], "ask": "so", "new": 10**9}, "give 1 to 64"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "exec"}]}, "expected one of 'mask'"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "mask"}]}, "needs segments"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "mask", "slots": [4, 2]}]}, "the one after the last"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "damage", "fault": "zeroes"}]}, "did you mean 'zeros'"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "damage", "fault": "zeros", "rate": 7}]}, "from 0 to 1"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "policy", "policy": "__import__('os')"}]}, "policy"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "patch", "segments": ["m0"]}]}, "what it says"),
        ({"messages": [], "ask": "so", "edits": [{"kind": "quantise", "segments": ["m0"]}]}, "whole cache"),
    ],
)
def test_an_address_that_is_none_is_refused(content: object, said: str):
    refused(lambda: address_of(content), said)


def test_an_edit_that_does_not_fit_is_refused_in_a_sentence(microscope: Microscope):
    everything = tuple(START.names)
    refused(lambda: microscope.state(at(Edit("mask", ("m9",)))), "m9")
    refused(lambda: microscope.state(at(Edit("evict", everything))), "least one slot")
    refused(lambda: microscope.state(at(Edit("restart", everything))), "at least one message")
    gone = (Edit("evict", slots=(2, 5)), Edit("mask", slots=(2, 4)))
    refused(lambda: microscope.state(at(*gone)), "no longer in the cache")
    late = (Edit("mask", ("m1",)), Edit("policy", policy="H2O(50%)"))
    refused(lambda: microscope.state(at(*late)), "make it the first edit")
    patch = Edit("patch", ("m0",), of="m0", text="the mill has 4. and so")
    refused(lambda: microscope.state(at(patch)), "a text of as many tokens")
    refused(lambda: microscope.state(at(replace(patch, of="m9"))), "m9")
    of_summary = (
        Edit("compact", ("m1",), text="so it is"),
        replace(patch, segments=("summary",), text="the mill has 7."),
    )
    refused(lambda: microscope.state(at(*of_summary)), "has no summary")
    refused(lambda: microscope.state(at(Edit("quantise"), patch)), "edit first, then quantise")
    long = Address((SaidMessage("user", "the mill " * 2000),), "so")
    refused(lambda: microscope.state(long), "at most 1,024")


def test_an_exception_of_a_step_ends_the_work_and_the_next_state_is_right(tiny_llama: Model, microscope: Microscope):
    fresh, steps = Microscope(tiny_llama), []

    def stop(what: str) -> None:
        steps.append(what)
        if what == "answering":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fresh.state(at(*EDITS["mask"]), step=stop)
    assert "mask m1" in steps
    assert without_time(fresh.state(at(*EDITS["mask"]))) == without_time(microscope.state(at(*EDITS["mask"])))


def test_a_conversation_with_more_than_texts_is_not_for_the_page():
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    chat = kv.Transcript.from_messages([{"role": "user", "content": HOSTILE}, call])
    with pytest.raises(UserError, match="calls of tools"):
        Address.of_chat(chat, "so")


def test_caches_are_kept_up_to_a_number_of_bytes(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    edits = Edit("evict", ("m0",)), Edit("mask", ("m1",))
    for most, kept in ((2**31, 2), (1, 1)):
        monkeypatch.setattr("kvprobe.app.microscope.KEPT_BYTES", most)
        microscope = Microscope(tiny_llama)
        microscope.state(at(*edits))
        assert len(microscope._kept["edited"]) == kept
