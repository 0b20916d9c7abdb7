"""Whether a wrong line can be seen: in what the model says when it is asked, and in what a probe reads of its slots."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.models.lens import Family
from kvprobe.probing.controls import hash_control
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import chosen, fit_tasks
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.splits import fold_numbers
from kvprobe.studies.code_poisoning.answers import NOTHING
from kvprobe.studies.code_poisoning.coder import Coder
from kvprobe.studies.code_poisoning.drafts import PART, SUSPECT, Draft, handed
from kvprobe.studies.code_poisoning.tasks import CodeTask
from kvprobe.tasks.designs import Target
from kvprobe.text.tokens import Tokens

PLACES = ("before", "at", "after")
"""The last tokens of the line before the wrong one, of the wrong one, and of the answer."""
READERS: dict[str, Family] = {"residual": "resid_post", "K": "k", "V": "v"}
TEXT, HASH = "text", "hash"
"""A reader of the line's tokens alone, and the residual's reading of labels that can only be memorised."""
FOLDS = 4
YES, NO = "Yes", "No"


def suspicions(coder: Coder, drafts: Sequence[Draft]) -> list[dict[str, Any]]:
    """How likely "Yes" is, against "No", where the model is asked whether there is a bug."""
    asked = list(product(drafts, ("own", "other's")))
    prompts = [
        draft.conversation(coder, SUSPECT)
        if whose == "own"
        else coder.turns.chat(handed(draft.task.whole, draft.text, SUSPECT))
        for draft, whose in asked
    ]
    logits = torch.cat(
        [
            coder.model.extend(None, prompts[start : start + coder.rows])[1][:, -1].float().cpu()
            for start in range(0, len(prompts), coder.rows)
        ]
    )
    words = [coder.turns.ids(word)[0] for word in (YES, NO)]
    chances = logits[:, words].softmax(-1)[:, 0].tolist()
    return [
        {"draft": draft.kind, "asked": whose, "suspects": chance}
        for (draft, whose), chance in zip(asked, chances, strict=True)
    ]


def probed(coder: Coder, tasks: Sequence[CodeTask], rng: np.random.Generator) -> pd.DataFrame:
    """Whether a probe that was trained on other templates tells each wrong solution from the right one.

    Each bug of each task is one pair: the right solution and the wrong one, read at the same places.
    """
    pairs = [(task, bug) for task in tasks for bug in task.bugs]
    texts = [
        Draft.written(kind, task, bug, NOTHING).conversation(coder, SUSPECT)
        for task, bug in pairs
        for kind in ("planted", "sound")
    ]
    labels = torch.tensor([[1, 0] * len(pairs)])
    templates = np.repeat([task.template for task, _ in pairs], 2)
    folds = fold_numbers("leave-context-out", templates, FOLDS, rng)
    control = hash_control(labels, templates.tolist(), 2, int(rng.integers(2**31)))
    read, tables = _read(coder, texts), []

    def add(place: str, reader: str, predicted: Int[Tensor, "samples"], task: Int[Tensor, "1 samples"]) -> None:
        right = predicted.cpu().eq(task[0]).double().numpy()
        tables.append(
            pd.DataFrame(
                {
                    "sample": np.arange(len(right)),
                    "template": templates,
                    "place": place,
                    "reader": reader,
                    "right": right,
                }
            )
        )

    for at, place in enumerate(PLACES):
        for reader, family in READERS.items():
            tensor = read[family][:, :, at]
            sites: dict[Family, tuple[Site, ...]] = {
                family: tuple(Site(layer, None, "last") for layer in range(tensor.shape[1]))
            }
            features = Features({family: tensor}, sites, np.arange(len(texts)), labels, templates, TARGET)
            both = [labels, control] if reader == "residual" else [labels]
            fits = fit_tasks(features, "leave-context-out", folds, both)
            add(place, reader, chosen(fits[0], folds).predicted[0], labels)
            if reader == "residual":
                add(place, HASH, chosen(fits[1], folds).predicted[0], control)
    words = ridge_probes(
        counts([tokens.ids[tokens.span(PART)] for tokens in texts])[None], labels, torch.from_numpy(folds), 2
    )
    add("at", TEXT, words.predicted[0, 0], labels)
    return pd.concat(tables, ignore_index=True)


TARGET = Target("wrong", ("right", "wrong"))


def _read(coder: Coder, texts: Sequence[Tokens]) -> dict[Family, Float[Tensor, "samples layers places dim"]]:
    """What the readers see at the three places of each text."""
    parts: dict[Family, list[Tensor]] = {family: [] for family in READERS.values()}
    for start in range(0, len(texts), coder.rows):
        marked = [with_places(tokens) for tokens in texts[start : start + coder.rows]]
        captured = coder.model.capture(marked, list(parts), segments=list(PLACES))
        for family, read in parts.items():
            stacked = captured.stack(family).float().cpu()
            if stacked.dim() == 5:  # heads side by side
                stacked = stacked.permute(0, 1, 3, 2, 4).flatten(3)
            read.append(stacked.transpose(0, 1))
    return {family: torch.cat(read) for family, read in parts.items()}


def with_places(tokens: Tokens) -> Tokens:
    """The answer alone, with the three tokens that are read as segments of their own."""
    part = tokens.span(PART)
    end = next((at for at in range(part.stop, len(tokens)) if tokens.segments[at].startswith("user")), len(tokens))
    segments = list(tokens.segments[:end])
    for place, at in zip(PLACES, (part.start - 1, part.stop - 1, end - 1), strict=True):
        segments[at] = place
    return replace(tokens[:end], segments=tuple(segments))


def counts(texts: Sequence[Sequence[int]]) -> Float[Tensor, "samples words"]:
    """How often each token is in each text."""
    words = {word: place for place, word in enumerate(sorted({word for text in texts for word in text}))}
    found = torch.zeros(len(texts), len(words))
    for row, text in zip(found, texts, strict=True):
        for word in text:
            row[words[word]] += 1
    return found
