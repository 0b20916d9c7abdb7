"""The preamble belongs to no message, and headers belong to the turns that they open."""

from typing import Any

import pytest

from kvprobe.text.chat_template import lay_out
from kvprobe.text.tokens import common_length
from kvprobe.text.transcript import Transcript
from tests.models import CHATML, tiny_tokenizer
from tests.refusals import refused
from tests.text.templates import (
    ANSWER_HEADER_ALWAYS,
    ANSWER_HEADER_WITH_QUESTION,
    BARE_SYSTEM,
    DEFAULT_SYSTEM,
    GEMMA,
    LAST_TURN,
    OPENINGS,
    WORDS_WITH_QUESTION,
)

USER, REPLY = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "noted"}
SYSTEM = {"role": "system", "content": "be brief"}


def tokenizer_of(name: str) -> Any:
    """With a start token that the turns of ChatML begin with, as in SmolLM2, and another for the rest."""
    return tiny_tokenizer(OPENINGS[name][0], bos_token="<|im_start|>" if name.startswith("ChatML") else "<s>")


def laid_out(tokenizer: Any, messages: list[dict[str, str]], names: list[str]) -> dict[str, str]:
    """What each segment says, as far as its pieces go."""
    texts: dict[str, str] = {}
    for piece in lay_out(Transcript.from_messages(messages, names).messages, tokenizer, False).pieces:
        if piece.text:
            texts[piece.segment] = texts.get(piece.segment, "") + piece.text
    return texts


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize("more", [False, True], ids=["alone", "with a reply"])
def test_what_the_template_writes_before_the_first_message_belongs_to_no_message(name: str, more: bool):
    _, preamble, turn, _, _ = OPENINGS[name]
    texts = laid_out(tokenizer_of(name), [USER, REPLY][: 1 + more], ["T1", "summary"][: 1 + more])
    assert (texts.get("preamble", ""), texts["T1"]) == (preamble, turn)


@pytest.mark.parametrize("name", OPENINGS)
def test_hiding_the_system_message_leaves_the_turn_of_the_user_whole(name: str):
    *_, preamble, turn = OPENINGS[name]
    texts = laid_out(tokenizer_of(name), [SYSTEM, USER, REPLY], ["system", "T1", "summary"])
    assert (texts.get("preamble", ""), texts["T1"]) == (preamble, turn)
    assert "be brief" in texts["system"]


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (ANSWER_HEADER_WITH_QUESTION, "<|assistant|>\n"),
        (WORDS_WITH_QUESTION, "### Response:\n"),
        (ANSWER_HEADER_ALWAYS, "<START_TURN><ASSISTANT>"),
    ],
    ids=["with the question", "in words", "always"],
)
def test_the_header_of_an_answer_is_not_the_users_where_the_template_writes_it_early(template: str, header: str):
    tokenizer = tiny_tokenizer(template, bos_token="<s>")
    texts = laid_out(tokenizer, [USER, REPLY, USER], ["T1", "summary", "T2"])
    assert texts["summary"].startswith(f"{header}noted")
    assert texts["generation"] == header
    assert texts["T1"].strip() == texts["T2"].strip()
    assert "".join(texts.values()) == tokenizer.apply_chat_template([USER, REPLY, USER], tokenize=False)


def test_a_folded_system_message_stands_between_the_header_and_the_text_of_its_turn():
    tokens = Transcript.from_messages([SYSTEM, USER], ["system", "T1"]).tokens(tiny_tokenizer(GEMMA, bos_token="<s>"))
    inside = range(*tokens.span("T1").indices(len(tokens)))
    header = [place for place, name in enumerate(tokens.segments) if name == "T1" and place not in inside]
    assert header
    assert max(header) < tokens.span("system").start
    assert all(tokens.delimiters[place] for place in header)
    assert tokens.span("system").stop == tokens.span("T1").start


def test_two_restarts_differ_where_the_template_writes_a_default():
    tokenizer = tiny_tokenizer(DEFAULT_SYSTEM, bos_token="<|im_start|>")
    chat = Transcript.from_messages([SYSTEM, USER, REPLY], ["system", "T1", "summary"])
    rendered = chat.without("system", mode="rendered").tokens(tokenizer)
    assert list(rendered.ids) == tokenizer.apply_chat_template([USER, REPLY], return_dict=False)
    assert rendered.names == ("preamble", "T1", "summary")
    closed = chat.without("system", mode="contiguous").tokens(tokenizer)
    assert closed.names == ("T1", "summary")
    assert rendered.ids[-len(closed) :] == closed.ids


def test_a_restart_that_keeps_the_system_message_is_the_same_text_in_both_modes():
    tokenizer = tiny_tokenizer(DEFAULT_SYSTEM, bos_token="<|im_start|>")
    chat = Transcript.from_messages([USER, REPLY, USER], ["T1", "summary", "T2"])
    closed, rendered = (chat.without("summary", mode=mode).tokens(tokenizer) for mode in ("contiguous", "rendered"))
    assert (closed.ids, closed.positions, closed.segments) == (rendered.ids, rendered.positions, rendered.segments)
    assert [name for name, anew in zip(closed.segments, closed.recomputed, strict=True) if anew] == ["T2"] * len(
        closed.ids[closed.span("T2")]
    )


@pytest.mark.parametrize("hide", [["system"], ["T1", "summary"]], ids=" ".join)
@pytest.mark.parametrize(
    "template", [DEFAULT_SYSTEM, LAST_TURN, BARE_SYSTEM, GEMMA], ids=["default", "last", "bare", "folded"]
)
def test_a_rendered_restart_is_recomputed_from_the_first_token_that_is_another(template: str, hide: list[str]):
    tokenizer = tiny_tokenizer(template, bos_token="<s>")
    chat = Transcript.from_messages([SYSTEM, USER, REPLY, USER], ["system", "T1", "summary", "T2"])
    whole, rendered = chat.tokens(tokenizer), chat.without(*hide, mode="rendered").tokens(tokenizer)
    same = common_length(whole.ids, rendered.ids)
    assert rendered.recomputed == (False,) * same + (True,) * (len(rendered) - same)


def test_without_a_system_message_that_the_template_refuses_all_is_recomputed():
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system') }}{% endif %}" + CHATML
    chat = Transcript.from_messages([SYSTEM, USER], ["system", "T1"]).without("system", mode="rendered")
    assert all(chat.tokens(tiny_tokenizer(no_system)).recomputed)


def test_a_restart_of_nothing_is_refused():
    chat = Transcript.from_messages([USER], ["T1"]).without("T1", mode="rendered")
    refused(lambda: chat.tokens(tiny_tokenizer()), "All messages are hidden")
