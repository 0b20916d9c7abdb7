import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.visibility import Chunk, Reach, additive, visible
from tests.random_caches import ledgers, random_ledger


def visible_by_loop(ledger: Ledger, queries: int, reach: Reach) -> torch.Tensor:
    layers, batch, heads, slots = ledger.live.shape
    seen = torch.zeros(layers, batch, heads, queries, slots, dtype=torch.bool)
    for layer in range(layers):
        for row in range(batch):
            for head in range(heads):
                for query in range(queries):
                    place = slots - queries + query
                    for slot in range(place):
                        here, there = int(ledger.positions[row, place]), int(ledger.positions[row, slot])
                        if isinstance(reach, Chunk):
                            near = here // reach.positions == there // reach.positions
                        else:
                            near = reach is None or here - there < reach
                        seen[layer, row, head, query, slot] = bool(ledger.live[layer, row, head, slot]) and near
                    seen[layer, row, head, query, place] = True
    return seen


@given(ledgers(), st.data(), st.one_of(st.none(), st.integers(1, 12), st.builds(Chunk, st.integers(1, 12))))
def test_visible_agrees_with_a_loop_over_all_pairs(ledger: Ledger, data: st.DataObject, reach: Reach):
    queries = data.draw(st.integers(1, ledger.slots))
    assert torch.equal(visible(ledger, queries, reach), visible_by_loop(ledger, queries, reach))


@given(ledgers(), st.one_of(st.none(), st.integers(1, 12)))
def test_no_query_is_left_without_a_slot_to_attend_to(ledger: Ledger, window: int | None):
    assert visible(ledger, ledger.slots, window).any(-1).all()


@given(ledgers(), st.data(), st.integers(1, 12))
def test_fewer_queries_see_what_the_last_of_more_queries_see(ledger: Ledger, data: st.DataObject, window: int | None):
    queries = data.draw(st.integers(1, ledger.slots))
    assert torch.equal(visible(ledger, queries, window), visible(ledger, ledger.slots, window)[..., -queries:, :])


@given(ledgers(), st.data(), st.one_of(st.none(), st.integers(1, 12)))
def test_chosen_queries_see_what_they_see_among_all(ledger: Ledger, data: st.DataObject, window: int | None):
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, ledger.slots - 1), max_size=4)), dtype=torch.long)
    assert torch.equal(visible(ledger, chosen, window), visible(ledger, ledger.slots, window)[..., chosen, :])


def test_a_window_counts_positions_and_not_slots():
    ledger = random_ledger(0, batch=1, slots=4)
    ledger.positions.copy_(torch.tensor([[0, 1, 7, 8]]))
    assert visible(ledger, 1, 8)[0, 0, 0, 0].tolist() == [False, True, True, True]
    assert visible(ledger, 1, 2)[0, 0, 0, 0].tolist() == [False, False, True, True]
    assert visible(ledger, 1, Chunk(7))[0, 0, 0, 0].tolist() == [False, False, True, True]
    assert visible(ledger, 1, Chunk(8))[0, 0, 0, 0].tolist() == [False, False, False, True]


@given(ledgers(), st.sampled_from([1, 2, 3]), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_additive_is_zero_where_seen_and_the_lowest_number_elsewhere_for_each_query_head(
    ledger: Ledger, groups: int, dtype: torch.dtype
):
    seen = visible(ledger, ledger.slots)[0]
    mask = additive(seen, groups, dtype)
    kv_heads = seen.shape[1]
    assert mask.dtype == dtype
    assert mask.shape[1] == (1 if kv_heads == 1 else kv_heads * groups)
    for head in range(mask.shape[1]):
        expected = seen[:, head // groups if kv_heads > 1 else 0]
        assert torch.equal(mask[:, head] == 0, expected)
        assert (mask[:, head][~expected] == torch.finfo(dtype).min).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hidden_slot_gets_no_attention_in_any_dtype(dtype: torch.dtype):
    seen = torch.tensor([True, False, True])[None, None, None]
    weights = (torch.tensor([0.0, 50.0, 1.0], dtype=dtype) + additive(seen, 1, dtype)).softmax(-1)
    assert weights[..., 1] == 0
    assert weights[..., 0] > 0
