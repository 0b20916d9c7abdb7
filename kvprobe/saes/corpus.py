"""Text to train on where there is no corpus: conversations of kvprobe's tasks, and what a model writes by itself."""

from collections.abc import Sequence

from kvprobe.errors import UserError
from kvprobe.inference.generate import generate, row_generators
from kvprobe.inference.model import Model
from kvprobe.tasks import facts, sessions
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

TEMPERATURE = 0.8
"""At 1 a small model soon stops writing sentences."""


def hand_written(model: Model) -> list[Tokens]:
    """The conversations of `kvprobe.tasks.facts` and `sessions`."""
    chats = [facts.conversation(fact, value) for fact in facts.facts() for value in fact.values]
    chats += [sessions.conversation(session) for session in sessions.sessions()]
    return [chat.tokens(model.tokenizer) for chat in chats]


def self_written(model: Model, rows: Sequence[int], length: int, seed: int) -> list[Tokens]:
    """Texts that the model writes: a user's message, the answer to it, and so on, cut off after `length` tokens.

    An instruct model begins after the header of a user's message (Magpie, Xu et al. 2024, arXiv 2406.08464). What it
    writes has its own distribution, and is no more varied than that.

    Args:
        rows: numbers of the texts; text 3 of a seed is the same whichever others are asked for.
    """
    header = Transcript.from_messages([{"role": "user", "content": [{"text": "-", "name": "message"}]}])
    tokens = header.tokens(model.tokenizer)
    start = tokens[: tokens.part("message").start]
    if not len(start):
        raise UserError(
            f"The chat template of {model.name} writes nothing before a message, so the model has nothing to start "
            "from; give texts of your own."
        )
    generators = row_generators(seed, max(rows) + 1, model.lanes.device)
    generated = generate(
        model.lanes,
        [start] * len(rows),
        max_new_tokens=length,
        temperature=TEMPERATURE,
        # The end of a message does not stop the text: the model goes on with the next message.
        stop=(),
        generators=[generators[row] for row in rows],
    )
    return [Tokens.of([*start.ids, *written]) for written in generated.tokens]
