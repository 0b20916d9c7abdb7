"""The models `lossy`: a small transformer that reads a block of digits, writes a memento that omits most of them, and
is asked for any of them once the block is hidden; see `kvprobe.tasks.lossy_mementos`.

All questions of a block stand in one pass, each at the same positions and in view of the memento and of itself alone.
They see a memento that saw its block (*retained*: mask and continue), or one that was read again from its text alone
(*recomputed*: a restart). Both trainings of a seed start from the same weights and see the same blocks and questions.

    <bos> | 3 7 1 9 2 = 3 7 | ? a 3 | ? b 7 | ? c 1 | …                 retained
    <bos> = 3 7 | 3 7 1 9 2 = 3 7 | ? a 3 | ? b 7 | ? c 1 | …           recomputed

The loss is on the digits that the memento states and on all answers. After a restart no answer about an omitted digit
can be known: the model that is trained so learns to guess.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvprobe.checks import require
from kvprobe.tasks.lossy_mementos import ASK, PLACE_NAMES, WRITE, Digits, LossyDesign, vocabulary
from kvprobe.training.loop import TrainingBatch, loss_of
from kvprobe.training.schedule import Provenance, Schedule
from kvprobe.training.words import word_shape, word_tokenizer

STATED, OMITTED = "stated digits", "omitted digits"
"""Kinds of right answers."""
NUMBER = {word: index for index, word in enumerate(vocabulary())}


def lossy_schedule(steps: int = 4000, seed: int = 0) -> Schedule:
    """How the models `lossy` are trained: all for as long, so that designs can be compared."""
    return Schedule(steps=steps, batch=64, learning_rate=1e-3, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Lossy:
    """How one of the models is trained.

    Attributes:
        provenance: of the memento that questions see.
        width: of the residual stream.
        inner: width of the MLPs.
        tested: blocks of which all digits are asked for when accuracy is measured, at each checkpoint the same.
    """

    design: LossyDesign
    provenance: Provenance = "retained"
    layers: int = 4
    width: int = 64
    heads: int = 4
    inner: int = 176
    tested: int = 300
    schedule: Schedule = field(default_factory=lossy_schedule)

    def __post_init__(self) -> None:
        require("tested", self.tested, 1)

    @property
    def name(self) -> str:
        return f"lossy-{self.design.asked}-{self.design.slots}-{self.provenance}-{self.schedule.seed}"

    def model(self) -> PreTrainedModel:
        shape = word_shape(vocabulary(), self.layers, self.width, self.heads)
        config = LlamaConfig(intermediate_size=self.inner, **shape)
        # So that a study knows what a folder was trained for.
        config.update({"lossy": {**asdict(self.design), "provenance": self.provenance, "seed": self.schedule.seed}})
        return LlamaForCausalLM(config)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer(vocabulary())

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        return loss_of(model, [self.batch(self.design.draw(self.schedule.batch, rng))])

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> Mapping[str, float]:
        right, stated = self.right(model, self.design.draw(self.tested, rng)), self.design.stated
        shares = {OMITTED: float(right[:, stated:].float().mean())}
        return {STATED: float(right[:, :stated].float().mean())} | shares if stated else shares

    def right(self, model: PreTrainedModel, digits: Digits) -> Bool[Tensor, "traces places"]:
        """Whether the answer to the question for each digit is the likeliest."""
        return self.batch(digits).likeliest(model)[:, -3 * self.design.places :][:, 2::3]

    def batch(self, digits: Digits) -> TrainingBatch:
        """Blocks as one pass, each with the questions for all of its digits."""
        digit = torch.from_numpy(digits) + NUMBER["0"]
        rows, stated = len(digit), digit[:, : self.design.stated]
        begun, write, ask = (torch.full((rows, 1), NUMBER[word]) for word in ("<bos>", WRITE, ASK))
        alone = [write, stated] if self.provenance == "recomputed" else []
        questions = [
            part
            for place, name in enumerate(PLACE_NAMES[: self.design.places])
            for part in (ask, torch.full((rows, 1), NUMBER[name]), digit[:, place : place + 1])
        ]
        positions, visible, counts = self.layout
        ids = torch.cat([begun, *alone, digit, write, stated, *questions], 1)
        return TrainingBatch(
            ids=ids,
            counts=counts.expand(rows, -1),
            present=torch.ones_like(ids, dtype=torch.bool),
            positions=positions.expand(rows, -1),
            visible=visible[None, None],
        )

    @cached_property
    def layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of every pass: the position of each token in a conversation of one question, which tokens (columns) each
        token (rows) attends to, and which count."""
        block, slots = self.design.places, self.design.slots
        begun, digits, memento = torch.arange(1), 1 + torch.arange(block), 1 + block + torch.arange(slots)
        question = 1 + block + slots + torch.arange(3)
        alone = memento[: slots if self.provenance == "recomputed" else 0]
        # Groups see themselves, and those that they are shown: the start, the memento that questions see, the block.
        start, again, written = 0, 1, 2
        pieces = [(begun, start), (alone, again), (torch.cat([digits, memento]), written)]
        pieces += [(question, number) for number in range(3, 3 + block)]
        positions = torch.cat([place for place, _ in pieces])
        groups = torch.cat([torch.full_like(place, group) for place, group in pieces])
        in_memento = (groups == (again if len(alone) else written)) & (positions > block)
        asking, seeing = groups >= 3, groups[:, None] >= 3
        shown = (groups == start) | (groups == groups[:, None]) | (seeing & in_memento)
        counts = (asking & (positions == positions.max())) | ((groups == written) & (positions > 1 + block))
        return positions, shown & (positions <= positions[:, None]), counts
