"""Caches whose layers store something else than K and V of alike heads: latents, shared layers, heads that differ."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import KV, LATENT
from kvprobe.faults import Zeros
from kvprobe.inference.model import Model, load
from kvprobe.policies import Quantise
from kvprobe.text.tokens import Tokens
from tests.models.every import tiny
from tests.refusals import refused

IDS = Tokens.of([5, 9, 33, 17, 40, 8, 21, 60, 12, 3])
NEXT = Tokens.of([7, 11, 30], "next", 10)


@cache
def built(kind: str) -> Model:
    return load(tiny(kind))


@cache
def latent() -> tuple[Model, KVCache]:
    return built("deepseek_v3"), built("deepseek_v3").prefill(IDS)


def after(model: Model, cache: KVCache) -> torch.Tensor:
    return model.extend(cache, [NEXT], logits=3)[1]


def test_latent_layers_have_parts_of_their_own_names():
    _, past = latent()
    assert {tuple(layer) for layer in past.layers} == {LATENT}
    assert [(part.name, part.heads, part.numbers) for part in past.shape[0]] == [("latent", 1, 16), ("rope", 1, 8)]
    assert "latent 16 and rope 8" in repr(past)
    assert past.footprint == past.nbytes == 4 * 10 * (16 + 8) * 4


def test_what_needs_keys_and_values_is_refused_on_latent_layers():
    model, past = latent()
    wanted = "stores latent and rope, and this needs K"
    for need in (
        lambda: past.keys, lambda: past.corrupt(Zeros()), lambda: model.capture(IDS, ["k"]),
        lambda: model.generate([IDS], max_new_tokens=2, policy=Quantise(4, tail=0, group=2)),
    ):  # fmt: skip
        refused(need, wanted)
    refused(lambda: past.values, "and this needs V")
    refused(lambda: past.patch(past, slots=[1], part="K"), "no part called 'K'", "latent")


def test_the_content_and_the_position_of_latent_slots_are_patched_apart():
    model, past = latent()
    other = model.prefill(Tokens.of([5, 9, 44, 17, 40, 8, 21, 60, 12, 3]))
    whole = past.patch(other, slots=[2])
    both = past.patch(other, slots=[2], part="latent").patch(other, slots=[2], part="rope")
    assert torch.equal(after(model, whole), after(model, both))
    for part in LATENT:
        one = past.patch(other, slots=[2], part=part)
        changed = {name for name in LATENT if not torch.equal(one.part(name)[3], past.part(name)[3])}
        assert changed == {part}
        assert not torch.equal(after(model, one), after(model, past))
        assert not torch.equal(after(model, one), after(model, whole))


def test_a_patched_latent_at_another_position_is_content_alone():
    """A donor one position further on has other rotated keys, so its latents may be taken and its keys may not."""
    model, past = latent()
    later = model.prefill(IDS.shifted(1))
    past.patch(later, slots=[2], part="latent")
    refused(lambda: past.patch(later, slots=[2], part="rope"), "stored at position 2")


def test_families_of_latent_layers_are_captured_as_they_are_stored():
    model, past = latent()
    captured = model.capture(IDS, ["latent", "rope", "resid_post"][:2], slots=[1, 4])
    for part in LATENT:
        assert torch.equal(captured[part, 2], past.part(part)[2][:, :, [1, 4]])
    assert captured.by_hook == {}
    refused(lambda: load(tiny("llama")).capture(IDS, ["latent"]), "stores K and V, and this needs latent")


def test_latent_caches_are_saved_joined_forked_and_appended(tmp_path: Path):
    model, past = latent()
    past.save(tmp_path / "cache.safetensors")
    again = KVCache.load(tmp_path / "cache.safetensors")
    assert torch.equal(after(model, again), after(model, past))
    short = model.prefill(IDS[:4])
    rows = KVCache.join([short, past])
    pair = model.extend(rows, [NEXT.shifted(4), NEXT], logits=3)[1]
    assert torch.allclose(pair[1:], after(model, past), atol=1e-5)
    assert torch.equal(past.fork(2).rows([1]).part("rope")[1], past.part("rope")[1])


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3n_text", "mimo_v2_flash", "llama4_text"])
def test_a_cache_of_transformers_comes_in_and_goes_out(kind: str):
    model = built(kind)
    plain, ids = model.lanes.plain, torch.tensor([IDS.ids])
    past = DynamicCache()
    with torch.no_grad():
        plain(input_ids=ids, past_key_values=past, use_cache=True)
        mine = model.from_hf(past, [IDS])
        theirs = model.to_hf(mine)
        expected = plain(input_ids=torch.tensor([NEXT.ids]), past_key_values=past, use_cache=True).logits
        actual = plain(input_ids=torch.tensor([NEXT.ids]), past_key_values=theirs, use_cache=True).logits
    assert torch.equal(actual, expected)
    assert torch.allclose(after(model, mine), expected, atol=1e-5 * float(expected.abs().max()))
    layer: Any = past.layers[1]
    layer.values[0, 0, 3] += 1
    refused(lambda: model.from_hf(past, [IDS]), "read")


def test_a_layer_that_others_read_is_masked_for_all_of_them():
    """Layers 6 to 9 of this model read the K and V of layers 4 and 5, the last of their kinds that have some."""
    model = built("gemma3n_text")
    assert model.geometry.n_layers == 6
    assert set(model.geometry.sources[6:]) == {4, 5}
    past = model.prefill(IDS)
    assert past.n_layers == 6
    with torch.no_grad():
        loud = past.patch(past.with_parts({"V": [100 * tensor for tensor in past.values]}), slots=[7], layers=[4, 5])
    hidden = {"slots": [7], "layers": [4, 5]}
    assert not torch.equal(after(model, loud), after(model, past))
    assert torch.equal(after(model, loud.mask(**hidden)), after(model, past.mask(**hidden)))


def test_heads_are_named_only_where_all_layers_have_as_many():
    past = built("mimo_v2_flash").prefill(IDS)
    assert len({parts[0].heads for parts in past.shape}) > 1
    refused(lambda: past.mask(slots=[1], heads=[0]), "KV heads", "choose layers")
    past.mask(slots=[1], layers=[0])


def test_layers_of_other_parts_are_refused():
    past = built("llama").prefill(IDS)
    assert {tuple(layer) for layer in past.layers} == {KV}
    refused(lambda: KVCache(({"K": past.keys[0]},), past.ledger), "got K")
    refused(lambda: KVCache(({"K": past.keys[0], "V": past.values[0][:, :1]},), past.ledger), "as many heads")
    refused(lambda: past.with_parts({"K": past.keys[:1]}), "given for 1")
    _, other = latent()
    refused(lambda: past.append(other), "latent 16 and rope 8")
    refused(lambda: kv.KVCache.join([past, other]), "latent 16 and rope 8")


@pytest.mark.parametrize("kind", ["deepseek_v3", "minicpm3", "gemma3n_text", "mimo_v2_flash", "llama4_text"])
def test_attention_is_shown_as_the_model_computes_it(kind: str):
    """The reference is the library's own eager attention."""
    model = built(kind)
    plain, ids = model.lanes.plain, torch.tensor([IDS.ids])
    before: Any = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            expected = plain(input_ids=ids, output_attentions=True, use_cache=False).attentions
    finally:
        plain.set_attn_implementation(before)
    shown = kv.attend(model, IDS, queries=[4, -1], chunk=3)
    assert len(shown.layers) == len(expected) == len(model.geometry.sources)
    assert torch.allclose(shown.weights, torch.stack([layer[0, :, [4, 9]] for layer in expected]), atol=1e-5)
    assert shown.value_norms.shape == shown.live.shape == (*shown.weights.shape[:2], 10)
    last = shown.of_layers(shown.layers[-1:])
    assert torch.equal(last.value_norms[0], shown.value_norms[-1])
    masked = kv.attend(model, NEXT, shown.cache.mask(slots=[4, 5]))
    assert float(masked.mass(slots=[4, 5]).abs().max()) == 0


def test_attention_of_keys_that_are_not_stored_is_shown_and_not_replaced():
    model, _ = latent()
    assert model.lanes.shows_attention
    with pytest.raises(ValueError, match="not stored"), model.lanes.attention_replaced_by(lambda inputs: inputs.query):
        pass
    weights = model.generate([IDS], max_new_tokens=3, policy="H2O(budget=6)").cache
    assert weights.ledger.live.sum() > 0
    refused(lambda: built("gemma3n_text").generate([IDS], max_new_tokens=3, policy="H2O(budget=6)"), "without scores")
