"""The Python that reproduces a state."""

from collections.abc import Mapping, Sequence


def script(load: str, address_code: Sequence[str], code: Sequence[str], ask: str, new: int) -> str:
    """A whole Python script that makes the cache and asks the question; `load` is the Python that gives the model."""
    imports = [line for line in dict.fromkeys(code) if line.startswith("from ")]
    rest = [line for line in code if not line.startswith("from ")]
    end = f"print(model.generate(cache, {ask!r}, max_new_tokens={new}).text)"
    return "\n".join(["import kvprobe as kv", *imports, "", f"model = {load}", *address_code, *rest, end, ""])


def conversation_code(messages: Sequence[Mapping[str, str]], names: Sequence[str], chat: str = "chat") -> list[str]:
    """The lines of Python that write a conversation."""
    lines = [f"{chat} = kv.Transcript.from_messages(", "    ["]
    lines += [f"        {dict(message)!r}," for message in messages]
    plain_names = [f"m{number}" for number in range(len(names))]
    return [*lines, "    ]", *([] if [*names] == plain_names else [f"    , names={[*names]!r}"]), ")"]
