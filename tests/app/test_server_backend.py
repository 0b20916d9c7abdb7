"""The microscope on a model in a llama-server, beside the same model in this process."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from kvprobe.app.address import Address, Edit
from kvprobe.app.microscope import AppState, Microscope
from kvprobe.app.refusals import OBSERVERS, UNEVEN
from kvprobe.app.server_backend import MISSING
from kvprobe.engines.served_model import EDITED, READ, RestoredSlot, ServedModel, divergence_at_least
from kvprobe.engines.server import LlamaServer
from kvprobe.exported import json_schema
from kvprobe.inference.model import Model
from tests.app.made_up import START
from tests.refusals import refused

EDITS: dict[str, tuple[Edit, ...]] = {
    "nothing": (),
    "evict a run, then mask": (Edit("evict", slots=(3, 9)), Edit("mask", slots=(5, 20))),
    "re-index, then damage": (Edit("re-index", ("m1",)), Edit("damage", ("m2",), fault="zeros", rate=0.5)),
    "restart after damage": (Edit("damage", fault="gaussian", rate=0.3, seed=2), Edit("restart", ("m1",))),
    "damage with what another conversation holds": (Edit("damage", fault="distractor", rate=0.5),),
    "quantise, policy": (Edit("quantise", bits=2), Edit("policy", policy="SinkWindow(2, 30)")),
    "patch after an eviction, then compact": (
        Edit("re-index", slots=(5, 9)),
        Edit("patch", ("m1", "m2"), of="m0", text="the mill has 7."),
        Edit("compact", ("m1",), text="so it is", then="re-index"),
        Edit("mask", ("m2",)),
    ),
    "compact all, and again": (
        Edit("compact", tuple(START.names), text="so it is"),
        Edit("compact", ("summary",), text="so", then="mask"),
    ),
}


@pytest.fixture(scope="module")
def there(tiny_server: LlamaServer) -> Microscope:
    return Microscope(ServedModel(tiny_server))


@pytest.fixture(scope="module")
def here(tiny_llama: Model) -> Microscope:
    return Microscope(tiny_llama)


def at(*edits: Edit) -> Address:
    return replace(START, edits=edits)


@pytest.mark.parametrize("name", EDITS)
def test_a_state_of_a_server_is_that_of_the_model_itself(
    here: Microscope, there: Microscope, name: str, monkeypatch: pytest.MonkeyPatch
):
    state, true = there.state(at(*EDITS[name])), here.state(at(*EDITS[name]))
    jsonschema.validate(json.loads(state.to_json()), json_schema())
    assert (state.slots, state.edits, state.hidden) == (true.slots, true.edits, true.hidden)
    assert (state.written, state.notes) == (true.written, true.notes)
    assert set(true.refused) <= set(state.refused)
    assert state.expected == true.expected
    for reply, right in zip(state.replies, true.replies, strict=True):
        assert (reply.text, reply.tokens, reply.slots) == (right.text, right.tokens, right.slots)
        assert reply.logprobs == pytest.approx(right.logprobs, abs=1e-4)
        assert reply.own_logprobs == pytest.approx(right.own_logprobs, abs=1e-4)
        assert reply.kls == pytest.approx(right.kls, abs=2e-4)
    for row, right in zip(state.change, true.change, strict=True):
        assert row == pytest.approx(right, abs=1e-3)
    assert state.memory["full"] == true.memory["full"]

    printed, looked = list[str](), list[AppState]()
    assert isinstance(there.backend.model, ServedModel)
    monkeypatch.setattr("kvprobe.app.microscope.Microscope", lambda model: there)
    monkeypatch.setattr(AppState, "show", lambda state: looked.append(state))
    exec(state.python, {"print": printed.append})
    assert printed == [state.replies[-1].text]
    assert [replace(one, address=state.address, seconds=state.seconds) for one in looked] == [state]


def test_what_a_slot_is_not_enough_for_is_said_in_a_sentence(there: Microscope):
    state = there.state(at(Edit("mask", ("m1",))), attention=True)
    assert (state.attention, state.contamination, state.readings) == (None, None, None)
    assert state.attention_left_out == MISSING["attention"]
    assert state.contamination_left_out == MISSING["contamination"]
    assert state.readings_left_out == MISSING["readings"]
    refused(
        lambda: there.state(at(Edit("policy", policy="RandomEviction(50%, seed=0, per_head=True)"))),
        "llama.cpp cannot express",
    )
    last = len(state.slots["text"]) - 1
    assert {(one.kind, one.what, one.slots) for one in state.refused} == {
        *(("policy", name, ()) for name in (*OBSERVERS, *UNEVEN)),
        *(("mask", "", (last,)), ("evict", "", (last,)), ("damage", "gaussian-effect", ())),
    }
    for edit, words in (
        (Edit("policy", policy="SnapKV(50%, window=2)"), "gives no attention"),
        (Edit("damage", fault="gaussian-effect"), "gives no queries"),
        (Edit("mask", ("m2",)), "goes on right after a live slot alone"),
    ):
        refused(lambda edit=edit: there.state(at(edit)), words)
    refused(lambda: there.state(at(Edit("policy", policy="RestartInPlace('m0')"))), "without gaps")


def test_memory_is_what_the_server_holds(tiny_server: LlamaServer):
    memory = Microscope(ServedModel(tiny_server)).state(at(Edit("mask", ("m1",)))).to_plain()["memory"]
    full, held = (memory[name]["slots"] for name in ("full", "held"))
    assert held == full * memory["slots"] // memory["of"] < full
    assert 0 < tiny_server.path(EDITED).stat().st_size - held < 2000  # tokens, positions and headers


def test_a_slot_that_somebody_else_used_is_refused(there: Microscope, tiny_server: LlamaServer):
    model = ServedModel(tiny_server)
    cache = model.prefill(START.chat).mask("m1")
    start = model.restored(cache, model.prompts(cache, START.ask)[0])
    tiny_server.complete([3, 4, 5], reuse=False)
    refused(lambda: start.likeliest(()), "what was edited is lost")
    tiny_server.path(READ).unlink()
    assert model.generate(cache, START.ask, max_new_tokens=2).text == there.state(
        replace(at(Edit("mask", ("m1",))), new=2)
    ).replies[1].text  # fmt: skip


def test_what_is_no_server_of_a_model_here_is_refused(tiny_server: LlamaServer, tmp_path: Path):
    refused(lambda: ServedModel.at(tiny_server.url, tmp_path / "nowhere"), "no folder", "--slot-save-path")
    refused(lambda: ServedModel.at(tiny_server.url, tmp_path).prefill("the mill"), "but not in", "--slot-save-path")
    refused(
        lambda: ServedModel.at(tiny_server.url, tmp_path, tmp_path / "none.gguf").tokenizer, "no file here", "--gguf"
    )
    refused(lambda: ServedModel.at("http://127.0.0.1:9", tmp_path).name, "No server answers")


def test_a_divergence_of_the_likeliest_tokens_is_never_too_large():
    first, now = {1: -0.2231435, 2: -1.6094379}, {1: -1.6094379, 3: -0.2231435}  # 0.8 and 0.2
    exact = divergence_at_least({**first, 3: -30.0}, {**now, 2: -30.0})
    assert 0 < divergence_at_least(first, now) < exact
    assert divergence_at_least(first, first) == 0
    halves = {1: -0.6931472, 2: -0.6931472}
    assert divergence_at_least(first, halves) == pytest.approx(0.8 * 0.4700036 - 0.2 * 0.9162907, abs=1e-5)


def test_a_token_that_is_not_among_the_likeliest_is_asked_for(
    tiny_server: LlamaServer, monkeypatch: pytest.MonkeyPatch
):
    model = ServedModel(tiny_server)
    cache = model.prefill(START.chat)
    every = model.restored(cache, model.prompts(cache, START.ask)[0]).likeliest(())
    monkeypatch.setattr("kvprobe.engines.served_model.LIKELIEST", 3)
    start: RestoredSlot = model.restored(cache, model.prompts(cache, START.ask)[0])
    assert len(start.likeliest(())) == 3
    last = min(every, key=every.__getitem__)
    assert start.likeliest((), last)[last] == pytest.approx(every[last], abs=1e-4)
