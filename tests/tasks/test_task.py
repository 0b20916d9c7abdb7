"""Every task that draws its items; prompts, which know nothing of the answer; names; and who is ranked."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.inference.model import Model
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.gsm8k import GSM8K
from kvprobe.tasks.jsonl import JSONLines
from kvprobe.tasks.needle import Needle
from kvprobe.tasks.recite import Recite
from kvprobe.tasks.retrieve import Retrieve
from kvprobe.tasks.task import Item, Task, prompt, rankable, too_hard
from kvprobe.text.chat_template import PLAIN_CHAT_TEMPLATE, Tokenizer
from kvprobe.text.transcript import Transcript
from tests.models import tiny_tokenizer
from tests.refusals import refused

DRAWN: dict[str, Callable[..., Task]] = {"recite": Recite, "retrieve": Retrieve, "needle": Needle}

seeds = st.integers(0, 2**31)
few = settings(max_examples=15)
drawn = pytest.mark.parametrize("name", DRAWN)


def text_item(answer: str = "blue", lead: str = "", said: str = "what now?") -> Item:
    return Item("one", Transcript.from_messages([{"role": "user", "content": said}]), answer, lead)


@drawn
@given(seed=seeds, count=st.integers(0, 6), more=st.integers(0, 6))
@few
def test_items_depend_on_the_seed_and_their_number_alone(name: str, seed: int, count: int, more: int):
    items = find_task(name).items(count, seed)
    assert len(items) == count
    assert items == DRAWN[name]().items(count + more, seed)[:count]


@drawn
def test_no_two_items_are_alike(name: str):
    items = find_task(name).items(60, 3) + find_task(name).items(60, 4)
    assert len({item.id for item in items}) == 120
    assert len({item.chat for item in items}) == 120
    assert len({item.lead for item in items}) > 3


@drawn
@given(seed=seeds)
@few
def test_the_answer_stands_once_in_the_prompt_and_is_the_only_right_one(name: str, seed: int):
    task = find_task(name)
    first, second = task.items(2, seed)
    for item, other in ((first, second), (second, first)):
        (source,) = [part.text for message in item.chat.messages for part in message.parts if part.name == "source"]
        assert source == item.answer
        said = "".join(message.text for message in item.chat.messages)
        assert said.count(item.answer) == 1
        for written in ("{}", " {}", " {}.", " {}\nAnd so on: 1, 2", "\u00a0{}"):
            assert all(task.score(written.format(item.answer), item).values())
        for wrong in ("", "\n" + item.answer, "I do not know.", other.answer, item.answer[:-1], item.answer + "7x"):
            assert not any(task.score(wrong, item).values())
        assert tuple(task.score("", item)) == task.scorers


@drawn
def test_negative_counts_and_seeds_are_refused(name: str):
    for count, seed in ((-1, 0), (1, -1)):
        refused(lambda count=count, seed=seed: find_task(name).items(count, seed), "at least 0")


@drawn
def test_prompts_end_with_the_lead_and_answers_fit(name: str, smol: Model):
    task = find_task(name)
    for item in task.items(30, 0):
        tokens = prompt(item, smol.tokenizer)
        text = smol.tokenizer.decode(tokens.ids)
        assert text.endswith(f"<|im_start|>assistant\n{item.lead}")
        assert smol.tokenizer.decode(tokens.ids[tokens.part("source")]).strip() == item.answer
        assert tokens.names[-2:] == ("question", "generation")
        whole = smol.tokenizer(f"{text} {item.answer}", add_special_tokens=False)["input_ids"]
        assert tuple(whole[: len(tokens)]) == tokens.ids
        assert len(whole) - len(tokens) < task.max_new_tokens
        assert len(tokens) < 320


@given(answer=st.text(min_size=1).filter(lambda text: text == text.strip() and "<|" not in text))
@few
def test_a_prompt_does_not_depend_on_the_answer(answer: str, smol: Model):
    for lead in ("", "It is", "They are:", "(", "No. 5"):
        item = text_item(lead=lead)
        assert prompt(replace(item, answer=answer), smol.tokenizer) == prompt(item, smol.tokenizer)


@given(answer=st.text("ab10 .", min_size=1).filter(lambda text: text == text.strip()))
@few
def test_a_prompt_of_a_plain_template_does_not_depend_on_the_answer(answer: str):
    tokenizer = tiny_tokenizer(PLAIN_CHAT_TEMPLATE)
    item = text_item(lead="the.")
    assert prompt(replace(item, answer=answer), tokenizer) == prompt(item, tokenizer)


def test_without_a_lead_the_prompt_ends_with_the_assistants_header(smol: Model):
    item = text_item()
    assert prompt(item, smol.tokenizer) == item.chat.tokens(smol.tokenizer, generation_prompt=True)


class Joining:
    """A tokenizer that takes the last two words for one token."""

    chat_template: Any = "any"
    all_special_tokens: Any = ()

    def apply_chat_template(self, conversation: Any, /, **kwargs: Any) -> str:
        return " ".join(message["content"] for message in conversation)

    def __call__(self, text: Any, /, **kwargs: Any) -> dict[str, Any]:
        last = text.rindex(" ", 0, text.rindex(" "))
        places = [(place, place + 1) for place in range(last)] + [(last, len(text))]
        return {"input_ids": list(range(len(places))), "offset_mapping": places}


def test_a_tokenizer_that_joins_answer_and_lead_is_refused():
    assert isinstance(Joining(), Tokenizer)
    refused(
        lambda: prompt(text_item("x y", lead="it is"), Joining()),
        "joins the answer of item 'one' with its lead 'it is'",
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"answer": ""}, "answer of item 'one' is empty"),
        ({"answer": " 5"}, "answer of item 'one' begins or ends with white space"),
        ({"lead": "It is "}, "lead of item 'one' begins or ends with white space"),
        ({"chat": Transcript(())}, "must end in a message of the user"),
        (
            {"chat": Transcript.from_messages([{"role": "assistant", "content": "x"}])},
            "must end in a message of the user",
        ),
    ],
)
def test_items_that_cannot_be_asked_are_refused(change: dict[str, Any], sentence: str):
    refused(lambda: replace(text_item(), **change), sentence)


def test_tasks_are_found_by_the_name_that_they_give(tmp_path: Path):
    problems, custom = tmp_path / "problems.jsonl", tmp_path / "own.jsonl"
    problems.write_text('{"question": "How many?", "answer": "#### 7"}')
    custom.write_text('{"prompt": "How many?", "answer": "7"}')
    kinds = DRAWN | {"gsm8k": GSM8K, f"gsm8k:{problems}": GSM8K, str(custom): JSONLines}
    for name, kind in kinds.items():
        task = find_task(name)
        assert isinstance(task, Task)
        assert type(task) is kind
        assert task.name == name


@pytest.mark.parametrize("name", ["gsm8k:", "gsm8k:nowhere.jsonl", "nowhere.jsonl"])
def test_a_file_that_is_not_there_is_refused_when_it_is_named(name: str):
    refused(lambda: find_task(name), "There is no file")


def test_an_unknown_task_is_refused_with_the_near_match():
    refused(lambda: find_task("retreive"), "no task, ", " called 'retreive'; did you mean 'retrieve'")
    refused(lambda: find_task(""), "known are 'recite', 'retrieve', 'needle', 'gsm8k'")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Recite(words=0), "words is 0; give 1 to 263"),
        (lambda: Recite(words=10**6), "words is 1000000; give 1 to 263"),
        (lambda: Retrieve(keys=1), "keys is 1; with values of 3 digits, give 2 to 60"),
        (lambda: Retrieve(keys=10, digits=1), "keys is 10; with values of 1 digits, give 2 to 9"),
        (lambda: Retrieve(digits=0), "digits is 0; give 1 to 9"),
        (lambda: Needle(exchanges=0), "exchanges is 0; give 1 to 48"),
        (lambda: Needle(exchanges=10**6), "exchanges is 1000000; give 1 to 48"),
    ],
)
def test_an_impossible_difficulty_is_refused(build: Callable[[], Task], words: str):
    refused(build, words)


@pytest.mark.parametrize(
    "task", [Recite(words=1), Recite(words=60), Retrieve(keys=60), Retrieve(keys=9, digits=1), Needle(1), Needle(48)]
)
def test_every_difficulty_has_items_whose_answer_is_right(task: Task):
    for item in task.items(3, 0):
        assert all(task.score(" " + item.answer, item).values())


@given(seed=seeds, keys=st.integers(2, 40), digits=st.integers(2, 4))
@few
def test_the_values_of_a_list_differ_and_none_begins_another(seed: int, keys: int, digits: int):
    task = Retrieve(keys, digits)
    assert task.chance == 1 / keys
    (item,) = task.items(1, seed)
    words = item.chat.messages[0].text.replace(":", " ").replace(".", " ").split()
    values = [word for word in words if word.isdigit()]
    assert len(values) == keys
    for value in values:
        assert [other for other in values if other.startswith(value)] == [value]


def test_the_value_asked_for_may_be_on_any_line():
    rows = set()
    for item in Retrieve(keys=3).items(60, 0):
        values = [word.strip(".") for word in item.chat.messages[0].text.split() if word.strip(".").isdigit()]
        rows.add(values.index(item.answer))
    assert rows == {0, 1, 2}


def test_the_needle_may_be_in_any_exchange():
    places = {item.chat.segments.index("needle") for item in Needle(exchanges=3).items(60, 0)}
    assert places == {0, 1, 2}
    assert all(len(item.chat.segments) == 4 for item in Needle(exchanges=3).items(5, 0))


def test_case_punctuation_and_numbering_of_a_recited_list_are_ignored():
    task = Recite(words=3)
    item = replace(task.items(1, 0)[0], answer="sun, boat, key")
    for right in ("SUN, Boat, Key.", "1. sun 2. boat 3. key", "- sun - boat - key", "sun boat key!"):
        assert task.score(right, item) == {"exact": True}
    for wrong in ("sun, key, boat", "sun, boat", "sun, boat, key, key", "suns, boat, key", "sunboat, key"):
        assert task.score(wrong, item) == {"exact": False}


def test_models_that_cannot_do_a_task_are_not_ranked():
    table = [(0.19, 0.0, False), (0.2, 0.0, True), (0.29, 0.1, False), (0.31, 0.1, True), (1.0, 0.5, True)]
    for accuracy, chance, able in [*table, (0.7, 0.5, False), (float("nan"), 0.0, False)]:
        assert rankable(accuracy, chance) is able
        sentence = too_hard("recite", accuracy, chance)
        assert (sentence is None) is able
        assert able or "not ranked on recite" in str(sentence)


@given(chance=st.floats(0, 0.2))
@few
def test_three_times_chance_is_the_floor_while_it_can_be_reached(chance: float):
    floor = max(0.2, 3 * chance)
    assert rankable(floor + 1e-9, chance)
    assert not rankable(floor - 1e-9, chance)


def test_tasks_of_one_seed_draw_different_items():
    first = {name: find_task(name).items(1, 0)[0].answer for name in DRAWN}
    assert len(set(first.values())) == len(DRAWN)
    assert str(np.random.default_rng([0, 0]).integers(10**5)) not in first.values()
