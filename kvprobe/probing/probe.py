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
from kvprobe.probing.ridge import ridge_probes
from kvprobe.probing.splits import SPLITS, centred_within, fold_numbers
from kvprobe.stats import cluster_bootstrap, cluster_weights
from kvprobe.transcript import Tokens, Transcript

READS = ("mean", "last")
"""How a segment's slots become one vector: their mean, or the last one."""


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
        fold = torch.from_numpy(fold_numbers(split, contexts, folds, rng))
        for family in families:
            features = torch.stack([row[family] for row in read])
            layers, reads = features.shape[1:3]
            size = features.square().mean((0, 3)).sqrt().flatten()
            if split == "paired":
                features = centred_within(features, contexts)
            probes = features.flatten(1, 2).transpose(0, 1).contiguous()
            result = ridge_probes(probes, labels, fold, classes, size=size)
            hits = result.predicted.eq(labels).double().mean(1).numpy()
            accuracy, low, high = cluster_bootstrap(hits, contexts, weights)
            tables.append(
                pd.DataFrame(
                    {
                        "split": split,
                        "family": family,
                        "layer": np.repeat(np.arange(layers), reads),
                        "read": list(READS) * layers,
                        "accuracy": accuracy,
                        "low": low,
                        "high": high,
                    }
                )
            )
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


def read_outs(stacked: Tensor) -> Float[Tensor, "rows layers reads dim"]:
    """Captured layers of a family as one vector per row and layer, KV heads side by side: the mean over the slots,
    and the last slot.

    Args:
        stacked: `[layers, rows, kv_heads, slots, d_head]` or `[layers, rows, slots, d_model]`.
    """
    vectors = stacked.float()
    if vectors.dim() == 5:
        vectors = vectors.permute(0, 1, 3, 2, 4).flatten(3)
    return torch.stack([vectors.mean(2), vectors[:, :, -1]], 2).transpose(0, 1)
