"""Reading the hidden turn with many codes: what K and V of its slots make of the code, conversation by conversation.

Only how they vary with the code is kept: each slot's average over the codes is taken off, and kept beside it. So what
is erased later is what a paired probe reads, and a slot from which all is erased holds its conversation's average.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.tasks.passcode import CODE_LENGTH, Context, conversation
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens

PARTS = ("K", "V")
PLACES = ("code", "after", "summary")
"""The code's own slots; those of its turn after it, with the reply; and the summary of the turn, with the request for
it."""


@dataclass(frozen=True)
class Case:
    """A conversation: the codes with which it is read to fit erasers, and the two that are exchanged."""

    number: int
    context: Context
    codes: tuple[str, ...]
    pair: tuple[str, str]

    @property
    def half(self) -> int:
        return self.number % 2

    def tokens(self, code: str, tokenizer: Tokenizer) -> Tokens:
        """The conversation with this code."""
        return conversation(self.context, code).tokens(tokenizer)


@dataclass(frozen=True)
class Layout:
    """Where things stand in a conversation, whatever its code.

    Attributes:
        start, stop: of the slots that are read with each code: from the code to the end of the summary.
        places: slots of each place.
    """

    start: int
    stop: int
    places: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, tokens: Tokens) -> "Layout":
        code, summary, stop = tokens.part("code"), tokens.span("summary2").start, tokens.span("T3").start
        ranges = (range(code.start, code.stop), range(code.stop, summary), range(summary, stop))
        return cls(code.start, stop, {place: tuple(slots) for place, slots in zip(PLACES, ranges, strict=True)})


def read_turn(model: Model, case: Case, batch: int) -> dict[str, Tensor]:
    """K and V of one conversation with each of its codes.

    Returns:
        `digits` `[digits, codes]`; and by part (`K`, `V`), KV heads side by side: `average.K` `[layers, slots, width]`
        over the codes, of all slots from the code to the end of the summary; `code.K` `[layers, codes, digits, width]`,
        each code slot's own features; and for the other places `after.K` `[layers, codes, width]`, the mean over its
        slots, and `after.gram.K` `[layers, width, width]`, the mean over its slots of their second moments, summed over
        codes. All but the averages are centred: the average is taken off.

    Raises:
        UserError: this tokenizer does not tokenise digits apart.
    """
    rows = [case.tokens(code, model.tokenizer) for code in case.codes]
    layout = Layout.of(rows[0])
    if any(Layout.of(row) != layout for row in rows) or len(layout.places["code"]) != CODE_LENGTH:
        raise UserError(
            "This tokenizer joins digits of some codes, so that a digit has no slot of its own; use a model that "
            "tokenises digits apart."
        )
    prefix = model.prefill(rows[0][: layout.start])
    pieces = [
        model.capture([row[layout.start : layout.stop] for row in rows[first : first + batch]], ("k", "v"), past=prefix)
        for first in range(0, len(rows), batch)
    ]
    tensors = {"digits": torch.tensor([[int(digit) for digit in code] for code in case.codes]).T}
    for part, family in zip(PARTS, ("k", "v"), strict=True):
        # layers, codes, slots, width
        vectors = torch.cat([piece.stack(family) for piece in pieces], 1).float().transpose(2, 3).flatten(3)
        average = vectors.mean(1)
        vectors = vectors - average[:, None]
        tensors[f"average.{part}"] = average
        for place, slots in layout.places.items():
            of_place = vectors[:, :, slots[0] - layout.start : slots[-1] + 1 - layout.start]
            if place == "code":
                tensors[f"code.{part}"] = of_place
                continue
            tensors[f"{place}.{part}"] = of_place.mean(2)
            tensors[f"{place}.gram.{part}"] = torch.einsum("lcsi,lcsj->lij", of_place, of_place) / len(slots)
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
