"""Whether the model uses what can be read: its own answer with everything in view, after hiding, and after a
restart."""

from collections.abc import Iterator, Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import code_measurements, divergence
from kvprobe.probing.read_features import ROWS, Reading, When
from kvprobe.tasks.designs import Design, Sample
from kvprobe.text.tokens import Tokens

USE_ARMS = ("full", "retained", "restart")
Said = dict[tuple[int, str], dict[str, float]]
"""How the answers fare, by the number of the sample and the arm."""


def can_be_asked(model: Model, design: Design, at: str) -> bool:
    """Whether segment `at` holds a part `answer` that the model can be asked for, and that differs within contexts.

    A design of single slots is about slots, not about conversations, so it cannot be asked.

    Raises:
        UserError: a context with one sample only, or whose answers differ in their number of tokens.
    """
    first = design.samples[0].transcript.tokens(model.tokenizer)
    if design.samples[0].slot is not None or "answer" not in first[first.span(at)].parts:
        return False
    answers: dict[str, list[tuple[int, ...]]] = {}
    for sample in design.samples:
        answers.setdefault(sample.context, []).append(_answer(model, sample, at).ids)
    for context, in_context in answers.items():
        lengths = sorted({len(answer) for answer in in_context})
        if len(in_context) < 2 or len(lengths) > 1:
            raise UserError(
                f"Context {context!r} has {len(in_context)} samples whose answers take {lengths} tokens; use is "
                "measured against other answers of the same length, at least one."
            )
    return any(len(set(in_context)) > 1 for in_context in answers.values())


class Asking:
    """The model is asked for the part `answer` where a reading of its conversation ends, so nothing is read twice.

    First `restarted` follows the readings without the hidden segments, if there are such segments; then `hidden`
    follows those in which they are masked, or (`when="after"`) those that it then masks.
    """

    def __init__(self, model: Model, design: Design, at: str, when: When = "before") -> None:
        self.model, self.design, self.at, self.when = model, design, at, when
        self.said: Said = {}
        self._restarts: dict[int, Tensor] = {}  # of each sample, the logits before its answer
        self._members = members_of(design)

    def restarted(self, floor: Design, reading: Reading) -> None:
        """Ask where the hidden segments never were; `floor` is the design without them."""
        cache, first = _after(reading)
        for numbers, logits in self._answers(floor, reading, cache, first):
            self._note("restart", numbers, logits)
            self._restarts |= dict(zip(numbers, logits[:, 0], strict=True))

    def hidden(self, hide: Sequence[str], reading: Reading) -> None:
        """Ask after hiding, and with everything in view."""
        whole = retained = _after(reading)
        if hide and self.when == "after":
            # The last token is read again, so that it is the first that does not see them.
            past = whole[0].rewind(slots=-1).mask(*hide)
            cache, logits = self.model.extend(past, [tokens[-1:] for tokens in reading.asked])
            retained = cache, logits[:, -1]
        elif hide and reading.before is not None:
            cache, logits = self.model.extend(reading.before, list(reading.asked))
            whole = cache, logits[:, -1]
        arms = zip(
            self._answers(self.design, reading, *whole), self._answers(self.design, reading, *retained), strict=True
        )
        for (numbers, full), (_, kept) in arms:
            again = torch.stack([self._restarts.pop(number) for number in numbers]) if hide else full[:, 0]
            self._note("full", numbers, full)
            self._note("retained", numbers, kept)
            if not hide:
                self._note("restart", numbers, full)
            for arm, said in zip(USE_ARMS, (full[:, 0], kept[:, 0], again), strict=True):
                for number, kl in zip(numbers, divergence(full[:, 0], said)[0].tolist(), strict=True):
                    self.said[number, arm]["kl_from_full"] = kl

    def _answers(
        self, design: Design, reading: Reading, cache: KVCache, first: Float[Tensor, "rows vocab"]
    ) -> Iterator[tuple[list[int], Float[Tensor, "samples length vocab"]]]:
        """The distributions of the tokens of the samples' answers, each given the true tokens before it.

        Args:
            cache: after the reading.
            first: the logits there.
        """
        samples = [(number, row) for row, members in enumerate(reading.members) for number in members]
        for begin in range(0, len(samples), ROWS):
            numbers, rows = (list(column) for column in zip(*samples[begin : begin + ROWS], strict=True))
            answers = [_answer(self.model, design.samples[number], self.at) for number in numbers]
            yield numbers, forced_logits(self.model, cache.rows(rows), first[rows][:, None], answers)

    def _note(self, arm: str, numbers: Sequence[int], logits: Float[Tensor, "samples length vocab"]) -> None:
        """What an arm makes of the answers of these samples, which are of one context."""
        members = self._members[self.design.samples[numbers[0]].context]
        answers = [_answer(self.model, self.design.samples[number], self.at).ids for number in members]
        mine = [members.index(number) for number in numbers]
        measured = code_measurements(logits, torch.tensor(answers, device=logits.device), mine)
        for place, number in enumerate(numbers):
            self.said[number, arm] = {
                "logprob": float(measured["logprob"][place].sum()),
                "margin": float(measured["margin"][place].sum()),
                "token_accuracy": float(measured["correct"][place].double().mean()),
            }


def members_of(design: Design) -> dict[str, list[int]]:
    """The numbers of the samples of each context."""
    members: dict[str, list[int]] = {}
    for number, sample in enumerate(design.samples):
        members.setdefault(sample.context, []).append(number)
    return members


def use_table(design: Design, said: Said) -> pd.DataFrame:
    """One row per sample and arm: log-probability of the part `answer`, its margin over the answers of the context's
    other samples, whether its tokens are the most likely, and the KL from the full context's next token."""
    return pd.DataFrame(
        [
            {"sample": number, "context": context, "condition": arm, **said[number, arm]}
            for context, members in members_of(design).items()
            for arm in USE_ARMS
            for number in members
        ]
    )


def _answer(model: Model, sample: Sample, at: str) -> Tokens:
    tokens = sample.transcript.tokens(model.tokenizer)
    inside = tokens[tokens.span(at)]
    return inside[inside.part("answer")]


def _after(reading: Reading) -> tuple[KVCache, Float[Tensor, "rows vocab"]]:
    """The cache after a reading, and the logits there."""
    assert reading.captured.cache is not None
    return reading.captured.cache, reading.captured.logits[:, -1]
