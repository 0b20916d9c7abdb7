"""Dumps that vLLM's connector wrote (`make engines`), against transformers: what it holds, and what it answered after
an edited cache was put back."""

import json
from pathlib import Path

import pytest

import kvprobe as kv
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
