"""Sweeps and patches that are refused, each in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.patching import KL, LogitDiff, LogProb, attribute, patch_sweep
from kvprobe.text.tokens import Tokens
from tests.models import llama
from tests.patching.oracle import Run
from tests.patching.pairs import SPANS, swept, two, weighed
from tests.random_caches import random_tokens
from tests.refusals import refused


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"over": ("layer", "token")}, "no axis called 'token'"),
        ({"over": "layer"}, "over='layer', a str; give a list of texts"),
        ({"over": ("layer", "band")}, "layers or over bands"),
        ({"over": ("slot", "segment")}, "slots or over segments"),
        ({"over": {"layer": [99]}}, "no layer 99"),
        ({"over": {"layer": [-1]}}, "no layer -1"),
        ({"over": {"layer": [1.5]}}, "1.5"),
        ({"over": {"layer": []}}, "at least one"),
        ({"over": {"layer": 1}}, "over={'layer': 1}, a dict; give a list of texts or a mapping to a list or None"),
        ({"over": {"band": [range(2, 4)]}}, "no layer 3"),
        ({"over": {"band": [range(0)]}}, "band"),
        ({"over": {"band": range(2)}}, "band"),
        ({"over": {"head": [2]}}, "no KV head 2"),
        ({"over": {"slot": [13]}}, "no slot 13"),
        ({"over": {"segment": ["T9"]}}, "no segment called 'T9'"),
        ({"over": {"query": [3]}}, "no suffix token 3"),
        ({"over": {"query_head": [4]}}, "no query head 4"),
        ({"parts": ("Q",)}, "no part called 'Q'"),
        ({"parts": ()}, "no part"),
        ({"parts": "KV"}, "part"),
        ({"parts": ("resid_pre",)}, "total"),
        ({"parts": ("blocks.0.hook_resid_pre",)}, "total"),
        ({"parts": ("blocks.0.attn.hook_z",)}, "no site at the hook 'blocks.0.attn.hook_z'"),
        ({"parts": ("blocks.0.attn.hook_k",)}, "'blocks.0.attn.hook_rot_k'"),
        ({"parts": ("blocks.9.attn.hook_v",)}, "no layer 9"),
        ({"parts": ("blocks.0.attn.hook_v", "K")}, "'K' does not"),
        ({"parts": ("blocks.0.attn.hook_v",), "over": {"layer": [0]}}, "name their layers"),
        ({"parts": ("blocks.0.attn.hook_v",), "over": ("band",)}, "name their layers"),
        ({"along": {"blocks.0.hook_resid_pre": torch.ones(1, 4)}}, "no 'resid_pre'"),
        ({"along": {"V": torch.ones(1, 4)}}, "'V' is no layer and part"),
        ({"reads": "everyone"}, "'everyone'"),
        ({"align": "middle"}, "'middle'"),
        ({"rows": 0}, "rows"),
        ({"suffix": Tokens.of([])}, "suffix"),
        ({"suffix": ""}, "suffix"),
        ({"suffix": Tokens.of([64], start=13)}, "token id 64"),
        ({"metric": lambda logits: logits[-1]}, "64 numbers"),
        ({"metric": lambda logits: None}, "NoneType"),
        ({"metric": lambda logits: "high"}, "str"),
        ({"metric": lambda logits: logits[-1, 0] * torch.nan}, "nan"),
        ({"metric": lambda logits: logits[-1, 0] / 0}, "inf"),
        ({"metric": KL(4)}, "suffix"),
        ({"metric": LogitDiff(right=64, wrong=0)}, "64"),
        ({"metric": LogitDiff(right=0, wrong=-1)}, "-1"),
        ({"metric": LogProb.of([64])}, "64"),
    ],
)
def test_impossible_sweeps_are_refused(tiny_llama: Model, change: dict[str, Any], part: str):
    base, donor = two(tiny_llama)
    asked: dict[str, Any] = {"suffix": base.suffix(0, 3), "metric": weighed, "over": ("layer",), "progress": False}
    refused(lambda: patch_sweep(tiny_llama, base.cache, donor.cache, **asked | change), part)


def test_a_metric_without_a_gradient_has_no_attribution(tiny_llama: Model):
    base, donor = two(tiny_llama)
    refused(
        lambda: attribute(tiny_llama, base.cache, donor.cache, base.suffix(0, 3), lambda logits: float(logits[-1, 1])),
        "has no gradient",
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"head_dim": 16}, {"seed": 8}]
)
def test_a_cache_of_another_model_is_refused(tiny_llama: Model, changes: dict[str, Any]):
    base, _ = two(tiny_llama)
    stranger = llama(**changes)
    other, suffix = stranger.prefill(random_tokens(2, SPANS)), base.suffix(0, 3)
    for pair in ((base.cache, other), (other, base.cache), (other, other)):
        refused(lambda pair=pair: patch_sweep(tiny_llama, *pair, suffix, weighed, progress=False), "model")
    if "seed" not in changes:
        refused(lambda: base.cache.patch(other, "T1"), "donor")


@pytest.mark.usefixtures("unchecked")
def test_donors_that_cannot_stand_in_for_the_base_are_refused(tiny_llama: Model):
    base, donor = two(tiny_llama)
    suffix = base.suffix(0, 3)

    def pair_refused(ours: KVCache, theirs: KVCache, *words: str, over: Any = ("segment",)) -> None:
        refused(lambda: patch_sweep(tiny_llama, ours, theirs, suffix, weighed, over=over, progress=False), *words)

    longer = Run(tiny_llama, 2).read(SPANS | {"T1": 7}).cache
    pair_refused(base.cache, longer, "'T1'", "6", "7", "align")
    pair_refused(base.cache, donor.cache.evict("T1"), "'T1'")
    pair_refused(base.cache, Run(tiny_llama, 2).read({"system": 4, "T1": 6, "T3": 3}).cache, "segment 'T2'")
    pair_refused(base.cache.fork(2), donor.cache, "2 rows")
    pair_refused(base.cache, donor.cache.fork(2), "2 rows")
    pair_refused(base.cache.evict("T1"), donor.cache, "'T1'", over={"segment": ["T1"]})
    keys, values = (tuple(map(Tensor.double, tensors)) for tensors in (donor.cache.keys, donor.cache.values))
    double = donor.cache.with_parts({"K": keys, "V": values})
    pair_refused(base.cache, double, "float64")
    refused(lambda: base.cache.patch(double, "T1"), "float64")


@pytest.mark.usefixtures("unchecked")
def test_padding_cannot_be_patched(tiny_llama: Model):
    base = Run(tiny_llama, 1).read({"T1": 3}, padding=2)
    donor = Run(tiny_llama, 2).read({"T1": 3})
    suffix = base.suffix(0, 3)
    over = {"slot": [4]}
    refused(
        lambda: patch_sweep(tiny_llama, base.cache, donor.cache, suffix, weighed, over=over, progress=False), "padding"
    )


@pytest.mark.usefixtures("unchecked")
def test_keys_with_learned_positions_cannot_be_rotated(tiny_models: dict[str, Model]):
    model = tiny_models["gpt2"]
    base = Run(model, 1).read({"system": 4, "T1": 3})
    donor = Run(model, 2).read({"system": 3, "T1": 3})
    over = {"segment": ["T1"]}
    refused(lambda: swept(base, donor, base.suffix(0, 3), over=over, parts=("K",), align="start"), "learned positions")


@pytest.mark.usefixtures("unchecked")
def test_impossible_patches_of_a_cache_are_refused(tiny_llama: Model):
    base, donor = (side.cache for side in two(tiny_llama))
    calls: list[tuple[str, Callable[[], KVCache]]] = [
        ("no layer 3", lambda: base.patch(donor, "T1", layers=[3])),
        ("no KV head 2", lambda: base.patch(donor, "T1", heads=[2])),
        ("no choice of part called 'Q'", lambda: base.patch(donor, "T1", part="Q")),  # pyright: ignore[reportArgumentType]
        ("no segment called 'T4'", lambda: base.patch(donor, "T4")),
        ("both", lambda: base.patch(donor)),
        ("shape", lambda: base.patch(donor, slots=torch.ones(1, 4, dtype=torch.bool))),
        ("slots", lambda: base.patch(donor.evict("T1"), "T1")),
        ("donor", lambda: base.patch(donor.fork(2), "T1")),
    ]
    for part, call in calls:
        refused(call, part)
