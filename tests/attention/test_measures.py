"""Dangling attention, lift and contributions, against loops and against the model's own modules."""

from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.attention import LOOKS, Patterns, attend, contribution, dangling, lift, looks, shared_out, written
from kvprobe.cache.cache import KVCache
from kvprobe.faults import Scope, Zeros
from kvprobe.inference.model import Model, load
from kvprobe.text.tokens import Tokens
from tests.attention.test_patterns import HISTORIES, PROMPT, SUFFIX, onwards
from tests.models import every
from tests.random_caches import random_tokens
from tests.refusals import refused

PARTS = ["sink", "summary", "local", "elsewhere"]


def patterns(model: Model, past: KVCache, **settings: Any) -> Patterns:
    return attend(model, onwards(past), past, **{"queries": "answer", **settings})


def by_loop(before: Patterns, after: Patterns, local: int) -> dict[tuple[int, int], dict[str, float]]:
    """T1 masked somewhere, the summary standing in; the first slot is the sink."""
    ledger = after.cache.ledger
    segments = [ledger.names[number] for number in ledger.segments[0].tolist()]
    layers, heads, queries, slots = before.weights.shape
    expected = {}
    for layer in range(layers):
        for head in range(heads):
            row = dict.fromkeys(["dangling", *PARTS], 0.0)
            for query in range(queries):
                for slot in range(slots):
                    weight = float(before.weights[layer, head, query, slot])
                    gain = float(after.weights[layer, head, query, slot]) - weight
                    seen = ledger.live.expand(layers, 1, 2, slots)[layer, 0, head // (heads // 2), slot]
                    if segments[slot] == "T1" and not seen:
                        row["dangling"] += weight / queries
                    elif slot == 0:
                        row["sink"] += gain / queries
                    elif segments[slot] == "summary":
                        row["summary"] += gain / queries
                    elif 0 <= int(before.queries[query]) - slot < local:
                        row["local"] += gain / queries
                    else:
                        row["elsewhere"] += gain / queries
            expected[layer, head] = row
    return expected


@pytest.mark.parametrize("where", [{}, {"layers": [0, 2], "heads": [1]}])
def test_the_softmax_alone_shares_attention_out_in_proportion(tiny_llama: Model, where: dict[str, Any]):
    past = tiny_llama.prefill(PROMPT)
    before, after = patterns(tiny_llama, past), patterns(tiny_llama, past.mask("T1", **where))
    shared = shared_out(before, after, ["T1"])
    assert torch.allclose(shared.weights.sum(-1), torch.ones(()), atol=1e-5)
    gone = (before.weights * ~after.live[:, :, None]).sum(-1)
    assert float(gone.max()) > 0.01
    assert torch.allclose(shared.mass("summary") * (1 - gone), before.mass("summary"), atol=1e-5)
    # In the first layer no score can have changed: there it is what masking does, as eviction does.
    assert torch.allclose(shared.weights[0], after.weights[0], atol=1e-5)
    evicted = patterns(tiny_llama, past.evict("T1"))
    assert torch.allclose(shared_out(before, evicted, ["T1"]).weights[0], evicted.weights[0], atol=1e-5)


@pytest.mark.parametrize("where", [{}, {"layers": [1]}, {"layers": [0, 2], "heads": [1]}])
def test_dangling_agrees_with_a_loop_over_all_slots(tiny_llama: Model, where: dict[str, Any]):
    past = tiny_llama.prefill(PROMPT)
    before, after = patterns(tiny_llama, past), patterns(tiny_llama, past.mask("T1", **where))
    table = dangling(before, after, ["T1"], summary=["summary"], local=5)
    expected = by_loop(before, after, local=5)
    for row in table.to_dict("records"):
        for name, number in expected[row["layer"], row["head"]].items():
            assert row[name] == pytest.approx(number, abs=1e-5), name
    assert table["dangling"].max() > 0.1


def test_gains_of_the_groups_add_up_to_dangling_attention(tiny: Model):
    past = tiny.prefill(PROMPT)
    before = patterns(tiny, past)
    for after in (past.mask("T1"), past.evict("T1"), past.mask("T1", layers=[1], heads=[0])):
        table = dangling(before, patterns(tiny, after), ["T1"], summary=["summary"], local=4)
        assert table[PARTS].sum(axis=1).to_numpy() == pytest.approx(table["dangling"].to_numpy(), abs=1e-5)
        assert (table["dangling"] >= 0).all()


def test_eviction_and_masking_move_attention_alike(tiny: Model):
    past = tiny.prefill(PROMPT)
    before = patterns(tiny, past)
    masked, evicted = (
        dangling(before, patterns(tiny, after), ["T1"], summary=["summary", "T2"], sinks=2)
        for after in (past.mask("T1"), past.evict("T1"))
    )
    assert np.allclose(masked, evicted, atol=1e-5)


def test_the_sink_is_the_first_slot_that_is_left(tiny_llama: Model):
    past = tiny_llama.prefill(PROMPT)
    before, after = patterns(tiny_llama, past), patterns(tiny_llama, past.mask("system"))
    table = dangling(before, after, ["system"])
    gained = (after.weights - before.weights)[..., 4].mean(-1).flatten()
    assert table["sink"].to_numpy() == pytest.approx(gained.numpy(), abs=1e-6)


def test_patterns_of_different_runs_are_refused(tiny_llama: Model):
    past = tiny_llama.prefill(PROMPT)
    before = patterns(tiny_llama, past)
    other = tiny_llama.prefill(random_tokens(9, {"system": 4, "T1": 7, "summary": 5, "T2": 6}))
    refused(lambda: dangling(before, patterns(tiny_llama, other.mask("T1")), ["T1"]), "without T1")
    refused(lambda: dangling(before, patterns(tiny_llama, past.evict("T2")), ["T1"]), "without T1")
    masked = past.mask("T1")
    refused(lambda: dangling(before, patterns(tiny_llama, masked, queries="ask"), ["T1"]), "different layers")
    refused(lambda: dangling(before, patterns(tiny_llama, masked, layers=[0]), ["T1"]), "different layers")
    refused(lambda: dangling(before, patterns(tiny_llama, masked), ["T11"]), "'T1'")
    refused(lambda: lift(patterns(tiny_llama, past.evict("T1")), before, [5]), "different positions")
    refused(lambda: lift(before, before, [0, 5]), "are the sink")
    refused(lambda: lift(before, before, [99]), "once each")


# ---- lift


def test_lift_is_the_ratio_of_attention_shares_without_the_sink(tiny_llama: Model):
    clean = tiny_llama.prefill(PROMPT)
    damaged = clean.patch(tiny_llama.prefill(random_tokens(9, {"x": 22})), "T1")
    damaged_patterns, clean_patterns = patterns(tiny_llama, damaged), patterns(tiny_llama, clean)
    table = lift(damaged_patterns, clean_patterns, range(4, 11))
    for layer, head in ((0, 0), (2, 3)):
        shares = [
            np.mean([float(row[4:11].sum()) / (1 - float(row[0])) for row in side.weights[layer, head]])
            for side in (damaged_patterns, clean_patterns)
        ]
        row = table.query(f"layer == {layer} and head == {head}").iloc[0]
        assert [row["damaged"], row["clean"], row["lift"]] == pytest.approx([*shares, shares[0] / shares[1]], rel=1e-4)


def test_lift_is_one_without_damage_and_nan_for_hidden_slots(tiny_llama: Model):
    past = tiny_llama.prefill(PROMPT)
    same = lift(patterns(tiny_llama, past), patterns(tiny_llama, past), range(4, 11))
    assert (same["lift"] == 1).all()
    hidden = patterns(tiny_llama, past.mask("T1"))
    assert lift(hidden, hidden, range(4, 11))["lift"].isna().all()


# ---- contributions


def outputs_before_bias(model: Model, past: KVCache, text: Tokens) -> list[torch.Tensor]:
    """What each layer's output projection gives out for the queries, less its bias."""
    outputs: list[torch.Tensor] = []

    def record(module: Any, args: Any, output: torch.Tensor) -> None:
        bias = getattr(module, "bias", None)
        outputs.append(output[0] if bias is None else output[0] - bias)

    named = dict(model.lanes.plain.named_modules())
    ends = (".o_proj", ".attn.c_proj", ".attention.dense")
    handles = [named[name].register_forward_hook(record) for name in named if name.endswith(ends)]
    model.extend(past, text)
    for handle in handles:
        handle.remove()
    return outputs


@pytest.mark.parametrize("history", ["untouched", "holes", "evicted"])
def test_contributions_of_all_slots_and_heads_sum_to_the_attention_output(tiny: Model, history: str):
    past = HISTORIES[history](tiny.prefill(PROMPT))
    patterns_after = attend(tiny, onwards(past), past, queries=range(len(SUFFIX)))
    outputs = outputs_before_bias(tiny, past, onwards(past))
    assert len(outputs) == 3
    for layer, output in enumerate(outputs):
        parts = written(tiny, patterns_after, range(patterns_after.cache.slots), layer)
        assert torch.allclose(parts.sum(0), output, atol=1e-5)
        halves = [
            written(tiny, patterns_after, slots, layer) for slots in (range(6), range(6, patterns_after.cache.slots))
        ]
        assert torch.allclose(halves[0] + halves[1], parts, atol=1e-6)


def test_contributions_are_norms_relative_to_the_whole_output(tiny: Model):
    past = tiny.prefill(PROMPT)
    patterns_after = attend(tiny, onwards(past), past, queries="answer", layers=[2, 1])
    share = contribution(tiny, patterns_after, patterns_after.slots("T1"))
    outputs = outputs_before_bias(tiny, past, onwards(past))
    for place, layer in enumerate((2, 1)):
        part = written(tiny, patterns_after, patterns_after.slots("T1"), layer)
        whole = outputs[layer][-4:].norm(dim=-1)
        assert torch.allclose(share.heads[place], part.norm(dim=-1) / whole, rtol=1e-4)
        assert torch.allclose(share.layers[place], part.sum(0).norm(dim=-1) / whole, rtol=1e-4)
    of_all_slots = contribution(tiny, patterns_after, range(patterns_after.cache.slots))
    assert torch.allclose(of_all_slots.layers, torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("kind", ["afmoe", "bitnet"])
def test_what_heads_write_through_a_gate_or_a_norm_is_refused(kind: str):
    model = load(every.tiny(kind))
    patterns_after = attend(model, Tokens.of([1, 2, 3, 4]))
    refused(lambda: written(model, patterns_after, [0], 0), "before it is multiplied with W_O")


def test_dangling_takes_a_padded_row_of_a_batch(tiny_llama: Model):
    past = tiny_llama.prefill([PROMPT[:-3], PROMPT]).rows([0])
    alone = tiny_llama.prefill(PROMPT[:-3])
    ours, theirs = (
        dangling(patterns(tiny_llama, cache), patterns(tiny_llama, cache.evict("T1")), ["T1"], summary=["summary"])
        for cache in (past, alone)
    )
    assert ours["dangling"].to_numpy() == pytest.approx(theirs["dangling"].to_numpy(), abs=1e-5)


def test_contributions_of_layers_that_were_not_read_are_refused(tiny_llama: Model):
    patterns_after = attend(tiny_llama, PROMPT, layers=[1])
    refused(lambda: written(tiny_llama, patterns_after, [1], 0), "of layers [1], not of 0")


def test_looks_of_heads_are_attention_lift_and_contribution_of_the_damaged_slots(tiny_llama: Model):
    clean = tiny_llama.prefill(PROMPT)
    slots = torch.tensor([5, 6, 9])
    damaged, suffix = clean.corrupt(Zeros(scope=Scope(slots=slots.tolist(), parts="v"))), onwards(clean)
    table: Any = looks(tiny_llama, suffix, clean, damaged, slots)
    after = attend(tiny_llama, suffix, damaged, queries=range(len(suffix)))
    assert list(table.columns) == ["layer", "head", *sorted(LOOKS, key=["lift", "mass", "contribution"].index)]
    assert table["mass"].to_numpy() == pytest.approx(after.mass(slots=slots).mean(-1).flatten().numpy())
    # Scores of the first layer do not depend on V, and zeros have nothing to be read.
    assert table["lift"].to_numpy()[:4] == pytest.approx([1.0] * 4, abs=1e-4)
    assert table["contribution"].max() == pytest.approx(0, abs=1e-6)
