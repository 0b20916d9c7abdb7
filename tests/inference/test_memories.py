"""Caches whose layers store something else than K and V of alike heads: latents, shared layers, heads that differ."""

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.attention.patterns import attend
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import INDEX, KV, LATENT
from kvprobe.faults import Zeros
from kvprobe.inference.batch import Batch
from kvprobe.inference.model import Model, load
from kvprobe.models.attending import Attending
from kvprobe.models.ports import ports_of
from kvprobe.policies import Quantise
from kvprobe.text.tokens import Tokens
from tests.models.every import eager_attention, tiny
from tests.refusals import refused

INDEXED = ("glm_moe_dsa", "hy_v4")
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
    for strike in (lambda: past.corrupt(Zeros()), lambda: model.sweep(IDS, [Zeros()], max_new_tokens=2)):
        refused(strike, "No layer of this cache stores K or V", "latent, rope")
    for need in (
        lambda: past.keys,
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3n_text", "mimo_v2_flash", "llama4_text", "hy_v4"])
def test_a_cache_of_transformers_comes_in_and_goes_out(kind: str):
    model = built(kind)
    plain, ids = model.lanes.plain, torch.tensor([IDS.ids])
    past = DynamicCache(config=plain.config) if kind in INDEXED else DynamicCache()
    with torch.no_grad():
        plain(input_ids=ids, past_key_values=past, use_cache=True)
        mine = model.from_hf(past, [IDS])
        theirs = model.to_hf(mine)
        expected = plain(input_ids=torch.tensor([NEXT.ids]), past_key_values=past, use_cache=True).logits
        actual = plain(input_ids=torch.tensor([NEXT.ids]), past_key_values=theirs, use_cache=True).logits
    assert torch.equal(actual, expected)
    assert torch.allclose(after(model, mine), expected, atol=1e-5 * float(expected.abs().max()))
    damaged: Any = past.layers[1]
    (damaged.indexer_keys[0] if kind in INDEXED else damaged.values[0, 0])[3] += 1
    refused(lambda: model.from_hf(past, [IDS]), "read")


def test_a_layer_that_others_read_is_masked_for_all_of_them():
    """Layers 6 to 9 of this model read the K and V of layers 4 and 5, the last of their kinds that have some."""
    model = built("gemma3n_text")
    assert model.geometry.n_layers == 6
    assert set(model.geometry.sources[6:]) == {4, 5}
    assert "layer 4 is felt in 4 and 9, layer 5 is felt in 5 and 6 and 7 and 8" in repr(model)
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "minicpm3", "gemma3n_text", "mimo_v2_flash", "llama4_text", *INDEXED])
def test_attention_is_shown_as_the_model_computes_it(kind: str):
    """The reference is the library's own eager attention."""
    model = built(kind)
    expected = eager_attention(model.lanes.plain, IDS.ids)
    shown = kv.attend(model, IDS, queries=[4, -1], chunk=3)
    assert len(shown.layers) == len(expected) == len(model.geometry.sources)
    assert torch.allclose(shown.weights, torch.stack([layer[0, :, [4, 9]] for layer in expected]), atol=1e-5)
    assert shown.value_norms.shape == shown.live.shape == (*shown.weights.shape[:2], 10)
    last = shown.of_layers(shown.layers[-1:])
    assert torch.equal(last.value_norms[0], shown.value_norms[-1])
    masked = kv.attend(model, NEXT, shown.cache.mask(slots=[4, 5]))
    assert float(masked.mass(slots=[4, 5]).abs().max()) == 0


def test_attention_of_keys_that_are_not_stored_is_shown():
    model, _ = latent()
    assert load(tiny("deepseek_v3", kv_lora_rank=20)).lanes.shows_attention  # a latent as wide as a key
    assert model.lanes.shows_attention
    weights = model.generate([IDS], max_new_tokens=3, policy="H2O(budget=6)").cache
    assert weights.ledger.live.sum() > 0


def test_the_attention_to_a_slot_that_several_layers_read_is_their_mean():
    model = built("gemma3n_text")
    weights = attend(model, IDS, queries=range(10)).weights.sum(2).unflatten(1, (2, 2)).mean(2)
    readers = [[layer for layer, read in model.geometry.reads.items() if read == source] for source in range(6)]
    assert [len(layers) for layers in readers] == [1, 1, 1, 1, 2, 4]
    watched = model.watch(IDS).attention
    assert watched is not None
    expected = torch.stack([weights[layers].mean(0) for layers in readers])
    assert torch.allclose(watched.total[:, 0], expected, atol=1e-5)


def test_heads_that_differ_keep_the_same_slots_under_a_policy():
    kept = built("mimo_v2_flash").prefill(IDS, policy="TOVA(6)")
    assert kept.ledger.live.sum(-1).flatten().tolist() == [6] * 4


def test_an_index_key_is_a_third_part_of_the_layers_that_have_an_index():
    """Layers 2 and 3 of this model attend to the slots that the index of layer 1 chose."""
    model, past = built("hy_v4"), built("hy_v4").prefill(IDS)
    assert [tuple(layer) for layer in past.layers] == [(*LATENT, INDEX), (*LATENT, INDEX), LATENT, LATENT]
    assert [(part.name, part.heads, part.numbers) for part in past.shape[0]][2] == ("index", 1, 16)
    assert past.footprint == past.nbytes == 10 * 4 * (4 * (16 + 8) + 2 * 16)
    assert torch.equal(
        model.capture(IDS, ["index"], layers=[1], slots=[4])["index", 1], past.layers[1]["index"][:, :, [4]]
    )
    refused(lambda: past.part("index"), "stores latent and rope, and this needs index")


@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.filterwarnings("ignore:What is hidden holds slot 0")
def test_masking_is_evicting_where_an_index_binds_and_closing_a_gap_rotates_its_keys(kind: str):
    model, past = built(kind), built(kind).prefill(IDS)
    start = {"slots": [0, 1, 2]}
    masked, evicted = past.mask(**start), past.evict(**start)
    assert evicted.slots > model.lanes.plain.config.index_topk
    expected = after(model, masked)
    largest = float(expected.abs().max())
    assert float((after(model, past) - expected).abs().max()) > 1e-3 * largest
    closed = model.extend(evicted.reindex(), [NEXT.shifted(7)], logits=3)[1]
    seen = model.extend(model.as_seen(evicted.reindex()), [NEXT.shifted(7)], logits=3)[1]
    for actual in (after(model, evicted), closed, seen):
        assert torch.allclose(actual, expected, atol=1e-5 * largest, rtol=0)
    # What its keys say where they were computed is not what they say there.
    naive = evicted.reindex("naive")
    assert not torch.allclose(model.extend(naive, [NEXT.shifted(7)], logits=3)[1], expected, atol=1e-3 * largest)


def test_what_is_hidden_where_an_index_stands_is_chosen_by_none_that_reads_it():
    """Layers 2 and 3 of this model attend to the slots that the index of layer 1 chose."""
    model, past = built("hy_v4"), built("hy_v4").prefill(IDS)
    first, all_of_them = (after(model, past.mask(slots=[7], layers=layers)) for layers in ([1], [1, 2, 3]))
    assert torch.equal(first, all_of_them)
    assert not torch.equal(first, after(model, past.mask(slots=[7], layers=[1, 2]).mask(slots=[7], layers=[0])))


def test_a_patched_index_key_changes_which_slots_are_attended_to():
    model, past = built("glm_moe_dsa"), built("glm_moe_dsa").prefill(IDS)
    other = model.prefill(Tokens.of([5, 9, 44, 17, 40, 8, 21, 60, 12, 3]))
    one = past.patch(other, slots=range(2, 10), part="index")
    assert torch.equal(one.part("latent")[3], past.part("latent")[3])
    assert not torch.equal(after(model, one), after(model, past))
    refused(lambda: past.patch(model.prefill(IDS.shifted(1)), slots=[2], part="index"), "stored at position 2")


def test_caches_with_an_index_are_saved_joined_forked_and_decoded(tmp_path: Path):
    model, past = built("hy_v4"), built("hy_v4").prefill(IDS)
    past.save(tmp_path / "cache.safetensors")
    assert torch.equal(after(model, KVCache.load(tmp_path / "cache.safetensors")), after(model, past))
    rows = KVCache.join([model.prefill(IDS[:6]), past.fork(2).rows([1])])
    pair = model.extend(rows, [NEXT.shifted(6), NEXT], logits=3)[1]
    assert torch.allclose(pair[1:], after(model, past), atol=1e-5)
    batch = Batch(model.lanes, [model.prefill(IDS[:8]), past], [1, 2], room=2)
    words = [NEXT[:1].shifted(8), NEXT[:1], NEXT[:1]]
    assert torch.allclose(batch.decode(words, "plain")[2], after(model, past)[0, 0], atol=1e-5)
    assert batch.drop([0]) == [2, 1]
    again = batch.decode([NEXT[1:2], NEXT[1:2]], "plain")
    assert torch.allclose(again, after(model, past)[:, 1], atol=1e-5)


def test_a_slot_hidden_after_the_index_alone_still_takes_a_place_and_the_gate_sees_it():
    def deaf(module: object, given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, queries, turns, mask, *rest = given
        seen = torch.ones(mask.shape[1:], dtype=torch.bool).tril(mask.shape[2] - mask.shape[1])
        return (hidden, queries, turns, torch.zeros(1, *seen.shape).masked_fill(~seen, -torch.inf), *rest), kwargs

    def model(chosen: int) -> Model:
        plain = tiny("glm_moe_dsa", index_topk=chosen)
        for layer in plain.model.layers:
            layer.self_attn.indexer.register_forward_pre_hook(deaf, with_kwargs=True)
        return load(plain)

    refused(lambda: model(6).prefill(IDS), "after hidden slots")
    model(2048).prefill(IDS)


def test_attention_without_what_an_index_chose_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    """transformers leaves the choice to attentions that it does not know, and this one loses it on the way."""
    known: Any = sys.modules[type(built("glm_moe_dsa").lanes.plain).__module__]
    usual = known.ALL_ATTENTION_FUNCTIONS.get_interface

    def losing(*names: Any) -> Any:
        return lambda *given, indices=None, **settings: usual(*names)(*given, **settings)

    monkeypatch.setattr(known, "ALL_ATTENTION_FUNCTIONS", SimpleNamespace(get_interface=losing))
    model = load(tiny("glm_moe_dsa"))
    refused(lambda: attend(model, IDS), "while its attention is observed")
    assert not model.lanes.shows_attention
    assert load(tiny("glm_moe_dsa", index_topk=2048)).lanes.attention_proved


def test_an_index_whose_scores_tie_is_refused_where_it_binds():
    refused(lambda: load(tiny("glm_moe_dsa", index_n_heads=2)).prefill(IDS), "order of the slots")
    load(tiny("glm_moe_dsa", index_n_heads=2, index_topk=2048)).prefill(IDS)


@pytest.mark.parametrize("kind", ["deepseek_v4", "minimax_m3_vl_text"])
def test_an_index_of_groups_is_refused_by_name(kind: str):
    refused(lambda: load(tiny(kind)), kind, "the unit is a group")


def test_each_head_s_key_and_value_is_captured_as_it_is_made_of_the_latent():
    model, _ = latent()
    captured = model.capture(IDS, ["k", "v", "latent", "resid_post"], slots=[2, 7])
    seen: list[Attending] = []
    with model.lanes.observing_attention(seen.append):
        model.prefill(IDS)
    for inputs in seen:
        assert torch.equal(captured["k", inputs.layer], inputs.key[:, :, [2, 7]])
        assert torch.equal(captured["v", inputs.layer], inputs.value[:, :, [2, 7]])
    attention: Any = model.lanes.attention_modules[1]
    made = attention.kv_b_proj(captured["latent", 1][:, 0])
    assert torch.allclose(made.unflatten(-1, (4, -1)).transpose(1, 2)[..., -8:], captured["v", 1], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "added"), [("deepseek_v3", 8), ("qwen3_next", 8), ("lfm2", 8), ("falcon_h1", 0), ("nemotron_h", 4)]
)
def test_the_residual_stream_is_read_where_transformer_lens_has_no_map_of_it(kind: str, added: int):
    model = built(kind)
    ports = model.lanes.own_ports
    assert ports is not None
    assert sum(family in ("attn_out", "mlp_out") for family, _ in ports) == added
    captured = model.capture(IDS, ["resid_pre", "resid_post"])
    output: Any = model.lanes.plain(torch.tensor([IDS.ids]), output_hidden_states=True, use_cache=False)
    for layer in range(4):
        assert torch.allclose(captured["resid_pre", layer], output.hidden_states[layer], atol=1e-5)
    refused(lambda: model.capture(IDS, ["k_pre"]), "no module that computes 'k_pre' of layer 0")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "olmo2", "gpt_neox"])
def test_the_residual_stream_is_found_where_transformer_lens_says_it_is(kind: str):
    model = built(kind)
    assert model.lanes.own_ports is None
    for (family, layer), port in ports_of(model.lanes).items():
        assert not model.lanes.hooked.fires(family) or model.lanes.hooked.plain_port(family, layer) == port


def test_modules_that_are_called_for_several_layers_get_the_mask_of_each():
    model = built("hrm_text")
    past = model.prefill(IDS)
    called = model.lanes.attention_modules
    assert len({*called}) < len(called) == past.n_layers
    hidden = [after(model, past.mask(slots=[4], layers=[layer])) for layer in range(past.n_layers)]
    assert all(not torch.equal(one, other) for one, other in pairwise(hidden))
    refused(lambda: attend(model, IDS), "calls its layers several times")
