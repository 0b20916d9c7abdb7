"""Whether the model uses what can be read: its own answer with everything in view, after hiding, and after a
restart."""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import use_measurements
from kvprobe.progress import Bar
from kvprobe.tasks.designs import Design, Sample
from kvprobe.text.tokens import Tokens

USE_ARMS = ("full", "retained", "restart")

_ROWS = 16  # conversations that are asked side by side


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
        answers.setdefault(sample.context, []).append(_answer(model, sample, at))
    for context, in_context in answers.items():
        lengths = sorted({len(answer) for answer in in_context})
        if len(in_context) < 2 or len(lengths) > 1:
            raise UserError(
                f"Context {context!r} has {len(in_context)} samples whose answers take {lengths} tokens; use is "
                "measured against other answers of the same length, at least one."
            )
    return any(len(set(in_context)) > 1 for in_context in answers.values())


def measure_use(model: Model, design: Design, at: str, hide: Sequence[str]) -> pd.DataFrame:
    """One row per sample and arm: log-probability of the part `answer` of segment `at`, its margin over the answers of
    the context's other samples, whether its tokens are the most likely, and the KL from the full context's next token.

    Raises:
        UserError: see `can_be_asked`; or there is nothing to ask for.
    """
    if not can_be_asked(model, design, at):
        raise UserError(
            f"The conversations have no part 'answer' in segment {at!r} that differs within contexts; there is nothing "
            "to ask for."
        )
    contexts: dict[str, list[int]] = {}
    for number, sample in enumerate(design.samples):
        contexts.setdefault(sample.context, []).append(number)
    tables = []
    with Bar(total=len(design.samples), desc="Asking the model", unit="conversation") as bar:
        for context, members in contexts.items():
            samples = [design.samples[number] for number in members]
            answers = [_answer(model, sample, at) for sample in samples]
            codes = torch.tensor(answers, device=model.lanes.device)
            for first in range(0, len(members), _ROWS):
                batch = list(range(first, min(first + _ROWS, len(members))))
                logits = _arms(model, [samples[index] for index in batch], at, hide, len(answers[0]))
                measured = use_measurements(logits, codes, batch)
                for place, arm in enumerate(USE_ARMS):
                    tables.append(
                        pd.DataFrame(
                            {
                                "sample": [members[index] for index in batch],
                                "context": context,
                                "condition": arm,
                                "logprob": measured["logprob"][:, place].sum(1).tolist(),
                                "margin": measured["margin"][:, place].sum(1).tolist(),
                                "token_accuracy": measured["correct"][:, place].double().mean(1).tolist(),
                                "kl_from_full": measured["kl"][:, place].tolist(),
                            }
                        )
                    )
                bar.update(len(batch))
    return pd.concat(tables, ignore_index=True)


def _answer(model: Model, sample: Sample, at: str) -> tuple[int, ...]:
    tokens = sample.transcript.tokens(model.tokenizer)
    inside = tokens[tokens.span(at)]
    return inside.ids[inside.part("answer")]


def _arms(
    model: Model, samples: Sequence[Sample], at: str, hide: Sequence[str], length: int
) -> list[Float[Tensor, "rows length vocab"]]:
    """The distributions of the answers' tokens under each arm, each given the true tokens before it."""
    whole = [sample.transcript.tokens(model.tokenizer) for sample in samples]
    fresh = [sample.transcript.without(*hide).tokens(model.tokenizer) for sample in samples] if hide else whole
    before, asked = zip(*(_before_last(tokens, at) for tokens in whole), strict=True)
    again, asked_again = zip(*(_before_last(tokens, at) for tokens in fresh), strict=True)
    past = model.prefill(list(before)) if len(before[0]) else None
    retained = past.mask(*hide) if past is not None and hide else past
    # Without the hidden segments, the conversations of a context are mostly identical.
    alone = again[:1] if len(set(again)) == 1 else again
    restarted = model.prefill(list(alone)) if len(again[0]) else None
    arms = ((past, asked), (retained, asked), (restarted, asked_again))
    return [model.extend(cache, list(questions), logits=length)[1] for cache, questions in arms]


def _before_last(tokens: Tokens, at: str) -> tuple[Tokens, Tokens]:
    """The tokens before segment `at`, and the segment without the answer's last token."""
    span = tokens.span(at)
    inside = tokens[span]
    return tokens[: span.start], inside[: inside.part("answer").stop - 1]
