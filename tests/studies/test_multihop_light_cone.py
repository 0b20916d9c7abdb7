"""From which layer on segments can vary with a text, by what they attend to; and a tiny model obeys."""

from collections.abc import Iterator

import torch

from kvprobe.studies.multihop.light_cone import lowest_layers
from kvprobe.text.tokens import Tokens
from tests.models import llama

NAMES = ("T1", "s1", "s2", "s3", "s4")


def test_every_hop_costs_a_layer_and_what_sees_nothing_of_it_never_varies():
    hops = {name: NAMES[place : place + 1] for place, name in enumerate(NAMES[1:])}
    assert lowest_layers("T1", hops) == {"s1": 1, "s2": 2, "s3": 3, "s4": 4}
    everything = {name: NAMES[: place + 1] for place, name in enumerate(NAMES[1:])}
    assert set(lowest_layers("T1", everything).values()) == {1}
    assert lowest_layers("T1", {"s1": ("system",), "s2": ("s1",), "s3": ("s2", "T1")}) == {
        "s1": None,
        "s2": None,
        "s3": 1,
    }


def test_a_model_varies_from_that_layer_on():
    deep = llama(seed=3, num_hidden_layers=4, initializer_range=0.4)

    def keys(token: int) -> Iterator[torch.Tensor]:
        cache = deep.prefill(Tokens.of([3, token], "T1"))
        for place, name in enumerate(NAMES[1:]):
            seen = cache.select(NAMES[place])
            cache, _ = deep.extend(seen, Tokens.of([5, 7], name, 2 + 2 * place))
            yield torch.stack([layer[0, :, -2:] for layer in cache.keys])

    views = {name: NAMES[place : place + 1] for place, name in enumerate(NAMES[1:])}
    for lowest, one, other in zip(lowest_layers("T1", views).values(), keys(8), keys(9), strict=True):
        varies = (one - other).abs().amax((1, 2, 3)) / one.abs().amax((1, 2, 3))
        assert lowest is not None
        assert varies[:lowest].max() < 1e-6
        assert lowest >= deep.geometry.n_layers or varies[lowest:].min() > 1e-6
