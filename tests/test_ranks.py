"""Rank correlation."""

import numpy as np
import pytest

from kvprobe.ranks import spearman


def test_rank_correlation_is_spearmans_with_ties_sharing_their_rank():
    ours = spearman(np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 3.0]]), np.array([[2.0, 1.0, 4.0, 3.0]] * 2))
    # By hand: 1 − 6·Σd²/(n(n²−1)) = 1 − 24/60; with a tie, Pearson's of the ranks (1.5, 1.5, 3, 4) and (2, 1, 4, 3).
    assert ours == pytest.approx([0.6, 3.5 / (4.5 * 5) ** 0.5])
    assert np.isnan(spearman(np.ones((1, 4)), np.arange(4.0)[None])).all()
