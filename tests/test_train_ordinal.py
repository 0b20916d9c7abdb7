"""The model `ordinal`: its training pass against caches, its training in small, and what the shipped weights do."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model, load
from kvprobe.shipped import shipped
from kvprobe.tasks.ordinal import PLACES, SEGMENTS, VERBS, Memo, Reference, draw
from kvprobe.training.loop import train
from kvprobe.training.schedule import Schedule
from models.train_ordinal import Example, Ordinal, accuracy, batch_of, config_of, draw_examples

# What a list saw reaches the question over a summary only in the third layer.
SMALL = Ordinal(width=16, heads=2, tested=4, schedule=Schedule(steps=30, batch=16, checkpoint=30))
COUNT = 200


@pytest.fixture(scope="module")
def untrained() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return load(SMALL.model(), tokenizer=SMALL.tokenizer())


@pytest.fixture(scope="module")
def ordinal() -> Model:
    return load("ordinal")


def draw_memos(count: int, *references: Reference) -> list[Memo]:
    rng = np.random.default_rng(11)
    return [draw("held_out", rng, references or tuple(VERBS)) for _ in range(count)]


def other_place(memo: Memo) -> Memo:
    return memo.swapped((memo.place + 2) % len(PLACES))


def cache_before(model: Model, memos: list[Memo], upto: str) -> KVCache:
    """The cache of these memos before the segment `upto`."""
    return model.prefill([tokens[: tokens.span(upto).start] for tokens in rows(model, memos)])


def rows(model: Model, memos: list[Memo]) -> list:
    return model.tokens([memo.conversation() for memo in memos])


def extended_by(model: Model, cache: KVCache, memos: list[Memo], segment: str) -> tuple[KVCache, torch.Tensor]:
    """The longer cache and the logits after `segment` was read."""
    longer, logits = model.extend(cache, [tokens[tokens.span(segment)] for tokens in rows(model, memos)])
    return longer, logits[:, -1]


def said(model: Model, cache: KVCache, memos: list[Memo]) -> list[str]:
    """The likeliest word after the question."""
    _, logits = extended_by(model, cache, memos, "question")
    return [model.tokenizer.decode([token]) for token in logits.argmax(-1).tolist()]


def share(actual: list[str], expected: list[str]) -> float:
    return float(np.mean([a == b for a, b in zip(actual, expected, strict=True)]))


# The pass with two lists, held to caches


def logits_of(model: Model, examples: list[Example]) -> torch.Tensor:
    with torch.no_grad():
        output = model.lanes.plain(**batch_of(examples).inputs, use_cache=False)
    return output.logits[:, -2]


def test_two_equal_lists_equal_an_ordinary_run(untrained: Model):
    memos = draw_memos(4)
    _, expected = extended_by(untrained, cache_before(untrained, memos, "question"), memos, "question")
    torch.testing.assert_close(logits_of(untrained, [Example(memo, memo) for memo in memos]), expected)


def test_two_lists_equal_a_summary_patched_from_the_swapped_run(untrained: Model):
    memos = draw_memos(4)
    swapped = [other_place(memo) for memo in memos]
    patched = cache_before(untrained, memos, "question").patch(cache_before(untrained, swapped, "question"), "summary")
    _, expected = extended_by(untrained, patched, memos, "question")
    logits = logits_of(untrained, [Example(memo, other) for memo, other in zip(memos, swapped, strict=True)])
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(logits, logits_of(untrained, [Example(memo, memo) for memo in memos]))


def test_a_question_without_its_list_equals_a_masked_block(untrained: Model):
    memos = draw_memos(4)
    _, expected = extended_by(untrained, cache_before(untrained, memos, "question").mask("block"), memos, "question")
    logits = logits_of(untrained, [Example(memo, memo, question_sees=False) for memo in memos])
    torch.testing.assert_close(logits, expected)


def test_a_summary_without_its_list_equals_one_read_after_a_masked_block(untrained: Model):
    memos = draw_memos(4)
    masked, _ = extended_by(untrained, cache_before(untrained, memos, "summary").mask("block"), memos, "summary")
    whole = cache_before(untrained, memos, "question")
    _, expected = extended_by(untrained, whole.patch(masked, "summary"), memos, "question")
    logits = logits_of(untrained, [Example(memo, memo, summary_sees=False) for memo in memos])
    torch.testing.assert_close(logits, expected)


# Examples


def test_the_forced_answer_follows_the_summary_for_a_payload_and_the_question_for_a_pointer():
    (memo,) = draw_memos(1)
    for reference, follows in (("payload", "summary"), ("pointer", "question")):
        forced = replace(memo, reference=reference)
        example = Example(forced, other_place(forced))
        assert example.answer == (example.summarised if follows == "summary" else example.seen).answer
        assert example.seen.answer != example.summarised.answer


def test_the_list_with_the_right_answer_is_always_visible():
    rng = np.random.default_rng(0)
    examples = draw_examples("train", 600, rng)
    for example in examples:
        payload, pointer = example.seen.reference == "payload", example.seen.reference == "pointer"
        assert example.summary_sees or pointer
        assert example.question_sees or payload
        assert example.seen == example.summarised or payload or pointer
    assert any(not example.summary_sees for example in examples)
    assert any(not example.question_sees for example in examples)
    assert any(example.seen != example.summarised for example in examples)


# Training


def test_the_recipe_trains_and_its_folder_loads(tmp_path: Path):
    losses = train(SMALL, tmp_path)["losses"]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    (memo,) = draw_memos(1)
    assert len(load(tmp_path).generate(memo.conversation(), max_new_tokens=2).tokens[0]) > 0


# The weights that ship


def test_the_shipped_files_are_those_of_this_training(ordinal: Model):
    assert ordinal.tokenizer.get_vocab() == Ordinal().tokenizer().get_vocab()
    expected = config_of(Ordinal()).to_dict()
    config = ordinal.lanes.plain.config.to_dict()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_parameters"):
        assert config[name] == expected[name]
    assert (shipped("models") / "ordinal" / "model.safetensors").stat().st_size < 2e6
    assert (shipped("models") / "ordinal" / "README.md").is_file()


def test_it_loads_by_name_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    assert load("ordinal").name == "ordinal"
    assert not (tmp_path / "cache").exists()


def test_each_word_is_a_token_of_its_segment(ordinal: Model):
    (memo,) = draw_memos(1)
    (tokens,) = ordinal.tokens(memo.conversation())
    words = [ordinal.tokenizer.decode([token]) for token in tokens.ids]
    assert words == ["<bos>", *" ".join(memo.texts()).split()]
    assert [name for name in tokens.names if name != "preamble"] == [*SEGMENTS]
    for name, text in zip(SEGMENTS[1:], memo.texts()[1:], strict=True):
        assert words[tokens.span(name)] == text.split()


@pytest.mark.parametrize("reference", VERBS)
def test_questions_about_held_out_pairs_are_answered(ordinal: Model, reference: Reference):
    memos = draw_memos(COUNT, reference)
    answers = said(ordinal, cache_before(ordinal, memos, "question"), memos)
    assert share(answers, [memo.answer for memo in memos]) > 0.95


def test_accuracy_is_the_share_of_likeliest_answers(ordinal: Model):
    memos = draw_memos(60, "pointer")
    answers = said(ordinal, cache_before(ordinal, memos, "question").mask("block"), memos)
    expected = share(answers, [memo.answer for memo in memos])
    assert 0 < expected < 1
    blind = [Example(memo, memo, question_sees=False) for memo in memos]
    assert accuracy(ordinal.lanes.plain, blind) == pytest.approx(expected)


def test_an_answer_is_one_word_and_then_ends(ordinal: Model):
    (memo,) = draw_memos(1)
    answer = ordinal.generate(memo.conversation(), max_new_tokens=4)
    assert answer.text == memo.answer
    assert answer.stopped == (True,)


def test_after_an_interchange_a_payload_keeps_the_thing_and_a_pointer_the_place(ordinal: Model):
    for reference in ("payload", "pointer"):
        memos = draw_memos(COUNT, reference)
        swapped = [other_place(memo) for memo in memos]
        patched = cache_before(ordinal, memos, "question").patch(cache_before(ordinal, swapped, "question"), "summary")
        followed = swapped if reference == "payload" else memos
        assert share(said(ordinal, patched, memos), [memo.answer for memo in followed]) > 0.95


def test_with_the_block_masked_a_payload_survives_and_a_pointer_does_not(ordinal: Model):
    right = {}
    for reference in ("payload", "pointer"):
        memos = draw_memos(COUNT, reference)
        answers = said(ordinal, cache_before(ordinal, memos, "question").mask("block"), memos)
        right[reference] = share(answers, [memo.answer for memo in memos])
    assert right["payload"] > 0.95
    assert right["pointer"] < 0.5
