"""The models `steps`: small dense and mixture-of-experts transformers that work sums step by step.

Two corpora differ in one thing. In `plain`, no text has an error. In `corrected`, drafts and answers have some, whose
wrong values are never a target: the model learns what follows them, which is `wait` and the steps from the wrong one
on, stated right.

The remark after every step is what lets so few layers learn it: it asks the same question after right values and
wrong ones. With a `wait` only after wrong ones, 4 layers do not learn to notice them in as many batches.

A dense model matches a mixture on active parameters (its MLP is as wide as the experts that a token goes to) or on
total ones (as wide as all experts).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kvprobe.tasks.steps import LONGEST, Problem, Step, draw_problem, draw_wrong, text_of, vocabulary
from kvprobe.training.loop import TrainingBatch, loss_of
from kvprobe.training.schedule import Corpus, Schedule, Shape
from kvprobe.training.words import word_shape, word_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' <' + message['role'] + '> ' + message['content'] + ' <end>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' <assistant>' }}{% endif %}"
)
EXPERTS, CHOSEN = 8, 2
PARTS = 4
"""Of a batch, by length, so that short conversations are not padded to the longest."""
ERROR_FREE, HIGHEST_RATE = 0.1, 0.6
"""Of conversations of the corrected corpus, the share without errors; of the others' steps, at most this share is
wrong."""
AT_ONCE, FALSE_ALARM = 0.9, 0.05
"""Of wrong steps in an answer, the share that is taken back at once; of right ones, the share that is taken back too,
by a `wait` that is no target."""

Turn = list[tuple[str, bool]]
"""Words, and whether each is a target."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How one of the models is trained.

    Attributes:
        width: of the residual stream.
        expert: width of one expert.
        tested: examples of each kind whose accuracy is measured.
    """

    shape: Shape
    corpus: Corpus
    layers: int = 4
    width: int = 64
    heads: int = 4
    expert: int = 32
    tested: int = 200
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=6000, batch=64))

    @property
    def name(self) -> str:
        return f"steps-{self.shape}-{self.corpus}-{self.schedule.seed}"

    def model(self) -> PreTrainedModel:
        shape = word_shape(
            vocabulary(), self.layers, self.width, self.heads, kv_heads=self.heads // 2, longest=512, end="<end>"
        )
        if self.shape == "moe":
            experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "router_aux_loss_coef": 0.01}
            return MixtralForCausalLM(MixtralConfig(intermediate_size=self.expert, **experts, **shape))
        inner = self.expert * (CHOSEN if self.shape == "active" else EXPERTS)
        return LlamaForCausalLM(LlamaConfig(intermediate_size=inner, **shape))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return word_tokenizer(vocabulary(), CHAT_TEMPLATE, end="<end>", special=("<user>", "<assistant>"))

    def loss(self, model: PreTrainedModel, rng: np.random.Generator) -> Float[Tensor, ""]:
        rows = sorted((conversation(self.corpus, rng) for _ in range(self.schedule.batch)), key=len)
        part = max(1, len(rows) // PARTS)
        return loss_of(model, [batch_of(rows[first : first + part]) for first in range(0, len(rows), part)])

    def accuracy(self, model: PreTrainedModel, rng: np.random.Generator) -> Mapping[str, float]:
        kinds: dict[str, list[Turn]] = {
            kind: [] for kind in ("solve", "notice", "continue a wrong draft", "review a wrong draft")
        }
        for _ in range(self.tested):
            problem = draw_problem(LONGEST, rng)
            right = problem.steps()
            number = int(rng.integers(LONGEST - 1))
            wrong = problem.steps({number: draw_wrong(right[number].after, rng)})[: number + 1]
            asked, given = user(f"{problem.question} solve"), f"{problem.question} {text_of(wrong)}"
            stated = text_of(wrong).removesuffix(" ok")
            again = f"wait {text_of(right[number:])}"
            kinds["solve"].append([*asked, *said(text_of(right))])
            kinds["notice"].append([*asked, *hidden(f"<assistant> {stated}"), *targets("wait")])
            kinds["continue a wrong draft"].append([*user(f"{given} continue"), *said(again)])
            kinds["review a wrong draft"].append([*user(f"{given} review"), *said(text_of(right))])
        return {kind: float(batch_of(rows).right(model).float().mean()) for kind, rows in kinds.items()}


def batch_of(rows: Sequence[Turn]) -> TrainingBatch:
    """Conversations as a batch, each after the start token."""
    number = {word: index for index, word in enumerate(vocabulary())}
    length = 1 + max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    counts, present = (torch.zeros(len(rows), length, dtype=torch.bool) for _ in range(2))
    for row, words in enumerate(rows):
        ids[row, : 1 + len(words)] = torch.tensor([number["<bos>"], *(number[word] for word, _ in words)])
        counts[row, 1 : 1 + len(words)] = torch.tensor([target for _, target in words])
        present[row, : 1 + len(words)] = True
    return TrainingBatch(ids, counts, present)


def conversation(corpus: Corpus, rng: np.random.Generator) -> Turn:
    """A random conversation: a question answered; a draft of the user's or of the model's own, continued or reviewed,
    perhaps after an erratum."""
    problem = draw_problem(1 if rng.random() < 0.1 else int(rng.integers(3, LONGEST + 1)), rng)
    right = problem.steps()
    rate = rng.random() * HIGHEST_RATE if corpus == "corrected" and rng.random() > ERROR_FREE else 0.0

    def drawn() -> dict[int, int]:
        """Wrong values, by the number of their step."""
        return {number: draw_wrong(step.after, rng) for number, step in enumerate(right) if rng.random() < rate}

    def answered(first: int, lead: str = "") -> Turn:
        return answer(problem, first, drawn(), rng, lead)

    form = rng.choice(["solve", "user", "own"], p=[0.8, 0.1, 0.1])
    if form == "solve":
        return [*user(f"{problem.question} solve"), *answered(0)]
    given = int(rng.integers(1, len(right) + 1))
    wrong = {number: value for number, value in drawn().items() if number < given}
    draft = problem.steps(wrong)[:given]
    unfinished = [("<assistant>", False), *((word, not wrong) for word in text_of(draft).split()), ("<end>", False)]
    opening = (
        user(f"{problem.question} {text_of(draft)}", closed=False)
        if form == "user"
        else [*user(f"{problem.question} solve"), *unfinished, *user("", closed=False)]
    )
    command = rng.choice(["continue", "review", "note"], p=[0.4, 0.4, 0.2])
    if command == "review":
        return [*opening, *hidden("review <end>"), *answered(0)]
    first = min(wrong, default=None)
    if command == "note":
        noted = first if first is not None else int(rng.integers(given))
        on = given if first is None else first + 1
        return [*opening, *hidden(f"note {right[noted]} continue <end>"), *answered(on)]
    if first is None:
        return [*opening, *hidden("continue <end>"), *answered(given)]
    return [*opening, *hidden("continue <end>"), *answered(first, "wait")]


def answer(problem: Problem, first: int, wrong: Mapping[int, int], rng: np.random.Generator, lead: str = "") -> Turn:
    """The model's turn: `lead`, then the steps from `first` on. A wrong one is taken back at once, or one or two steps
    later by a `wait` that is no target."""
    right = problem.steps()
    words: Turn = [*hidden("<assistant>"), *targets(lead)]
    number = first
    while number < len(right):
        if number in wrong:
            at_once = rng.random() < AT_ONCE
            last = number if at_once else min(len(right) - 1, number + int(rng.integers(1, 3)))
            draft = problem.steps({number: wrong[number]})
            for place in range(number, last + 1):
                words += erring(draft[place], right[place], place == number)
                words += [("wait", at_once) if place == last else ("ok", False)]
            words += targets(text_of(right[number : last + 1]))
            number = last + 1
        else:
            if rng.random() < FALSE_ALARM:
                words += [*targets(str(right[number])), *hidden("wait")]
            words += targets(text_of([right[number]]))
            number += 1
    return [*words, ("<end>", True)]


def erring(step: Step, right: Step, slips: bool) -> Turn:
    """A step on the way to being taken back: wrong values are no targets, and neither is that another step follows."""
    first, *words = zip(str(step).split(), str(right).split(), strict=True)
    return [(first[0], slips), *((word, word == expected) for word, expected in words)]


def user(text: str, closed: bool = True) -> Turn:
    return hidden(f"<user> {text} <end>" if closed else f"<user> {text}")


def said(text: str) -> Turn:
    return [("<assistant>", False), *targets(text), ("<end>", True)]


def hidden(text: str) -> Turn:
    """Words that are no targets."""
    return [(word, False) for word in text.split()]


def targets(text: str) -> Turn:
    return [(word, True) for word in text.split()]
