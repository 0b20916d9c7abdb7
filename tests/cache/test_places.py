"""Where two caches differ by more than numerics."""

import pytest
import torch

from kvprobe.cache.floors import floor_between
from kvprobe.cache.places import Distances, damage_of

FLOOR = floor_between("float32", "float32")


@pytest.mark.parametrize(("dropped", "differs"), [(True, False), (False, True)])
def test_a_slot_that_deeper_layers_dropped_is_not_taken_to_be_equal_there(dropped: bool, differs: bool):
    """A slot that is off, and equal in the next layers bit for bit, is held against one rounding."""
    off = torch.full((4, 1, 1, 32), 1e-6)
    off[1, ..., 3], off[2:, ..., 3] = 4 * FLOOR.single, 0
    compared = torch.ones(4, 1, 32, dtype=torch.bool)
    compared[2:, :, 3] = not dropped
    distances = Distances(tuple({"V": layer} for layer in off), tuple(compared))
    assert bool(damage_of(distances, FLOOR, 16).layers) == differs
