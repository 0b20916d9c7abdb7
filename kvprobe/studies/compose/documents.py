"""Pairs of documents, and what is asked of them: one of the first, one of the second, or both."""

from dataclasses import dataclass

import numpy as np

ROOMS = ("kitchen", "library", "office", "garden", "hall", "studio", "tower", "chapel")
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")
PEOPLE = ("Anna", "Bob", "Carl", "Emma", "Fred", "Hugo", "Ivan", "Julia", "Kate", "Leo", "Maria", "Nick", "Paul")
IN_FIRST, IN_SECOND, ACROSS, REFERENCE, JUDGED = "in the first", "in the second", "across", "reference", "judged"
"""Where the answer is: in one document; in both, to be put together by the question; in the first, to which a sentence
of the second refers; or in the judgement which of two answers is right."""
KINDS = (IN_FIRST, IN_SECOND, ACROSS, REFERENCE, JUDGED)
KNOWN = (
    ("The capital of France", "Paris", "Lyon"),
    ("The capital of Japan", "Tokyo", "Osaka"),
    ("The capital of Italy", "Rome", "Milan"),
    ("The capital of Egypt", "Cairo", "Luxor"),
    ("The capital of Canada", "Ottawa", "Toronto"),
    ("The capital of Australia", "Canberra", "Sydney"),
    ("The largest planet", "Jupiter", "Mars"),
    ("The planet nearest to the sun", "Mercury", "Neptune"),
    ("The largest ocean", "the Pacific", "the Arctic"),
    ("The longest river of Africa", "the Nile", "the Congo"),
    ("The author of Hamlet", "Shakespeare", "Dickens"),
    ("The painter of the Mona Lisa", "Leonardo da Vinci", "Picasso"),
    ("The chemical symbol of gold", "Au", "Ag"),
    ("The chemical symbol of iron", "Fe", "Ir"),
    ("The number of days in a week", "seven", "nine"),
    ("The number of legs of a spider", "eight", "six"),
    ("The colour of snow", "white", "purple"),
    ("The opposite of cold", "hot", "wet"),
    ("The first month of the year", "January", "March"),
    ("The animal that gives wool", "the sheep", "the pig"),
    ("The gas that plants take up", "carbon dioxide", "helium"),
    ("The force that makes apples fall", "gravity", "friction"),
    ("The metal that is liquid at room temperature", "mercury", "copper"),
    ("The language of Brazil", "Portuguese", "Dutch"),
)
"""Subjects, each with what is said of it and something wrong."""

ASKING = "\n\nQuestion: Complete the sentence.\nAnswer: "


@dataclass(frozen=True)
class AskedOf:
    """What is asked of two documents.

    Attributes:
        text: to be completed.
        options: words that could come next, of which the first is right.
    """

    kind: str
    text: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class TwoDocuments:
    """Two documents and what is asked of them."""

    first: str
    second: str
    asked: tuple[AskedOf, ...]


def pairs(sample: int, facts: int, seed: int) -> tuple[TwoDocuments, TwoDocuments]:
    """A house with its people, of so many rooms, and two answers to be judged."""
    rng = np.random.default_rng((seed, sample))
    rooms, colours, people = (
        [words[place] for place in rng.permutation(len(words))[:facts]] for words in (ROOMS, COLOURS, PEOPLE)
    )
    return _house(rng, rooms, colours, people), _answers(sample)


def _house(rng: np.random.Generator, rooms: list[str], colours: list[str], people: list[str]) -> TwoDocuments:
    painted = " ".join(f"The {room} is painted {colour}." for room, colour in zip(rooms, colours, strict=True))
    places = rng.permutation(len(rooms)).tolist()
    sleeping = " ".join(f"{person} sleeps in the {rooms[place]}." for person, place in zip(people, places, strict=True))
    asked, liked, owner = rng.integers(len(rooms), size=3).tolist()

    def first(right: str, words: tuple[str, ...]) -> tuple[str, ...]:
        return (right, *(word for word in words if word != right))

    return TwoDocuments(
        f"This is about the house. It was built long ago, and its rooms have colours of their own. {painted} The roof "
        "was mended last spring.",
        f"\n\nThis is about the people. They moved in one after another and like it there. {sleeping} {people[owner]} "
        f"has a boat, which is painted in the colour of the {rooms[liked]}. They all meet on Sundays.",
        (
            AskedOf(IN_FIRST, f"{ASKING}The {rooms[asked]} is painted", first(colours[asked], COLOURS)),
            AskedOf(IN_SECOND, f"{ASKING}{people[asked]} sleeps in the", first(rooms[places[asked]], ROOMS)),
            AskedOf(
                ACROSS,
                f"{ASKING}The room in which {people[asked]} sleeps is painted",
                first(colours[places[asked]], COLOURS),
            ),
            AskedOf(REFERENCE, f"{ASKING}The boat of {people[owner]} is painted", first(colours[liked], COLOURS)),
        ),
    )


def second_is_right(sample: int) -> bool:
    """Whether the second of the two answers to be judged is the true one."""
    return (sample + sample // len(KNOWN)) % 2 == 1


def _answers(sample: int) -> TwoDocuments:
    subject, right, wrong = KNOWN[sample % len(KNOWN)]
    second = second_is_right(sample)
    said = (wrong, right) if second else (right, wrong)
    written = [
        f"Answer {letter}. {subject} is {word}. I am sure of that, because I looked it up and asked a friend."
        for letter, word in zip("AB", said, strict=True)
    ]
    options = ("B", "A") if second else ("A", "B")
    judged = AskedOf(JUDGED, "\n\nOf these two answers, the one that is true is answer", options)
    return TwoDocuments(written[0], f"\n\n{written[1]}", (judged,))
