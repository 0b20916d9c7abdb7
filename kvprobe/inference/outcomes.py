"""What a model says under one cache, compared with what it says under another."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def divergence(
    reference: Float[Tensor, "*rows vocab"], logits: Float[Tensor, "*rows vocab"]
) -> tuple[Float[Tensor, "*rows"], Bool[Tensor, "*rows"]]:
    """KL(reference ‖ other) in nats, and whether the most likely token is the same, at each place."""
    scores, others = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    # Rounding can leave a KL of zero a hair below it.
    return relative_entropy(scores, others).clamp(min=0), scores.argmax(-1) == others.argmax(-1)


def relative_entropy(
    reference: Float[Tensor, "*rows vocab"], other: Float[Tensor, "*rows vocab"]
) -> Float[Tensor, "*rows"]:
    """KL(reference ‖ other) in nats of two log-probabilities; rounding can leave a KL of zero slightly below zero."""
    return (reference.exp() * (reference - other)).sum(-1)


def use_measurements(
    logits: Sequence[Float[Tensor, "rows code_tokens vocab"]],
    codes: Int[Tensor, "codes code_tokens"],
    mine: Sequence[int],
) -> dict[str, Tensor]:
    """How well each arm knows the true code, rows first; the first arm is the full context.

    A cache may make some digits likelier whatever the code is, and so raise the log-probability of the true one too.
    The margin over the other codes is free of that: without knowledge of the code its mean is zero.

    Returns:
        Per row, arm and code token: `logprob` of the true code, its `margin`, and whether it is the likeliest token
        (`correct`). Per row and arm: `kl` of the first code token from the full context's distribution.

    Args:
        logits: one tensor per arm.
        codes: of all samples of the context.
        mine: index of each row's code among them.
    """
    by_arm = [code_measurements(arm, codes, mine) for arm in logits]
    kl = [divergence(logits[0][:, 0], arm[:, 0])[0] for arm in logits]
    return {name: torch.stack([arm[name] for arm in by_arm], 1) for name in by_arm[0]} | {"kl": torch.stack(kl, 1)}


def code_measurements(
    logits: Float[Tensor, "rows code_tokens vocab"], codes: Int[Tensor, "codes code_tokens"], mine: Sequence[int]
) -> dict[str, Shaped[Tensor, "rows code_tokens"]]:
    """`logprob`, `margin` and `correct` of one arm; see `use_measurements`."""
    scores = logits.float().log_softmax(-1)
    rows, length, _ = scores.shape
    of_codes = scores.gather(2, codes.T.expand(rows, length, len(codes)))
    index = torch.tensor(mine, device=codes.device)[:, None, None].expand(-1, length, 1)
    logprob = of_codes.gather(2, index)[..., 0]
    others = (of_codes.sum(2) - logprob) / (len(codes) - 1)
    return {"logprob": logprob, "margin": logprob - others, "correct": scores.argmax(2) == codes[mine]}


def choice_measurements(
    logits: Float[Tensor, "rows vocab"],
    choices: Int[Tensor, "rows choices"],
    true: Sequence[int],
    prior: Float[Tensor, "rows choices"],
) -> dict[str, Shaped[Tensor, "rows"]]:
    """How well the next token tells the true one of several choices from the others, whatever words a model likes.

    A choice scores the log-probability that it gains on its `prior`, that with nothing before the question: its
    pointwise mutual information with what was read (Holtzman et al. 2021, "Surface Form Competition").

    Returns:
        Per row the `margin` of the true choice's score over the mean of the others, in nats, and whether it is the
        largest (`correct`).

    Args:
        choices: their tokens.
        true: index of each row's true choice.
    """
    scores = logprobs_of(logits, choices) - prior
    index = torch.tensor(true, device=scores.device)
    right = scores.gather(1, index[:, None])[:, 0]
    margin = right - (scores.sum(1) - right) / (scores.shape[1] - 1)
    return {"margin": margin, "correct": scores.argmax(1) == index}


def logprobs_of(logits: Float[Tensor, "rows vocab"], ids: Int[Tensor, "rows choices"]) -> Float[Tensor, "rows choices"]:
    """The log-probabilities of some tokens in each row, in nats."""
    return logits.float().log_softmax(-1).gather(1, ids)


def surprise(logits: Float[Tensor, "reply vocab"], reply: Sequence[int]) -> Float[Tensor, "reply"]:
    """Negative log-probability of each token of a reply, in nats, from the logits that it met."""
    return -logprobs_of(logits, torch.tensor(reply, device=logits.device)[:, None])[:, 0]
