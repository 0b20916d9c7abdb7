"""How far two caches are from each other, segment by segment."""

from dataclasses import replace

import pytest
import torch

from kvprobe.cache.distance import FAMILIES, relative_distance
from tests.random_caches import random_cache
from tests.refusals import refused


def test_the_distance_of_a_segment_is_relative_to_the_references_size():
    reference = random_cache(0, batch=1)
    inside = reference.ledger.in_segments(["T1"])[0]
    keys = tuple(torch.where(inside[None, None, :, None], 1.5 * layer, layer) for layer in reference.keys)
    distance = relative_distance(replace(reference, keys=keys), reference, ("system", "T1"))
    assert distance.shape == (len(FAMILIES), reference.n_layers, 2)
    assert distance[0, :, 1].tolist() == pytest.approx([0.5] * reference.n_layers)
    assert not distance[0, :, 0].any()
    assert not distance[1].any()


def test_keys_are_compared_at_equal_rotation_or_not_at_all():
    one, other = random_cache(0, batch=1), random_cache(0, batch=1, gaps=True)
    refused(lambda: relative_distance(one, other, ("T1",)), "same positions")
