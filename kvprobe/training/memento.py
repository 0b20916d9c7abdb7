"""The models `memento`: a small transformer that reads blocks of digits and writes a memento after each, while blocks
that have a memento are hidden. The toy of "Memento" (arXiv 2604.09852).

Training masks as a cache does: one pass gives each token the view that it has when blocks are read, summed up and
masked one after the other. With `keep=n`, the last n blocks before the present one stay in view.

    <bos> = 0 0 0 | 3 7 1 9 2 = 0 2 2 | 5 0 0 8 4 = 0 3 9 | …           mementos retained

A retained memento saw its block, and hands on what it computed of it. A recomputed one is read again without the block
before the next block is read. This too is one pass: the mementos alone stand first, at their own positions and in view
of one another, and each block with the memento that is written after it sees those before it, and no other block.

    <bos> = 0 0 0 = 0 2 2 = 0 3 9 … | 3 7 1 9 2 = 0 2 2 | 5 0 0 8 4 = 0 3 9 | …     recomputed

The loss is on the digits of mementos 1, 2, …, given those before them as they should be: digits are random. Where
mementos are copies of memento 0, no loss asks for any digit of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.tasks.mementos import (
    BLOCKS,
    MOST,
    PLACES,
    Content,
    Trace,
    block_name,
    draw_trace,
    hidden_blocks,
    memento_name,
    vocabulary,
)
from kvprobe.text.tokens import PREAMBLE, Tokens
from kvprobe.training.loop import TrainingBatch, loss_of
from kvprobe.training.memories import model_of
from kvprobe.training.schedule import Memory, Provenance, Schedule, check_view, until_95
from kvprobe.training.words import word_shape, word_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'memento' %} ={% endif %}"
    "{{ ' ' + message['content'] }}{% endfor %}{% if add_generation_prompt %} ={% endif %}"
)
MEMENTOS, TRACES = "mementos", "whole traces"
"""Kinds of right answers. A memento is right if each of its digits is the likeliest, given the true mementos before
it, which is greedy decoding after a true history; a trace, if all its mementos are, which is greedy decoding of all of
it, for up to its first error the model's own history is the true one."""


@dataclass(frozen=True, kw_only=True)
class Memento:
    """How one of the models is trained.

    Attributes:
        content: of mementos.
        provenance: of the mementos in view.
        keep: blocks before the present one that stay in view; only where mementos are retained.
        memory: of its layers, see `kvprobe.training.memories`; None for those of a Llama. What is hidden is hidden from
            attention alone, as an engine does that erases slots: a state has read it.
        blocks: of a trace.
        width: of the residual stream.
        inner: width of the MLPs.
        tested: traces whose accuracy is measured, at each checkpoint the same.
    """

    content: Content = "sum"
    provenance: Provenance = "retained"
    keep: int = 0
    memory: Memory | None = None
    blocks: int = BLOCKS
    layers: int = 4
    width: int = 128
    heads: int = 4
    inner: int = 352
    tested: int = 300
    schedule: Schedule = field(default_factory=until_95)

    def __post_init__(self) -> None:
        require("blocks", self.blocks, 1, MOST)
        require("keep", self.keep, 0, self.blocks - 1)
        require("tested", self.tested, 1)
        check_view(self.keep, self.provenance)
        if self.memory and self.provenance == "recomputed":
            raise UserError(
                "A state reads each token once, so a model with memory= cannot be trained with recomputed mementos; "
                "choose retained ones."
            )

    @property
    def name(self) -> str:
        memory = f"{self.memory}-{self.blocks}-" if self.memory else ""
        return f"memento-{memory}{self.content}-{self.provenance}-{self.keep}-{self.schedule.seed}"

    def model(self) -> PreTrainedModel:
        shape = word_shape(vocabulary(), self.layers, self.width, self.heads)
        if self.memory:
            return model_of(self.memory, self.inner, shape)
        return LlamaForCausalLM(LlamaConfig(intermediate_size=self.inner, **shape))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer(vocabulary(), CHAT_TEMPLATE)

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        return loss_of(model, [self.batch(self.draw(self.schedule.batch, rng))])

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> Mapping[str, float]:
        right = self.right(model, self.draw(self.tested, rng))
        return {MEMENTOS: float(right.float().mean()), TRACES: float(right.all(1).float().mean())}

    def draw(self, count: int, rng: np.random.Generator) -> list[Trace]:
        """Random traces."""
        return [draw_trace(rng, self.content, self.blocks) for _ in range(count)]

    def right(self, model: PreTrainedModel, traces: Sequence[Trace]) -> Bool[Tensor, "traces mementos"]:
        """Whether mementos 1, 2, … are right; see `MEMENTOS`."""
        batch = self.batch(traces)
        counted = batch.likeliest(model)[:, batch.counts[0, 1:]]
        return counted.reshape(len(traces), self.blocks, PLACES).all(2)

    def batch(self, traces: Sequence[Trace]) -> TrainingBatch:
        """Traces as one pass; the memento digits that are to be written count.

        Raises:
            UserError: a trace has another number of blocks.
        """
        if wrong := [len(trace.blocks) for trace in traces if len(trace.blocks) != self.blocks]:
            raise UserError(f"A trace has {wrong[0]} blocks; this recipe is for {self.blocks}.")
        number = {word: index for index, word in enumerate(vocabulary())}
        run = torch.tensor([[number[word] for word in trace.words()] for trace in traces])
        layout = self.layout
        rows = len(traces)
        return TrainingBatch(
            ids=run[:, layout.positions],
            counts=layout.counts.expand(rows, -1),
            present=torch.ones(rows, len(layout.positions), dtype=torch.bool),
            positions=layout.positions.expand(rows, -1),
            visible=layout.visible[None, None],
        )

    @cached_property
    def layout(self) -> "PassLayout":
        """Of every pass."""
        tokenizer: Any = self.tokenizer()  # transformers' own types are too wide
        tokens = draw_trace(np.random.default_rng(0), self.content, self.blocks).conversation().tokens(tokenizer)
        return retained(tokens, self.keep) if self.provenance == "retained" else recomputed(tokens)


@dataclass(frozen=True)
class PassLayout:
    """Which tokens stand in a pass.

    Attributes:
        positions: of each token in an ordinary run, which reads each once.
        visible: which tokens (columns) each token (rows) attends to.
        counts: the tokens whose loss counts.
    """

    positions: Int[Tensor, "tokens"]
    visible: Bool[Tensor, "tokens tokens"]
    counts: Bool[Tensor, "tokens"]


def retained(tokens: Tokens, keep: int) -> PassLayout:
    """An ordinary run in which blocks are hidden from the tokens after their mementos, `keep` blocks later."""
    numbers, in_block, counts = parts_of(tokens)
    first_in_view = torch.tensor([hidden_blocks(number, keep).stop for number in numbers.tolist()])
    hidden = in_block & (numbers < first_in_view[:, None])
    causal = torch.ones_like(hidden).tril()
    return PassLayout(torch.arange(len(tokens)), causal & ~hidden, counts)


def recomputed(tokens: Tokens) -> PassLayout:
    """The mementos but the last without any block, then each block and its memento after the mementos before it."""
    numbers, in_block, counts = parts_of(tokens)
    alone, written = (~in_block & (numbers < numbers.max())).nonzero()[:, 0], (numbers > 0).nonzero()[:, 0]
    positions, again = torch.cat([alone, written]), torch.arange(len(alone) + len(written)) < len(alone)
    number = numbers[positions]
    causal = positions <= positions[:, None]
    sees_memento = again & torch.where(again[:, None], causal, number < number[:, None])
    sees_itself = ~again & ~again[:, None] & (number == number[:, None]) & causal
    return PassLayout(positions, sees_memento | sees_itself, ~again & counts[positions])


def parts_of(tokens: Tokens) -> tuple[Int[Tensor, "tokens"], Bool[Tensor, "tokens"], Bool[Tensor, "tokens"]]:
    """Of each token, the number of its block or memento, whether it is of a block, and whether a model has to write
    it: a digit of memento 1, 2, …."""
    count = 1 + len(tokens.names) // 2
    known = {name(number): number for name in (block_name, memento_name) for number in range(count)} | {PREAMBLE: 0}
    blocks = {block_name(number) for number in range(count)}
    numbers = torch.tensor([known[segment] for segment in tokens.segments])
    in_block = torch.tensor([segment in blocks for segment in tokens.segments])
    return numbers, in_block, ~in_block & (numbers > 0) & ~torch.tensor(tokens.delimiters)
