from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import PADDING
from kvprobe.inference.forward import extend, prefill
from kvprobe.inference.generate import Generation, generate, row_generators
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.random_caches import assert_bit_identical, copy_of, random_tokens, relative_difference
from tests.refusals import refused

COUNTS = [5, 2, 9]
PROMPTS = [random_tokens(count, {"prompt": count}) for count in COUNTS]
MESSAGES = [
    {"role": "system", "content": "the user asks."},
    {"role": "user", "content": "the code is 12."},
    {"role": "assistant", "content": "a summary"},
]
NAMES = ["system", "T1", "summary"]
TERSE = {"role": "system", "content": "Answer in one word."}
YES_OR_NO = "Is water wet? Answer yes or no."


def greedy_by_transformers(model: Model, prompt: Tokens, count: int) -> list[int]:
    ids = torch.tensor([prompt.ids])
    out = model.lanes.plain.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def scores_of(model: Model, prompt: Tokens, continuation: tuple[int, ...]) -> torch.Tensor:
    """Log-softmax before each token of the continuation, from one uncached pass."""
    ids = torch.tensor([prompt.ids + continuation])
    with torch.no_grad():
        logits = model.lanes.plain(input_ids=ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("lane", ["plain", "hooked"])
def test_greedy_equals_transformers_generate_row_by_row(tiny: Model, lane: str):
    generation = generate(tiny.lanes, PROMPTS, max_new_tokens=14, lane=lane)
    for row, prompt in enumerate(PROMPTS):
        assert list(generation.tokens[row]) == greedy_by_transformers(tiny, prompt, 14)
    assert generation.stopped == (False, False, False)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.8}], ids=str)
def test_a_row_of_a_batch_equals_the_row_alone(tiny: Model, settings: dict[str, float]):
    def generators() -> list[torch.Generator]:
        return row_generators(3, len(PROMPTS))

    together = generate(tiny.lanes, PROMPTS, max_new_tokens=10, generators=generators(), **settings)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny.lanes, [prompt], max_new_tokens=10, generators=generators()[row : row + 1], **settings)
        assert together.tokens[row] == alone.tokens[0]
        torch.testing.assert_close(together.logprobs[row], alone.logprobs[0], atol=1e-4, rtol=0)


def test_logprobs_are_those_of_a_fresh_uncached_pass(tiny: Model):
    for temperature in (0.0, 2.0):
        generation = generate(
            tiny.lanes, PROMPTS, max_new_tokens=6, temperature=temperature, generators=row_generators(0, 3)
        )
        for row, prompt in enumerate(PROMPTS):
            scores = scores_of(tiny, prompt, generation.tokens[row])
            expected = scores.gather(1, torch.tensor(generation.tokens[row])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(generation.logprobs[row]), expected, atol=1e-4, rtol=0)


def test_the_cache_after_generation_is_a_prefill_of_all_but_the_last_token(tiny: Model):
    generation = generate(tiny.lanes, PROMPTS, max_new_tokens=5)
    for row, prompt in enumerate(PROMPTS):
        read = prompt + Tokens.of(generation.tokens[row][:-1], "generated", len(prompt))
        expected = prefill(tiny.lanes, [read])
        held = torch.nonzero(generation.cache.ledger.segments[row] != PADDING)[:, 0]
        assert generation.cache.ledger.tokens[row, held].tolist() == list(read.ids)
        assert generation.cache.ledger.positions[row, held].tolist() == list(read.positions)
        for pairs in zip(generation.cache.keys + generation.cache.values, expected.keys + expected.values, strict=True):
            assert relative_difference(pairs[0][row][:, held], pairs[1][0]) < 1e-5
    assert generation.cache.ledger.names == ("prompt", "generated")


def test_the_same_generators_give_the_same_tokens_and_others_do_not(tiny_llama: Model):
    def sampled(seed: int) -> Generation:
        return generate(
            tiny_llama.lanes, PROMPTS, max_new_tokens=12, temperature=1.5, generators=row_generators(seed, 3)
        )

    assert sampled(1).tokens == sampled(1).tokens
    assert sampled(1).tokens != sampled(2).tokens


def test_the_generator_of_a_row_depends_on_the_seed_and_its_number_alone():
    few, many = row_generators(5, 2), row_generators(5, 6)
    assert [g.initial_seed() for g in few] == [g.initial_seed() for g in many[:2]]
    assert len({g.initial_seed() for g in many + row_generators(6, 6)}) == 12


def test_equal_prompts_with_different_generators_differ(tiny_llama: Model):
    generation = generate(
        tiny_llama.lanes, [PROMPTS[0]] * 4, max_new_tokens=12, temperature=1.5, generators=row_generators(0, 4)
    )
    assert len(set(generation.tokens)) == 4


def allowed_by_hand(scores: torch.Tensor, temperature: float, top_p: float) -> list[int]:
    """The smallest set of most probable tokens that together reach top_p."""
    weights = [float(score) for score in (scores.double() / temperature).exp()]
    total, allowed, reached = sum(weights), [], 0.0
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if reached >= top_p:
            break
        allowed.append(token)
        reached += weights[token] / total
    return allowed


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.3), (0.5, 0.5), (2.0, 0.1), (1.0, 0.01)])
def test_sampling_draws_exactly_the_allowed_tokens(tiny_llama: Model, temperature: float, top_p: float):
    rows = 300
    prompt = PROMPTS[0]
    generation = generate(
        tiny_llama.lanes,
        [prompt] * rows,
        max_new_tokens=1,
        temperature=temperature,
        top_p=top_p,
        generators=row_generators(0, rows),
    )
    drawn = [row[0] for row in generation.tokens]
    scores = scores_of(tiny_llama, prompt, (0,))[0]
    allowed = allowed_by_hand(scores, temperature, top_p)
    assert set(drawn) <= set(allowed)
    weights = (scores[allowed].double() / temperature).softmax(0)
    for token, weight in zip(allowed, weights.tolist(), strict=True):
        spread = (weight * (1 - weight) / rows) ** 0.5
        assert abs(drawn.count(token) / rows - weight) < 4.5 * spread + 1 / rows


def test_a_low_temperature_approaches_greedy(tiny_llama: Model):
    cold = generate(tiny_llama.lanes, PROMPTS, max_new_tokens=8, temperature=1e-4, generators=row_generators(0, 3))
    assert cold.tokens == generate(tiny_llama.lanes, PROMPTS, max_new_tokens=8).tokens


def stop_of_one_row(model: Model) -> tuple[int, int]:
    """A row, and a token that it generates and the others do not."""
    tokens = generate(model.lanes, PROMPTS, max_new_tokens=10).tokens
    for row, row_tokens in enumerate(tokens):
        foreign = {token for other in tokens if other is not row_tokens for token in other}
        for token in row_tokens[1:5]:
            if token not in foreign:
                return row, token
    raise AssertionError("every row generates the same tokens; choose other prompts")


def test_a_stop_token_ends_its_row_and_does_not_change_the_others(tiny: Model):
    row, stop = stop_of_one_row(tiny)
    free = generate(tiny.lanes, PROMPTS, max_new_tokens=10)
    generation = generate(tiny.lanes, PROMPTS, max_new_tokens=10, stop=[stop])
    end = free.tokens[row].index(stop) + 1
    assert generation.tokens[row] == free.tokens[row][:end]
    assert generation.logprobs[row] == pytest.approx(free.logprobs[row][:end])
    assert generation.stopped == tuple(index == row for index in range(3))
    for other in {0, 1, 2} - {row}:
        assert generation.tokens[other] == free.tokens[other]
        assert generation.logprobs[other] == pytest.approx(free.logprobs[other])


def test_an_ended_row_holds_only_padding_after_its_end(tiny: Model):
    row, stop = stop_of_one_row(tiny)
    generation = generate(tiny.lanes, PROMPTS, max_new_tokens=10, stop=[stop])
    held = generation.cache.ledger.segments[row] != PADDING
    assert generation.cache.ledger.tokens[row, held].tolist() == [*PROMPTS[row].ids, *generation.tokens[row][:-1]]
    assert not generation.cache.ledger.live[:, row, :, ~held].any()
    lengths = [len(prompt) + len(tokens) - 1 for prompt, tokens in zip(PROMPTS, generation.tokens, strict=True)]
    assert generation.cache.ledger.following.tolist() == lengths


def test_generation_ends_when_all_rows_have_ended(tiny_llama: Model):
    first = generate(tiny_llama.lanes, PROMPTS, max_new_tokens=1).tokens
    generation = generate(tiny_llama.lanes, PROMPTS, max_new_tokens=10, stop=[row[0] for row in first])
    assert generation.tokens == first
    assert all(generation.stopped)
    assert generation.cache.slots == max(COUNTS)


def test_the_models_own_end_token_stops_by_default(smol: Model):
    chat = Transcript.from_messages([TERSE, {"role": "user", "content": YES_OR_NO}])
    generation = smol.generate(chat, max_new_tokens=20)
    assert generation.stopped == (True,)
    assert smol.tokenizer.decode(generation.tokens[0][-1]) == "<|im_end|>"
    assert "<|im_end|>" not in generation.text
    endless = smol.generate(chat, max_new_tokens=len(generation.tokens[0]) + 2, stop=[])
    assert endless.tokens[0][: len(generation.tokens[0])] == generation.tokens[0]
    assert not endless.stopped[0]


@pytest.mark.parametrize("operation", ["mask", "evict"])
@pytest.mark.parametrize("step", [0, 2])
def test_editing_the_cache_at_a_step_equals_a_new_run_from_the_edited_cache(tiny: Model, operation: str, step: int):
    prompt = random_tokens(1, {"system": 3, "T1": 4, "T2": 2})

    def edit(at: int, cache: KVCache) -> KVCache | None:
        return getattr(cache, operation)("T1") if at == step else None

    generation = generate(tiny.lanes, [prompt], max_new_tokens=6, on_step=edit)
    # The token of the step itself was chosen before the edit; those after it are chosen without T1.
    read = generate(tiny.lanes, [prompt], max_new_tokens=step + 1)
    assert generation.tokens[0][: step + 1] == read.tokens[0]
    last = Tokens.of(read.tokens[0][-1:], "generated", len(prompt) + step)
    rest = generate(tiny.lanes, [last], getattr(read.cache, operation)("T1"), max_new_tokens=5 - step)
    assert generation.tokens[0][step + 1 :] == rest.tokens[0]
    assert generation.logprobs[0][step + 1 :] == pytest.approx(rest.logprobs[0], abs=1e-5)


def test_on_step_sees_every_step_and_the_slots_read_so_far(tiny_llama: Model):
    seen: list[tuple[int, int]] = []

    def watch(step: int, cache: KVCache) -> None:
        seen.append((step, cache.slots))

    watched = generate(tiny_llama.lanes, PROMPTS[:1], max_new_tokens=4, on_step=watch)
    assert seen == [(0, 5), (1, 6), (2, 7), (3, 8)]
    assert watched.tokens == generate(tiny_llama.lanes, PROMPTS[:1], max_new_tokens=4).tokens


@given(seed=st.integers(0, 2**31), gone=st.sampled_from(["system", "T1", "T2"]))
@settings(max_examples=5)
def test_generating_after_masking_equals_generating_after_eviction(tiny: Model, seed: int, gone: str):
    cache = prefill(tiny.lanes, [random_tokens(seed, {"system": 3, "T1": 6, "T2": 4})])
    question = random_tokens(seed + 1, {"T3": 2}, start=13)
    masked = generate(tiny.lanes, [question], cache.mask(gone), max_new_tokens=6)
    evicted = generate(tiny.lanes, [question], cache.evict(gone), max_new_tokens=6)
    assert masked.tokens == evicted.tokens
    assert masked.logprobs[0] == pytest.approx(evicted.logprobs[0], abs=1e-4)


def test_a_past_of_one_row_is_shared_by_all_prompts_and_unchanged(tiny: Model):
    past = prefill(tiny.lanes, [random_tokens(0, {"system": 4})])
    before = copy_of(past)
    prompts = [prompt.shifted(4) for prompt in PROMPTS]
    together = generate(tiny.lanes, prompts, past, max_new_tokens=4)
    for row, prompt in enumerate(prompts):
        assert together.tokens[row] == generate(tiny.lanes, [prompt], past, max_new_tokens=4).tokens[0]
    assert_bit_identical(past, before)


BAD_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("temperature is -0.1;", {"temperature": -0.1}),
    ("temperature is nan;", {"temperature": float("nan"), "generators": row_generators(0, 3)}),
    ("temperature is 1e-50;", {"temperature": 1e-50, "generators": row_generators(0, 3)}),
    ("top_p is 0.0;", {"top_p": 0.0}),
    ("top_p is 1.1;", {"top_p": 1.1}),
    ("top_p is nan;", {"top_p": float("nan")}),
    ("one torch.Generator per row (3)", {"temperature": 1.0}),
    ("one torch.Generator per row (3)", {"temperature": 1.0, "generators": row_generators(0, 2)}),
]


@pytest.mark.parametrize(("words", "bad"), BAD_SETTINGS, ids=[words for words, _ in BAD_SETTINGS])
def test_a_setting_out_of_range_is_refused(tiny_llama: Model, words: str, bad: dict[str, Any]):
    refused(lambda: generate(tiny_llama.lanes, PROMPTS, **{"max_new_tokens": 2} | bad), words)


@pytest.mark.parametrize("policy", [None, "SinkWindow(1, 4)"])
def test_a_step_that_returns_other_rows_is_refused(tiny_llama: Model, policy: str | None):
    refused(
        lambda: tiny_llama.generate(PROMPTS, max_new_tokens=2, policy=policy, on_step=lambda _, cache: cache.rows([0])),
        "a batch of 1",
        "3 rows are being continued",
    )


@pytest.mark.parametrize("samples", [[4], [4, 5, 6, 7]])
@pytest.mark.parametrize("policy", ["RandomEviction('50%', seed=0)", "SinkWindow(1, 4)"])
def test_a_number_of_samples_that_is_not_that_of_the_rows_is_refused(
    tiny_llama: Model, samples: list[int], policy: str
):
    assert len({len(row) for row in PROMPTS}) > 1, "so that shares are other budgets"
    for read in (tiny_llama.prefill, partial(tiny_llama.generate, max_new_tokens=2)):
        refused(lambda read=read: read(PROMPTS, policy=policy, samples=samples), "3 rows", "sample numbers")


def test_the_text_of_several_rows_is_refused(tiny_llama: Model):
    generation = generate(tiny_llama.lanes, PROMPTS, max_new_tokens=2)
    assert generation.texts[1] == tiny_llama.tokenizer.decode(generation.tokens[1], skip_special_tokens=True)
    refused(lambda: generation.text, "3 rows")


def chat(extra: list[dict[str, str]] | None = None, names: list[str] | None = None) -> Transcript:
    return Transcript.from_messages(MESSAGES + (extra or []), names=NAMES + (names or []))


QUESTION = "and then?"


def asked() -> Transcript:
    """The conversation with the question as its last message."""
    return chat([{"role": "user", "content": QUESTION}], ["T2"])


def test_asking_a_cache_equals_the_conversation_with_the_question(tiny: Model):
    expected = tiny.generate(asked(), max_new_tokens=6)
    generation = tiny.generate(tiny.prefill(chat()), ask=QUESTION, max_new_tokens=6)
    assert generation.tokens == expected.tokens
    assert generation.cache.ledger.tokens.tolist() == expected.cache.ledger.tokens.tolist()
    assert generation.cache.ledger.positions.tolist() == expected.cache.ledger.positions.tolist()


def test_asking_a_conversation_equals_the_conversation_with_the_question(tiny_llama: Model):
    expected = tiny_llama.generate(asked(), max_new_tokens=6)
    generation = tiny_llama.generate(chat(), ask=QUESTION, max_new_tokens=6)
    assert generation.cache.ledger.tokens.tolist() == expected.cache.ledger.tokens.tolist()
    assert generation.tokens == expected.tokens


def test_answering_a_batch_equals_answering_each_alone(tiny_llama: Model):
    together = tiny_llama.generate([chat(), asked()], max_new_tokens=6)
    for row, conversation in enumerate([chat(), asked()]):
        assert together.tokens[row] == tiny_llama.generate(conversation, max_new_tokens=6).tokens[0]


@pytest.mark.parametrize("gone", ["T1", "summary"])
def test_asking_after_masking_equals_asking_after_eviction(tiny: Model, gone: str):
    cache = tiny.prefill(chat())
    masked = tiny.generate(cache.mask(gone), ask=QUESTION, max_new_tokens=4)
    evicted = tiny.generate(cache.evict(gone), ask=QUESTION, max_new_tokens=4)
    assert masked.logprobs[0] == pytest.approx(evicted.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("gone", ["T1", "summary"])
def test_a_question_after_a_gapped_restart_has_the_positions_of_one_after_a_mask(tiny_llama: Model, gone: str):
    masked = tiny_llama.generate(tiny_llama.prefill(chat()).mask(gone), ask=QUESTION, max_new_tokens=1)
    fresh = tiny_llama.generate(tiny_llama.prefill(chat().without(gone)), ask=QUESTION, max_new_tokens=1)
    assert fresh.cache.ledger.positions[0, -1] == masked.cache.ledger.positions[0, -1]


def test_a_second_question_equals_the_conversation_with_both(smol: Model):
    start = smol.prefill(Transcript.from_messages([TERSE]))
    first = smol.generate(start, ask=YES_OR_NO, max_new_tokens=20)
    assert first.stopped == (True,)
    second = smol.generate(first.cache, ask="Why?", max_new_tokens=1)
    exchange = [
        TERSE,
        {"role": "user", "content": YES_OR_NO},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Why?"},
    ]
    expected = Transcript.from_messages(exchange).tokens(smol.tokenizer, generation_prompt=True)
    assert second.cache.ledger.tokens[0].tolist() == list(expected.ids)


def test_a_cache_without_a_question_is_refused(tiny_llama: Model):
    refused(lambda: tiny_llama.generate(tiny_llama.prefill(chat())), "give `ask`")


def test_a_text_is_continued_unchanged(tiny_llama: Model):
    generation = tiny_llama.generate("the user asks", max_new_tokens=4)
    ids = tiny_llama.tokenizer("the user asks")["input_ids"]
    assert generation.tokens == generate(tiny_llama.lanes, [Tokens.of(ids)], max_new_tokens=4).tokens


def test_reading_a_generated_token_gives_the_next_one(tiny: Model):
    generation = generate(tiny.lanes, PROMPTS[:1], max_new_tokens=4)
    last = Tokens.of(generation.tokens[0][-1:], "generated", int(generation.cache.ledger.following))
    _, logits = extend(tiny.lanes, generation.cache, [last])
    assert int(logits[0, -1].argmax()) == generate(tiny.lanes, PROMPTS[:1], max_new_tokens=5).tokens[0][-1]
