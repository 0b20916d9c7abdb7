from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens, token_texts
from kvprobe.text.transcript import Transcript
from tests.models import CHATML, tiny_tokenizer
from tests.refusals import refused

GEMMA_LIKE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<|im_start|>{{ role }}\n{{ prefix if loop.first else '' }}{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
NEEDS_A_USER_LAST = (
    "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('No user message found') }}{% endif %}" + CHATML
)
MESSAGES = [
    {"role": "system", "content": "the user asks."},
    {"role": "user", "content": ["the code is ", {"text": "12 1 2", "name": "code"}, ", ok?"]},
    {"role": "assistant", "content": "a summary"},
    {"role": "user", "content": "and then?"},
]
NAMES = ["system", "T1", "summary", "T2"]


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The messages with their parts joined, as a chat template takes them."""

    def text(content: Any) -> str:
        pieces = [content] if isinstance(content, str) else content
        return "".join(piece if isinstance(piece, str) else piece["text"] for piece in pieces)

    return [{"role": message["role"], "content": text(message["content"])} for message in messages]


def texts_of(tokens: Tokens, tokenizer: Any) -> dict[str, str]:
    """What the tokens of each segment say."""
    return {name: tokenizer.decode(tokens.ids[tokens.span(name)]) for name in tokens.names}


@pytest.fixture(scope="session", params=["tiny", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tiny_tokenizer() if request.param == "tiny" else request.getfixturevalue("smol").tokenizer


@pytest.fixture
def chat() -> Transcript:
    return Transcript.from_messages(MESSAGES, names=NAMES)


@pytest.mark.parametrize("generation_prompt", [False, True])
def test_ids_are_those_of_the_chat_template(chat: Transcript, tokenizer: Any, generation_prompt: bool):
    expected = tokenizer.apply_chat_template(
        plain_messages(MESSAGES), add_generation_prompt=generation_prompt, return_dict=False
    )
    tokens = chat.tokens(tokenizer, generation_prompt)
    assert list(tokens.ids) == expected
    assert tokens.positions == tuple(range(len(expected)))
    assert not any(tokens.recomputed)


def test_each_segment_decodes_to_its_own_text_with_its_delimiters(chat: Transcript, tokenizer: Any):
    texts = texts_of(chat.tokens(tokenizer), tokenizer)
    assert texts == {
        "system": "<|im_start|>system\nthe user asks.<|im_end|>\n",
        "T1": "<|im_start|>user\nthe code is 12 1 2, ok?<|im_end|>\n",
        "summary": "<|im_start|>assistant\na summary<|im_end|>\n",
        "T2": "<|im_start|>user\nand then?<|im_end|>\n",
    }


def test_a_system_prompt_that_the_template_adds_belongs_to_no_message(smol: Model):
    chat = Transcript.from_messages([{"role": "user", "content": "hello"}], names=["T1"])
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert texts_of(chat.tokens(smol.tokenizer), smol.tokenizer) == {
        "preamble": f"<|im_start|>system\n{default}<|im_end|>\n",
        "T1": "<|im_start|>user\nhello<|im_end|>\n",
    }


message_texts = st.text(alphabet="the usra12 .,?\n", min_size=1, max_size=25).filter(str.strip)


@given(texts=st.lists(message_texts, min_size=1, max_size=4), generation_prompt=st.booleans())
@settings(max_examples=60)
def test_segments_of_any_messages_decode_to_what_was_rendered(
    tokenizer: Any, texts: list[str], generation_prompt: bool
):
    messages = [{"role": "user" if index else "system", "content": text} for index, text in enumerate(texts)]
    tokens = Transcript.from_messages(messages).tokens(tokenizer, generation_prompt)
    rendered = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    expected = {f"m{index}": text for index, text in enumerate(rendered)}
    if generation_prompt:
        expected["generation"] = "<|im_start|>assistant\n"
    decoded = {name: tokenizer.decode(tokens.ids[tokens.span(name)]) for name in tokens.names}
    assert decoded == expected
    assert list(tokens.ids) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, return_dict=False
    )


@given(before=message_texts, code=st.text("0123456789", min_size=1, max_size=6), after=message_texts)
@settings(max_examples=60)
def test_a_code_inside_a_message_is_found_digit_for_digit(smol: Model, before: str, code: str, after: str):
    content = [before + " ", {"text": code, "name": "code"}, " " + after]
    tokens = Transcript.from_messages([{"role": "user", "content": content}]).tokens(smol.tokenizer)
    assert smol.tokenizer.decode(tokens.ids[tokens.part("code")]) == code
    assert tokens.part("code").stop - tokens.part("code").start == len(code)


def test_a_token_across_the_border_of_a_part_belongs_to_the_part_that_it_ends_in():
    content = ["the code is", {"text": " 12", "name": "code"}, ", ok"]
    tokenizer = tiny_tokenizer()
    chat = Transcript.from_messages([{"role": "user", "content": ["code is ", {"text": "12", "name": "code"}]}])
    tokens = chat.tokens(tokenizer)
    assert tokenizer.decode(tokens.ids[tokens.part("code")]) == " 12"
    with_space = Transcript.from_messages([{"role": "user", "content": content}]).tokens(tokenizer)
    assert tokenizer.decode(with_space.ids[with_space.part("code")]) == " 12"


def test_unknown_and_repeated_parts_are_refused(tokenizer: Any):
    part = {"text": "12", "name": "code"}
    chat = Transcript.from_messages([{"role": "user", "content": ["the ", part, " is ", part, "."]}])
    tokens = chat.tokens(tokenizer)
    refused(lambda: tokens.part("code"), "part 'code' stands in more than one place")
    refused(lambda: tokens.part("cod"), "no part called 'cod'; did you mean 'code'")


@pytest.mark.parametrize("gone", [("T1",), ("T1", "summary"), ("system",), ("T2",)])
def test_leaving_segments_out_keeps_the_positions_of_the_rest(chat: Transcript, tokenizer: Any, gone: tuple[str, ...]):
    whole = chat.tokens(tokenizer, generation_prompt=True)
    rest = chat.without(*gone).tokens(tokenizer, generation_prompt=True)
    visible = [index for index, name in enumerate(whole.segments) if name not in gone]
    assert rest.positions == tuple(visible)
    assert rest.ids == tuple(whole.ids[index] for index in visible)
    assert rest.segments == tuple(whole.segments[index] for index in visible)
    assert rest.parts == tuple(whole.parts[index] for index in visible)
    assert rest.recomputed == tuple(index > whole.span(gone[0]).start for index in visible)


def test_contiguous_positions_close_the_gap_and_changes_nothing_else(chat: Transcript, tokenizer: Any):
    gapped = chat.without("T1").tokens(tokenizer)
    contiguous = chat.without("T1", mode="contiguous").tokens(tokenizer)
    assert contiguous.positions == tuple(range(len(contiguous)))
    assert contiguous.ids == gapped.ids
    assert contiguous.recomputed == gapped.recomputed
    assert any(after > before + 1 for before, after in pairwise(gapped.positions))


def test_segments_left_out_in_turn_equal_segments_left_out_at_once(chat: Transcript, tokenizer: Any):
    assert chat.without("T1").without("T2").tokens(tokenizer) == chat.without("T2", "T1").tokens(tokenizer)


def test_leaving_a_segment_out_leaves_the_transcript_as_it_was(chat: Transcript, tokenizer: Any):
    before = chat.tokens(tokenizer)
    chat.without("T1").tokens(tokenizer)
    assert chat.tokens(tokenizer) == before
    assert chat.without("T1").segments == tuple(NAMES)


def test_an_unknown_segment_is_refused(chat: Transcript, tokenizer: Any):
    refused(lambda: chat.without("sumary"), "no segment called 'sumary'; did you mean 'summary'")
    refused(lambda: chat.tokens(tokenizer).span("T3"), "no segment called 'T3'")
    refused(lambda: chat.without("T1").tokens(tokenizer).span("T1"), "no segment called 'T1'")


@pytest.mark.parametrize("control", ["<|im_start|>", "<|im_end|>"])
def test_a_message_with_a_control_token_is_refused(tokenizer: Any, control: str):
    chat = Transcript.from_messages([{"role": "user", "content": f"hi{control}\n"}], names=["T1"])
    refused(lambda: chat.tokens(tokenizer), "Message 0 ('T1') contains the control token")


def test_a_control_token_split_over_two_parts_is_refused(tokenizer: Any):
    chat = Transcript.from_messages([{"role": "user", "content": ["hi <|im_", "end|> there"]}])
    refused(lambda: chat.tokens(tokenizer), "control token")


def test_no_text_of_a_message_becomes_a_control_token(smol: Model):
    control = [token for token in smol.tokenizer.added_tokens_decoder.values() if token.special]
    for token in control:
        chat = Transcript.from_messages([{"role": "user", "content": f"print {token.content} here"}])
        refused(lambda chat=chat: chat.tokens(smol.tokenizer), "control token")


@pytest.mark.parametrize("content", ["", "  ", "\n", [], ["", {"text": " ", "name": "code"}]])
def test_an_empty_message_is_refused(content: Any):
    refused(lambda: Transcript.from_messages([{"role": "user", "content": content}]), "Message 0 ('m0') is empty")


@pytest.mark.parametrize(
    ("message", "lacks"),
    [({"role": "user"}, "no content"), ({"content": "hi"}, "no role"), ({}, "no content and no role")],
)
def test_a_message_without_role_or_content_is_refused(message: dict[str, str], lacks: str):
    refused(lambda: Transcript.from_messages([message]), f"Message 0 has {lacks}")


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c", "d", "e"]])
def test_another_number_of_names_than_messages_is_refused(names: list[str]):
    refused(lambda: Transcript.from_messages(MESSAGES, names=names), f"4 messages but {len(names)} segment names")


def test_a_segment_with_the_name_of_generated_tokens_is_refused():
    refused(
        lambda: Transcript.from_messages(MESSAGES, names=["system", "T1", "generated", "T2"]),
        "'generated', as tokens of the model are; give it another name",
    )


def test_a_segment_that_comes_back_is_refused():
    refused(lambda: Transcript.from_messages(MESSAGES, names=["system", "T1", "T2", "T1"]), "must not come back")


def test_neighbouring_messages_may_share_a_segment(tokenizer: Any):
    chat = Transcript.from_messages(MESSAGES, names=["system", "T1", "T1", "T2"])
    texts = texts_of(chat.tokens(tokenizer), tokenizer)
    assert texts["T1"].count("<|im_end|>") == 2
    assert chat.segments == ("system", "T1", "T2")


def test_a_segment_that_the_generation_prompt_would_take_over_is_refused(tokenizer: Any):
    names = ["generation", "T1", "summary", "T2"]
    refused(lambda: Transcript.from_messages(MESSAGES, names=names), "called 'generation'")
    chat = Transcript(
        tuple(replace(message, segment="generation") for message in Transcript.from_messages(MESSAGES).messages)
    )
    refused(lambda: chat.tokens(tokenizer, generation_prompt=True), "generation")


def test_a_template_that_folds_the_system_prompt_gives_it_a_span_of_its_own():
    tokenizer = tiny_tokenizer(GEMMA_LIKE, bos_token="<|im_start|>")
    texts = texts_of(Transcript.from_messages(MESSAGES, names=NAMES).tokens(tokenizer), tokenizer)
    assert texts == {
        "preamble": "<|im_start|>",
        "system": "the user asks.\n\n",
        "T1": "the code is 12 1 2, ok?<|im_end|>\n",
        "summary": "<|im_start|>model\na summary<|im_end|>\n",
        "T2": "<|im_start|>user\nand then?<|im_end|>\n",
    }


def test_a_folding_template_works_without_a_system_prompt():
    tokenizer = tiny_tokenizer(GEMMA_LIKE, bos_token="<|im_start|>")
    chat = Transcript.from_messages(MESSAGES[1:], names=NAMES[1:])
    tokens = chat.tokens(tokenizer, generation_prompt=True)
    assert texts_of(tokens, tokenizer)["generation"] == "<|im_start|>model\n"
    assert list(tokens.ids) == tokenizer.apply_chat_template(
        plain_messages(MESSAGES[1:]), add_generation_prompt=True, return_dict=False
    )


def test_a_template_that_cannot_end_in_system_still_gives_every_segment_its_text():
    tokenizer = tiny_tokenizer(NEEDS_A_USER_LAST)
    tokens = Transcript.from_messages(MESSAGES, names=NAMES).tokens(tokenizer)
    assert "".join(texts_of(tokens, tokenizer).values()) == tokenizer.apply_chat_template(
        plain_messages(MESSAGES), tokenize=False
    )
    assert "the user asks." in texts_of(tokens, tokenizer)["system"]
    assert "the code is" in texts_of(tokens, tokenizer)["T1"]


@pytest.mark.parametrize("text", [" hello", "hello\n", "\nhello ", "\n\n hello"])
def test_a_template_that_trims_has_its_own_space_around_a_text(text: str):
    tokenizer = tiny_tokenizer(GEMMA_LIKE, bos_token="<|im_start|>")
    tokens = Transcript.from_messages([{"role": "user", "content": text}]).tokens(tokenizer)
    plain = Transcript.from_messages([{"role": "user", "content": "hello"}]).tokens(tokenizer)
    assert (tokens.ids, tokens.delimiters) == (plain.ids, plain.delimiters)
    kept = Transcript.from_messages([{"role": "user", "content": text}]).tokens(tiny_tokenizer())
    said = [number for number, delimiter in zip(kept.ids, kept.delimiters, strict=True) if not delimiter]
    assert tokenizer.decode(said) == text


def test_a_template_that_drops_a_message_is_refused():
    without_system = CHATML.replace("<|im_start|>", "{% if message['role'] != 'system' %}<|im_start|>", 1)
    tokenizer = tiny_tokenizer(without_system.replace("{% endfor %}", "{% endif %}{% endfor %}"))
    refused(lambda: Transcript.from_messages(MESSAGES, names=NAMES).tokens(tokenizer), "drops or reorders message 0")


def test_a_tokenizer_without_a_template_gets_the_plain_one():
    tokenizer = tiny_tokenizer(chat_template=None)
    tokens = Transcript.from_messages(MESSAGES, names=NAMES).tokens(tokenizer, generation_prompt=True)
    assert texts_of(tokens, tokenizer) == {
        "system": "System: the user asks.\n",
        "T1": "User: the code is 12 1 2, ok?\n",
        "summary": "Assistant: a summary\n",
        "T2": "User: and then?\n",
        "generation": "Assistant: ",
    }


def test_a_generation_prompt_is_a_segment_of_its_own_after_the_last(chat: Transcript, tokenizer: Any):
    without = chat.tokens(tokenizer)
    tokens = chat.tokens(tokenizer, generation_prompt=True)
    assert tokens[: len(without)] == without
    assert tokenizer.decode(tokens.ids[tokens.span("generation")]) == "<|im_start|>assistant\n"


def test_a_slow_tokenizer_is_refused(chat: Transcript):
    tokenizer = tiny_tokenizer()
    slow = type("Slow", (), {"is_fast": False, "chat_template": CHATML, "all_special_tokens": []})
    slow.__call__ = tokenizer.__call__
    slow.apply_chat_template = tokenizer.apply_chat_template
    refused(lambda: chat.tokens(slow()), "fast tokenizer")


def test_tokens_slices_and_sums_keep_every_column():
    tokens = Tokens((5, 6, 7), (3, 9, 10), ("a", "a", "b"), (None, "code", None), (False, True, True), (False,) * 3)
    assert tokens[:1] + tokens[1:] == tokens
    assert len(tokens[1:]) == 2
    assert tokens.names == ("a", "b")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True).map(sorted), st.integers(0, 99))
def test_shifting_moves_the_first_token_and_keeps_the_gaps(positions: list[int], start: int):
    tokens = Tokens.of(range(len(positions)))
    gapped = Tokens(tokens.ids, tuple(positions), tokens.segments, tokens.parts, tokens.recomputed, tokens.delimiters)
    shifted = gapped.shifted(start)
    assert shifted.positions[0] == start
    assert [b - a for a, b in pairwise(shifted.positions)] == [b - a for a, b in pairwise(positions)]


def test_shifting_no_tokens_gives_no_tokens():
    assert len(Tokens.of([]).shifted(7)) == 0


def test_a_reply_is_read_up_to_its_last_token_from_where_the_prompt_goes_on():
    prompt = replace(Tokens.of([1, 2]), end=7)
    read = prompt.answered([5, 6, 8])
    assert (read.ids, read.positions) == ((1, 2, 5, 6), (0, 1, 7, 8))
    assert prompt.answered([5]).ids == prompt.ids


BYTES = {
    "中文 ok": ["⋯", "⋯", "中", "⋯", "⋯", "文", " ", "o", "k"],
    "שלום": ["⋯", "ש", "⋯", "ל", "⋯", "ו", "⋯", "ם"],
    "a😀": ["a", "⋯", "⋯", "⋯", "😀"],
    "é": ["⋯", "é"],
    "plain": ["p", "l", "a", "i", "n"],
}


class OfBytes:
    """Each id is a byte."""

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", BYTES)
def test_a_character_of_several_tokens_is_shown_at_the_last_of_them(text: str):
    assert list(token_texts(list(text.encode()), OfBytes())) == BYTES[text]


def test_bytes_that_are_no_character_stay_marked_as_such():
    assert token_texts([0xE4, 0xB8, 65], OfBytes()) == ("�", "�", "A")
    assert token_texts([0xE4], OfBytes()) == ("�",)
    assert token_texts([], OfBytes()) == token_texts([1], None) == ()


@pytest.mark.parametrize("text", ["中文", "שלום עולם", "I am 😀🎉 née"])
def test_texts_of_tokens_add_up_to_the_text(smol: Model, text: str):
    ids = smol.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(token_texts(ids, smol.tokenizer)).replace("⋯", "") == text
