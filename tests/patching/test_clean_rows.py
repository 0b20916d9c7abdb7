"""A clean row of a sweep is held to the ordinary pass, and attention is replaced only where all of it can be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

import kvprobe as kv
from kvprobe.faults import Zeros
from kvprobe.inference.batch import Batch
from kvprobe.inference.sweep import Question, Trial, sweep
from kvprobe.models.hf_cache import CACHE
from kvprobe.patching.grid import Cell
from kvprobe.patching.swaps import swap_cells
from kvprobe.text.tokens import Tokens
from tests.models import llama
from tests.models.every import tiny
from tests.refusals import refused

BASE, DONOR = Tokens.of([5, 9, 33, 17, 40, 8]), Tokens.of([5, 9, 34, 17, 41, 8])
SUFFIX = Tokens.of([7, 44], "q", 6)
METRIC = kv.LogitDiff(5, 6)

Call = Callable[[kv.Model, kv.KVCache, kv.KVCache], object]
CALLS: dict[str, Call] = {
    "patch_sweep": lambda model, base, donor: kv.patch_sweep(model, base, donor, SUFFIX, METRIC, progress=False),
    "total": lambda model, base, donor: kv.patch_sweep(
        model, base, donor, SUFFIX, METRIC, reads="total", progress=False
    ),
    "attribute": lambda model, base, donor: kv.attribute(model, base, donor, SUFFIX, METRIC),
    "swap_cells": lambda model, base, donor: swap_cells(
        model, base, donor, SUFFIX, [Cell((0,), (2,), "V")], {"logits": METRIC}
    ),
}


def outside(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, past_key_values: Any):
    """Llama's attention, not by the registry."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        module(hidden_states).view(shape).transpose(1, 2) for module in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    key, value = (repeat_kv(tensor, self.num_key_value_groups) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * self.scaling
    queries, slots = scores.shape[2:]
    if attention_mask is None:
        attention_mask = torch.ones(queries, slots, dtype=torch.bool).tril(slots - queries)
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros(attention_mask.shape).masked_fill(~attention_mask, -torch.inf)
    weights = (scores + attention_mask).softmax(-1)
    return self.o_proj((weights @ value).transpose(1, 2).flatten(2)), None


@pytest.fixture
def one_outside(monkeypatch: pytest.MonkeyPatch) -> kv.Model:
    """A model of which one layer attends outside transformers' registry."""
    usual = LlamaAttention.forward

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx != 1 or args:
            return usual(self, hidden_states, position_embeddings, *args, **kwargs)
        return outside(self, hidden_states, position_embeddings, kwargs.get("attention_mask"), kwargs.get(CACHE))

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    return llama()


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("proved", [False, True])
def test_a_layer_that_attends_by_itself_is_refused(
    one_outside: kv.Model, call: str, proved: bool, monkeypatch: pytest.MonkeyPatch
):
    """By the proof of attention; and were that to pass, by the clean row."""
    base, donor = one_outside.prefill(BASE), one_outside.prefill(DONOR)
    if proved:
        monkeypatch.setattr("kvprobe.models.lanes.prove_attention", lambda lanes, slots: None)
    phrase = "computes other logits with attention of kvprobe's making" if proved else "does not attend once in each"
    if proved and call == "total":
        phrase = "gives other K or V at layer 2 than it holds"
    refused(lambda: CALLS[call](one_outside, base, donor), phrase)


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("kind", ["diffllama", "jetmoe", "gpt_bigcode"])
def test_architectures_that_cannot_be_patched_are_refused_in_a_sentence(kind: str, call: str):
    model = kv.load(tiny(kind))
    base, donor = model.prefill(BASE), model.prefill(DONOR)
    refused(lambda: CALLS[call](model, base, donor), type(model.lanes.plain).__name__, "KVCache.patch")


def test_the_clean_row_of_a_fault_sweep_is_held_to_the_prompt_read_alone(monkeypatch: pytest.MonkeyPatch):
    usual = Batch.decode
    monkeypatch.setattr(Batch, "decode", lambda self, tokens, lane: usual(self, tokens, lane) ** 2)
    question = Question(BASE, [Trial(Zeros())])
    refused(lambda: sweep(llama().lanes, [question], max_new_tokens=2), "a row of a batch than for the row alone")
