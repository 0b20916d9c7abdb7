"""Text to train on where there is no corpus: what an instruct model writes when it is given nothing but the header of a user's
message (Magpie, Xu et al. 2024, arXiv 2406.08464). It is the model's own distribution, and no wider than that."""

from collections.abc import Sequence

from kvprobe.errors import UserError
from kvprobe.inference.generate import generate, row_generators
from kvprobe.inference.model import Model
from kvprobe.text.transcript import Tokens, Transcript

TEMPERATURE = 0.8
"""At 1 a model of this size soon writes no sentences."""


def self_written(model: Model, rows: Sequence[int], length: int, seed: int) -> list[Tokens]:
    """Texts of a model's own, each a user's message, the answer to it, and so on, cut off after `length` tokens.

    Args:
        rows: numbers of the texts; text 3 of a seed is the same whatever others are asked for.
    """
    header = Transcript.from_messages([{"role": "user", "content": [{"text": "-", "name": "message"}]}])
    tokens = header.tokens(model.tokenizer)
    start = tokens[: tokens.part("message").start]
    if not len(start):
        raise UserError(
            f"The chat template of {model.name} writes nothing before a message, so the model cannot start."
        )
    generators = row_generators(seed, max(rows) + 1, model.lanes.device)
    found = generate(
        model.lanes,
        [start] * len(rows),
        max_new_tokens=length,
        temperature=TEMPERATURE,
        # An end of a message ends nothing: the model goes on with the next one.
        stop=(),
        generators=[generators[row] for row in rows],
    )
    return [Tokens.of([*start.ids, *written]) for written in found.tokens]
