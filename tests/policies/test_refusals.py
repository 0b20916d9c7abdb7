"""What policies refuse, in one sentence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvprobe.errors import UserError
from kvprobe.inference.forward import prefill
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.models.lanes import Lanes
from kvprobe.policies import (
    H2O,
    TOVA,
    HeadBudgets,
    LayerBudgets,
    MaskSpans,
    Policy,
    PruneToolResults,
    Quantise,
    RandomEviction,
    RestartRebuilt,
    Scene,
    SinkWindow,
    SlidingWindow,
    SnapKV,
    ZeroValues,
)
from tests.policies.scenes import random_scene
from tests.random_caches import NAMES, assert_bit_identical, random_tokens
from tests.refusals import refused

BAD: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (lambda: SlidingWindow(0), ("SlidingWindow", "window=0", "at least 1")),
    (lambda: SinkWindow(-1, 4), ("SinkWindow", "sinks=-1", "at least 0")),
    (lambda: SinkWindow(2, 0), ("window=0",)),
    (lambda: H2O(0), ("H2O", "budget=0")),
    (lambda: H2O(4, recent=5), ("recent=5", "4")),
    (lambda: H2O(4, recent=-1), ("recent=-1",)),
    (lambda: TOVA(0), ("TOVA", "budget=0")),
    (lambda: SnapKV(8, window=16), ("SnapKV", "budget=8", "window=16")),
    (lambda: SnapKV(8, window=0), ("window=0",)),
    (lambda: SnapKV(20, kernel=4), ("kernel=4", "odd")),
    (lambda: SnapKV(20, kernel=-1), ("kernel=-1",)),
    (lambda: RandomEviction(0, 0), ("RandomEviction", "budget=0")),
    (lambda: RandomEviction(1, -1), ("seed=-1",)),
    (lambda: RandomEviction(4, 0, mode="contiguous"), ("mode=contiguous", "every=None")),
    (lambda: SinkWindow(1, 6) | RandomEviction(4, 0), ("RandomEviction(budget=4, seed=0) would draw", "every=None")),
    (lambda: LayerBudgets(RandomEviction(4, 0)) | SinkWindow(1, 6), ("would draw old numbers again",)),
    (lambda: RandomEviction(4, 0, sinks=5), ("sinks=5", "budget=4")),
    (lambda: RandomEviction(4, 0, sinks=-1), ("sinks=-1",)),
    (lambda: LayerBudgets(H2O(4), beta=0), ("LayerBudgets has beta=0", "at least 1")),
    (lambda: HeadBudgets(H2O(4), floor=1.5), ("floor=1.5",)),
    (lambda: HeadBudgets(LayerBudgets(H2O(4))), ("HeadBudgets", "shares of LayerBudgets(policy=H2O(budget=4))")),
    (lambda: RandomEviction(4, 0).act(replace(random_scene(0), samples=(3,))), ("2 rows", "1 sample numbers")),
    (lambda: Quantise(0), ("bits=0", "1 to 8")),
    (lambda: Quantise(9), ("bits=9", "1 to 8")),
    (lambda: Quantise(4, group=0), ("group=0",)),
    (lambda: Quantise(4, tail=-1), ("tail=-1",)),
    (lambda: Quantise(4, mode="contiguous"), ("Quantise moves", "mode")),
    (lambda: Quantise(4, provenance="recomputed"), ("Quantise moves",)),
    (lambda: MaskSpans(()), ("MaskSpans names no segment",)),
    (lambda: RestartRebuilt(""), ("RestartRebuilt names no segment",)),
    (lambda: MaskSpans("T1", delimiters="keep"), ("choice of delimiters", "'keep'")),
    (lambda: ZeroValues(()), ("ZeroValues names no segment",)),
    (lambda: ZeroValues("T1", provenance="recomputed"), ("ZeroValues writes values",)),
    (lambda: PruneToolResults(-1), ("keep_last=-1",)),
    (lambda: PruneToolResults(1, placeholder=" "), ("empty placeholder",)),
    (lambda: SlidingWindow(4, mode="closed"), ("choice of mode", "'closed'", "'gapped'")),
    (lambda: SlidingWindow(4, mode="contigous"), ("did you mean 'contiguous'?",)),
    (lambda: SlidingWindow(4, provenance="kept"), ("provenance", "'kept'", "'retained'")),
    (lambda: SlidingWindow(4, every=0), ("every=0", "at least 1")),
    (lambda: MaskSpans("sumary").act(random_scene(0)), ("'sumary'", "did you mean 'summary'?")),
    (lambda: ZeroValues("T3").act(random_scene(0)), ("'T3'",)),
    (lambda: ZeroValues("T1", layers=[3]).act(random_scene(0)), ("There is no layer 3; the cache has layers 0 to 2.",)),
    (lambda: MaskSpans(NAMES).act(random_scene(0)), ("would leave layer 0, KV head 0 of row 0 without",)),
    (lambda: H2O(4).act(Scene(random_scene(0).cache)), ("H2O needs", "Model.watch")),
    (lambda: (H2O(4) | TOVA(2)).act(Scene(random_scene(0).cache)), ("H2O needs", "Model.watch")),
    (lambda: SnapKV(9, window=6).act(random_scene(0)), ("SnapKV needs", "last 6 queries", "5")),
    (lambda: HeadBudgets(SnapKV(9, window=6)).act(random_scene(0)), ("last 6 queries", "5")),
    (lambda: Quantise(4, group=2, tail=0).act(random_scene(0)), ("Values of 5 numbers", "groups of 2")),
    (
        lambda: (Quantise(4, group=1, tail=0) | Quantise(2, group=1, tail=0)).act(random_scene(0)),
        ("bits=4", "Quantise(bits=2, group=1, tail=0)"),
    ),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=[" ".join(said) for _, said in BAD])
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_in_one_sentence(call: Callable[[], Any], said: tuple[str, ...]):
    refused(call, *said)


def test_a_policy_that_scores_is_refused_on_a_plain_lane_that_hides_its_attention(
    tiny_llama: Model, monkeypatch: pytest.MonkeyPatch
):
    """Left to kvprobe, the hooked lane is taken, but only while scores are needed."""

    def hidden(lanes: Lanes, slots: int) -> None:
        raise UserError("This attention is not a softmax.")

    monkeypatch.setattr("kvprobe.models.lanes.prove_attention", hidden)
    lanes, prompt = Lanes(tiny_llama.lanes.plain), [random_tokens(0, {"T1": 6})]
    for policy in (H2O(4), SlidingWindow(4) | LayerBudgets(TOVA(4))):
        refused(lambda policy=policy: generate(lanes, prompt, policy=policy, lane="plain"), "not a softmax")
        taken, expected = (
            generate(lanes, prompt, max_new_tokens=4, policy=policy, lane=lane) for lane in ("auto", "hooked")
        )
        assert_bit_identical(taken.cache, expected.cache)


def test_a_policy_that_scores_is_refused_where_attention_was_not_watched(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 6})])
    refused(lambda: tiny_llama.apply(TOVA(4), cache), "TOVA needs", "Model.watch")
    scene = tiny_llama.watch(random_tokens(0, {"T1": 6}), queries=3)
    refused(lambda: tiny_llama.apply(SnapKV(5, window=4), scene), "last 4 queries")
    assert tiny_llama.apply(SnapKV(5, window=3), scene).ledger.live_somewhere.sum() >= 5


@pytest.mark.parametrize("policy", [SinkWindow(1, 3), SlidingWindow(3, mode="contiguous")])
def test_closing_up_learned_positions_is_refused_before_any_change(tiny_models: dict[str, Model], policy: Policy):
    gpt2 = tiny_models["gpt2"]
    cache = prefill(gpt2.lanes, [random_tokens(0, {"T1": 6})])
    refused(lambda: gpt2.apply(policy, cache), "learned positions", "mode='gapped'")
    again = replace(policy, provenance="recomputed")
    assert gpt2.apply(again, cache).ledger.positions[0].tolist() == list(
        range(int(policy.keep(Scene(cache))[0, 0, 0].sum()))
    )


def test_slots_kept_by_some_heads_alone_cannot_be_computed_again(tiny_llama: Model):
    scene = tiny_llama.watch(random_tokens(0, {"T1": 24}))
    refused(lambda: tiny_llama.apply(H2O(6, recent=0, provenance="recomputed"), scene), "different slots", "'retained'")


def test_reading_in_chunks_refuses_rows_that_do_not_end_together(tiny_llama: Model):
    rows = [random_tokens(0, {"T1": 4}), random_tokens(1, {"T1": 5})]
    refused(lambda: tiny_llama.prefill(rows, policy=SlidingWindow(3), chunk=2), "rows of equal length")
    refused(lambda: tiny_llama.prefill(rows[:1], policy=SlidingWindow(3), chunk=0), "chunk=0")
