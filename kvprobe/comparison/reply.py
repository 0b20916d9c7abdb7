"""What a model replies under each of several caches, and how far each is from the first."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence, surprise
from kvprobe.text.tokens import Tokens, token_texts


@dataclass(frozen=True, repr=False)
class Reply(Brief):
    """What the model makes of the question with one cache.

    Attributes:
        arm: see `ARMS`.
        text: its own reply, the most probable token at each step.
        logprobs: in nats, of each token of the reply that it gives with everything in view.
        kl: mean over these tokens of how far its next-token distribution is from the one with everything in view, nats.
        slots: tokens that the question can attend to; under a policy, the mean over heads.
        nbytes: of the cache before the question; under a policy, of what each head keeps.
        kls: of each of these tokens, of which `kl` is the mean.
        tokens: of its own reply, as text; without a tokenizer there are none.
        own_logprobs: in nats, of each token of its own reply.
    """

    arm: str
    text: str
    logprobs: tuple[float, ...] = field(repr=False)
    kl: float
    slots: int
    nbytes: int
    kls: tuple[float, ...] = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    own_logprobs: tuple[float, ...] = field(repr=False)

    @property
    def logprob(self) -> float:
        """Mean over tokens."""
        return sum(self.logprobs) / len(self.logprobs)


@dataclass(frozen=True)
class FirstReply:
    """The reply that others are held against.

    Attributes:
        ids: its tokens.
        tokens: as text.
        logits: that each of them met.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    logits: Float[Tensor, "reply vocab"]


def replies_under(
    model: Model,
    caches: Mapping[str, KVCache],
    question: Tokens,
    first: FirstReply | None = None,
    *,
    max_new_tokens: int,
    priced: Collection[str] = (),
) -> tuple[FirstReply, dict[str, Reply]]:
    """The replies to one question, as rows of one batch.

    Args:
        caches: of one row, by arm.
        question: is read at the position that follows each of them.
        first: what the replies are held against; that of the first cache by default.
        priced: arms whose heads keep different slots or precisions, which are counted head by head.
    """
    rows = KVCache.join(list(caches.values()))
    prompts = [question.shifted(position) for position in entries(rows.ledger.following, int)]
    given = generate(model.lanes, prompts, rows, max_new_tokens=max_new_tokens)
    expected = given.tokens[0] if first is None else first.ids
    _, logits = model.extend(rows, [prompt.answered(expected) for prompt in prompts], logits=len(expected))
    if first is None:
        first = FirstReply(expected, token_texts(expected, model.tokenizer), logits[0])
    kl, _ = divergence(first.logits.expand_as(logits), logits)
    replies = {
        arm: Reply(
            arm,
            given.texts[row],
            tuple((-surprise(logits[row], expected)).tolist()),
            float(kl[row].mean()),
            round(float(cache.ledger.live.sum(-1, dtype=torch.float).mean()))
            if arm in priced
            else int(cache.ledger.live_somewhere.sum()),
            cache.footprint if arm in priced else cache.nbytes,
            tuple(kl[row].tolist()),
            token_texts(given.tokens[row], model.tokenizer),
            given.logprobs[row],
        )
        for row, (arm, cache) in enumerate(caches.items())
    }
    return first, replies
