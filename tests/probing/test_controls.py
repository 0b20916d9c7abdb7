"""Controls on planted data behave as designed."""

import numpy as np
import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.probing.controls import hash_control, lookup, permuted_within, random_model
from tests.refusals import refused

CLASSES, TARGETS = 4, 2


def test_a_hash_control_gives_a_context_and_label_one_label_in_any_order():
    labels, contexts = torch.randint(0, CLASSES, (TARGETS, 400)), np.repeat(np.arange(50), 8)
    control = hash_control(labels, contexts.tolist(), CLASSES, seed=3)
    for row, given in zip(labels, control, strict=True):
        pairs = set(zip(contexts.tolist(), row.tolist(), given.tolist(), strict=True))
        assert len(pairs) == len({pair[:2] for pair in pairs})
    order = torch.randperm(400)
    assert hash_control(labels[:, order], contexts[order].tolist(), CLASSES, seed=3).equal(control[:, order])
    assert not hash_control(labels, contexts.tolist(), CLASSES, seed=4).equal(control)


@pytest.mark.parametrize("shares", [(0.25,) * 4, (0.9, 0.1), (0.7, 0.2, 0.1)])
def test_hash_controls_are_as_frequent_as_the_labels_and_independent_of_them(shares: tuple[float, ...]):
    """Drawn alike for all classes, labels of 9 to 1 made a probe that knows nothing look selective by 40 points."""
    classes = len(shares)
    labels = torch.multinomial(torch.tensor(shares), 8000, True, generator=torch.Generator().manual_seed(0))[None]
    control = hash_control(labels, np.repeat(np.arange(2000), 4).tolist(), classes, seed=0)
    joint = torch.bincount(labels[0] * classes + control[0], minlength=classes**2).view(classes, classes) / 8000
    assert torch.allclose(joint.sum(0), torch.tensor(shares), atol=0.02)
    assert torch.allclose(joint, torch.outer(joint.sum(1), joint.sum(0)), atol=0.03)


def test_permutations_stay_inside_contexts_and_reach_every_order():
    contexts = np.array([2, 0, 2, 0, 2])
    orders = permuted_within(contexts, 600, np.random.default_rng(0))
    assert (np.sort(orders, 1) == np.arange(5)).all()
    assert (contexts[orders] == contexts).all()
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 12
    # 50 of each order are expected; five standard deviations.
    assert np.abs(counts - 50).max() < 5 * np.sqrt(50)


def test_a_table_reads_its_key_and_falls_back_on_the_most_common_label():
    keys = ["a"] * 6 + ["b"] * 6 + ["new"]
    labels = torch.tensor([[1] * 6 + [2] * 6 + [0]])
    folds = np.array([0, 0, 1, 1, 2, 2] * 2 + [0])
    labels[0, 6] = 1
    guesses = lookup(keys, labels, folds, 3)
    assert guesses[0].tolist() == [1] * 6 + [2] * 6 + [1]


def test_a_table_never_sees_its_own_fold():
    keys = np.repeat(np.arange(10), 6).tolist()
    labels = torch.randint(0, 3, (1, 60), generator=torch.Generator().manual_seed(0))
    folds = np.arange(60) % 3
    changed = labels.clone()
    changed[:, folds == 1] = (changed[:, folds == 1] + 1) % 3
    one, other = (lookup(keys, answers, folds, 3)[:, folds == 1] for answers in (labels, changed))
    assert one.equal(other)


def test_a_random_model_keeps_the_geometry_and_none_of_the_weights(tiny: Model):
    one, same, other = (random_model(tiny, seed) for seed in (1, 1, 2))
    assert one.geometry == tiny.geometry
    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, other.fingerprint, tiny.fingerprint}) == 3
    shapes = {name: weight.shape for name, weight in tiny.lanes.plain.state_dict().items()}
    assert {name: weight.shape for name, weight in one.lanes.plain.state_dict().items()} == shapes


def test_drawing_a_random_model_leaves_the_callers_generator_alone(tiny_llama: Model):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    random_model(tiny_llama, 1)
    assert torch.rand(1).equal(expected)


def test_a_context_for_each_sample_is_demanded():
    refused(lambda: hash_control(torch.zeros(1, 3, dtype=torch.long), ["a", "b"], 2, 0), "got 2 contexts for 3 samples")
