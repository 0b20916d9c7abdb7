"""A turn is hidden, and its fact is asked for: where attention goes, and which heads, given it back, bring the answer
back.

Only the question and the beginning of the reply (the suffix) are read after the turn was hidden; everything before has
seen it. One file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pandas as pd
import torch

from kvprobe.attention import Patterns, attend, dangling, logits_in_view, ranked_kv_heads, shared_out
from kvprobe.attention.views import KVHead
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model, load
from kvprobe.patching import KL, LogitDiff, payload_or_pointer
from kvprobe.studies.dangling import Config
from kvprobe.tasks.facts import FactPair, facts, pairs_in_turn
from kvprobe.tasks.ordinal import VERBS, Reference, draw_exchanged
from kvprobe.tidy import Rows, chosen

HIDDEN, LATER = "fact", "T2"
FULL, MASKED, CLOSED = "full", "masked", "closed up"
"""Arms: everything in view; the turn masked; the turn evicted and the gap between positions closed."""
SHARED = "shared out"
"""Not a run, but what the softmax alone would make of the attention that is lost."""
TOP, RANDOM = "top", "random"

Sets = Mapping[tuple[str, int, int], Sequence[KVHead]]
"""KV heads by sort, size and draw."""


def pairs_of(config: Config, model: Model) -> list[FactPair]:
    """The conversations of a config, of which the first of each pair is read.

    Raises:
        UserError: more heads are to see the turn again than there are.
    """
    heads = model.geometry.n_layers * model.geometry.n_kv_heads
    if (most := config.rescued[-1]) >= heads:
        raise UserError(
            f"Setting 'rescued' asks for {most} KV heads, but {model.name} has {heads}; give numbers below that."
        )
    return pairs_in_turn(facts(config.kinds, config.prompts), model.tokenizer, config.seed)


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows.

    `samples`: attention by head (`grid` is heads, see `kvprobe.attention.dangling`, by `arm`), and outcomes (`grid` is
    arms). `rescues`: the turn back in view for the KV heads of each set that was found on the other half (`sort`,
    `size`, `draw`, `margin`, `kl`). `memos`: see `measure_memos`.
    """
    parts, pairs, unit = Parts(model, config, run), pairs_of(config, model), "conversation"
    table = parts.table(measure, pairs, "arms", doing="Hiding a turn", unit=unit)
    by_half, doing = sets_by_half(table, config, model), "Giving heads their turn back"
    tables = {"samples": table, "rescues": parts.table(rescue, pairs, "rescues", by_half, doing=doing, unit=unit)}
    if config.memos:
        tables["memos"] = parts.table(measure_memos, list(VERBS), "memos", doing="Asking lists", unit="verb")
    return tables


def measure(model: Model, config: Config, pair: FactPair) -> pd.DataFrame:
    """Outcomes of all arms, and what each head's attention to the turn became in all but the first."""
    patterns = {arm: read(model, cache, pair) for arm, cache in arms_of(model, pair).items()}
    full, masked = patterns[FULL], patterns[MASKED]
    to_masked = KL().to(masked.logits[None])
    rows = [
        {
            "arm": arm,
            **outcome_of(pair, full.logits, pattern.logits),
            "kl_masked": float(to_masked(pattern.logits[None])),
        }
        for arm, pattern in patterns.items()
    ]
    tables = [pd.DataFrame(rows).assign(grid="arms")]
    for arm, pattern in (patterns | {SHARED: shared_out(full, masked, (HIDDEN,))}).items():
        if arm != FULL:
            went = dangling(full, pattern, (HIDDEN,), summary=(LATER,), local=len(pair.suffix))
            tables.append(went.rename(columns={"summary": "later"}).assign(grid="heads", arm=arm))
    return pd.concat(tables, ignore_index=True).assign(prompt=pair.id, half=pair.half)


def arms_of(model: Model, pair: FactPair) -> dict[str, KVCache]:
    """The cache in each arm; gaps can be closed only where keys turn with position."""
    clean = model.prefill(pair.prompts[0])
    arms = {FULL: clean, MASKED: clean.mask(HIDDEN)}
    if model.lanes.can_reindex:
        arms[CLOSED] = clean.evict(HIDDEN).reindex()
    return arms


def read(model: Model, cache: KVCache, pair: FactPair) -> Patterns:
    """The suffix read where the cache ends, and what all its tokens attend to."""
    suffix = onwards(cache, [pair.suffix])[0]
    return attend(model, suffix, cache, queries=range(len(suffix)))


def outcome_of(pair: FactPair, full: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """Logit difference of right and wrong, and KL from the run with everything in view."""
    return {"margin": float(LogitDiff(*pair.answers)(logits[None])), "kl": float(KL().to(full[None])(logits[None]))}


def sets_by_half(table: Rows, config: Config, model: Model) -> dict[int, Sets]:
    """The KV heads of which most attention dangles on each half, and random ones."""
    shape = model.geometry
    every = list(product(range(shape.n_layers), range(shape.n_kv_heads)))
    by_half: dict[int, Sets] = {}
    for half, heads in chosen(table, {"grid": "heads", "arm": MASKED}).groupby("half"):
        ranked = ranked_kv_heads(heads, "dangling", shape.n_heads // shape.n_kv_heads)
        rng = np.random.default_rng([config.seed, 2, int(half)])
        sets: dict[tuple[str, int, int], Sequence[KVHead]] = {}
        for size in config.rescued:
            sets[TOP, size, 0] = ranked[:size]
            for number in range(config.random):
                sets[RANDOM, size, number] = [every[place] for place in rng.permutation(len(every))[:size]]
        by_half[int(half)] = sets
    return by_half


def rescue(model: Model, config: Config, pair: FactPair, by_half: Mapping[int, Sets]) -> pd.DataFrame:
    """Outcomes with the turn in view of each set of KV heads that was found on the other half."""
    sets = by_half[1 - pair.half]
    clean = model.prefill(pair.prompts[0])
    full = model.extend(clean, pair.suffix)[1][0, -1].float()
    said = logits_in_view(model, clean, pair.suffix, (HIDDEN,), list(sets.values()))
    return pd.DataFrame(
        {"sort": sort, "size": size, "draw": number, **outcome_of(pair, full, logits)}
        for (sort, size, number), logits in zip(sets, said, strict=True)
    ).assign(prompt=pair.id, half=pair.half)


def measure_memos(model: Model, config: Config, reference: Reference) -> pd.DataFrame:
    """What the answers of the model `ordinal` follow, to memos that it was not trained on, with summaries of one
    `reference`; see `kvprobe.patching.payload_or_pointer`."""
    ordinal = load("ordinal", device=config.device, dtype=config.dtype)
    rng = np.random.default_rng([config.seed, 3, list(VERBS).index(reference)])
    memos = [draw_exchanged("held_out", rng, (reference,)) for _ in range(config.memos)]
    return payload_or_pointer(ordinal, memos).assign(reference=reference)
