"""K and V go from the base's cache of a conversation to its fine-tune's and back; then the last token is read.

Base and fine-tune have the same tokens, positions and shapes, so that any slot of one fits into the other's cache
("KV-Cache Patching: Tracing How and Where Fine-Tuned Behaviors Arise", arXiv 2610.41480). The measure is the logit of
the word with which an answer that has the behaviour goes on, less that of the word without it. Beside it, on the side
of the weights, parts of what the adapter adds to them are given to the base, or taken from the fine-tune, and the whole
conversation is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.work import kept
from kvprobe.files import expanded
from kvprobe.inference.forced import asked_logits
from kvprobe.inference.model import Model
from kvprobe.models.adapters import WEIGHTS, Changes, LowRank, add_changes, changes_of, sharing
from kvprobe.models.catalogue import file_digest
from kvprobe.models.lanes import Lanes
from kvprobe.models.noted import NotedFile, noted
from kvprobe.shipped import shipped
from kvprobe.studies.finetuned import Config
from kvprobe.tasks.behaviours import BEHAVIOURS, Behaviour, Told, draw_told
from kvprobe.text.first_tokens import first_tokens
from kvprobe.text.tokens import ANSWER_HEADER, Tokens

Who = Literal["base", "tuned"]
"""Whose weights read, or made a cache."""
WHO: tuple[Who, ...] = get_args(Who)
HEADER, ALL = "header", "all"
SEGMENTS = ("system", "fact", "question", HEADER)
"""Of a conversation up to the last token; `header` is that of the answer, with its lead."""
PARTS = ("K", "V", "KV")
ITSELF, SHUFFLED, OTHER, LONE, SUM = "itself", "shuffled", "other", "none", "sum"
"""Controls: the base's own cache; that of a fine-tune whose changes have their rows shuffled, so that each is of the
same norm; that of another behaviour's fine-tune. Of weights: nothing changed; everything."""
LONGEST = 128
"""Tokens of a conversation, about."""
DRAWS = 1000
"""Conversations that are drawn for one that is not among those before."""
ROWS = 32
"""Caches that are read at once."""


@dataclass(frozen=True)
class FineTune:
    """A behaviour's models.

    Attributes:
        changes: what its adapter adds to the base's weights.
        scratch: models of the same weights, by which they are, in which some are changed for a while.
    """

    models: Mapping[str, Model]
    changes: Changes
    scratch: Mapping[Who, Any]

    def changed(self, reader: Who, names: Sequence[str], prompt: Tokens) -> Float[Tensor, "vocab"]:
        """The logits after a prompt if these changes are added to the base, or taken from the fine-tune."""
        plain, whole = self.scratch[reader], self.models[reader].lanes.plain
        sign = 1 if reader == "base" else -1
        add_changes(plain, {name: LowRank(self.changes[name].down, sign * self.changes[name].up) for name in names})
        try:
            ids = torch.tensor([prompt.ids], device=plain.device)
            with torch.no_grad():
                return plain(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()
        finally:
            for name in names:
                plain.get_submodule(name).weight = whole.get_submodule(name).weight


def folder_of_adapter(config: Config, behaviour: Behaviour) -> Path:
    """Where a behaviour's adapter is.

    Raises:
        UserError: there is none.
    """
    folder = (expanded(config.adapters) if config.adapters else shipped("models") / "adapters") / f"{behaviour}-0"
    if not folder.is_dir():
        raise UserError(f"There is no adapter in {folder}; train it with `kvprobe train adapter`.")
    return folder


def inputs(config: Config) -> Mapping[str, str]:
    """Digests of the adapters that are asked for, and of those that they are held against."""
    used: set[Behaviour] = {*config.behaviours, *map(control_of, config.behaviours)}
    return {name: file_digest(folder_of_adapter(config, name) / WEIGHTS) for name in sorted(used)}


def control_of(behaviour: Behaviour) -> Behaviour:
    """The behaviour whose fine-tune is a control of this one's."""
    return BEHAVIOURS[1] if behaviour == BEHAVIOURS[0] else BEHAVIOURS[0]


def conversations(config: Config, behaviour: Behaviour) -> list[Told]:
    """Those of a behaviour, no two alike.

    Raises:
        UserError: the grammar has fewer.
    """
    found: dict[Told, None] = {}
    for number in range(config.prompts):
        rng = np.random.default_rng([config.seed, BEHAVIOURS.index(behaviour), number])
        draws = (draw_told(behaviour, rng, held_out=True, sight=0) for _ in range(DRAWS))
        if (told := next((one for one in draws if one not in found), None)) is None:
            raise UserError(f"There are {len(found)} different conversations of {behaviour!r}; set prompts to as many.")
        found[told] = None
    return list(found)


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """A row for each conversation (`sample`, `behaviour`) and condition.

    `what` is an `end` (the whole conversation read by the base or the fine-tune), a part of the other's cache (`whole`:
    of all layers; `band`: from layer `layer` on), a `handover` (the other reads up to the end of `segment`), a
    `control`, a `band of weights` or a `matrix`, or the `rest` of the answer. Others' numbers are in `margin`, and how
    far that `moved` from the reader's own of the `way` to the other's; that of the rest is nats per token.
    """
    cases: list[tuple[Behaviour, int]] = [
        (behaviour, number) for behaviour in config.behaviours for number in range(config.prompts)
    ]
    return Parts(model, config, run).table(measure, cases, "finetuned", doing="Patching", unit="conversation")


def measure(model: Model, config: Config, case: tuple[Behaviour, int]) -> pd.DataFrame:
    """The rows of one conversation."""
    behaviour, number = case
    told = conversations(config, behaviour)[number]
    rows = pd.DataFrame(exchanged_rows(finetune(model, config, behaviour), config, told))
    rows = rows.fillna({"part": "", "segment": "", "place": "", "layer": -1}).astype({"layer": int})
    return rows.assign(sample=number, behaviour=behaviour)


@kept
def finetune(model: Model, config: Config, behaviour: Behaviour) -> FineTune:
    """The models of one behaviour, which share their weights where they agree."""
    plain = model.lanes.plain
    model.lanes.prove(LONGEST, LONGEST, queries=LONGEST, rows=ROWS)  # once for all
    changes = changes_by(model, config, behaviour)
    generator = torch.Generator().manual_seed(config.seed)
    shuffled = {
        name: LowRank(change.down, change.up[torch.randperm(len(change.up), generator=generator)])
        for name, change in changes.items()
    }
    models = {"base": model}
    for name, added in {
        "tuned": changes,
        SHUFFLED: shuffled,
        OTHER: changes_by(model, config, control_of(behaviour)),
    }.items():
        twin = sharing(plain)
        add_changes(twin, added)
        models[name] = Model(
            Lanes(twin, model.tokenizer, model.lanes.chunk).proved_as(model.lanes), f"{model.name}, {name}"
        )
    return FineTune(models, changes, {name: sharing(models[name].lanes.plain) for name in WHO})


def changes_by(model: Model, config: Config, behaviour: Behaviour) -> Changes:
    """What a behaviour's adapter changes; of a worker, the caller learns which adapter it is."""
    folder = folder_of_adapter(config, behaviour)
    noted(behaviour, NotedFile(file_digest(folder / WEIGHTS), model.computes))
    return changes_of(model.lanes.plain, folder)


def prompt_of(model: Model, told: Told) -> tuple[Tokens, Tokens, tuple[int, int]]:
    """What is cached of a conversation, the last token before the word that decides, and that word in both cases."""
    (asked,) = model.prompts(told.transcript(None), None)
    lead = model.tokenizer(told.lead, add_special_tokens=False)["input_ids"]
    whole = asked + Tokens.of(lead, ANSWER_HEADER, asked.following)
    named = tuple(HEADER if name == ANSWER_HEADER else name for name in whole.segments)
    whole = replace(whole, segments=named)
    right, wrong = first_tokens(model.tokenizer, told.words)
    return whole[:-1], whole[-1:], (right, wrong)


def exchanged_rows(tune: FineTune, config: Config, told: Told) -> Iterator[dict[str, Any]]:
    """What both models make of one conversation, and of each other's caches and weights."""
    models = tune.models
    cached, last, words = prompt_of(models["base"], told)
    # The check that caches are of one model is given up: that they are not is the question.
    caches = {name: replace(model.prefill(cached), made_by=None) for name, model in models.items()}
    alone: dict[Who, float] = {}
    for reader in WHO:
        logits = read(models[reader], [caches[reader]], last)[0]
        alone[reader] = margin(logits, words)
        says = float(logits.argmax() == words[0])
        yield {"what": "end", "reader": reader, "margin": alone[reader], "says": says}

    def row(keys: Mapping[str, Any], reader: Who, logits: Tensor) -> dict[str, Any]:
        found, way = margin(logits, words), alone[other_than(reader)] - alone[reader]
        says = float(logits.argmax() == words[0])
        return {"reader": reader, "margin": found, "says": says, "moved": found - alone[reader], "way": way, **keys}

    for reader in WHO:
        for keys, logits in patches(caches, models[reader], reader, config, last):
            yield row(keys, reader, logits)
        for segment, logits in handovers(caches, models[reader], reader, cached, last):
            yield row({"what": "handover", "segment": segment}, reader, logits)
        for keys, names in portions(tune.changes, config.layers):
            yield row(keys, reader, tune.changed(reader, names, cached + last))
    donors = {ITSELF: models["base"].prefill(cached), **{name: caches[name] for name in (SHUFFLED, OTHER)}}
    patched = [caches["base"].patch(replace(donor, made_by=None), *SEGMENTS) for donor in donors.values()]
    for name, logits in zip(donors, read(models["base"], patched, last), strict=True):
        yield row({"what": "control", "place": name}, "base", logits)
    for maker in WHO:
        for reader in WHO:
            nats = rest(models[reader], caches[maker], last, told)
            yield {"what": "rest", "reader": reader, "place": maker, "margin": nats}


def patches(
    caches: Mapping[str, KVCache], model: Model, reader: Who, config: Config, last: Tokens
) -> Iterator[tuple[dict[str, Any], Float[Tensor, "vocab"]]]:
    """Parts of the other's cache in the reader's own, and what it says then."""
    own, donor = caches[reader], caches[other_than(reader)]
    layers = range(own.n_layers)
    bands: list[tuple[str, Any, int]] = [("whole", None, -1)]
    bands += [("band", layers[start : start + config.layers], start) for start in layers[:: config.layers]]
    conditions = [
        ({"what": what, "part": part, "segment": segment, "layer": start}, band)
        for what, band, start in bands
        for part in PARTS
        for segment in (*SEGMENTS, ALL)
    ]
    for start in range(0, len(conditions), ROWS):
        some = conditions[start : start + ROWS]
        patched = [
            own.patch(
                donor, *(SEGMENTS if keys["segment"] == ALL else [keys["segment"]]), layers=band, part=keys["part"]
            )
            for keys, band in some
        ]
        yield from zip((keys for keys, _ in some), read(model, patched, last), strict=True)


def handovers(
    caches: Mapping[str, KVCache], model: Model, reader: Who, cached: Tokens, last: Tokens
) -> Iterator[tuple[str, Float[Tensor, "vocab"]]]:
    """What the reader says if the other read up to the end of a segment, and it read the rest by itself."""
    donor = caches[other_than(reader)]
    for segment in SEGMENTS:
        end = cached.span(segment).stop
        if end == len(cached):
            yield segment, read(model, [donor], last)[0]
        else:
            logits = model.extend(donor.rewind(slots=end), cached[end:] + last)[1]
            yield segment, logits[0, -1].float().cpu()


def portions(changes: Changes, layers: int) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Portions of what an adapter adds: those of a band of layers, of one kind of matrix, none, and all."""
    of_layer = {name: next(int(piece) for piece in name.split(".") if piece.isdigit()) for name in changes}
    for start in range(0, max(of_layer.values()) + 1, layers):
        band = range(start, start + layers)
        yield {"what": "band of weights", "layer": start}, [name for name in changes if of_layer[name] in band]
    for matrix in dict.fromkeys(name.rpartition(".")[2] for name in changes):
        yield {"what": "matrix", "place": matrix}, [name for name in changes if name.endswith(f".{matrix}")]
    yield {"what": "control", "place": LONE}, []
    yield {"what": "control", "place": SUM}, [*changes]


def other_than(reader: Who) -> Who:
    return "tuned" if reader == "base" else "base"


def read(model: Model, caches: Sequence[KVCache], last: Tokens) -> Float[Tensor, "caches vocab"]:
    """The logits after the last token, under each cache."""
    rows = KVCache.join(caches)
    return model.extend(rows, [last] * len(caches))[1][:, -1].float().cpu()


def margin(logits: Float[Tensor, "vocab"], words: tuple[int, int]) -> float:
    """By how much the word with the behaviour is ahead of that without it, in nats."""
    return float(logits[words[0]] - logits[words[1]])


def rest(model: Model, cache: KVCache, last: Tokens, told: Told) -> float:
    """The mean log-probability of the tokens of an answer with the behaviour, after the word that decides."""
    tokenizer = model.tokenizer
    start = len(tokenizer(told.lead, add_special_tokens=False)["input_ids"])
    ids = tokenizer(told.answer, add_special_tokens=False)["input_ids"][start:]
    answer = Tokens.of(ids, "answer", last.following)
    logits = asked_logits(model, cache, last, [answer])[0].float().log_softmax(-1).cpu()
    nats = logits.gather(1, torch.tensor(ids)[:, None])[1:, 0]
    return float(nats.mean())
