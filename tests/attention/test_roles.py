"""Roles of heads that were built by hand, so that we know them, and of SmolLM2's on the other lane."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvprobe.attention import THRESHOLDS, attend, roles
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model, load
from kvprobe.tasks.needle import Needle
from kvprobe.tasks.task import prompt
from kvprobe.text.tokens import Tokens
from tests.refusals import refused

VOCABULARY, D_HEAD, CONSTANT, BEFORE = 32, 64, 32, 64
STILL = [*range(16, 32), *range(48, 64)]
"""Numbers of a head that hardly turn with position (the slow half of the frequencies): what tokens are matched by."""


def by_hand() -> Model:
    """Two layers of attention and nothing else.

    The residual stream holds the token (one-hot, 0–31), a constant (32), and the token before (64–95), which head 0 of
    layer 0
    writes: a previous-token head, by the fast half of the rotary frequencies. Head 1 of layer 0 looks for the same
        token, and
    head 0 of layer 1 for this token among the tokens before: an induction head. Head 1 of layer 1 looks nowhere.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2 * D_HEAD, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        head_dim=D_HEAD, rope_parameters={"rope_type": "default", "rope_theta": 1e9}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    plain = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        plain.model.embed_tokens.weight[:, :VOCABULARY] = torch.eye(VOCABULARY)
        plain.model.embed_tokens.weight[:, CONSTANT] = 1
        first, second = (layer.self_attn for layer in plain.model.layers)
        # cos((i − j − 1)θ) is greatest where the key stands one before: the query is a key turned back by one.
        frequencies = 1e9 ** (-torch.arange(D_HEAD // 2) / (D_HEAD // 2))[:16]
        matrix(first.k_proj, 0)[:16, CONSTANT] = 4
        matrix(first.q_proj, 0)[:16, CONSTANT] = 4 * frequencies.cos()
        matrix(first.q_proj, 0)[32:48, CONSTANT] = -4 * frequencies.sin()
        matrix(first.v_proj, 0)[:VOCABULARY, :VOCABULARY] = torch.eye(VOCABULARY)
        first.o_proj.weight[BEFORE : BEFORE + VOCABULARY, :VOCABULARY] = torch.eye(VOCABULARY) / 8
        for projection in (first.q_proj, first.k_proj):
            matrix(projection, 1)[STILL, :VOCABULARY] = 2 * torch.eye(VOCABULARY)
        matrix(second.q_proj, 0)[STILL, :VOCABULARY] = 2 * torch.eye(VOCABULARY)
        matrix(second.k_proj, 0)[STILL, BEFORE : BEFORE + VOCABULARY] = 2 * torch.eye(VOCABULARY)
    return load(plain)


def matrix(projection: Any, head: int) -> nn.Parameter:
    """The rows of one head."""
    return projection.weight[head * D_HEAD : (head + 1) * D_HEAD]


def test_heads_built_by_hand_have_their_roles():
    table = roles(by_hand(), needles=0)
    had = table[table["has"]].set_index(["layer", "head"])["role"].to_dict()
    assert had == {(0, 0): "previous", (0, 1): "duplicate", (1, 0): "induction"}
    scores = table.set_index(["layer", "head", "role"])["score"]
    assert scores[0, 0, "previous"] > 0.95
    assert scores[1, 0, "induction"] > 0.95


def test_scores_agree_with_a_loop_over_queries(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    recorded: list[tuple[Tokens, Tensor]] = []

    def hooked_attend(model: Model, tokens: Tokens, **settings: Any) -> Any:
        patterns = attend(model, tokens, lane="hooked", **settings)
        recorded.append((tokens, patterns.weights))
        return patterns

    monkeypatch.setattr("kvprobe.attention.head_roles.attend", hooked_attend)
    table = roles(tiny_llama, seed=3, length=5, copies=3, sequences=2, needles=0).set_index(["role", "layer", "head"])
    assert len(recorded) == 2
    assert {len(tokens) for tokens, _ in recorded} == {15}
    ways: dict[str, Callable[[tuple[int, ...], int, int], bool]] = {
        "sink": lambda ids, query, slot: slot == 0,
        "previous": lambda ids, query, slot: slot == query - 1,
        "duplicate": lambda ids, query, slot: slot < query and ids[slot] == ids[query],
        "induction": lambda ids, query, slot: 0 < slot <= query and ids[slot - 1] == ids[query],
    }
    first = {"sink": 0, "previous": 1, "duplicate": 5, "induction": 5}
    for role, looks in ways.items():
        for layer in range(3):
            for head in range(4):
                spent = [
                    sum(
                        float(weights[layer, head, query, slot]) for slot in range(15) if looks(tokens.ids, query, slot)
                    )
                    for tokens, weights in recorded
                    for query in range(first[role], 15)
                ]
                assert table["score"][role, layer, head] == pytest.approx(sum(spent) / len(spent), abs=1e-5)


def test_roles_depend_on_the_seed_alone(tiny_llama: Model):
    settings: dict[str, Any] = {"length": 5, "sequences": 1, "needles": 0}
    first, again, other = (roles(tiny_llama, seed=seed, **settings) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(first, again)
    assert not first.equals(other)


def test_a_retrieval_score_is_the_share_of_copied_tokens_whose_source_a_head_looks_at(smol: Model):
    table = roles(smol, seed=1, length=3, copies=2, sequences=1, needles=1)
    scores = table[table["role"] == "retrieval"].pivot(index="layer", columns="head", values="score").to_numpy()
    hits, copied = torch.zeros(30, 9), 0
    for item in Needle().items(1, seed=1):
        asking = prompt(item, smol.tokenizer)
        answer = generate(smol.lanes, [asking], max_new_tokens=Needle().max_new_tokens).tokens[0]
        source = asking.part("source")
        whole = asking + Tokens.of(answer[:-1], "answer", asking.following)
        patterns: list[Tensor] = []
        with smol.lanes.hooked.observing_patterns(lambda layer, pattern, kept=patterns: kept.append(pattern[0])):
            smol.extend(None, whole, lane="hooked")
        for step, token in enumerate(answer):
            if token in asking.ids[source]:
                copied += 1
                for layer, pattern in enumerate(patterns):
                    for head, slot in enumerate(pattern[:, len(asking) - 1 + step].argmax(-1).tolist()):
                        hits[layer, head] += source.start <= slot < source.stop and whole.ids[slot] == token
    assert copied >= 3
    assert torch.allclose(torch.tensor(scores), hits / copied)
    assert (scores >= THRESHOLDS["retrieval"]).mean() < 0.25


def test_without_a_tokenizer_or_a_copy_there_is_no_retrieval_score(tiny_llama: Model):
    for model, needles in ((load(tiny_llama.lanes.plain), 1), (tiny_llama, 0)):
        table = roles(model, length=3, sequences=1, needles=needles)
        retrieval = table[table["role"] == "retrieval"]
        assert retrieval["score"].isna().all()
        assert not retrieval["has"].any()


def test_impossible_sequences_are_refused(tiny_llama: Model):
    refused(lambda: roles(tiny_llama, copies=1), "at least 2, 2, 1 and 0")
    refused(lambda: roles(tiny_llama, length=65), "ask for fewer")
