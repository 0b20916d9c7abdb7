"""Conversations in which a turn points to something that an earlier turn, the payload, has said.

    The coin is with Anna. The key is with Ben.       list        the payload
    We need the key.  (or: the second thing.)         pointer
    Good.                                             between
    Whom do we ask?  We ask …                         ask         → Ben

Each has two donors. In one the payload's order differs (`moved`): the pointer means the same person, who stands at
another place. In the other the people have changed places (`renamed`): the pointer means the other one, at the same
place. If the pointer's slots are exchanged for a donor's, an address leads to the person who stands at the donor's
place in the conversation's own payload, and content is the person whom the donor meant. So an address turns the answer
after `moved` alone, content after `renamed` alone, and slots that hold neither turn nothing: the question can look up
what the pointer's text says.

The memos of `kvprobe.tasks.ordinal` are cases of the same kind, of a model whose slots are known to hold one or the
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.ordinal import Memo, Reference, draw
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

FORMS = OBJECT, PLACE = "by its thing", "by its place"
"""What the pointer's text names: a thing, which the payload says too, or a place in the payload."""
KNOWN: dict[str, Reference] = {"located (pointer)": "pointer", "copied (payload)": "payload"}
"""Forms of memos."""
MOVED, RENAMED = "moved", "renamed"
PEOPLE = (
    "Anna", "Ben", "Carl", "Emma", "Frank", "Grace", "Henry", "Jack", "Kate", "Laura", "Mark", "Paul", "Sam", "Tom",
)  # fmt: skip
THINGS = ("coin", "key", "book", "lamp", "ring", "map", "cup", "hat", "ball", "rope", "pen", "box")
ORDER = ("first", "second")
LEAD = "We ask"
Turn = tuple[str, str, str]
"""Its name, what the user says, and the reply."""


@dataclass(frozen=True)
class PointerCase:
    """A conversation and its donors, all of one layout, up to the answer.

    Attributes:
        payload, pointer: segments.
        right: the token of the answer.
        wrong: that of the other one.
    """

    own: Tokens
    moved: Tokens
    renamed: Tokens
    payload: str
    pointer: str
    right: int
    wrong: int

    @property
    def cut(self) -> int:
        """Where the pointer ends."""
        return self.own.span(self.pointer).stop


def binding(model: Model, form: str, place: int, shots: int, rng: np.random.Generator) -> PointerCase:
    """A random conversation of a form that points to the first or the second of two people.

    Raises:
        UserError: the tokenizer splits a name or a thing.
    """
    if split := [word for word in (*PEOPLE, *THINGS, *ORDER) if len(_ids(model, word)) > 1]:
        raise UserError(f"{model.name} reads {split[0]!r} as several tokens, so that these conversations do not fit.")
    people, things = rng.permutation(PEOPLE).tolist(), rng.permutation(THINGS).tolist()
    before: list[Turn] = []
    for shot in range(1, shots + 1):
        some, meant = slice(2 * shot, 2 * shot + 2), int(rng.integers(2))
        turns = _turns(people[some], things[some], form, meant, f" {people[some][meant]}.")
        before += [(f"{name} of example {shot}", asked, reply) for name, asked, reply in turns]

    def read(people: Sequence[str], things: Sequence[str], place: int) -> Tokens:
        tokens = talk(*before, *_turns(people, things, form, place, "")).tokens(model.tokenizer)
        lead = _ids(model, LEAD.split()[-1])[-1]
        return tokens[: max(slot for slot, token in enumerate(tokens.ids) if token == lead) + 1]

    two, held = people[:2], things[:2]
    return PointerCase(
        read(two, held, place),
        read(two[::-1], held[::-1], 1 - place),
        read(two[::-1], held, place),
        "list",
        "pointer",
        _ids(model, two[place])[0],
        _ids(model, two[1 - place])[0],
    )


def _turns(
    people: Sequence[str], things: Sequence[str], form: str, place: int, answer: str
) -> list[tuple[str, str, str]]:
    listed = " ".join(f"The {thing} is with {person}." for thing, person in zip(things, people, strict=True))
    named = things[place] if form == OBJECT else f"{ORDER[place]} thing"
    return [
        ("list", listed, "Noted."),
        ("pointer", f"We need the {named}.", "Then we ask the one who has it."),
        ("between", "Good.", "Yes."),
        ("ask", "Whom do we ask?", f"{LEAD}{answer}"),
    ]


def shown(form: str) -> Transcript:
    """One conversation, for the page."""
    return talk(*_turns(PEOPLE[:2], THINGS[:2], form, 1, f" {PEOPLE[1]}."))


def _ids(model: Model, word: str) -> list[int]:
    return model.tokenizer(f" {word}", add_special_tokens=False).input_ids


def memo_case(model: Model, form: str, rng: np.random.Generator) -> PointerCase:
    """A random list with a summary that names one of its places."""
    memo = draw("held_out", rng, (KNOWN[form],))
    other = int(rng.choice([place for place in range(len(memo.things)) if place != memo.place]))
    renamed = memo.swapped(other)
    moved = Memo(renamed.things, other, memo.reference, memo.asked)
    tokens = [some.conversation().tokens(model.tokenizer) for some in (memo, moved, renamed)]
    right, wrong = model.tokenizer.convert_tokens_to_ids([memo.answer, renamed.answer])
    return PointerCase(tokens[0], tokens[1], tokens[2], "block", "summary", right, wrong)
