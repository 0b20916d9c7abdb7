"""The budget's caches are those that transformers really allocates: storage, byte for byte, family by family."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvprobe.cache.visibility import Chunk, Reach
from kvprobe.errors import UserError
from kvprobe.inference.measured import storage_bytes
from kvprobe.memory import hf
from kvprobe.memory.caches import LayerStore
from kvprobe.memory.config import Config
from kvprobe.memory.numbers import FORMATS
from kvprobe.memory.request import Request
from kvprobe.memory.unloaded import in_half_precision, text_model, unloaded
from kvprobe.models.geometry import Geometry
from kvprobe.models.hf_cache import library_cache
from tests.every_model import UNBUILT
from tests.memory.families import TINY, tiny
from tests.models import every
from tests.models.every import NAMES, tiny_config

UNREAD = ("mamba", "falcon_mamba", "mamba2", "jamba", "mllama_text_model")
"""Families that have a budget, but no cache in kvprobe; Mamba-2 alone has one from transformers 5.24 on."""
LENGTHS = st.one_of(st.integers(1, 12), st.sampled_from([15, 16, 17, 31, 33]))


@torch.inference_mode()
def lived(model: Any, past: Any, prompt: int, new: int, batch: int, **first: Any) -> Any:
    """The cache after a prompt in one pass and `new` tokens one by one."""
    tokens = torch.randint(1, 60, (batch, prompt + new), generator=torch.Generator().manual_seed(prompt))
    named = "cache_params" if "mamba" in model.config.model_type else "past_key_values"
    model(tokens[:, :prompt], use_cache=True, **{named: past}, **first)
    for step in range(prompt, prompt + new):
        model(tokens[:, step : step + 1], use_cache=True, **{named: past})
    return past


@cache
def widened(name: str, dtype: torch.dtype) -> Any:
    import copy

    return copy.deepcopy(tiny(name)[0]).to(dtype)


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=12, deadline=None)
@given(prompt=LENGTHS, new=st.integers(0, 3), batch=st.integers(1, 2), half=st.booleans())
def test_caches_are_those_of_transformers_to_the_byte(name: str, prompt: int, new: int, batch: int, half: bool):
    model, layers = tiny(name)
    dtype = FORMATS["bfloat16" if half else "float32"]
    if half:
        model = widened(name, torch.bfloat16)
    crossing = any(layer.attention is not None and layer.attention.crosses for layer in layers)
    source = 6 if crossing else 0
    first = {"cross_attention_states": torch.zeros(batch, source, 32, dtype=model.dtype)} if crossing else {}
    past = lived(model, DynamicCache(config=model.config), prompt, new, batch, **first)
    request = Request(prompt, new, batch, source, dtype, dtype)
    assert storage_bytes(past) == hf.held(layers, request)


def assert_described(layers: tuple[LayerStore, ...], geometry: Geometry) -> None:
    own = [layer for layer in layers if layer.shares is None]
    assert geometry.layers == tuple(layer.parts for layer in own)
    assert geometry.reaches == tuple(map(reach_of, own))
    sources = [number if layer.shares is None else layer.shares for number, layer in enumerate(layers)]
    assert geometry.sources == tuple(sources[number] for number in geometry.attending)


def reach_of(layer: LayerStore) -> Reach:
    if layer.attention is None or layer.attention.reach is None:
        return None
    return Chunk(layer.attention.reach) if layer.attention.chunked else layer.attention.reach


@pytest.mark.parametrize("name", TINY)
def test_the_config_says_of_each_layer_what_is_measured_on_the_model(name: str):
    model, layers = tiny(name)
    try:
        geometry = Geometry.of(model)
    except UserError:
        assert name in UNREAD
        return
    assert_described(layers, geometry)


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind not in UNBUILT])
@pytest.mark.filterwarnings("ignore")
def test_every_model_stores_what_its_config_says_or_has_no_budget(kind: str):
    config = tiny_config(kind)
    try:
        built = unloaded(text_model(Config(kind, config.to_dict())))
    except UserError:
        assert kind in WITHOUT_BUDGET
        return
    model = every.tiny(kind)
    if config is config.get_text_config():  # of images and text the text model is counted
        assert built.weights.total == sum(parameter.numel() for parameter in model.parameters())
    if kind not in ("cpmant", "dory"):  # which transformers cannot read a second token into
        halved = in_half_precision(every.tiny(kind))
        for read, numbers, prompt, batch in ((model, "float32", 7, 1), (halved, "bfloat16", 3, 2)):
            past = lived(read, library_cache(model.config.get_text_config()), prompt, 2, batch)
            held = hf.held(built.layers, Request(prompt, 2, batch, 0, FORMATS[numbers], FORMATS[numbers]))
            assert storage_bytes(past) == held[: len(past.layers)]
            assert not any(held[len(past.layers) :])
    try:
        geometry = Geometry.of(model)
    except UserError:
        return
    assert_described(built.layers, geometry)


WITHOUT_BUDGET = frozenset((
    "bart", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "dbrx", "deepseek_v4", "emu3",
    "gpt_neo", "jamba", "jetmoe", "longcat_flash", "marian", "mbart", "megatron-bert", "minimax", "musicgen",
    "musicgen_melody", "mvp", "openai-gpt", "pegasus", "plbart", "prophetnet", "recurrent_gemma", "reformer", "rembert",
    "roformer", "rwkv", "whisper", "xlm", "xlnet", "xlstm", "xmod",
))  # fmt: skip
"""Classes that cannot be built of a saved config or read a token without weights, or that keep other caches."""
