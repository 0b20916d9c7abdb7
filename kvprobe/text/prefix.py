"""How much of one conversation's cache another can reuse, and what ends it: their longest common prefix."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief
from kvprobe.errors import UserError
from kvprobe.text.messages import Message
from kvprobe.text.tokens import ANSWER_HEADER, PREAMBLE, Tokens, common_length
from kvprobe.text.transcript import Transcript

SHOWN = 40
"""Characters of each text that a sentence shows, at most."""

RECUT = "the same text is cut into other tokens, because what follows it differs"

_DATE = re.compile(
    r"\d\d?:\d\d(?::\d\d)?|\d{4}-\d\d?-\d\d?|\d\d?[ /.](?:[A-Z][a-z]{2,8}|\d\d?)[ /.,]+\d{2,4}"
    r"|[A-Z][a-z]{2,8} \d\d?, \d{4}"
)


@dataclass(frozen=True, repr=False)
class CommonPrefix(Brief):
    """The tokens with which two conversations both begin.

    Attributes:
        tokens: how many are the same.
        lengths: tokens of each conversation.
        segments: in which segment of each the next token stands; None at its end.
        texts: what each says there, up to a few words.
        cause: why they part; empty where they do not.
    """

    tokens: int
    lengths: tuple[int, int]
    segments: tuple[str | None, str | None]
    texts: tuple[str, str] = field(repr=False)
    cause: str

    @property
    def share(self) -> float:
        """Of the second conversation: what its reading need not compute."""
        return self.tokens / self.lengths[1]

    def _facts(self) -> Iterable[str]:
        yield f"{self.tokens} of {self.lengths[1]} tokens"
        if self.cause:
            yield self.cause

    def __str__(self) -> str:
        reused = f"The second shares its first {self.tokens:,} of {self.lengths[1]:,} tokens with the first"
        reused += f" ({100 * self.share:.0f} %)"
        if not self.cause:
            return f"{reused}."
        where = [
            f"{text!r} (in {name})" if name else "nothing more"
            for text, name in zip(self.texts, self.segments, strict=True)
        ]
        return f"{reused}; then the first has {where[0]} and the second {where[1]}: {self.cause}."


@checked_arguments
def common_prefix(
    tokenizer: Any,
    first: Transcript | Sequence[Mapping[str, object]],
    second: Transcript | Sequence[Mapping[str, object]],
    *,
    generation_prompt: bool = False,
) -> CommonPrefix:
    """What the cache of the first conversation holds of the second, and why not more.

    Args:
        tokenizer: or a model that has one.
        first: whose cache there is.
        second: that is to be read next.
        generation_prompt: end both with the header of an answer, as an engine does.

    Raises:
        UserError: see `Transcript.tokens`.
    """
    chats = [chat if isinstance(chat, Transcript) else Transcript.from_messages(chat) for chat in (first, second)]
    reader: Any = getattr(tokenizer, "tokenizer", tokenizer)
    both = [chat.tokens(reader, generation_prompt) for chat in chats]
    shared = common_length(both[0].ids, both[1].ids)
    rests = [reader.decode(tokens.ids[shared : shared + SHOWN]) for tokens in both]
    next_tokens = [reader.decode(tokens.ids[shared : shared + 1]) for tokens in both]
    recut = common_length(*rests) >= min(map(len, next_tokens)) > 0
    return CommonPrefix(
        shared,
        (len(both[0]), len(both[1])),
        (_segment(both[0], shared), _segment(both[1], shared)),
        (rests[0][:SHOWN], rests[1][:SHOWN]),
        _cause(chats, both, shared, rests, recut, lambda chat: chat.tokens(reader, generation_prompt).ids),
    )


def _segment(tokens: Tokens, place: int) -> str | None:
    return tokens.segments[place] if place < len(tokens) else None


def _cause(
    chats: Sequence[Transcript],
    both: Sequence[Tokens],
    shared: int,
    rests: Sequence[str],
    recut: bool,
    ids: Callable[[Transcript], Sequence[int]],
) -> str:
    ended = [shared == len(tokens) for tokens in both]
    if any(ended):
        return "" if all(ended) else f"the {'first' if ended[0] else 'second'} ends there"
    segments = [tokens.segments[shared] for tokens in both]
    arguments = [_listed(chat.arguments) for chat in chats]
    written = [[_listed(message.given(typed=True)) for message in chat.messages] for chat in chats]
    # A message may differ in what the template does not write, such as the id of a call.
    parting = [
        next((index for index, message in enumerate(chat.messages) if message.segment == name), 0)
        for chat, name in zip(chats, segments, strict=True)
    ]
    place = max(common_length(*written), min(parting))
    before = [
        any(message.segment == name for message in chat.messages[:place])
        for chat, name in zip(chats, segments, strict=True)
    ]
    pair = [chat.messages[place] for chat in chats if place < len(chat.messages)]
    alike = len(pair) == 2 and (pair[0].role, pair[0].parts) == (pair[1].role, pair[1].parts)
    fields = [name for name in _differing(*pair) if _is_written(chats, place, name, ids)] if alike else []
    by_template = all(tokens.delimiters[shared] for tokens in both)
    if by_template and arguments[0] != arguments[1]:
        return _argument_cause(chats[0].arguments, chats[1].arguments)
    if ANSWER_HEADER in segments:
        return "the header that asks for an answer is not what the template writes before an answer that was given"
    if any(chat.hidden for chat in chats) and chats[0].messages == chats[1].messages:
        return "messages are hidden in one of them"
    if all(before) or segments == [PREAMBLE, PREAMBLE] or (alike and not fields):
        # One space that both begin with is no text that is cut otherwise; a long run of it is.
        return RECUT if recut and common_length(*rests) > SHOWN // 2 else _template_cause(chats, both, segments, rests)
    texts = [chat.messages[place].text if place < len(chat.messages) else "" for chat in chats]
    if recut and any(text and other.startswith(text) for text, other in (texts, texts[::-1])):
        return RECUT
    return _message_cause([chat.messages for chat in chats], written, place, fields)


def _differing(one: Message, other: Message) -> list[str]:
    return [
        name
        for name in {**one.fields, **other.fields}
        if _listed(one.fields.get(name)) != _listed(other.fields.get(name))
    ]


def _is_written(chats: Sequence[Transcript], place: int, name: str, ids: Callable[[Transcript], Sequence[int]]) -> bool:
    """Whether the template writes what this field of a message holds in the second conversation otherwise."""
    message, other = (chat.messages[place] for chat in chats)
    fields = {**message.fields, name: other.fields.get(name)}
    fields = {name: value for name, value in fields.items() if value is not None}
    messages = list(chats[0].messages)
    messages[place] = replace(message, fields=fields)
    try:
        return ids(replace(chats[0], messages=tuple(messages))) != ids(chats[0])
    except UserError:
        return True


def _template_cause(
    chats: Sequence[Transcript], both: Sequence[Tokens], segments: Sequence[str], rests: Sequence[str]
) -> str:
    """Why the template writes the same messages otherwise."""
    if any((name in tokens.dropped) != (name in both[0].dropped) for tokens in both for name in segments):
        return "the template drops the thoughts of earlier turns, once there is a later one"
    if len({chat.messages[0].role == "system" for chat in chats}) == 2:
        return "the template begins otherwise without a system message"
    return "the template writes the same message otherwise where other messages follow it"


def _argument_cause(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    name = next(name for name in {**first, **second} if _listed(first.get(name)) != _listed(second.get(name)))
    one, other = first.get(name), second.get(name)
    if name != "tools" or not one or not other:
        return f"the argument {name!r} of the template differs"
    if sorted(map(_sorted, one)) != sorted(map(_sorted, other)):
        return "the definitions of tools differ"
    moved = "keys" if [*map(_sorted, one)] == [*map(_sorted, other)] else "list"
    return f"the same tools are defined with their {moved} in another order"


def _message_cause(
    messages: Sequence[Sequence[Message]], written: Sequence[Sequence[str]], place: int, fields: Sequence[str]
) -> str:
    """Why the messages themselves differ, from this one on.

    Args:
        fields: that differ in a message of the same text.
    """
    rests = [kind[place:] for kind in written]
    left_out = [_left_out(*rests), _left_out(*rests[::-1])]
    if count := min(filter(None, left_out), default=0):
        whose, others = ("first", "second") if left_out[0] == count else ("second", "first")
        more = {1: f"message {place} of the {whose} is", 2: f"messages {place} and {place + 1} of the {whose} are"}
        several = f"messages {place} to {place + count - 1} of the {whose} are"
        return f"{more.get(count, several)} not in the {others}"
    one, other = (kind[place] for kind in messages)
    if one.role != other.role:
        return f"message {place} is of role {one.role!r} in the first and {other.role!r} in the second"
    whose = "the system message" if one.role == "system" else f"message {place}"
    if one.text != other.text:
        if one.text.split() == other.text.split():
            return f"{whose} has other white space"
        if _DATE.sub("", one.text) == _DATE.sub("", other.text):
            return f"a date or time in {whose} changed"
        return f"the text of {whose} was changed"
    name = fields[0]
    if _sorted(one.fields.get(name)) == _sorted(other.fields.get(name)):
        return f"keys in the calls of {whose} are in another order"
    return f"{name!r} of {whose} was changed"


def _left_out(messages: Sequence[str], others: Sequence[str]) -> int:
    """How many messages stand before those that the others begin with; 0 where these do not come."""
    if not others:
        return len(messages)
    for count in range(1, len(messages)):
        following = messages[count:]
        if common_length(following, others) >= min(1 if count == 1 else 2, len(following), len(others)):
            return count
    return 0


def _listed(value: object) -> str:
    """Plain data as text, in its order."""
    return json.dumps(value, default=repr)


def _sorted(value: object) -> str:
    return json.dumps(value, default=repr, sort_keys=True)
