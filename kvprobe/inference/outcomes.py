"""What a model says under one cache, compared with what it says under another."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
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
    scores = torch.stack([arm.float().log_softmax(-1) for arm in logits], 1)
    rows, arms, length, _ = scores.shape
    of_codes = scores.gather(3, codes.T.expand(rows, arms, length, len(codes)))
    index = torch.tensor(mine, device=codes.device)[:, None, None, None].expand(-1, arms, length, 1)
    logprob = of_codes.gather(3, index)[..., 0]
    others = (of_codes.sum(3) - logprob) / (len(codes) - 1)
    kl, _ = divergence(scores[:, :1, 0].expand(-1, arms, -1), scores[:, :, 0])
    return {
        "logprob": logprob,
        "margin": logprob - others,
        "correct": scores.argmax(3) == codes[mine][:, None],
        "kl": kl,
    }
