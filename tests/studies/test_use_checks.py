"""What is still read after an erasure."""

import numpy as np
import torch

from kvprobe.erasing import leace, random_eraser
from kvprobe.studies.use.checks import ANEW, INTACT, SAME, Samples, still_read
from tests.probing.planted import planted


def test_probes_read_intact_features_and_neither_reads_erased_ones():
    features, labels, _ = planted(900, 4, 3.0, probes=2, targets=2, spare=6)
    features, rng = features - features.mean(1, keepdim=True), np.random.default_rng(0)
    homes = torch.arange(900) // 75
    tested, trained = (
        Samples(features[:, chosen], labels[:, chosen], homes[chosen] - homes[chosen].min())
        for chosen in (homes < 6, homes >= 6)
    )
    eraser = leace(trained.features, trained.labels, 4)
    read = {
        (state, probe): accuracy
        for state, probe, accuracy in still_read(
            tested, trained, {"leace": eraser, "random": random_eraser(eraser, rng)}, 4
        )
    }
    assert {accuracy.shape for accuracy in read.values()} == {(6, 2)}
    for probe in (SAME, ANEW):
        assert read[INTACT, probe].mean() > 0.7
        assert read["leace", probe].mean() < 0.35
        assert read["random", probe].mean() > read["leace", probe].mean() + 0.1
