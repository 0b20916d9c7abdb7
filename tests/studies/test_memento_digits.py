"""What K and V of mementos hold of a block's digits: where it is read, and what is read where."""

import numpy as np
import pytest
import torch

from kvprobe.studies.memento_toy.digits import (
    RESTART,
    RETAINED,
    DigitSite,
    digit_labels,
    read_linearly,
    read_sites,
    sites_of,
)
from kvprobe.studies.memento_toy.traces import restarted, retained, token_rows
from kvprobe.tasks.mementos import draw_trace
from tests.toy import TINY, toy


def test_all_layers_are_read_next_to_the_block_and_the_last_one_farther_off():
    sites = sites_of(3, 2, 6, 1)
    assert len(set(sites)) == len(sites)
    assert {site.distance for site in sites if site.arm == RESTART} == {2, 3, 4}
    assert {site.distance for site in sites if site.layer == 0} == {0, 2}
    assert {site.distance for site in sites if site == DigitSite(RETAINED, site.distance, 2)} == {-1, 0, 1, 2, 3, 4}
    nearest = [DigitSite(arm, 2, layer) for arm in (RETAINED, RESTART) for layer in range(3)]
    assert sites_of(3, 2, 6, 1, everywhere=False) == nearest


def test_a_site_holds_k_and_v_of_its_memento_under_its_arm():
    model, traces = toy(), [draw_trace(np.random.default_rng(seed), "sum", TINY.blocks) for seed in range(3)]
    tensors = read_sites(model, traces, sites_of(3, 2, TINY.blocks), 2)
    rows = token_rows(model, traces)
    kept = {written.number: written for written in retained(model, rows, 0, TINY.blocks)}
    again = {written.number: written for written in restarted(model, rows, 0, [3, 4])}
    for site, written in ((DigitSite(RETAINED, 2, 2), kept[4]), (DigitSite(RESTART, 1, 0), again[3])):
        expected = written.vectors[site.layer].transpose(0, 1).flatten(2)
        torch.testing.assert_close(tensors[site.name], expected, atol=1e-5, rtol=1e-5)
    assert tensors[f"right.{RETAINED}"].shape == (3, 4)
    assert tensors[f"right.{RESTART}"].shape == (3, 2)
    # Hidden blocks reach a memento through those before it: K and V of the first two layers cannot know them.
    assert tensors["reach"][0, :2].max() < 1e-5 < 1e-3 < tensors["reach"][0, 2]


def test_probes_read_digits_that_are_there_and_of_others_what_the_sum_says():
    traces = [draw_trace(np.random.default_rng(seed), "sum", 2) for seed in range(800)]
    digits, alike = digit_labels(traces, 1, np.random.default_rng(0))
    assert torch.equal(digits.sum(0), alike.sum(0))
    features = torch.nn.functional.one_hot(digits.T, 10).flatten(1).float()
    read = read_linearly(features, [digits, alike], torch.arange(800) % 4)
    assert read["right"].mean() == pytest.approx(1.0)
    assert 0.1 < read["alike"].mean() < 0.3
