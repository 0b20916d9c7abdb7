"""Patch sweeps and layer maps of memories of other kinds than one K and one V per layer, held to what is done by hand:
each cell is what `KVCache.patch` makes of it, and each component what a hook does."""

from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import KV
from kvprobe.inference.capture import editing_hook
from kvprobe.inference.model import Model, load
from kvprobe.layers import Component, layer_map
from kvprobe.layers.suffix import BLOCKS, Suffix
from kvprobe.models.hooks import hooked
from kvprobe.patching import PatchMap, aligned, attribute, patch_sweep, swap_cells
from kvprobe.patching.grid import Cell, parts_of, stored_parts
from tests.models import every
from tests.patching.test_exact import METRIC, SUFFIX_IDS, suffix_of, two
from tests.refusals import refused


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
    base, other = model.as_seen(base), aligned(model, base, donor).cache
    rows: list[KVCache] = []
    for cell in patched.cells:
        row = base
        for part in {*stored_parts(cell.part)}.intersection(parts_of(base)):
            row = row.patch(other, slots=cell.slots, layers=cell.layers, part=cast(Any, part))
        rows.append(row)
    logits = model.extend(KVCache.join(rows), [suffix_of(base)] * len(rows))[1]
    assert patched.values == pytest.approx([float(METRIC(row)) for row in logits], abs=1e-5)


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
    assert f"layer {min(readers)} is felt in {' and '.join(map(str, readers[min(readers)]))}" in repr(patched)


@pytest.mark.parametrize(("kind", "module"), [("gemma3n_text", "v_norm"), ("gpt_oss", "v_proj")])
def test_what_is_swapped_as_the_prompt_is_computed_is_what_a_hook_writes(kind: str, module: str):
    """Where layers share K and V it is felt by all that read it, and it competes with a model's own sinks."""
    model = built(kind)
    base, donor = two(model)
    layers = sorted(model.geometry.sources)[-2:] if kind == "gpt_oss" else [4, 5]
    total = swept(model, base, donor, {"layer": layers, "slot": [8, 12]}, parts=("V",), reads="total")
    whole = torch.tensor([[*base.ledger.tokens[0].tolist(), *SUFFIX_IDS]])

    def write(layer: int, slot: int, module: object, args: object, values: Tensor) -> Tensor:
        written = donor.values[layer][:, :, [slot]].transpose(1, 2)
        return values.index_copy(1, torch.tensor([slot]), written.reshape(1, 1, *values.shape[2:]))

    for cell, value in zip(total.cells, total.values, strict=True):
        (layer,), (slot,) = cell.layers, cell.slots
        values: Any = model.lanes.plain.get_submodule(f"model.layers.{layer}.self_attn.{module}")
        handle = values.register_forward_hook(partial(write, layer, slot))
        logits = model.lanes.native(whole)[0].detach()
        handle.remove()
        assert value == pytest.approx(float(METRIC(logits)), abs=1e-5)
    assert abs(total.effect).max() > 1e-3
    # A small step towards the donor does what the slope says.
    pairs = {part: zip(base.part(part), donor.part(part), strict=True) for part in KV}
    near = base.with_parts({part: [a + (b - a) / 100 for a, b in of_layers] for part, of_layers in pairs.items()})
    small = attribute(model, base, near, suffix_of(base), METRIC, {"layer": layers})
    for score in (small.linear, small.score):
        assert score == pytest.approx(small.checked.effect, rel=0.1, abs=2e-5)
    assert abs(small.linear).max() > 1e-4


@pytest.mark.parametrize("kind", ["gpt_oss", "mimo_v2_flash"])
def test_cells_compete_with_a_model_s_own_sinks(kind: str):
    model = built(kind)
    base, donor = two(model)
    patched = swept(model, base, donor)
    hold(model, base, donor, patched)
    assert abs(patched.effect).max() > 1e-2


def edited(model: Model, cache: KVCache) -> KVCache:
    """Evicted with a gap, so that a decay stands after a slot; and hidden from the states alone, near the end."""
    return cache.evict(slots=[3, 9]).mask(slots=[10], layers=model.geometry.recurrent[:1])


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "falcon_h1", "lfm2"])
def test_cells_of_states_are_what_is_folded_of_a_cache_that_is_patched_by_hand(kind: str):
    model = built(kind)
    base, donor = (edited(model, cache) for cache in two(model))
    patched = swept(model, base, donor)
    hold(model, base, donor, patched)
    slots = "latent+rope" if kind == "kimi_linear" else "KV"
    assert {"writes", slots, f"{slots}+writes"} < {cell.part for cell in patched.cells}
    assert {cell.layers[0] for cell in patched.cells if cell.part == "writes"} == {*model.geometry.recurrent}
    single = swept(model, base, donor, {"slot": [0, 11]}, parts=parts_of(base)[-2:])
    hold(model, base, donor, single)
    assert abs(single.effect).max() > 1e-4
    assert abs(patched.df().groupby("part")["effect"].max()).min() > 1e-5
    swap = swap_cells(model, base, donor, suffix_of(base), [patched.cells[0]], {"logits": METRIC})
    assert swap["value"][0] == pytest.approx(patched.values[0], abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_the_state_of_a_single_token_after_a_swap_is_folded_too(kind: str):
    model = built(kind)
    base, donor = two(model)
    one = suffix_of(base)[:1]
    patched = patch_sweep(model, base, donor, one, METRIC, {"segment": None}, parts=("writes",), progress=False)
    states = {"layers": model.geometry.recurrent, "part": "writes"}
    for cell, value in zip(patched.cells, patched.values, strict=True):
        alone = base.patch(donor, slots=cell.slots, **states)
        assert value == pytest.approx(float(METRIC(model.extend(alone, one)[1][0])), abs=1e-5)
    assert abs(patched.effect).max() > 1e-3


def test_a_donor_s_time_between_slots_stays_its_own():
    """Where it was evicted, a decay stands after a slot, which is not what that slot's token wrote."""
    model = built("qwen3_next")
    base, donor = two(model)
    gap = donor.evict(slots=[3, 9])
    whole = aligned(model, base.evict(slots=[3, 9]).reindex(), gap).cache
    closed = gap.reindex()
    for layer in model.geometry.recurrent:
        assert torch.equal(whole.layers[layer]["decay"], closed.layers[layer]["decay"])
    assert not torch.equal(gap.layers[0]["decay"], closed.layers[0]["decay"])


def test_what_states_do_not_tell_apart_is_refused():
    model = built("qwen3_next")
    base, donor = two(model)
    refused(lambda: swept(model, base, donor, {"query": [0]}, parts=("writes",)), "All heads and queries read")
    refused(lambda: swept(model, base, donor, reads="total"), "keep states", "reads='reader'")
    refused(lambda: swept(model, base, donor, {"layer": [0]}, parts=("K",)), "no cell", "that store K")
    refused(lambda: swept(model, base, donor, parts=("gain",)), "no part called 'gain'", "'KV+writes', 'key'")
    refused(lambda: attribute(model, base, donor, suffix_of(base), METRIC), "keeps states")
    cell = Cell((0, 3), (2,), "V")
    refused(lambda: swap_cells(model, base, donor, suffix_of(base), [cell], {"a": METRIC}), "store V")


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "hy_v4"])
def test_a_swapped_index_key_is_chosen_by_as_in_a_cache_that_is_patched_by_hand(kind: str):
    """The index binds: it chooses six slots, and in every row anew. Layers of HY V4 share what it chose."""
    model = built(kind)
    base, donor = (cache.mask(slots=[10], layers=[1]) for cache in two(model))
    assert model.lanes.plain.config.index_topk < base.slots
    patched = swept(model, base, donor)
    hold(model, base, donor, patched)
    effects = patched.df().groupby("part")["effect"].agg(lambda effect: effect.abs().max())
    assert [*effects.index] == ["index", "latent", "latent+rope", "latent+rope+index", "rope"]
    assert effects.min() > 1e-4
    refused(lambda: swept(model, base, donor, {"query_head": [0]}, parts=("index",)), "All heads and queries read")
    refused(lambda: swept(model, base, donor, parts=("index",), reads="total"), "reads='reader'")
    refused(lambda: attribute(model, base, donor, suffix_of(base), METRIC, parts=("latent",)), "an index chooses")


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "glm_moe_dsa", "gemma4_text"])
def test_what_each_layer_adds_is_restored_as_by_hooks_of_one_s_own(kind: str):
    model = built(kind)
    clean, damaged = two(model)
    layers = layer_map(model, clean, damaged, suffix_of(clean), progress=False, bands=[range(4)])
    blocks = {(one.kind, one.layer) for group in layers.groups[:-1] for one in group if one.kind != "head"}
    single = {("attn", 0), ("mlp", 1), ("attn", 2), ("mlp", 3)}
    assert blocks == (single if kind == "nemotron_h" else {(name, at) for name in BLOCKS for at in range(4)})
    heads = {one.layer for group in layers.groups for one in group if one.kind == "head"}
    assert heads == {*model.geometry.attending}
    ports = Suffix(model.lanes, clean, suffix_of(clean)).ports

    def read(cache: KVCache, component: Component, other: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logits, and what a component gives, where the other does not stand in its place."""
        given: list[Tensor] = []
        projected = component.kind == "head"
        if projected:
            module: nn.Module = model.lanes.output_projection(component.layer)
        else:
            module = model.lanes.plain.get_submodule(ports[BLOCKS[component.kind], component.layer][0])

        def edit(tensor: Tensor) -> Tensor:
            width = tensor.shape[-1] // (model.geometry.n_heads if projected else 1)
            columns = slice((component.head or 0) * width, ((component.head or 0) + 1) * width)
            given.append(tensor[..., columns].clone())
            if other is not None:
                tensor = tensor.clone()
                tensor[..., columns] = other
            return tensor

        with hooked([editing_hook(module, "input" if projected else "output", edit)]):
            logits = model.extend(cache, suffix_of(cache))[1][0, -1].log_softmax(-1)
        return logits, given[-1]

    for (component, *more), value in zip(layers.groups, layers.restored, strict=True):
        if more or (component.kind == "head" and (kind == "qwen3_next" or component.head)):
            continue  # Qwen3-Next gates what a head gives
        target, outputs = read(clean, component, None)
        logits, _ = read(damaged, component, outputs)
        assert value == pytest.approx(float((target.exp() * (target - logits)).sum()), abs=1e-5), component
    assert layers.restored[-1] == pytest.approx(0, abs=1e-5)
    assert layers.noised[-1] == pytest.approx(layers.damage, abs=1e-5)


@pytest.mark.parametrize("kind", ["emu3", "llama4_text"])
def test_one_module_for_both_blocks_of_a_layer_is_no_port_and_one_without_rows_is(kind: str):
    """Emu3 calls one dropout after attention and MLP; the MLP of Llama 4 returns tokens of all rows in one axis."""
    model = built(kind)
    clean, damaged = two(model)
    layers = layer_map(model, clean, damaged, suffix_of(clean), progress=False, bands=[range(4)])
    assert layers.damage > 1e-3
    assert layers.restored[-1] == pytest.approx(0, abs=1e-5)
    assert layers.noised[-1] == pytest.approx(layers.damage, abs=1e-5)


@pytest.mark.parametrize("kind", ["falcon_h1", "gemma3n_text"])
def test_blocks_whose_attention_and_mlp_are_not_found_are_not_mapped(kind: str):
    model = built(kind)
    clean, damaged = two(model)
    refused(lambda: layer_map(model, clean, damaged, suffix_of(clean), progress=False), "no module", "patch_sweep")


def test_blocks_that_do_not_go_on_from_the_sum_of_attention_and_mlp_are_not_mapped(monkeypatch: pytest.MonkeyPatch):
    """Gemma 4 adds more to that sum, and must be seen to read it."""
    model = built("gemma4_text")
    clean, damaged = two(model)
    usual = Suffix._refuse_other_sums
    monkeypatch.setattr(Suffix, "_refuse_other_sums", lambda self, hidden, added: usual(self, hidden, 1.01 * added))
    refused(lambda: layer_map(model, clean, damaged, suffix_of(clean), progress=False), "add something else")
