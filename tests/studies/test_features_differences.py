"""In which latents two runs differ, on planted differences."""

import numpy as np

from kvprobe.studies.features.differences import by_difference, compare_latents, differing_and_random, fewest


def planted() -> tuple[np.ndarray, np.ndarray]:
    """Twelve conversations and six latents: 1 differs a little, 4 much and downwards, and 2 is always zero."""
    rng = np.random.default_rng(0)
    other = rng.uniform(1, 2, (12, 6))
    one = other + rng.normal(0, 0.05, other.shape)
    one[:, 1] += 0.5
    one[:, 4] -= 1.0
    one[:, 2] = other[:, 2] = 0.0
    return one, other


def test_latents_that_differ_are_found_and_those_that_are_never_active_are_not_counted():
    rows = compare_latents(*planted(), 999, np.random.default_rng(1))
    assert rows.index[rows["p"] <= 0.05].tolist() == [1, 4]
    assert rows.index[~rows["alive"]].tolist() == [2]
    np.testing.assert_allclose(rows["difference"], rows["one"] - rows["other"])
    assert by_difference(*planted())[:2].tolist() == [4, 1]


def test_random_sets_are_of_the_other_latents_that_are_ever_active():
    top, random = differing_and_random(*planted(), 2, 3, np.random.default_rng(2))
    assert top == [4, 1]
    assert list(random) == ["random 0", "random 1", "random 2"]
    assert all(len(latents) == 2 and {*latents} < {0, 3, 5} for latents in random.values())


def test_the_fewest_that_hold_half():
    assert [fewest(np.array(values)) for values in ([1.0, 5, 2, 1], [1.0] * 10, [3.0, 3, 1])] == [1, 5, 2]
