"""The longest common prefix of two conversations, and why it ends."""

from typing import Any

import pytest

from kvprobe.text.prefix import common_prefix
from kvprobe.text.transcript import Transcript
from tests.models import CHATML, tiny_tokenizer
from tests.text.templates import DEFAULT_SYSTEM
from tests.text.test_chat_shapes import SYSTEM, call, reply, result, user
from tests.text.tool_templates import LLAMA, QWEN, R1

ONE, TWO = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("a", "b"))
TURNED = {"function": {"parameters": {}, "name": "a"}, "type": "function"}


def chat(*messages: Any, **arguments: Any) -> Transcript:
    return Transcript.from_messages(messages, **arguments)


def identified(name: str, value: str = "1") -> dict[str, Any]:
    """A call with an id, which no template here writes."""
    calls: Any = call({"a": value})["tool_calls"]
    return call({"a": value}) | {"tool_calls": [{**calls[0], "id": name}]}


CAUSES = {
    "thoughts": (
        QWEN,
        chat(user("a"), reply("<think>\nhm\n</think>\n\nb")),
        chat(user("a"), reply("<think>\nhm\n</think>\n\nb"), user("c")),
        "m1 m1",
        "drops the thoughts of earlier turns",
    ),
    "header of an answer": (
        R1,
        chat(user("a"), add_generation_prompt=True),
        chat(user("a"), reply("b"), user("c")),
        "generation m1",
        "the header that asks for an answer",
    ),
    "order of tools": (
        QWEN,
        chat(user("a"), tools=[ONE, TWO]),
        chat(user("a"), tools=[TWO, ONE]),
        "preamble preamble",
        "list in another",
    ),
    "order of keys": (
        QWEN,
        chat(user("a"), tools=[ONE]),
        chat(user("a"), tools=[TURNED]),
        "preamble preamble",
        "keys in another order",
    ),
    "tools": (
        QWEN,
        chat(user("a"), tools=[ONE]),
        chat(user("a"), tools=[TWO]),
        "preamble preamble",
        "definitions of tools",
    ),
    "no tools": (QWEN, chat(user("a"), tools=[ONE]), chat(user("a")), "preamble m0", "the argument 'tools'"),
    "date given": (
        LLAMA,
        chat(user("a"), date_string="1 May 2026"),
        chat(user("a")),
        "preamble preamble",
        "'date_string'",
    ),
    "date of the text": (
        CHATML,
        chat({"role": "system", "content": "it is 12:01 now."}, user("a")),
        chat({"role": "system", "content": "it is 12:02 now."}, user("a")),
        "m0 m0",
        "a date or time in the system message changed",
    ),
    "system": (
        CHATML,
        chat(SYSTEM, user("a")),
        chat({**SYSTEM, "content": "the user is."}, user("a")),
        "m0 m0",
        "the text of the system message was changed",
    ),
    "default system": (
        DEFAULT_SYSTEM,
        chat(SYSTEM, user("a")),
        chat(user("a")),
        "m0 preamble",
        "message 0 of the first",
    ),
    "white space": (CHATML, chat(user("the  user")), chat(user("the user")), "m0 m0", "other white space"),
    "edited": (
        CHATML,
        chat(user("a"), reply("b is 1")),
        chat(user("a"), reply("b is 2")),
        "m1 m1",
        "text of message 1",
    ),
    "role": (
        CHATML,
        chat(user("a"), reply("b")),
        chat(user("a"), user("b")),
        "m1 m1",
        "of role 'assistant' in the first",
    ),
    "taken out": (
        CHATML,
        chat(user("a"), reply("b"), user("c"), reply("d")),
        chat(user("c"), reply("d")),
        "m0 m0",
        "messages 0 and 1 of the first are not in the second",
    ),
    "taken out after the system message": (
        CHATML,
        chat(SYSTEM, *(turn for name in "abc" for turn in (user(name), reply(name))), user("d")),
        chat(SYSTEM, user("c"), reply("c"), user("d")),
        "m1 m1",
        "messages 1 to 4 of the first are not in the second",
    ),
    "put in": (
        CHATML,
        chat(user("c"), reply("d")),
        chat(user("a"), reply("b"), user("c"), reply("d")),
        "m0 m0",
        "messages 0 and 1 of the second are not in the first",
    ),
    "ids that are not written": (
        QWEN,
        chat(user("a"), identified("1"), {**result("it is 5"), "tool_call_id": "1"}),
        chat(user("a"), identified("2"), {**result("it is 9"), "tool_call_id": "2"}),
        "tool2 tool2",
        "the text of message 2 was changed",
    ),
    "the call after an id": (
        QWEN,
        chat(user("a"), identified("1")),
        chat(user("a"), identified("2", "8")),
        "m1 m1",
        "'tool_calls' of message 1 was changed",
    ),
    "thoughts after an id": (
        QWEN,
        chat(user("a"), {**reply("<think>\nhm\n</think>\n\nb"), "id": "1"}),
        chat(user("a"), {**reply("<think>\nhm\n</think>\n\nb"), "id": "2"}, user("c")),
        "m1 m1",
        "drops the thoughts of earlier turns",
    ),
    "one taken out": (
        CHATML,
        chat(user("a"), reply("b"), user("c")),
        chat(user("a"), user("c")),
        "m1 m1",
        "message 1 of the first is not in",
    ),
    "order in a call": (
        QWEN,
        chat(user("a"), call({"a": 1, "b": 2}), result("c")),
        chat(user("a"), call({"b": 2, "a": 1}), result("c")),
        "m1 m1",
        "keys in the calls of message 1",
    ),
    "tokens": (CHATML, chat(user("a t")), chat(user("a the")), "m0 m0", "cut into other tokens"),
    "a longer one": (CHATML, chat(user("a")), chat(user("a"), reply("b")), "None m1", "the first ends there"),
    "none": (CHATML, chat(user("a")), chat(user("a")), "None None", ""),
    "hidden": (
        CHATML,
        chat(SYSTEM, user("a"), reply("b")),
        chat(SYSTEM, user("a"), reply("b")).without("m1", mode="rendered"),
        "m1 m2",
        "hidden",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_prefix_is_what_both_begin_with_and_its_end_has_a_cause(name: str):
    template, first, second, segments, cause = CAUSES[name]
    tokenizer = tiny_tokenizer(template, bos_token="<|im_start|>" if template in (CHATML, DEFAULT_SYSTEM) else "<s>")
    prefix = common_prefix(tokenizer, first, second)
    one, other = (chat.tokens(tokenizer).ids for chat in (first, second))
    assert one[: prefix.tokens] == other[: prefix.tokens]
    assert one[prefix.tokens : prefix.tokens + 1] != other[prefix.tokens : prefix.tokens + 1] or one == other
    assert prefix.lengths == (len(one), len(other))
    assert " ".join(map(str, prefix.segments)) == segments
    assert (cause in prefix.cause) if cause else not prefix.cause, prefix.cause
    assert f"its first {prefix.tokens} of {len(other)} tokens" in str(prefix)


def test_the_sentence_names_both_texts():
    prefix = common_prefix(tiny_tokenizer(CHATML), chat(user("a"), reply("b is 1")), chat(user("a"), reply("b is 2")))
    assert str(prefix) == (
        f"The second shares its first {prefix.tokens} of {prefix.lengths[1]} tokens with the first "
        f"({100 * prefix.share:.0f} %); then the first has ' 1<|im_end|>\\n' (in m1) and the second "
        "' 2<|im_end|>\\n' (in m1): the text of message 1 was changed."
    )
