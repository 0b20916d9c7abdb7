from typing import Any

import pytest
import torch
import transformers

from kvprobe.inference.capture import editing, plain_ports
from kvprobe.inference.model import Model, load
from kvprobe.models.gate import FIRST_REACH
from kvprobe.models.geometry import Geometry, reaches_of
from kvprobe.models.lanes import Lanes
from tests.models import N_LAYERS, WINDOW, llama, mixtral, tiny_tokenizer
from tests.models.every import tiny
from tests.refusals import refused


def test_tiny_models_have_the_geometry_they_were_built_with(tiny_models: dict[str, Model]):
    for name, model in tiny_models.items():
        shape = model.geometry
        assert (shape.n_layers, shape.n_heads, shape.d_head, shape.d_model) == (3, 4, 8, 32)
        assert shape.n_kv_heads == (4 if name in ("gpt2", "gpt_neox") else 2)
        assert shape.windows == ((WINDOW, WINDOW, None) if name == "gemma3" else (None, None, None))
        assert (shape.max_position is not None) == (name == "gpt2")


def test_a_window_without_layer_types_holds_in_every_layer():
    assert reaches_of(transformers.MistralConfig(num_hidden_layers=2, sliding_window=16), 2) == (16, 16)


def test_a_window_that_is_switched_off_holds_nowhere():
    config = transformers.Qwen2Config(num_hidden_layers=2, sliding_window=16, use_sliding_window=False)
    assert reaches_of(config, 2) == (None, None)


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [("jamba", "a recurrence that kvprobe knows"), ("inkling_text", "hybrid_sliding; kvprobe reads full")],
)
def test_models_with_a_state_of_an_unknown_rule_are_refused(kind: str, phrase: str):
    refused(lambda: Geometry.of(tiny(kind)), phrase)


def test_the_fingerprint_depends_on_the_weights_and_not_on_the_tokenizer_object():
    one, other = (llama(seed=1, tokenizer=tiny_tokenizer()) for _ in range(2))
    assert one.tokenizer is not other.tokenizer
    assert one.fingerprint == other.fingerprint
    assert llama(seed=1).fingerprint != llama(seed=2).fingerprint
    changed = llama(seed=1)
    with torch.no_grad():
        changed.lanes.plain.lm_head.weight[0, 0] += 1e-3
    assert changed.fingerprint != llama(seed=1).fingerprint


def test_an_interrupted_proof_of_the_hooked_lane_is_begun_again(monkeypatch: pytest.MonkeyPatch):
    lanes, proofs = llama().lanes, []

    def interrupted(_: Lanes, by_head: bool, slots: int) -> None:
        proofs.append(by_head)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvprobe.models.lanes.prove_hooked", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            _ = lanes.hooked
    assert len(proofs) == 2


@pytest.mark.parametrize("tokens", [3, FIRST_REACH + 1])
def test_a_proof_that_comes_due_amid_hooks_is_of_the_model_without_them(tokens: int):
    """Texts that are longer than what was proved first are proved when they are read."""
    model, called = mixtral(), dict.fromkeys(("seen", "edited", "routed"), 0)
    lanes, text = model.lanes, torch.ones(tokens, dtype=torch.long)

    def counting(name: str, change: Any) -> Any:
        def counted(*given: Any) -> Any:
            called[name] += 1
            return change(given[-1])

        return counted

    port = plain_ports(lanes, {"resid_post": [1]})["resid_post", 1]
    assert port is not None
    with (
        lanes.observing_attention(counting("seen", lambda _: None)),
        editing(lanes, [(port, counting("edited", torch.zeros_like))]),
        lanes.routers.replaced_by(counting("routed", lambda decision: decision)),
    ):
        model.prefill(text)
    assert called == {"seen": N_LAYERS, "edited": 1, "routed": N_LAYERS}


def test_what_is_captured_of_a_text_that_is_yet_to_be_proved_is_of_that_text():
    text = torch.arange(1, FIRST_REACH + 2) % 9
    for lane in ("plain", "hooked"):
        model = llama()
        first, again = (model.capture(text, ["resid_post", "k"], lane=lane) for _ in range(2))
        assert all(torch.equal(first[family, 1], again[family, 1]) for family in ("resid_post", "k"))


@pytest.mark.parametrize("kind", ["youtu", "lfm2", "falcon_h1"])
def test_what_a_block_adds_is_found_where_it_is_however_coarsely_the_model_computes(kind: str):
    """In bfloat16 tiny models compute logits up to 70 % apart, which is more than what their attention adds."""
    exact, coarse = (load(tiny(kind).to(dtype)).lanes.own_ports for dtype in (torch.float32, torch.bfloat16))
    assert exact == coarse
