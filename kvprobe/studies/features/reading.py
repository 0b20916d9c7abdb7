"""One conversation through the dictionaries: latents of every arm beside the raw activations, and what latents do to
the answer.

Segments are read as in the leakage study: each context once up to the code, the codes as rows of one batch from there
on, and T3 with T1 and T2 masked. The restart arm, which never sees them, is computed once per context. A segment's
slots are averaged after they were encoded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.capture import Captured, Port, editing
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.saes import Dictionary, reconstruction, splice
from kvprobe.saes.places import joined, port_of
from kvprobe.studies.features import Config
from kvprobe.tasks.passcode import Context, contexts, conversation, draw_codes
from kvprobe.text.tokens import Tokens

HIDDEN_SEGMENTS = ("T1", "T2")
PER_CODE = ("hidden", "summary2", "T3")
"""Slots of T2 after the code; of summary 2, which saw T2; of T3 up to the answer, which cannot see it."""
RESTARTED = ("summary2", "T3")
UNTOUCHED = "system"
"""A segment before everything that is hidden: nothing may differ there."""
READERS = ("latents", "raw", "turned")
"""What is read: latents, the activations themselves, and the latents of the dictionary turned at random."""
SPLICED = 12
"""Conversations in which the reconstruction takes the place of the activation."""


def samples_of(model: Model, config: Config) -> list[tuple[Context, list[str]]]:
    """Each context with its codes."""
    codes = draw_codes(config.contexts * config.codes, np.random.default_rng([config.seed, 1]), model.tokenizer)
    chosen = contexts()[: config.contexts]
    return [(context, codes[at * config.codes : (at + 1) * config.codes]) for at, context in enumerate(chosen)]


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
    wanted = wanted_at([features for features, _ in readers.values()])
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
    tensors: dict[str, Tensor] = {}
    for name, (features, turned) in readers.items():
        for arm, (captured, slots) in spans.items():
            raw = joined(captured[features.place.family, features.place.layer])[:, slots].float()
            tensors[f"{name}.{arm}.raw"] = raw.mean(1)
            tensors[f"{name}.{arm}.latents"] = features.encode(raw).float().mean(1)
            tensors[f"{name}.{arm}.turned"] = turned.encode(raw).float().mean(1)
    tensors["digits"] = torch.tensor([[int(digit) for digit in code] for code in codes])
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def wanted_at(dictionaries: Sequence[Dictionary]) -> dict[str, Any]:
    """What `kvprobe.inference.capture` is to capture for these."""
    places = [features.place for features in dictionaries]
    return {"families": sorted({place.family for place in places}), "layers": [place.layer for place in places]}


def restarted(model: Model, context: Context, code: str) -> Tokens:
    """The conversation without its hidden segments, up to the answer."""
    tokens = conversation(context, code).without(*HIDDEN_SEGMENTS).tokens(model.tokenizer)
    return tokens[: tokens.part("answer").start]


def judge(model: Model, features: Dictionary, texts: Sequence[Tokens], seed: int) -> pd.DataFrame:
    """One row per text (`grid` is texts) with what `reconstruction` finds, `turned` (the error of the turned
    dictionary) and, for the first few, what `splice` finds; and one per latent (`grid` is latents)."""
    quality, turned = (reconstruction(model, dictionary, texts) for dictionary in (features, features.rotated(seed)))
    rows = quality.texts.assign(grid="texts", text=range(len(texts)), turned=turned.texts["error"])
    rows = rows.join(splice(model, features, texts[:SPLICED]))
    latents = pd.DataFrame({"grid": "latents", "latent": range(features.width), "density": quality.density})
    return pd.concat([rows, latents], ignore_index=True).assign(place=str(features.place))


Sets = Mapping[str, Mapping[str, Sequence[int]]]
"""Latents by place and by the name of the set."""


def exchange(model: Model, dictionaries: Sequence[Dictionary], context: Context, code: str, sets: Sets) -> pd.DataFrame:
    """KL from the restart arm's predictions to those of the retained arm, mean over T3's slots: as it is (`retained`),
    with T3's whole activations at the place taken from the restart arm (`whole`), and with only what a set of latents
    makes of the difference. Of a set's name the first word counts, so that there may be several draws of one sort."""
    tokens = conversation(context, code).tokens(model.tokenizer)
    third, answer = tokens.span("T3").start, tokens.part("answer").start
    asked, alone = tokens[third:answer], restarted(model, context, code)
    past = model.prefill(tokens[:third]).mask(*HIDDEN_SEGMENTS)
    wanted = wanted_at(dictionaries)
    restart = model.capture(alone, **wanted, slots=range(alone.span("T3").start, len(alone)), logits=len(asked))
    retained = model.capture(asked, **wanted, past=past)
    target = restart.logits[0].float().log_softmax(-1)
    rows = []
    for features in dictionaries:
        place = features.place
        there, here = (joined(cache[place.family, place.layer])[0].float() for cache in (restart, retained))
        moved, directions = features.encode(there) - features.encode(here), features.directions
        shifts = {"retained": torch.zeros_like(here), "whole": there - here}
        for name, latents in sets[str(place)].items():
            columns = torch.tensor(list(latents), dtype=torch.long, device=moved.device)
            shifts[name] = moved[:, columns] @ directions[columns]
        predicted = _shifted(model, past, asked, port_of(model.lanes, place), torch.stack(list(shifts.values())))
        kl = relative_entropy(target.expand_as(predicted), predicted).mean(1)
        rows += [
            {"place": str(place), "set": name.split()[0], "kl": value}
            for name, value in zip(shifts, kl.tolist(), strict=True)
        ]
    return pd.DataFrame(rows)


def _shifted(
    model: Model, past: KVCache, asked: Tokens, port: Port, shifts: Float[Tensor, "rows slots dim"]
) -> Float[Tensor, "rows slots vocab"]:
    """Log-probabilities after each slot of T3 with these added to what is computed at a port, row by row."""
    with editing(model.lanes, port, lambda tensor: tensor + shifts.to(tensor).view(tensor.shape)):
        _, logits = model.extend(past, [asked] * len(shifts), logits=len(asked))
    return logits.float().log_softmax(-1)
