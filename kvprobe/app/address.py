"""The address of a state: a conversation, a question, and what is done to the cache, in order. It is untrusted input.

An address is plain data, so it fits into the fragment of a link, and a state depends on nothing else.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvprobe.arguments import check_fields
from kvprobe.brief import cut
from kvprobe.errors import UserError
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.names import unknown
from kvprobe.plain_data import Limits, filled
from kvprobe.policies.written import as_policy
from kvprobe.text.transcript import Transcript

Removal = Literal["mask", "evict", "re-index"]
EditKind = Literal["mask", "evict", "re-index", "restart", "compact", "patch", "damage", "quantise", "policy"]
LIMITS = Limits(text=20_000, entries=64)
MOST_NEW = 64
"""Tokens of a reply."""
WHOLE_CACHE, MESSAGES, ANYWHERE = ("quantise", "policy"), ("restart",), ("damage",)
"""Edits that act on the whole cache, on whole messages alone, and on the whole cache where nothing is chosen."""
OFFERED = ("SnapKV(50%)", "H2O(50%)", "SinkWindow(4, 32)", "TOVA(50%)", "RandomEviction(50%, seed=0)")
"""Policies that the page suggests."""


@dataclass(frozen=True)
class Edit:
    """One thing that is done to the cache.

    Attributes:
        kind: `mask`, `evict`, `re-index` (evict, and close the gap), `restart` (read the rest anew without these
            segments), `compact` (the model writes a summary, then they go), `patch` (K and V of the same conversation
            with other text in one message), `damage`, `quantise` or a `policy`.
        segments: that it acts on.
        slots: or the first slot and the one after the last, as the whole conversation counts them.
        fault: of `damage`, its name in the catalogue of faults.
        rate: of `damage`, the share of slots that is struck.
        seed: of `damage`, for its random draws.
        bits: of `quantise`.
        policy: its text, such as "SnapKV(50%)".
        text: of `compact`, what the user says to ask for the summary; empty for the usual request. Of `patch`, what
            the other message says, in as many tokens.
        of: of `patch`, the segment of this message.
        then: of `compact`, how what was summed up goes.
    """

    kind: EditKind
    segments: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    fault: str = ""
    rate: float = 1.0
    seed: int = 0
    bits: int = 4
    policy: str = ""
    text: str = ""
    of: str = ""
    then: Removal = "evict"

    def __post_init__(self) -> None:
        check_fields(self)
        chosen = bool(self.segments) + bool(self.slots)
        if self.kind in WHOLE_CACHE and chosen:
            raise UserError(f"{self.kind} acts on the whole cache; choose no segments or slots.")
        if self.kind not in WHOLE_CACHE and chosen != 1 and (chosen or self.kind not in ANYWHERE):
            raise UserError(f"{self.kind} needs segments, or a run of slots; choose one of the two.")
        if self.slots and (len(self.slots) != 2 or not 0 <= self.slots[0] < self.slots[1]):
            raise UserError(f"slots is {list(self.slots)}; give the first slot and the one after the last.")
        if self.kind in MESSAGES and self.slots:
            raise UserError("A restart reads whole messages again; choose messages, or evict the slots.")
        if self.kind == "damage" and self.fault not in CATALOGUE:
            raise UserError(unknown("fault", self.fault, CATALOGUE))
        if not 0 <= self.rate <= 1:
            raise UserError(f"rate is {self.rate}; give a share from 0 to 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; give a whole number from 0 to {2**32 - 1}.")
        if not 1 <= self.bits <= 8:
            raise UserError(f"bits is {self.bits}; give 1 to 8.")
        if self.kind == "patch" and not (self.of and self.text.strip()):
            raise UserError("patch needs the message that says something else (of), and what it says (text).")
        if self.kind == "policy":
            as_policy(self.policy)

    def __str__(self) -> str:
        where = ", ".join(self.segments) or (f"slots {self.slots[0]}–{self.slots[1] - 1}" if self.slots else "")
        how = {
            "damage": f"{CATALOGUE[self.fault].label} at {100 * self.rate:g} %" if self.fault in CATALOGUE else "",
            "quantise": f"{self.bits} bits",
            "policy": self.policy,
            "compact": f"({self.then})",
            "patch": f"from {self.of} “{cut(self.text, 40)}” into",
        }.get(self.kind, "")
        return " ".join(filter(None, (self.kind if self.kind != "policy" else "", how, where)))


@dataclass(frozen=True)
class SaidMessage:
    """A message of the conversation."""

    role: str
    content: str
    segment: str = ""


@dataclass(frozen=True)
class Address:
    """Where a state is.

    Attributes:
        messages: the conversation; a message without a segment is `m0`, `m1` …
        ask: the user's next message.
        edits: in order.
        new: the most tokens of a reply.
    """

    messages: tuple[SaidMessage, ...]
    ask: str
    edits: tuple[Edit, ...] = field(default=())
    new: int = 24

    def __post_init__(self) -> None:
        if not self.ask.strip():
            raise UserError("The question is empty; write the user's next message.")
        if not 1 <= self.new <= MOST_NEW:
            raise UserError(f"new is {self.new}; give 1 to {MOST_NEW} tokens.")

    @property
    def names(self) -> list[str]:
        """The segments of the messages, one each."""
        return [message.segment or f"m{number}" for number, message in enumerate(self.messages)]

    @property
    def chat(self) -> Transcript:
        """The conversation.

        Raises:
            UserError: see `Transcript.from_messages`.
        """
        said = [{"role": message.role, "content": message.content} for message in self.messages]
        return Transcript.from_messages(said, self.names)

    @staticmethod
    def of_chat(chat: Transcript, ask: str) -> "Address":
        """The address of a conversation to which nothing was done.

        Raises:
            UserError: it has more than texts: calls of tools, thoughts, or arguments of the template.
        """
        if chat.arguments or any(message.fields or not message.parts for message in chat.messages):
            raise UserError(
                "The page shows conversations of plain messages, and this one has calls of tools, thoughts or settings "
                "of the template; give one without, or use kv.compare."
            )
        messages = tuple(SaidMessage(message.role, message.text, message.segment) for message in chat.messages)
        return Address(messages, ask)


def address_of(content: object) -> Address:
    """The address that plain data holds.

    Raises:
        UserError: a name is unknown, a value is of another type, too long or out of bounds.
    """
    return filled(Address, content, "the address", LIMITS)
