"""One conversation through the dictionaries: latents of every arm beside the raw activations, and what latents do to
the answer.

Segments are read as in the leakage study: each context once up to the code, the codes as rows of one batch from there
on, and T3 with T1 and T2 masked. The restart arm, which never sees them, is computed once per context. A segment's
slots are averaged after they were encoded.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from kvprobe.inference.capture import Captured
from kvprobe.inference.model import Model
from kvprobe.saes import Dictionary, exchange_latents
from kvprobe.saes.dictionary import slot_means
from kvprobe.saes.places import asked_at
from kvprobe.tasks.passcode import Context, conversation
from kvprobe.text.tokens import Tokens

HIDDEN_SEGMENTS = ("T1", "T2")
PER_CODE = ("hidden", "summary2", "T3")
"""Slots of T2 after the code; of summary 2, which saw T2; of T3 up to the answer, which cannot see it."""
RESTARTED = ("summary2", "T3")
UNTOUCHED = "system"
"""A segment before everything that is hidden: nothing may differ there."""
READERS = ("latents", "raw", "turned")
"""What is read: latents, the activations themselves, and the latents of the dictionary turned at random."""


def read_context(
    model: Model, context: Context, codes: Sequence[str], readers: Mapping[str, tuple[Dictionary, Dictionary]]
) -> dict[str, Tensor]:
    """Means over the slots of each segment.

    Returns:
        `place.arm.reader` of shape `[codes, dim]`, with one row for the arms `restart summary2`, `restart T3`, `system`
        and `restart system`; and `digits` `[codes, 5]`.
    """
    whole = [conversation(context, code).tokens(model.tokenizer) for code in codes]
    start, third = whole[0].part("code").start, whole[0].span("T3").start
    after_code, answer = whole[0].part("code").stop - start, whole[0].part("answer").start
    second = whole[0].span("summary2").start - start
    wanted = asked_at([features.place for features, _ in readers.values()])
    prefix = model.capture(whole[0][:start], **wanted, segments=[UNTOUCHED], keep_cache=True)
    alone = restarted(model, context, codes[0])
    restart = model.capture(alone, **wanted)
    turn = model.capture([row[start:third] for row in whole], **wanted, past=prefix.cache, keep_cache=True)
    assert turn.cache is not None
    masked = model.capture([row[third:answer] for row in whole], **wanted, past=turn.cache.mask(*HIDDEN_SEGMENTS))

    spans: dict[str, tuple[Captured, slice]] = {
        "hidden": (turn, slice(after_code, second)),
        "summary2": (turn, slice(second, None)),
        "T3": (masked, slice(None)),
        "restart summary2": (restart, alone.span("summary2")),
        "restart T3": (restart, slice(alone.span("T3").start, None)),
        # The first slot is no business of a dictionary.
        UNTOUCHED: (prefix, slice(1, None)),
        f"restart {UNTOUCHED}": (restart, slice(1, alone.span(UNTOUCHED).stop)),
    }
    tensors = {
        f"{name}.{arm}.{reader}": mean
        for name, (features, turned) in readers.items()
        for arm, (captured, slots) in spans.items()
        for reader, mean in slot_means(captured, slots, latents=features, turned=turned).items()
    }
    tensors["digits"] = torch.tensor([[int(digit) for digit in code] for code in codes])
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def restarted(model: Model, context: Context, code: str) -> Tokens:
    """The conversation without its hidden segments, up to the answer."""
    tokens = conversation(context, code).without(*HIDDEN_SEGMENTS).tokens(model.tokenizer)
    return tokens[: tokens.part("answer").start]


Sets = Mapping[str, Mapping[str, Sequence[int]]]
"""Latents by place and by the name of the set."""


def exchange(model: Model, dictionaries: Sequence[Dictionary], context: Context, code: str, sets: Sets) -> pd.DataFrame:
    """KL from the restart arm's predictions to those of the retained arm over T3: as it is (`retained`), with T3's
    whole activations at the place taken from the restart arm (`whole`), and with only what a set of latents makes of
    the difference. Of a set's name the first word counts, so that there may be several draws of one sort."""
    tokens = conversation(context, code).tokens(model.tokenizer)
    third, answer = tokens.span("T3").start, tokens.part("answer").start
    asked, alone = tokens[third:answer], restarted(model, context, code)
    past = model.prefill(tokens[:third]).mask(*HIDDEN_SEGMENTS)
    wanted = asked_at([features.place for features in dictionaries])
    restart = model.capture(alone, **wanted, slots=range(alone.span("T3").start, len(alone)), logits=len(asked))
    retained = model.capture(asked, **wanted, past=past)
    tables = []
    for features in dictionaries:
        place = str(features.place)
        rows = exchange_latents(model, features, past, asked, retained, restart, sets[place])
        rows["set"] = rows["set"].replace({"as it is": "retained"}).str.split().str[0]
        tables.append(rows.assign(place=place))
    return pd.concat(tables, ignore_index=True)
