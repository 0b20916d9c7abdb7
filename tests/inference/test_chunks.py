"""A prompt read a few tokens at a time makes the cache that it makes at once, on layers of every kind."""

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens
from tests.inference.test_memories import built as attending
from tests.inference.test_recurrent import built as recurrent
from tests.refusals import refused

LONG = Tokens.of([5, 9, 33, 17, 40, 8, 21, 60, 12, 3, 44, 2, 19])
SHORT = Tokens.of([7, 11, 30, 2, 9, 1])
NEXT = [6, 5, 8]
MODELS = [
    *((attending, kind) for kind in ("llama", "gemma3_text", "deepseek_v3", "gemma3n_text", "glm_moe_dsa")),
    *((recurrent, kind) for kind in ("qwen3_next", "falcon_h1", "nemotron_h")),
]


def same(one: KVCache, other: KVCache) -> bool:
    """Tensors to rounding where a slot holds a token, and ledgers exactly."""
    held = ~other.ledger.padding
    for ours, theirs in zip(one.tensors, other.tensors, strict=True):
        ours, theirs = ours.transpose(1, 2)[held], theirs.transpose(1, 2)[held]
        if float((ours - theirs).abs().max()) > 2e-5 * float(theirs.abs().max()):
            return False
    columns = ("tokens", "positions", "origins", "segments", "live", "following")
    return all(torch.equal(getattr(one.ledger, name), getattr(other.ledger, name)) for name in columns)


@pytest.mark.parametrize(("build", "kind"), MODELS)
def test_chunks_make_the_cache_of_one_piece(build: object, kind: str):
    model: Model = build(kind)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
    rows = [LONG, SHORT]
    whole = model.prefill(rows)
    for chunk in (4, 2, 50):
        assert same(model.prefill(rows, chunk=chunk), whole), chunk
    masked = whole.mask(slots=[1, 2])
    expected, logits = model.extend(masked, [NEXT * 2, NEXT * 2], logits=2)
    longer, other = model.extend(masked, [NEXT * 2, NEXT * 2], logits=2, chunk=2)
    assert same(longer, expected)
    assert torch.allclose(other, logits, atol=1e-4 * float(logits.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "glm_moe_dsa"])
def test_chunks_after_keys_that_are_rotated_as_they_are_read(kind: str):
    model = attending(kind)
    past = model.prefill(LONG).evict(slots=[2, 3]).reindex("contiguous")
    assert past.ledger.rotated
    whole = model.extend(past, [NEXT])[0]
    for before, after in zip(past.layers, whole.layers, strict=True):
        assert all(torch.equal(after[name][:, :, : past.slots], part) for name, part in before.items())
    assert same(model.extend(past, [NEXT], chunk=1)[0], whole)


@pytest.mark.parametrize("chunk", [3, 13])
def test_logits_of_rows_that_end_in_different_chunks(chunk: int):
    model = attending("llama")
    logits = model.extend(None, [LONG, SHORT], logits=3, chunk=chunk)[1]
    for row, run in enumerate((LONG, SHORT)):
        assert torch.allclose(logits[row], model.extend(None, run, logits=3)[1][0], atol=1e-4)


def test_a_chunk_is_at_least_one_token():
    refused(lambda: attending("llama").prefill(LONG, chunk=0), "chunk=0")


def test_no_more_tokens_pass_the_model_at_once_than_a_chunk_has(monkeypatch: pytest.MonkeyPatch):
    model = attending("llama")
    model.prefill(LONG)
    read, forward = list[int](), model.lanes.plain.forward

    def counting(*, input_ids: torch.Tensor, **given: object) -> object:
        read.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **given)

    monkeypatch.setattr(model.lanes.plain, "forward", counting)
    model.prefill(LONG, chunk=5)
    assert read == [5, 5, 3]
