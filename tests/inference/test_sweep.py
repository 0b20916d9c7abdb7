"""One batch equals one row at a time: `sweep` is compared with `extend`, `generate` and a loop written here."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.faults import (
    BitFlips,
    Distractor,
    Draws,
    Fault,
    ForeignBlock,
    Fp8Scale,
    Gaussian,
    NotANumber,
    OverlappingKV,
    Permuted,
    PositionShift,
    QuantisationNoise,
    Scope,
    Splice,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.faults.context import FaultContext
from kvprobe.faults.strike import strike
from kvprobe.inference.batch import Batch
from kvprobe.inference.forward import extend
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model, load
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.struck_rows import Outcome
from kvprobe.inference.sweep import Question, Sweep, Trial, first_divergence, last_queries, prepare, sweep
from kvprobe.text.tokens import Tokens
from tests.models import WINDOW, every, llama
from tests.random_caches import assert_bit_identical, copy_of, random_tokens
from tests.refusals import refused

LENGTH, NEW = 19, 5
PROMPT = random_tokens(1, {"system": 5, "T1": 8, "T2": 6})
OTHER = random_tokens(2, {"system": 30})
SOME = Scope(rate=0.4)
FAULTS: list[Fault] = [
    Zeros(scope=SOME),
    Zeros(scope=Scope(rate=0.3, unit="head", parts="v")),
    Permuted(scope=Scope(parts="k")),
    Gaussian("raw", scope=Scope(rate=0.2, layers=[1])),
    Gaussian("layer", scope=SOME),
    Gaussian("channel", scope=SOME),
    Gaussian("effect", scope=SOME),
    Distractor(scope=SOME),
    Distractor(matched=True, scope=Scope(segments=("T1",))),
    ForeignBlock(block=4, scope=SOME),
    StaleBlock(block=4, scope=SOME),
    Splice(above=2),
    WrongPointers("repeated", block=4, scope=SOME),
    OverlappingKV(block=4, scope=SOME),
    Fp8Scale(2.0),
    QuantisationNoise(2, 4),
    BitFlips(field="mantissa", scope=Scope(rate=0.2, unit="number")),
    BitFlips(field="sign", scope=Scope(rate=0.05, unit="number")),
]


STILL = Zeros(scope=Scope(rate=0.0))
"""Nothing struck."""


@cache
def donors(model: Model) -> dict[str, KVCache]:
    """What the faults take slots from."""
    return {
        "distractor": model.prefill(random_tokens(4, {"x": 11})),
        "scaffold": model.prefill(random_tokens(5, {"x": 30})),
    }


def swept(model: Model, faults: Sequence[Fault | Trial], prompt: Tokens = PROMPT, **settings: Any) -> Sweep:
    trials = [fault if isinstance(fault, Trial) else Trial(fault) for fault in faults]
    own = {name: settings.pop(name) for name in ("past", "sample", "donors") if name in settings}
    question = Question(prompt, trials, **{"donors": donors(model), **own})
    return sweep(model.lanes, [question], **{"max_new_tokens": NEW, "stop": [], **settings})[0]


def assert_same(actual: Outcome, expected: Outcome, kl: float = 1e-5) -> None:
    assert (actual.tokens, actual.stopped, actual.struck, actual.broken) == (
        expected.tokens,
        expected.stopped,
        expected.struck,
        expected.broken,
    )
    assert actual.agreed == expected.agreed
    assert actual.kl == pytest.approx(expected.kl, abs=kl, rel=1e-3)


def by_hand(
    model: Model, fault: Fault, prompt: Tokens = PROMPT, past: KVCache | None = None, given: Sequence[int] | None = None
) -> tuple[list[int], list[Tensor]]:
    """One row without a sweep: what it says, and its logits before each token.

    Before each token a copy of the cache is struck if the fault is due. A transient fault's copy is read and dropped,
    and only the new slot is kept; a persistent fault's copy is what is read on from.
    """
    held = past if len(prompt) == 1 else extend(model.lanes, past, [prompt[:-1]])[0]
    assert held is not None
    context = prepare(model.lanes, held, [fault], donors(model))
    held, token, said, seen = context.cache, prompt[-1:], [], []
    for step in range(NEW if given is None else len(given)):
        read = held
        if fault.at == "every" or fault.at == step:
            read = copy_of(held)
            strike([fault], [Draws()], [0], read.layers, read.ledger, context, step)
        grown, logits = extend(model.lanes, read, [token])
        if fault.transient:
            pairs = zip(held.layers, grown.layers, strict=True)
            layers = ({name: torch.cat([a[name], b[name][:, :, -1:]], 2) for name in a} for a, b in pairs)
            grown = KVCache(tuple(layers), grown.ledger)
        held = grown
        seen.append(logits[0, -1])
        said.append(int(logits[0, -1].argmax()))
        following = said[-1] if given is None else given[step]
        token = Tokens.of([following], "generated", int(held.ledger.following[0]))
    return said, seen


def assert_are_by_hand(model: Model, answers: Sweep, prompt: Tokens = PROMPT, past: KVCache | None = None) -> None:
    """Each trial's own answer, and its KL along the clean answer, are those of the loop above."""
    given = answers.clean.tokens
    if len(prompt) > 1:
        past, prompt = extend(model.lanes, past, [prompt[:-1]])[0], prompt[-1:]
    still = Zeros(scope=Scope(rate=0.0, parts=answers.trials[0].fault.scope.parts))
    _, clean = by_hand(model, still, prompt, past, given)
    for trial, outcome in zip(answers.trials, answers.outcomes, strict=True):
        said, damaged = by_hand(model, trial.fault, prompt, past)
        assert list(outcome.tokens) == said, trial.fault
        if tuple(said) != given:
            _, damaged = by_hand(model, trial.fault, prompt, past, given)
        kl, agreed = divergence(torch.stack(clean), torch.stack(damaged))
        assert outcome.kl == pytest.approx(kl.tolist(), abs=2e-5, rel=2e-3), trial.fault
        assert list(outcome.agreed) == agreed.tolist(), trial.fault


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("deepseek_v3", ("latent", "rope")),
        ("glm_moe_dsa", ("index",)),
        ("qwen3_next", ("value", "decay")),
        ("falcon_h1", ("gain", "value", "k")),
    ],
)
def test_parts_of_other_memories_are_struck_as_by_hand(kind: str, parts: tuple[Any, ...]):
    """In a batch whose other prompt is longer, so that this one begins after padding; or alone, so that a state is read
    on from until a fault is written or undone."""
    model = load(every.tiny(kind))
    faults: list[Fault] = [
        Gaussian(at="every", scope=Scope(rate=0.2, unit="head", parts=parts[0])),
        BitFlips(field="sign", at=1, transient=True, scope=Scope(rate=0.5, parts=parts[0], unit="number")),
        *(Zeros(at=2, scope=Scope(rate=0.5, layers=[0, 2, 3], parts=part)) for part in parts[1:]),
    ]
    prompt, longer = random_tokens(1, {"T1": 9}), random_tokens(3, {"T1": 12})
    questions = [Question(prompt, [*map(Trial, faults)]), Question(longer, [])][: 1 + (kind != "qwen3_next")]
    answers = sweep(model.lanes, questions, max_new_tokens=NEW, stop=[])[0]
    assert_are_by_hand(model, answers, prompt)
    assert max(max(outcome.kl) for outcome in answers.outcomes) > 1e-4


@pytest.mark.parametrize("where", [{"layers": [1]}, {"layers": [0, 1]}, {"layers": [0], "heads": [1]}], ids=str)
def test_slots_hidden_from_a_row_are_those_of_a_masked_cache(tiny_llama: Model, where: dict[str, list[int]]):
    """In a batch whose other prompt is longer, so that this one begins after padding."""
    slots, past = [1, 2, 5], tiny_llama.prefill(PROMPT[:-1])
    hidden = Trial(Zeros(scope=Scope(rate=0.2)), hidden=Scope(slots=slots, **where))
    questions = [Question(PROMPT, [hidden], donors=donors(tiny_llama)), Question(random_tokens(7, {"T1": 40}), [])]
    answers, _ = sweep(tiny_llama.lanes, questions, max_new_tokens=NEW, stop=[])
    (outcome,) = answers.outcomes
    masked = past.mask(slots=slots, **where)
    assert list(outcome.tokens) == by_hand(tiny_llama, hidden.fault, PROMPT[-1:], masked)[0]
    clean, damaged = (
        torch.stack(by_hand(tiny_llama, fault, PROMPT[-1:], cache, answers.clean.tokens)[1])
        for fault, cache in ((STILL, past), (hidden.fault, masked))
    )
    assert outcome.kl == pytest.approx(divergence(clean, damaged)[0].tolist(), abs=2e-5, rel=2e-3)
    struck, heads = swept(tiny_llama, [hidden.fault]).outcomes[0].struck, tiny_llama.geometry.n_kv_heads
    assert outcome.struck - struck == 2 * len(slots) * len(where["layers"]) * len(where.get("heads", range(heads)))
    assert min(outcome.kl) > 1e-4


def test_the_clean_row_equals_generate(tiny: Model):
    expected = generate(tiny.lanes, [PROMPT], max_new_tokens=NEW, stop=[])
    answers = swept(tiny, [])
    assert answers.clean.tokens == expected.tokens[0]
    assert answers.clean.text == expected.texts[0]
    assert answers.clean.agreed == (True,) * NEW
    assert max(answers.clean.kl) < 1e-9
    assert answers.outcomes == ()
    assert answers.clean.struck == 0


def test_a_fault_of_rate_0_equals_the_clean_row(tiny: Model):
    still = [
        replace(fault, scope=replace(fault.scope, rate=0.0), at=at) for fault in FAULTS[:12] for at in (0, "every")
    ]
    answers = swept(tiny, still)
    for outcome in answers.outcomes:
        assert outcome.tokens == answers.clean.tokens
        assert outcome.struck == 0
        assert max(outcome.kl) < 1e-6
        assert all(outcome.agreed)


def test_a_faults_outcome_does_not_depend_on_the_other_rows(tiny_llama: Model):
    timed = [
        replace(fault, at=at, transient=transient)
        for number, fault in enumerate(FAULTS)
        for at, transient in (((0, False), ("every", True))[number % 2],)
    ]
    trials = [Trial(fault, repeat=number % 3) for number, fault in enumerate(timed)]
    alone = [swept(tiny_llama, [trial], seed=3, sample=2) for trial in trials]
    order = torch.randperm(len(trials), generator=torch.Generator().manual_seed(0)).tolist()
    for rows, chosen in ((64, range(len(trials))), (7, order), (2, order[:6])):
        counted: list[int] = []
        answers = swept(tiny_llama, [trials[i] for i in chosen], seed=3, sample=2, rows=rows, done=counted.append)
        assert sum(counted) == len(answers.outcomes) == len(chosen)
        assert max(counted) <= rows - 1
        for outcome, number in zip(answers.outcomes, chosen, strict=True):
            assert_same(outcome, alone[number].outcomes[0])
            assert answers.clean.tokens == alone[number].clean.tokens


def test_padding_of_a_batch_holds_nothing_that_could_reach_a_row(tiny_llama: Model):
    """Of an empty tensor torch then fills every number with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        batch = Batch(tiny_llama.lanes, [tiny_llama.prefill(PROMPT), tiny_llama.prefill(PROMPT[:4])], [1, 2], 3)
    finally:
        torch.use_deterministic_algorithms(False)
    for layer in batch.layers:
        for wide in layer.wide.values():
            assert not wide[1:, :, : LENGTH - 4].any()


def test_questions_in_one_batch_are_answered_as_alone(tiny: Model):
    """Prompts of unequal length and faults of every kind, then in pieces; rows leave at different steps."""
    timed = [
        replace(fault, at=at, transient=at == "every") for fault in FAULTS[::4] + FAULTS[-1:] for at in (0, "every", 2)
    ]
    questions = [
        Question(PROMPT[-1:], [Trial(Zeros(scope=SOME))], tiny.prefill(PROMPT[:-1]).mask("T1"), sample=3),
        Question(random_tokens(7, {"T1": 11}), [Trial(fault, repeat=1) for fault in timed], None, donors(tiny), 8),
        Question(random_tokens(7, {"T1": 6}), [Trial(STILL, hidden=Scope(rate=rate)) for rate in (0.3, 0.6)]),
        Question(random_tokens(8, {"T1": 3, "T2": 4}), [], sample=1),
        Question(PROMPT, [Trial(fault) for fault in timed[:12]], None, donors(tiny)),
    ]
    ends = sweep(tiny.lanes, questions[4:], max_new_tokens=NEW, stop=[])[0].clean.tokens[3:4]
    settings: Any = {"max_new_tokens": NEW, "stop": ends, "seed": 5}
    apart = [sweep(tiny.lanes, [question], **settings)[0] for question in questions]
    assert len({len(alone.clean.tokens) for alone in apart}) > 1, "clean rows end at different steps"
    for rows in (64, 9):
        counted: list[int] = []
        together = sweep(tiny.lanes, questions, rows=rows, done=counted.append, **settings)
        assert sum(counted) == sum(len(question.trials) for question in questions)
        assert max(counted) < rows
        for answers, alone in zip(together, apart, strict=True):
            assert answers.trials == alone.trials
            for one, other in zip([answers.clean, *answers.outcomes], [alone.clean, *alone.outcomes], strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("at", [0, "every", 3])
@pytest.mark.parametrize("transient", [False, True])
def test_every_fault_equals_a_plain_loop(tiny_llama: Model, at: Any, transient: bool):
    faults = [replace(fault, at=at, transient=transient) for fault in [*FAULTS, PositionShift(by=2, scope=SOME)]]
    answers = swept(tiny_llama, faults)
    assert any(outcome.tokens != answers.clean.tokens for outcome in answers.outcomes)
    assert_are_by_hand(tiny_llama, answers)


@pytest.mark.parametrize(("at", "transient"), [(0, False), ("every", True), ("every", False)])
def test_every_architecture_equals_a_plain_loop(tiny: Model, at: Any, transient: bool):
    faults = [
        Zeros(scope=Scope(rate=0.5, unit="layer"), at=at, transient=transient),
        Gaussian("effect", scope=SOME, at=at, transient=transient),
        Distractor(scope=SOME, at=at, transient=transient),
    ]
    answers = swept(tiny, faults)
    assert_are_by_hand(tiny, answers)


def test_a_persistent_fault_at_step_0_equals_corrupt_and_generate(tiny_llama: Model):
    start = tiny_llama.prefill(PROMPT[:-1])
    answers = swept(tiny_llama, FAULTS)
    for fault, outcome in zip(FAULTS, answers.outcomes, strict=True):
        damaged = start.corrupt(fault, contexts=[prepare(tiny_llama.lanes, start, [fault], donors(tiny_llama))])
        said = generate(tiny_llama.lanes, [PROMPT[-1:]], damaged, max_new_tokens=NEW, stop=[])
        assert outcome.tokens == said.tokens[0], fault


def test_a_fault_at_a_step_does_not_change_earlier_tokens(tiny_llama: Model):
    faults = [Gaussian("raw", scale=5.0, at=at, transient=transient) for at in (1, 4) for transient in (False, True)]
    answers = swept(tiny_llama, faults)
    for fault, outcome in zip(faults, answers.outcomes, strict=True):
        assert max(outcome.kl[: fault.at]) < 1e-6 < outcome.kl[fault.at]
        assert outcome.tokens[: fault.at] == answers.clean.tokens[: fault.at]
        assert outcome.struck == 2 * 3 * 2 * (LENGTH - 1 + fault.at)


def test_only_generated_tokens_are_in_the_generated_segment(tiny_llama: Model):
    """At step 1 the cache holds the prompt, whose last token was read at step 0, but no generated token."""
    vectors = 2 * 3 * 2
    for at, written in ((0, 0), (1, 0), (2, 1), (4, 3)):
        generated, prompt = (Zeros(scope=Scope(among=among), at=at) for among in ("generated", "prompt"))
        answers = swept(tiny_llama, [generated, prompt], follow=False)
        assert [outcome.struck for outcome in answers.outcomes] == [
            vectors * written,
            vectors * (LENGTH - 1 + (at > 0)),
        ], f"at={at}"


def test_the_prompts_last_token_stays_in_its_segment(tiny_llama: Model):
    answers = swept(tiny_llama, [Zeros(scope=Scope(segments=("T2",)), at=at) for at in (0, 1)], follow=False)
    assert [outcome.struck for outcome in answers.outcomes] == [2 * 3 * 2 * 5, 2 * 3 * 2 * 6]


def test_persistent_damage_at_every_step_accumulates(tiny_llama: Model):
    scope = Scope(rate=0.1)
    once, piling, passing = swept(
        tiny_llama,
        [Zeros(scope=scope), Zeros(scope=scope, at="every"), Zeros(scope=scope, at="every", transient=True)],
        max_new_tokens=30,
    ).outcomes
    assert piling.struck == passing.struck > 10 * once.struck
    assert piling.kl[0] == pytest.approx(once.kl[0], abs=1e-6) == pytest.approx(passing.kl[0], abs=1e-6)
    assert sum(piling.kl[15:]) > 3 * sum(passing.kl[15:])


def test_a_row_that_stops_leaves_without_changing_the_others(tiny: Model):
    faults = [replace(fault, at="every", transient=True) for fault in FAULTS[::2]] + FAULTS[1::2]
    long = swept(tiny, faults, max_new_tokens=9)
    rows = [long.clean, *long.outcomes]
    said = {token for row in rows for token in row.tokens[1:6]}
    ends = sorted(said)[: max(1, len(said) // 3)]
    answers = swept(tiny, faults, max_new_tokens=9, stop=ends, follow=False)
    lengths = set()
    for short, whole in zip([answers.clean, *answers.outcomes], rows, strict=True):
        first = next((place for place, token in enumerate(whole.tokens) if token in ends), None)
        expected = whole.tokens if first is None else whole.tokens[: first + 1]
        assert short.tokens == expected
        assert short.stopped == (first is not None)
        lengths.add(len(expected))
    assert len(lengths) > 1, "rows end at different steps"


def test_without_following_there_is_no_kl(tiny_llama: Model):
    answers = swept(tiny_llama, FAULTS[:2], follow=False)
    assert [outcome.kl for outcome in (answers.clean, *answers.outcomes)] == [()] * 3
    assert answers.outcomes[0].tokens == swept(tiny_llama, FAULTS[:2]).outcomes[0].tokens


# Faults that change nothing.


def test_a_fault_on_masked_slots_changes_nothing(tiny: Model):
    past = tiny.prefill(PROMPT[:-1]).mask("T1")
    scope = Scope(segments=("T1",))
    faults = [Gaussian("raw", scale=9.0, scope=scope, at=at) for at in (0, "every")] + [Zeros(scope=scope)]
    answers = swept(tiny, faults, PROMPT[-1:], past=past)
    for outcome in answers.outcomes:
        assert outcome.struck
        assert outcome.tokens == answers.clean.tokens
        assert max(outcome.kl) < 1e-6
    unmasked = swept(tiny, faults, PROMPT[-1:], past=tiny.prefill(PROMPT[:-1]))
    assert max(max(outcome.kl) for outcome in unmasked.outcomes) > 1e-3


@pytest.mark.parametrize("fault", [Permuted(), Permuted(scope=SOME, at="every"), WrongPointers(block=4)], ids=str)
def test_swapping_whole_slots_changes_nothing_in_full_attention(tiny: Model, fault: Fault):
    answers = swept(tiny, [fault, replace(fault, scope=replace(fault.scope, parts="k"))])
    windowed = any(tiny.geometry.windows)
    assert (max(answers.outcomes[0].kl) < 1e-5) != windowed
    assert max(answers.outcomes[1].kl) > 1e-4


def test_a_prompt_longer_than_the_window_is_swept_exactly(tiny_gemma: Model):
    assert LENGTH > 2 * WINDOW
    far = Scope(slots=range(5), layers=[0, 1])
    faults = [
        Gaussian("raw", scope=far, at="every"),
        Zeros(scope=SOME),
        Gaussian("head", scope=SOME, at="every", transient=True),
    ]
    answers = swept(tiny_gemma, faults)
    assert max(answers.outcomes[0].kl) < 1e-6, "these slots have left the window"
    assert max(answers.outcomes[1].kl) > 1e-3
    assert_are_by_hand(tiny_gemma, answers)


# Rows that break.


def test_a_broken_row_is_named_and_the_others_are_bit_identical(tiny: Model):
    bad = NotANumber(scope=Scope(layers=[1], heads=[1], slots=[6], parts="k"))
    later = [replace(bad, at=at, transient=transient) for at in (0, 2, "every") for transient in (False, True)]
    good = [
        Zeros(scope=SOME),
        Gaussian("layer", scope=SOME, at="every", transient=True),
        Permuted(scope=Scope(parts="k")),
    ]
    # As many rows either way: kernels may round differently for batches of different size.
    with_it = swept(tiny, [good[0], *later, *good[1:]])
    without = swept(tiny, [good[0], *[Zeros(scope=Scope(rate=0.0))] * len(later), *good[1:]])
    assert [with_it.outcomes[place].tokens for place in (0, -2, -1)] == [
        without.outcomes[place].tokens for place in (0, -2, -1)
    ]
    for place in (0, -2, -1):
        assert_same(with_it.outcomes[place], without.outcomes[place])
    assert_same(with_it.clean, without.clean)
    for fault, outcome in zip(later, with_it.outcomes[1:-2], strict=True):
        step = 0 if fault.at == "every" else fault.at
        assert outcome.broken == "K of layer 1, KV head 1, slot 6"
        assert outcome.tokens == with_it.clean.tokens[:step]
        assert len(outcome.kl) == step
        assert not outcome.stopped


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox"])
def test_rows_beside_one_that_is_nan_are_bit_identical_in_the_first_pass(tiny_models: dict[str, Model], name: str):
    """Not with experts: they gather the tokens that chose them, so rounding there depends on the rows beside one."""
    good = [Zeros(scope=SOME), Gaussian("layer", scope=SOME)]
    beside = [
        swept(tiny_models[name], [*good, third], max_new_tokens=1).outcomes[:2]
        for third in (NotANumber(scope=Scope(parts="v")), Zeros(scope=Scope(rate=0.0)))
    ]
    assert beside[0] == beside[1]


def test_logits_that_overflow_are_named(tiny_llama: Model):
    answers = swept(tiny_llama, [Zeros(scope=SOME), NotANumber(3e38, scope=Scope(parts="v"))])
    assert answers.outcomes[0].broken is None
    broken = answers.outcomes[1].broken
    assert broken is not None
    assert "logits after 0 tokens" in broken
    assert answers.outcomes[1].tokens == () == answers.outcomes[1].kl


def test_a_row_that_breaks_only_on_the_clean_answer_is_marked_broken(tiny_llama: Model):
    """A flip's effect depends on the number, so the row's own answer may stay finite where the clean one does not."""
    fault = BitFlips(bit=30, at="every", scope=Scope(count=1, unit="number", among="generated", parts="v"))
    flips = [Trial(fault, repeat=repeat) for repeat in range(60)]
    answers = swept(tiny_llama, [Gaussian("raw", scale=5.0), *flips], max_new_tokens=8)
    rows = [row for row in answers.outcomes if len(row.kl) < len(answers.clean.tokens) == len(row.tokens)]
    assert rows
    assert all(row.broken is not None for row in rows)


# Caches with a history.


@pytest.mark.parametrize("mode", ["gapped", "contiguous", "naive"])
def test_a_sweep_after_an_edited_cache_equals_reading_after_it(tiny_llama: Model, mode: Any):
    past = tiny_llama.prefill(PROMPT).evict("T1").reindex(mode)
    before = copy_of(past)
    question = random_tokens(6, {"question": 4}, start=int(past.ledger.following[0]))
    faults = [*FAULTS[:1], *FAULTS[3:8], Permuted(), PositionShift(by=2), Zeros(scope=SOME, at="every", transient=True)]
    scoped = [replace(fault, scope=replace(fault.scope, segments=None)) for fault in faults]
    answers = swept(tiny_llama, scoped, question, past=past)
    assert max(answers.outcomes[6].kl) < 1e-5
    expected = generate(tiny_llama.lanes, [question], past, max_new_tokens=NEW, stop=[])
    assert answers.clean.tokens == expected.tokens[0]
    assert_are_by_hand(tiny_llama, answers, prompt=question, past=past)
    assert_bit_identical(past, before)


def test_a_prompt_with_a_later_end_continues_at_the_positions_of_generate(tiny_llama: Model):
    """Hidden text at the end keeps its place: what comes next stands behind it (`Tokens.end`)."""
    prompt = replace(PROMPT, end=40)
    expected = generate(tiny_llama.lanes, [prompt], max_new_tokens=12, stop=[])
    assert expected.tokens != generate(tiny_llama.lanes, [PROMPT], max_new_tokens=12, stop=[]).tokens
    assert swept(tiny_llama, [], prompt, max_new_tokens=12).clean.tokens == expected.tokens[0]


def test_a_sweep_of_a_row_of_a_padded_batch_equals_the_row_alone(tiny_llama: Model):
    short, long = PROMPT[:12], random_tokens(9, {"T1": 17})
    row = tiny_llama.prefill([short, long]).rows([0])
    question = random_tokens(6, {"question": 3}, start=12)
    alone, padded = (
        swept(tiny_llama, [Zeros(), Zeros(scope=Scope(rate=0.0)), Gaussian("head", scale=0.0)], question, past=past)
        for past in (tiny_llama.prefill(short), row)
    )
    for one, other in zip([alone.clean, *alone.outcomes], [padded.clean, *padded.outcomes], strict=True):
        assert_same(one, other)


def test_a_sweep_does_not_change_the_past_or_the_donors(tiny_llama: Model):
    past, given = tiny_llama.prefill(PROMPT), donors(tiny_llama)
    kept, lent = copy_of(past), {name: copy_of(donor) for name, donor in given.items()}
    question = random_tokens(6, {"question": 1}, start=LENGTH)
    swept(tiny_llama, [replace(fault, at="every") for fault in FAULTS], question, past=past, donors=given)
    assert_bit_identical(past, kept)
    for name, before in lent.items():
        assert_bit_identical(given[name], before)


def test_a_sweep_runs_in_bfloat16(tiny_llama: Model):
    model = load(llama().lanes.plain.to(torch.bfloat16))
    faults = [replace(fault, at=at, transient=at == "every") for fault in FAULTS for at in (0, "every")]
    answers = swept(model, [*faults, Zeros(scope=Scope(rate=0.0)), PositionShift(by=2)])
    assert all(len(outcome.tokens) == NEW for outcome in answers.outcomes if outcome.broken is None)
    # Nothing is written; what is left is rounding between the rows of a batch, coarse in this dtype.
    assert answers.outcomes[-2].struck == 0
    assert max(answers.outcomes[-2].kl) < 0.02
    start = model.prefill(PROMPT[:-1])
    for trial, fault in enumerate(FAULTS):
        damaged = start.corrupt(fault, contexts=[prepare(model.lanes, start, [fault], donors(model))])
        logits = extend(model.lanes, damaged, [PROMPT[-1:]])[1][0, -1]
        clean = extend(model.lanes, start, [PROMPT[-1:]])[1][0, -1]
        assert answers.outcomes[2 * trial].kl[0] == pytest.approx(
            float(divergence(clean, logits)[0]), abs=5e-3, rel=0.1
        )


def test_both_lanes_give_the_same_sweep(tiny: Model):
    faults = [
        Zeros(scope=SOME),
        Gaussian("layer", scope=SOME, at="every", transient=True),
        Distractor(scope=SOME, at=2),
    ]
    plain, hooked = (swept(tiny, faults, lane=lane) for lane in ("plain", "hooked"))
    for one, other in zip([plain.clean, *plain.outcomes], [hooked.clean, *hooked.outcomes], strict=True):
        assert_same(one, other, kl=1e-4)


def test_the_last_queries_are_those_of_the_model(tiny: Model):
    """Their softmax over the keys is the attention that transformers reports."""
    cache = tiny.prefill(PROMPT)
    queries = last_queries(tiny.lanes, cache, 4)
    plain = tiny.lanes.plain
    before = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            seen = plain(input_ids=torch.tensor([PROMPT.ids]), output_attentions=True).attentions
    finally:
        plain.set_attn_implementation(before)
    kv_heads = tiny.geometry.n_kv_heads
    for layer, (asked, scale) in enumerate(zip(queries.rows, queries.scale, strict=True)):
        scores = (asked @ cache.keys[layer][0].transpose(1, 2) * scale).unflatten(1, (4, queries.group))
        expected = seen[layer][0, :, -4:].unflatten(0, (kv_heads, queries.group)).transpose(1, 2)
        attention = scores.masked_fill(expected == 0, float("-inf")).softmax(-1)
        assert torch.allclose(attention, expected, atol=1e-4), f"layer {layer}"


@pytest.mark.parametrize("length", [2, 3])
def test_noise_matched_by_effect_on_the_shortest_prompts(tiny_llama: Model, length: int):
    """One slot has no effect to match: that is refused in a sentence, or the noise is as loud as elsewhere."""
    prompt = random_tokens(1, {"T1": length})
    try:
        outcome = swept(tiny_llama, [Gaussian("effect")], prompt).outcomes[0]
    except ValueError:
        sweep_refused("effect", tiny_llama, [Gaussian("effect")], prompt)
        return
    assert outcome.broken is None
    assert max(outcome.kl) > 1e-4, "noise in every slot was no noise"


# What is refused.


def sweep_refused(words: str, model: Model, faults: Sequence[Fault], prompt: Tokens = PROMPT, **settings: Any) -> None:
    refused(lambda: swept(model, faults, prompt, **settings), words)


def test_settings_out_of_range_are_refused(tiny_llama: Model):
    refused(lambda: tiny_llama.sweep(PROMPT, [], max_new_tokens=0), "max_new_tokens=0, an int; give", "at least 1")
    refused(lambda: tiny_llama.sweep(PROMPT, [], rows=1), "rows=1, an int; give", "at least 2")
    sweep_refused("the prompt has no token", tiny_llama, [], Tokens.of([]))
    sweep_refused("A prompt of one token leaves no cache to damage", tiny_llama, [], PROMPT[:1])
    sweep_refused("no donor called 'distractor'; there are none here", tiny_llama, [Distractor()], donors={})
    sweep_refused("There is no layer 99", tiny_llama, [Zeros(scope=Scope(layers=[99]))])
    sweep_refused("There is no segment called 'T3'", tiny_llama, [Zeros(scope=Scope(segments=("T3",)))])
    refused(lambda: Trial(Zeros(), hidden=Scope(unit="number")), "whole slots are hidden")
    refused(lambda: swept(tiny_llama, [Trial(Zeros(), -1)]), "repeat=-1, an int; give a whole number of at least 0")


def test_a_segment_of_another_prompt_of_the_batch_is_refused_too(tiny_llama: Model):
    struck = Question(random_tokens(7, {"T1": 9}), [Trial(Zeros(scope=Scope(segments=("T2",))))])
    refused(lambda: sweep(tiny_llama.lanes, [Question(PROMPT, []), struck]), "no segment called 'T2'")
    assert sweep(tiny_llama.lanes, []) == []


def test_a_donor_of_another_model_is_refused(tiny_llama: Model, tiny_models: dict[str, Model]):
    foreign = tiny_models["gpt2"].prefill(OTHER)
    sweep_refused("a cache can only be read by the model", tiny_llama, [Distractor()], donors={"distractor": foreign})
    other = llama(seed=8)
    like = other.prefill(OTHER)
    sweep_refused("it differs in weights", tiny_llama, [Distractor()], donors={"distractor": like})
    swept(tiny_llama, [Distractor()], donors={"distractor": replace(like, made_by=None)})


def test_learned_positions_cannot_be_shifted(tiny_models: dict[str, Model]):
    sweep_refused("learned positions", tiny_models["gpt2"], [PositionShift(by=1)])


@pytest.mark.parametrize("prompt", [PROMPT[-1:], PROMPT[-3:]], ids=["one token", "three"])
def test_a_past_of_several_rows_or_another_model_is_refused(
    tiny_llama: Model, tiny_models: dict[str, Model], prompt: Tokens
):
    foreign = tiny_models["gpt2"].prefill(PROMPT[:-3])
    words = "a cache can only be read by the model that made it"
    sweep_refused(words, tiny_llama, [Zeros()], prompt, past=foreign, donors={})
    past = tiny_llama.prefill(PROMPT[:-3])
    narrow = KVCache.of(tuple(k.half() for k in past.keys), tuple(v.half() for v in past.values), past.ledger)
    sweep_refused(
        "load the model in the dtype that made the cache", tiny_llama, [Zeros()], prompt, past=narrow, donors={}
    )
    sweep_refused("2 rows", tiny_llama, [Zeros()], prompt, past=past.fork(2), donors={})


def test_several_prompts_are_refused(tiny_llama: Model):
    refused(lambda: tiny_llama.sweep([PROMPT, OTHER], [Zeros()]), "A sweep answers one prompt, but there are 2")


def test_model_sweep_reads_donors_and_wraps_faults(tiny_llama: Model):
    direct = swept(tiny_llama, [Distractor(scope=SOME)], donors={"distractor": tiny_llama.prefill(OTHER)})
    answers = tiny_llama.sweep(
        PROMPT, [Distractor(scope=SOME)], donors={"distractor": OTHER}, max_new_tokens=NEW, stop=[]
    )
    assert answers == direct


@pytest.mark.parametrize(
    ("clean", "other", "expected"),
    [
        ((), (), None),
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (9, 2, 3), 0),
        ((1, 2, 3), (1, 2, 4), 2),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2), (), 0),
        ((), (5,), 0),
        ((1, 2, 3), (1, 9), 1),
    ],
)
def test_first_divergence(clean: tuple[int, ...], other: tuple[int, ...], expected: int | None):
    assert first_divergence(clean, other) == expected
    table = Sweep(Outcome(clean, "", False), (Trial(Zeros()),), (Outcome(other, "", False),))
    assert table.first_divergence(0) == expected


def test_the_fault_context_holds_rotated_keys(tiny_llama: Model):
    past = tiny_llama.prefill(PROMPT).evict("T1").reindex("contiguous")
    context = prepare(tiny_llama.lanes, past, [Gaussian("effect"), PositionShift(by=1)])
    assert isinstance(context, FaultContext)
    assert not context.cache.ledger.rotated
    assert context.rotaries is not None
    assert context.queries is not None
    assert len(context.queries.rows) == 3


def test_a_fault_after_the_last_token_is_refused(tiny_llama: Model):
    sweep_refused("raise max_new_tokens", tiny_llama, [Zeros(at=6)], PROMPT, max_new_tokens=6)
