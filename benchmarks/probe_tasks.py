"""A design's own labels and control labels probed together, beside one after the other, with equal results: what does
not depend on labels (Gram matrices, penalised systems, their factors) is computed once for both.

The features are of the shape of a leakage run on SmolLM2-135M: 30 layers × K, V and the residual stream × two
read-outs, 12 conversations of 20 samples, 10 classes, 5 targets, with planted labels. One thread; medians of pairs.

    python benchmarks/probe_tasks.py
"""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch
from timing import Row, compared, main

from kvprobe.models.lens import Family
from kvprobe.probing.controls import hash_control
from kvprobe.probing.features import Features
from kvprobe.probing.fits import fit_tasks
from kvprobe.probing.splits import SPLITS, Split, fold_numbers
from kvprobe.tasks.designs import Target

WIDTHS: dict[Family, int] = {"k": 192, "v": 192, "resid_post": 576}
LAYERS, CONTEXTS, PER_CONTEXT, TARGETS, CLASSES, FOLDS, SIGNAL = 30, 12, 20, 5, 10, 5, 0.35
MOST_RATIO, FEW, CLOSE = 0.9, 1e-3, 0.01
"""The second: a share of the predictions. The third: accuracy, and bits, mean over the samples of a site. A penalty or
a temperature that hardly matters may turn on rounding."""


def measure(asked: Namespace) -> Iterator[Row]:
    features = planted(2 if asked.quick else LAYERS)
    controls = hash_control(features.labels, features.contexts.tolist(), CLASSES, 0)
    tasks = [features.labels, controls]
    for split in SPLITS:
        folds = fold_numbers(split, features.contexts, FOLDS, np.random.default_rng(0))
        together, apart = [], []

        def at_once(split: Split = split, folds=folds, together=together) -> None:
            together[:] = fit_tasks(features, split, folds, tasks)

        def in_turn(split: Split = split, folds=folds, apart=apart) -> None:
            apart[:] = [fit_tasks(features, split, folds, [task])[0] for task in tasks]

        what = f"probes of own and control labels, {split}"
        yield compared(what, "one after the other", at_once, in_turn, asked.repeats, most=MOST_RATIO)
        for one, other in zip(together, apart, strict=True):
            assert float((one.predicted != other.predicted).double().mean()) < FEW
            assert float((one.inner_accuracy - other.inner_accuracy).abs().max()) < CLOSE
            assert float((one.information - other.information).mean(1).abs().max()) < CLOSE


def planted(layers: int) -> Features:
    """Features of contexts that differ, with a direction for each class of each target."""
    generator = torch.Generator().manual_seed(0)
    samples = CONTEXTS * PER_CONTEXT
    contexts = np.repeat(np.arange(CONTEXTS), PER_CONTEXT)
    labels = torch.randint(0, CLASSES, (TARGETS, samples), generator=generator)
    read_outs: dict[Family, torch.Tensor] = {}
    for family, width in WIDTHS.items():
        homes = torch.randn(CONTEXTS, layers, 2, width, generator=generator)[contexts]
        codes = SIGNAL * torch.randn(TARGETS, CLASSES, layers, 2, width, generator=generator)
        noise = torch.randn(samples, layers, 2, width, generator=generator)
        read_outs[family] = noise + homes + sum(codes[target, row] for target, row in enumerate(labels))
    target = Target("digit", tuple(map(str, range(CLASSES))), tuple(f"place {place}" for place in range(TARGETS)))
    return Features.of_read_outs(read_outs, np.arange(samples), labels, contexts, target)


if __name__ == "__main__":
    main(measure, __doc__, threads=1)
