"""Learning a guard from what a model's sound caches hold."""

from collections.abc import Sequence

from kvprobe.checks import is_text
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.rows import Readable
from kvprobe.policies.guard import Guard, Sound


def learn(model: Model, texts: Sequence[Readable], rate: float = 0.01) -> Guard:
    """A guard that evicts about this share of the slots of sound caches, learnt from these texts or conversations.

    Raises:
        UserError: there are too few of them, or the model's keys cannot be rotated back.
    """
    if is_text(texts):
        raise UserError("A guard is learnt from several texts, and this is one; give a list of them.")
    return Guard(Sound.of([model.prefill(text) for text in texts], model.lanes.rotaries, rate))
