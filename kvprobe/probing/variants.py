"""Variants of one conversation that differ in a secret alone, so that many are read as rows of one batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.inference.outcomes import use_measurements
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

Logits = Float[Tensor, "rows answer_tokens vocab"]


@dataclass(frozen=True)
class Variants:
    """One conversation with several secrets, which stand at the same slots with the same tokens around them.

    Attributes:
        rows: the tokens with each secret; where the model is asked for it, it is the part `answer`.

    Raises:
        UserError: there is no row, or rows differ in more than the tokens of named parts.
    """

    rows: tuple[Tokens, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError("A conversation without a secret has no variants; give at least one.")
        if len({_around(row) for row in self.rows}) > 1:
            raise UserError(
                "This tokenizer joins some secrets with the text around them (the digits of codes, say), so they would "
                "shift the tokens after them; use a model that tokenises them apart."
            )

    @classmethod
    def of(cls, chats: Iterable[Transcript], tokenizer: Tokenizer) -> "Variants":
        """Conversations as they come, one for each secret."""
        return cls(tuple(chat.tokens(tokenizer) for chat in chats))

    @property
    def layout(self) -> Tokens:
        """The first of them, for where things stand in all."""
        return self.rows[0]

    @property
    def answers(self) -> Int[Tensor, "rows answer_tokens"]:
        """The tokens of each secret."""
        return torch.tensor([row.ids[self.layout.part("answer")] for row in self.rows])

    def read(
        self, batch: int, read: Callable[[Sequence[Tokens]], tuple[Mapping[str, Tensor], Sequence[Logits]]]
    ) -> dict[str, Tensor]:
        """What `read` gives of so many rows at a time, of all rows together and on the CPU.

        Args:
            read: gives tensors by name, rows first, and how the model answers under each condition: the logits of the
                answer's tokens, the true ones before each given. The first condition is the full context.

        Returns:
            Those tensors, and what `kvprobe.inference.outcomes.use_measurements` makes of the logits.
        """
        pieces = []
        for first in range(0, len(self.rows), batch):
            some = self.rows[first : first + batch]
            tensors, logits = read(some)
            every = self.answers.to(logits[0].device)
            measured = use_measurements(logits, every, range(first, first + len(some)))
            pieces.append({name: tensor.cpu() for name, tensor in {**tensors, **measured}.items()})
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _around(row: Tokens) -> tuple[object, ...]:
    """All but the tokens of named parts."""
    return tuple(part or token for token, part in zip(row.ids, row.parts, strict=True)), row.segments
