"""Messages as tools write them: the text is what the library renders, and each segment holds what its message says."""

from typing import Any

import pytest

from kvprobe.errors import UserError
from kvprobe.text.chat_template import lay_out
from kvprobe.text.transcript import Transcript
from tests.models import tiny_tokenizer
from tests.refusals import refused
from tests.text.tool_templates import FAMILIES, HARMONY, LLAMA, MISTRAL, PARTS, PHI, QWEN, R1

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    """A call of one tool."""
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call12345", "type": "function", "function": function}],
        **fields,
    }


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": text}


SYSTEM = {"role": "system", "content": "the user asks."}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CONVERSATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "plain": ([user("hello"), reply("a reply"), user("and then?")], {}),
    "a system message": ([SYSTEM, user("hello"), reply("a reply"), user("and then?")], {}),
    "outer spaces": ([SYSTEM, user(" hello\n"), reply("\n\na reply "), user('"and" then?\n')], {}),
    "a tool": ([SYSTEM, user("ask"), call({"city": 'the "mill"', "n": 3}), result('{"t": 1}'), reply("sun")], {}),
    "tools": ([user("ask"), call({"city": ["the mill", {"in": "é"}]}, content=None), result("12")], {"tools": [TOOL]}),
    "a call in JSON": ([user("ask"), call('{"city": "the mill"}', content=""), result("12"), reply("sun")], {}),
    "a call without arguments": ([user("ask"), call({}), result("12"), reply("sun"), user("thanks")], {}),
    "two results": ([user("ask"), call({"city": "a"}), result("12"), result("1 2"), reply("sun")], {}),
    "text beside a call": ([user("ask"), call({"city": "a"}, content="let me see"), result("12")], {}),
    "thoughts in tags": (
        [user("a"), reply("<think>\nhm\n</think>\n\nb"), user("c"), reply("<think>\nso\n</think>\n\nd")],
        {},
    ),
    "thoughts in a field": ([user("a"), reply("b", reasoning_content="hm"), user("c"), reply("d", reasoning="so")], {}),
    "thoughts before a call": ([user("a"), call({"n": "b"}, thinking="so"), result("c")], {}),
    "without thinking": ([user("hello"), reply("a reply"), user("and then?")], {"enable_thinking": False}),
    "a date": ([SYSTEM, user("hello")], {"date_string": "26 Nov 2026"}),
    "an effort": ([user("hello")], {"reasoning_effort": "high"}),
    "a developer": ([{"role": "developer", "content": "be brief"}, user("hello"), reply("a reply")], {}),
    "continued": ([user("hello"), reply("a rep")], {"continue_final_message": True}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}], {}),
    "names and dates": ([{**user("hello"), "name": "ann", "timestamp": 5, "weight": None}, reply("a reply")], {}),
    "a field that none reads": ([{**user("hello"), "mood": "sad"}], {}),
    "an old call": (
        [user("a"), {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
        {},
    ),
    "an old result": ([user("a"), reply("b"), {"role": "function", "name": "f", "content": "12"}], {}),
}
REFUSED = {
    # What the library renders although it leaves a text, a field or an argument out.
    "Qwen": "a date, an effort, a developer, a field that none reads, an old call, an old result",
    "Llama": "text beside a call, without thinking, an effort, a field that none reads, an old call",
    "Mistral": "text beside a call, without thinking, a date, an effort, a field that none reads, an old call",
    "R1": "a tool, tools, a call in JSON, a call without arguments, two results, text beside a call, "
    "thoughts before a call, without thinking, a date, an effort, a developer, a field that none reads, an old call, "
    "an old result",
    "Phi": "a tool, tools, a call in JSON, a call without arguments, two results, text beside a call, "
    "thoughts before a call, without thinking, a date, an effort, a field that none reads, an old call",
    "Harmony": "tools, text beside a call, without thinking, a date, a field that none reads, an old call",
    "Gemma": "a tool, tools, a call in JSON, a call without arguments, two results, text beside a call, "
    "thoughts before a call, without thinking, a date, an effort, a field that none reads, an old call",
}


def library(tokenizer: Any, messages: Messages, **arguments: Any) -> str | None:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except Exception:
        return None


def said(value: Any) -> list[str]:
    """The texts that a message holds, in any of its fields."""
    if isinstance(value, str):
        return [value.strip()]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for inner in values for text in said(inner)]


@pytest.mark.parametrize("answered", [False, True], ids=["as it is", "answered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_conversation_is_written_as_by_the_library_or_refused(family: str, answered: bool):
    tokenizer = tiny_tokenizer(FAMILIES[family], bos_token="<s>")
    refusals = set()
    for name, (messages, arguments) in CONVERSATIONS.items():
        answer = answered and "continue_final_message" not in arguments
        expected = library(tokenizer, messages, **arguments, add_generation_prompt=answer)
        chat = Transcript.from_messages(messages, **arguments)
        try:
            pieces = lay_out(chat.messages, tokenizer, answer, chat.arguments).pieces
        except UserError:
            refusals |= {name} if expected is not None else set()
            continue
        text = "".join(piece.text for piece in pieces)
        if name == "parts" and family != "Gemma":  # the library writes a list as Python does, or fails
            expected = library(tokenizer, [user("a b")], add_generation_prompt=answer)
        assert text == expected, name
        tokens = chat.tokens(tokenizer, answer)
        assert tokens.ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), name
        for piece in pieces:
            if not piece.delimiter and name != "parts":
                source = messages[int(piece.segment.lstrip("mtol"))]
                raw = piece.text.strip().replace('\\"', '"').removeprefix("<think>\n").partition("\n</think>")[0]
                assert any(raw in text for text in said(source)), (name, piece)
    assert refusals == set(REFUSED[family].split(", ")), refusals ^ set(REFUSED[family].split(", "))


def segments_of(template: str, messages: Messages, answered: bool = False, **arguments: Any) -> dict[str, str]:
    tokenizer = tiny_tokenizer(template, bos_token="<s>")
    texts: dict[str, str] = {}
    for piece in lay_out(Transcript.from_messages(messages).messages, tokenizer, answered, arguments).pieces:
        texts[piece.segment] = texts.get(piece.segment, "") + piece.text
    return texts


def test_results_of_tools_in_one_turn_are_segments_of_their_own():
    assert segments_of(QWEN, [user("ask"), call({"city": "a"}), result("12"), result("1 2"), reply("sun")]) == {
        "m0": "<|im_start|>user\nask<|im_end|>\n",
        "m1": '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "a"}}\n</tool_call>'
        "<|im_end|>\n",
        "tool2": "<|im_start|>user<tool_response>\n12\n</tool_response>",
        "tool3": "<tool_response>\n1 2\n</tool_response><|im_end|>\n",
        "m4": "<|im_start|>assistant\nsun<|im_end|>\n",
    }


def test_a_call_without_arguments_has_its_turn():
    texts = segments_of(QWEN, [user("ask"), call({}), result("12")])
    assert texts["m1"].startswith("<|im_start|>assistant\n<tool_call>")
    assert texts["m1"].endswith("</tool_call><|im_end|>\n")


def test_a_system_message_that_is_written_into_the_last_turn_leaves_that_turn_its_header():
    texts = segments_of(MISTRAL, [SYSTEM, user("hello"), reply("a"), user("then?")], tools=[TOOL])
    assert texts["m0"] == "the user asks.\n\n"
    assert texts["m3"].startswith("[TOOLS][")
    assert texts["m3"].endswith("[/TOOLS][INST] then?[/INST]")
    assert (texts["preamble"], texts["m1"], texts["m2"]) == ("<s>", "[INST] hello[/INST]", " a</s>")


def test_tools_without_a_system_message_are_part_of_the_preamble():
    texts = segments_of(QWEN, [user("hello")], tools=[TOOL])
    assert texts["preamble"].startswith("<|im_start|>system\n# Tools\n")
    assert texts["m0"] == "<|im_start|>user\nhello<|im_end|>\n"


def test_a_header_that_names_a_tool_belongs_to_its_result():
    texts = segments_of(HARMONY, [user("a"), call({}), result("12")])
    assert texts["m1"].endswith("<|message|>{}<|call|>")
    assert texts["tool2"].startswith("<|start|>functions.get_weather to=assistant")


@pytest.mark.parametrize("template", [QWEN, R1], ids=["Qwen", "R1"])
def test_thoughts_that_the_template_drops_are_told_by_segment(template: str):
    messages = CONVERSATIONS["thoughts in tags"][0][:3]
    tokens = Transcript.from_messages(messages).tokens(tiny_tokenizer(template, bos_token="<s>"))
    assert {name: text.strip() for name, text in tokens.dropped.items()} == {"m1": "<think>\nhm\n</think>"}
    assert tokens[: tokens.span("m1").start].dropped == {}
    assert (tokens + tokens).dropped == tokens.dropped
    assert "hm" in repr(tokens)


def test_thoughts_of_the_last_turn_stay():
    tokens = Transcript.from_messages(CONVERSATIONS["thoughts in a field"][0]).tokens(tiny_tokenizer(QWEN))
    assert tokens.dropped == {"m1": "hm"}


def test_parts_are_written_one_by_one_where_the_template_does():
    content = [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]
    assert segments_of(PARTS, [{"role": "user", "content": content}])["m0"] == "<turn>user\nab<end>\n"
    assert segments_of(QWEN, [{"role": "user", "content": content}])["m0"] == "<|im_start|>user\na  b<|im_end|>\n"


def test_a_named_part_of_typed_parts_has_its_place():
    parts = [{"type": "text", "text": "the code is "}, {"type": "text", "text": "12", "name": "code"}]
    for template in (PARTS, QWEN):
        tokenizer = tiny_tokenizer(template, bos_token="<s>")
        tokens = Transcript.from_messages([{"role": "user", "content": parts}]).tokens(tokenizer)
        assert tokenizer.decode(tokens.ids[tokens.part("code")]).strip().endswith("12")


@pytest.mark.parametrize(
    ("messages", "arguments", "words"),
    [
        ([user("a")], {"enable_thinkin": True}, "does not read the argument 'enable_thinkin'; it reads"),
        ([user("a")], {"tokenize": True}, "'tokenize' is no argument of a chat template"),
        ([user("a")], {"tools": {"name": "f"}}, "tools is a dict; give a list"),
        ([user("a")], {"tools": [{"name": "<|im_end|>"}]}, "The argument 'tools' contains the control token"),
        ([user("a")], {"enable_thinking": object()}, "The argument 'enable_thinking' holds a object"),
        ([user("a")], {"add_generation_prompt": True, "continue_final_message": True}, "give one of them"),
        ([user("a"), call({"city": "<|im_end|>"})], {}, "Message 1 ('m1') contains the control token"),
        ([user("a"), call({"<|im_end|>": 1})], {}, "Message 1 ('m1') contains the control token"),
        ([user("a"), reply("b", reasoning_content="<|im_end|>")], {}, "Message 1 ('m1') contains the control token"),
        ([{**user("a"), "mood": "sad"}], {}, "Message 0 has the field 'mood', which the chat template does not read"),
        ([user("a"), reply("", function_call={"name": "f"})], {}, "'function_call', which the chat template does not"),
        ([user("a"), reply("", function_call={"name": "f"})], {}, "give it as 'tool_calls'"),
        ([{"role": "developer", "content": "a"}, user("b")], {}, "drops or reorders message 0, since 'a'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "a part of type 'image_url'"),
        ([{"role": "assistant", "content": None}], {}, "Message 0 has no content"),
        ([{**user("a"), "mood": object()}], {}, "Message 0 holds a object"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_would_be_lost_or_forged_is_refused(messages: Messages, arguments: dict[str, Any], words: str):
    refused(lambda: Transcript.from_messages(messages, **arguments).tokens(tiny_tokenizer(QWEN)), words)


def test_a_message_nested_too_deeply_is_refused():
    deep: Any = {}
    for _ in range(50):
        deep = {"in": deep}
    refused(lambda: Transcript.from_messages([user("a"), call(deep)]), "nested more than 32 deep")


def test_a_template_of_ones_own_is_an_argument():
    chat = Transcript.from_messages([user("hello")], chat_template=PHI)
    assert (
        chat.tokens(tiny_tokenizer(LLAMA)).ids
        == Transcript.from_messages([user("hello")]).tokens(tiny_tokenizer(PHI)).ids
    )


def test_a_message_that_is_continued_has_no_end_and_no_answer_after_it():
    tokenizer = tiny_tokenizer(QWEN)
    chat = Transcript.from_messages([user("hello"), reply("a rep")], continue_final_message=True)
    assert chat.tokens(tokenizer, generation_prompt=True) == chat.tokens(tokenizer)
    assert tokenizer.decode(chat.tokens(tokenizer).ids).endswith("assistant\na rep")


def test_an_answer_that_is_asked_for_as_an_argument_is_a_segment():
    asked = Transcript.from_messages([user("hello")], add_generation_prompt=True, enable_thinking=False)
    assert asked.tokens(tiny_tokenizer(QWEN)).names == ("m0", "generation")
