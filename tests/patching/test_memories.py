"""Sweeps over memories of other kinds than one K and one V per layer: each cell is what `KVCache.patch` makes of it."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import KV
from kvprobe.inference.model import Model, load
from kvprobe.patching import PatchMap, aligned, attribute, patch_sweep
from tests.models import every
from tests.patching.test_exact import METRIC, SUFFIX_IDS, suffix_of, two


@cache
def built(kind: str) -> Model:
    """With Gemma 4's last two layers reading the two before."""
    with pytest.MonkeyPatch.context() as patch:
        alternate: Any = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
        patch.setitem(every._OWN, "gemma4_text", every._OWN["gemma4_text"] | alternate)
        return load(every.tiny(kind))


def swept(model: Model, base: KVCache, donor: KVCache, over: Any = ("layer", "segment"), **settings: Any) -> PatchMap:
    return patch_sweep(model, base, donor, suffix_of(base), METRIC, over, progress=False, **settings)


def hold(model: Model, base: KVCache, donor: KVCache, patched: PatchMap) -> None:
    """Hold every cell to the cache that is patched by hand and read on after."""
    base, other = model.as_seen(base), aligned(model.lanes, base, donor).cache
    for cell, value in zip(patched.cells, patched.values, strict=True):
        part: Any = cell.part
        alone = base.patch(other, slots=cell.slots, layers=cell.layers, part=part)
        expected = float(METRIC(model.extend(alone, suffix_of(base))[1][0]))
        assert value == pytest.approx(expected, abs=1e-5), cell


@pytest.mark.parametrize(
    ("kind", "readers"), [("gemma3n_text", {4: (4, 9), 5: (5, 6, 7, 8)}), ("gemma4_text", {0: (0, 2), 1: (1, 3)})]
)
def test_a_swapped_layer_is_felt_by_all_that_read_it(kind: str, readers: dict[int, Any]):
    model = built(kind)
    base, donor = two(model, "masked")
    patched = swept(model, base, donor)
    assert {cell.layers for cell in patched.cells} == {(layer,) for layer in range(base.n_layers)}
    hold(model, base, donor, patched)
    assert {layer: patched.readers[layer] for layer in readers} == readers
    assert f"layer {min(readers)} is felt in {', '.join(map(str, readers[min(readers)]))}" in repr(patched)


def test_what_is_swapped_as_the_prompt_is_computed_is_felt_by_all_that_read_it():
    model = built("gemma3n_text")
    base, donor = two(model)
    total = swept(model, base, donor, {"layer": [4, 5], "slot": [8, 12]}, parts=("V",), reads="total")
    whole = torch.tensor([[*base.ledger.tokens[0].tolist(), *SUFFIX_IDS]])

    def write(layer: int, slot: int, module: object, args: object, values: Tensor) -> Tensor:
        return values.index_copy(1, torch.tensor([slot]), donor.values[layer][:, :, [slot]].transpose(1, 2))

    for cell, value in zip(total.cells, total.values, strict=True):
        (layer,), (slot,) = cell.layers, cell.slots
        norm: Any = model.lanes.plain.get_submodule(f"model.layers.{layer}.self_attn.v_norm")
        handle = norm.register_forward_hook(partial(write, layer, slot))
        logits = model.lanes.native(whole)[0].detach()
        handle.remove()
        assert value == pytest.approx(float(METRIC(logits)), abs=1e-5)


def test_attribution_adds_up_what_all_that_read_a_layer_do():
    """A small step towards the donor does what the slope says."""
    model = built("gemma3n_text")
    base, donor = two(model)
    pairs = {part: zip(base.part(part), donor.part(part), strict=True) for part in KV}
    near = base.with_parts({part: [a + (b - a) / 100 for a, b in of_layers] for part, of_layers in pairs.items()})
    small = attribute(model, base, near, suffix_of(base), METRIC, {"layer": [4, 5]})
    for score in (small.linear, small.score):
        assert score == pytest.approx(small.checked.effect, rel=0.1, abs=2e-5)
    assert abs(small.linear).max() > 1e-4
