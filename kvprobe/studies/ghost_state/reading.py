"""Texts of hidden digits, the ways to hide them, and what is left of them in each kind of memory.

A turn is hidden from attention alone, as an engine does that deletes its slots and keeps the states (*erased*); from
the states alone, which are folded without it; or from both. That is done *at once*, before anything else is read, or
*later*, when the talk after it was read in its view.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.states import state_of
from kvprobe.tasks.recall import (
    ANSWER,
    BASE,
    NOUNS,
    PAIRS,
    QUESTION,
    TALK,
    Digits,
    draw_digits,
    draw_others,
    draw_talk,
    recall_text,
    vocabulary,
)
from kvprobe.text.tokens import Tokens

When = Literal["at once", "later"]
AT_ONCE: When = "at once"
LATER: When = "later"
WHENS: tuple[When, ...] = (AT_ONCE, LATER)
IN_VIEW, ERASED, FOLDED, BOTH, TIMELESS, RESTART = (
    "in view", "attention alone", "states alone", "both", "both, decay dropped", "restart",
)  # fmt: skip
OF_STAND_IN, RIVALS = "states of a stand-in", "states of a stand-in, in view"
"""The states are those of a text with other digits: with the pairs hidden from attention, or in its view."""
STATE = "state"
LATER_WRITES = {"keys written later": "key", "values written later": "value", "inputs kept later": "conv"}
LATER_SLOTS = {"K of later slots": "K", "V of later slots": "V"}
OWN_SLOTS = {"its own K": "K", "its own V": "V"}
"""What a reader is given beside the state: what the last slots before the question wrote to it, or hold as K and V; and
K and V of the hidden turn itself."""
LAST = 4
"""Slots before the question that are read."""
WIDEST = 4096
"""Numbers of a state that are read; a wider one is projected at random, each head by itself."""


@dataclass(frozen=True)
class Texts:
    """Texts that differ in digits, talk and question.

    Attributes:
        own, other: their tokens before the answer, and those of stand-ins, whose digits are all others.
        without: their tokens without the pairs.
        digits, others: what belongs to each name, in the texts and the stand-ins.
        asked: the place that each text asks for.
        answering: the token of each digit as an answer.
    """

    own: list[Tokens]
    other: list[Tokens]
    without: list[Tokens]
    digits: Digits
    others: Digits
    asked: np.ndarray
    answering: tuple[int, ...]

    def rows(self, arm: str) -> list[Tokens]:
        """The tokens as they are read in an arm: without the pairs, the others stand where these were."""
        return self.without if arm in (TIMELESS, RESTART) else self.own

    @property
    def swapped(self) -> "Texts":
        """The stand-ins, whose stand-ins are these."""
        return replace(self, own=self.other, other=self.own, digits=self.others, others=self.digits)

    def __getitem__(self, rows: slice) -> "Texts":
        return Texts(**{name: of if name == "answering" else of[rows] for name, of in vars(self).items()})


def draw_texts(model: Model, count: int, pairs: int, distance: int, seed: int) -> Texts:
    """Random texts. Those of as many pairs have the same digits and questions at every distance.

    Raises:
        UserError: the model does not read each digit as one token.
    """
    rng = np.random.default_rng([seed, pairs])
    digits = draw_digits(rng, count, pairs)
    others, asked = draw_others(rng, digits), rng.integers(pairs, size=count)
    talk = draw_talk(np.random.default_rng([seed, pairs, distance]), count, distance)
    nouns = nouns_of(model)

    def read(some: Digits, stated: bool = True) -> list[Tokens]:
        texts = [
            recall_text(*row, stated=stated, nouns=nouns)
            for row in zip(some.tolist(), talk.tolist(), asked.tolist(), strict=True)
        ]
        return [row[: row.part(ANSWER).start] for row in model.tokens(texts)]

    alone = read(digits, stated=False)
    texts = Texts(read(digits), read(others), alone, digits, others, asked, digit_tokens(model, nouns))
    lengths = {len(row) for row in (*texts.own, *texts.other)}
    if len(lengths) > 1:
        raise UserError(
            f"{model.name} reads texts that differ in digits alone as {min(lengths)} to {max(lengths)} tokens; the "
            "ghost_state study needs a model that reads each digit as one token."
        )
    after, after_nothing = (row.ids[row.span(TALK).start :] for row in (texts.own[0], alone[0]))
    if after != after_nothing:
        raise UserError(
            f"The chat template of {model.name} writes a turn otherwise when the turn before it is gone, so that a "
            "restart would read another text; the ghost_state study cannot use it."
        )
    return texts


def trained(model: Model) -> bool:
    """Whether a model was trained on these texts, rather than on language."""
    return set(vocabulary()) <= set(model.tokenizer.get_vocab()) and len(model.tokenizer) < 2 * len(vocabulary())


def nouns_of(model: Model) -> list[str] | None:
    """What talk is made of: the nouns that this model reads as equally many tokens; None for one of these texts."""
    if trained(model):
        return None
    by_length: dict[int, list[str]] = {}
    for noun in NOUNS:
        by_length.setdefault(len(model.tokenizer.encode(f" {noun}", add_special_tokens=False)), []).append(noun)
    return max(by_length.values(), key=len)


def digit_tokens(model: Model, nouns: Sequence[str] | None) -> tuple[int, ...]:
    """The token that answers with each digit.

    Raises:
        UserError: a digit is no token of its own.
    """
    texts = [recall_text([digit], [0], 0, nouns=nouns) for digit in range(BASE)]
    rows = model.tokens(texts)
    answers = [row.part(ANSWER) for row in rows]
    ids = tuple(row.ids[answer.start] for row, answer in zip(rows, answers, strict=True))
    if len(set(ids)) < BASE or any(answer.stop - answer.start != 1 for answer in answers):
        raise UserError(f"{model.name} does not read each digit as one token; the ghost_state study cannot ask it.")
    return ids


def refuse_joined(model: Model) -> None:
    """Refuse a model whose attention and states are in one layer, so that neither can be hidden alone."""
    both = set(model.geometry.attending) & set(model.geometry.recurrent)
    if both:
        raise UserError(
            f"{model.name} attends and keeps a state in one layer ({min(both)}), so that a turn cannot be hidden from "
            "attention alone; give a model whose layers do one of the two."
        )


def arms_of(model: Model) -> list[str]:
    """The ways to hide a turn that differ in this model, and what they are compared with."""
    attends, recurs = bool(model.geometry.attending), bool(model.geometry.recurrent)
    of_states = [OF_STAND_IN, *([FOLDED, RIVALS] if attends else [])] if recurs else []
    return [IN_VIEW, ERASED, BOTH, TIMELESS, RESTART, *of_states]


def hide(model: Model, cache: KVCache, arm: str, donor: KVCache | None = None) -> KVCache:
    """A cache whose first turn is hidden in this way.

    Args:
        donor: of the stand-ins, for the arms that have their states.
    """
    attending, recurring = model.geometry.attending, model.geometry.recurrent
    if donor is not None and arm in (OF_STAND_IN, RIVALS):
        cache = cache.patch(donor, slots=range(cache.slots), layers=recurring)
    if arm in (ERASED, OF_STAND_IN) and attending:
        return cache.mask(PAIRS, layers=attending)
    if arm == FOLDED:
        return cache.mask(PAIRS, layers=recurring)
    if arm == TIMELESS:
        return cache.evict(PAIRS).reindex()
    return cache.mask(PAIRS) if arm == BOTH else cache


def caches(model: Model, texts: Texts, when: When, arms: Sequence[str]) -> dict[str, KVCache]:
    """What a question is read after, by the way in which the pairs were hidden."""

    def read(rows: Sequence[Tokens], first: str, last: str, after: KVCache | None = None) -> KVCache:
        cut = [row[0 if after is None else row.span(first).start : row.span(last).stop] for row in rows]
        return model.extend(after, cut)[0]

    until = PAIRS if when == AT_ONCE else TALK
    made: dict[str, KVCache] = {}
    if hiding := [arm for arm in arms if arm != RESTART]:
        whole = read(texts.own, PAIRS, until)
        donor = read(texts.other, PAIRS, until) if {OF_STAND_IN, RIVALS}.intersection(hiding) else None
        made = {arm: hide(model, whole, arm, donor) for arm in hiding}
    if when == AT_ONCE:
        made = {arm: read(texts.rows(arm), TALK, TALK, cache) for arm, cache in made.items()}
    return made | ({RESTART: read(texts.without, TALK, TALK)} if RESTART in arms else {})


def answers(model: Model, texts: Texts, cache: KVCache, arm: str) -> pd.DataFrame:
    """Per text: whether the answer is `right`, whether it `follows` the stand-in, and by how many nats the digit is
    likelier than the stand-in's (`margin`)."""
    questions = [row[row.span(QUESTION)] for row in texts.rows(arm)]
    logits = model.extend(cache, questions)[1][:, -1]
    scores = logits.double()[:, list(texts.answering)].log_softmax(-1).cpu().numpy()
    rows = np.arange(len(scores))
    own, other = (some[rows, texts.asked] for some in (texts.digits, texts.others))
    likeliest = scores.argmax(1)
    return pd.DataFrame(
        {
            "right": (likeliest == own).astype(float),
            "follows": (likeliest == other).astype(float),
            "margin": scores[rows, own] - scores[rows, other],
        }
    )


def parts_of(model: Model, arm: str) -> list[str]:
    """What readers are given of a cache in which the pairs were hidden in this way."""
    attends, recurs = model.geometry.attending, model.geometry.recurrent
    if arm == IN_VIEW:
        return [*OWN_SLOTS] if attends else []
    stored = model.geometry.parts[recurs[0]] if recurs else ()
    # What a convolution sees is in the keys and values that it makes, where there are some.
    writes = [part for part, name in LATER_WRITES.items() if name in stored and (name != "conv" or "key" not in stored)]
    return [*([STATE] if recurs else []), *writes, *(LATER_SLOTS if attends else ())]


def layers_of(model: Model, part: str) -> Sequence[int]:
    """The layers that store such a part."""
    return model.geometry.recurrent if part in (STATE, *LATER_WRITES) else model.geometry.attending


def vectors(model: Model, cache: KVCache, part: str) -> Float[Tensor, "layers texts numbers"]:
    """What each layer holds that stores such a part."""
    layers = layers_of(model, part)
    if part == STATE:
        return torch.stack([narrowed(state_of(model, cache, layer)).flatten(1) for layer in layers])
    name = (LATER_WRITES | LATER_SLOTS | OWN_SLOTS)[part]
    where = cache.ledger.in_segments([PAIRS])[0] if part in OWN_SLOTS else slice(cache.slots - LAST, cache.slots)
    return torch.stack([cache.layers[layer][name][:, :, where].flatten(1).float().cpu() for layer in layers])


def narrowed(state: Float[Tensor, "texts heads d_key d_value"]) -> Float[Tensor, "texts heads numbers"]:
    """The numbers of each head, or as many random projections of them as probes can be trained on."""
    numbers, most = state.flatten(2), WIDEST // state.shape[1]
    if numbers.shape[2] <= most:
        return numbers
    onto = torch.randn(numbers.shape[2], most, generator=torch.Generator().manual_seed(0))
    return numbers @ (onto / most**0.5)


def bytes_of(model: Model, cache: KVCache, part: str) -> int:
    """What one layer takes for it, of one text. A state is kept in float32."""
    layer = layers_of(model, part)[0]
    if part == STATE:
        return state_of(model, cache.rows([0]), layer).nbytes
    stored = cache.layers[layer][(LATER_WRITES | LATER_SLOTS | OWN_SLOTS)[part]]
    slots = cache.ledger.in_segments([PAIRS])[0].sum() if part in OWN_SLOTS else LAST
    return stored[0, :, 0].nbytes * int(slots)
