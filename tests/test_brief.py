"""What results show of themselves at the end of a notebook's cell: little, and nothing that a browser would run."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe as kv
from kvprobe.attention.contributions import contribution
from kvprobe.brief import MOST_ROWS, brief, table_html
from kvprobe.inference.model import Model
from kvprobe.names import full_repr
from kvprobe.probes.card import ProbeInput
from kvprobe.tasks.designs import Design, Target
from tests.models import tiny_tokenizer
from tests.probes.made_probes import made_probe
from tests.probing.test_claims import planted, probe_features

HOSTILE = "<script>alert('a')</script>"
LONG = 120
"""Turns of a conversation with more tokens than anyone wants to see in a repr."""


def conversation(turns: int) -> kv.Transcript:
    messages = [{"role": "user", "content": f"the shed has <b>28</b>. {turn}"} for turn in range(turns)]
    return kv.Transcript.from_messages(messages, [HOSTILE, *(f"m{turn}" for turn in range(1, turns))])


@pytest.fixture(scope="module")
def results(tiny_models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Instances of every public class, by its name, and what public functions return that is none of them."""
    model, chat = tiny_models["llama"], conversation(4)
    long = conversation(LONG).tokens(tiny_tokenizer())
    tokens = chat.tokens(tiny_tokenizer())
    cache, other = model.prefill(tokens), model.prefill(kv.Tokens.of(tokens.ids[::-1], HOSTILE))
    unnamed = model.prefill(kv.Tokens.of(tokens.ids, HOSTILE))
    masked = cache.mask("m1").mask("m2", layers=[0]).evict(slots=[3, 4])
    patched = kv.patch_sweep(model, unnamed, other, "a mill", kv.LogitDiff(5, 9), ("layer", "slot"), progress=False)
    pair = kv.Pair(unnamed, other, "a mill", kv.LogitDiff(5, 9))
    trials = [kv.Trial(kv.faults.Gaussian(scale=100.0)), kv.Trial(kv.faults.Gaussian(scale=0.01), 1)]
    sample = kv.Sample(chat, (0,), HOSTILE)
    target = Target(HOSTILE, ("a", "b"))
    policy = kv.policies.SinkWindow(2, 20)
    generation = model.generate(tokens, max_new_tokens=4, policy=policy)
    budget = kv.budget("smollm2-135m", context=64, dtype="float32")
    features, _ = planted("shared", 3.0)
    made = made_probe(model, ProbeInput("v", 2, None, "mean"))
    named: dict[str, list[Any]] = {
        "KL": [kv.KL()],
        "Attribution": [kv.attribute(model, unnamed, other, "a mill", kv.LogitDiff(5, 9), check=4)],
        "Budget": [budget],
        "Captured": [model.capture(tokens, ["v", "resid_post"], keep_cache=True)],
        "CommonPrefix": [kv.common_prefix(model.tokenizer, chat, chat)],
        "Comparison": [kv.compare(model, chat, ["m1"], HOSTILE, max_new_tokens=2)],
        "Design": [Design((sample,) * LONG, target)],
        "Generation": [generation, model.generate([long, tokens], max_new_tokens=2)],
        "HiddenSecret": [kv.HiddenSecret(chat, ("m1",), "28</b>. 1")],
        "KVCache": [cache, masked, masked.fork(3), model.prefill(long), model.prefill([long, tokens])],
        "LayerMap": [kv.layer_map(model, unnamed, other, "a mill", progress=False)],
        "Ledger": [masked.ledger, model.prefill([long, tokens]).ledger],
        "LogProb": [kv.LogProb(tuple(range(LONG * 10)))],
        "LogitDiff": [kv.LogitDiff(5, 9)],
        "Measured": [kv.measure(model, model.budget(context=8))],
        "Message": [kv.Message("user", (kv.Part("long " * 1000),), HOSTILE)],
        "Model": [model],
        "Pair": [pair],
        "PairMaps": [kv.patch_pairs(model, [pair, pair], progress=False)],
        "Part": [kv.Part("long " * 1000, HOSTILE)],
        "PatchMap": [patched],
        "Patterns": [kv.attend(model, tokens, queries=[HOSTILE, "m1"])],
        "Probe": [made],
        "Probing": [probe_features(features, {}, permutations=0, rng=np.random.default_rng(0))],
        "Run": [kv.Run(tmp_path_factory.mktemp("run"))],
        "Sample": [sample],
        "Scene": [model.watch(long), kv.Scene(masked)],
        "Snapshot": [generation.trace[0]],
        "Sweep": [model.sweep(tokens, trials * LONG, max_new_tokens=2)],
        "Target": [target, Target("code", tuple(map(str, range(1000))))],
        "Tokens": [tokens, long],
        "Transcript": [chat, conversation(LONG).without("m1")],
        "Trial": trials,
        "UserError": [kv.UserError("short")],
    }
    named["Subspace"] = [kv.erasing.Subspace.spanned(torch.eye(200))]
    named["Contribution"] = [contribution(model, named["Patterns"][0], [0, 1])]
    named["Scan"] = [kv.scan(model, kv.Transcript.from_messages(MESSAGES), ["m1"], [made])]
    return named


MESSAGES = [
    {"role": role, "content": text}
    for role, text in zip(
        ["system", *["user", "assistant"] * 2], ["be kind.", *["a shed <b>", "a mill"] * 2], strict=True
    )
]


def test_every_public_class_is_shown_in_under_1000_characters(results: dict[str, list[Any]]):
    classes = {name for name in kv.__all__ if inspect.isclass(getattr(kv, name))}
    assert classes <= set(results)
    for name, instances in results.items():
        for instance in instances:
            assert repr(instance).startswith(name), name
            assert len(repr(instance)) < 1000, (name, repr(instance))
            assert "tensor(" not in repr(instance), name


def test_html_of_a_result_is_escaped_and_bounded(results: dict[str, list[Any]]):
    tables = set()
    for name, instances in results.items():
        for instance in instances:
            html = getattr(instance, "_repr_html_", lambda: None)()
            if html is not None:
                tables.add(name)
                assert "<script" not in html, name
                assert "<b>" not in html, name
                assert len(html) < 100_000, name
    expected = {
        "Comparison",
        "KVCache",
        "Ledger",
        "Tokens",
        "Transcript",
        "Generation",
        "PatchMap",
        "PairMaps",
        "Attribution",
    }
    assert expected | {"LayerMap", "Patterns", "Probe", "Probing", "Scan", "Sweep", "Budget", "Measured"} == tables


def test_a_cache_says_its_shape_its_segments_with_what_is_live_and_its_model(tiny_llama: Model):
    tokens = conversation(4).tokens(tiny_tokenizer())
    cache = tiny_llama.prefill(tokens).mask("m1").mask("m2", layers=[0])
    count = {name: tokens.segments.count(name) for name in tokens.names}
    assert repr(cache) == (
        f"KVCache(1 × {len(tokens)} slots, segments: {HOSTILE} {count[HOSTILE]}, m1 {count['m1']} masked, "
        f"m2 {count['m2']} 67% live, m3 {count['m3']}, 3 layers of 2 KV heads, float32, of LlamaForCausalLM)"
    )
    assert cache.mask("m3").ledger._repr_html_() != cache.ledger._repr_html_()


def test_values_are_shown_in_short():
    assert brief(torch.zeros(2, 3)) == "float32[2, 3]"
    assert brief(pd.DataFrame({"a": [1, 2]})) == "table of 2 rows × 1 columns"
    assert brief([1] * 9) == "[1, 1, 1, 1, … 9 in all]"
    assert brief({"a": (1,)}) == "{'a': (1,)}"
    assert len(brief("a" * 1000)) == 200
    html = table_html(["<i>"], [["<b>"]] * (MOST_ROWS + 3))
    assert html.count("&lt;b&gt;") == MOST_ROWS
    assert "3 more rows" in html
    assert "<i>" not in html


def test_the_full_repr_of_plain_data_leaves_nothing_out():
    chat = conversation(2)
    assert full_repr(chat.messages[1]) == (
        "Message(role='user', parts=(Part(text='the shed has <b>28</b>. 1', name=None),), segment='m1', "
        "fields={}, typed=False)"
    )
    assert full_repr((1, [Path("a")])) == f"(1, [{Path('a')!r}])"
    long = conversation(LONG)
    assert full_repr(long) != full_repr(kv.Transcript(long.messages[:-1]))
