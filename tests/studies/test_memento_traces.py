"""Traces on their way through caches: what each memento is computed from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.studies.memento_toy.traces import restarted, retained, stood_in, token_rows, vectors_of
from kvprobe.tasks.mementos import Trace, draw_alike, draw_trace
from tests import models
from tests.refusals import refused
from tests.toy import TINY, follow, toy

VIEWS = [TINY, replace(TINY, keep=1), replace(TINY, keep=2, content="copy")]


def traces_of(count: int = 6, seed: int = 5, content: str = "sum") -> list[Trace]:
    rng = np.random.default_rng(seed)
    return [draw_trace(rng, "sum" if content == "sum" else "copy", TINY.blocks) for _ in range(count)]


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recipe", VIEWS, ids=lambda recipe: recipe.name)
def test_retained_mementos_are_those_of_a_cache_whose_blocks_are_masked(recipe: Any):
    model, traces = toy(), traces_of(content=recipe.content)
    cache, _ = follow(recipe, model, traces, at_once=9)
    for written in retained(model, token_rows(model, traces), recipe.keep, TINY.blocks):
        same(written.vectors, vectors_of(written.number, cache))


def test_restarted_mementos_are_those_of_the_policy():
    model, traces = toy(), traces_of()
    cache, _ = follow(replace(TINY, provenance="recomputed"), model, traces, at_once=9)
    *_, last = restarted(model, token_rows(model, traces), 0, range(1, TINY.blocks + 1))
    same(last.vectors, vectors_of(TINY.blocks, cache))


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_restart_reads_what_is_in_view_and_nothing_else(keep: int):
    model, traces = toy(), traces_of()
    for written in restarted(model, token_rows(model, traces), keep, range(1, TINY.blocks + 1)):
        hidden = [f"block {number}" for number in range(1, written.number - keep)]
        fresh = model.prefill(model.tokens([trace.conversation().without(*hidden) for trace in traces]))
        same(written.vectors, vectors_of(written.number, fresh))


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_stand_ins_are_the_hidden_blocks_of_a_run_that_is_otherwise_the_same(keep: int):
    model, traces, rng = toy(), traces_of(), np.random.default_rng(0)
    others = [draw_alike(trace, rng) for trace in traces]
    for written in stood_in(model, token_rows(model, traces), token_rows(model, others), keep, 4):
        hidden = max(0, written.number - 1 - keep)
        spliced = [
            replace(own, blocks=(*other.blocks[:hidden], *own.blocks[hidden:]))
            for own, other in zip(traces, others, strict=True)
        ]
        *_, last = retained(model, token_rows(model, spliced), keep, written.number)
        same(written.vectors, last.vectors)
        assert torch.equal(written.likeliest, last.likeliest)


@pytest.mark.parametrize("keep", [0, 1])
def test_mementos_after_stand_ins_hold_nothing_of_hidden_blocks(keep: int):
    """To the bit: each trace is read alone, as rows of one batch round otherwise."""
    model, (trace,), rng = toy(), traces_of(1), np.random.default_rng(0)
    stand_in, other = draw_alike(trace, rng), draw_alike(trace, rng)
    changed = replace(trace, blocks=(other.blocks[0], *trace.blocks[1:]))
    assert changed != trace
    runs = [
        [one.vectors for one in stood_in(model, token_rows(model, [some]), token_rows(model, [stand_in]), keep, 4)]
        for some in (trace, changed)
    ]
    assert [*map(torch.equal, *runs)] == [False] * (1 + keep) + [True] * (3 - keep)


def test_a_tokenizer_that_does_not_know_the_words_is_refused():
    refused(lambda: token_rows(models.any_model(), traces_of(1)), "one token for each digit", "kvprobe train memento")


def test_words_are_looked_up_as_the_template_writes_them():
    model, traces = toy(), traces_of()
    assert token_rows(model, traces) == model.tokens([trace.conversation() for trace in traces])
