"""How likely a model finds an answer that it is given word by word."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True)
class ForcedReply:
    """A question with its reply, to be read after a cache, each token of the reply being predicted from those before.

    Attributes:
        suffix: the question and the reply but for its last token.
        kept: tokens of the reply.
        answer: the reply's last tokens, which answer the question.
    """

    suffix: Tokens
    kept: int
    answer: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Tokens, segment: str) -> "ForcedReply":
        """That of a conversation's last segment, whose reply has a part `answer`, and perhaps a part `lead` before it.

        Raises:
            UserError: there is no such segment or no part `answer`.
        """
        answer, start = tokens.part("answer"), tokens.span(segment).start
        reply = tokens.part("lead").start if "lead" in tokens.parts else answer.start
        return cls(tokens[start : answer.stop - 1], answer.stop - reply, tokens.ids[answer])


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


class ForcedAnswer(NamedTuple):
    """An answer that a model was given.

    Attributes:
        log_prob: of the whole answer, in nats.
        likeliest: whether each of its tokens is the likeliest after those before it.
    """

    log_prob: float
    likeliest: bool


def given_answer(model: Model, past: KVCache | None, prompt: Tokens, answer: Sequence[int]) -> ForcedAnswer:
    """How likely these tokens are, one after the other, where a prompt ends that is read after `past`."""
    read = prompt + Tokens.of(answer[:-1], "answer", prompt.following)
    logits = model.extend(past, [read], logits=len(answer))[1][0].float()
    tokens = torch.tensor(answer, device=logits.device)
    log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return ForcedAnswer(float(log_probs.double().sum()), bool((logits.argmax(-1) == tokens).all()))


def chances(model: Model, before: Tokens, endings: Sequence[Sequence[int]]) -> list[float]:
    """How likely each of some endings of a text is, as shares of all: by the first token in which they differ."""
    place = next(at for at, ids in enumerate(zip(*endings, strict=False)) if len(set(ids)) > 1)
    read = before + Tokens.of(endings[0][:place], "answer", before.following)
    logits = model.extend(None, [read])[1][0, -1].float()
    return [float(chance) for chance in logits[[ids[place] for ids in endings]].double().softmax(-1)]
