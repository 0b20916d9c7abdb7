"""A chat from a file in the shapes that tools write; any other content is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvprobe.text.chat_file import MAX_BYTES, MAX_FILE_BYTES, read_chat
from tests.models import CHATML, tiny_tokenizer
from tests.refusals import refused

ASKED: Any = {"role": "user", "content": "Hi"}
REPLIED: Any = {"role": "assistant", "content": "Héllo"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
SHARED = [{"from": "system", "value": "Be brief"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Héllo"}]


def lines(*values: Any) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        json.dumps([ASKED, REPLIED]),
        json.dumps([ASKED, REPLIED], ensure_ascii=False),
        "\ufeff" + json.dumps([ASKED, REPLIED], indent=2).replace("\n", "\r\n"),
        json.dumps({"messages": [ASKED, REPLIED], "model": "x", "temperature": 1}),
        json.dumps([[ASKED, REPLIED]]),
        json.dumps([{"messages": [ASKED, REPLIED]}]),
        lines({"messages": [ASKED, REPLIED]}),
        lines(ASKED, REPLIED),
        json.dumps({"conversations": SHARED[1:]}),
        json.dumps(SHARED[1:]),
        json.dumps({"prompt": [ASKED], "completion": [REPLIED]}),
        json.dumps(
            [
                {**ASKED, "content": [{"type": "input_text", "text": "Hi"}]},
                {**REPLIED, "content": [{"type": "output_text", "text": "Héllo", "annotations": [], "logprobs": []}]},
            ]
        ),
        json.dumps(
            {"custom_id": "a", "method": "POST", "url": "/v1", "body": {"model": "x", "messages": [ASKED, REPLIED]}}
        ),
    ],
)
def test_a_conversation_is_read_in_every_shape(tmp_path: Path, content: str):
    path = tmp_path / "chat.json"
    path.write_bytes(content.encode())
    chat = read_chat(path)
    assert chat.segments == ("m0", "m1")
    assert [(message.role, message.text) for message in chat.messages] == [("user", "Hi"), ("assistant", "Héllo")]


def read(tmp_path: Path, value: Any, **how: Any) -> Any:
    path = tmp_path / "chat.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return read_chat(path, **how)


def roles(chat: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in chat.messages]


def test_sharegpt_calls_and_results(tmp_path: Path):
    called = {"from": "function_call", "value": '{"name": "f", "arguments": {"n": 1}}'}
    turns = [*SHARED[:2], called, {"from": "observation", "value": "12"}]
    chat = read(tmp_path, {"conversations": turns, "tools": json.dumps([TOOL["function"]])})
    assert roles(chat) == [("system", "Be brief"), ("user", "Hi"), ("assistant", ""), ("tool", "12")]
    assert chat.messages[2].fields == {"tool_calls": [CALL]}
    assert chat.arguments == {"tools": [TOOL]}


def test_anthropic_blocks(tmp_path: Path):
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    gave = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "12"}]}
    said = {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}
    chat = read(
        tmp_path,
        {
            "system": "Be brief",
            "messages": [
                ASKED,
                {"role": "assistant", "content": [thought, used]},
                {"role": "user", "content": [gave, said]},
            ],
            "tools": [{"name": "f", "description": "", "input_schema": {"type": "object"}}],
        },
    )
    assert roles(chat) == [("system", "Be brief"), ("user", "Hi"), ("assistant", ""), ("tool", "12"), ("user", "So?")]
    assert chat.messages[2].fields == {"tool_calls": [{"id": "a", **CALL}], "reasoning_content": "hm"}
    assert chat.messages[3].fields == {"tool_call_id": "a"}
    assert chat.arguments == {"tools": [TOOL]}


def test_openai_calls_stay_as_they_are(tmp_path: Path):
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", **CALL}], "refusal": None}
    given = {"role": "tool", "tool_call_id": "a", "content": ""}
    chat = read(tmp_path, {"messages": [ASKED, answer, given], "tools": [TOOL], "functions": []})
    assert [message.given(typed=True) for message in chat.messages] == [
        ASKED,
        {"role": "assistant", "tool_calls": [{"id": "a", **CALL}]},
        given,
    ]


def test_arguments_of_the_file_give_way_to_those_of_the_call(tmp_path: Path):
    value = {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": True, "effort": "low"}}
    assert read(tmp_path, value, enable_thinking=False).arguments == {"enable_thinking": False, "effort": "low"}


def test_one_of_several_conversations_is_chosen(tmp_path: Path):
    several = lines({"messages": [ASKED]}, {"id": "second", "messages": [ASKED, REPLIED]}, [REPLIED])
    refused(lambda: read(tmp_path, several), "holds 3 conversations (0, second, 2); choose one")
    for chosen in (1, "1", "second"):
        assert len(read(tmp_path, several, conversation=chosen).messages) == 2
    for wrong in (3, "third", -1):
        refused(lambda wrong=wrong: read(tmp_path, several, conversation=wrong), f"no conversation called '{wrong}'")
    refused(lambda: read(tmp_path, [ASKED], conversation=1), "no conversation called '1'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[", "not JSON"),
        (b"\xff", "not JSON"),
        (json.dumps([ASKED]).encode("utf-16"), "save it as UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'[{"role": "user", "content": "\\ud800"}]', "not JSON"),
        (b'[{"role": "user", "content": "Hi"},\n]', "line 2, column 1, after a comma that nothing follows"),
        (b'[{"role": "user", "content": "Hi",}]', "after a comma that nothing follows"),
        (b'{"messages": [1]}\n{"messages": ]}\n', "line 2: "),
        (b'[{"role": "user", "content": "Hi", "n": NaN}]', "NaN is not a number of JSON"),
        (b"", "not a list"),
        (b"{}", "not a list"),
        (b"[]", "not a list"),
        (b'"Hi"', "it is a str; write a list of messages"),
        (b'{"messages": []}', "not a list"),
        (b'{"text": "Hi"}', "an object with 'text'"),
        (b'{"prompt": "Hi", "completion": "Ho"}', "put this list into 'messages'"),
        (b'{"chosen": [], "rejected": []}', "one of them as 'messages'"),
        (b"[" + b",".join([b"1"] * 1001) + b"]", "message 0"),
        (json.dumps([ASKED] * 1001).encode(), "1,000"),
        (b'["Hi"]', "message 0"),
        (b'[{"role": "user", "content": "Hi"}, {"role": "user"}]', "message 1 has no content"),
        (b'[{"from": "alien", "value": "Hi"}]', "no speaker called 'alien'"),
        (b'[{"from": "human", "text": "Hi"}]', "message 0 has no text as its value"),
        (b'[{"from": "function_call", "value": "f()"}]', "write it as an object"),
        (b'[{"role": "user", "content": " "}]', "empty"),
        (b'[{"role": "user", "content": [{"type": "image_url"}]}]', "a part of type 'image_url'"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "tools": "f"}', "tools is not"),
        (json.dumps([{**ASKED, "content": "x" * MAX_BYTES}]).encode(), "1 MiB"),
        (b" " * (MAX_FILE_BYTES + 1), "64 MiB"),
    ],
)
def test_a_file_that_is_not_a_chat_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    refused(lambda: read_chat(path), message)


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path):
    refused(lambda: read_chat(tmp_path), "no file")


def test_what_a_template_does_not_read_is_refused_with_the_file_and_what_to_do(tmp_path: Path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": [ASKED], "tools": [TOOL]}))
    tokenizer = tiny_tokenizer(CHATML, bos_token="<|im_start|>")
    refused(
        lambda: read_chat(path).tokens(tokenizer), f"In {path}, the chat", "'tools'", "leave it out (delete the key"
    )
    path.write_text(json.dumps({"messages": [{**ASKED, "mood": "bad"}]}))
    refused(lambda: read_chat(path).tokens(tokenizer), f"In {path}, message 0 has the field 'mood'")


def test_the_results_of_tools_are_named_so(tmp_path: Path):
    path = tmp_path / "chat.json"
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    path.write_text(
        json.dumps([ASKED, {"role": "assistant", "tool_calls": [CALL]}, result, {**result, "role": "function"}])
    )
    assert read_chat(path).segments == ("m0", "m1", "tool2", "tool3")
