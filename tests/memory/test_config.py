"""A config is untrusted input: it gives a budget, or one sentence that names what is wrong with it."""

import json
import math
import multiprocessing
import re
import resource
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.memory.budget import Budget, budget
from kvprobe.memory.sources import config_of, shipped_configs
from kvprobe.models.catalogue import NAMED_MODELS
from tests.memory.families import TINY
from tests.refusals import refused

Fields = dict[str, Any]
KINDS = sorted({kind for kind, _ in TINY.values()})


LLAMA: Fields = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GEMMA: Fields = LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}
NEMOTRON: Fields = LLAMA | {
    "model_type": "nemotron_h", "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "n_groups": 2, "conv_kernel": 4, "hybrid_override_pattern": "M*-",
}  # fmt: skip

NO_NUMBERS: list[Any] = [True, False, "64", 64.0, [64], {"a": 64}, -1, -(10**9), 10**30, float("nan"), float("inf")]


def budget_refused(model: Any, *words: str | re.Pattern[str]) -> str:
    return refused(lambda: budget(model), *words)


def in_folder(parent: Path, text: str | bytes, name: str = "untrusted") -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# Fields that are missing or wrong


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_every_named_model_has_a_budget_of_about_the_size_that_is_listed(name: str):
    size, weights = NAMED_MODELS[name].size, budget(name, dtype="float32").weights / 1e6
    assert size == pytest.approx(weights, rel=0.03, abs=1)


@pytest.mark.parametrize("missing", [name for name in LLAMA if name != "num_key_value_heads"])
def test_a_missing_field_is_named_with_its_model(missing: str, tmp_path: Path):
    without = {name: value for name, value in LLAMA.items() if name != missing}
    if missing == "model_type":
        budget_refused(without, missing)
    else:
        assert f"leaves out {missing}=" in str(budget({**without, "num_key_value_heads": 2}))
    budget_refused({**LLAMA, missing: None}, missing)
    budget_refused(in_folder(tmp_path, json.dumps({**LLAMA, missing: None})), missing, "untrusted")


def test_a_config_with_all_sizes_leaves_none_out():
    assert "leaves out max_position_embeddings=2048, which" in str(budget(LLAMA))
    assert "leaves out" not in str(budget({**LLAMA, "max_position_embeddings": 50}))
    assert "leaves out" not in str(budget("openai-community/gpt2"))


def test_kv_heads_are_those_that_transformers_builds():
    assert budget({**LLAMA, "num_key_value_heads": 4}).cache == budget({**LLAMA, "num_key_value_heads": None}).cache
    qwen = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {"model_type": "qwen2"}
    budget_refused(qwen, "4 query heads for 32 KV heads")


@pytest.mark.parametrize("name", [name for name in LLAMA if name != "model_type"])
@pytest.mark.parametrize("value", [*NO_NUMBERS, 0], ids=repr)
def test_a_size_that_is_not_a_positive_whole_number_is_named(name: str, value: Any, tmp_path: Path):
    budget_refused(in_folder(tmp_path, json.dumps({**LLAMA, name: value})), name, "untrusted")


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gemma3_text", "sliding_window"),
        ("gemma3_text", "head_dim"),
        ("qwen3_moe", "num_experts"),
        ("qwen3_moe", "num_experts_per_tok"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("nemotron_h", "ssm_state_size"),
        ("nemotron_h", "conv_kernel"),
        ("nemotron_h", "mamba_num_heads"),
    ],
)
def test_sizes_of_other_families_are_checked_too(kind: str, name: str, value: Any):
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    whole = {**GEMMA, **NEMOTRON, **mixture, "model_type": kind}
    assert budget(whole).peak > 0
    budget_refused({**whole, name: value}, name)


@pytest.mark.parametrize("value", [value for value in NO_NUMBERS if value != [64]], ids=repr)
def test_the_width_of_dense_layers_is_checked_even_if_all_layers_are_sparse(value: Any):
    sparse = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    budget_refused({**LLAMA, **sparse, "intermediate_size": value}, "intermediate_size")


@pytest.mark.parametrize("value", ["true", 1, 0, [], "no"], ids=repr)
@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "tie_word_embeddings"), ("llama", "attention_bias"), ("qwen2", "use_sliding_window")]
)
def test_a_switch_is_true_or_false(kind: str, name: str, value: Any):
    budget_refused({**LLAMA, "model_type": kind, name: value}, name)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 8), (5, 2), (7, 4)])
def test_kv_heads_that_do_not_divide_the_query_heads_are_refused(heads: int, kv_heads: int):
    budget_refused(
        {**LLAMA, "hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        f"{heads} query heads for {kv_heads} KV heads",
    )


def test_heads_that_do_not_divide_the_width_are_refused():
    budget_refused({**LLAMA, "num_attention_heads": 6}, "The hidden size (64) is not a multiple")


@pytest.mark.parametrize(
    "types",
    [
        ["full_attention"] * 2,
        ["full_attention"] * 4,
        [],
        ["full_attention", "full_attention", "fulll_attention"],
        ["full_attention", "full_attention", None],
        ["full_attention", "full_attention", ["full_attention"]],
        ["full_attention", "full_attention", 10**40],
        "full_attention",
        {"0": "full_attention"},
        3,
        True,
    ],
    ids=str,
)
def test_layer_types_are_one_known_type_for_each_layer(types: Any):
    budget_refused({**GEMMA, "layer_types": types}, re.compile("layer.type"))


def test_a_layer_type_gets_its_near_match():
    types = ["full_attention", "slidding_attention", "full_attention"]
    budget_refused({**GEMMA, "layer_types": types}, "'sliding_attention'")


def test_an_unknown_layer_letter_is_refused():
    budget_refused({**NEMOTRON, "hybrid_override_pattern": "M*Q"}, "'Q'")


@pytest.mark.parametrize(
    ("kind", "near"), [("qwen4", "qwen3"), ("lama", "llama"), ("gemma-3", "gemma3"), ("deepseek_v9", "deepseek_v3")]
)
def test_an_unknown_family_is_named_with_its_near_match(kind: str, near: str):
    budget_refused({**LLAMA, "model_type": kind}, repr(kind), near)


@pytest.mark.parametrize("kind", ["", "bort", "x" * 10_000, "llama\n", "LLAMA", "gpt5", 3, ["llama"], {}, True])
def test_unknown_families_are_refused(kind: Any):
    words = "no family in the memory budget called" if isinstance(kind, str) else "model_type="
    budget_refused({**LLAMA, "model_type": kind}, words)


@pytest.mark.parametrize("name", ["per_layer_config", "kv_sharing_modes"])
def test_layers_that_are_not_those_of_their_family_are_refused_by_name(name: str):
    budget_refused({**LLAMA, name: {"0": {"hidden_size": 32}}}, name)


@pytest.mark.parametrize("inner", [None, [], "llama", 3, True, [LLAMA]], ids=repr)
def test_a_text_config_that_is_not_a_mapping_is_refused(inner: Any):
    budget_refused({"model_type": "gemma3", "text_config": inner}, "text_config")


def test_a_text_config_is_read_as_the_text_model_in_it():
    inner = budget({"model_type": "gemma3", "dtype": "float32", "text_config": GEMMA})
    alone = budget({**GEMMA, "dtype": "float32"})
    assert (inner.cache, inner.weights, inner.peak) == (alone.cache, alone.weights, alone.peak)


def test_not_all_layers_can_share_keys_and_values():
    gemma = {**GEMMA, "model_type": "gemma3n_text", "hidden_size_per_layer_input": 8, "altup_num_inputs": 2}
    gemma |= {"vocab_size_per_layer_input": 100, "laurel_rank": 4}
    assert budget({**gemma, "num_kv_shared_layers": 1}).peak > 0
    for shared in (3, 4, 10**6):
        budget_refused({**gemma, "num_kv_shared_layers": shared}, "gemma3n_text")


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        ("fp8", "quantization_config"),
        ([], "quantization_config"),
        ({}, "quant_method"),
        ({"quant_method": 8}, "quant_method"),
        ({"quant_method": "gptqq"}, "gptq"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "bits": 0}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": ["128"]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": "yes"}, "load_in_8bit"),
    ],
    ids=str,
)
def test_weights_packed_in_an_unknown_way_are_refused(packing: Any, said: str):
    budget_refused({**LLAMA, "quantization_config": packing}, said)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [("float8", "float"), (16, "dtype=16"), ("bf16 ", "bf16"), ([], "dtype=[]"), (True, "dtype=True")],
)
def test_a_dtype_that_is_not_a_float_is_refused(dtype: Any, said: str):
    budget_refused({**LLAMA, "dtype": dtype}, said)


def test_long_values_are_shortened_in_refusals():
    assert len(budget_refused({**LLAMA, "hidden_size": "9" * 100_000}, "hidden_size")) < 300


# Files


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "not JSON",
        '{"a": 1,}',
        "[]",
        "3",
        "null",
        '"llama"',
        "{}",
        json.dumps([LLAMA]),
        "[" * 100_000,
        '{"a": ' * 100_000,
        '{"hidden_size": ' + "9" * 10_000 + "}",
        '{"model_type": "ll\nama"}',
        b"\xff\xfe\x00",
        b"\x00" * 100,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_file_without_a_config_is_refused_by_name(text: str | bytes, tmp_path: Path):
    budget_refused(in_folder(tmp_path, text), "untrusted")


def test_numbers_that_json_lacks_are_refused(tmp_path: Path):
    for number, value in enumerate(("NaN", "Infinity", "-Infinity", "1e400", "64.5")):
        text = json.dumps(LLAMA).replace('"hidden_size": 64', f'"hidden_size": {value}')
        budget_refused(in_folder(tmp_path, text, f"number {number}"), "hidden_size")


def test_a_file_larger_than_any_config_is_not_read(tmp_path: Path):
    folder = in_folder(tmp_path, json.dumps({**LLAMA, "long": "x" * (4 << 20)}))
    budget_refused(folder, "larger")


def test_a_folder_without_a_config_is_refused_by_name(tmp_path: Path):
    budget_refused(tmp_path, f"{tmp_path} has no config.json")
    budget_refused(str(tmp_path), f"{tmp_path} has no config.json")


def test_a_file_that_is_not_named_json_is_refused(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_text(json.dumps(LLAMA))
    budget_refused(path, "model.safetensors")


def test_a_config_is_the_same_from_its_folder_its_file_and_its_fields(tmp_path: Path):
    folder = in_folder(tmp_path, json.dumps(LLAMA))
    sources: list[Any] = [folder, str(folder), folder / "config.json", LLAMA]
    assert len({(needs.peak, needs.cache) for needs in map(budget, sources)}) == 1
    assert [budget(source).config.name for source in sources] == ["untrusted"] * 3 + ["The model"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-135", "smollm2-135m"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("no such model", "hub id"),
        ("", "config.json"),
        ("..", "config.json"),
        ("../configs", "hub id"),
        ("a/b/c", "hub id"),
        ("/etc/absent", "hub id"),
        ("x" * 5000, "hub id"),
        ("configs", "hub id"),
        ("nul\x00byte", "hub id"),
        ("Qwen/Qwen4-9000B", "Qwen/Qwen4-9000B"),
        ("openai/gpt-oss-120bb", "openai/gpt-oss-120bb"),
    ],
)
def test_an_unknown_model_or_hub_id_is_refused_with_near_names(name: str, said: str):
    refused(lambda: budget(name), said)


@pytest.mark.parametrize("layers", [1001, 10**9])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba", "gpt2"])
def test_a_huge_number_of_layers_is_refused_before_it_is_counted(kind: str, layers: int):
    budget_refused({**GEMMA, "model_type": kind, "num_hidden_layers": layers, "state_size": 8}, "layers in its config")


def test_a_config_cannot_take_memory_without_end():
    """In a process that may take three gigabytes more and 30 seconds, and would be killed beyond."""
    config = {**GEMMA, "model_type": "gemma3n_text", "altup_num_inputs": 40_000, "num_kv_shared_layers": 0}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (3 << 30),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        budget_refused(config, "modules")

    process = multiprocessing.get_context("fork").Process(target=limited)
    process.start()
    process.join()
    assert process.exitcode == 0


# Anything at all


@cache
def shipped_fields(name: str) -> Fields:
    """A config that ships, cut to a few layers, so that each budget is fast."""
    return shortened(dict(config_of(name).fields))


def shortened(config: Fields, layers: int = 6) -> Fields:
    for name in _LAYERS:
        if name in config:
            config[name] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    if config.get("num_kv_shared_layers"):
        config |= {"num_kv_shared_layers": 1, "intermediate_size": 16_384}
    if "text_config" in config:
        config["text_config"] = shortened(dict(config["text_config"]), layers)
    return config


_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def plain(value: Any) -> Iterator[int | float]:
    """All numbers in a budget, however deep."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from plain(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from plain(member)
    elif is_dataclass(value) and type(value).__name__ != "Config":
        for field in fields(value):
            yield from plain(getattr(value, field.name))


def assert_budget_or_sentence(model: Any, **settings: Any) -> None:
    try:
        outcome: Budget | str = budget(model, **settings)
    except ValueError as error:
        outcome = str(error)
    if isinstance(outcome, str):
        assert "\n" not in outcome
        assert 10 < len(outcome) < 1500
        return
    shown = [
        outcome.peak,
        outcome.cache,
        outcome.weights,
        outcome.parameters,
        outcome.phases,
        outcome.logical,
        outcome.allocated,
    ]
    shown += [outcome.layers, outcome.widths, outcome.bytes_per_token, outcome.trained_context]
    numbers = list(plain(shown))
    assert numbers
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert str(outcome)


sizes = st.sampled_from([0, 1, 2, 3, 7, 64, 4096, -1, -64, 2**40, 2**40 + 1, 10**30]) | st.integers(-5, 300)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | sizes
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "mamba", "float32", "fp8", "gptq", *KINDS]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def few_layers(name: str, value: Any) -> bool:
    """Numbers of layers that only the test of layers without end may draw."""
    return name not in _LAYERS or not isinstance(value, int) or value < 1000 or value > 2**40


@st.composite
def changed(draw: st.DrawFn) -> Fields:
    """A config that ships with some fields changed, gone or new; in its text model too, if it has one."""
    config = dict(shipped_fields(draw(st.sampled_from(sorted(shipped_configs())))))
    nested = isinstance(config.get("text_config"), dict) and draw(st.booleans())
    target = dict(config["text_config"]) if nested else config
    known = sorted(target) + list(_NEW)
    for name in draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True)):
        action = draw(st.sampled_from(["change", "change", "delete", "nudge"]))
        if action == "delete":
            target.pop(name, None)
        elif action == "nudge" and isinstance(target.get(name), int):
            target[name] = draw(sizes.filter(lambda value, name=name: few_layers(name, value)))
        else:
            target[name] = draw(json_values.filter(lambda value, name=name: few_layers(name, value)))
    if nested:
        config["text_config"] = target
    return config


_NEW = (
    "quantization_config", "per_layer_config", "num_key_value_heads", "head_dim", "sliding_window", "layer_types",
    "dtype", "intermediate_size", "num_experts_per_tok", "num_kv_shared_layers", "mlp_layer_types",
    "use_sliding_window", "max_window_layers", "no_rope_layers", "final_logit_softcapping", "mamba_ssm_cache_dtype",
    "attention_chunk_size", "moe_intermediate_size", "num_local_experts", "num_experts", "n_inner",
)  # fmt: skip
engines = st.sampled_from(["hf", "vllm", "logical"])


@given(config=changed(), engine=engines, new=st.integers(0, 2))
@settings(max_examples=40)
def test_a_config_with_fields_changed_gives_a_budget_or_a_sentence(config: Fields, engine: Any, new: int):
    assert_budget_or_sentence(config, engine=engine, new=new, context=100)


_USED = sorted(
    {name for config in shipped_configs() for name in shipped_fields(config)}
    | {name for config in shipped_configs() for name in (shipped_fields(config).get("text_config") or {})}
    | set(_NEW)
    | {"hybrid_override_pattern", "cross_attention_layers", "full_attn_idxs", "conv_L_cache", "attn_layer_indices"}
)


@given(
    kind=st.sampled_from(KINDS),
    drawn=st.dictionaries(st.sampled_from(_USED) | st.text(max_size=6), json_values, max_size=25),
    engine=engines,
)
@settings(max_examples=30)
def test_any_fields_of_a_known_family_give_a_budget_or_a_sentence(kind: str, drawn: Fields, engine: Any):
    config = {name: value for name, value in drawn.items() if few_layers(name, value)}
    assert_budget_or_sentence({**config, "model_type": kind}, engine=engine)


@given(
    kind=st.sampled_from(KINDS),
    drawn=st.dictionaries(st.sampled_from(_USED), st.integers(1, 40) | st.booleans() | st.none(), max_size=20),
    engine=engines,
)
@settings(max_examples=30)
def test_small_numbers_in_any_fields_of_a_known_family_give_a_budget_or_a_sentence(
    kind: str, drawn: Fields, engine: Any
):
    base = {**GEMMA, **NEMOTRON, "model_type": kind, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50}
    base |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "q_lora_rank": None}
    assert_budget_or_sentence({**base, **drawn, "model_type": kind}, engine=engine)


@given(document=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=30)
def test_any_file_gives_a_budget_or_a_sentence(document: bytes, tmp_path_factory: pytest.TempPathFactory):
    assert_budget_or_sentence(in_folder(tmp_path_factory.mktemp("any"), document))
