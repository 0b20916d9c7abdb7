"""The ways to forget a message, each for many secrets at once, and what it makes the model read.

What does not depend on the secret is computed once: what stands before it, other text in its place and a window after
it, and the text that stays. Everything else is computed secret by secret, so that it is the same to the bit where
it does not depend on the secret.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.editing import erratum, match_attention, replace_text, splice, steer, train_eraser, zero
from kvprobe.inference.model import Model
from kvprobe.studies.forgetting.cases import TURN, Drawn
from kvprobe.studies.forgetting.replies import read_with, replies_to
from kvprobe.text.tokens import Tokens, common_length

NOTHING, MASK, EVICT, CLOSED, ZERO, STEERED, ERRATUM, OTHER, PLACED, RESTART = (
    "nothing",
    "mask",
    "evict",
    "re-index",
    "zero values",
    "steer",
    "erratum",
    "replace",
    "restart in place",
    "restart",
)
ALL = f"{OTHER} all"
MATCHED, ERASED = "match", "erase"
CLEAN = (ALL, PLACED, RESTART)
"""Ways after which nothing was computed with the message in view."""
BACKWARD = 3
"""How much more an eraser's training costs than reading its texts."""
LESSONS = ("What did I tell you a while ago?", "Could you help me plan a birthday party?")
"""Questions on whose replies an eraser is trained; the model is asked others."""
LESSON = 8
"""Tokens of their replies."""
INSTEAD = "This message was removed by the user."
"""What is put in a message's place."""
CORRECTION = "Please forget my message before the last one. Act as if I had never written it, and do not use it."


def window(slots: int) -> str:
    """The way in which other text is put in, and so many slots after it are read again."""
    return f"{OTHER} {slots}" if slots else OTHER


@dataclass(frozen=True)
class ForgettingSession:
    """A conversation in which many secrets were said, a row of the cache for each.

    Attributes:
        full: everything in view.
        steps: of the training of an eraser.
        away: for each layer that stores values, the way from the mean value of the message, over secrets and slots, to
            that of the text that may take its place.
    """

    model: Model
    drawn: Drawn
    full: KVCache
    steps: int
    away: Float[Tensor, "layers heads numbers"] | None = None

    @classmethod
    def of(cls, model: Model, drawn: Drawn, steps: int = 1) -> "ForgettingSession":
        """Read it: once up to where secrets differ, and from there on with each."""
        first = drawn.tokens[0]
        cut = min(common_length(first.ids, tokens.ids) for tokens in drawn.tokens[1:])
        before = model.prefill([first[:cut]])
        rows = [model.extend(before, [tokens[cut:]])[0] for tokens in drawn.tokens]
        session = cls(model, drawn, KVCache.join(rows), steps)
        return replace(session, away=session.towards_other())

    def row(self, number: int) -> "ForgettingSession":
        """With one secret alone."""
        return self.some([number])

    def some(self, rows: Sequence[int]) -> "ForgettingSession":
        """With these secrets alone."""
        return replace(self, full=self.full.rows([*rows]), drawn=self.drawn.some(rows))

    def read_otherwise(self, row: int) -> "ForgettingSession":
        """With one secret alone, read in two portions: what depends on it is rounded otherwise."""
        tokens = self.drawn.tokens[row]
        parts = tokens[: self.turn.stop], tokens[self.turn.stop :]
        full = self.model.extend(self.model.prefill([parts[0]]), [parts[1]])[0]
        return replace(self, full=full, drawn=self.drawn.some([row]))

    @property
    def turn(self) -> slice:
        """The slots of the message."""
        return self.drawn.tokens[0].span(TURN)

    def after(self, way: str) -> KVCache:
        """The retained slots: a row for each secret, or one for all of them, where no secret was read."""
        full = self.full
        match way:
            case "nothing":
                return full
            case "mask":
                return full.mask(TURN)
            case "evict":
                return full.evict(TURN)
            case "re-index":
                return full.evict(TURN).reindex()
            case "zero values":
                return zero(full, TURN)
            case "steer" if self.away is not None:
                return steer(full, self.away, TURN)
            case "erratum":
                return erratum(self.model, full, CORRECTION)
            case "restart in place":
                return self.read_anew(self.kept("gapped"))
            case "restart":
                return self.read_anew(self.kept("contiguous"))
            case _ if way.startswith(MATCHED):
                keep = int(way.removeprefix(MATCHED))
                rows = [full.rows([row]) for row in range(full.batch)]
                return KVCache.join([match_attention(self.model, row, TURN, keep=keep) for row in rows])
            case _ if way.startswith(ERASED):
                return self._erased(int(way.removeprefix(ERASED)))
            case _:
                return self._replaced(way.removeprefix(OTHER).strip() or "0")

    def read_anew(self, tokens: Tokens) -> KVCache:
        """The text that stays, from where the message stood: what is before it is kept, as engines do."""
        place = self.turn.start
        before = self.full.rows([0]).rewind(slots=place) if place else None
        return self.model.extend(before, [tokens[place:]])[0]

    def kept(self, mode: str, number: int = 0) -> Tokens:
        """The tokens that stay of the conversation with this secret."""
        case, words = self.drawn.case, self.drawn.secrets[number]
        positions = "gapped" if mode == "gapped" else "contiguous"
        return case.chat(words).without(TURN, mode=positions).tokens(self.model.tokenizer)

    def _erased(self, keep: int) -> KVCache:
        model, target = self.model, self.after(PLACED)
        texts = read_with(model, target, replies_to(model, target, LESSONS, LESSON))
        rows = [self.full.rows([row]) for row in range(self.full.batch)]
        return KVCache.join(
            [train_eraser(model, row, target, TURN, texts=texts, keep=keep, steps=self.steps) for row in rows]
        )

    def _replaced(self, slots: str) -> KVCache:
        one, size = self.full.rows([0]), int(slots) if slots.isdigit() else "all"
        edited = replace_text(self.model, one, TURN, INSTEAD, window=size)
        behind = self.rest - size if size != "all" else 0
        if behind <= 0:
            return edited
        clean = edited.rewind(slots=edited.slots - behind).fork(self.full.batch)
        return splice(clean, _last(self.full, behind))

    def edited(self, slots: int) -> KVCache:
        """Each secret put in the place of the one before it: the slots of its words and so many after them, read with
        it in view, then those that were read with the other."""
        first, *others = (tokens.ids for tokens in self.drawn.tokens)
        same_end = min(common_length(first[::-1], ids[::-1]) for ids in others)
        behind = max(same_end - slots, 0)
        if not behind:
            return self.full
        read = self.full.rewind(slots=self.full.slots - behind)
        return splice(read, _last(self.former, behind))

    @property
    def former(self) -> KVCache:
        """For each secret, what was read with the one before it."""
        return self.full.rows([(row - 1) % self.full.batch for row in range(self.full.batch)])

    @property
    def rest(self) -> int:
        """How many slots stand after the message's text, the end of its own turn included."""
        (text,) = self.drawn.tokens[0].text_runs(TURN)
        return len(self.drawn.tokens[0]) - text[-1] - 1

    def towards_other(self) -> Float[Tensor, "layers heads numbers"]:
        """See `away`."""
        other = self.after(ALL)
        text = other.ledger.in_segments([TURN])[0]
        pairs = [(to["V"], of["V"]) for to, of in zip(other.layers, self.full.layers, strict=True) if "V" in of]
        return torch.stack([to[0][:, text].mean(1) - of[:, :, self.turn].mean((0, 2)) for to, of in pairs]).float()


def _last(cache: KVCache, count: int) -> KVCache:
    """The last slots of a cache."""
    stay = torch.zeros_like(cache.ledger.padding)
    stay[:, -count:] = True
    return cache.take(*cache.ledger.order(stay))


def reread(session: ForgettingSession, way: str, cache: KVCache) -> tuple[int, int]:
    """How many tokens the model reads for a way, after how many slots; texts before the message are kept.

    Args:
        cache: what it leaves.
    """
    start, rest = session.turn.start, session.rest
    if way in (PLACED, RESTART):
        return cache.slots - start, start
    if way == ERRATUM:
        return cache.slots - session.full.slots, session.full.slots
    if way.startswith(MATCHED):
        return session.turn.stop - start, session.full.slots
    if way.startswith(ERASED):
        model = session.model
        texts = sum(len(model.prompts(session.full, question)[0]) + LESSON - 1 for question in LESSONS)
        return texts * session.steps, cache.slots
    if not way.startswith(OTHER):
        return 0, 0
    (text,) = session.drawn.tokens[0].text_runs(TURN)
    slots = way.removeprefix(OTHER).strip() or "0"
    again = min(int(slots), rest) if slots.isdigit() else rest
    return cache.slots - text[0] - rest + again, text[0]


def flops(model: Model, tokens: int, after: int) -> float:
    """Floating-point operations of reading so many tokens after so many slots, without the logits."""
    plain = model.lanes.plain
    embedding = plain.get_input_embeddings()
    tied = {id(one) for one in (embedding.weight, getattr(plain.get_output_embeddings(), "weight", None))}
    weights = sum(one.numel() for one in plain.parameters() if id(one) not in tied)
    seen = tokens * after + tokens * (tokens + 1) / 2
    shape = model.geometry
    return 2.0 * weights * tokens + 4.0 * len(shape.attending) * shape.n_heads * shape.d_head * seen
