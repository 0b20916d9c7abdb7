"""The same turn of a user at the beginning of a conversation and after others, at the same positions."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns


@dataclass(frozen=True)
class Beginnings:
    """What a turn may stand after; all of it ends where the turn begins.

    Attributes:
        turn: at the position that it has after the longest of the conversations.
        opening: what begins a conversation in the chat template; may have no token.
        earlier: the conversations.
    """

    turn: Tokens
    opening: Tokens
    earlier: tuple[Tokens, ...]


def beginnings(turns: Turns, text: str, earlier: Sequence[tuple[str, str]]) -> Beginnings:
    """A user's turn with this text, alone and after each of these exchanges of a question and an answer.

    Raises:
        UserError: the chat template writes the turn differently at the beginning.
    """
    whole = [turns.transcript(*exchange, text).tokens(turns.tokenizer) for exchange in earlier]
    starts = [tokens.span("user 1").start for tokens in whole]
    turn, alone = whole[0][starts[0] :], turns.transcript(text).tokens(turns.tokenizer)
    opening = alone[: len(alone) - len(turn)]
    if opening.ids + turn.ids != alone.ids:
        raise UserError("The chat template writes a question differently after a conversation than at its beginning.")
    place = max(starts)
    before = [tokens[:start].shifted(place - start) for tokens, start in zip(whole, starts, strict=True)]
    return Beginnings(turn.shifted(place), opening.shifted(place - len(opening)), tuple(before))
