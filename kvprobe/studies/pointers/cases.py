"""Conversations in which a turn points to something that an earlier turn, the payload, has said.

    The coin is with Anna. The key is with Ben. Now the sky is clear.   list        the payload
    We need the key.                                                    pointer
    Good.                                                               between
    Whom do we ask?  We ask …                                           ask         → Ben

Each has donors, of one layout with it:

- `moved`: the people of its list are named in another order. The pointer means the same person, at another place.
- `shifted`: the sentence about the sky is at the other end of the list. The pointer means the same person, at the same
  place in the order and at other positions: those where `moved` has that person.
- `renamed`: the people have changed places. The pointer means the other one, at the same place.

If the pointer's slots are exchanged for a donor's, an address leads to the person who stands at the donor's place in
the conversation's own payload, and content is the person whom the donor meant. So an address turns the answer after
`moved` (and after `shifted`, if it is a position), content after `renamed` alone, and slots that hold neither turn
nothing: the question can look up what the pointer's text says.

A pointer can also name a place ("We need the second thing"): its text says what an address is. The memos of
`kvprobe.tasks.ordinal` are cases of the same kind, of a model whose slots are known to hold one or the other. Neither
has the sentence about the sky, or `shifted`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
MOVED, SHIFTED, RENAMED = "moved", "shifted", "renamed"
PEOPLE = (
    "Anna", "Ben", "Carl", "Emma", "Frank", "Grace", "Henry", "Jack", "Kate", "Laura", "Mark", "Paul", "Sam", "Tom",
)  # fmt: skip
THINGS = ("coin", "key", "book", "lamp", "ring", "map", "cup", "hat", "ball", "rope", "pen", "box")
ORDER = ("first", "second")
WORDINGS = (("The {} is with {}.", "We need the {}."), ("The {} belongs to {}.", "Please bring the {}."))
"""An entry of the list, and the pointer."""
SKY = "Now the sky is clear."
"""As many tokens as an entry."""
LEAD = "We ask"
Sky = Literal["before", "after", "nowhere"]
Turn = tuple[str, str, str]
"""Its name, what the user says, and the reply."""


@dataclass(frozen=True)
class PointerCase:
    """A conversation and its donors, all of one layout, up to the answer.

    Attributes:
        donors: by name.
        payload, pointer: segments.
        right: the token of the answer.
        wrong: that of the other one.
    """

    own: Tokens
    donors: Mapping[str, Tokens]
    payload: str
    pointer: str
    right: int
    wrong: int

    @property
    def cut(self) -> int:
        """Where the pointer ends."""
        return self.own.span(self.pointer).stop


@dataclass(frozen=True)
class PointerTalk:
    """One conversation, without its answer: who has what, in which order, and who is meant.

    Attributes:
        entries: thing and person of each place.
        place: that of the person who is meant, from 0.
        sky: where the sentence about the sky stands.
        wording: one of `WORDINGS`.
    """

    entries: Sequence[tuple[str, str]]
    place: int
    sky: Sky
    wording: int

    def turns(self, form: str, answer: str = "") -> list[Turn]:
        entry, pointer = WORDINGS[self.wording]
        before, after = [SKY] * (self.sky == "before"), [SKY] * (self.sky == "after")
        listed = [*before, *(entry.format(*some) for some in self.entries), *after]
        named = self.entries[self.place][0] if form == OBJECT else f"{ORDER[self.place]} thing"
        return [
            ("list", " ".join(listed), "Noted."),
            ("pointer", pointer.format(named), "Then we ask the one who has it."),
            ("between", "Good.", "Yes."),
            ("ask", "Whom do we ask?", f"{LEAD}{answer}"),
        ]


def binding(model: Model, form: str, place: int, shots: int, rng: np.random.Generator) -> PointerCase:
    """A random conversation of a form that points to the first or the second of two people.

    Raises:
        UserError: the tokenizer splits a name or a thing, or the sentence about the sky is not as long as an entry.
    """
    if split := [word for word in (*PEOPLE, *THINGS, *ORDER) if len(_ids(model, word)) > 1]:
        raise UserError(f"{model.name} reads {split[0]!r} as several tokens, so that these conversations do not fit.")
    ends: tuple[Sky, Sky] = ("before", "after") if form == OBJECT else ("nowhere", "nowhere")
    if any(len(_ids(model, entry.format("key", "Ben"))) != len(_ids(model, SKY)) for entry, _ in WORDINGS):
        raise UserError(
            f"{model.name} reads {SKY!r} as more or fewer tokens than an entry of the list, so these conversations do "
            "not fit."
        )
    wording = int(rng.integers(len(WORDINGS)))
    people, things = rng.permutation(PEOPLE).tolist(), rng.permutation(THINGS).tolist()
    pairs = [list(zip(things[at : at + 2], people[at : at + 2], strict=True)) for at in range(0, 2 * shots + 2, 2)]
    before: list[Turn] = []
    for shot, entries in enumerate(pairs[1:], start=1):
        example = PointerTalk(entries, int(rng.integers(2)), ends[int(rng.integers(2))], wording)
        turns = example.turns(form, f" {entries[example.place][1]}.")
        before += [(f"{name} of example {shot}", asked, reply) for name, asked, reply in turns]

    def read(last: PointerTalk) -> Tokens:
        tokens = talk(*before, *last.turns(form)).tokens(model.tokenizer)
        lead = _ids(model, LEAD.split()[-1])[-1]
        return tokens[: max(slot for slot, token in enumerate(tokens.ids) if token == lead) + 1]

    entries, (sky, elsewhere) = pairs[0], ends[:: -1 if place == 0 else 1]  # see `shifted`
    (one, anna), (other, ben) = entries
    own = read(PointerTalk(entries, place, sky, wording))
    donors = {
        MOVED: read(PointerTalk(entries[::-1], 1 - place, sky, wording)),
        RENAMED: read(PointerTalk([(one, ben), (other, anna)], place, sky, wording)),
    }
    if form == OBJECT:
        donors[SHIFTED] = read(PointerTalk(entries, place, elsewhere, wording))
    right, wrong = (_ids(model, entries[at][1])[0] for at in (place, 1 - place))
    return PointerCase(own, donors, "list", "pointer", right, wrong)


def shown(form: str) -> Transcript:
    """One conversation, for the page."""
    entries = list(zip(THINGS[:2], PEOPLE[:2], strict=True))
    return talk(*PointerTalk(entries, 1, "before" if form == OBJECT else "nowhere", 0).turns(form, f" {PEOPLE[1]}."))


def _ids(model: Model, word: str) -> list[int]:
    return model.tokenizer(f" {word}", add_special_tokens=False).input_ids


def memo_case(model: Model, form: str, rng: np.random.Generator) -> PointerCase:
    """A random list with a summary that names one of its places."""
    memo = draw("held_out", rng, (KNOWN[form],))
    other = int(rng.choice([place for place in range(len(memo.things)) if place != memo.place]))
    renamed = memo.swapped(other)
    donors = {MOVED: Memo(renamed.things, other, memo.reference, memo.asked), RENAMED: renamed}
    own, *read = (some.conversation().tokens(model.tokenizer) for some in (memo, *donors.values()))
    right, wrong = model.tokenizer.convert_tokens_to_ids([memo.answer, renamed.answer])
    return PointerCase(own, dict(zip(donors, read, strict=True)), "block", "summary", right, wrong)
