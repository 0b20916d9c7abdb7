import cmath
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvprobe.cache.cache import KVCache
from kvprobe.cache.rotary import Layout, Rotary, Rotation
from kvprobe.inference.forward import as_seen, extend, prefill
from kvprobe.inference.model import Model, load
from kvprobe.text.tokens import Tokens
from tests.models import _GQA, ARCHITECTURES, _model, gemma3, gpt_neox, llama
from tests.random_caches import assert_bit_identical, copy_of, random_cache, random_tokens, relative_difference
from tests.refusals import refused

LAYOUTS: list[Layout] = ["half", "interleaved"]
seeds = st.integers(0, 2**31)
places = st.integers(0, 2000)


def scaled(rope_type: str, **scaling: float) -> Model:
    return llama(rope_parameters={"rope_type": rope_type, "rope_theta": 1e4} | scaling)


def smollm3() -> Model:
    """The second layer has no positions."""
    config = transformers.SmolLM3Config(**_GQA, no_rope_layers=[1, 0, 1])
    return _model(transformers.SmolLM3ForCausalLM, config, 0, None)


ROTARY: dict[str, Callable[[], Model]] = {
    **{name: build for name, build in ARCHITECTURES.items() if name != "gpt2"},
    "linear": lambda: scaled("linear", factor=4.0),
    "llama3": lambda: scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
    ),
    "yarn": lambda: scaled("yarn", factor=4.0, original_max_position_embeddings=128),
    "cohere": lambda: _model(transformers.CohereForCausalLM, transformers.CohereConfig(**_GQA), 0, None),
    "smollm3": smollm3,
}


@pytest.fixture(scope="module", params=list(ROTARY))
def rotary_model(request: pytest.FixtureRequest) -> Model:
    """Each kind of rotary embedding in turn."""
    return ROTARY[request.param]()


def rotary_of(pairs: int, layout: Layout) -> Rotary:
    """Frequencies that are powers of two, so that no angle is rounded."""
    return Rotary(2.0 ** -torch.arange(pairs).float(), layout)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def at(*positions: int) -> torch.Tensor:
    return torch.tensor([positions])


def by_complex_numbers(key: list[float], rotary: Rotary, distance: int) -> list[float]:
    """One key, each pair of whose numbers is multiplied by e^(i × distance × frequency)."""
    rotated = list(key)
    pairs = len(rotary.frequencies)
    for pair, frequency in enumerate(rotary.frequencies.tolist()):
        first, second = (pair, pair + pairs) if rotary.layout == "half" else (2 * pair, 2 * pair + 1)
        number = complex(key[first], key[second]) * cmath.exp(1j * distance * frequency)
        rotated[first], rotated[second] = number.real, number.imag
    return rotated


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=seeds, pairs=st.integers(1, 4), rest=st.integers(0, 3), ends=st.lists(places, min_size=2, max_size=5))
@settings(max_examples=30)
def test_rotation_multiplies_pairs_as_complex_numbers_and_leaves_the_rest(
    layout: Layout, seed: int, pairs: int, rest: int, ends: list[int]
):
    rotary = rotary_of(pairs, layout)
    keys = noise(seed, 1, 2, len(ends), 2 * pairs + rest)
    starts = ends[1:] + ends[:1]
    rotated = Rotation.between(rotary, at(*starts), at(*ends)).of(keys)
    for head in range(2):
        for slot, (start, end) in enumerate(zip(starts, ends, strict=True)):
            expected = by_complex_numbers(keys[0, head, slot].tolist(), rotary, end - start)
            torch.testing.assert_close(rotated[0, head, slot], torch.tensor(expected), rtol=0, atol=2e-6)
    assert torch.equal(rotated[..., 2 * pairs :], keys[..., 2 * pairs :])


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=seeds, first=places, second=places, third=places)
@settings(max_examples=30)
def test_rotations_compose_and_can_be_undone(layout: Layout, seed: int, first: int, second: int, third: int):
    rotary = Rotary(10000.0 ** -(torch.arange(4) / 4), layout)
    keys = noise(seed, 1, 2, 1, 10)
    there = Rotation.between(rotary, at(first), at(second)).of(keys)
    torch.testing.assert_close(Rotation.between(rotary, at(second), at(first)).of(there), keys, rtol=0, atol=2e-6)
    on = Rotation.between(rotary, at(second), at(third)).of(there)
    torch.testing.assert_close(on, Rotation.between(rotary, at(first), at(third)).of(keys), rtol=0, atol=2e-6)


def test_the_layouts_differ():
    half, interleaved = (
        Rotation.between(rotary_of(2, layout), at(0), at(3)).of(noise(0, 1, 1, 1, 4)) for layout in LAYOUTS
    )
    assert relative_difference(half, interleaved) > 0.1


@given(seed=seeds, start=st.integers(0, 5000), end=st.integers(0, 5000))
@settings(max_examples=8)
def test_a_rotated_key_is_the_key_computed_at_the_new_position(rotary_model: Model, seed: int, start: int, end: int):
    word = seed % 64
    there, here = (prefill(rotary_model.lanes, [Tokens.of([word], start=place)]) for place in (start, end))
    for rotary, one, other in zip(rotary_model.lanes.rotaries, there.keys, here.keys, strict=True):
        rotated = one if rotary is None else Rotation.between(rotary, at(start), at(end)).of(one)
        assert relative_difference(rotated, other) < 1e-6


def test_rotary_frequencies_follow_the_formula():
    for build, pairs in ((llama, 4), (gpt_neox, 1)):
        for rotary in build().lanes.rotaries:
            assert rotary is not None
            assert rotary.layout == "half"
            torch.testing.assert_close(rotary.frequencies, 10000.0 ** -(torch.arange(pairs) / pairs))
    for rotary in scaled("linear", factor=4.0).lanes.rotaries:
        assert rotary is not None
        torch.testing.assert_close(rotary.frequencies, 10000.0 ** -(torch.arange(4) / 4) / 4)


def test_each_kind_of_layer_has_the_rotary_of_its_kind():
    windowed = {"rope_type": "default", "rope_theta": 100.0}
    full = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5}
    rotaries = gemma3(rope_parameters={"sliding_attention": windowed, "full_attention": full}).lanes.rotaries
    assert rotaries[0] is rotaries[1]
    for rotary, frequencies in (
        (rotaries[0], 100.0 ** -(torch.arange(4) / 4)),
        (rotaries[2], 1e5 ** -(torch.arange(4) / 4) / 2),
    ):
        assert rotary is not None
        torch.testing.assert_close(rotary.frequencies, frequencies)


def test_interleaved_layouts_rotate_neighbouring_numbers():
    assert {rotary and rotary.layout for rotary in ROTARY["cohere"]().lanes.rotaries} == {"interleaved"}


def test_layers_without_positions_have_no_rotary_and_their_keys_stay():
    model = smollm3()
    assert [rotary is None for rotary in model.lanes.rotaries] == [False, True, False]
    cache = prefill(model.lanes, [random_tokens(0, {"T1": 3, "T2": 4})])
    question = random_tokens(1, {"question": 2}, start=4)
    closed, _ = extend(model.lanes, cache.evict("T1").reindex(), [question])
    assert torch.equal(closed.keys[1][:, :, :4], cache.keys[1][:, :, 3:])


@pytest.mark.parametrize("kind", ["learned", "dynamic", "longrope"])
def test_keys_that_cannot_be_rotated_are_refused_in_a_sentence(kind: str, tiny_models: dict[str, Model]):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    model = {
        "learned": lambda: tiny_models["gpt2"],
        "dynamic": lambda: scaled("dynamic", factor=2.0),
        "longrope": lambda: scaled("longrope", factor=2.0, **factors),
    }[kind]()
    reason = "learned positions" if kind == "learned" else "changes its rotary frequencies with the length"
    cache = prefill(model.lanes, [random_tokens(0, {"T1": 2, "T2": 3})]).evict("T1").reindex()
    refused(
        lambda: extend(model.lanes, cache, [random_tokens(1, {"question": 1}, start=3)]),
        f"{reason}",
        "; use mode='gapped', or recompute the slots.",
    )


def test_keys_rotated_by_other_frequencies_than_the_models_are_refused():
    model = llama(seed=1)
    model.lanes.plain.model.rotary_emb.register_forward_hook(lambda module, args, output: (output[1], output[0]))
    refused(lambda: model.lanes.rotaries, "keys of layer 0 of LlamaForCausalLM are not rotated by any")


def test_many_reindexings_in_bfloat16_are_one_bit_for_bit():
    model = load(llama().lanes.plain.to(torch.bfloat16))
    whole = prefill(model.lanes, [random_tokens(0, {"T1": 210})])
    assert whole.keys[0].dtype == torch.bfloat16
    again = whole
    for _ in range(200):
        gone = torch.arange(again.slots) == again.slots // 2
        again = again.evict(slots=gone[None]).reindex()
    retained = torch.isin(whole.ledger.positions, again.ledger.origins)
    once = whole.select(slots=retained).reindex()
    assert again.slots == 10
    assert_bit_identical(again, once)
    assert all(
        torch.equal(stored, keys[:, :, retained[0]]) for stored, keys in zip(again.keys, whole.keys, strict=True)
    )
    question = [random_tokens(1, {"question": 3}, start=10)]
    assert torch.equal(extend(model.lanes, again, question)[1], extend(model.lanes, once, question)[1])


def test_reading_after_reindexing_again_and_again_leaves_the_stored_keys_as_they_were(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 8})])
    for step in range(6):
        gone = torch.arange(cache.slots) == 0
        shorter = cache.evict(slots=gone[None]).reindex()
        before = copy_of(shorter)
        cache, _ = extend(tiny_llama.lanes, shorter, [random_tokens(step, {"T1": 1}, start=shorter.slots)])
        assert_bit_identical(shorter, before)
        for stored, keys in zip(cache.keys + cache.values, shorter.keys + shorter.values, strict=True):
            assert torch.equal(stored[:, :, :-1], keys)
    assert cache.ledger.origins[0].tolist() == [6, 7, 7, 7, 7, 7, 7, 7]
    assert cache.ledger.positions[0].tolist() == list(range(8))


@given(seed=seeds)
@settings(max_examples=20)
def test_reindexing_counts_the_live_slots_and_leaves_tensors_and_the_rest_alone(seed: int):
    cache = random_cache(seed, gaps=True, padded=True, some_masked=True, layers=3, kv_heads=2)
    closed = cache.reindex()
    for row in range(cache.batch):
        live = cache.ledger.live_somewhere[row]
        assert closed.ledger.positions[row, live].tolist() == list(range(int(live.sum())))
        assert closed.ledger.following[row] == live.sum()
    assert_bit_identical(replace(closed, ledger=cache.ledger), cache)
    for name in ("tokens", "origins", "segments", "live"):
        assert torch.equal(getattr(closed.ledger, name), getattr(cache.ledger, name)), name


def test_reindexing_by_the_gapped_mode_changes_nothing():
    cache = random_cache(0, gaps=True, some_masked=True)
    assert_bit_identical(cache.reindex("gapped"), cache)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_position_mode_is_refused_with_the_near_match():
    refused(
        lambda: random_cache(0).reindex("contigous"), "no choice of mode called 'contigous'; did you mean 'contiguous'"
    )


def shortened(model: Model) -> KVCache:
    return prefill(model.lanes, [random_tokens(0, {"sink": 2, "T1": 9, "T2": 6})]).evict("T1")


def test_the_naive_mode_feeds_keys_as_they_were_to_queries_counted_by_length(tiny: Model):
    cache = shortened(tiny)
    question = random_tokens(1, {"question": 3}, start=cache.slots)
    past = DynamicCache()
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        past.update(keys, values, layer)
    with torch.no_grad():
        expected = tiny.lanes.plain(
            input_ids=torch.tensor([question.ids]),
            position_ids=torch.tensor([question.positions]),
            past_key_values=past,
        ).logits
    _, naive = extend(tiny.lanes, cache.reindex("naive"), [question], logits=3)
    assert relative_difference(naive, expected) < 1e-5


def test_the_naive_mode_differs_from_the_contiguous_one(tiny_llama: Model):
    cache = shortened(tiny_llama)
    question = [random_tokens(1, {"question": 3}, start=cache.slots)]
    logits = [extend(tiny_llama.lanes, cache.reindex(mode), question, logits=3)[1] for mode in ("naive", "contiguous")]
    assert relative_difference(*logits) > 1e-3


def test_the_naive_mode_leaves_keys_as_an_earlier_contiguous_one_turned_them(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"sink": 2, "T1": 5, "T2": 4, "T3": 6})]).evict("T1").reindex()
    assert (cache.ledger.positions - cache.ledger.origins).unique().tolist() == [-5, 0]
    question = [random_tokens(1, {"question": 3}, start=8)]
    owed, done = (
        extend(tiny_llama.lanes, one.evict("T2").reindex("naive"), question, logits=3)[1]
        for one in (cache, as_seen(tiny_llama.lanes, cache))
    )
    assert relative_difference(owed, done) < 1e-5


def test_distances_are_all_that_the_positions_of_rotary_keys_are(rotary_model: Model):
    """Re-indexed or not, what is read within a layer's first look at the cache is the same at the same distances."""
    cache = shortened(rotary_model).select("T2")
    _, far = extend(rotary_model.lanes, cache, [random_tokens(1, {"question": 3}, start=17)], logits=3)
    _, near = extend(rotary_model.lanes, cache.reindex(), [random_tokens(1, {"question": 3}, start=6)], logits=3)
    assert relative_difference(near, far) < 1e-4


def test_reading_at_positions_that_are_taken_warns_and_names_them(tiny: Model):
    cache = shortened(tiny)
    with pytest.warns(UserWarning, match="new tokens start at position 8, but the cache holds live slots up to 16"):
        extend(tiny.lanes, cache, [random_tokens(1, {"question": 2}, start=8)])


def test_the_warning_names_the_row_whose_positions_are_taken(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(row, {"T1": count}) for row, count in enumerate([3, 7])])
    with pytest.warns(UserWarning, match="start at position 3, but the cache holds live slots up to 6"):
        extend(tiny_llama.lanes, cache, [random_tokens(row, {"T2": 1}, start=3) for row in range(2)])


@pytest.mark.parametrize("mode", ["gapped", "contiguous", "naive"])
def test_positions_that_follow_the_cache_draw_no_warning_under_any_mode(tiny_llama: Model, mode: str):
    cache = shortened(tiny_llama).reindex(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        following = int(cache.ledger.following)
        assert following == (17 if mode == "gapped" else 8)
        extend(tiny_llama.lanes, cache, [random_tokens(1, {"question": 2}, start=following)])


def test_positions_of_slots_that_are_gone_are_not_taken(tiny_llama: Model):
    cache = shortened(tiny_llama).mask("T2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extend(tiny_llama.lanes, cache, [random_tokens(1, {"question": 2}, start=2)])
