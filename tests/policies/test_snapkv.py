"""How SnapKV smooths its scores."""

import torch

from kvprobe.policies import SnapKV
from tests.policies.loops import record
from tests.policies.scenes import random_scene


def test_dead_slots_do_not_raise_the_score_of_their_neighbours():
    scene = random_scene(0, batch=1, slots=7)
    record(scene).recent.zero_()
    record(scene).recent[..., 1] = 9.0
    record(scene).recent[..., 4] = 1.0
    gone = torch.arange(7)[None] == 1
    after = SnapKV(2, window=1, kernel=3).act(scene.with_cache(scene.cache.mask(slots=gone)))
    # Of the slots beside the fourth the newest stays: the first, now dead, was looked at more.
    assert after.cache.ledger.positions[0].tolist() == [5, 6]


def test_snapkv_keeps_the_neighbours_of_slots_with_much_attention():
    scene = random_scene(0, batch=1, slots=12)
    record(scene).recent.zero_()
    record(scene).recent[..., 3] = 1.0
    after = SnapKV(5, window=2, kernel=3).act(scene)
    assert after.cache.ledger.positions[0].tolist() == [2, 3, 4, 10, 11]
