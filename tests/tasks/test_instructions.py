"""Conversations with instructions and a code: what was drawn stands where it was wanted."""

from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import code_measurements
from kvprobe.tasks.instructions import (
    DEPTHS,
    VALUES,
    conversation,
    draw,
    instruction_questions,
    instructions,
    needle_question,
    needles,
)
from tests.refusals import refused


@pytest.mark.parametrize("seed", range(3))
def test_a_conversation_holds_what_was_drawn_where_it_was_wanted(tokenizer: Any, seed: int):
    given = draw(np.random.default_rng(seed), tokenizer)
    tokens = conversation(given, 512, tokenizer).tokens(tokenizer)
    assert abs(len(tokens) - 512) < 40
    code = tokens.part("code")
    assert tokenizer.decode(tokens.ids[code]).strip() == given.code
    assert set(tokens.segments[code]) == {"needle"}
    assert abs(code.start / len(tokens) - given.depth) < 0.08
    assert DEPTHS[0] <= given.depth <= DEPTHS[1]
    for place, (instruction, value) in enumerate(given.instructions, start=1):
        span = tokens.part(f"instruction{place}")
        assert tokenizer.decode(tokens.ids[span]).strip() == instruction.text.replace("{value}", value)
        assert set(tokens.segments[span]) == {"system"}


def test_a_conversation_longer_than_its_small_talk_is_refused(tokenizer: Any):
    given = draw(np.random.default_rng(0), tokenizer)
    refused(lambda: conversation(given, 50_000, tokenizer), "small talk")


def test_every_instruction_and_needle_has_its_place_to_fill():
    assert all(
        instruction.text.count("{value}") == 1 and len(set(instruction.values)) == VALUES
        for instruction in instructions()
    )
    assert all(needle.text.count("{code}") == 1 and "{" not in needle.question + needle.lead for needle in needles())


def test_questions_end_where_any_of_their_answers_may_begin(tokenizer: Any):
    given = draw(np.random.default_rng(0), tokenizer)
    chat = conversation(given, 300, tokenizer)
    needle, *asked = (needle_question(given, chat, tokenizer), *instruction_questions(given, chat, tokenizer))
    digits = [{tokenizer.decode([code[place]]).strip() for code in needle.answers} for place in range(-5, 0)]
    assert digits == [set("0123456789")] * 5
    assert tokenizer.decode(needle.answers[needle.true]).strip() == given.code
    assert needle.true == 0
    for question, (instruction, value) in zip(asked, given.instructions, strict=True):
        assert question.tokens.positions[0] == 0
        assert tokenizer.decode(question.tokens.ids).endswith(instruction.lead)
        assert [tokenizer.decode(answer).strip() for answer in question.answers] == list(instruction.values)
        assert instruction.values[question.true] == value
        assert len({answer[0] for answer in question.answers}) == VALUES


def test_with_everything_in_view_a_real_model_recalls_the_code(smol: Model):
    given = draw(np.random.default_rng([0, 0, 1]), smol.tokenizer)
    chat = conversation(given, 160, smol.tokenizer)
    question, cache = needle_question(given, chat, smol.tokenizer), smol.prefill(chat)
    asked, codes = question.tokens.answered(question.answers[0]), torch.tensor(question.answers)
    _, logits = smol.extend(cache, onwards(cache, [asked]), logits=codes.shape[1])
    told = code_measurements(logits, codes, [0])
    assert told["correct"].double().mean() > 0.5
    assert told["margin"].sum() > 0
