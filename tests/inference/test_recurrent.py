"""Recurrent layers: the cache holds what each token wrote, and the state is folded of what is live."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvprobe.attention.patterns import attend
from kvprobe.cache import recurrence
from kvprobe.cache.cache import KVCache
from kvprobe.cache.floors import floor_of_dtype
from kvprobe.cache.layer import slots_and_writes
from kvprobe.cache.parts import ADDED, CONVOLVED, DELTA, KV
from kvprobe.cache.recurrence import fold
from kvprobe.errors import UserError
from kvprobe.faults import BitFlips, OverlappingKV, PositionShift, Scope, Zeros
from kvprobe.inference.doctor import examine
from kvprobe.inference.forward import taps
from kvprobe.inference.model import Model, load
from kvprobe.inference.states import state_of
from kvprobe.models import recurrent
from kvprobe.models.geometry import Geometry
from kvprobe.models.hf_cache import CACHE, empty_layers, held_by, library_cache, past_key_values
from kvprobe.models.recurrent import StateLayer, recurrent_modules, writes_noted
from kvprobe.report.views.patterns import patterns_view
from kvprobe.text.tokens import Tokens
from tests.models.every import eager_attention, tiny
from tests.refusals import refused

IDS = Tokens.of([5, 9, 33, 17, 40, 8, 21, 60, 12, 3])
NEXT = Tokens.of([7, 11, 30], "next", 10)
KINDS = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "granitemoehybrid", "falcon_h1", "nemotron_h"]


@cache
def built(kind: str = "qwen3_next") -> Model:
    return load(tiny(kind))


@cache
def held(kind: str = "qwen3_next") -> tuple[Model, KVCache]:
    return built(kind), built(kind).prefill(IDS)


def after(model: Model, past: KVCache, run: Tokens = NEXT) -> Tensor:
    return model.extend(past, [run.shifted(int(past.ledger.following[0]))], logits=3)[1]


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_the_fold_of_the_writes_is_the_state_that_the_model_computes(kind: str, monkeypatch: pytest.MonkeyPatch):
    """In one piece, and in pieces of which the last are single tokens."""
    states, model, pieces = list[Tensor](), built(kind), None
    model.prefill(IDS)
    update = StateLayer.update_recurrent_state

    def noting(layer: StateLayer, state: Tensor, *args: Any, **settings: Any) -> Tensor:
        states.append(state)
        return update(layer, state, *args, **settings)

    monkeypatch.setattr(StateLayer, "update_recurrent_state", noting)
    whole = model.prefill(IDS)
    computed = states[:]
    for piece in (IDS[:5], IDS[5:8], IDS[8:9], IDS[9:]):
        pieces, _ = model.extend(pieces, [piece])
    assert pieces is not None
    layers = model.geometry.recurrent
    assert layers == {"falcon_h1": (0, 1, 2, 3), "nemotron_h": (0,)}.get(kind, (0, 1, 2))
    for layer, state, last in zip(layers, computed, states[-len(layers) :], strict=True):
        assert close(last, state)
        state = state.transpose(2, 3) if "gain" in whole.layers[layer] else state
        assert close(fold(whole.layers[layer]), state)
        assert close(fold(pieces.layers[layer]), state)


def test_hiding_the_last_tokens_and_their_time_is_never_having_read_them():
    model, past = held()
    never = after(model, model.prefill(IDS[:7]))
    hidden, evicted = past.mask(slots=[7, 8, 9]), past.evict(slots=[7, 8, 9])
    for cut in (hidden.reindex(), evicted.reindex(), past.rewind(slots=7), hidden.evict(slots=[7, 8, 9]).reindex()):
        assert close(after(model, cut), never)
    assert close(after(model, hidden), after(model, evicted))
    assert not close(after(model, hidden), never)


def test_a_gap_keeps_its_time_and_a_closed_one_does_not():
    model, past = held()
    hidden, evicted = past.mask(slots=[2, 3, 6]), past.evict(slots=[2, 3, 6])
    assert close(after(model, hidden), after(model, evicted))
    assert close(after(model, hidden.reindex()), after(model, evicted.reindex()))
    assert not close(after(model, hidden), after(model, hidden.reindex(), NEXT))
    twice = past.evict(slots=[3]).evict(slots=[2, 5])
    assert close(after(model, twice), after(model, hidden))


def test_what_hidden_tokens_wrote_reaches_nothing():
    model, past = held()
    loud = past.patch(past.__class__(tuple({**layer, **({"value": 100 * layer["value"]} if "value" in layer else {})}
                                           for layer in past.layers), past.ledger), slots=[4])  # fmt: skip
    assert not close(after(model, loud), after(model, past))
    assert torch.equal(after(model, loud.mask(slots=[4])), after(model, past.mask(slots=[4])))
    states = model.geometry.recurrent
    assert torch.equal(
        after(model, loud.mask(slots=[4], layers=states)), after(model, past.mask(slots=[4], layers=states))
    )
    # Hidden from attention alone, a token is still in the states.
    assert not close(after(model, past.mask(slots=[4], layers=[3])), after(model, past.mask(slots=[4])))


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_reading_leaves_the_cache_as_it_was(kind: str):
    model, past = held(kind)
    before = [tensor.clone() for tensor in past.tensors]
    first = after(model, past)
    one, _ = model.extend(past, [NEXT[:1]])
    layers = past_key_values(taps(model.lanes, past, store=False))
    ids = torch.tensor([[*IDS.ids, *NEXT.ids[:1]]])
    twice = [model.lanes.forward(ids[:, 10:], one.ledger, layers) for _ in range(2)]
    assert torch.equal(*twice)
    assert torch.equal(after(model, past), first)
    assert close(after(model, past.fork(2).rows([1])), first)
    assert close(model.extend(one, [NEXT[1:]], logits=2)[1], first[:, 1:])
    assert all(torch.equal(tensor, same) for tensor, same in zip(past.tensors, before, strict=True))


def test_a_fold_starts_from_the_last_state_before_something_hidden(monkeypatch: pytest.MonkeyPatch):
    model, folded, cache = built(), list[int](), None

    def counting(writes: Any, *args: Any, **settings: Any) -> Tensor:
        folded.append(writes["step"].shape[2])
        return fold(writes, *args, **settings)

    long = Tokens.of([(7 * number) % 60 + 3 for number in range(600)])
    for first in range(0, 600, 200):
        cache, _ = model.extend(cache, [long[first : first + 200]])
    assert cache is not None
    copied = cache.rows([0])
    monkeypatch.setattr(recurrent, "fold", counting)
    edits = (lambda of: of, lambda of: of.mask(slots=range(590, 600)), lambda of: of.mask(slots=[450]),
             lambda of: of.mask(slots=[150]), lambda of: of.patch(of, slots=[3], part="key"))  # fmt: skip
    for edit, count in zip(edits, (0, 200, 200, 600, 600), strict=True):
        folded.clear()
        ends = after(model, edit(cache))
        assert set(folded) == {count}
        assert close(ends, after(model, edit(copied)))
        assert max(folded) == 600
    folded.clear()
    for layer in cache.layers[:3]:
        layer["value"][:, :, 598] = 5
    assert not close(after(model, cache), after(model, copied))
    assert set(folded) == {600}


def test_rows_of_unequal_length_and_joined_caches_are_read_as_alone():
    model, past = held()
    short = model.prefill(IDS[:4])
    for rows in (KVCache.join([short, past]), model.prefill([IDS[:4], IDS])):
        pair = model.extend(rows, [NEXT.shifted(4), NEXT], logits=3)[1]
        assert close(pair[1:], after(model, past))
        assert close(pair[:1], after(model, short))
    both = model.generate([IDS[:4], IDS], max_new_tokens=4, stop=())
    alone = [model.generate([row], max_new_tokens=4, stop=()) for row in (IDS[:4], IDS)]
    assert list(both.tokens) == [row.tokens[0] for row in alone]


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "kimi_linear"])
def test_the_state_of_a_padded_row_is_that_of_the_row_alone(kind: str):
    """Padding at the end, at the beginning, and where other rows lost fewer slots."""
    model = built(kind)
    alone, pair = model.prefill(IDS[:6]), model.prefill([IDS[:6], IDS])
    lost = torch.zeros_like(pair.ledger.padding)
    lost[0, 1:3] = True
    begin = pair.take(torch.tensor([[9] * 4 + [*range(6)], [*range(10)]]), torch.arange(10) < torch.tensor([[4], [0]]))
    gapped = alone.evict(slots=[1, 2])
    for padded, whole in ((pair, alone), (begin, alone), (pair.evict(slots=lost), gapped)):
        for layer in range(3):
            state = state_of(model, whole, layer)
            assert close(state_of(model, padded, layer)[:1], state)


def test_a_row_that_has_ended_writes_nothing_more():
    model, _ = held()
    free = model.generate([IDS[:4], IDS], max_new_tokens=4, stop=()).tokens
    stop = [free[0][0]] if free[0][0] not in free[1] else [free[1][0]]
    ended = model.generate([IDS[:4], IDS], max_new_tokens=4, stop=stop)
    row = 0 if stop[0] == free[0][0] else 1
    assert len(ended.tokens[row]) == 1
    alone = model.prefill([IDS[:4], IDS][row])
    assert close(after(model, ended.cache.rows([row])), after(model, alone))


def test_a_model_says_what_its_layers_store():
    assert "4 layers of 4 heads over writes to a state of 4 heads of 8 × 12 or 2 KV heads of 8" in repr(built())
    assert "4 layers of writes to a state of 4 heads or 2 KV heads" in repr(held()[1])


def test_writes_are_saved(tmp_path: Path):
    model, past = held()
    past.save(tmp_path / "cache.safetensors")
    again = KVCache.load(tmp_path / "cache.safetensors")
    assert all(torch.equal(tensor, same) for tensor, same in zip(again.tensors, past.tensors, strict=True))
    assert close(after(model, again), after(model, past))
    assert past.footprint == past.nbytes


@pytest.mark.parametrize("kind", ["qwen3_next", "bailing_hybrid"])
def test_in_half_precision_a_decay_is_a_whole_float(kind: str):
    plain = tiny(kind).to(torch.bfloat16)
    geometry = Geometry.of(plain)
    past = past_key_values(empty_layers(geometry.parts))
    with torch.no_grad(), writes_noted(recurrent_modules(plain, len(geometry.recurrent))):
        plain(input_ids=torch.tensor([list(IDS.ids)]), past_key_values=past)
    layers = [dict(zip(*layer, strict=True)) for layer in zip(geometry.parts, map(held_by, past.layers), strict=True)]
    assert (layers[0]["decay"].dtype, layers[0]["step"].dtype) == (torch.float32, torch.bfloat16)
    half = KVCache(tuple(layers), held()[1].ledger)
    assert half.footprint == half.nbytes


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1", "nemotron_h"])
def test_layers_that_convolve_or_attend_beside_a_state_or_store_nothing(kind: str, tmp_path: Path):
    model, past = held(kind)
    assert tuple(past.layers[1]) == {"lfm2": CONVOLVED, "falcon_h1": (*KV, *ADDED), "nemotron_h": ()}[kind]
    past.save(tmp_path / "cache.safetensors")
    assert torch.equal(after(model, KVCache.load(tmp_path / "cache.safetensors")), after(model, past))
    other = model.prefill(Tokens.of([5, 9, 44, 17, 40, 8, 21, 60, 12, 3]))
    assert close(after(model, past.patch(other, slots=range(2, 10))), after(model, other))
    # What is read next sees the last two inputs of a convolution, and of a state all that is written.
    near = past.mask(slots=[9], layers=model.geometry.recurrent)
    far = past.mask(slots=[5], layers=model.geometry.recurrent)
    assert not close(after(model, near), after(model, past))
    assert close(after(model, far), after(model, past)) == (kind == "lfm2")


@pytest.mark.parametrize(("kind", "fault"), [("nemotron_h", "gain"), ("falcon_h1", "decay"), ("lfm2", "conv")])
def test_the_gate_sees_a_wrong_state_of_these(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    usual = StateLayer.update_conv_state, recurrent.fold

    def shifted(layer: StateLayer, inputs: Tensor, *args: Any, **settings: Any) -> Tensor:
        inputs = usual[0](layer, inputs, *args, **settings)
        layer.written["conv"] = layer.written["conv"].roll(1, 2)
        return inputs

    def spoilt(writes: Any, *args: Any, **settings: Any) -> Tensor:
        return usual[1]({**writes, fault: 0.9 * writes[fault]}, *args, **settings)

    if fault == "conv":
        monkeypatch.setattr(StateLayer, "update_conv_state", shifted)
    else:
        monkeypatch.setattr(recurrent, "fold", spoilt)
    with pytest.raises(UserError):
        load(tiny(kind)).prefill(IDS)


def test_writes_are_patched_by_their_names():
    model, past = held()
    other = model.prefill(Tokens.of([5, 9, 44, 17, 40, 8, 21, 60, 12, 3]))
    value = past.patch(other, slots=[2], part="value")
    assert [name for name in DELTA if not torch.equal(value.layers[2][name], past.layers[2][name])] == ["value"]
    assert not close(after(model, value), after(model, past))
    everything = past.patch(other, slots=list(range(2, 10)))
    assert close(after(model, everything), after(model, other))


def test_writes_are_captured_as_they_are_stored():
    model, past = held()
    captured = model.capture(IDS, list(DELTA), layers=[0, 2], slots=[1, 4])
    assert all(torch.equal(captured[name, 2], past.layers[2][name][:, :, [1, 4]]) for name in DELTA)
    refused(lambda: model.capture(IDS, ["value"], layers=[3]), "stores K and V, and this needs value")
    refused(lambda: model.capture(IDS, ["state"], layers=[3]), "Layer 3 keeps no state")
    assert {layer for _, layer in model.capture(IDS, ["value"]).tensors} == {0, 1, 2}


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1"])
def test_states_are_captured_after_each_slot_as_they_are_folded_of_what_is_live(kind: str):
    model = built(kind)
    rows = model.prefill([IDS[:5], IDS[1:6]]).mask(slots=[2])
    captured = model.capture([IDS[5:], IDS[5:8]], ["state"], slots=[0, 2], past=rows)
    whole, _ = model.extend(rows, [IDS[5:], IDS[5:8]])
    for layer in model.geometry.recurrent:
        for place, slot in enumerate((5, 7)):
            _, writes = slots_and_writes({name: part[:, :, : slot + 1] for name, part in whole.layers[layer].items()})
            state = fold(writes, keep=whole.ledger.live[0, :, 0, : slot + 1])
            assert close(captured["state", layer][:, :, place], state.flatten(2))


def test_a_flipped_bit_of_a_write_lives_on_in_the_state_and_leaves_with_its_slot():
    model, past = held()
    flip = BitFlips(bit=31, scope=Scope(parts="value", layers=[2], slots=[7], count=1, unit="number"))
    struck = past.corrupt(flip)
    changed = {(number, name) for number, layer in enumerate(past.layers) for name in layer
               if not torch.equal(layer[name], struck.layers[number][name])}  # fmt: skip
    assert changed == {(2, "value")}
    assert struck.layers[2]["value"].ne(past.layers[2]["value"]).nonzero()[:, 2].tolist() == [7]
    # Attention does not see its slot any longer, and still it moves what is read next.
    seen, unseen = ([cache.mask(slots=[7], layers=[3]) for cache in (one, past)] for one in (
        past.corrupt(replace(flip, scope=replace(flip.scope, parts="k", layers=[3]))), struck))  # fmt: skip
    assert close(*(after(model, cache) for cache in seen))
    assert not close(*(after(model, cache) for cache in unseen))
    far, expected = (fold(model.extend(cache, [NEXT])[0].layers[2]) for cache in unseen)
    assert not close(far, expected)
    assert torch.equal(after(model, struck.mask(slots=[7])), after(model, past.mask(slots=[7])))


def test_faults_name_parts_that_layers_store_and_heads_where_these_agree():
    _, past = held()
    assert not any(layer["step"][:, :, 2:4].any() for layer in past.corrupt(
        Zeros(scope=Scope(parts="step", slots=[2, 3]))).layers[:3])  # fmt: skip
    refused(lambda: past.corrupt(Zeros(scope=Scope(parts="latent"))), "No layer", "key, value, decay, step, conv, K, V")
    refused(lambda: past.corrupt(PositionShift(2, scope=Scope(parts="key"))), "rotates K")
    refused(lambda: past.corrupt(OverlappingKV(scope=Scope(parts="key"))), "needs K", "strikes key")
    differing = load(tiny("mimo_v2_flash")).prefill(IDS)
    refused(lambda: differing.corrupt(Zeros(scope=Scope(unit="head"))), "differ in the heads of K and V")
    assert not differing.corrupt(Zeros(scope=Scope(slots=[1]))).layers[1]["K"][:, :, 1].any()


def test_what_needs_attention_in_every_layer_is_refused_by_name():
    model, past = held()
    refused(lambda: past.keys, "stores key and value and decay and step and conv, and this needs K")
    refused(lambda: past.mask(slots=[1], heads=[0]), "keep states, whose heads are others")
    refused(lambda: model.prefill(IDS, lane="hooked"), "recurrent layers", "lane='plain'")
    refused(lambda: load(tiny("minimax")), "a recurrence that kvprobe knows")


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "falcon_h1", "nemotron_h"])
def test_attention_of_the_layers_that_attend_is_shown_by_their_numbers(kind: str):
    """The reference is the library's own eager attention."""
    model, past = held(kind)
    computed = eager_attention(model.lanes.plain, IDS.ids)
    shown = attend(model, IDS, queries=[4, -1], chunk=3)
    assert shown.layers == {"falcon_h1": (0, 1, 2, 3), "nemotron_h": (2,)}.get(kind, (3,))
    expected = [layer[0, :, [4, 9]] for layer in computed if layer is not None and layer.dim() == 4]
    assert torch.allclose(shown.weights, torch.stack(expected), atol=1e-5)
    assert shown.value_norms.shape == shown.live.shape == (*shown.weights.shape[:2], 10)
    masked = attend(model, NEXT, past.mask(slots=[4, 5], layers=shown.layers[-1:]))
    assert float(masked.mass(slots=[4, 5])[-1].abs().max()) == 0
    assert (float(masked.mass(slots=[4, 5]).max()) > 0) == (len(shown.layers) > 1)
    silent = [number for number in range(past.n_layers) if number not in shown.layers]
    unseen = f"do not attend: {', '.join(map(str, silent))}" if silent else "keep a state beside: 0, 1, 2, 3"
    assert shown.unseen == f"Layers that {unseen}."
    assert shown.unseen in patterns_view(shown).caption
    if silent:
        refused(lambda: attend(model, IDS, layers=silent[:1]), f"no attention of layers [{silent[0]}]")


@pytest.mark.parametrize(("kind", "policy"), [("qwen3_next", "H2O(6)"), ("lfm2", "TOVA(6)"), ("nemotron_h", "TOVA(6)")])
@pytest.mark.filterwarnings("ignore:What is hidden holds slot 0")
def test_scores_are_of_the_layers_that_attend_and_the_others_lose_what_none_of_these_keeps(kind: str, policy: str):
    model, past = held(kind)
    shown = attend(model, IDS, queries=range(10))
    scores = (shown.weights.sum(2) if policy == "H2O(6)" else shown.weights[:, :, -1]).mean(1)
    scores[:, 7:] += 100 * (policy == "H2O(6)")
    live = torch.zeros(past.n_layers, 10, dtype=torch.bool)
    live[list(shown.layers)] = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(6).indices, True)
    live[[number for number in range(past.n_layers) if number not in shown.layers]] = live.any(0)
    assert kind != "lfm2" or len({int(layer.sum()) for layer in live}) == 2
    expected = past.evict(slots=(~live.any(0))[None])
    for layer, kept in enumerate(live[:, live.any(0)]):
        expected = expected.mask(slots=~kept[None], layers=[layer])
    actual = model.prefill(IDS, policy=policy)
    assert torch.equal(actual.ledger.tokens, expected.ledger.tokens)
    assert torch.equal(*torch.broadcast_tensors(actual.ledger.live, expected.ledger.live))
    assert close(after(model, actual), after(model, expected))
    if silent := [number for number in range(past.n_layers) if number not in shown.layers]:
        # What was hidden from attention alone before stays in the states.
        hidden = past.mask(slots=[1, 2], layers=shown.layers)
        ghost = model.apply(policy, model.watch(IDS, queries=1).with_cache(hidden)).ledger
        assert {*IDS.ids[1:3]} <= {*ghost.tokens[0, ghost.live[silent].all((0, 1, 2))].tolist()}


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "nemotron_h", "lfm2"])
def test_states_go_out_to_transformers_and_come_in_again(kind: str):
    model, past = held(kind)
    plain = model.lanes.plain
    for mine in (past, past.evict(slots=[2, 5]).reindex()):
        for run in (NEXT[:1], NEXT):
            with torch.no_grad():
                places = torch.arange(mine.slots, mine.slots + len(run))[None]
                given = {"position_ids": places, "past_key_values": model.to_hf(mine)}
                logits = plain(torch.tensor([run.ids]), **given).logits
            expected = model.extend(mine, [run.shifted(mine.slots)], logits=len(run))[1]
            assert close(logits, expected)
    theirs = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(torch.tensor([IDS.ids]), past_key_values=theirs)
    assert all(close(one, other) for one, other in zip(model.from_hf(theirs, IDS).tensors, past.tensors, strict=True))
    number = model.geometry.recurrent[-1]
    layer: Any = theirs.layers[number]
    state = layer.conv_states if kind == "lfm2" else layer.recurrent_states
    kept = "convolution" if kind == "lfm2" else "delta rule" if kind == "qwen3_next" else "Mamba-2"
    rows = state[0].shape[2]
    most = floor_of_dtype(torch.float32, kept).allowed("state", number / (past.n_layers - 1), rows)
    state[0] *= 1 + 0.7 * most
    model.from_hf(theirs, IDS)
    state[0] *= 1 + 0.7 * most
    refused(lambda: model.from_hf(theirs, IDS), "is not that of the tokens")
    refused(lambda: model.from_hf(DynamicCache(config=plain.config), IDS), "is empty")
    refused(lambda: model.to_hf(past.mask(slots=[4])), "evict what is hidden")


def spoilt_decay(writes: Any, *args: Any, **settings: Any) -> Tensor:
    return fold({**writes, "decay": 0.9 * writes["decay"]}, *args, **settings)


def deaf_to_masks(writes: Any, start: Any = None, keep: Any = None, **settings: Any) -> Tensor:
    return fold(writes, start, **settings)


def not_reset(writes: Any, *args: Any, **settings: Any) -> Tensor:
    return fold(writes, *args, **settings) + 0.01


def other_heads(writes: Any, *args: Any, **settings: Any) -> Tensor:
    return fold({**writes, "key": writes["key"].flip(1)}, *args, **settings)


@pytest.mark.parametrize("fault", [spoilt_decay, deaf_to_masks, not_reset, other_heads])
def test_the_gate_sees_a_wrong_state(fault: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent, "fold", fault)
    with pytest.raises(UserError):
        load(tiny("qwen3_next")).prefill(IDS)


def test_the_gate_sees_a_convolution_that_remembers_hidden_tokens(monkeypatch: pytest.MonkeyPatch):
    def all_inputs(inputs: Tensor, live: Tensor, count: int) -> Tensor:
        return recurrence.last_inputs(inputs, torch.ones_like(live), count)

    monkeypatch.setattr(recurrent, "last_inputs", all_inputs)
    with pytest.raises(UserError):
        load(tiny("qwen3_next")).prefill(IDS)


def test_a_model_without_any_attention_is_read_handed_over_budgeted_and_examined():
    """transformers asks its own cache of such a model for a length that no layer knows."""
    model = load(tiny("qwen3_next", layer_types=["linear_attention"] * 4))
    assert (model.geometry.attending, model.geometry.recurrent) == ((), (0, 1, 2, 3))
    past = model.prefill(IDS)
    plain = model.lanes.plain
    with torch.no_grad():
        output: Any = plain(torch.tensor([NEXT.ids]), **{CACHE: model.to_hf(past)})
    assert close(output.logits, after(model, past))
    assert close(after(model, past.mask(slots=[2, 5])), after(model, past.evict(slots=[2, 5])))
    assert all(check.passed for check in examine(model))
    library: Any = library_cache(plain.config)
    plain(torch.tensor([IDS.ids]), **{CACHE: library})
    kept = [states for layer in library.layers for states in (layer.conv_states, layer.recurrent_states)]
    assert model.budget(context=len(IDS)).cache == sum(tensor.nbytes for states in kept for tensor in states.values())
