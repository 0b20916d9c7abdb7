"""The shapes in which tools write conversations, as messages that chat templates read.

OpenAI's messages stay as they are. ShareGPT's and Anthropic's say the same in other words, which no template reads.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.checks import is_list, is_mapping, is_text
from kvprobe.errors import UserError
from kvprobe.names import unknown

_LISTS = ("messages", "conversations", "conversation")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "call",
}
_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
"""Parts of a message that only Anthropic has."""

Message = dict[str, Any]


def is_message(value: object) -> bool:
    """Whether this is one message, in any of the shapes."""
    return is_mapping(value) and ("role" in value or "from" in value)


def holds_messages(value: object) -> bool:
    """Whether this is an object around the messages of a conversation."""
    return is_mapping(value) and any(name in value for name in (*_LISTS, "prompt", "chosen", "body"))


def conversation_of(entry: object) -> tuple[list[Message], dict[str, object]]:
    """The messages of a conversation, and the arguments for its template.

    Raises:
        UserError: it is in none of the shapes, or says something that has none.
    """
    if is_list(entry):
        return _messages(entry), {}
    if not is_mapping(entry):
        raise UserError(f'It is a {type(entry).__name__}; write a list of messages, [{{"role": …, "content": …}}, …].')
    if holds_messages(entry.get("body")):
        return conversation_of(entry["body"])
    if "chosen" in entry or "rejected" in entry:
        raise UserError(
            "There are two answers of which one is preferred; write the prompt and one of them as 'messages'."
        )
    listed: Any = next((entry[name] for name in _LISTS if name in entry), None)
    if listed is None and is_list(entry.get("prompt")):
        listed = [*entry["prompt"], *(entry.get("completion") or [])]
    if not is_list(listed):
        raise UserError(
            f"It is not a list of messages but an object with {', '.join(map(repr, list(entry)[:4])) or 'nothing'}; "
            f'write [{{"role": …, "content": …}}, …], or put this list into \'messages\'.'
        )
    system = [{"role": "system", "content": entry["system"]}] if entry.get("system") else []
    arguments: Any = entry.get("chat_template_kwargs") or {}
    if not is_mapping(arguments):
        raise UserError("'chat_template_kwargs' is no object; write the arguments of the template by name.")
    if wrong := {"messages", "names", "chat_template"} & set(arguments):
        raise UserError(f"'chat_template_kwargs' holds {min(wrong)!r}, which a file cannot choose; leave it out.")
    tools = _tools(entry)
    return [*system, *_messages(listed)], {**({"tools": tools} if tools else {}), **arguments}


def _tools(entry: Mapping[str, Any]) -> list[Any]:
    """Definitions of tools, as OpenAI writes them."""
    given: Any = entry.get("tools") or entry.get("functions") or []
    tools: Any = _loads(given, "tools") if is_text(given) else given
    if not is_list(tools) or not all(map(is_mapping, tools)):
        raise UserError("'tools' is no list of objects; write the definition of each tool as an object.")
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if "input_schema" in tool:
        tool = {
            "name": tool.get("name"),
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
    return tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}


def _messages(listed: Sequence[object]) -> list[Message]:
    messages: list[Message] = []
    for index, message in enumerate(listed):
        if not is_mapping(message):
            raise UserError(f'Message {index} is a {type(message).__name__}; write {{"role": …, "content": …}}.')
        if "from" in message and "role" not in message:
            messages.append(_sharegpt(index, message))
        elif is_list(message.get("content")) and any(_kind(block) in _BLOCKS for block in message["content"]):
            messages += _anthropic(index, message)
        else:
            messages.append(dict(message))
    return messages


def _sharegpt(index: int, message: Mapping[str, Any]) -> Message:
    if not is_text(message.get("value")):
        raise UserError(f'Message {index} has no text as its value; write {{"from": …, "value": text}}.')
    role = _SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        raise UserError(f"Message {index}: {unknown('speaker', str(message['from'])[:40], _SHAREGPT_ROLES)}")
    if role != "call":
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        return {"role": role, "content": message["value"], **rest}
    called = _loads(message["value"], f"the call of message {index}")
    calls = called if is_list(called) else [called]
    if not all(is_mapping(call) and "name" in call for call in calls):
        raise UserError(f"Message {index} calls no tool by name; write its value as {{'name': …, 'arguments': …}}.")
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": dict(call)} for call in calls]}


def _anthropic(index: int, message: Mapping[str, Any]) -> list[Message]:
    """Blocks of a message: results of tools are messages of their own, before what else the user says."""
    results: list[Message] = []
    calls: list[Message] = []
    said: list[object] = []
    thoughts: list[str] = []
    for block in message["content"]:
        kind = _kind(block)
        if kind == "tool_use":
            arguments: Any = block.get("input") or {}
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = block.get("content") or ""
            failed = {"is_error": True} if block.get("is_error") else {}
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content, **failed})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            raise UserError(
                f"Message {index} holds thoughts that are encrypted, which no template reads; leave them out."
            )
        else:
            said.append(block)
    spoken: Message = {"content": said} | ({"tool_calls": calls} if calls else {})
    spoken |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if not said and (calls or thoughts):
        del spoken["content"]
    return [*results, *([{"role": message.get("role"), **spoken}] if said or calls or thoughts else [])]


def _kind(block: object) -> str:
    return str(block.get("type")) if is_mapping(block) else ""


def _loads(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"What should be JSON in {what} is not; write it as an object.") from error
