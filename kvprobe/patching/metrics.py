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

from kvprobe.arguments import AtLeastOne, check_fields
from kvprobe.brief import Brief
from kvprobe.errors import UserError
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.text.first_tokens import TextEncoder
from kvprobe.text.tokens import Tokens

Metric = Callable[[Tensor], object]


LEAST = 1e-4
"""Damage of fewer nats than this is rounding, and its shares are meaningless."""
LEAST_WAY = 1e-6
"""Base and donor whose metrics differ by no more than this, or than rounding moves them, do not differ."""
DRAWS = 8
"""Of rounding, of which the largest effect on a metric counts."""
UNDEFINED = (
    "base and donor give the same metric up to rounding, so shares of the way from one to the other are undefined"
)


@dataclass(frozen=True)
class LogitDiff:
    """logit(right) − logit(wrong) after the last token: positive where the model prefers `right`.

    Each is a token's id, or a text that the model's tokenizer makes one token of, such as " Mary".

    Raises:
        UserError: the two are one token; or, once a model is known, a text is several.
    """

    right: int | str
    wrong: int | str

    def __post_init__(self) -> None:
        check_fields(self)
        if self.right == self.wrong:
            raise UserError(
                f"LogitDiff has {self.right!r} twice, so it is zero whatever the model does; give two different tokens."
            )

    def of(self, tokenizer: TextEncoder | None) -> "LogitDiff":
        """The same with ids in place of texts."""
        return LogitDiff(_token(self.right, tokenizer), _token(self.wrong, tokenizer))

    def __call__(self, logits: Float[Tensor, "kept vocab"]) -> Float[Tensor, ""]:
        right, wrong = _token(self.right, None), _token(self.wrong, None)
        _refuse_unknown((right, wrong), logits)
        return logits[-1, right].float() - logits[-1, wrong].float()


@dataclass(frozen=True, repr=False)
class LogProb(Brief):
    """log p of an answer, in nats: the sum over its tokens, each after those before it.

    Called with logits, it takes them to be those before each of its tokens. A sweep reads these whether its suffix ends
    before the answer, with all of it, or with all but its last token.
    """

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "LogProb":
        return cls(tuple(tokens))

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.tokens:
            raise UserError(f"LogProb has the tokens {self.tokens!r}; give the ids of all tokens of the answer.")

    @property
    def kept(self) -> int:
        return len(self.tokens)

    def ending(self, suffix: Tokens) -> Tokens:
        """The suffix with all of the answer at its end but the last token.

        Raises:
            UserError: it ends with the one token that is the answer, or with some other part of the answer, which may
                also be the end of the question. All tokens, or all but the last, are the answer, and so are those of a
                part `answer`.
        """
        count = len(self.tokens)
        held = max(some for some in range(count + 1) if suffix.ids[len(suffix) - some :] == self.tokens[:some])
        if held and suffix.parts[-held] != "answer" and (held < count - 1 or held == count == 1):
            raise UserError(
                f"The suffix ends with {held} of the {count} tokens of the answer, which may be its beginning or the "
                "end of the question; end it with another token before the answer, or measure "
                "`lambda logits: logits[-1].log_softmax(-1)[token]`."
            )
        if held == count:
            return suffix[:-1]
        return suffix + Tokens.of(self.tokens[held:-1], suffix.segments[-1], suffix.following)

    def __call__(self, logits: Float[Tensor, "kept vocab"]) -> Float[Tensor, ""]:
        _refuse_unknown(self.tokens, logits)
        said = torch.tensor(self.tokens, device=logits.device)
        return logits.float().log_softmax(-1).gather(1, said[:, None]).sum()


@dataclass(frozen=True)
class KL:
    """KL(unpatched base ‖ patched) of the next token, in nats; the mean over the last `kept` tokens of the suffix."""

    kept: AtLeastOne = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def to(self, base: Float[Tensor, "kept vocab"]) -> Callable[[Tensor], Tensor]:
        """The metric, once the base's logits are known."""
        clean = base.detach().float().log_softmax(-1)
        return lambda logits: relative_entropy(clean, logits.float().log_softmax(-1)).mean()


def fitted(metric: Metric | KL, suffix: Tokens, tokenizer: TextEncoder | None) -> tuple[Metric | KL, Tokens]:
    """A metric whose texts are tokens, and the suffix with which it measures what it says."""
    if isinstance(metric, LogitDiff):
        return metric.of(tokenizer), suffix
    return metric, metric.ending(suffix) if isinstance(metric, LogProb) else suffix


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


def least_way(metric: Metric, logits: Float[Tensor, "kept vocab"], dtype: torch.dtype) -> float:
    """How far a metric moves where each logit is off by what a dtype rounds the largest of them by."""
    step = torch.finfo(dtype).eps * float(logits.abs().max())
    rng = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (DRAWS, *logits.shape), generator=rng) * 2 - 1
    value = float(measured(metric, logits))
    moved = [float(measured(metric, logits + step * sign)) for sign in signs.to(logits.device)]
    return max(LEAST_WAY, *(abs(one - value) for one in moved))


def _refuse_unknown(tokens: Sequence[int], logits: Float[Tensor, "kept vocab"]) -> None:
    for token in tokens:
        if not 0 <= token < logits.shape[1]:
            raise UserError(f"There is no token {token}; give token ids from 0 to {logits.shape[1] - 1}.")


def _token(token: int | str, tokenizer: TextEncoder | None) -> int:
    """A token's id."""
    if not isinstance(token, str):
        return token
    if tokenizer is None:
        raise UserError(f"No tokenizer says which token {token!r} is; give the token's id.")
    ids = list(tokenizer(token, add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        raise UserError(
            f"{token!r} is {len(ids)} tokens ({', '.join(map(str, ids))}); give a text that is one token, or the id of "
            "the first token in which the answers differ."
        )
    return ids[0]


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
