"""The shipped facts, whose values stand nowhere else; pairs, which agree slot by slot; and what is no pair."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kvprobe.inference.model import Model
from kvprobe.studies.settings import FACT_KINDS, FACTS_OF_A_KIND
from kvprobe.tasks.facts import KINDS, Fact, conversation, facts, halves, pair, pairs_in_turn
from kvprobe.text.chat_template import PLAIN_CHAT_TEMPLATE
from kvprobe.text.tokens import PREAMBLE
from tests.refusals import refused

TEXTS = (
    "system", "chat_user", "chat_assistant", "fact_user", "fact_assistant", "later_user", "later_assistant", "question",
)  # fmt: skip
PER_KIND = 12

every_fact = pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact.id)


def test_there_are_as_many_facts_of_each_kind_and_no_text_stands_twice():
    assert [fact.kind for fact in facts()] == [kind for kind in KINDS for _ in range(PER_KIND)]
    assert (FACT_KINDS, FACTS_OF_A_KIND) == (KINDS, PER_KIND)  # what settings are checked against
    assert len({fact.id for fact in facts()}) == len(facts())
    for name in TEXTS:
        assert len({getattr(fact, name) for fact in facts()}) == len(facts())


def test_kinds_are_given_in_the_order_asked_for_and_unknown_ones_refused():
    assert [fact.kind for fact in facts(("name", "code"))] == ["name"] * PER_KIND + ["code"] * PER_KIND
    refused(lambda: facts(("name", "codes")), "no kind of fact called 'codes'; did you mean 'code'")


@every_fact
def test_a_value_stands_in_the_hole_and_nowhere_else(fact: Fact):
    assert fact.fact_user.count("{fact}") == 1
    said = " ".join([fact.fact_user.replace("{fact}", ""), fact.lead, *(getattr(fact, name) for name in TEXTS)])
    for value in fact.values:
        assert value.casefold() not in said.casefold()
        (place,) = [
            part for message in conversation(fact, value).messages for part in message.parts if part.name == "value"
        ]
        assert place.text == value


@every_fact
def test_the_two_prompts_agree_slot_by_slot_but_for_the_value(fact: Fact, tokenizer: Any):
    first, second = pair(fact, tokenizer).prompts
    value = first.part("value")
    assert [name for name in first.names if name != PREAMBLE] == ["system", "T1", "fact", "T2"]
    assert set(first.segments[value]) == {"fact"}
    assert first.ids[value] != second.ids[value]
    unequal = [slot for slot, (one, other) in enumerate(zip(first.ids, second.ids, strict=True)) if one != other]
    assert value.start <= unequal[0]
    assert unequal[-1] < value.stop
    assert replace(first, ids=second.ids) == second


@every_fact
def test_prompt_suffix_and_answer_are_what_the_chat_template_writes(fact: Fact, tokenizer: Any):
    conversations = pair(fact, tokenizer)
    template = None if tokenizer.chat_template else PLAIN_CHAT_TEMPLATE
    for prompt, answer, value in zip(conversations.prompts, conversations.answers, fact.values, strict=True):
        roles = ["system", *["user", "assistant"] * 4]
        texts = [*(getattr(fact, name) for name in TEXTS), f"{fact.lead} {value}".strip()]
        texts[3] = fact.fact_user.format(fact=value)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*prompt.ids, *conversations.suffix.ids, answer]
        assert whole[: len(ids)] == ids
        assert prompt.positions + conversations.suffix.positions == tuple(range(len(ids) - 1))
        assert set(conversations.suffix.segments) == {"question"}


@every_fact
def test_the_answers_differ_and_are_found_in_the_value_alone(fact: Fact, tokenizer: Any):
    conversations = pair(fact, tokenizer)
    assert len(set(conversations.answers)) == 2
    prompt = conversations.prompts[0]
    value = prompt.part("value")
    assert not {*prompt.ids[: value.start], *prompt.ids[value.stop :], *conversations.suffix.ids} & set(
        conversations.answers
    )


@every_fact
def test_prompts_are_a_conversation_long(fact: Fact, smol: Model):
    assert 120 <= len(pair(fact, smol.tokenizer).prompts[0]) <= 260


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_answers_with_the_value_in_its_prompt(kind: str, smol: Model):
    conversations = min((pair(fact, smol.tokenizer) for fact in facts((kind,))), key=lambda one: len(one.prompts[0]))
    _, logits = smol.extend(smol.prefill(list(conversations.prompts)), [conversations.suffix] * 2)
    assert logits[:, -1, list(conversations.answers)].argmax(-1).tolist() == [0, 1]


def test_values_of_different_length_are_refused(smol: Model):
    fact = replace(facts(("code",))[0], values=("4817", "73065"))
    refused(lambda: pair(fact, smol.tokenizer), re.compile(r"'cellar-door' have \d+ and \d+ tokens .* equally many"))


def test_indistinguishable_replies_are_refused(smol: Model):
    fact = replace(facts(("code",))[0], values=("4817", "4817"))
    refused(
        lambda: pair(fact, smol.tokenizer),
        "reply of fact 'cellar-door' begins with all of the other",
        "differ in a token",
    )


def test_what_the_answers_share_belongs_to_the_suffix(smol: Model):
    fact = facts(("code",))[0]
    late, early = (
        pair(replace(fact, values=values), smol.tokenizer) for values in (("4817", "4871"), ("4817", "7306"))
    )
    assert smol.tokenizer.decode(late.suffix.ids[len(early.suffix) :]) == "48"
    assert smol.tokenizer.decode(late.answers) == "17"


def test_the_first_facts_of_each_kind_are_taken_in_turn_and_every_half_has_as_many_of_each(smol: Model):
    chosen = facts(("name", "code"), 4)
    assert [fact.kind for fact in chosen] == ["name"] * 4 + ["code"] * 4
    assert chosen[4:] == facts(("code",))[:4]
    split = halves(chosen, 0)
    assert sum(split[:4]) == sum(split[4:]) == 2
    assert split != halves(chosen, 2)
    for number, (one, fact) in enumerate(zip(pairs_in_turn(chosen, smol.tokenizer, 0), chosen, strict=True)):
        plain, order = pair(fact, smol.tokenizer), -1 if number % 2 else 1
        assert (one.prompts, one.answers) == (plain.prompts[::order], plain.answers[::order])
        assert (one.id, one.number, one.half) == (fact.id, number, split[number])
    refused(lambda: halves(chosen[:1], 0), "cannot be split into halves")


def test_a_suffix_can_be_made_shorter_or_longer(smol: Model):
    both = pair(facts()[0], smol.tokenizer)
    for last in (1, len(both.suffix) + 5):
        ended = both.ending(last)
        assert len(ended.suffix) == last
        assert [prompt + ended.suffix for prompt in ended.prompts] == [prompt + both.suffix for prompt in both.prompts]


def test_a_part_and_what_stands_around_it_become_segments(smol: Model):
    prompt = pair(facts()[0], smol.tokenizer).prompts[0]
    divided = prompt.divided("value")
    assert divided.names == ("system", "T1", "fact before", "value", "fact after", "T2")
    assert divided.span("value") == prompt.part("value")
    assert (divided.span("fact before").start, divided.span("fact after").stop) == (
        prompt.span("fact").start,
        prompt.span("fact").stop,
    )
    assert (divided.ids, divided.positions, divided.parts) == (prompt.ids, prompt.positions, prompt.parts)
    refused(lambda: prompt.divided("values"), "did you mean 'value'")
