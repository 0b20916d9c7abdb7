"""What the hidden turn of the passcode conversations can hold: a code, a name, a topic or a sentiment.

For a code the turn is that of `kvprobe.tasks.passcode`. For the other kinds the turn has one fixed code and one more
sentence, which holds the secret and which no later turn repeats; T3 then asks for the secret. The label of a name is
its first part and the label of a word is its category, so that each label has many texts. The texts recur between
conversations: a probe may recognise a topic by its words. All texts of a kind take equally many tokens, so that no
label shifts the tokens after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle

import numpy as np

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.designs import Design, Target
from kvprobe.tasks.passcode import CODE, CODE_LENGTH, Context, Encoder, contexts, conversation, draw_codes

KINDS = ("code", "name", "topic", "sentiment")


@dataclass(frozen=True)
class Secret:
    """One kind of hidden thing.

    Attributes:
        label_of: the class of each text; empty for codes, whose labels are their digits.
        contexts: conversations with `{code}` in place of the text.
    """

    target: Target
    label_of: Mapping[str, int]
    contexts: tuple[Context, ...]

    def labels(self, text: str) -> tuple[int, ...]:
        """Class numbers of a text, one per place of the target."""
        return (self.label_of[text],) if self.label_of else tuple(map(int, text))

    def draw(self, contexts: int, per_context: int, rng: np.random.Generator, encode: Encoder) -> list[list[str]]:
        """Random texts for each of so many contexts, none twice in a context, all with equally many tokens.

        Raises:
            UserError: there are not so many different texts.
        """
        if not self.label_of:
            codes = draw_codes(contexts * per_context, rng, encode)
            return [codes[first : first + per_context] for first in range(0, len(codes), per_context)]
        lengths = {text: len(encode(" " + text, add_special_tokens=False)["input_ids"]) for text in self.label_of}
        counts = list(lengths.values())
        common = max(set(counts), key=counts.count)
        pool = [text for text, length in lengths.items() if length == common]
        if per_context > len(pool):
            raise UserError(
                f"{per_context} different texts of kind {self.target.name!r} were asked for in each context, but with "
                f"this tokenizer only {len(pool)} have {common} tokens; ask for fewer."
            )
        return [[pool[index] for index in rng.permutation(len(pool))[:per_context]] for _ in range(contexts)]

    def design(self, contexts: int, per_context: int, rng: np.random.Generator, encode: Encoder) -> Design:
        """The first so many contexts, each with its own random texts."""
        chosen = self.contexts[:contexts]
        made = {context.id: partial(conversation, context) for context in chosen}
        texts = self.draw(len(chosen), per_context, rng, encode)
        return Design.crossed(made, texts, self.labels, self.target)


@cache
def secret(kind: str) -> Secret:
    """What is hidden, by its kind.

    Raises:
        UserError: there is no such kind.
    """
    if kind not in KINDS:
        raise UserError(unknown("kind of secret", kind, KINDS))
    if kind == "code":
        places = tuple(f"digit {place + 1}" for place in range(CODE_LENGTH))
        return Secret(replace(CODE, places=places), {}, contexts())
    entry = shipped_entries("tasks/secrets")[kind]
    classes = entry["classes"]
    if kind == "name":
        classes = {first: [f"{first} {last}" for last in entry["surnames"]] for first in classes}
    label_of = {text: number for number, texts in enumerate(classes.values()) for text in texts}
    phrasings = entry["tellings"]
    phrased = tuple(
        replace(
            context,
            secret_user=f"{context.secret_user.replace('{code}', _fixed_code(index))} {phrasing['said']}",
            question=phrasing["question"],
            answer=phrasing["answer"],
        )
        for index, (context, phrasing) in enumerate(zip(contexts(), cycle(phrasings), strict=False))
    )
    return Secret(Target(kind, tuple(classes)), label_of, phrased)


def _fixed_code(index: int) -> str:
    """The code of the context with this number, the same in every run."""
    return f"{(index * 7919 + 31415) % 10**CODE_LENGTH:0{CODE_LENGTH}d}"
