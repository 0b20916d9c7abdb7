"""The conversations, the places at which the code is erased, and the erasers of each place.

A code slot has an eraser of its own, of the digits up to its own, since it cannot know the later ones; all slots of
another place share one, of all five digits.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.studies.use import Config
from kvprobe.studies.use.place_erasers import Erasers, fit_places
from kvprobe.studies.use.variants import VariantReads, read_variants
from kvprobe.tasks.passcode import CODE_LENGTH, Coded, Encoder, coded_contexts, conversation
from kvprobe.text.tokens import Tokens

PLACES = {"code": range(CODE_LENGTH), "after": (None,), "summary": (None,)}
"""The code's own slots; those of its turn after it, with the reply; and the summary of the turn, with the request for
it. And which of their slots have an eraser of their own."""
SHRINKAGE = 0.1
"""Without it, random subspaces would be drawn along directions that hardly vary in the conversations of the fit, and
move features of others by many times their variance."""
DIGITS = 10


def cases_of(config: Config, tokenizer: Encoder) -> list[Coded]:
    """All conversations: the codes with which each is read to fit erasers, and the two that are exchanged."""
    return coded_contexts(config.contexts, config.codes, np.random.default_rng([config.seed, 1]), tokenizer)


def places_of(tokens: Tokens) -> dict[str, range]:
    """The slots of each place, whatever the code; together, all that the code can reach before the question."""
    code, summary, stop = tokens.part("code"), tokens.span("summary2").start, tokens.span("T3").start
    ranges = (range(code.start, code.stop), range(code.stop, summary), range(summary, stop))
    return dict(zip(PLACES, ranges, strict=True))


def read_case(model: Model, case: Coded, batch: int) -> dict[str, Tensor]:
    """K and V of one conversation with each of its codes; see `read_variants`.

    Raises:
        UserError: this tokenizer does not tokenise digits apart.
    """
    rows = [conversation(case.context, code).tokens(model.tokenizer) for code in case.codes]
    places = places_of(rows[0])
    if any(places_of(row) != places for row in rows) or len(places["code"]) != CODE_LENGTH:
        raise UserError(
            "This tokenizer joins digits of some codes, so that a digit has no slot of its own; use a model that "
            "tokenises digits apart."
        )
    digits = torch.tensor([[int(digit) for digit in code] for code in case.codes]).T
    return read_variants(model, rows, places, digits, apart=("code",), batch=batch)


def fit_halves(reads: Sequence[Mapping[str, Tensor]], config: Config) -> tuple[Erasers, Erasers]:
    """The erasers of each half of the conversations."""
    first, second = (
        fit_places(VariantReads(reads[half::2]), PLACES, DIGITS, config.randoms, rng, SHRINKAGE)
        for half, rng in enumerate(np.random.default_rng([config.seed, 2, half]) for half in (0, 1))
    )
    return first, second
