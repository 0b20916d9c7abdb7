"""One call from labelled conversations to probe accuracies with intervals, for any label and any segment."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kvprobe.cache import KVCache
from kvprobe.lens import Family
from kvprobe.model import Model
from kvprobe.probing.splits import SPLITS, fold_numbers
from kvprobe.probing.sweep import accuracy_table, read_outs, sites, sweep
from kvprobe.stats import cluster_weights
from kvprobe.transcript import Tokens, Transcript


@dataclass(frozen=True)
class Sample:
    """A conversation with what a probe is to recover from it.

    Attributes:
        transcript: the conversation.
        labels: class numbers, one per target (the digits of a code, say).
        context: what the sample shares with others; folds and intervals keep samples of one context together.
    """

    transcript: Transcript
    labels: tuple[int, ...]
    context: str


@dataclass(frozen=True)
class Probing:
    """Accuracy of every probe.

    Attributes:
        table: one row per split, family, read-out and layer: `accuracy` (mean over targets), `low`, `high`.
        chance: accuracy of a guess.
    """

    table: pd.DataFrame
    chance: float

    def df(self) -> pd.DataFrame:
        """The table."""
        return self.table


def probe(
    model: Model,
    samples: Sequence[Sample],
    at: str,
    *,
    hide: Sequence[str] = (),
    families: Sequence[Family] = ("k", "v", "resid_post"),
    folds: int = 5,
    rng: np.random.Generator | None = None,
) -> Probing:
    """How well each layer's K, V and residual stream at segment `at` tell the samples' labels.

    Each conversation is read up to the end of `at`; the segments in `hide` are masked when `at` begins. All probes
    are batched ridge classifiers with the penalty chosen on an inner fold, under the three splits of
    `kvprobe.probing.splits`. Compare with the same call on transcripts `without` the hidden segments: that is the
    floor, and only the difference is a leak.

    Args:
        rng: of folds and bootstrap; seeded with 0 by default.

    Raises:
        ValueError: fewer contexts than folds, labels of unequal number, or an unknown segment.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    targets = {len(sample.labels) for sample in samples}
    if len(targets) != 1 or not min(targets):
        raise ValueError(f"Each sample needs the same number of labels, at least one; got {sorted(targets)}.")
    labels = torch.tensor([sample.labels for sample in samples]).T.contiguous()
    classes = int(labels.max()) + 1
    _, contexts = np.unique([sample.context for sample in samples], return_inverse=True)
    weights = cluster_weights(int(contexts.max()) + 1, rng)

    read = [
        _features(model, sample.transcript, at, hide, families)
        for sample in tqdm(samples, desc="Reading conversations", unit="conversation")
    ]
    tables = []
    for split in SPLITS:
        fold = fold_numbers(split, contexts, folds, rng)
        for family in families:
            features = torch.stack([row[family] for row in read])
            result = sweep(features, np.arange(len(samples)), labels, contexts, split, fold, classes)
            table = accuracy_table(result, sites(features), labels, contexts, weights, split=split, family=family)
            tables.append(table)
    return Probing(pd.concat(tables, ignore_index=True), 1 / classes)


def _features(
    model: Model, transcript: Transcript, at: str, hide: Sequence[str], families: Sequence[Family]
) -> dict[Family, Float[Tensor, "layers reads dim"]]:
    """What the probes read of one conversation."""
    tokens = transcript.tokens(model.tokenizer)
    span = tokens.span(at)
    for name in hide:
        if tokens.span(name).start >= span.start:
            raise ValueError(f"Segment {name!r} cannot be hidden from {at!r}, which does not come after it.")
    past: KVCache | None = None
    if span.start:
        past = model.prefill(tokens[: span.start])
        past = past.mask(*hide) if hide else past
    segment: Tokens = tokens[span]
    captured = model.capture(segment, families, past=past)
    return {family: read_outs(captured.stack(family))[0].cpu() for family in families}
