"""The models `recall`: small transformers that answer for the digit of a name; see `kvprobe.tasks.recall`.

    <bos> a 3 b 7 c 1 K B ? c 1 B ? a 3 F C ? b 7

Each text has 1 to 16 pairs, and questions for up to 8 of them in random order, with talk before each. Nothing is hidden
in training, as in that of most language models. The models of a seed see the same texts, whatever their memory is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvprobe.checks import require
from kvprobe.tasks.recall import ASK, NAMES, Digits, draw_digits, draw_talk, vocabulary
from kvprobe.training.loop import TrainingBatch, loss_of
from kvprobe.training.memories import model_of
from kvprobe.training.schedule import Memory, Schedule
from kvprobe.training.words import word_shape, word_tokenizer

NUMBER = {word: index for index, word in enumerate(vocabulary())}


def recall_schedule(steps: int = 1200, seed: int = 0) -> Schedule:
    """How the models `recall` are trained: all for as long, so that memories can be compared."""
    return Schedule(steps=steps, batch=32, learning_rate=2e-3, checkpoint=200, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Recall:
    """How one of the models is trained.

    Attributes:
        memory: of its layers.
        most: pairs of a text.
        questions: of a text, at most.
        talk: words of a text.
        width: of the residual stream.
        inner: width of the MLPs.
        tested: texts whose accuracy is measured, at each checkpoint the same.
    """

    memory: Memory = "hybrid"
    most: int = len(NAMES)
    questions: int = 8
    talk: int = 24
    layers: int = 4
    width: int = 64
    heads: int = 4
    inner: int = 176
    tested: int = 300
    schedule: Schedule = field(default_factory=recall_schedule)

    def __post_init__(self) -> None:
        require("most", self.most, 1, len(NAMES))
        require("questions", self.questions, 1)
        require("talk", self.talk, 0)
        require("tested", self.tested, 1)

    @property
    def name(self) -> str:
        return f"recall-{self.memory}-{self.schedule.seed}"

    def model(self) -> PreTrainedModel:
        shape = word_shape(vocabulary(), self.layers, self.width, self.heads)
        return model_of(self.memory, self.inner, shape)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer(vocabulary())

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        pairs = int(rng.integers(1, self.most + 1))
        return loss_of(model, [self.batch(draw_digits(rng, self.schedule.batch, pairs), rng)])

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> Mapping[str, float]:
        counts = sorted({max(1, self.most // 2), self.most})
        return {f"{pairs} pairs": self._right(model, draw_digits(rng, self.tested, pairs), rng) for pairs in counts}

    def _right(self, model: PreTrainedModel, digits: Digits, rng: np.random.Generator) -> float:
        batch = self.batch(digits, rng)
        return float(batch.likeliest(model)[batch.counts[:, 1:]].float().mean())

    def batch(self, digits: Digits, rng: np.random.Generator) -> TrainingBatch:
        """Texts of these digits, and questions in random order; the answers count."""
        rows, pairs = digits.shape
        asked = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)[:, : self.questions]
        talk = draw_talk(rng, rows, self.talk) + NUMBER["A"]
        # Where each question stands among the words of the talk.
        before = np.sort(rng.integers(self.talk + 1, size=asked.shape), axis=1)
        length = self.talk + 3 * asked.shape[1]
        answered = np.zeros((rows, length), dtype=bool)
        later = np.zeros((rows, length), dtype=np.int64)
        first = before + 3 * np.arange(asked.shape[1])
        values = np.take_along_axis(digits, asked, axis=1) + NUMBER["0"]
        words = np.full_like(asked, NUMBER[ASK]), asked + NUMBER["a"], values
        for step, word in enumerate(words):
            np.put_along_axis(later, first + step, word, axis=1)
        np.put_along_axis(answered, first + 2, True, axis=1)
        later[later == 0] = talk.ravel()
        stated = np.stack([np.tile(np.arange(pairs) + NUMBER["a"], (rows, 1)), digits + NUMBER["0"]], 2)
        start = np.full((rows, 1), NUMBER["<bos>"])
        ids = torch.from_numpy(np.concatenate([start, stated.reshape(rows, -1), later], axis=1))
        counts: Bool[Tensor, "rows tokens"] = torch.zeros_like(ids, dtype=torch.bool)
        counts[:, ids.shape[1] - length :] = torch.from_numpy(answered)
        return TrainingBatch(ids, counts, torch.ones_like(counts))
