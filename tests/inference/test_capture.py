from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from kvprobe.inference.capture import Captured, _observing, capture, plain_ports
from kvprobe.inference.forward import extend, prefill
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model, load
from kvprobe.models.lens import HOOKS, PER_HEAD, Family
from kvprobe.policies import H2O
from tests.models import ARCHITECTURES, every
from tests.random_caches import assert_bit_identical, assert_close, random_tokens, relative_difference
from tests.refusals import refused

FAMILIES: tuple[Family, ...] = tuple(HOOKS)
MISSING: dict[str, set[Family]] = {"gpt_neox": {"resid_mid"}}
FUSED_QKV = {"gpt2", "gpt_neox"}
SEQUENTIAL = [name for name in ARCHITECTURES if name != "gpt_neox"]
ROWS = [random_tokens(1, {"T1": 3, "T2": 4}), random_tokens(2, {"T1": 1, "T2": 5})]
SHORTEST = min(map(len, ROWS))


def families_of(architecture: str) -> list[Family]:
    return [family for family in FAMILIES if family not in MISSING.get(architecture, set())]


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("masked", [False, True])
def test_what_the_plain_lane_captures_equals_what_the_hooked_lane_captures(
    tiny_models: dict[str, Model], architecture: str, masked: bool
):
    lanes = tiny_models[architecture].lanes
    families = [f for f in families_of(architecture) if f != "k_pre" or architecture not in FUSED_QKV]
    past = prefill(lanes, [random_tokens(0, {"system": 3, "gone": 2})])
    past = past.mask("gone", layers=[1]) if masked else past
    rows = [row.shifted(5) for row in ROWS]
    plain = capture(lanes, rows, families, past=past, lane="plain")
    hooked = capture(lanes, rows, families, past=past, lane="hooked")
    assert plain.tensors.keys() == hooked.tensors.keys() == {(f, layer) for f in families for layer in range(3)}
    for site in plain.tensors:
        assert_close(hooked[site], plain[site])
    assert torch.equal(plain.present, hooked.present)
    assert_close(hooked.logits, plain.logits, 1e-4)


@pytest.mark.parametrize(("kind", "family"), [("opt", "resid_mid"), ("llama4_text", "mlp_out")])
def test_what_a_module_sees_without_rows_is_captured_by_row(kind: str, family: Family):
    lanes = load(every.tiny(kind)).lanes
    plain, hooked = (capture(lanes, ROWS, [family], lane=lane) for lane in ("plain", "hooked"))
    for site in plain.tensors:
        assert_close(plain[site][plain.present], hooked[site][hooked.present])


@pytest.mark.parametrize("lane", ["plain", "hooked"])
def test_captured_keys_and_values_are_those_of_the_cache(tiny: Model, lane: str):
    captured = capture(tiny.lanes, ROWS, ["k", "v"], lane=lane, keep_cache=True)
    assert captured.cache is not None
    expected = prefill(tiny.lanes, ROWS, lane)
    assert_bit_identical(captured.cache, expected)
    for layer in range(3):
        for row, tokens in enumerate(ROWS):
            count = len(tokens)
            assert torch.equal(captured["k", layer][row, :, :count], expected.keys[layer][row, :, :count])
            assert torch.equal(captured["v", layer][row, :, :count], expected.values[layer][row, :, :count])


def test_captured_keys_and_values_are_those_of_the_hook_points(tiny_models: dict[str, Model], architecture: str):
    lanes = tiny_models[architecture].lanes
    captured = capture(lanes, ROWS[:1], ["k", "v"], lane="plain")
    hooked: dict[tuple[Family, int], torch.Tensor] = {}

    def observe(family: Family, layer: int, tensor: torch.Tensor) -> None:
        per_head = tensor if tensor.dim() == 4 and tensor.shape[1] != len(ROWS[0]) else None
        if per_head is None:
            per_head = tensor.reshape(*tensor.shape[:2], lanes.geometry.n_kv_heads, -1).transpose(1, 2)
        hooked[family, layer] = per_head

    shown: list[Family] = ["v"] if architecture in FUSED_QKV else ["k", "v"]
    with lanes.hooked.observing(shown, range(3), observe):
        extend(lanes, None, ROWS[:1], "hooked")
    for site, tensor in hooked.items():
        assert_close(tensor, captured[site])


def test_keys_before_rotation_equal_the_stored_ones_at_position_zero(tiny_llama: Model):
    captured = capture(tiny_llama.lanes, ROWS, ["k_pre", "k"])
    for layer in range(3):
        assert torch.equal(captured["k_pre", layer][:, :, 0], captured["k", layer][:, :, 0])
        assert relative_difference(captured["k_pre", layer][:, :, 3], captured["k", layer][:, :, 3]) > 1e-3


def test_keys_of_gpt2_are_stored_without_rotation(tiny_models: dict[str, Model]):
    captured = capture(tiny_models["gpt2"].lanes, ROWS, ["k_pre", "k"])
    for layer in range(3):
        assert_close(captured["k_pre", layer], captured["k", layer])


@pytest.mark.parametrize("architecture", SEQUENTIAL)
@pytest.mark.parametrize("lane", ["plain", "hooked"])
def test_attention_and_mlp_add_up_along_the_residual_stream(
    tiny_models: dict[str, Model], architecture: str, lane: str
):
    families: list[Family] = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]
    captured = capture(tiny_models[architecture].lanes, ROWS, families, lane=lane)
    for layer in range(3):
        assert_close(captured["resid_pre", layer] + captured["attn_out", layer], captured["resid_mid", layer])
        assert_close(captured["resid_mid", layer] + captured["mlp_out", layer], captured["resid_post", layer])
        if layer < 2:
            assert_close(captured["resid_post", layer], captured["resid_pre", layer + 1])


@pytest.mark.parametrize("lane", ["plain", "hooked"])
def test_parallel_blocks_add_attention_and_mlp_to_the_same_stream(tiny_models: dict[str, Model], lane: str):
    families: list[Family] = ["resid_pre", "resid_post", "attn_out", "mlp_out"]
    captured = capture(tiny_models["gpt_neox"].lanes, ROWS, families, lane=lane)
    for layer in range(3):
        total = captured["resid_pre", layer] + captured["attn_out", layer] + captured["mlp_out", layer]
        assert_close(total, captured["resid_post", layer])


def test_the_stream_after_the_last_layer_gives_the_logits(tiny_llama: Model):
    captured = capture(tiny_llama.lanes, ROWS[:1], ["resid_post"], layers=[2], logits=len(ROWS[0]))
    plain = tiny_llama.lanes.plain
    with torch.no_grad():
        expected = plain.lm_head(plain.model.norm(captured["resid_post", 2]))
    assert_close(captured.logits, expected)


def everything(model: Model) -> Captured:
    return capture(model.lanes, ROWS, ["k", "v", "resid_post"])


def test_a_segment_selects_its_slots_in_each_row(tiny: Model):
    every = everything(tiny)
    captured = capture(tiny.lanes, ROWS, ["k", "v", "resid_post"], segments=["T2"])
    assert captured.present.tolist() == [[True] * 4 + [False], [True] * 5]
    for row, tokens in enumerate(ROWS):
        span = tokens.span("T2")
        count = span.stop - span.start
        for layer in range(3):
            for family in ("k", "v"):
                expected = every[family, layer][row, :, span]
                assert torch.equal(captured[family, layer][row, :, :count], expected)
            expected = every["resid_post", layer][row, span]
            assert torch.equal(captured["resid_post", layer][row, :count], expected)


def test_slots_count_from_either_end_of_each_row(tiny: Model):
    every = everything(tiny)
    captured = capture(tiny.lanes, ROWS, ["k", "v", "resid_post"], slots=[0, -1, 2])
    assert captured.present.all()
    for row, tokens in enumerate(ROWS):
        slots = [0, len(tokens) - 1, 2]
        for layer in range(3):
            assert torch.equal(captured["k", layer][row], every["k", layer][row][:, slots])
            assert torch.equal(captured["v", layer][row], every["v", layer][row][:, slots])
            assert torch.equal(captured["resid_post", layer][row], every["resid_post", layer][row][slots])


def test_layers_are_captured_once_each_and_in_order(tiny: Model):
    captured = capture(tiny.lanes, ROWS, ["k", "resid_post"], layers=[2, 0, 2])
    every = everything(tiny)
    assert {layer for _, layer in captured.tensors} == {0, 2}
    assert torch.equal(captured.stack("k"), torch.stack([captured["k", 0], captured["k", 2]]))
    for row, tokens in enumerate(ROWS):
        assert torch.equal(captured["resid_post", 2][row, : len(tokens)], every["resid_post", 2][row, : len(tokens)])


def test_all_slots_of_a_shorter_row_are_marked_present_and_no_more(tiny_llama: Model):
    assert everything(tiny_llama).present.tolist() == [[True] * 7, [True] * 6 + [False]]


def test_logits_are_those_of_reading(tiny: Model):
    captured = capture(tiny.lanes, ROWS, ["k"], logits=SHORTEST)
    assert torch.equal(captured.logits, extend(tiny.lanes, None, ROWS, logits=SHORTEST)[1])


def test_capturing_after_a_cache_shows_the_new_slots_alone(tiny: Model):
    whole = capture(tiny.lanes, ROWS[:1], ["k", "v", "resid_mid" if tiny.geometry.n_kv_heads == 2 else "resid_pre"])
    past = prefill(tiny.lanes, [ROWS[0][:3]])
    rest = capture(tiny.lanes, [ROWS[0][3:]], [family for family, layer in whole.tensors if layer == 0], past=past)
    for (family, layer), tensor in whole.tensors.items():
        expected = tensor[:, :, 3:] if family in PER_HEAD else tensor[:, 3:]
        assert_close(rest[family, layer], expected)


def test_no_cache_is_kept_unless_asked_for(tiny: Model):
    past = prefill(tiny.lanes, [ROWS[0]])
    before = past.nbytes
    captured = capture(tiny.lanes, [random_tokens(5, {"T3": 2}, start=7)], ["k", "resid_post"], past=past)
    assert captured.cache is None
    assert past.nbytes == before
    assert past.slots == 7


def test_captured_tensors_hold_no_more_memory_than_what_was_asked_for(tiny: Model):
    for family in ("k", "v", "resid_post"):
        tensor = capture(tiny.lanes, ROWS, [family], slots=[1])[family, 0]
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("lane", ["auto", "plain", "hooked"])
def test_a_family_that_the_blocks_do_not_have_is_refused(tiny_models: dict[str, Model], lane: str):
    refused(
        lambda: capture(tiny_models["gpt_neox"].lanes, ROWS, ["resid_mid"], lane=lane), "does not compute 'resid_mid'"
    )


@pytest.mark.parametrize("architecture", sorted(FUSED_QKV))
def test_keys_inside_a_fused_projection_are_read_by_the_hooked_lane(tiny_models: dict[str, Model], architecture: str):
    lanes = tiny_models[architecture].lanes
    refused(lambda: capture(lanes, ROWS, ["k_pre"], lane="plain"), "use lane='hooked'")
    by_choice, by_order = (capture(lanes, ROWS, ["k_pre"], lane=lane) for lane in ("auto", "hooked"))
    for layer in range(3):
        assert torch.equal(by_choice["k_pre", layer], by_order["k_pre", layer])


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_family_is_refused_with_the_near_match(tiny_llama: Model):
    refused(
        lambda: capture(tiny_llama.lanes, ROWS, ["resid_pst"]),
        "no family called 'resid_pst'; did you mean 'resid_post'",
    )


@pytest.mark.parametrize("layer", [3, 99, -1])
def test_a_layer_out_of_range_is_refused(tiny_llama: Model, layer: int):
    refused(
        lambda: capture(tiny_llama.lanes, ROWS, ["k"], layers=[layer]), f"no layer {layer}; the model has layers 0 to 2"
    )


@pytest.mark.parametrize("slot", [6, -7])
def test_a_slot_outside_the_shortest_row_is_refused(tiny_llama: Model, slot: int):
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["k"], slots=[slot]), "outside the 6 new tokens")


def test_an_unknown_segment_is_refused(tiny_llama: Model):
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["k"], segments=["T3"]), "no segment called 'T3'")


def test_segments_and_slots_together_are_refused(tiny_llama: Model):
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["k"], segments=["T1"], slots=[0]), "not both")


def test_what_was_not_asked_for_is_not_captured(tiny_llama: Model):
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["k"])["v", 0], "'v' at layer 0 was not captured")


def test_a_hook_that_never_fires_is_an_error(tiny: Model):
    observing = tiny.lanes.hooked.observing(["resid_post"], [1], lambda *_: None)
    refused(lambda: entered(observing), "blocks.1.hook_resid_post never fired")


def test_a_module_that_is_never_called_is_an_error(tiny_llama: Model):
    observing = _observing(tiny_llama.lanes, plain_ports(tiny_llama.lanes, {"resid_post": [1]}), lambda *_: None)
    refused(lambda: entered(observing), "never called the modules that compute resid_post of layer 1; leave")


def test_a_hook_that_does_not_exist_is_an_error(tiny_models: dict[str, Model]):
    observing = tiny_models["gpt_neox"].lanes.hooked.observing(["resid_mid"], [0], lambda *_: None)
    refused(lambda: entered(observing), "no hook blocks.0.hook_resid_mid")


def entered(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def test_a_pass_that_fails_leaves_no_hook_behind(tiny: Model):
    lanes = tiny.lanes
    lanes.prove()

    def failing(*_: object) -> None:
        raise ArithmeticError

    def hooks() -> int:
        """Those of transformers stay, once a model was asked for its attentions."""
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in lanes.plain.modules())

    before = hooks()
    for lane, model in (("plain", lanes.plain), ("hooked", lanes.hooked.bridge)):
        broken = list(model.modules())[-1].register_forward_pre_hook(failing)
        with pytest.raises(ArithmeticError):
            capture(lanes, ROWS, ["resid_post"], lane=lane)
        broken.remove()
    assert not any(point.fwd_hooks for point in lanes.hooked.bridge.hook_dict.values())
    assert hooks() == before


def test_a_users_own_hook_acts_before_and_after_kvprobe_reads(tiny: Model):
    seen: list[int] = []

    def counting(tensor: torch.Tensor, hook: object) -> None:
        seen.append(1)

    with tiny.lanes.hooked.bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", counting)]):
        generation = generate(tiny.lanes, ROWS[:1], max_new_tokens=4, stop=(), policy=H2O(4), lane="hooked")
    assert len(seen) == len(generation.tokens[0]) == 4


def test_a_change_of_the_plain_weights_is_a_change_of_both_lanes(architecture: str):
    lanes = ARCHITECTURES[architecture](seed=7).lanes
    before = capture(lanes, ROWS, ["resid_post"], lane="hooked")
    with torch.no_grad():
        for parameter in lanes.plain.parameters():
            parameter *= 1.5
    plain, hooked = (capture(lanes, ROWS, ["resid_post"], lane=lane) for lane in ("plain", "hooked"))
    assert relative_difference(plain["resid_post", 2], before["resid_post", 2]) > 1e-2
    assert_close(hooked["resid_post", 2], plain["resid_post", 2])
    assert_close(hooked.logits, plain.logits, 1e-4)


def test_the_hooked_lane_holds_the_plain_weights_themselves(tiny: Model):
    owned = {tensor.data_ptr() for tensor in tiny.lanes.plain.parameters()}
    assert owned <= {tensor.data_ptr() for tensor in tiny.lanes.hooked.bridge.parameters()}


def test_sites_may_be_named_by_their_hooks_and_read_by_them(tiny_llama: Model, unchecked: None):
    names = ["blocks.2.attn.hook_v", "blocks.0.hook_resid_post"]
    captured = capture(tiny_llama.lanes, ROWS, names)
    expected = capture(tiny_llama.lanes, ROWS, ["v", "resid_post"])
    assert set(captured.tensors) == {("v", 2), ("resid_post", 0)}
    assert captured.by_hook[names[0]].equal(expected["v", 2].transpose(1, 2))
    assert captured.by_hook[names[1]].equal(expected["resid_post", 0])
    refused(lambda: capture(tiny_llama.lanes, ROWS, [names[0], "k"]), "hook names alone")
    refused(lambda: capture(tiny_llama.lanes, ROWS, names, layers=[0]), "hook names alone")
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["blocks.9.hook_resid_post"]), "no layer 9")
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["blocks.0.attn.hok_v"]), "'blocks.0.attn.hook_v'")
    refused(lambda: capture(tiny_llama.lanes, ROWS, ["blocks.0.attn.hook_z"]), "no site at the hook")


def test_by_hook_is_what_transformer_lens_caches(tiny_llama: Model):
    hooked = tiny_llama.lanes.hooked
    ids = torch.tensor([ROWS[0].ids])
    _, activations = hooked.bridge.run_with_cache(ids)
    by_hook = capture(tiny_llama.lanes, ROWS[:1], ["v", "resid_post", "attn_out", "mlp_out"]).by_hook
    for name, tensor in by_hook.items():
        assert_close(tensor.reshape(activations[name].shape), activations[name], 1e-4)
