"""Effects of a factorial design are those that were planted, and nothing else."""

from itertools import product

import pytest

from kvprobe.studies.compaction.factorial import contrast, effects_of


def test_effects_are_those_that_were_planted():
    factors = ("a", "b", "c")
    effects = effects_of(factors)
    assert effects == ("a", "b", "c", "a × b", "a × c", "b × c", "a × b × c")
    planted = dict(zip(effects, [0.1, -0.06, 0.04, 0.03, 0.0, -0.05, 0.02], strict=True))
    cells = [dict(zip(factors, levels, strict=True)) for levels in product((False, True), repeat=3)]
    outcomes = [7 + sum(size * contrast(effect, cell) / 4 for effect, size in planted.items()) for cell in cells]
    for effect, size in planted.items():
        products = [contrast(effect, cell) * outcome for cell, outcome in zip(cells, outcomes, strict=True)]
        assert sum(products) / len(cells) == pytest.approx(size)
    # Of one factor: the mean at its high level less that at the other.
    high, low = (
        sum(outcome for cell, outcome in zip(cells, outcomes, strict=True) if cell["a"] == level) / 4
        for level in (True, False)
    )
    assert high - low == pytest.approx(0.1)
