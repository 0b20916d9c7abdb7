"""Prompts that begin alike: what they have in common is read once, and nothing else changes."""

from collections.abc import Sequence

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.inference.shared import common_start, read_branches, read_common
from kvprobe.text.tokens import Tokens
from tests.random_caches import assert_close_caches

FORKED = ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8], [1, 2, 3, 4, 9, 6], [1, 2, 7, 8, 5], [1, 2, 3, 4, 9, 7])

LATE = ([1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
"""The first row ends where others go on together."""


def rows_of(*ids: Sequence[int]) -> list[Tokens]:
    return [Tokens.of(row[:1], "T1") + Tokens.of(row[1:], "T2", 1) for row in ids]


def test_a_common_start_is_of_the_same_tokens_in_the_same_segments_at_the_same_positions():
    assert common_start(rows_of([1, 2, 3], [1, 2, 4])) == 2
    assert common_start(rows_of([1, 2], [1, 2, 4])) == 2
    assert common_start(rows_of([5, 2], [1, 2])) == 0
    assert common_start([Tokens.of([1, 2]), Tokens.of([1, 2], start=1)]) == 0
    assert common_start([Tokens.of([1, 2]) + Tokens.of([3], "T2", 2), Tokens.of([1, 2, 3])]) == 2


@pytest.mark.parametrize("ids", [FORKED, [[1, 2], [1, 2, 3]], [[1, 2], [1, 2]], [[4, 1], [5, 1]], [[1, 2, 3]], LATE])
def test_rows_that_part_are_read_as_if_each_stood_alone(tiny: Model, ids: Sequence[Sequence[int]]):
    rows = rows_of(*ids)
    for row, (past, left) in zip(rows, read_branches(tiny, rows), strict=True):
        assert len(left)
        assert (() if past is None else tuple(past.ledger.tokens[0].tolist())) + left.ids == row.ids
        cache, logits = tiny.extend(past, [left])
        alone, expected = tiny.extend(None, [row])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert_close_caches(cache, alone)


def test_what_several_rows_share_is_read_once(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    read: list[tuple[int, ...]] = []
    extend = Model.extend

    def counted(model: Model, cache: KVCache | None, text: Sequence[Tokens]):
        read.extend(row.ids for row in text)
        return extend(model, cache, text)

    monkeypatch.setattr(Model, "extend", counted)
    read_branches(tiny_llama, rows_of(*FORKED))
    assert sorted(read) == [(1, 2), (3, 4), (7,), (9,)]


def test_what_all_rows_share_is_read_after_the_past(tiny_llama: Model):
    before, (first, second) = Tokens.of([8, 9]), rows_of([1, 2, 3], [1, 2, 4])
    rows = [row.shifted(2) for row in (first, second)]
    past, left = read_common(tiny_llama, rows, tiny_llama.prefill(before))
    assert past is not None
    assert past.ledger.tokens.tolist() == [[8, 9, 1, 2]]
    assert [row.ids for row in left] == [(3,), (4,)]
