"""The zoo of real cache bugs: each strikes what it says, where it says, and as its seed draws."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.detection.reports import REPORTS
from kvprobe.detection.zoo import BLOCK, MAKERS, ZOO, plant
from kvprobe.faults import Draws
from tests.faults import context_of, same_bits, square_cache
from tests.random_caches import random_cache
from tests.refusals import refused

LAYERS, SLOTS = 6, 100
HARMFUL = [name for name, report in ZOO.items() if not report.benign]
STRIKES = [name for name, makers in MAKERS.items() if makers]
DRAWS = Draws(seed=3)


@pytest.fixture(scope="module")
def cache() -> KVCache:
    return square_cache(0, SLOTS, n_layers=LAYERS, d_head=16)


@pytest.mark.parametrize("name", STRIKES)
def test_a_bug_changes_only_what_it_says_and_again_as_its_seed_draws(cache: KVCache, name: str):
    planted = plant(name, cache, context_of(cache), draws=DRAWS)
    again = plant(name, cache, context_of(cache), draws=DRAWS)
    assert same_bits(planted.cache, again.cache)
    assert (planted.layers, planted.slots) == (again.layers, again.slots)
    assert planted.fault is not None
    assert set(planted.layers) <= set(planted.fault.scope.layers or ())
    assert set(planted.slots) <= set(planted.fault.scope.slots or ())
    for number, (was, now) in enumerate(zip(cache.layers, planted.cache.layers, strict=True)):
        assert (number in planted.layers) == any(not torch.equal(was[part], now[part]) for part in was)
        rest = [slot for slot in range(SLOTS) if slot not in planted.slots]
        assert all(torch.equal(was[part][:, :, rest], now[part][:, :, rest]) for part in was)


@pytest.mark.parametrize("name", STRIKES)
def test_one_block_of_one_layer_is_that_and_nothing_else(cache: KVCache, name: str):
    planted = plant(name, cache, context_of(cache), blocks=1, layers=1, draws=DRAWS)
    assert len(planted.layers) == 1
    first = planted.slots[0] // BLOCK
    whole = min(first, SLOTS // BLOCK - 1)
    assert {min(slot // BLOCK, SLOTS // BLOCK - 1) for slot in planted.slots} == {whole}


def test_what_is_asked_for_decides_how_much_is_struck_and_seeds_decide_where(cache: KVCache):
    places: set[tuple[int, int]] = set()
    for seed in range(12):
        planted = plant("vllm-45357", cache, context_of(cache), blocks=2, layers=3, draws=Draws(seed))
        assert len(planted.layers) == 3
        assert len(planted.slots) == 2 * BLOCK
        places.add((planted.layers[0], planted.slots[0]))
    assert len(places) > 6
    everything = plant("vllm-27547", cache, context_of(cache))
    assert everything.layers == tuple(range(LAYERS))
    assert plant("atom-2154", cache).layers == plant("atom-2154", cache, layers=round(LAYERS * 69 / 93)).layers


@pytest.mark.parametrize(("name", "struck"), [("vllm-53856", "V"), ("injected-keys", "K")])
def test_a_bug_of_keys_or_of_values_leaves_the_other_and_strikes_a_latent_where_there_is_one(
    cache: KVCache, name: str, struck: str
):
    planted = plant(name, cache, draws=DRAWS)
    for was, now in zip(cache.layers, planted.cache.layers, strict=True):
        assert {part for part in was if not torch.equal(was[part], now[part])} <= {struck}
    layer = dict.fromkeys(("latent", "rope"), cache.layers[0]["K"][:, :1])
    planted = plant(name, replace(cache, layers=(layer,) * LAYERS), draws=DRAWS)
    for now in planted.cache.layers:
        assert torch.equal(now["rope"], layer["rope"])
    assert planted.layers


def test_a_swapped_history_is_the_later_half_of_another_text(cache: KVCache):
    context = context_of(cache)
    planted = plant("history-swap", cache, context, draws=DRAWS)
    half = SLOTS // BLOCK // 2 * BLOCK
    assert planted.slots == tuple(range(half, SLOTS))
    for own, other, now in zip(cache.layers, context.donors["distractor"].layers, planted.cache.layers, strict=True):
        assert all(torch.equal(now[part][:, :, :half], own[part][:, :, :half]) for part in own)
        assert all(torch.equal(now[part][:, :, half:], other[part][:, :, half:]) for part in own)


def test_a_benign_report_leaves_the_cache_or_moves_it_by_rounding(cache: KVCache):
    for name in set(ZOO) - set(HARMFUL):
        planted = plant(name, cache)
        for was, now in zip(cache.tensors, planted.cache.tensors, strict=True):
            assert float((was - now).abs().max() / was.abs().max()) < (0.07 if name == "vllm-13133" else 0.02)


def test_a_lost_state_is_that_of_tokens_that_wrote_nothing():
    from kvprobe.cache.recurrence import fold

    rng = torch.Generator().manual_seed(0)
    shape = (1, 2, SLOTS)
    writes = {
        "key": torch.randn(*shape, 4, generator=rng),
        "value": torch.randn(*shape, 6, generator=rng),
        "decay": -torch.rand(*shape, 2, generator=rng),
        "step": torch.rand(*shape, 1, generator=rng),
        "conv": torch.randn(1, 1, SLOTS, 3, generator=rng),
    }
    attended = square_cache(0, SLOTS)
    hybrid = replace(attended, layers=(*attended.layers, writes, writes, writes, writes))
    planted = plant("atom-2154", hybrid)
    assert len(planted.layers) == 3
    assert min(planted.layers) >= attended.n_layers
    kept = torch.arange(SLOTS)[None] >= SLOTS // BLOCK * BLOCK
    assert torch.allclose(fold(planted.cache.layers[planted.layers[0]]), fold(writes, keep=kept), atol=1e-6)


def test_where_layers_store_a_latent_a_bit_of_it_flips():
    rng = torch.Generator().manual_seed(0)
    latent = {"latent": torch.randn(1, 1, SLOTS, 6, generator=rng), "rope": torch.randn(1, 1, SLOTS, 2, generator=rng)}
    cache = square_cache(0, SLOTS)
    planted = plant("bit-flips", replace(cache, layers=(latent,) * cache.n_layers))
    (layer,), (slot,) = planted.layers, planted.slots
    now = planted.cache.layers[layer]
    assert int((now["latent"] != latent["latent"]).sum()) == 1
    assert bool((now["latent"] != latent["latent"])[0, 0, slot].any())


def test_what_cannot_be_planted_is_refused(cache: KVCache):
    refused(lambda: plant("vllm-1", cache), "There is no bug called 'vllm-1'")
    refused(lambda: plant("vllm-45357", cache), "no donor called 'distractor'")
    refused(lambda: plant("llama-cpp-3825", cache), "this fault context has no rotary frequencies")
    refused(lambda: plant("atom-2154", cache.fork(2)), "in a cache of one row, and this has 2")
    refused(lambda: plant("atom-2154", square_cache(0, 10)), "The cache has 10 slots; bugs strike blocks of 16")
    refused(lambda: plant("lmcache-4463", square_cache(0, kv_heads=1)), "lmcache-4463 changes no bit of this cache")
    refused(lambda: plant("dynamo-14416", random_cache(0, 1, 20)), "Misread needs equal widths")


def test_rows_of_a_request_that_begins_alike_are_refused_where_both_texts_are_the_same(cache: KVCache):
    context, rounded = context_of(cache), [part + 1e-5 * torch.randn_like(part) for part in cache.tensors]
    rows = [
        dict(zip(layer, rounded[2 * number : 2 * number + 2], strict=True)) for number, layer in enumerate(cache.layers)
    ]
    alike = replace(context.donors["distractor"], layers=tuple(rows))
    context = replace(context, donors={"distractor": alike})
    for name in ("vllm-45357", "sglang-22819"):
        refused(lambda name=name: plant(name, cache, context), "since both texts are alike there")
    other = replace(alike, layers=({**rows[0], "V": rows[0]["V"].flip(2)}, *rows[1:]))
    planted = plant("vllm-45357", cache, replace(context, donors={"distractor": other}))
    assert planted.layers == tuple(range(LAYERS))


def test_the_page_lists_every_bug_as_its_report_says_and_which_were_not_read():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "detection.md").read_text(encoding="utf-8")
    page = page.replace("\\[", "[").replace("\\]", "]")
    rows = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\) \|(.*)", page, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [(name, report.address) for name, report in REPORTS.items()]
    assert {name for name, _, row in rows if "*Cited" not in row} == {n for n, report in REPORTS.items() if report.read}
    for (_, _, row), report in zip(rows, REPORTS.values(), strict=True):
        assert f" {report.kind}" in row
        assert report.happened in row
        assert f" {report.scale} |" in row
    assert set(REPORTS) == set(MAKERS)
