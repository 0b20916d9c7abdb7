"""The gate refuses, in a sentence, what kvprobe could not read right, and lets through what it can."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention

import kvprobe as kv
from kvprobe.inference.forward import extend, prefill
from kvprobe.inference.model import Model, load
from kvprobe.models import gate
from kvprobe.models.geometry import Geometry
from kvprobe.text.tokens import Tokens
from tests.models import _GQA, _model, llama
from tests.models.every import HOOKED_BY_4, NEWER_LENS, tiny
from tests.refusals import refused

IDS = Tokens.of([5, 9, 33, 17, 40, 8, 21, 60, 12, 3])


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("rwkv", "no attention heads"),
        ("xlstm", "no attention heads"),
        ("mpt", "ALiBi"),
        ("bloom", "ALiBi"),
        ("minimax_m3_vl_text", "which groups of slots"),
        ("dots3_note_text", "is a per-layer attribute"),
    ],
)
def test_unreadable_architectures_are_refused_at_load(kind: str, phrase: str):
    refused(lambda: load(tiny(kind)), kind, phrase)


def test_an_encoder_decoder_is_refused_at_load():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    refused(lambda: load(transformers.T5ForConditionalGeneration(config)), "t5", "encoder-decoder")


def bidirectional_bert() -> Model:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return _model(transformers.BertLMHeadModel, config, 0, None)


def test_a_model_that_looks_ahead_is_refused():
    refused(lambda: prefill(bidirectional_bert().lanes, [IDS]), "BertLMHeadModel", "later ones")


@pytest.mark.parametrize("kind", ["roberta", "camembert", "xlm-roberta", "data2vec-text"])
def test_a_model_that_does_not_count_positions_from_0_is_refused(kind: str):
    refused(lambda: prefill(load(tiny(kind)).lanes, [IDS]), "counts from elsewhere")


def test_a_model_that_ignores_positions_is_refused():
    model = llama()
    whole = model.lanes.plain.forward

    def deaf(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    model.lanes.plain.forward = deaf
    refused(lambda: prefill(model.lanes, [IDS]), "LlamaForCausalLM", "position_ids")


def test_a_mask_that_one_layer_ignores_is_detected(monkeypatch: pytest.MonkeyPatch):
    usual = LlamaAttention.forward

    def deaf(self: Any, hidden_states: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if self.layer_idx == 1 and attention_mask is not None:
            # Causal still, so that only what is hidden shows.
            queries, slots = attention_mask.shape[-2:]
            seen = torch.ones(queries, slots, dtype=torch.bool).tril(slots - queries)
            attention_mask = torch.zeros(1, 1, queries, slots).masked_fill(~seen, torch.finfo(torch.float32).min)
        return usual(self, hidden_states, *args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", deaf)
    refused(lambda: prefill(llama().lanes, [IDS]), "hidden slots")


def test_a_model_whose_heads_share_masks_refuses_masks_per_head():
    model = load(tiny("xglm"))
    cache = prefill(model.lanes, [IDS])
    alike = extend(model.lanes, cache.mask(slots=torch.arange(10)[None] == 4), [Tokens.of([7], "q", 10)])[1]
    assert bool(alike.isfinite().all())
    apart = cache.mask(slots=torch.arange(10)[None] == 4, heads=[0])
    refused(lambda: extend(model.lanes, apart, [Tokens.of([7], "q", 10)]), "XGLMForCausalLM", "masked apart")


@pytest.mark.parametrize("kind", HOOKED_BY_4)
def test_a_hooked_lane_that_computes_something_else_is_refused(kind: str):
    model = load(tiny(kind))
    assert prefill(model.lanes, [IDS]).slots == len(IDS)
    if NEWER_LENS:
        assert model.lanes.hooked.fires("v")
    else:
        refused(lambda: model.lanes.hooked, "TransformerLens computes something else", "lane='plain'")


def test_a_disagreement_of_the_lanes_is_detected(monkeypatch: pytest.MonkeyPatch):
    model = llama()
    hooked = model.lanes.hooked
    calls = hooked.__class__.__call__
    monkeypatch.setattr(hooked.__class__, "__call__", lambda self, ids, **kwargs: 1.001 * calls(self, ids, **kwargs))
    refused(lambda: llama().lanes.hooked, "TransformerLens computes something else")


def test_the_gate_runs_once(monkeypatch: pytest.MonkeyPatch):
    passed: list[str] = []
    checks = gate._plain_checks
    monkeypatch.setattr(gate, "_plain_checks", lambda lanes: passed.append("once") or checks(lanes))
    model = llama()
    assert not passed
    for _ in range(3):
        prefill(model.lanes, [IDS])
    assert passed == ["once"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_pass_the_gate(dtype: torch.dtype):
    model = llama()
    model.lanes.plain.to(dtype)
    assert load(model.lanes.plain).lanes.masks_by_head


def test_a_single_kv_head_is_measured_and_generates_as_the_library_does():
    model = load(tiny("falcon"))
    assert (model.geometry.n_heads, model.geometry.n_kv_heads) == (4, 1)
    ours = model.generate(IDS, max_new_tokens=6, stop=()).tokens[0]
    theirs = model.lanes.plain.generate(torch.tensor([IDS.ids]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert list(ours) == theirs[0, len(IDS) :].tolist()


def test_windows_of_gpt_neo_go_by_position_in_padded_rows():
    """By slots, the padding between a short row and what follows it would push what it holds out of the window."""
    model = load(tiny("gpt_neo"))
    short, rest = IDS[:3], Tokens.of([7, 44], "q", 3)
    alone = extend(model.lanes, prefill(model.lanes, [short]), [rest], logits=2)[1]
    rows = prefill(model.lanes, [IDS, short])
    beside = extend(model.lanes, rows, [Tokens.of([7, 44], "q", len(IDS)), rest], logits=2)[1]
    torch.testing.assert_close(beside[1:], alone, atol=1e-5, rtol=1e-5)
    assert model.geometry.windows == (None, 5, None, 5)


def test_rotations_are_found_though_the_embedding_of_the_first_token_is_zero():
    """Padding embeddings are zero at the start, and keys of zeros would fit any rotation, or none."""
    config = transformers.LlamaConfig(**{**_GQA, "pad_token_id": 0})
    model = _model(transformers.LlamaForCausalLM, config, 0, None)
    assert not bool(model.lanes.plain.get_input_embeddings().weight[0].any())
    assert all(rotary is not None for rotary in model.lanes.rotaries)


def test_models_whose_frequencies_change_warn_and_refuse_later_positions():
    original = 32
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": original,
    }
    config = transformers.Phi3Config(
        **{**_GQA, "pad_token_id": 0}, rope_parameters=parameters, original_max_position_embeddings=original
    )
    with pytest.warns(UserWarning, match="other rotary frequencies from position 32 on"):
        model = _model(transformers.Phi3ForCausalLM, config, 0, None)
    cache = prefill(model.lanes, [Tokens.of([5] * original)])
    refused(lambda: extend(model.lanes, cache, [Tokens.of([5], "q", original)]), "beyond the 32", "frequencies")


def test_other_models_load_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama()


def test_attention_other_than_a_softmax_is_refused():
    model = load(tiny("doge"))
    cache = prefill(model.lanes, [IDS])
    refused(lambda: kv.attend(model, Tokens.of([7], "q", 10), cache), "attends otherwise than by a softmax")


def test_attention_whose_result_is_not_used_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A sweep over total effects blamed the base."""
    usual = LlamaAttention.forward

    def unused(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        attended = usual(self, hidden_states, *args, **kwargs)
        return (self.o_proj(self.q_proj(hidden_states)), None) if self.layer_idx == 1 else attended

    monkeypatch.setattr(LlamaAttention, "forward", unused)
    model = llama()
    base, donor = model.prefill(IDS), model.prefill(Tokens.of([6, *IDS.ids[1:]]))
    suffix, metric = Tokens.of([7, 8], "q", 10), kv.LogitDiff(5, 6)
    for reads in ("reader", "total"):
        sweep = partial(kv.patch_sweep, model, base, donor, suffix, metric, over=("layer",), reads=reads)
        refused(lambda sweep=sweep: sweep(parts=("V",), progress=False), "does not use the result")


@pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size", "layer_types"])
def test_a_config_that_raises_is_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch):
    def differs(self: Any) -> Any:
        raise ValueError("It differs between layers. Set a flag.")

    plain = llama().lanes.plain
    monkeypatch.setattr(transformers.LlamaConfig, name, property(differs, lambda self, value: None), raising=False)
    refused(lambda: Geometry.of(plain), "llama", "ValueError: It differs between layers)")


def test_blocks_that_scale_what_they_add_are_refused_by_name():
    model = load(tiny("granite"))
    one, other = prefill(model.lanes, [IDS]), prefill(model.lanes, [Tokens.of([6, *IDS.ids[1:]])])
    suffix = Tokens.of([7, 8], "q", 10)
    refused(lambda: kv.layer_map(model, one, other, suffix, progress=False), "GraniteForCausalLM", "residual stream")


def test_the_doctor_examines_the_plain_lane_of_a_model_whose_hooked_lane_is_refused():
    from kvprobe.inference.doctor import examine, limits

    model = load(tiny("codegen" if NEWER_LENS else "cohere"))
    checks = list(examine(model))
    assert all(check.passed for check in checks)
    assert not any("lanes agree" in check.name for check in checks)
    said = "TransformerLens cannot run" if NEWER_LENS else "TransformerLens computes something else"
    assert any(said in sentence for sentence in limits(model))


def test_real_weights_are_read_past_the_length_that_is_proved_first(smol: Model):
    """Their rounding grows with the length; a limit for tiny models would refuse them."""
    tokens = Tokens.of([100 + number % 500 for number in range(300)])
    cache, hidden = smol.prefill(tokens), range(100, 150)
    assert cache.slots > gate.FIRST_REACH
    (_, masked), (_, evicted) = (
        smol.extend(kept, " and then") for kept in (cache.mask(slots=hidden), cache.evict(slots=hidden))
    )
    torch.testing.assert_close(masked, evicted, rtol=1e-3, atol=1e-3)
