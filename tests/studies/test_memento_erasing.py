"""Erasers of mementos: of what, and what they take."""

import numpy as np
import torch

from kvprobe.studies.memento_toy.erasing import digit_answers, erasing, fit_mementos, mean_ranks
from kvprobe.studies.memento_toy.traces import retained, token_rows
from kvprobe.tasks.mementos import DIGITS, draw_trace
from tests.toy import toy


def test_what_goes_beyond_the_sum_is_nothing_on_average_given_the_sum():
    rng = np.random.default_rng(0)
    traces = [draw_trace(rng, "sum", 2) for _ in range(4000)]
    of_sum = [trace for trace in traces if sum(trace.blocks[0]) == 22]
    answers = digit_answers(of_sum, 1, beyond_text=True)
    assert answers.shape == (len(of_sum), 10 * DIGITS)
    assert answers.mean(0).abs().max() < 5 * (0.1 / len(of_sum)) ** 0.5
    assert answers.unflatten(1, (DIGITS, 10)).sum(2).abs().max() < 1e-9
    assert set(digit_answers(of_sum, 1, beyond_text=False).unique().tolist()) == {0.0, 1.0}


def test_erasers_take_what_covaries_and_leave_the_first_layer_alone():
    """No block reaches K or V of the first layer; in later ones, those of a memento covary with its block's digits."""
    model, traces = toy(), [draw_trace(rng, "sum", 4) for rng in [np.random.default_rng(3)] for _ in range(300)]
    erasers, drawn = (
        fit_mementos(model, traces, 0, np.random.default_rng(4), random=random) for random in (False, True)
    )
    assert set(erasers) == {1, 2, 3}
    ranks, others = mean_ranks(erasers), mean_ranks(drawn)
    assert ranks[0] < 0.25  # one site in twenty loses a direction by chance
    assert ranks[2] > 3
    np.testing.assert_allclose(others[2], ranks[2], rtol=0.3)
    rows = token_rows(model, traces)
    answers = digit_answers(traces, 1, beyond_text=True)
    left = {}
    for name, fit in (("open", {}), ("erased", erasers), ("random", drawn)):
        written = next(retained(model, rows, 0, 1, erasing(fit)))
        values = written.vectors[2].flatten(2).double()
        values = (values - values.mean(1, keepdim=True)).transpose(1, 2) @ answers
        left[name] = float(values.square().mean())
    assert left["erased"] < 0.5 * left["random"] < 0.5 * left["open"]


def test_a_memento_is_erased_as_soon_as_it_is_written_so_that_later_ones_cannot_read_it():
    model, traces = toy(), [draw_trace(np.random.default_rng(seed), "sum", 4) for seed in range(60)]
    erasers = fit_mementos(model, traces, 0, np.random.default_rng(4), beyond_text=False)
    rows = token_rows(model, traces[:2])
    first, *_, last = retained(model, rows, 0, 4, erasing({1: erasers[1]}))
    _, *_, whole = retained(model, rows, 0, 4)
    where = first.cache.ledger.in_segments(["memento 1"])[0]
    later = last.cache.ledger.in_segments(["memento 1"])[0]
    assert torch.equal(last.cache.values[2][:, :, later], first.cache.values[2][:, :, where])
    assert not torch.equal(last.vectors[2], whole.vectors[2])
