"""Restored components against TransformerLens hooks, and against models of which we know what each part does."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.faults import NotANumber, Scope
from kvprobe.inference.model import Model
from kvprobe.layers import Component, LayerMap, Outputs, by_chance, layer_map, restored_together, states, verdicts
from kvprobe.layers.suffix import Suffix
from kvprobe.stats import FEWEST
from kvprobe.text.tokens import Tokens
from tests.refusals import refused

COUNT, KEPT = 12, 3
SUFFIX = [7, 3, 11, 5]


def ids(seed: int) -> list[int]:
    return torch.randint(2, 60, (COUNT,), generator=torch.Generator().manual_seed(seed)).tolist()


def cache_of(model: Model, seed: int) -> KVCache:
    return model.prefill(Tokens.of(ids(seed), "T1"))


def suffix_of(cache: KVCache) -> Tokens:
    return Tokens.of(SUFFIX, "question", int(cache.ledger.following[0]))


def divergence(clean: Tensor, other: Tensor) -> float:
    """KL(clean ‖ other), the mean over the last tokens."""
    clean, other = (logits[-KEPT:].log_softmax(-1) for logits in (clean, other))
    return float((clean.exp() * (clean - other)).sum(-1).mean())


def mapped(model: Model, clean: KVCache, damaged: KVCache, **settings: Any) -> LayerMap:
    return layer_map(model, clean, damaged, suffix_of(clean), kept=KEPT, progress=False, **settings)


# ---- restoring is what hooks do


class Bridge:
    """The same restorations, one whole pass each, by hooks of TransformerBridge."""

    NAMES = ("hook_attn_out", "hook_mlp_out", "attn.hook_z")

    def __init__(self, model: Model) -> None:
        self.bridge = model.lanes.hooked.bridge
        self.layers = model.geometry.n_layers

    def read(self, context: list[int], hooks: list[tuple[str, Callable[..., Any]]]) -> Tensor:
        tokens = torch.tensor([[*context, *SUFFIX]])
        with torch.no_grad():
            return self.bridge.run_with_hooks(
                tokens, fwd_hooks=hooks, position_ids=torch.arange(tokens.shape[1])[None], return_type="logits"
            )[0]

    def run(self, context: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        recorded: dict[str, Tensor] = {}

        def recording(name: str) -> Callable[..., None]:
            return lambda tensor, hook: recorded.__setitem__(name, tensor.clone())

        names = [f"blocks.{layer}.{name}" for layer in range(self.layers) for name in self.NAMES]
        return self.read(context, [(name, recording(name)) for name in names]), recorded

    def restored(self, context: list[int], group: tuple[Component, ...], other: dict[str, Tensor]) -> Tensor:
        def hook_of(component: Component) -> tuple[str, Callable[..., Tensor]]:
            end = {"attn": "hook_attn_out", "mlp": "hook_mlp_out", "head": "attn.hook_z"}[component.kind]
            name = f"blocks.{component.layer}.{end}"

            def write(tensor: Tensor, hook: Any) -> Tensor:
                tensor = tensor.clone()
                new = slice(len(context), None)
                if component.kind == "head":
                    shape = tensor.shape
                    tensor, theirs = tensor.view(*shape[:2], -1), other[name].view(*shape[:2], -1)
                    size = tensor.shape[2] // self.bridge.cfg.n_heads
                    columns = slice(component.head * size, (component.head + 1) * size)
                    tensor[:, new, columns] = theirs[:, new, columns]
                    return tensor.view(shape)
                tensor[:, new] = other[name][:, new]
                return tensor

            return name, write

        return self.read(context, [hook_of(component) for component in group])


def test_restoring_and_noising_equal_TransformerLens_hooks(tiny: Model):
    bridge, (clean, damaged) = Bridge(tiny), (ids(0), ids(1))
    clean_logits, clean_outputs = bridge.run(clean)
    damaged_logits, damaged_outputs = bridge.run(damaged)
    layers = mapped(tiny, cache_of(tiny, 0), cache_of(tiny, 1))
    assert layers.damage == pytest.approx(divergence(clean_logits, damaged_logits), abs=1e-5)
    assert len(layers.groups) == 3 * (2 + tiny.geometry.n_heads) + 3
    for group, restored, noised in zip(layers.groups, layers.restored, layers.noised, strict=True):
        assert restored == pytest.approx(
            divergence(clean_logits, bridge.restored(damaged, group, clean_outputs)), abs=2e-5
        ), group
        if group[0].kind != "head":
            assert noised == pytest.approx(
                divergence(clean_logits, bridge.restored(clean, group, damaged_outputs)), abs=2e-5
            ), group
    assert len({round(float(value), 7) for value in layers.restored}) > 0.9 * len(layers.groups)


def test_restoring_all_layers_leaves_no_damage(tiny: Model):
    clean, damaged = cache_of(tiny, 0), cache_of(tiny, 1)
    layers = mapped(tiny, clean, damaged, heads=False, bands=[range(tiny.geometry.n_layers), range(1, 3)])
    assert layers.pi[-2] == pytest.approx(1, abs=1e-3)
    assert layers.noised[-2] == pytest.approx(layers.damage, abs=1e-4)
    assert layers.pi[-1] < 0.999


def test_the_index_is_nan_without_damage(tiny_llama: Model):
    clean = cache_of(tiny_llama, 0)
    layers = mapped(tiny_llama, clean, clean, heads=False)
    assert abs(layers.damage) < 1e-6
    assert np.isnan(layers.pi).all()
    assert layers.states["rho"].max() == 0


def test_masking_in_one_head_is_transmitted_by_that_head_alone(tiny_llama: Model):
    clean = cache_of(tiny_llama, 0)
    group = tiny_llama.geometry.n_heads // tiny_llama.geometry.n_kv_heads
    damaged = clean.mask("T1", layers=[2], heads=[1])
    table = mapped(tiny_llama, clean, damaged).df()
    last = table[(table["kind"] == "head") & (table["layer"] == 2)].set_index("head")["pi"]
    assert (last.loc[: group - 1].abs() < 1e-3).all()
    assert (last.loc[group:].abs() > 1e-3).all()
    attention = table[(table["kind"] == "attn") & (table["layer"] == 2)]["pi"]
    assert float(attention.iloc[0]) == pytest.approx(1, abs=1e-3)
    assert (table[table["layer"] < 2]["pi"].abs() < 1e-3).all()  # nothing is off there yet
    assert table.loc["L2H0", "head"] == 0
    assert {"L0 attn", "L1 mlp", "L2H3", "band 0–0"} <= set(table.index)


def test_a_damaged_cache_of_another_length_is_read_where_it_ends(tiny_llama: Model):
    clean = cache_of(tiny_llama, 0)
    keep = torch.zeros(1, COUNT, dtype=torch.bool)
    keep[0, :4] = True
    evicted = clean.evict(slots=keep).reindex()
    layers = mapped(tiny_llama, clean, evicted, heads=False)
    scores = [tiny_llama.extend(cache, suffix_of(cache), logits=KEPT)[1][0] for cache in (clean, evicted)]
    assert layers.damage == pytest.approx(divergence(*scores), abs=1e-5)


def test_a_cache_of_which_nothing_is_left_can_be_mapped(tiny_llama: Model):
    clean = cache_of(tiny_llama, 0)
    empty = clean.evict(slots=range(clean.slots))
    layers = mapped(tiny_llama, clean, empty, heads=False)
    scores = [tiny_llama.extend(cache, suffix_of(cache), logits=KEPT)[1][0] for cache in (clean, empty)]
    assert layers.damage == pytest.approx(divergence(*scores), abs=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_damage_that_is_no_number_and_bands_of_single_layers_are_refused(tiny_llama: Model):
    clean = cache_of(tiny_llama, 0)
    damaged = clean.corrupt(NotANumber(scope=Scope(count=1)))
    refused(lambda: mapped(tiny_llama, clean, damaged), "holds NaN or infinity")
    refused(lambda: mapped(tiny_llama, clean, clean, bands=[0, 1]), "bands=[0, 1], a list; give a list")


def test_groups_restored_together_are_the_rows_of_the_map(tiny_gemma: Model):
    clean, damaged = cache_of(tiny_gemma, 0), cache_of(tiny_gemma, 1)
    layers = mapped(tiny_gemma, clean, damaged)
    damage, restored = restored_together(tiny_gemma, clean, damaged, suffix_of(clean), layers.groups[::5], kept=KEPT)
    assert damage == pytest.approx(layers.damage, abs=1e-6)
    assert restored == pytest.approx(layers.restored[::5], abs=1e-5)


# ---- a model built by hand: one head copies the damage, another takes some of it back

FLAG, COPY, CONSTANT = 0, 1, 2
CLEAN_TOKEN, FLAGGED_TOKEN = 1, 2


@pytest.fixture(scope="module")
def by_hand() -> Model:
    """Two layers of two heads that look everywhere alike. Head 0 of layer 0 adds the flag of the context to `COPY`,
    head 1 of layer 1 takes three tenths of it back; the others and the MLPs add nothing. The logits of token 3 are
    `COPY`."""
    size, heads = 16, 2
    config = LlamaConfig(
        vocab_size=8, hidden_size=size, intermediate_size=8, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    width = size // heads
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.zero_() if "norm" not in name else weight.fill_(1)
        plain.model.embed_tokens.weight[:, CONSTANT] = 10  # so that the norm hardly depends on the rest
        plain.model.embed_tokens.weight[FLAGGED_TOKEN, FLAG] = 1
        for layer, head, gain in ((0, 0, 4.0), (1, 1, -1.2)):
            attention = plain.model.layers[layer].self_attn
            attention.v_proj.weight[head * width, FLAG] = 1
            attention.o_proj.weight[COPY, head * width] = gain
        plain.lm_head.weight[3, COPY] = 4
    return kv.load(plain)


def test_a_head_that_copies_damage_is_poison_and_one_that_takes_it_back_a_filter(by_hand: Model):
    tables = []
    for family, flagged in (("few", 3), ("many", 9)):
        for prompt in range(FEWEST):
            clean = by_hand.prefill(Tokens.of([CLEAN_TOKEN] * (COUNT + prompt), "T1"))
            context = [FLAGGED_TOKEN] * flagged + [CLEAN_TOKEN] * (COUNT + prompt - flagged)
            damaged = by_hand.prefill(Tokens.of(context, "T1"))
            suffix = Tokens.of([CLEAN_TOKEN], "question", COUNT + prompt)
            layers = layer_map(by_hand, clean, damaged, suffix, progress=False)
            tables.append(layers.df().assign(family=family, prompt=prompt))
    named = verdicts(pd.concat(tables))
    bands = {label["band"] for label in layers.labels if label["kind"] == "band"}
    assert set(named.loc[named["kind"] == "band", "band"]) == bands
    assert len(bands) == 2
    called = named.set_index(["kind", "layer", "head"])["verdict"]
    heads = called.loc["head"]
    assert dict(heads) == {(0, 0): "poison", (0, 1): "neutral", (1, 0): "neutral", (1, 1): "filter"}
    blocks = {kind: called.loc[kind].tolist() for kind in ("attn", "mlp")}
    assert blocks == {"attn": ["poison", "filter"], "mlp": ["neutral", "neutral"]}


# ---- states


def outputs(hidden: Tensor, attn: Tensor, mlp: Tensor) -> Outputs:
    return Outputs(hidden, attn, mlp, {}, torch.zeros(1, 4))


def test_erasure_is_positive_only_where_a_layer_undoes_the_deviation():
    stream, off = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 1.0, 0.0])
    zero = torch.zeros(3)

    def run(damage: Tensor, undoes: Tensor) -> Outputs:
        """Layer 0 doubles the stream whatever comes in; layer 1 adds what is asked for."""
        hidden = torch.stack([stream + damage, 2 * stream + damage, 2 * stream + damage + undoes])
        return outputs(hidden[:, None], torch.stack([stream, undoes])[:, None], torch.stack([zero, zero])[:, None])

    by_layer = states(run(zero, zero), run(off, -0.5 * off)).set_index("layer")
    assert by_layer["rho"].tolist() == pytest.approx([0.2, 0.1])
    assert by_layer["gain"].tolist() == pytest.approx([0.5, 0.5])
    assert by_layer["erasure"].tolist() == pytest.approx([0, 0.5])
    assert by_layer["erasure_attn"].tolist() == pytest.approx([0, 0.5])
    assert by_layer["erasure_mlp"].tolist() == pytest.approx([0, 0])
    assert by_layer["angle"].tolist() == pytest.approx([0, 0], abs=1e-7)


def test_states_follow_the_stream_of_the_model(tiny: Model):
    clean, damaged = cache_of(tiny, 0), cache_of(tiny, 1)
    by_layer = mapped(tiny, clean, damaged, heads=False).states
    streams = [
        tiny.capture(suffix_of(cache), ["resid_pre"], past=cache, lane="plain").stack("resid_pre")[:, 0].double()
        for cache in (clean, damaged)
    ]
    delta = streams[1] - streams[0]
    rho = (delta.flatten(1).norm(dim=1) / streams[0].flatten(1).norm(dim=1)).numpy()
    assert by_layer["rho"].to_numpy() == pytest.approx(rho, abs=1e-6)
    assert np.isnan(by_layer["gain"][0])  # the suffix's embeddings are the same
    assert (by_layer["drop"] > 0).all()


def test_a_suffix_with_nothing_replaced_gives_the_models_logits(tiny: Model):
    cache = cache_of(tiny, 0)
    run = Suffix(tiny.lanes, cache, suffix_of(cache)).outputs(KEPT)
    expected = tiny.extend(cache, suffix_of(cache), logits=KEPT)[1][0]
    assert torch.allclose(run.logits, expected, atol=1e-5)
    total = run.hidden[0] + (run.attn + run.mlp).sum(0)
    assert torch.allclose(total, run.hidden[-1], atol=1e-4)


# ---- verdicts


def table(pi: dict[str, float], prompts: int = 12, spread: float = 0.1) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {"kind": "head", "layer": 0, "head": 0, "family": family, "prompt": prompt, "damage": 1.0,
             "restored": 1 - mean - spread * rng.standard_normal()}
            for family, mean in pi.items()
            for prompt in range(prompts)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pi", "verdict"),
    [
        ({"a": 0.3, "b": 0.3, "c": 0.0}, "poison"),
        ({"a": -0.3, "b": -0.3, "c": 0.0}, "filter"),
        ({"a": 0.3, "b": 0.0, "c": 0.0}, "neutral"),
        ({"a": 0.3, "b": 0.3, "c": -0.3}, "mixed"),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, "neutral"),
    ],
)
def test_a_verdict_needs_two_families_that_agree(pi: dict[str, float], verdict: str):
    [row] = verdicts(table(pi)).to_dict("records")
    assert row["verdict"] == verdict
    for family, mean in pi.items():
        assert row[f"low_{family}"] < row[f"pi_{family}"] < row[f"high_{family}"]
        assert row[f"pi_{family}"] == pytest.approx(mean, abs=0.1)


def test_few_prompts_give_a_range_and_no_verdict():
    [row] = verdicts(table({"a": 0.3, "b": 0.3}, prompts=FEWEST - 1)).to_dict("records")
    assert row["verdict"] == "unknown"
    assert np.isnan(row["low_a"])
    assert row["smallest_a"] < row["pi_a"] < row["largest_a"]


def test_a_prompt_with_little_damage_has_little_weight():
    frame = table({"a": 0.3, "b": 0.3})
    frame.loc[0, ["damage", "restored"]] = [1e-6, 1.0e-3]
    assert verdicts(frame)["pi_a"].iloc[0] == pytest.approx(0.3, abs=0.1)


def test_a_prompt_without_a_number_is_none_of_which_all_damage_was_undone():
    frame = table({"a": 0.3, "b": 0.3}, prompts=16)
    frame.loc[::4, "restored"] = np.nan
    assert verdicts(frame)["pi_a"].iloc[0] == pytest.approx(0.3, abs=0.1)


def null(rng: np.random.Generator, components: int = 80, prompts: int = 10) -> pd.DataFrame:
    """Effects of either sign, which the prompts' families share in part."""
    shared = rng.standard_normal((components, prompts))
    return pd.DataFrame(
        [
            {"kind": "head", "layer": layer, "head": 0, "family": family, "prompt": prompt, "damage": 1.0,
             "restored": 1 - 0.1 * (shared[layer, prompt] + rng.standard_normal())}
            for family in "abc"
            for layer in range(components)
            for prompt in range(prompts)
        ]
    )  # fmt: skip


def test_by_chance_estimates_the_verdicts_of_components_without_effect():
    rng = np.random.default_rng(0)
    called, expected = [], []
    for _ in range(6):
        maps = null(rng)
        called.append((verdicts(maps)["verdict"].isin(["poison", "filter"])).sum())
        [row] = by_chance(maps, flips=40).to_dict("records")
        expected.append(row["mean"])
        assert row["high"] >= row["mean"]
    # Families that share their prompts agree by chance more often than independent ones, of which 0.3 of 80 would.
    assert np.mean(called) <= 2
    assert 0.3 < np.mean(expected) < 2


def test_strong_effects_give_more_verdicts_than_chance():
    strong = pd.concat([table({"a": 0.3, "b": 0.3}).assign(layer=layer) for layer in range(20)])
    [row] = by_chance(strong, flips=40).to_dict("records")
    assert (verdicts(strong)["verdict"] == "poison").sum() == 20 > row["mean"]


def test_damage_without_effect_is_refused():
    refused(
        lambda: verdicts(pd.concat([table({"a": 0.3}), table({"b": 0.3}).assign(damage=1e-9)])),
        "too little for its shares to mean anything",
    )


def test_verdicts_need_two_families():
    refused(lambda: verdicts(table({"a": 0.3})), "needs 2 families")


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ([], "A group is empty"),
        ([Component("head", 9, 0)], "There is no"),
        ([Component("head", 0)], "There is no"),
        ([Component("attn", 0, 1)], "There is no"),
    ],
)
def test_impossible_groups_are_refused(tiny_llama: Model, group: list[Component], sentence: str):
    clean = cache_of(tiny_llama, 0)
    refused(lambda: restored_together(tiny_llama, clean, clean, suffix_of(clean), [group]), sentence)


@pytest.mark.usefixtures("unchecked")
def test_a_kind_that_is_none_is_refused(tiny_llama: Model):
    clean, kind = cache_of(tiny_llama, 0), cast(Any, "mlp_out")
    group = [Component(kind, 0)]
    refused(lambda: restored_together(tiny_llama, clean, clean, suffix_of(clean), [group]), "There is no")
