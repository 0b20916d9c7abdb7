"""The gate refuses attention that goes wrong only at some length, slot, layer, head or number of queries."""

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

import kvprobe as kv
from kvprobe.inference.forward import extend
from kvprobe.models import gate
from kvprobe.text.tokens import Tokens
from tests.models import N_LAYERS, llama
from tests.models.every import LAYERS, tiny
from tests.refusals import refused

IDS = Tokens.of([5, 9, 33, 17, 40, 8, 21, 60, 12, 3])

Scores = Tensor  # [rows, heads, queries, slots], with the mask added
Wrong = Callable[[Scores, Tensor, Tensor, int], Scores]
"""From scores, the mask, causality alone, and the layer: other scores with the mask added."""


def attending(monkeypatch: pytest.MonkeyPatch, wrong: Wrong):
    """While a test lasts, Llama attends by these scores."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        key, value = (modeling_llama.repeat_kv(tensor, module.num_key_value_groups) for tensor in (key, value))
        queries, slots = query.shape[2], key.shape[2]
        causal = torch.full((queries, slots), torch.finfo(query.dtype).min).triu(slots - queries + 1).to(query.dtype)
        mask = causal if attention_mask is None else attention_mask
        scores = wrong(query @ key.transpose(2, 3) * scaling, mask, causal, module.layer_idx)
        return (scores.float().softmax(-1).to(query.dtype) @ value).transpose(1, 2).contiguous(), None

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)


def eager(dtype: torch.dtype = torch.float32, **changes: Any) -> kv.Model:
    plain = llama(**changes).lanes.plain.to(dtype)
    plain.set_attn_implementation("eager")
    return kv.load(plain)


def beyond(slots: int, scores: Scores, mask: Tensor, causal: Tensor, otherwise: Scores) -> Scores:
    return otherwise if scores.shape[3] > slots else scores + mask


def window(size: int, scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """A window by slots that nothing declares."""
    queries, slots = scores.shape[2:]
    near = torch.ones(queries, slots).triu(slots - queries - size + 1).bool()
    return (scores + mask).masked_fill(~near, torch.finfo(scores.dtype).min)


def window_at_once(size: int, scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """… that only what is read without a cache has."""
    return window(size, scores, mask, causal, layer) if scores.shape[2] == scores.shape[3] else scores + mask


def window_of_many(queries: int, scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """… that only so many tokens read at once have."""
    return window(64, scores, mask, causal, layer) if scores.shape[2] > queries else scores + mask


def log_n_at_once(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """Scores that grow with the logarithm of the length, from 40 tokens read without a cache on."""
    queries, slots = scores.shape[2:]
    return scores * (math.log(slots) / math.log(40) if queries == slots > 40 else 1) + mask


def mask_dropped_for(dimension: int, beyond: int, scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """No mask for many rows (dimension 0), or queries (2)."""
    return scores + (causal if scores.shape[dimension] > beyond else mask)


def scaled(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """Another scale from 64 slots on."""
    return beyond(64, scores, mask, causal, 1.5 * scores + mask)


def log_n(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """Scores that grow with the logarithm of the length, from 32 slots on."""
    return beyond(32, scores, mask, causal, scores * math.log(scores.shape[3]) / math.log(32) + mask)


def mask_dropped(slots: int, scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    return beyond(slots, scores, mask, causal, scores + causal)


def mask_dropped_alone(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """No mask for a single query."""
    return scores + (causal if scores.shape[2] == 1 else mask)


def leaking(at: int, slot: int, heads: slice = slice(None), alone: bool = False) -> Wrong:
    """A layer always sees a slot (with some heads, or with single queries only)."""

    def leak(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
        masked = scores + mask
        if layer == at and slot < scores.shape[3] and (not alone or scores.shape[2] == 1):
            masked[:, heads, :, slot] = (scores + causal)[:, heads, :, slot]
        return masked

    return leak


def heat(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """A temperature by the number of slots before a query, from 64 on."""
    queries, slots = scores.shape[2:]
    count = torch.arange(slots - queries, slots)[:, None] + 1
    return scores * (1 + 0.1 * (count / 64).floor()).to(scores.dtype) + mask


def alibi(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """Distances counted in slots."""
    queries, slots = scores.shape[2:]
    distance = torch.arange(slots - queries, slots)[:, None] - torch.arange(slots)
    return scores - (0.05 * distance).to(scores.dtype) + mask


def capped(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """Scores saturate from 32 slots on."""
    return beyond(32, scores, mask, causal, scores.tanh() + mask)


def soft(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """A mask that only makes attention small."""
    return scores + torch.where(causal == 0, mask.clamp(min=-8), mask)


def first_row(scores: Scores, mask: Tensor, causal: Tensor, layer: int) -> Scores:
    """Every row under the mask of the first."""
    return scores + (mask[:1] if mask.dim() == 4 else mask)


WRONG: dict[str, Wrong] = {
    "a window of 16 slots": partial(window, 16),
    "a window of 200 slots": partial(window, 200),
    "a window of 16 slots at once": partial(window_at_once, 16),
    "a window of 64 slots at once": partial(window_at_once, 64),
    "a window of many queries": partial(window_of_many, 16),
    "log n at once": log_n_at_once,
    "no mask for more than 8 queries": partial(mask_dropped_for, 2, 8),
    "no mask for more than 50 queries": partial(mask_dropped_for, 2, 50),
    "no mask for two queries": lambda scores, mask, causal, layer: scores + (causal if scores.shape[2] == 2 else mask),
    "no mask for more than 4 rows": partial(mask_dropped_for, 0, 4),
    "another scale": scaled,
    "log n": log_n,
    "no mask beyond 16 slots": partial(mask_dropped, 16),
    "no mask beyond 100 slots": partial(mask_dropped, 100),
    "no mask for single queries": mask_dropped_alone,
    "a temperature by slots": heat,
    "alibi": alibi,
    "softcap beyond 32 slots": capped,
    "a soft mask": soft,
    "the first row's mask": first_row,
    "a leak of one head": leaking(1, 3, slice(2, 3)),
    "a leak to single queries": leaking(1, 3, alone=True),
    **{f"slot {slot} in layer {layer}": leaking(layer, slot) for layer in range(N_LAYERS) for slot in (0, 3, 100)},
}
HALVES = (torch.bfloat16, torch.float16)
HALF = ("log n", "alibi", "a window of 16 slots", "softcap beyond 32 slots", "a temperature by slots", "a soft mask",
        "another scale")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in WRONG] + [(name, dtype) for name in HALF for dtype in HALVES],
)
def test_attention_that_goes_wrong_somewhere_is_refused(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gate, "free_bytes", lambda device: 0)  # no copy in float32 fits
    attending(monkeypatch, WRONG[name])
    model = eager(dtype)
    refused(lambda: model.prefill(IDS), "LlamaForCausalLM")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_attention_as_it_should_be_is_let_in(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    attending(monkeypatch, lambda scores, mask, causal, layer: scores + mask)
    assert eager(dtype).prefill(IDS).slots == len(IDS)


@pytest.mark.parametrize(
    ("declared", "applied"), [(None, 20), (20, None), (20, 21), (20, 19), (20, 20), (None, 3), (200, None), (None, 200)]
)
def test_windows_are_those_that_the_library_applies(
    declared: int | None, applied: int | None, monkeypatch: pytest.MonkeyPatch
):
    make = modeling_llama.create_causal_mask
    plain = llama().lanes.plain

    def masks(config: Any, **inputs: Any) -> Tensor | None:
        if applied is None:
            return make(config, **inputs)
        config = copy.deepcopy(config)
        config.sliding_window = applied
        return create_sliding_window_causal_mask(config, **inputs)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", masks)
    plain.config.sliding_window = declared
    model = kv.load(plain)
    if declared == applied:
        assert model.prefill(IDS).slots == len(IDS)
    else:
        refused(lambda: model.prefill(IDS), "LlamaForCausalLM", re.compile("explicit mask|config says"))


@pytest.mark.parametrize(
    ("kind", "changes", "phrase"),
    [
        ("moshi", {"sliding_window": 200}, "explicit mask"),
        (
            "llama4_text",
            {
                "layer_types": ["full_attention"] * LAYERS,
                "no_rope_layers": [0, 1] * (LAYERS // 2),
                "attn_temperature_tuning": True,
                "floor_scale": 16,
            },
            "explicit mask",
        ),
    ],
)
def test_architectures_that_change_with_the_length_are_refused(kind: str, changes: dict[str, Any], phrase: str):
    refused(lambda: kv.load(tiny(kind, **changes)).prefill(IDS), phrase)


def test_a_length_is_proved_when_it_is_reached(monkeypatch: pytest.MonkeyPatch):
    attending(monkeypatch, partial(mask_dropped, 300))
    model = eager()
    cache = model.prefill(Tokens.of([5 + number % 50 for number in range(256)]))
    refused(lambda: extend(model.lanes, cache, [Tokens.of([7], "q", 256)]), "LlamaForCausalLM", "1,024 slots")


@pytest.mark.parametrize(
    ("rows", "tokens", "wrong", "phrase"),
    [
        (1, 300, partial(window_of_many, 300), "after 512 tokens"),
        (1, 300, partial(mask_dropped_for, 2, 290), "for 512 tokens"),
        (9, 2, partial(mask_dropped_for, 0, 20), "in 32 rows"),
    ],
)
def test_tokens_read_at_once_and_rows_are_proved_when_they_are_reached(
    rows: int, tokens: int, wrong: Wrong, phrase: str, monkeypatch: pytest.MonkeyPatch
):
    attending(monkeypatch, wrong)
    model = eager()
    cache = model.prefill(IDS).mask(slots=[2]).fork(rows)
    many = Tokens.of([5 + number % 50 for number in range(tokens)], "q", len(IDS))
    refused(lambda: extend(model.lanes, cache, [many] * rows), "LlamaForCausalLM", phrase)


def test_half_precision_that_cannot_be_proved_in_float32_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A module of DBRX uses the weights of another, which are in half precision when it does."""
    model = kv.load(tiny("dbrx").to(torch.bfloat16))
    monkeypatch.setattr(gate, "free_bytes", lambda device: 0)
    refused(lambda: model.prefill(IDS), "cannot be proved in bfloat16", "dtype='float32'")
    monkeypatch.undo()
    assert model.prefill(IDS).slots == len(IDS)


def test_the_proof_in_float32_leaves_the_weights_as_they_are():
    plain = llama().lanes.plain.to(torch.bfloat16)
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in plain.named_parameters()}
    kv.load(plain).prefill(IDS)
    for name, parameter in plain.named_parameters():
        address, held = before[name]
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, held)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in plain.modules())


def test_a_model_that_chooses_slots_is_read_as_far_as_it_attends_to_all():
    model = kv.load(tiny("doge", keep_window_size=32, sliding_window=None))
    assert model.prefill(Tokens.of(list(range(5, 37)))).slots == 32
    refused(lambda: model.prefill(Tokens.of(list(range(5, 38)))), "beyond the 32", "attention to all slots")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gpt2", "mixtral", "gpt_oss"])
def test_half_precision_is_allowed_its_own_rounding(kind: str, dtype: torch.dtype):
    plain = tiny(kind)
    for name, parameter in plain.named_parameters():
        if name.endswith(("k_proj.bias", "q_proj.bias")):  # those of Qwen2.5 0.5B make keys of up to 150
            parameter.data *= 100
    assert kv.load(plain.to(dtype)).prefill(IDS).slots == len(IDS)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_allowed_no_more_than_its_own_rounding(dtype: torch.dtype):
    """Position embeddings of RoFormer that count slots are as wrong as in float32."""
    refused(lambda: kv.load(tiny("roformer").to(dtype)).prefill(IDS), "RoFormerForCausalLM")
