import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import PADDING
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens
from tests.random_caches import NAMES, assert_bit_identical, assert_same_ledger, copy_of, random_cache
from tests.refusals import refused


def storages(cache: KVCache) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in cache.keys + cache.values}


def everywhere(cache: KVCache) -> torch.Tensor:
    """Liveness with its layer and head axes written out."""
    return cache.ledger.live.expand(cache.n_layers, -1, cache.n_kv_heads, -1)


def test_masking_hides_the_segment_and_moves_nothing():
    cache = random_cache(0, gaps=True)
    masked = cache.mask("T1")
    inside = cache.ledger.segments == NAMES.index("T1")
    assert not masked.ledger.live[:, inside[:, None]].any()
    assert torch.equal(masked.ledger.live[0, :, 0], ~inside)
    assert torch.equal(masked.ledger.positions, cache.ledger.positions)
    assert storages(masked) == storages(cache)


def test_masking_several_segments_equals_masking_one_after_another():
    cache = random_cache(1)
    assert_bit_identical(cache.mask("T1", "T2"), cache.mask("T2").mask("T1"))


def test_masking_by_slots_equals_masking_by_segment():
    cache = random_cache(2, padded=True)
    slots = cache.ledger.segments == NAMES.index("summary")
    assert_bit_identical(cache.mask(slots=slots), cache.mask("summary"))


def test_masking_in_some_layers_and_heads_leaves_the_others():
    cache = random_cache(3, n_layers=3, kv_heads=2)
    masked = cache.mask("T1", layers=[0, 2], heads=[1])
    inside = cache.ledger.segments == NAMES.index("T1")
    for layer in range(3):
        for head in range(2):
            hidden = inside if layer in (0, 2) and head == 1 else torch.zeros_like(inside)
            assert torch.equal(masked.ledger.live[layer, :, head], ~hidden), (layer, head)
    assert not masked.ledger.uniform
    assert cache.ledger.uniform


def test_masking_in_no_layer_or_no_head_masks_nothing():
    cache = random_cache(3, n_layers=3, kv_heads=2)
    assert cache.mask("T1", layers=[]).ledger.live.all()
    assert cache.mask("T1", heads=[]).ledger.live.all()


def test_masking_every_layer_and_head_in_turn_equals_masking_at_once():
    cache = random_cache(4, some_masked=True)
    in_turn = cache
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            in_turn = in_turn.mask("T1", layers=[layer], heads=[head])
    assert torch.equal(everywhere(in_turn), everywhere(cache.mask("T1")))


def test_a_masked_slot_cannot_come_back_by_masking_another():
    cache = random_cache(5).mask("T1", layers=[1])
    assert not (everywhere(cache.mask("T2")) & ~everywhere(cache)).any()


@pytest.mark.parametrize("operation", ["mask", "evict", "select"])
def test_an_unknown_segment_is_refused_with_the_near_match(operation: str):
    refused(lambda: getattr(random_cache(0), operation)("sumary"), "'sumary'", "did you mean 'summary'")


@pytest.mark.parametrize("operation", ["mask", "evict", "select"])
def test_segments_and_slots_together_or_neither_are_refused(operation: str):
    cache = random_cache(0)
    refused(getattr(cache, operation), "not both")
    refused(lambda: getattr(cache, operation)("T1", slots=torch.ones(2, 8, dtype=torch.bool)), "not both")


@pytest.mark.parametrize("operation", ["mask", "evict", "select"])
@pytest.mark.parametrize("indices", [[1, 2], (), range(3), torch.tensor([7, 0])], ids=str)
def test_a_list_of_slots_means_these_slots_in_all_rows(operation: str, indices: Any):
    cache = random_cache(0)
    slots = torch.zeros(2, 8, dtype=torch.bool)
    slots[:, list(indices)] = True
    assert_bit_identical(getattr(cache, operation)(slots=indices), getattr(cache, operation)(slots=slots))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda cache: cache.fork(1.5), "rows=1.5, a float; give a whole number"),
        (lambda cache: cache.fork("2"), "rows='2', a str; give a whole number"),
        (lambda cache: cache.rows("x"), "index='x', a str; give a list of whole numbers"),
        (lambda cache: cache.rows(0), "index=0, an int; give a list of whole numbers"),
        (lambda cache: cache.rows([2]), "no row 2; the cache has rows 0 to 1"),
        (lambda cache: cache.mask(slots=[8]), "no slot 8; the cache has slots 0 to 7"),
        (lambda cache: cache.mask(slots=[0.5]), "slots=[0.5], a list; give"),
        (lambda cache: cache.mask(slots=[[True] * 8] * 2), "slots=[[True"),
        (lambda cache: cache.evict(slots="T1"), "slots='T1', a str; give"),
        (lambda cache: cache.mask("T1", layers=1), "layers=1, an int; give a list of whole numbers"),
        (lambda cache: cache.mask("T1", heads=["a"]), "heads=['a'], a list; give a list of whole numbers"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_in_a_sentence(call: Callable[[KVCache], KVCache], sentence: str):
    refused(lambda: call(random_cache(0)), sentence)


@pytest.mark.parametrize("operation", ["mask", "evict", "select"])
def test_slots_of_another_shape_are_refused(operation: str):
    refused(lambda: getattr(random_cache(0), operation)(slots=torch.ones(2, 7, dtype=torch.bool)), "2 rows of 8 slots")


@pytest.mark.parametrize("layer", [3, 99, -1])
@pytest.mark.parametrize("head", [2, -1])
def test_a_layer_or_head_out_of_range_is_refused(layer: int, head: int):
    refused(lambda: random_cache(0).mask("T1", layers=[0, layer]), f"no layer {layer}; the cache has layers 0 to 2")
    refused(lambda: random_cache(0).mask("T1", heads=[head]), f"no KV head {head}; the cache has KV heads 0 to 1")


def test_eviction_keeps_the_positions_and_contents_of_the_rest():
    cache = random_cache(6, gaps=True, layers=3, kv_heads=2)
    evicted = cache.evict("T1")
    rest = [slot for slot in range(cache.slots) if cache.ledger.segments[0, slot] != NAMES.index("T1")]
    assert evicted.slots == len(rest)
    for name in ("tokens", "positions", "segments", "recomputed"):
        assert torch.equal(getattr(evicted.ledger, name), getattr(cache.ledger, name)[:, rest]), name
    assert torch.equal(evicted.ledger.live, cache.ledger.live[..., rest])
    for before, after in zip(cache.keys + cache.values, evicted.keys + evicted.values, strict=True):
        assert torch.equal(after, before[:, :, rest])


def test_eviction_keeps_what_was_masked_in_some_heads_only():
    cache = random_cache(7).mask("T2", layers=[1], heads=[0])
    evicted = cache.evict("T1")
    in_t2 = evicted.ledger.segments[0] == NAMES.index("T2")
    assert not evicted.ledger.live[1, :, 0, in_t2].any()
    assert evicted.ledger.live[1, :, 1, in_t2].all()
    assert evicted.ledger.live[0].all()


def test_eviction_frees_memory_and_shares_none():
    cache = random_cache(8)
    evicted = cache.evict("T1", "T2")
    assert not storages(evicted) & storages(cache)
    assert evicted.nbytes == cache.nbytes // 2


def test_rows_that_lose_different_numbers_of_slots_are_padded_and_not_live():
    cache = random_cache(9, batch=3, slots=6, gaps=True)
    gone = torch.zeros(3, 6, dtype=torch.bool)
    gone[0, [1, 4]] = True
    gone[1, 0] = True
    evicted = cache.evict(slots=gone)
    assert evicted.slots == 6
    for row, lost in enumerate(gone):
        rest = torch.nonzero(~lost)[:, 0]
        count = len(rest)
        assert torch.equal(evicted.ledger.positions[row, :count], cache.ledger.positions[row, rest])
        assert torch.equal(evicted.keys[2][row, :, :count], cache.keys[2][row][:, rest])
        assert torch.equal(evicted.values[1][row, :, :count], cache.values[1][row][:, rest])
        assert evicted.ledger.live[:, row, :, :count].all()
        assert not evicted.ledger.live[:, row, :, count:].any()
        assert (evicted.ledger.segments[row, count:] == PADDING).all()
    assert torch.equal(evicted.ledger.following, cache.ledger.positions[:, -1] + 1)


def test_what_a_row_lost_is_not_in_its_padding():
    cache = random_cache(6)
    chosen = torch.zeros_like(cache.ledger.padding)
    chosen[0, 2:5] = True
    evicted = cache.evict(slots=chosen)
    padding = evicted.ledger.padding
    assert padding.sum(1).tolist() == [3] + [0] * (cache.batch - 1)
    assert not evicted.ledger.tokens[padding].any()
    assert not any(tensor.transpose(1, 2)[padding].any() for tensor in evicted.tensors)
    alone = cache.rows([0]).evict(slots=[2, 3, 4])
    assert_bit_identical(evicted.rows([0]).take(*evicted.rows([0]).ledger.order(~padding[:1])), alone)


def test_eviction_drops_padding_that_no_row_needs():
    cache = random_cache(10, batch=1, slots=8, padded=True)
    length = int((cache.ledger.segments != PADDING).sum())
    assert cache.evict("system").slots == length - int((cache.ledger.segments == 0).sum())


def test_select_keeps_what_evicting_the_others_keeps():
    cache = random_cache(11, gaps=True, padded=True)
    assert_bit_identical(cache.select("system", "summary"), cache.evict("T1", "T2"))


def test_evicting_everything_leaves_an_empty_cache_that_goes_on_where_it_was():
    cache = random_cache(12)
    empty = cache.evict(*NAMES)
    assert empty.slots == 0
    assert empty.nbytes == 0
    assert empty.ledger.following.equal(cache.ledger.following)


def test_a_fork_of_one_row_shares_storage():
    cache = random_cache(13, batch=1)
    fork = cache.fork(5)
    assert fork.batch == 5
    assert fork.nbytes == cache.nbytes
    assert storages(fork) == storages(cache)
    for row in range(5):
        assert_bit_identical(fork.rows([row]), cache)


def test_a_fork_of_several_rows_repeats_each():
    cache = random_cache(14, batch=2, padded=True)
    assert_bit_identical(cache.fork(2), cache.rows([0, 0, 1, 1]))


def test_a_fork_into_no_rows_is_refused():
    refused(lambda: random_cache(0).fork(0), "at least 1")


@pytest.mark.parametrize("rows", [1, 3])
def test_masking_or_evicting_a_fork_leaves_the_original_bit_identical(rows: int):
    cache = random_cache(15, batch=1)
    before = copy_of(cache)
    fork = cache.fork(rows)
    fork.mask("T1")
    fork.mask("T2", layers=[0], heads=[1])
    fork.evict("system")
    fork.select("summary")
    assert_bit_identical(cache, before)
    assert_bit_identical(fork, before.fork(rows))


def test_writing_into_an_evicted_fork_leaves_the_original_bit_identical():
    cache = random_cache(16, batch=1)
    before = copy_of(cache)
    evicted = cache.fork(2).evict("T1")
    for tensor in (*evicted.keys, *evicted.values, evicted.ledger.tokens, evicted.ledger.live):
        tensor.contiguous().zero_()
    assert_bit_identical(cache, before)


def test_rows_come_in_the_order_asked_for():
    cache = random_cache(17, batch=3, padded=True, gaps=True)
    reversed_rows = cache.rows([2, 0])
    assert torch.equal(reversed_rows.keys[1], cache.keys[1][[2, 0]])
    assert torch.equal(reversed_rows.values[0], cache.values[0][[2, 0]])
    assert torch.equal(reversed_rows.ledger.live, cache.ledger.live[:, [2, 0]])
    assert torch.equal(reversed_rows.ledger.positions, cache.ledger.positions[[2, 0]])
    assert_bit_identical(reversed_rows, cache.rows(torch.tensor([2, 0])))


def test_moving_a_cache_moves_all_its_tensors():
    cache = random_cache(18)
    assert_bit_identical(cache.to("cpu"), cache)
    moved = cache.to("meta")
    ledger = [getattr(moved.ledger, name) for name in ("tokens", "positions", "segments", "recomputed", "live")]
    assert {tensor.device.type for tensor in (*moved.keys, *moved.values, *ledger)} == {"meta"}


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_nbytes_counts_keys_and_values(dtype: torch.dtype, size: int):
    cache = random_cache(19, batch=2, slots=8, n_layers=3, kv_heads=2, d_head=4, dtype=dtype)
    assert cache.nbytes == 3 * 2 * 2 * 8 * (4 + 5) * size


@pytest.mark.usefixtures("unchecked")
def test_keys_and_values_that_do_not_fit_the_ledger_are_refused():
    cache = random_cache(20)
    other = random_cache(20, slots=7)
    refused(lambda: KVCache.of(cache.keys, cache.values, other.ledger), "K of layer 0", "(2, 2, 8, 4)", "(2, 7)")
    refused(lambda: KVCache.of(cache.keys, other.values, cache.ledger), "V of layer 0")
    refused(lambda: KVCache.of(cache.keys, cache.values[:2], cache.ledger), "got 3 and 2")
    refused(lambda: KVCache.of((), (), cache.ledger), "got none")


def test_operations_leave_the_ledger_of_the_original_alone():
    cache = random_cache(21, layers=3, kv_heads=2, some_masked=True, padded=True)
    before = copy_of(cache)
    cache.mask("T1").evict("T2").fork(2).rows([0])
    assert_same_ledger(cache.ledger, before.ledger)


def test_slot_0_is_warned_of_when_it_is_hidden_and_others_stay(tiny_llama: Model):
    cache = tiny_llama.prefill(Tokens.of(range(6), "T1") + Tokens.of(range(6), "T2", 6))
    for hide in (KVCache.mask, KVCache.evict):
        with pytest.warns(UserWarning, match="slot 0, the attention sink"):
            hide(cache, "T1")
        with pytest.warns(UserWarning, match="slot 0, the attention sink"):
            hide(cache, slots=[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hide(cache, "T2")
            hide(cache, slots=range(1, 6))
            hide(cache, slots=range(12))  # nothing stays
