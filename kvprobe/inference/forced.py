"""How likely a model finds an answer that it is given word by word."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


def asked_logits(
    model: Model, cache: KVCache, question: Tokens, answers: Sequence[Tokens]
) -> Float[Tensor, "rows answer_tokens vocab"]:
    """The distribution of each token of an answer after a question, the true ones before it given.

    Args:
        cache: of one row, which all answers share, or of as many.
        question: up to where the answers, of equal length, begin.
    """
    asked, logits = model.extend(cache, [question] * cache.batch)
    return forced_logits(model, asked, logits, answers)


def forced_logits(
    model: Model, cache: KVCache, logits: Float[Tensor, "#rows 1 vocab"], answers: Sequence[Tokens]
) -> Float[Tensor, "rows answer_tokens vocab"]:
    """The distribution of each token of an answer, the true ones before it given.

    Args:
        cache: of one row, which all answers share, or of as many.
        logits: after the cache's last token.
        answers: of equal length, where the cache goes on.
    """
    first = logits.expand(len(answers), -1, -1)
    # The last token of an answer is never fed: its probability is read off the token before it.
    given = [answer[:-1] for answer in answers]
    if not len(given[0]):
        return first
    _, following = model.extend(cache, given, logits=len(given[0]))
    return torch.cat([first, following], 1)
