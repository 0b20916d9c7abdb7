"""The Python that reproduces a state."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from kvprobe.app.address import Address, Edit

_IMPORTS = ("from kvprobe.app.address import Edit", "from kvprobe.app.microscope import look")


def script(load: Sequence[str], address: Address, code: Sequence[str], **also: bool) -> str:
    """A whole Python script that makes the cache, asks the question, and shows the state.

    Args:
        load: gives the model.
        code: makes the cache of the model and a `chat`.
        also: what is measured on request.
    """
    messages = [{"role": message.role, "content": message.content} for message in address.messages]
    lines = [*load, *conversation_code(messages, address.names), *code, *_IMPORTS[not address.edits :]]
    imports = [line for line in dict.fromkeys(lines) if line.startswith("from ")]
    rest = [line for line in lines if not line.startswith("from ")]
    rest.append(f"print(model.generate(cache, {address.ask!r}, max_new_tokens={address.new}).text)")
    given = [repr(address.ask), *map(edit_code, address.edits), f"new={address.new}"]
    given += [f"{name}=True" for name, wanted in also.items() if wanted]
    shown = f"look(model, chat, {', '.join(given)}).show()"
    return "\n".join(["import kvprobe as kv", *imports, "", *rest, "", shown, ""])


def edit_code(edit: Edit) -> str:
    """The Python that writes an edit, without what is a default."""
    settings = {field.name: getattr(edit, field.name) for field in fields(Edit) if field.name != "kind"}
    usual = {field.name: field.default for field in fields(Edit)}
    given = [f"{name}={value!r}" for name, value in settings.items() if value != usual[name]]
    return f"Edit({', '.join([repr(edit.kind), *given])})"


def conversation_code(messages: Sequence[Mapping[str, str]], names: Sequence[str], chat: str = "chat") -> list[str]:
    """The lines of Python that write a conversation."""
    lines = [f"{chat} = kv.Transcript.from_messages(", "    ["]
    lines += [f"        {dict(message)!r}," for message in messages]
    plain_names = [f"m{number}" for number in range(len(names))]
    return [*lines, "    ]", *([] if [*names] == plain_names else [f"    , names={[*names]!r}"]), ")"]
