"""Orders from means and paired differences."""

from itertools import combinations

from kvprobe.stats import Estimate
from kvprobe.studies.bands.order import Ranking

MEANS = {"b": 2.0, "a": 3.0, "c": 1.0}


def order(apart: str) -> Ranking:
    """Of three things, of which these pairs, the larger first, differ significantly."""
    pairs = {}
    for first, second in combinations(MEANS, 2):
        sign = (first + second in apart.split()) - (second + first in apart.split())
        pairs[first, second] = Estimate(float(sign), sign - 0.5, sign + 0.5, 20)
    found = Ranking.of({name: Estimate(mean) for name, mean in MEANS.items()}, pairs)
    assert found is not None
    return found


def test_things_are_ordered_by_their_means_and_the_extreme_one_is_significantly_beyond_all_others():
    assert order("").names == ("a", "b", "c")
    assert order("ab").apart == [True, False]
    for apart, largest, smallest in (
        ("ab ac", "yes", "no"),
        ("ab", "open", "no"),
        ("ba ac", "no", "no"),
        ("ba ca", "no", "yes"),
        ("", "open", "open"),
    ):
        assert (order(apart).largest("a"), order(apart).smallest("a")) == (largest, smallest), apart
    assert order("ab ac").largest("d") == "open"


def test_there_is_no_order_where_a_mean_or_a_difference_is_missing():
    one = Estimate(1.0, 0.5, 1.5, 20)
    assert Ranking.of({"a": one, "b": None}, {("a", "b"): one}) is None
    assert Ranking.of({"a": one, "b": one}, {("a", "b"): None}) is None
