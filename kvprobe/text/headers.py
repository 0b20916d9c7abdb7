"""Where the turns of a chat template begin: what it writes before the first message, and the header of each turn.

What no message owns, such as the start token and a default system prompt, is the preamble. A header belongs to the turn
that it opens, also where the template folds a system message into the user's turn.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from jinja2 import TemplateError

from kvprobe.errors import UserError

Render = Callable[..., str]
"""Messages, and whether to add a generation prompt, to text."""

_PLACEHOLDER = "\ue000{}\ue001"  # private-use characters: no template contains or alters them


def placeholders(roles: Sequence[str]) -> list[dict[str, str]]:
    """Messages of these roles, each with a placeholder for its text."""
    return [{"role": role, "content": _PLACEHOLDER.format(index)} for index, role in enumerate(roles)]


def split_at_placeholders(rendered: str, count: int) -> list[str]:
    """What the template writes before, between and after `count` messages.

    Raises:
        UserError: a message is missing, or stands elsewhere.
    """
    literals: list[str] = []
    rest = rendered
    for index in range(count):
        literal, placeholder, rest = rest.partition(_PLACEHOLDER.format(index))
        if not placeholder:
            raise UserError(
                f"The chat template drops or reorders message {index}, so segments cannot be placed; "
                f"use roles that it knows, in the order that it expects (user and assistant in turn)."
            )
        literals.append(literal)
    return [*literals, rest]


class Headers:
    """The borders between turns, by rendering shorter conversations and others of the same roles."""

    def __init__(self, render: Render, start_token: str | None) -> None:
        self.render = render
        self.start_token = start_token or ""
        # In ChatML the token of this name opens each turn: as part of a header, it is not written for the conversation.
        if self._header("user").startswith(self.start_token) and not self._writes_start_token:
            self.start_token = ""

    def trailer(self, so_far: Sequence[Mapping[str, str]], between: str, role: str) -> str:
        """The part of the text `between` two messages that still belongs to the first.

        It is what the template writes after the first when it is the last message. Where the template cannot end there,
        it is what stands before the header that messages of this `role` have elsewhere, or else all.
        """
        after = self._literals(so_far)
        if after and between.startswith(after[-1]):
            return after[-1]
        header = self._header(role)
        return between[: between.rindex(header)] if header and header in between else between

    def opening(self, roles: Sequence[str], before: str, between: str) -> tuple[str, str, str]:
        """The text `before` the first message, in three pieces: the preamble, the header of a later user's turn that a
        system message is folded into, and the header of the first message.

        Args:
            between: the text from the first message to the second.
        """
        first = next((text for text in (self._default, self.start_token) if before.startswith(text)), "")
        preamble = self._before_user(before) if roles[0] == "user" else first
        rest = before[len(preamble) :]
        # Where each turn begins with the start token, the first turn has none of its own beside the preamble's.
        headers = (self._user, self._user.removeprefix(self.start_token).strip())
        user = next((header for header in headers if header and rest.startswith(header)), "")
        if roles[0] == "user" or "user" not in roles or not user or user in between:
            return preamble, "", rest
        own = rest[len(user) :].lstrip()
        return preamble, rest[: len(rest) - len(own)], own

    @cached_property
    def _user(self) -> str:
        return self._header("user")

    @cached_property
    def _default(self) -> str:
        """The preamble of a conversation that begins with a user's turn; with a default system prompt, where there is
        one."""
        literals = self._literals(placeholders(["user"]))
        return self._before_user(literals[0]) if literals else ""

    def _before_user(self, before: str) -> str:
        """What stands before the header of a user's turn that opens the conversation; a start token at least."""
        start = self.start_token if before.startswith(self.start_token) else ""
        return (self._user and before[: max(before.rfind(self._user), 0)]) or start

    def _header(self, role: str) -> str:
        """What opens a later turn of this role, without space around it; empty where it is not known."""
        roles = ["user", "assistant", "user", "assistant"]
        earlier = placeholders(roles[: 2 if role != "assistant" else 3])
        if not (after := self._literals(earlier)):
            return ""
        together = self._literals(placeholders([*roles[: len(earlier)], role]))
        if not together or not together[-2].startswith(after[-1]):
            return ""
        return together[-2][len(after[-1]) :].strip()

    @cached_property
    def _writes_start_token(self) -> bool:
        """Whether the template begins with the start token that it is given, whichever that is."""
        other = _PLACEHOLDER.format("start")
        return "".join(self._literals(placeholders(["user"]), bos_token=other)).startswith(other)

    def _literals(self, messages: Sequence[Mapping[str, str]], **variables: str) -> list[str]:
        """What the template writes around these messages; empty where it refuses them."""
        try:
            return split_at_placeholders(self.render(list(messages), **variables), len(messages))
        except (TemplateError, UserError):
            return []
