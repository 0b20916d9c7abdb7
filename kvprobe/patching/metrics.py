"""Metrics: what is measured of a patched run, as one number for its logits.

A metric is any function of the logits after a run's last tokens, `[kept, vocab]`, that returns one number. An attribute
`kept` says how many of them it looks at; without it, the metric gets those after the last token only. The metrics here
can be differentiated, as attribution patching needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.brief import Brief
from kvprobe.errors import UserError
from kvprobe.inference.outcomes import relative_entropy

Metric = Callable[[Tensor], object]

LEAST = 1e-4
"""Damage of fewer nats than this is rounding, and its shares are meaningless."""


@dataclass(frozen=True)
class LogitDiff:
    """logit(right) − logit(wrong) after the last token: positive where the model prefers `right`."""

    right: int
    wrong: int

    def __call__(self, logits: Float[Tensor, "kept vocab"]) -> Float[Tensor, ""]:
        _refuse_unknown((self.right, self.wrong), logits)
        return logits[-1, self.right].float() - logits[-1, self.wrong].float()


@dataclass(frozen=True, repr=False)
class LogProb(Brief):
    """log p of an answer, in nats: the sum over its tokens, each after those before it.

    The suffix must end with all of the answer's tokens but the last.
    """

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "LogProb":
        return cls(tuple(map(int, tokens)))

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UserError("LogProb has no token; give the answer's token ids.")

    @property
    def kept(self) -> int:
        return len(self.tokens)

    def __call__(self, logits: Float[Tensor, "kept vocab"]) -> Float[Tensor, ""]:
        _refuse_unknown(self.tokens, logits)
        said = torch.tensor(self.tokens, device=logits.device)
        return logits.float().log_softmax(-1).gather(1, said[:, None]).sum()


@dataclass(frozen=True)
class KL:
    """KL(unpatched base ‖ patched) of the next token, in nats; the mean over the last `kept` tokens of the suffix."""

    kept: int = 1

    def to(self, base: Float[Tensor, "kept vocab"]) -> Callable[[Tensor], Tensor]:
        """The metric, once the base's logits are known."""
        clean = base.detach().float().log_softmax(-1)
        return lambda logits: relative_entropy(clean, logits.float().log_softmax(-1)).mean()


def kept_by(metric: Metric | KL) -> int:
    """How many of the last tokens' logits a metric looks at."""
    return int(getattr(metric, "kept", 1))


def measured(metric: Metric, logits: Float[Tensor, "kept vocab"]) -> Tensor:
    """The metric of one run, as a tensor that can be differentiated.

    Raises:
        UserError: it is not one finite number.
    """
    returned = metric(logits)
    value = returned if isinstance(returned, Tensor) else _number(metric, returned)
    if value.numel() != 1:
        raise UserError(
            f"The metric {_name(metric)} returned {value.numel()} numbers of shape {tuple(value.shape)}; it must "
            "return one number for the logits of one run, so index or sum what it returns."
        )
    if not bool(torch.isfinite(value).all()):
        raise UserError(
            f"The metric {_name(metric)} returned {float(value)}; it must be a finite number for every run, so bound "
            "what it divides by or takes the logarithm of."
        )
    return value.reshape(())


def _refuse_unknown(tokens: Sequence[int], logits: Float[Tensor, "kept vocab"]) -> None:
    for token in tokens:
        if not 0 <= token < logits.shape[1]:
            raise UserError(f"There is no token {token}; give token ids from 0 to {logits.shape[1] - 1}.")


def _number(metric: Metric, returned: object) -> Tensor:
    try:
        return torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The metric {_name(metric)} returned {type(returned).__name__}; it must return one number for the logits "
            "of one run."
        ) from error


def _name(metric: Metric) -> str:
    return getattr(metric, "__name__", type(metric).__name__)
