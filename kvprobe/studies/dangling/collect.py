"""A turn is hidden, and its fact is asked for: where attention goes, and which heads, given it back, bring the answer
back.

Only the question and the beginning of the reply (the suffix) are read after the turn was hidden; everything before has
seen it. One file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch

from kvprobe.attention import Patterns, attend, dangling
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model, load
from kvprobe.patching import KL, LogitDiff
from kvprobe.studies.dangling import Config
from kvprobe.tasks.facts import facts, halves, pair
from kvprobe.tasks.ordinal import PLACES, VERBS, Memo, Reference, draw
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import Rows

HIDDEN, LATER = "fact", "T2"
FULL, MASKED, CLOSED = "full", "masked", "closed up"
"""Arms: everything in view; the turn masked; the turn evicted and the gap between positions closed."""
SHARED = "shared out"
"""Not a run, but what the softmax alone would make of the attention that is lost."""
TOP, RANDOM = "top", "random"
ROWS = 12
"""Caches that are read on from at once."""

KVHead = tuple[int, int]
"""Layer and KV head."""
Sets = Mapping[tuple[str, int, int], Sequence[KVHead]]
"""KV heads by sort, size and draw."""


@dataclass(frozen=True)
class Case:
    """A conversation whose turn with the fact is hidden before the fact is asked for.

    Attributes:
        half: heads that were found on the conversations of one half are tested on those of the other.
        metric: positive where the model says the right value.
    """

    name: str
    half: int
    prompt: Tokens
    suffix: Tokens
    metric: LogitDiff


def cases_of(config: Config, model: Model) -> list[Case]:
    """The conversations of a config.

    Raises:
        UserError: more heads are to see the turn again than there are.
    """
    picked = [fact for kind in config.kinds for fact in facts((kind,))[: config.prompts]]
    heads = model.geometry.n_layers * model.geometry.n_kv_heads
    if (most := config.rescued[-1]) >= heads:
        raise UserError(
            f"Setting 'rescued' asks for {most} KV heads, but {model.name} has {heads}; give numbers below that."
        )
    cases = []
    for number, (fact, half) in enumerate(zip(picked, halves(picked, config.seed), strict=True)):
        both, way = pair(fact, model.tokenizer), number % 2
        metric = LogitDiff(both.answers[way], both.answers[1 - way])
        cases.append(Case(fact.id, half, both.prompts[way], both.suffix, metric))
    return cases


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows.

    `samples`: attention by head (`grid` is heads, see `kvprobe.attention.dangling`, by `arm`), and outcomes (`grid` is
    arms). `rescues`: the turn back in view for the KV heads of each set that was found on the other half (`sort`,
    `size`, `draw`, `margin`, `kl`). `memos`: see `measure_memos`.
    """
    cases = cases_of(config, model)
    parts = partial(table_of_parts, run, cases, unit="conversation")
    table = parts("arms", lambda case: measure(model, case), doing="Hiding a turn")
    by_half = sets_by_half(table, config, model)

    def rescued(case: Case) -> pd.DataFrame:
        return rescue(model, case, by_half[1 - case.half]).assign(prompt=case.name, half=case.half)

    tables = {"samples": table, "rescues": parts("rescues", rescued, doing="Giving heads their turn back")}
    return tables | {"memos": collect_memos(config, run)} if config.memos else tables


def measure(model: Model, case: Case) -> pd.DataFrame:
    clean = model.prefill(case.prompt)
    patterns = {arm: read(model, cache, case) for arm, cache in arms_of(model, clean).items()}
    tables = []
    full = patterns[FULL].logits[None].float()
    for arm, pattern in patterns.items():
        outcome = outcome_of(case, full, pattern.logits[None].float())
        masked = patterns[MASKED].logits[None].float()
        to_masked = float(KL().to(masked)(pattern.logits[None].float()))
        tables.append(pd.DataFrame([{"grid": "arms", "arm": arm, **outcome, "kl_masked": to_masked}]))
    seen = {arm: pattern for arm, pattern in patterns.items() if arm != FULL} | {SHARED: shared_out(patterns)}
    for arm, pattern in seen.items():
        went = dangling(patterns[FULL], pattern, (HIDDEN,), summary=(LATER,), local=len(case.suffix))
        tables.append(went.rename(columns={"summary": "later"}).assign(grid="heads", arm=arm))
    return pd.concat(tables, ignore_index=True).assign(prompt=case.name, half=case.half)


def shared_out(patterns: Mapping[str, Patterns]) -> Patterns:
    """What the queries would attend to if no score changed: the softmax alone shares the lost attention out in
    proportion."""
    full = patterns[FULL]
    left = full.weights.masked_fill(full.cache.ledger.in_segments((HIDDEN,))[0], 0)
    return replace(patterns[MASKED], weights=left / left.sum(-1, keepdim=True))


def arms_of(model: Model, clean: KVCache) -> dict[str, KVCache]:
    """The cache in each arm; gaps can be closed only where keys turn with position."""
    arms = {FULL: clean, MASKED: clean.mask(HIDDEN)}
    if model.lanes.can_reindex:
        arms[CLOSED] = clean.evict(HIDDEN).reindex()
    return arms


def read(model: Model, cache: KVCache, case: Case) -> Patterns:
    """The suffix read where the cache ends, and what all its tokens attend to."""
    suffix = onwards(cache, [case.suffix])[0]
    return attend(model, suffix, cache, queries=range(len(suffix)))


def outcome_of(case: Case, full: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """Logit difference of right and wrong, and KL from the run with everything in view."""
    return {"margin": float(case.metric(logits)), "kl": float(KL().to(full)(logits))}


def sets_by_half(table: Rows, config: Config, model: Model) -> dict[int, Sets]:
    """The KV heads of which most attention dangles on each half, and random ones."""
    shape = model.geometry
    group = shape.n_heads // shape.n_kv_heads
    every = [(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_kv_heads)]
    heads = table[(table["grid"] == "heads") & (table["arm"] == MASKED)]
    by_half: dict[int, Sets] = {}
    for half in sorted(heads["half"].unique()):
        of_half = heads[heads["half"] == half]
        mass = of_half.groupby([of_half["layer"].astype(int), of_half["head"].astype(int) // group])["dangling"].mean()
        ranked = [(int(layer), int(head)) for layer, head in mass.sort_values(ascending=False).index]
        rng = np.random.default_rng([config.seed, 2, int(half)])
        sets: dict[tuple[str, int, int], Sequence[KVHead]] = {}
        for size in config.rescued:
            sets[TOP, size, 0] = ranked[:size]
            for number in range(config.random):
                sets[RANDOM, size, number] = [every[place] for place in rng.permutation(len(every))[:size]]
        by_half[int(half)] = sets
    return by_half


def rescue(model: Model, case: Case, sets: Sets) -> pd.DataFrame:
    clean = model.prefill(case.prompt)
    _, full = model.extend(clean, case.suffix)
    keys, rows = list(sets), []
    for start in range(0, len(keys), ROWS):
        some = keys[start : start + ROWS]
        caches = KVCache.join([in_view_of(clean, sets[key]) for key in some])
        _, logits = model.extend(caches, [case.suffix] * len(some))
        for (sort, size, number), said in zip(some, logits.float(), strict=True):
            rows.append({"sort": sort, "size": size, "draw": number, **outcome_of(case, full[0].float(), said)})
    return pd.DataFrame(rows)


def in_view_of(clean: KVCache, heads: Sequence[KVHead]) -> KVCache:
    """The cache with the turn masked for all KV heads but these."""
    spared: dict[int, set[int]] = defaultdict(set)
    for layer, head in heads:
        spared[layer].add(head)
    cache = clean.mask(HIDDEN, layers=[layer for layer in range(clean.n_layers) if layer not in spared])
    for layer, spared_heads in spared.items():
        if others := [head for head in range(clean.n_kv_heads) if head not in spared_heads]:
            cache = cache.mask(HIDDEN, layers=[layer], heads=others)
    return cache


def collect_memos(config: Config, run: Run) -> pd.DataFrame:
    """What the model `ordinal` answers to memos that it was not trained on; see `measure_memos`."""
    model = load("ordinal", device=config.device, dtype=config.dtype)
    verbs = list(VERBS)
    return table_of_parts(
        run, verbs, "memos", lambda verb: measure_memos(model, verb, config), doing="Asking about lists", unit="verb"
    )


def measure_memos(model: Model, reference: Reference, config: Config) -> pd.DataFrame:
    """One row per memo and arm, with what is said and whether that is the payload (the thing that the summary saw at
    the place that it names) or what a pointer finds there now.

    Arms: `seen` (nothing is changed), `masked` (the list is hidden from the question), `crossed` (the summary's K and V
    are those of a run in whose list the named thing had changed places with another).
    """
    rng = np.random.default_rng([config.seed, 3, list(VERBS).index(reference)])
    rows = []
    for number in range(config.memos):
        memo = draw("held_out", rng, (reference,))
        other = memo.swapped(int(rng.choice([place for place in range(len(PLACES)) if place != memo.place])))
        cache, suffix = _read_memo(model, memo)
        donor, _ = _read_memo(model, other)
        arms = {"seen": cache, "masked": cache.mask("block"), "crossed": cache.patch(donor, "summary")}
        _, logits = model.extend(KVCache.join(list(arms.values())), [suffix] * len(arms))
        said = [model.tokenizer.decode([int(token)]).strip() for token in logits[:, -1].argmax(-1)]
        for arm, word in zip(arms, said, strict=True):
            # Where nothing is crossed, what the summary saw and what stands there now are one.
            payload, pointer = (other if arm == "crossed" else memo).answer, memo.answer
            rows.append({"memo": number, "arm": arm, "payload": word == payload, "pointer": word == pointer})
    return pd.DataFrame(rows).assign(reference=reference)


def _read_memo(model: Model, memo: Memo) -> tuple[KVCache, Tokens]:
    tokens = memo.conversation().tokens(model.tokenizer)
    cut = tokens.span("question").start
    return model.prefill(tokens[:cut]), tokens[cut:]
