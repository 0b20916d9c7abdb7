"""Whether the model uses what can be read: what it says of the answer with everything in view, after hiding, and after a restart."""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kvprobe.designs import Design, Sample
from kvprobe.model import Model
from kvprobe.outcomes import use_measurements
from kvprobe.transcript import Tokens

USE_ARMS = ("full", "retained", "restart")


def has_answer(model: Model, design: Design, at: str) -> bool:
    """Whether segment `at` of the conversations holds a part `answer` that the model can be asked for."""
    tokens = design.samples[0].transcript.tokens(model.tokenizer)
    return any(part == "answer" and name == at for part, name in zip(tokens.parts, tokens.segments, strict=True))


def measure_use(model: Model, design: Design, at: str, hide: Sequence[str]) -> pd.DataFrame:
    """One row per sample and arm: log-probability of the part `answer` of segment `at`, its margin over the answers of the
    context's other samples, whether its tokens are the likeliest, and the KL from the full context's next token.

    Raises:
        ValueError: a context with one sample only, or whose answers differ in their number of tokens.
    """
    contexts: dict[str, list[int]] = {}
    for number, sample in enumerate(design.samples):
        contexts.setdefault(sample.context, []).append(number)
    rows = []
    with tqdm(total=len(design.samples), desc="Asking the model", unit="conversation") as bar:
        for context, members in contexts.items():
            answers = [_answer(model, design.samples[number], at) for number in members]
            if len(members) < 2 or len({len(answer) for answer in answers}) > 1:
                raise ValueError(
                    f"Context {context!r} has {len(members)} samples whose answers take "
                    f"{sorted({len(answer) for answer in answers})} tokens; use is measured against other answers of the "
                    "same length, at least one."
                )
            codes = torch.tensor(answers, device=model.lanes.device)
            for index, number in enumerate(members):
                logits = _arms(model, design.samples[number], at, hide, len(answers[0]))
                found = use_measurements(logits, codes, [index])
                for place, arm in enumerate(USE_ARMS):
                    rows.append(
                        {
                            "sample": number,
                            "context": context,
                            "condition": arm,
                            "logprob": float(found["logprob"][0, place].sum()),
                            "margin": float(found["margin"][0, place].sum()),
                            "token_accuracy": float(found["correct"][0, place].double().mean()),
                            "kl_from_full": float(found["kl"][0, place]),
                        }
                    )
                bar.update()
    return pd.DataFrame(rows)


def _answer(model: Model, sample: Sample, at: str) -> tuple[int, ...]:
    tokens = sample.transcript.tokens(model.tokenizer)
    inside = tokens[tokens.span(at)]
    return inside.ids[inside.part("answer")]


def _arms(
    model: Model, sample: Sample, at: str, hide: Sequence[str], length: int
) -> list[Float[Tensor, "1 length vocab"]]:
    """The distributions of the answer's tokens under each arm, the true ones before each being given."""
    whole = sample.transcript.tokens(model.tokenizer)
    fresh = sample.transcript.without(*hide).tokens(model.tokenizer) if hide else whole
    asked, again = _before_last(whole, at), _before_last(fresh, at)
    past, restarted = (model.prefill(before) if len(before) else None for before in (asked[0], again[0]))
    retained = past.mask(*hide) if past is not None and hide else past
    arms = ((past, asked[1]), (retained, asked[1]), (restarted, again[1]))
    return [model.extend(cache, turn, logits=length)[1] for cache, turn in arms]


def _before_last(tokens: Tokens, at: str) -> tuple[Tokens, Tokens]:
    """What stands before segment `at`, and the segment up to but without the answer's last token."""
    span = tokens.span(at)
    inside = tokens[span]
    return tokens[: span.start], inside[: inside.part("answer").stop - 1]
