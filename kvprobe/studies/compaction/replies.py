"""What is said after several caches, side by side: how likely each finds one reply, and what each answers."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import Generation, generate
from kvprobe.inference.model import Model
from kvprobe.text.tokens import GENERATED, Tokens


def reply_logits(model: Model, caches: KVCache, turn: Tokens, max_new_tokens: int) -> Float[Tensor, "rows reply vocab"]:
    """The logits that the tokens of one reply meet under each of several caches.

    The reply is the one that the first cache gives to `turn`, greedily.

    Args:
        caches: as rows; each goes on where its own positions end.
        turn: up to where the reply begins.
    """
    reference = caches.rows([0])
    reply = generate(model.lanes, onwards(reference, [turn]), reference, max_new_tokens=max_new_tokens).tokens[0]
    # The last token of the reply is never read: its probability is read off the token before it.
    forced = turn + Tokens.of(reply[:-1], GENERATED, turn.following)
    return model.extend(caches, onwards(caches, [forced]), logits=len(reply))[1]


def read_on(model: Model, caches: KVCache, tokens: Tokens) -> KVCache:
    """Every row of a cache, which then holds these tokens, too."""
    return model.extend(caches, onwards(caches, [tokens]))[0] if len(tokens) else caches


def answers_after(model: Model, caches: KVCache, questions: Sequence[Tokens], max_new_tokens: int) -> Generation:
    """Greedy answers to each question after each of several caches, as rows of one batch: the answers to all questions
    after the first cache, then those after the second …"""
    forked = caches.fork(len(questions))
    prompts = onwards(forked, [question for _ in range(caches.batch) for question in questions])
    return generate(model.lanes, prompts, forked, max_new_tokens=max_new_tokens)
