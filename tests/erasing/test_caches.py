"""Erasing inside a cache, and patching along an eraser: what is touched, and what is not."""

from dataclasses import replace

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.computed import Engine
from kvprobe.erasing import Eraser, Subspace, erase, interchange, leace, mix
from kvprobe.inference.model import Model
from kvprobe.patching import LogitDiff, aligned, patch_sweep
from kvprobe.patching.along import split
from kvprobe.text.tokens import Tokens
from tests.random_caches import assert_same_ledger
from tests.refusals import refused


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cache_of(model: Model, seed: int) -> KVCache:
    return model.prefill(Tokens.of(ids(seed, 6), "T1") + Tokens.of(ids(seed + 1, 5), "T2", 6))


def eraser_of(width: int, heads: int | None = None, seed: int = 0) -> Eraser:
    """Some eraser of vectors of this width, or of each of so many heads."""
    generator = torch.Generator().manual_seed(seed)
    shape = (60, width) if heads is None else (heads, 60, width)
    labels = torch.randint(0, 3, (60,), generator=generator)
    return leace(torch.randn(shape, generator=generator), labels, 3)


def width_of(cache: KVCache) -> int:
    return cache.n_kv_heads * cache.values[0].shape[3]


def test_erasing_changes_only_chosen_slots_of_layers_and_parts_with_an_eraser(tiny: Model):
    cache = cache_of(tiny, 0)
    eraser = eraser_of(width_of(cache))
    erased = erase(cache, {(1, "V"): eraser}, "T2")
    assert torch.equal(erased.ledger.edited, cache.ledger.in_segments("T2"))
    assert_same_ledger(replace(erased.ledger, edited=cache.ledger.edited), cache.ledger)
    for layer in range(cache.n_layers):
        assert torch.equal(erased.keys[layer], cache.keys[layer])
        same = (erased.values[layer] == cache.values[layer]).all(3).all(1)[0]
        assert same.tolist() == [True] * 6 + [layer != 1] * 5
    vectors = cache.values[1][0].transpose(0, 1).flatten(1)
    expected = eraser.erased(vectors)[6:]
    torch.testing.assert_close(erased.values[1][0].transpose(0, 1).flatten(1)[6:], expected)


@pytest.mark.parametrize("engine", ["llama.cpp f16", "llama.cpp q8_0"])
def test_what_takes_numbers_of_a_donor_takes_the_engine_that_rounded_them(tiny_llama: Model, engine: Engine):
    """The coarser of the two: the base is of llama.cpp with 8 bits."""
    base, donor = cache_of(tiny_llama, 0), cache_of(tiny_llama, 2)
    base, donor = (
        replace(one, ledger=replace(one.ledger, engine=known))
        for one, known in ((base, engine), (donor, "llama.cpp q4_0"))
    )
    subspaces = {(1, "V"): Subspace.spanned(torch.eye(width_of(base))[:2])}
    results = {
        "patch": base.patch(donor, "T2"),
        "interchange": interchange(base, donor, subspaces, "T2"),
        "mix": mix(base, donor, "T2", strength=0.5),
        "aligned": aligned(tiny_llama, base, donor).cache,
        **split(base, donor, subspaces),
    }
    assert {name: one.ledger.engine for name, one in results.items()} == dict.fromkeys(results, "llama.cpp q4_0")
    assert interchange(donor, base, subspaces, "T2").ledger.engine == "llama.cpp q4_0"


def test_an_eraser_of_each_head_reads_only_its_own(tiny_llama: Model):
    cache = cache_of(tiny_llama, 0)
    heads, width = cache.n_kv_heads, cache.keys[0].shape[3]
    eraser = eraser_of(width, heads)
    erased = erase(cache, {(0, "K"): eraser}, "T1")
    for head in range(heads):
        expected = eraser.at(head).erased(cache.keys[0][0, head, :6])
        torch.testing.assert_close(erased.keys[0][0, head, :6], expected)


def test_interchange_of_all_directions_is_a_patch_and_of_strength_zero_the_base(tiny_llama: Model):
    base, donor = cache_of(tiny_llama, 0), cache_of(tiny_llama, 20)
    width = width_of(base)
    whole = {(2, "K"): Subspace.spanned(torch.randn(width, width, generator=torch.Generator().manual_seed(3)))}
    slots = torch.zeros(1, base.slots, dtype=torch.bool)
    slots[0, [2, 9]] = True
    exchanged = interchange(base, donor, whole, slots=slots)
    patched = base.patch(donor, slots=slots, layers=[2], part="K")
    torch.testing.assert_close(exchanged.keys[2], patched.keys[2])
    assert torch.equal(interchange(base, donor, whole, slots=slots, strength=0.0).keys[2], base.keys[2])
    for cache in (
        interchange(base, donor, whole, slots=slots, strength=0.5),
        mix(base, donor, slots=slots, layers=[2], strength=0.5),
    ):
        torch.testing.assert_close(cache.keys[2], (base.keys[2] + patched.keys[2]) / 2)
        assert torch.equal(cache.keys[1], base.keys[1])
    assert torch.equal(mix(base, donor, slots=slots, layers=[2]).keys[2], patched.keys[2])


def test_interchange_with_the_average_is_an_erasure(tiny_llama: Model):
    base = cache_of(tiny_llama, 0)
    eraser = eraser_of(width_of(base))
    mean = eraser.mean.view(base.n_kv_heads, 1, -1).expand(-1, base.slots, -1)[None]
    average = base.with_parts({"V": (mean, *base.values[1:])})
    torch.testing.assert_close(
        interchange(base, average, {(0, "V"): eraser}, "T1").values[0], erase(base, {(0, "V"): eraser}, "T1").values[0]
    )


def test_a_list_of_slots_is_the_same_as_a_boolean_and_is_refused_like_one_of_mask(tiny_llama: Model):
    base, donor = cache_of(tiny_llama, 0), cache_of(tiny_llama, 5)
    eraser = eraser_of(width_of(base))
    chosen = torch.zeros(1, base.slots, dtype=torch.bool)
    chosen[0, [2, 9]] = True
    for slots in ([2, 9], torch.tensor([9, 2])):
        erased = erase(base, {(1, "V"): eraser}, slots=slots)
        assert torch.equal(erased.values[1], erase(base, {(1, "V"): eraser}, slots=chosen).values[1])
        exchanged = interchange(base, donor, {(1, "V"): eraser}, slots=slots)
        assert torch.equal(exchanged.values[1], interchange(base, donor, {(1, "V"): eraser}, slots=chosen).values[1])
    for wrong in ([base.slots], [-1], chosen[:, 1:]):
        sentence = refused(lambda wrong=wrong: base.mask(slots=wrong), "slots")
        refused(lambda wrong=wrong: erase(base, {(1, "V"): eraser}, slots=wrong), sentence)


def test_rows_of_a_batch_are_erased_each_in_its_own_slots(tiny_llama: Model):
    one, other = cache_of(tiny_llama, 0), cache_of(tiny_llama, 20)
    both, erasers = KVCache.join([one, other]), {(1, "V"): eraser_of(width_of(one))}
    slots = torch.zeros(2, both.slots, dtype=torch.bool)
    slots[0, 1] = slots[1, 4] = True
    erased = erase(both, erasers, slots=slots)
    for row, cache in enumerate((one, other)):
        expected = erase(cache, erasers, slots=slots[row : row + 1])
        torch.testing.assert_close(erased.values[1][row], expected.values[1][0])


def test_patching_along_an_eraser_swaps_inside_it_and_the_rest_outside(tiny_llama: Model):
    base, donor = cache_of(tiny_llama, 0), cache_of(tiny_llama, 20)
    along = {(1, "V"): eraser_of(width_of(base))}
    suffix = Tokens.of(ids(9, 4), "question", int(base.ledger.following[0]))
    over = {"layer": [1], "segment": ["T2"]}
    table = patch_sweep(
        tiny_llama, base, donor, suffix, LogitDiff(5, 9), over, parts=("V",), along=along, progress=False
    ).df()
    values = table.set_index("content")["value"]
    inside = interchange(base, donor, along, "T2")
    logits = tiny_llama.extend(inside, suffix)[1][0, -1]
    assert values["along"] == pytest.approx(float(logits[5] - logits[9]), abs=1e-4)
    assert values["rest"] != pytest.approx(values["full"], abs=1e-5)


def test_erasers_for_missing_layers_parts_or_widths_are_refused(tiny_llama: Model):
    cache = cache_of(tiny_llama, 0)
    eraser = eraser_of(width_of(cache))
    refused(lambda: erase(cache, {(9, "V"): eraser}, "T1"), "no 'V' at layer 9")
    refused(lambda: erase(cache, {(0, "V"): eraser_of(5)}, "T1"), "KV heads × numbers to a head")
    refused(lambda: erase(cache, {(0, "V"): eraser}, "T3"), "T3")
    refused(lambda: erase(cache, {(0, "V"): eraser}), "but not both")
    refused(
        lambda: interchange(cache, tiny_llama.prefill(Tokens.of(ids(1, 4), "T1")), {(0, "V"): eraser}, "T1"),
        "slots, the base",
    )
