from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import PADDING
from kvprobe.inference.forward import extend, new_slots, onwards, prefill
from kvprobe.inference.model import Model
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import Tokens
from tests.models import GPT2_POSITIONS, WINDOW, gemma3, llama
from tests.random_caches import (
    assert_bit_identical,
    assert_close,
    copy_of,
    ragged_mask,
    random_tokens,
    relative_difference,
)
from tests.refusals import refused

LANES = ["plain", "hooked"]
few = settings(max_examples=5)
seeds = st.integers(0, 2**31)
lengths = st.integers(1, 7)
spans = st.fixed_dictionaries({"system": lengths, "T1": lengths, "summary": lengths})


def logits_after(
    model: Model, past: KVCache | None, tokens: Tokens | list[Tokens], lane: Lane = "plain"
) -> torch.Tensor:
    """The logits after every one of the new tokens."""
    rows = [tokens] if isinstance(tokens, Tokens) else tokens
    return extend(model.lanes, past, rows, lane, logits=min(map(len, rows)))[1]


def assert_same_slots(actual: KVCache, expected: KVCache, count: int, tolerance: float = 1e-5) -> None:
    """The last `count` slots hold the same keys and values at the same positions."""
    for pairs in zip(actual.keys + actual.values, expected.keys + expected.values, strict=True):
        assert_close(*(tensor[:, :, -count:] for tensor in pairs), tolerance)
    assert torch.equal(actual.ledger.positions[:, -count:], expected.ledger.positions[:, -count:])


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, spans=spans, gone=st.sampled_from(["system", "T1", "summary"]), new=lengths)
@few
def test_masking_equals_eviction_with_true_positions(
    tiny: Model, lane: Lane, seed: int, spans: dict[str, int], gone: str, new: int
):
    cache = prefill(tiny.lanes, [random_tokens(seed, spans)], lane)
    question = random_tokens(seed + 1, {"T2": new}, start=cache.slots)
    masked, after_mask = extend(tiny.lanes, cache.mask(gone), [question], lane, new)
    evicted, after_eviction = extend(tiny.lanes, cache.evict(gone), [question], lane, new)
    assert_close(after_eviction, after_mask)
    assert_same_slots(evicted, masked, new)


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, count=st.integers(2, 16), new=lengths)
@few
def test_masking_equals_eviction_when_rows_lose_different_slots(
    tiny: Model, lane: Lane, seed: int, count: int, new: int
):
    rows = [random_tokens(seed + row, {"T1": count}) for row in range(3)]
    cache = prefill(tiny.lanes, rows, lane)
    gone = torch.rand(3, count, generator=torch.Generator().manual_seed(seed)) < 0.5
    questions = [random_tokens(seed + 9 + row, {"T2": new}, start=count) for row in range(3)]
    masked, after_mask = extend(tiny.lanes, cache.mask(slots=gone), questions, lane, new)
    evicted, after_eviction = extend(tiny.lanes, cache.evict(slots=gone), questions, lane, new)
    assert_close(after_eviction, after_mask)
    assert_same_slots(evicted, masked, new)


def oracle(model: Model, tokens: Tokens, hidden: str, cut: int) -> torch.Tensor:
    """All logits of one eager pass without a cache, under masks written by a loop."""
    masks = {}
    for kind, window in (("full_attention", None), ("sliding_attention", WINDOW)):
        mask = torch.full((1, 1, len(tokens), len(tokens)), torch.finfo(torch.float32).min)
        for query in range(len(tokens)):
            for slot in range(query + 1):
                unseen = query >= cut and tokens.segments[slot] == hidden
                far = window is not None and tokens.positions[query] - tokens.positions[slot] >= window
                if not (unseen or far):
                    mask[0, 0, query, slot] = 0
        masks[kind] = mask
    plain = model.lanes.plain
    given_masks: Any = masks if any(model.geometry.windows) else masks["full_attention"]
    before = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            ids, positions = torch.tensor([tokens.ids]), torch.tensor([tokens.positions])
            return plain(input_ids=ids, position_ids=positions, attention_mask=given_masks, use_cache=False).logits
    finally:
        plain.set_attn_implementation(before)


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, spans=spans, gap=st.integers(0, 9), new=lengths)
@few
def test_reading_after_a_masked_cache_equals_one_pass_under_a_mask_made_by_hand(
    tiny: Model, lane: Lane, seed: int, spans: dict[str, int], gap: int, new: int
):
    before = random_tokens(seed, spans)
    question = random_tokens(seed + 1, {"T2": new}, start=len(before) + gap)
    expected = oracle(tiny, before + question, "T1", len(before))[:, -new:]
    logits = logits_after(tiny, prefill(tiny.lanes, [before], lane).mask("T1"), question, lane)
    assert_close(logits, expected)


def test_tokens_go_on_where_each_row_ends():
    long, short, more = (random_tokens(length, {"T1": length}) for length in (5, 3, 2))
    cache = prefill(llama().lanes, [long, short])
    assert [run.positions for run in onwards(cache, [more])] == [(5, 6), (3, 4)]
    assert [run.positions for run in onwards(cache, [more, long])] == [(5, 6), (3, 4, 5, 6, 7)]
    assert [run.positions for run in onwards(cache.rows([1]), [more, short])] == [(3, 4), (3, 4, 5)]
    with pytest.raises(ValueError, match="zip"):
        onwards(cache, [more, more, more])


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, spans=spans, gap=st.integers(1, 9))
@few
def test_new_tokens_are_read_at_the_positions_given(
    tiny: Model, lane: Lane, seed: int, spans: dict[str, int], gap: int
):
    before = random_tokens(seed, spans)
    gapped = before + random_tokens(seed + 1, {"T2": 4}, start=len(before) + gap)
    expected = oracle(tiny, gapped, "nothing", 0)
    assert_close(logits_after(tiny, None, gapped, lane), expected)
    contiguous = before + random_tokens(seed + 1, {"T2": 4}, start=len(before))
    assert relative_difference(logits_after(tiny, None, contiguous, lane), expected) > 1e-4


@given(seed=seeds, spans=spans)
@few
def test_lanes_agree(tiny: Model, seed: int, spans: dict[str, int]):
    tokens = random_tokens(seed, spans)
    plain, plain_logits = extend(tiny.lanes, None, [tokens], "plain", len(tokens))
    hooked, hooked_logits = extend(tiny.lanes, None, [tokens], "hooked", len(tokens))
    assert_close(hooked_logits, plain_logits, 1e-4)
    assert_same_slots(hooked, plain, len(tokens))


@given(seed=seeds, spans=spans, new=lengths)
@few
def test_lanes_agree_after_a_mask_that_differs_between_layers_and_heads(
    tiny: Model, seed: int, spans: dict[str, int], new: int
):
    cache = ragged_mask(prefill(tiny.lanes, [random_tokens(seed, spans)]), seed)
    question = random_tokens(seed + 1, {"T2": new}, start=cache.slots)
    plain, plain_logits = extend(tiny.lanes, cache, [question], "plain", new)
    hooked, hooked_logits = extend(tiny.lanes, cache, [question], "hooked", new)
    assert_close(hooked_logits, plain_logits, 1e-4)
    assert_same_slots(hooked, plain, new)


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, count=st.integers(2, 24), data=st.data())
@few
def test_reading_in_two_steps_equals_reading_at_once(
    tiny: Model, lane: Lane, seed: int, count: int, data: st.DataObject
):
    cut = data.draw(st.integers(1, count - 1))
    tokens = random_tokens(seed, {"T1": count})
    whole, expected = extend(tiny.lanes, None, [tokens], lane, count)
    first, before = extend(tiny.lanes, None, [tokens[:cut]], lane, cut)
    second, after = extend(tiny.lanes, first, [tokens[cut:]], lane, count - cut)
    assert_close(torch.cat([before, after], 1), expected)
    assert_same_slots(second, whole, count)


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, counts=st.lists(st.integers(1, 14), min_size=2, max_size=4), masked=st.booleans())
@few
def test_a_row_of_a_batch_equals_the_row_alone(tiny: Model, lane: Lane, seed: int, counts: list[int], masked: bool):
    past = prefill(tiny.lanes, [random_tokens(seed, {"system": 3, "T1": 4})], lane)
    past = past.mask("T1") if masked else past
    rows = [random_tokens(seed + count, {"T2": count}, start=7) for count in counts]
    together, logits = extend(tiny.lanes, past, rows, lane)
    for row, tokens in enumerate(rows):
        alone, expected = extend(tiny.lanes, past, [tokens], lane)
        assert_close(logits[row : row + 1], expected)
        for pairs in zip(together.keys + together.values, alone.keys + alone.values, strict=True):
            assert_close(pairs[0][row, :, : alone.slots], pairs[1][0])
        assert (together.ledger.segments[row, alone.slots :] == PADDING).all()


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, counts=st.lists(st.integers(1, 14), min_size=2, max_size=3), new=lengths)
@few
def test_padding_inside_a_cache_changes_nothing_that_follows(
    tiny: Model, lane: Lane, seed: int, counts: list[int], new: int
):
    rows = [random_tokens(seed + count, {"T1": count}) for count in counts]
    questions = [random_tokens(seed, {"T2": new}, start=count) for count in counts]
    logits = logits_after(tiny, prefill(tiny.lanes, rows, lane), questions, lane)
    for row, (tokens, question) in enumerate(zip(rows, questions, strict=True)):
        expected = logits_after(tiny, prefill(tiny.lanes, [tokens], lane), question, lane)
        assert_close(logits[row : row + 1], expected)


def test_a_padded_batch_keeps_the_next_position_of_each_row(tiny: Model):
    cache = prefill(tiny.lanes, [random_tokens(row, {"T1": count}) for row, count in enumerate([5, 2, 9])])
    assert cache.ledger.following.tolist() == [5, 2, 9]


@pytest.mark.parametrize("lane", LANES)
@given(seed=seeds, spans=spans)
@few
def test_masking_every_head_in_turn_equals_masking_at_once(tiny: Model, lane: Lane, seed: int, spans: dict[str, int]):
    cache = prefill(tiny.lanes, [random_tokens(seed, spans)], lane)
    in_turn = cache
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            in_turn = in_turn.mask("T1", layers=[layer], heads=[head])
    question = random_tokens(seed + 1, {"T2": 3}, start=cache.slots)
    assert_close(logits_after(tiny, in_turn, question, lane), logits_after(tiny, cache.mask("T1"), question, lane))


@pytest.mark.parametrize("lane", LANES)
def test_masking_each_layer_or_head_has_an_effect_of_its_own(tiny: Model, lane: Lane):
    cache = prefill(tiny.lanes, [random_tokens(0, {"system": 2, "T1": 5})], lane)
    question = random_tokens(1, {"T2": 2}, start=cache.slots)
    logits = [logits_after(tiny, cache, question, lane)]
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            masked = cache.mask("T1", layers=[layer], heads=[head])
            logits.append(logits_after(tiny, masked, question, lane))
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert relative_difference(one, other) > 1e-4


def test_a_mask_in_one_layer_leaves_the_keys_of_that_layer_and_those_below(tiny: Model):
    cache = prefill(tiny.lanes, [random_tokens(0, {"system": 2, "T1": 5})])
    question = random_tokens(1, {"T2": 3}, start=cache.slots)
    before, _ = extend(tiny.lanes, cache, [question])
    after, _ = extend(tiny.lanes, cache.mask("T1", layers=[1]), [question])
    for layer in range(3):
        difference = relative_difference(after.keys[layer][:, :, -3:], before.keys[layer][:, :, -3:])
        assert difference > 1e-4 if layer == 2 else difference < 1e-5


@given(seed=seeds, far=st.integers(1, 6), new=lengths)
@few
def test_slots_out_of_every_window_matter_only_through_full_layers(tiny_gemma: Model, seed: int, far: int, new: int):
    past = random_tokens(seed, {"far": far, "near": 2 * WINDOW})
    cache = prefill(tiny_gemma.lanes, [past])
    question = random_tokens(seed + 1, {"T2": new}, start=len(past))
    whole, whole_logits = extend(tiny_gemma.lanes, cache, [question], logits=new)
    for without in (cache.mask("far"), cache.evict("far")):
        rest, rest_logits = extend(tiny_gemma.lanes, without, [question], logits=new)
        # The only full layer is the last, so nothing stored feels it and only the logits do.
        assert_same_slots(rest, whole, new)
        assert relative_difference(rest_logits, whole_logits) > 1e-4


@given(seed=seeds, far=st.integers(1, 6), new=lengths)
@few
def test_without_full_layers_slots_out_of_every_window_do_not_matter(seed: int, far: int, new: int):
    model = gemma3(layer_types=["sliding_attention"] * 3)
    past = random_tokens(seed, {"far": far, "edge": 1, "near": WINDOW - 1})
    cache = prefill(model.lanes, [past])
    question = random_tokens(seed + 1, {"T2": new}, start=len(past))
    expected = logits_after(model, cache, question)
    for gone in (["far"], ["far", "edge"]):
        assert_close(logits_after(model, cache.mask(*gone), question), expected)
        assert_close(logits_after(model, cache.evict(*gone), question), expected)
    assert relative_difference(logits_after(model, cache.evict("near"), question), expected) > 1e-4


def test_a_window_reaches_no_further_after_slots_inside_it_were_evicted(tiny_gemma: Model):
    past = random_tokens(0, {"far": 4, "near": WINDOW - 1})
    question = random_tokens(1, {"T2": 1}, start=len(past))
    cache = prefill(tiny_gemma.lanes, [past]).evict("near")
    with_far, _ = extend(tiny_gemma.lanes, cache, [question])
    nothing_near, _ = extend(tiny_gemma.lanes, cache.evict("far"), [question])
    assert_same_slots(with_far, nothing_near, 1)


@pytest.mark.parametrize("lane", LANES)
def test_extending_a_fork_leaves_the_original_bit_identical(tiny: Model, lane: Lane):
    cache = prefill(tiny.lanes, [random_tokens(0, {"T1": 6})], lane)
    before = copy_of(cache)
    fork = cache.fork(3)
    extend(tiny.lanes, fork, [random_tokens(row, {"T2": 2}, start=6) for row in range(3)], lane)
    extend(tiny.lanes, cache, [random_tokens(9, {"T2": 2}, start=6)], lane)
    assert_bit_identical(cache, before)
    assert_bit_identical(fork, before.fork(3))


def test_the_last_logits_of_unequal_rows_are_those_of_each_row(tiny: Model):
    rows = [random_tokens(row, {"T1": count}) for row, count in enumerate([4, 9, 6])]
    _, logits = extend(tiny.lanes, None, rows, logits=3)
    for row, tokens in enumerate(rows):
        assert_close(logits[row : row + 1], logits_after(tiny, None, tokens)[:, -3:])


@pytest.mark.parametrize("count", [0, 3])
def test_more_logits_than_the_shortest_row_has_tokens_are_refused(tiny_llama: Model, count: int):
    rows = [random_tokens(0, {"T1": 2}), random_tokens(1, {"T1": 5})]
    refused(
        lambda: extend(tiny_llama.lanes, None, rows, logits=count),
        f"logits is {count}; the shortest row allows a whole number from 1 to 2",
    )


@pytest.mark.parametrize("lane", LANES)
def test_gpt2_refuses_a_position_beyond_its_table(tiny_models: dict[str, Model], lane: Lane):
    lanes = tiny_models["gpt2"].lanes
    last = random_tokens(0, {"T1": 2}, start=GPT2_POSITIONS - 2)
    prefill(lanes, [last], lane)
    refused(
        lambda: prefill(lanes, [last.shifted(GPT2_POSITIONS - 1)], lane),
        f"Position {GPT2_POSITIONS} is beyond the {GPT2_POSITIONS}",
    )


@pytest.mark.parametrize("layers", [2, 4])
def test_a_cache_of_a_model_with_other_layers_is_refused(tiny_llama: Model, layers: int):
    foreign = prefill(llama(num_hidden_layers=layers).lanes, [random_tokens(0, {"T1": 3})])
    refused(
        lambda: extend(tiny_llama.lanes, foreign, [random_tokens(1, {"T2": 1}, start=3)]),
        f"{layers} layers of 2 KV heads of 8, but the model 3 of",
    )


@pytest.mark.parametrize("shape", [{"num_key_value_heads": 4}, {"head_dim": 16}], ids=str)
def test_a_cache_of_a_model_with_other_heads_is_refused(tiny_llama: Model, shape: dict[str, int]):
    foreign = prefill(llama(**shape).lanes, [random_tokens(0, {"T1": 3})])
    refused(
        lambda: extend(tiny_llama.lanes, foreign, [random_tokens(1, {"T2": 1}, start=3)]),
        "can only be read by the model that made it",
    )


@pytest.mark.parametrize("tokens", [[], [Tokens.of([])], [Tokens.of([1]), Tokens.of([])]], ids=str)
def test_reading_nothing_is_refused(tiny_llama: Model, tokens: list[Tokens]):
    refused(lambda: extend(tiny_llama.lanes, None, tokens), "nothing to read")


def test_a_cache_of_another_number_of_rows_is_refused(tiny_llama: Model):
    past = prefill(tiny_llama.lanes, [random_tokens(row, {"T1": 3}) for row in range(2)])
    refused(
        lambda: extend(tiny_llama.lanes, past, [random_tokens(row, {"T2": 1}, start=3) for row in range(3)]),
        "2 rows, but there are 3 runs",
    )


def test_the_ledger_of_new_slots_is_that_of_the_tokens():
    tokens = Tokens((5, 6, 7), (3, 9, 10), ("a", "a", "b"), (None, "code", None), (False, True, True), (False,) * 3)
    ledger = new_slots([tokens, Tokens.of([8], "b", start=4)], torch.device("cpu"))
    assert ledger.names == ("a", "b")
    assert ledger.tokens[0].tolist() == [5, 6, 7]
    assert ledger.positions[0].tolist() == [3, 9, 10]
    assert ledger.segments.tolist() == [[0, 0, 1], [1, PADDING, PADDING]]
    assert ledger.recomputed[0].tolist() == [False, True, True]
    assert ledger.live[0, :, 0].tolist() == [[True, True, True], [True, False, False]]


def test_provenance_is_kept_through_reading(tiny_llama: Model):
    kept = random_tokens(0, {"system": 3})
    again = Tokens(*(getattr(random_tokens(1, {"T2": 2}, start=7), name) for name in ("ids", "positions")),
                   ("T2", "T2"), (None, None), (True, True), (False, False))  # fmt: skip
    cache, _ = extend(tiny_llama.lanes, prefill(tiny_llama.lanes, [kept]), [again])
    assert cache.ledger.recomputed[0].tolist() == [False, False, False, True, True]
    assert cache.ledger.positions[0].tolist() == [0, 1, 2, 7, 8]


def test_tokens_after_an_eviction_of_the_newest_segment_have_the_positions_of_those_after_a_mask(tiny: Model):
    tokens = Tokens.of(list(range(10)), "old") + Tokens.of(list(range(20, 26)), "new", start=10)
    cache, _ = extend(tiny.lanes, None, [tokens])
    masked, evicted = cache.mask("new"), cache.evict("new")
    assert masked.ledger.following.tolist() == evicted.ledger.following.tolist() == [16]
    asked = [Tokens.of([7, 8, 9], "asked", 16)]
    _, one = extend(tiny.lanes, masked, asked, logits=3)
    _, other = extend(tiny.lanes, evicted, asked, logits=3)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))


def test_a_cache_of_another_dtype_is_refused(tiny: Model):
    cache, _ = extend(tiny.lanes, None, [Tokens.of([1, 2, 3])])
    half = KVCache.of(
        [keys.bfloat16() for keys in cache.keys], [values.bfloat16() for values in cache.values], cache.ledger
    )
    refused(lambda: extend(tiny.lanes, half, [Tokens.of([4], start=3)]), "dtype")


def test_texts_follow_each_row_of_a_cache_as_each_follows_its_own(tiny_llama: Model):
    chats = ("a shed and a mill", "a mill")
    texts = ["the shed", "a mill and"]
    alone = []
    for chat, text in zip(chats, texts, strict=True):
        cache = tiny_llama.prefill(chat)
        ids = tiny_llama.tokenizer(text, add_special_tokens=False)["input_ids"]
        alone.append(tiny_llama.extend(cache, [Tokens.of(ids, "text", start=cache.slots)])[1])
    together, logits = tiny_llama.extend(tiny_llama.prefill(list(chats)), texts)
    assert_close(logits, torch.cat(alone), 1e-5)
    assert together.ledger.segments.shape[0] == 2
    shared = tiny_llama.prefill(chats[0])
    assert_close(
        tiny_llama.extend(shared, texts)[1], torch.cat([tiny_llama.extend(shared, text)[1] for text in texts]), 1e-5
    )
    refused(lambda: tiny_llama.extend(together, [*texts, "a shed"]), "3 texts follow a cache of 2 rows")
