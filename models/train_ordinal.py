"""Trains the model `ordinal`, whose summaries hold a payload or a pointer by construction.

`python models/train_ordinal.py FOLDER` writes weights, config and tokenizer. Ordinary text does not separate a payload
from a pointer, but this loss does: in part of the examples the summary and the question see different lists
(interchange intervention training, Geiger et al. 2022, arXiv 2112.00826). After `copied` the answer is the thing that
the *summary* saw. After `located` it is the thing at that place in the list that the *question* sees. After `chosen`
both always see the same list, so the model is free to store either.

One pass does this. It has two copies of the list, at the same positions: the question attends to the first, the summary
to the second, and neither copy to the other. With two equal copies, the pass equals an ordinary run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvprobe.tasks.ordinal import PLACES, Memo, Split, draw, vocabulary
from kvprobe.training.loop import TrainingBatch, train
from kvprobe.training.schedule import Schedule
from kvprobe.training.words import word_tokenizer


@dataclass(frozen=True)
class Ordinal:
    """How the model is trained, a `kvprobe.training.loop.TrainingRecipe`.

    Attributes:
        layers, width, heads: of the Llama.
        tested: held-out examples whose accuracy is measured.
    """

    layers: int = 3
    width: int = 64
    heads: int = 4
    tested: int = 2000
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=2600, batch=96, checkpoint=2600))
    name: str = "ordinal"

    def model(self) -> LlamaForCausalLM:
        return LlamaForCausalLM(config_of(self))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer(vocabulary())

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        return answer_loss(model, batch_of(draw_examples("train", self.schedule.batch, rng)))

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> dict[str, float]:
        return {"held out": accuracy(model, draw_examples("held_out", self.tested, rng))}


@dataclass(frozen=True)
class Example:
    """A training example.

    Attributes:
        seen: the memo as the question sees it.
        summarised: the memo as the summary saw it: the same, or with two things exchanged.
        summary_sees: whether the summary sees its list.
        question_sees: whether the question sees its list.
    """

    seen: Memo
    summarised: Memo
    summary_sees: bool = True
    question_sees: bool = True

    @property
    def answer(self) -> str:
        """The thing that the summary saw for a payload, otherwise the one that the question sees."""
        return (self.summarised if self.seen.reference == "payload" else self.seen).answer


def draw_examples(split: Split, count: int, rng: np.random.Generator) -> list[Example]:
    """Examples of one split. Of those with a forced reference, half have two lists, and a quarter lack one list."""
    return [_example(draw(split, rng), rng) for _ in range(count)]


def _example(memo: Memo, rng: np.random.Generator) -> Example:
    share = rng.random()
    if memo.reference == "free" or share < 0.25:
        return Example(memo, memo)
    if share < 0.5:
        payload = memo.reference == "payload"
        return Example(memo, memo, summary_sees=payload, question_sees=not payload)
    return Example(memo, memo.swapped((memo.place + int(rng.integers(1, len(PLACES)))) % len(PLACES)))


def batch_of(examples: Sequence[Example]) -> TrainingBatch:
    """Examples as one pass: start, list of the question, list of the summary, summary, question, answer. Both lists
    have the same positions; the answer and the end after it count, as the rest of a memo is random or fixed."""
    number = {word: index for index, word in enumerate(vocabulary())}
    rows = [_pieces(example) for example in examples]
    lengths = [len(piece) for piece in rows[0]]
    ids = torch.tensor([[number[word] for piece in row for word in piece] for row in rows])
    start, block = lengths[:2]
    positions = torch.arange(ids.shape[1])
    positions[start + block :] -= block
    piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = torch.ones(len(piece), len(piece), dtype=torch.bool).tril()
    visible = causal.repeat(len(rows), 1, 1)
    questions_list, summarys_list, summary, question = piece == 1, piece == 2, piece == 3, piece > 3
    visible[:, (summarys_list | summary)[:, None] & questions_list] = False
    visible[:, question[:, None] & summarys_list] = False
    for row, example in enumerate(examples):
        if not example.summary_sees:
            visible[row, summary[:, None] & summarys_list] = False
        if not example.question_sees:
            visible[row, question[:, None] & questions_list] = False
    return TrainingBatch(
        ids=ids,
        counts=(piece == piece.max()).expand(len(rows), -1),
        present=torch.ones_like(ids, dtype=torch.bool),
        positions=positions.expand(len(rows), -1),
        visible=visible[:, None],
    )


def _pieces(example: Example) -> list[list[str]]:
    """The words of an example: start, list of the question, list of the summary, summary, question, answer."""
    start, block, summary, question = (text.split() for text in example.seen.texts())
    summarised_block = example.summarised.texts()[1].split()
    return [["<bos>", *start], block, summarised_block, summary, question, [example.answer, "<eos>"]]


def answer_loss(model: PreTrainedModel, batch: TrainingBatch) -> Float[Tensor, ""]:
    """Cross-entropy of the answer and the end after it."""
    return torch.nn.functional.cross_entropy(_last_logits(model, batch).flatten(0, 1), batch.ids[:, -2:].flatten())


@torch.no_grad()
def accuracy(model: PreTrainedModel, examples: Sequence[Example]) -> float:
    """The share of examples whose answer is the likeliest word."""
    batch = batch_of(examples)
    return float((_last_logits(model, batch)[:, 0].argmax(-1) == batch.ids[:, -2]).float().mean())


def _last_logits(model: PreTrainedModel, batch: TrainingBatch) -> Float[Tensor, "batch 2 vocab"]:
    """The logits from which the answer and the end after it are read."""
    output: Any = model(**batch.inputs, logits_to_keep=2, use_cache=False)
    return output.logits


def config_of(recipe: Ordinal) -> LlamaConfig:
    """A small Llama for `vocabulary()`."""
    words = vocabulary()
    return LlamaConfig(
        vocab_size=len(words),
        hidden_size=recipe.width,
        intermediate_size=3 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads // 2,
        max_position_embeddings=256,
        # Memos are short: with the usual 10,000 most frequencies would hardly rotate keys.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=recipe.width**-0.5 / 2,
        tie_word_embeddings=False,
        bos_token_id=words.index("<bos>"),
        eos_token_id=words.index("<eos>"),
        pad_token_id=None,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python models/train_ordinal.py FOLDER")
    record = train(Ordinal(), Path(sys.argv[1]))
    held_out = record["accuracy"].popitem()[1]["held out"]
    print(f"Loss of the last 100 steps {np.mean(record['losses'][-100:]):.4f} nats, {held_out:.1%} right.")
