"""Policies at work on a model: while it reads, while it generates, and when what stays is computed again."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import PADDING
from kvprobe.inference.forward import extend, prefill
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.under_policy import apply, read_in_chunks, watch
from kvprobe.models.lanes import Lanes
from kvprobe.policies import (
    H2O,
    TOVA,
    Chain,
    HeadBudgets,
    LayerBudgets,
    MaskSpans,
    Policy,
    PruneToolResults,
    Quantise,
    RandomEviction,
    RestartInPlace,
    RestartRebuilt,
    Scene,
    SinkWindow,
    SlidingWindow,
    SnapKV,
)
from kvprobe.policies.policy import acting
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.models import CHATML, llama, tiny_tokenizer
from tests.policies.loops import record
from tests.random_caches import (
    assert_bit_identical,
    assert_close_caches,
    assert_same_ledger,
    copy_of,
    ragged_mask,
    random_tokens,
    relative_difference,
)
from tests.refusals import refused

LANES = ["plain", "hooked"]
few = settings(max_examples=3)
seeds = st.integers(0, 2**31)

UNIFORM: list[Policy] = [
    SlidingWindow(6),
    SlidingWindow(6, mode="contiguous"),
    SinkWindow(2, 4, mode="gapped"),
    RandomEviction(6, 0),
    SlidingWindow(6, provenance="recomputed"),
]
RAGGED: list[Policy] = [H2O(6, recent=0), TOVA(6), SnapKV(6, window=2), RandomEviction(6, 0, per_head=True)]
BUDGETS: list[Policy] = [LayerBudgets(H2O(5)), HeadBudgets(SnapKV(5, window=2, kernel=3))]


def close(model: Model, policy: Policy) -> Policy:
    """The policy; gapped where the model's positions cannot be closed."""
    if model.geometry.max_position is None:
        return policy
    if isinstance(policy, Chain):
        return Chain(tuple(close(model, part) for part in policy.members))
    return replace(policy, mode="gapped")


# What is held.


@pytest.mark.parametrize("policy", UNIFORM, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_uniform_policy_holds_its_retained_slots_to_the_byte(
    tiny_models: dict[str, Model], name: str, policy: Policy
):
    tiny = tiny_models[name]
    shape = tiny.geometry
    slot = shape.n_layers * shape.n_kv_heads * 2 * shape.d_head * 4
    prompt = [random_tokens(0, {"T1": 10})]
    generation = generate(tiny.lanes, prompt, max_new_tokens=5, stop=(), policy=close(tiny, policy))
    assert len(generation.trace) == 5
    for kept in generation.trace:
        assert kept.ledger.slots == 6
        assert kept.ledger.uniform
        assert kept.nbytes == kept.footprint == 6 * slot


@pytest.mark.parametrize("policy", RAGGED, ids=str)
def test_the_footprint_of_a_ragged_policy_is_counted_per_head(tiny_llama: Model, policy: Policy):
    generation = generate(tiny_llama.lanes, [random_tokens(0, {"T1": 20})], max_new_tokens=3, stop=(), policy=policy)
    for step, kept in enumerate(generation.trace):
        assert not kept.ledger.uniform
        assert kept.nbytes == kept.ledger.slots * 3 * 2 * 2 * 8 * 4
        live = 6 if policy.every is not None else 6 + step
        assert kept.footprint == live * 3 * 2 * 2 * 8 * 4 < kept.nbytes


def test_the_footprint_of_rows_of_different_lengths_counts_no_padding(tiny_llama: Model):
    prompts = [random_tokens(row, {"T1": count}) for row, count in enumerate([3, 10])]
    [kept] = generate(tiny_llama.lanes, prompts, max_new_tokens=1, policy=SlidingWindow(6)).trace
    slot = 3 * 2 * 2 * 8 * 4
    assert kept.nbytes == 2 * 6 * slot
    assert kept.footprint == (3 + 6) * slot


# When policies act.


def generated_by_hand(model: Model, prompt: Tokens, policy: Policy, count: int) -> tuple[tuple[int, ...], KVCache]:
    """Greedy decoding written out: the policy acts after the prompt and then when it is due."""
    watched = policy.observes is not None
    scene: Scene | None = None
    run, tokens = prompt, []
    for step in range(count):
        if watched:
            scene, logits = watch(model.lanes, scene, [run], policy.observes or 0)
        else:
            cache, logits = extend(model.lanes, scene and scene.cache, [run])
            scene = Scene(cache)
        for part in acting(policy, step):
            scene = part.act(scene)
        tokens.append(int(logits.argmax()))
        run = Tokens.of([tokens[-1]], "generated", int(scene.cache.ledger.following))
    assert scene is not None
    return tuple(tokens), scene.cache


PACED: list[Policy] = [
    SlidingWindow(5, every=2),
    SinkWindow(2, 5, every=3),
    H2O(5, every=2),
    SnapKV(6, window=2),
    SlidingWindow(9, every=None) | H2O(6, every=2) | TOVA(5, every=3),
    Quantise(4, group=4, tail=2) | SlidingWindow(7, mode="contiguous"),
]


@pytest.mark.parametrize("policy", PACED, ids=str)
def test_generating_under_a_policy_equals_reading_and_acting_alternately(tiny_llama: Model, policy: Policy):
    prompt = random_tokens(0, {"T1": 12})
    generation = generate(tiny_llama.lanes, [prompt], max_new_tokens=7, stop=(), policy=policy)
    tokens, cache = generated_by_hand(tiny_llama, prompt, policy, 7)
    assert generation.tokens[0] == tokens
    assert_bit_identical(generation.cache, cache)
    assert_same_ledger(generation.trace[-1].ledger, cache.ledger)


SCORED: list[Policy] = [
    H2O(5),
    TOVA(5),
    SnapKV(6, window=2),
    HeadBudgets(H2O(4)),
    SnapKV(6, window=2) | TOVA(5, every=2),
]


@pytest.mark.parametrize("policy", SCORED, ids=str)
def test_policies_that_score_do_the_same_on_both_lanes(tiny_gemma: Model, policy: Policy):
    """Rows of unequal length, and a window that is shorter than the text."""
    prompts = [random_tokens(count, {"T1": count}) for count in (9, 14)]
    plain, hooked = (
        generate(tiny_gemma.lanes, prompts, max_new_tokens=6, stop=(), policy=policy, lane=lane) for lane in LANES
    )
    assert plain.tokens == hooked.tokens
    for ours, theirs in zip(plain.trace, hooked.trace, strict=True):
        assert_same_ledger(ours.ledger, theirs.ledger)


@pytest.mark.parametrize(
    ("policy", "passes"), [(SnapKV(6, window=2), 1), (SlidingWindow(8) | SnapKV(6, window=2), 1), (H2O(5, every=3), 4)]
)
def test_attention_is_watched_only_while_a_policy_still_needs_it(
    tiny_llama: Model, monkeypatch: pytest.MonkeyPatch, policy: Policy, passes: int
):
    watched: list[int] = []
    monkeypatch.setattr(Lanes, "hooked", property(lambda _: pytest.fail("the hooked lane is not needed")))
    monkeypatch.setattr(
        "kvprobe.inference.under_policy.watch", lambda *given, **how: watched.append(1) or watch(*given, **how)
    )
    generate(tiny_llama.lanes, [random_tokens(0, {"T1": 12})], max_new_tokens=4, stop=(), policy=policy)
    assert len(watched) == passes


@pytest.mark.parametrize("policy", [SinkWindow(1, 5), H2O(6), RandomEviction(5, 1, per_head=True)], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 5, 40])
def test_reading_in_chunks_equals_reading_and_acting_alternately(tiny_llama: Model, policy: Policy, chunk: int):
    tokens = random_tokens(0, {"T1": 9, "T2": 6})
    scene: Scene | None = None
    for start in range(0, 15, chunk):
        run = tokens[start : start + chunk].shifted(0 if scene is None else int(scene.cache.ledger.following))
        if policy.observes is None:
            scene = Scene(extend(tiny_llama.lanes, scene and scene.cache, [run])[0])
        else:
            scene, _ = watch(tiny_llama.lanes, scene, [run], policy.observes)
        scene = policy.act(scene)
    assert scene is not None
    assert_bit_identical(tiny_llama.prefill(tokens, policy=policy, chunk=chunk), scene.cache)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_gaps_between_tokens_are_kept_wherever_a_chunk_ends(tiny_llama: Model, chunk: int):
    tokens = random_tokens(0, {"T1": 4}) + random_tokens(1, {"T2": 3}, start=9) + random_tokens(2, {"T3": 2}, start=15)
    whole = prefill(tiny_llama.lanes, [tokens])
    chunked = tiny_llama.prefill(tokens, policy=SlidingWindow(20), chunk=chunk)
    assert chunked.ledger.positions[0].tolist() == list(tokens.positions)
    assert_close_caches(chunked, whole)


@pytest.mark.parametrize("policy", [SinkWindow(2, 5), H2O(6), RandomEviction(6, 0)], ids=str)
def test_a_policy_acts_once_on_a_prompt_read_whole(tiny_llama: Model, policy: Policy):
    rows = [random_tokens(row, {"T1": count}) for row, count in enumerate([12, 9])]
    cache = tiny_llama.prefill(rows, policy=policy, samples=[4, 5])
    if policy.observes is None:
        scene = Scene(prefill(tiny_llama.lanes, rows), samples=(4, 5))
    else:
        scene, _ = watch(tiny_llama.lanes, None, rows, policy.observes)
    assert_bit_identical(cache, policy.act(scene).cache)


# Rows.


BATCHED: list[Policy] = [
    SlidingWindow(5),
    SinkWindow(2, 4, every=2),
    H2O(5),
    TOVA(5),
    SnapKV(6, window=3, kernel=3),
    SnapKV(8, window=2, kernel=7),
    RandomEviction(5, 1, per_head=True),
    HeadBudgets(H2O(4)),
    LayerBudgets(H2O(5)),
    Quantise(4, group=4, tail=2),
    TOVA(5, every=3),
    SlidingWindow(5, every=3),
    Quantise(4, group=1, tail=2, every=3),
    SlidingWindow(5, mode="contiguous", provenance="recomputed"),
]


PASTS = [(0, 6), (1, 11)], [(2, 7), (3, 4)]
"""Seeds and lengths of what two rows have read, and of what they read then."""


def assert_rows_are_as_alone(model: Model, policy: Policy) -> None:
    prompts = [random_tokens(count, {"T1": count}) for count in (4, 11)]
    samples = (5, 2)
    # What one row says ends it: rows that have ended keep step with the others.
    stop = generate(model.lanes, prompts[1:2], max_new_tokens=3, stop=(), policy=policy, samples=[2]).tokens[0][2:]
    settings: dict[str, Any] = {"max_new_tokens": 5, "stop": stop, "policy": policy}
    together = generate(model.lanes, prompts, samples=samples, **settings)
    assert any(together.stopped)
    for row, prompt in enumerate(prompts):
        alone = generate(model.lanes, [prompt], samples=samples[row : row + 1], **settings)
        assert together.tokens[row] == alone.tokens[0]
        torch.testing.assert_close(together.logprobs[row], alone.logprobs[0], atol=1e-4, rtol=0)
        for kept, kept_alone in zip(together.trace, alone.trace, strict=False):
            held = ~kept.ledger.padding[row]
            assert torch.equal(kept.ledger.positions[row, held], kept_alone.ledger.positions[0])
            shape = (3, 1, model.geometry.n_kv_heads, -1)
            live = kept.ledger.live[:, row : row + 1][..., held].expand(shape)
            assert torch.equal(live, kept_alone.ledger.live.expand(shape))
        kept, kept_alone = together.cache.ledger, alone.cache.ledger
        held, held_alone = ~kept.padding[row] & kept.live_somewhere[row], ~kept_alone.padding[0]
        for column in ("positions", "tokens", "quantised", "recomputed"):
            ours, theirs = getattr(kept, column)[row, held], getattr(kept_alone, column)[0, held_alone]
            assert torch.equal(ours, theirs), column


@pytest.mark.parametrize("policy", BATCHED, ids=str)
def test_a_row_under_a_policy_equals_the_row_alone(tiny_gemma: Model, policy: Policy):
    assert_rows_are_as_alone(tiny_gemma, policy)


@pytest.mark.parametrize("policy", BATCHED, ids=str)
def test_a_row_that_goes_on_after_a_shorter_past_keeps_what_it_keeps_alone(tiny_llama: Model, policy: Policy):
    """Between its past and what is read after it there is padding, as a longer row beside it has more slots."""
    rows, asked = ([random_tokens(seed, {"T1": count}) for seed, count in counts] for counts in PASTS)
    asked = [ask.shifted(len(row)) for ask, row in zip(asked, rows, strict=True)]
    together = generate(tiny_llama.lanes, asked, prefill(tiny_llama.lanes, rows), policy=policy, max_new_tokens=1)
    for row, (read, ask) in enumerate(zip(rows, asked, strict=True)):
        past = prefill(tiny_llama.lanes, [read])
        alone = generate(tiny_llama.lanes, [ask], past, policy=policy, max_new_tokens=1, samples=[row])
        held, kept = ~together.cache.ledger.padding[row], alone.cache.ledger
        assert torch.equal(together.cache.ledger.positions[row, held], kept.positions[0])
        live = together.cache.ledger.live[:, row, :, held]
        assert torch.equal(live, kept.live[:, 0].expand_as(live))


def test_a_row_of_any_model_under_a_policy_equals_the_row_alone(tiny: Model):
    assert_rows_are_as_alone(tiny, close(tiny, SinkWindow(1, 6) | TOVA(5, every=3)))


@given(seed=seeds, counts=st.lists(st.integers(1, 9), min_size=2, max_size=3), new=st.integers(1, 3))
@few
def test_joined_caches_continue_as_each_alone(tiny: Model, seed: int, counts: list[int], new: int):
    caches = []
    for row, count in enumerate(counts):
        cache = prefill(tiny.lanes, [random_tokens(seed + row, {f"T{row}": count, "end": 2})])
        cache = cache.evict("end") if row % 2 else ragged_mask(cache, seed + row)
        caches.append(cache)
    if tiny.geometry.max_position is None:
        caches[0] = caches[0].evict(slots=torch.arange(caches[0].slots)[None] == 0).reindex()
    joined = KVCache.join(caches)
    assert joined.slots == max(cache.slots for cache in caches)
    runs = [random_tokens(seed, {"T9": new}, start=int(cache.ledger.following)) for cache in caches]
    longer, logits = extend(tiny.lanes, joined, runs, logits=new)
    for row, (cache, run) in enumerate(zip(caches, runs, strict=True)):
        alone, expected = extend(tiny.lanes, cache, [run], logits=new)
        assert relative_difference(logits[row : row + 1], expected) < 1e-5
        for tensor, tensor_alone in zip(longer.keys + longer.values, alone.keys + alone.values, strict=True):
            assert relative_difference(tensor[row, :, -new:], tensor_alone[0, :, -new:]) < 1e-5
        names = [longer.ledger.names[index] for index in longer.ledger.segments[row].tolist() if index != PADDING]
        assert names == [alone.ledger.names[index] for index in alone.ledger.segments[0].tolist()]


def test_a_join_does_not_change_its_caches_and_returns_their_rows(tiny_llama: Model):
    caches = [prefill(tiny_llama.lanes, [random_tokens(row, {"T1": count})]) for row, count in enumerate([3, 7, 5])]
    before = [copy_of(cache) for cache in caches]
    joined = KVCache.join(caches)
    for row, (cache, copied) in enumerate(zip(caches, before, strict=True)):
        assert_bit_identical(cache, copied)
        assert_bit_identical(joined.rows([row]).select("T1"), cache)


def test_an_empty_cache_can_be_joined_and_continues_at_its_position(tiny: Model):
    full = prefill(tiny.lanes, [random_tokens(0, {"T1": 5})])
    empty = full.evict("T1")
    runs = [random_tokens(1, {"T2": 2}, start=5)] * 2
    _, logits = extend(tiny.lanes, KVCache.join([empty, full]), runs, logits=2)
    for row, cache in enumerate((empty, full)):
        expected = extend(tiny.lanes, cache, runs[:1], logits=2)[1]
        assert relative_difference(logits[row : row + 1], expected) < 1e-5


def test_caches_of_other_shapes_or_grains_and_no_caches_cannot_be_joined(tiny_models: dict[str, Model]):
    llama, gpt2 = (prefill(tiny_models[name].lanes, [random_tokens(0, {"T1": 8})]) for name in ("llama", "gpt2"))
    refused(lambda: KVCache.join([llama, gpt2]), "3 layers of 4 KV heads of 8, the base 3 of 2")
    coarse, fine = (Quantise(bits, group=4, tail=0).act(Scene(llama)).cache for bits in (2, 4))
    refused(lambda: KVCache.join([coarse, fine]), "different quantisation formats")
    assert KVCache.join([llama, fine]).ledger.quantisation == fine.ledger.quantisation
    refused(lambda: KVCache.join([]), "no caches to join")


# What is watched.


def attention_by_hand(model: Model, tokens: Tokens) -> torch.Tensor:
    """`[layers, kv_heads, queries, slots]`: weights of one eager pass, averaged over the heads of a group."""
    plain = model.lanes.plain
    before = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = plain(
                input_ids=torch.tensor([tokens.ids]),
                position_ids=torch.tensor([tokens.positions]),
                output_attentions=True,
                use_cache=False,
            )
    finally:
        plain.set_attn_implementation(before)
    heads = torch.stack(out.attentions)[:, 0]
    groups = model.geometry.n_heads // model.geometry.n_kv_heads
    return torch.stack([heads[:, first : first + groups].mean(1) for first in range(0, heads.shape[1], groups)], 1)


@given(
    seed=seeds,
    counts=st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=2), min_size=1, max_size=3),
    queries=st.integers(0, 8),
)
@few
def test_attention_recorded_in_chunks_equals_that_of_one_pass(
    tiny: Model, seed: int, counts: list[list[int]], queries: int
):
    rows = [random_tokens(seed + row, {"T1": sum(row[0] for row in counts)}) for row in range(1)]
    whole = [random_tokens(seed + row, {"T1": sum(chunk[row] for chunk in counts)}) for row in range(2)]
    assert rows[0].ids == whole[0].ids
    scene: Scene | None = None
    read = [0, 0]
    for chunk in counts:
        runs = [whole[row][read[row] : read[row] + chunk[row]] for row in range(2)]
        read = [so_far + more for so_far, more in zip(read, chunk, strict=True)]
        scene, _ = watch(tiny.lanes, scene, runs, queries)
    assert scene is not None
    for row, tokens in enumerate(whole):
        held = ~scene.cache.ledger.padding[row]
        weights = attention_by_hand(tiny, tokens)
        torch.testing.assert_close(record(scene).total[:, row][..., held], weights.sum(2), atol=1e-5, rtol=0)
        expected = torch.zeros(3, weights.shape[1], queries, len(tokens))
        last = min(queries, len(tokens))
        expected[:, :, queries - last :] = weights[:, :, len(tokens) - last :]
        torch.testing.assert_close(record(scene).recent[:, row][..., held], expected, atol=1e-5, rtol=0)
        assert not bool(record(scene).total[:, row][..., ~held].any())
        assert not bool(record(scene).recent[:, row][..., ~held].any())


def test_a_cache_without_a_record_counts_as_never_attended_to(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 5})])
    scene, _ = watch(tiny_llama.lanes, Scene(cache), [random_tokens(1, {"T2": 3}, start=5)], 4)
    assert not bool(record(scene).recent[..., 0, :].any())
    paid = record(scene).total.sum(-1)
    torch.testing.assert_close(paid, torch.full_like(paid, 3.0))


def test_several_rows_can_continue_one_recorded_row(tiny_llama: Model):
    start = tiny_llama.watch(random_tokens(0, {"T1": 6}), queries=3)
    runs = [random_tokens(row, {"T2": 2 + row}, start=6) for row in range(3)]
    together = tiny_llama.watch(runs, start, queries=3)
    for row, run in enumerate(runs):
        alone = tiny_llama.watch(run, start, queries=3)
        for recorded, recorded_alone in (
            (record(together).total, record(alone).total),
            (record(together).recent, record(alone).recent),
        ):
            torch.testing.assert_close(
                recorded[:, row, ..., : recorded_alone.shape[-1]], recorded_alone[:, 0], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("queries", [0, 2, 5])
def test_another_number_of_recorded_queries_is_refused(tiny_llama: Model, queries: int):
    scene = tiny_llama.watch(random_tokens(0, {"T1": 6}), queries=3)
    refused(
        lambda: tiny_llama.watch(random_tokens(1, {"T2": 2}, start=6), scene, queries=queries),
        "holds the last 3 queries",
        f"{queries}",
    )


def test_an_eviction_by_hand_from_a_recorded_cache_is_refused(tiny_llama: Model):
    scene = tiny_llama.watch(random_tokens(0, {"T1": 6, "T2": 2}))
    assert scene.with_cache(scene.cache.mask("T1")).attention is scene.attention
    refused(lambda: scene.with_cache(scene.cache.evict("T1")), "from 8 to 2 slots by hand")


@given(seed=seeds, chunks=st.lists(st.integers(1, 4), min_size=1, max_size=2))
@few
def test_lanes_agree_on_a_ragged_cache_read_in_chunks_and_token_by_token(tiny: Model, seed: int, chunks: list[int]):
    rows = [random_tokens(seed + row, {"T1": count}) for row, count in enumerate([9, 5])]
    caches = {lane: ragged_mask(prefill(tiny.lanes, rows, lane), seed) for lane in LANES}
    logits_by_lane: dict[str, list[torch.Tensor]] = {lane: [] for lane in LANES}
    for step, count in enumerate([*chunks, 1]):
        for lane in LANES:
            following = caches[lane].ledger.following.tolist()
            runs = [random_tokens(seed + step, {"T2": count}, start=start) for start in following]
            caches[lane], logits = extend(tiny.lanes, caches[lane], runs, lane, count)
            caches[lane] = ragged_mask(caches[lane], seed + step)
            logits_by_lane[lane].append(logits)
    for plain, hooked in zip(logits_by_lane["plain"], logits_by_lane["hooked"], strict=True):
        assert relative_difference(hooked, plain) < 1e-4


# Computed again.


@pytest.mark.parametrize("mode", ["gapped", "contiguous"])
@pytest.mark.parametrize("lane", LANES)
def test_a_recomputed_window_equals_a_restart_on_its_tokens(tiny: Model, mode: str, lane: str):
    tokens = random_tokens(0, {"T1": 9, "T2": 6})
    policy = SlidingWindow(8, mode=mode, provenance="recomputed")
    recomputed = apply(tiny.lanes, policy, Scene(prefill(tiny.lanes, [tokens], lane)), lane=lane).cache
    last = tokens[7:] if mode == "gapped" else tokens[7:].shifted(0)
    expected = prefill(tiny.lanes, [replace(last, recomputed=(True,) * 8)], lane)
    assert_close_caches(recomputed, expected)


def test_generation_under_a_recomputed_window_restarts_at_each_token(tiny_llama: Model):
    prompt = random_tokens(0, {"T1": 12})
    policy = SlidingWindow(6, mode="contiguous", provenance="recomputed")
    generation = generate(tiny_llama.lanes, [prompt], max_new_tokens=6, stop=(), policy=policy)
    said = list(prompt.ids)
    # The first token follows the whole prompt; each later one the window and the token before it.
    for step, token in enumerate(generation.tokens[0]):
        seen = Tokens.of(said) if step == 0 else Tokens.of(said[-7:])
        assert token == int(extend(tiny_llama.lanes, None, [seen])[1].argmax())
        said.append(token)


def test_a_restart_after_closed_gaps_marks_all_later_slots(tiny_llama: Model):
    head, rest = random_tokens(0, {"T1": 12}), random_tokens(1, {"T2": 3, "T3": 4})
    cache = tiny_llama.apply(SinkWindow(2, 4), prefill(tiny_llama.lanes, [head]))
    cache, _ = extend(tiny_llama.lanes, cache, [rest.shifted(6)])
    restarted = tiny_llama.apply(RestartRebuilt("T2"), cache)
    # What stood behind the sinks had seen what the window then lost, and is now computed without it.
    assert restarted.ledger.recomputed[0].tolist() == [False] * 2 + [True] * 8
    expected = Tokens.of(head.ids[:2] + head.ids[-4:] + rest.ids[3:])
    for pair in zip(restarted.keys, prefill(tiny_llama.lanes, [expected]).keys, strict=True):
        assert relative_difference(*pair) < 1e-5


def test_recomputing_an_unchanged_cache_marks_nothing(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 9})])
    recomputed = tiny_llama.apply(SlidingWindow(9, provenance="recomputed"), cache)
    assert_close_caches(recomputed, cache)


def test_recomputed_slots_are_no_longer_quantised(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 9})])
    coarse = tiny_llama.apply(Quantise(2, group=4, tail=0), cache)
    recomputed = tiny_llama.apply(SlidingWindow(9, provenance="recomputed"), coarse)
    assert relative_difference(coarse.keys[0], cache.keys[0]) > 1e-2
    assert_close_caches(recomputed, cache)


def test_reading_in_chunks_gives_the_logits_of_the_last_chunk(tiny_llama: Model):
    tokens = random_tokens(0, {"T1": 11})
    _, logits = read_in_chunks(tiny_llama.lanes, [tokens], SlidingWindow(30), 4)
    assert relative_difference(logits, extend(tiny_llama.lanes, None, [tokens])[1]) < 1e-5


@pytest.mark.parametrize("policy", BUDGETS, ids=str)
def test_a_cache_with_unequal_budgets_can_be_continued(tiny: Model, policy: Policy):
    cache = tiny.prefill(random_tokens(0, {"T1": 14}), policy=policy)
    live = cache.ledger.live.expand(3, -1, tiny.geometry.n_kv_heads, -1)
    assert 0 < int(live.sum()) <= 5 * 3 * tiny.geometry.n_kv_heads
    question = [random_tokens(1, {"T2": 2}, start=14)]
    plain, hooked = (extend(tiny.lanes, cache, question, lane)[1] for lane in LANES)
    assert relative_difference(hooked, plain) < 1e-4


CHAT = Transcript.from_messages([{"role": "user", "content": "so it is"}, {"role": "assistant", "content": "yes"}])
TOOLS = Tokens.of(range(6), "tool") + Tokens.of(range(6), "rest", 6)
SINK_WARNED: dict[str, tuple[int, Callable[[Model], object]]] = {
    "mask": (1, lambda model: model.prefill(CHAT).mask("m0")),
    "MaskSpans, prefill": (1, lambda model: model.prefill(CHAT, policy="MaskSpans('m0')")),
    "MaskSpans in chunks": (1, lambda model: model.prefill(CHAT, policy="MaskSpans('m0')", chunk=4)),
    "MaskSpans, apply": (1, lambda model: model.apply(MaskSpans("m0"), model.prefill(CHAT))),
    "MaskSpans, generate": (1, lambda model: model.generate(CHAT, policy=MaskSpans("m0"), max_new_tokens=3)),
    "MaskSpans, repeated": (1, lambda model: model.generate(CHAT, policy=MaskSpans("m0", every=1), max_new_tokens=3)),
    "in a chain": (1, lambda model: model.prefill(CHAT, policy=MaskSpans("m0") | SlidingWindow(4))),
    "RestartInPlace": (1, lambda model: model.prefill(CHAT, policy=RestartInPlace("m0"))),
    "RestartRebuilt": (1, lambda model: model.prefill(CHAT, policy=RestartRebuilt("m0"))),
    "without": (1, lambda model: model.prefill(CHAT.without("m0"))),
    "without, contiguous": (1, lambda model: model.prefill(CHAT.without("m0", mode="contiguous"))),
    "without, generate": (1, lambda model: model.generate(CHAT.without("m0"), "so", max_new_tokens=2)),
    "a pruned tool result": (1, lambda model: model.prefill(TOOLS, policy=PruneToolResults(0))),
    "MaskSpans of what comes later": (0, lambda model: model.prefill(CHAT, policy=MaskSpans("m1"))),
    "MaskSpans, delimiters kept": (0, lambda model: model.prefill(CHAT, policy=MaskSpans("m0", delimiters="kept"))),
    "without what comes later": (0, lambda model: model.prefill(CHAT.without("m1"))),
    "SlidingWindow": (0, lambda model: model.prefill(CHAT, policy=SlidingWindow(8))),
    "SinkWindow": (0, lambda model: model.prefill(CHAT, policy=SinkWindow(2, 4))),
}


@pytest.fixture(scope="module")
def chatting() -> Model:
    return llama(tokenizer=tiny_tokenizer(CHATML))


@pytest.mark.parametrize(("times", "call"), SINK_WARNED.values(), ids=SINK_WARNED)
def test_whatever_hides_slot_0_by_name_warns_once(chatting: Model, times: int, call: Callable[[Model], object]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(chatting)
    assert len([warning for warning in caught if "slot 0, the attention sink" in str(warning.message)]) == times
