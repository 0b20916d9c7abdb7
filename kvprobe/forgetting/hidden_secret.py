"""A conversation that is to forget something, and the same conversation with other secrets."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from kvprobe.arguments import check_fields
from kvprobe.brief import Brief
from kvprobe.checks import is_mapping
from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.messages import Message, Part
from kvprobe.text.transcript import Transcript

FEWEST_SECRETS = 8
"""Secrets below which nothing can be said."""
_TRIES = 50
"""Secrets that are drawn for each one that is wanted, where a tokenizer joins digits."""


@dataclass(frozen=True, repr=False)
class HiddenSecret(Brief):
    """A conversation and what is to be forgotten of it.

    Attributes:
        chat: the conversation, with everything in it.
        hide: the segments to forget.
        secret: a text in these and nowhere else, that others can take the place of; also in what a template reads
            beside the text, such as a call of a tool.

    Raises:
        UserError: there is no such segment, none stays, or the secret is not in hidden text, or in text that stays.
    """

    chat: Transcript
    hide: tuple[str, ...]
    secret: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.hide:
            raise UserError(
                f"A hidden secret needs hide, segments of {', '.join(self.chat.segments[:8])}; give at least one."
            )
        for name in self.hide:
            if name not in self.chat.segments:
                raise UserError(unknown("segment", name, self.chat.segments))
        if set(self.hide) >= set(self.chat.segments):
            raise UserError("All segments are to be hidden, so nothing stays that could know of them; hide fewer.")
        if not self.secret.strip():
            raise UserError("The secret is empty; give the text that is to be forgotten, such as a code or a name.")
        if _holds(self.chat.arguments, self.secret):
            raise UserError(
                "The secret also stands in what the chat template is given beside the messages (tools, documents), "
                "which stays; take it out of there."
            )
        said = {
            message.segment
            for message in self.chat.messages
            if self.secret in message.text or _holds(message.fields, self.secret)
        }
        if stays := sorted(said - set(self.hide)):
            raise UserError(
                f"The secret also stands in {stays[0]!r}, which stays; hide that segment too, or nothing is forgotten."
            )
        if not said:
            raise UserError(f"The secret does not stand in {', '.join(self.hide)}; give a text that is said there.")

    def _facts(self) -> Iterable[str]:
        yield repr(self.chat)
        yield f"forgets {', '.join(self.hide)}"
        yield f"a secret of {len(self.secret)} characters"

    def said(self, secret: str) -> Transcript:
        """The conversation with another secret in the place of its own."""
        return replace(self.chat, messages=tuple(self._with(message, secret) for message in self.chat.messages))

    def _with(self, message: Message, secret: str) -> Message:
        if message.segment not in self.hide:
            return message
        if _holds(message.fields, self.secret):
            message = replace(message, fields=_exchanged(message.fields, self.secret, secret))
        if self.secret not in message.text:
            return message
        within = sum(part.text.count(self.secret) for part in message.parts)
        if within < message.text.count(self.secret):  # it runs over a border of parts
            return replace(message, parts=(Part(message.text.replace(self.secret, secret)),))
        parts = tuple(replace(part, text=part.text.replace(self.secret, secret)) for part in message.parts)
        return replace(message, parts=parts)

    def secrets(
        self, tokenizer: Tokenizer, count: int, rng: np.random.Generator, others: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """The secret, and others of as many tokens, so that every later token stands where it stood; no two of the same
        tokens.

        Args:
            others: to choose from; by default each digit of the secret is drawn anew.

        Raises:
            UserError: the secret has no digit and no others were given, the model never reads it, or too few take as
                many tokens.
        """
        first, own = tuple(self.chat.tokens(tokenizer).ids), self.secret
        if not others and not re.search(r"\d", own):
            raise UserError(
                "The secret has no digit that could be drawn anew; give others (--others), at least "
                f"{FEWEST_SECRETS - 1} texts that could have been said in its place."
            )
        read, tried = {first: own}, {own}
        for drawn in others or (_redrawn(own, rng) for _ in range(_TRIES * count)):
            if len(read) >= count:
                break
            if drawn not in tried and len(ids := tuple(self.said(drawn).tokens(tokenizer).ids)) == len(first):
                read.setdefault(ids, drawn)
                tried.add(drawn)
        if len(read) == 1 and len(tried) > 1:
            raise UserError(
                "The model reads the same tokens whatever the secret is: the chat template leaves out where it stands, "
                "or the tokenizer does not know it; hide what the model reads."
            )
        if len(read) < FEWEST_SECRETS:
            raise UserError(
                f"Only {len(read)} secrets, with its own, take as many tokens in this conversation; at least "
                f"{FEWEST_SECRETS} are needed, so give more others of this length."
            )
        return tuple(read.values())


def _holds(value: object, secret: str) -> bool:
    """Whether a text or number somewhere in plain data holds the secret, names of fields included."""
    if is_mapping(value):
        return any(_holds(name, secret) or _holds(inner, secret) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return any(_holds(inner, secret) for inner in cast(Sequence[object], value))
    return isinstance(value, str | int | float) and secret in str(value)


def _exchanged(value: Any, secret: str, other: str) -> Any:
    """Plain data with another secret in the place of one; a number stays a number where it still is one."""
    if is_mapping(value):
        return {_exchanged(name, secret, other): _exchanged(inner, secret, other) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exchanged(inner, secret, other) for inner in cast(Sequence[object], value)]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or secret not in str(value):
        return value
    changed = str(value).replace(secret, other)
    try:
        return changed if isinstance(value, str) else type(value)(changed)
    except ValueError:
        return changed


def _redrawn(secret: str, rng: np.random.Generator) -> str:
    """The text with other digits."""
    return re.sub(r"\d", lambda _: str(rng.integers(10)), secret)


def up_to(chat: Transcript, segment: str) -> Transcript:
    """The conversation up to the end of this segment."""
    last = max(place for place, message in enumerate(chat.messages) if message.segment == segment)
    return replace(chat, messages=chat.messages[: last + 1])
