"""GGUF files: every tensor and setting is used or refused by name, and no byte of a header hangs the loader."""

import math
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from kvprobe.errors import UserError
from kvprobe.inference.model import Model, load
from kvprobe.models.gguf_header import read_header
from kvprobe.models.gguf_model import write_folder
from tests.models import gpt2, llama, tiny_tokenizer
from tests.models.gguf_file import write_gguf
from tests.refusals import refused

IDS = torch.randint(2, 60, (1, 80), generator=torch.Generator().manual_seed(0))
_TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 7}


def tiny(name: str, **changes: Any) -> Model:
    """A tiny model of a class of transformers, whose norms and biases are not those that all models begin with."""
    kind: Any = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    plain = kind(kind.config_class(**_TINY | changes))
    with torch.no_grad():
        for key, weight in plain.named_parameters():
            if weight.ndim == 1:
                weight += 0.1 * torch.randn_like(weight)
                assert "norm" in key or "bias" in key
    return load(plain, tokenizer=tiny_tokenizer())


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> Model:
    return llama(tokenizer=tiny_tokenizer())


def logits_of(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.lanes.plain(input_ids=IDS).logits


def same_numbers(path: Path, model: Model) -> Model:
    again = load(path)
    assert type(again.lanes.plain) is type(model.lanes.plain)
    assert torch.allclose(logits_of(again), logits_of(model), rtol=0, atol=2e-6)
    return again


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        ("Gemma3", _GEMMA),
        ("Phi3", {"sliding_window": 20}),
        ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 16}),
        ("Qwen3Moe", _EXPERTS | {"norm_topk_prob": True}),
    ],
)
def test_a_file_of_each_architecture_computes_what_its_model_computes(
    tmp_path: Path, name: str, changes: dict[str, Any]
):
    model = tiny(name, **changes)
    same_numbers(write_gguf(model, tmp_path / "m.gguf"), model)


def test_a_gpt2_file_computes_what_its_model_computes(tmp_path: Path):
    model = gpt2(tokenizer=tiny_tokenizer())
    same_numbers(write_gguf(model, tmp_path / "m.gguf"), model)


def stretched(factor: float, low: float, high: float, original: int, count: int) -> torch.Tensor:
    """The tensor by which llama.cpp's converter writes Llama 3's scaling down."""
    waves = [2 * math.pi * 10_000.0 ** (index / count) for index in range(count)]
    kept = [min(max((original / wave - low) / (high - low), 0), 1) for wave in waves]
    return torch.tensor([1 / ((1 - share) / factor + share) for share in kept])


@pytest.mark.parametrize(
    ("factor", "low", "high", "original", "d_head"),
    [(8.0, 1.0, 4.0, 64, 8), (32.0, 1.0, 4.0, 8192, 64), (4.0, 2.0, 8.0, 128, 32), (16.0, 1.0, 16.0, 512, 16)],
)
def test_the_tensor_of_frequencies_is_used(
    tmp_path: Path, factor: float, low: float, high: float, original: int, d_head: int
):
    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "original_max_position_embeddings": original, **scaling}
    model = tiny("Llama", rope_parameters=rope, head_dim=d_head)
    tensor = stretched(factor, low, high, original, d_head // 2)
    again = same_numbers(write_gguf(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": tensor}), model)
    assert again.lanes.can_reindex


@pytest.mark.parametrize("factors", [[1.0, 3.0, 2.0, 5.0], [0.5, 0.5, 0.5, 0.5], [1.0, 2.0]])
def test_frequencies_that_no_scaling_gives_are_refused_by_name(tmp_path: Path, model: Model, factors: list[float]):
    path = write_gguf(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": torch.tensor(factors)})
    refused(lambda: load(path), "has the tensors rope_freqs.weight, which kvprobe cannot use")


_SCALED = {"arch__rope__scaling__type": "yarn", "arch__rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear", "factor": 4.0}, _SCALED | {"arch__rope__scaling__type": "linear"}),
        ({"rope_type": "linear", "factor": 4.0}, _SCALED | {"arch__rope__scaling__type": None}),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, _SCALED),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            _SCALED | {"arch__rope__scaling__original_context_length": 32},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
            _SCALED | {"arch__rope__scaling__original_context_length": 32, "arch__rope__scaling__yarn_beta_fast": 16.0},
        ),
    ],
)
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_scaled_frequencies_are_used(tmp_path: Path, name: str, rope: dict[str, Any], said: dict[str, Any]):
    model = tiny(name, rope_parameters={"rope_theta": 10_000.0} | rope)
    same_numbers(write_gguf(model, tmp_path / "m.gguf", **said), model)


def test_frequencies_that_change_with_the_length_are_used(tmp_path: Path):
    long, short = torch.linspace(1, 20, 4), torch.linspace(1, 2, 4)
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "long_factor": long.tolist()}
    rope |= {"short_factor": short.tolist(), "attention_factor": 1.19, "original_max_position_embeddings": 40}
    model = tiny("Phi3", rope_parameters=rope, original_max_position_embeddings=40)
    said: dict[str, Any] = {
        "arch__rope__scaling__original_context_length": 40,
        "arch__rope__scaling__attn_factor": 1.19,
    }
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    with pytest.warns(UserWarning, match="other rotary frequencies from position 40 on"):
        same_numbers(write_gguf(model, tmp_path / "m.gguf", extra=extra, **said), model)


def test_a_part_of_a_head_is_rotated_and_full_layers_of_gemma_are_scaled_alone(tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    phi = tiny("Phi3", sliding_window=None, rope_parameters=rope)
    same_numbers(write_gguf(phi, tmp_path / "phi.gguf", arch__rope__dimension_count=4), phi)
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    near = {"rope_type": "default", "rope_theta": 10_000.0}
    gemma = tiny("Gemma3", **_GEMMA, rope_parameters={"full_attention": full, "sliding_attention": near})
    said: dict[str, Any] = {"arch__rope__scaling__type": "linear", "arch__rope__scaling__factor": 8.0}
    same_numbers(write_gguf(gemma, tmp_path / "gemma.gguf", **said), gemma)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.5), ("attention.sliding_window", 8), ("attention.causal", False),
        ("attention.value_length", 4), ("attention.key_length_swa", 4), ("attention.clamp_kqv", 8.0),
        ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("logit_scale", 0.1),
        ("residual_scale", 0.2), ("embedding_scale", 12.0), ("expert_count", 8), ("expert_used_count", 2),
        ("rope.dimension_count", 4), ("rope.scaling.type", "longrope"), ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.yarn_log_multiplier", 0.1), ("use_parallel_residual", True), ("pooling_type", 1),
        ("something.new", 1),
    ],
)  # fmt: skip
def test_a_setting_that_the_model_cannot_follow_is_refused_by_name(tmp_path: Path, model: Model, key: str, value: Any):
    path = write_gguf(model, tmp_path / "m.gguf", **{f"arch__{key.replace('.', '__')}": value})
    refused(lambda: load(path), re.compile(rf"says llama\.{key}=.*, which kvprobe cannot follow"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("arch__block_count", 4, "llama.block_count=4, but has the tensors of 3 blocks"),
        ("arch__block_count", 2, "llama.block_count=2, but has the tensors of 3 blocks"),
        ("arch__attention__layer_norm_rms_epsilon", None, "does not say its llama.attention.layer_norm_rms_epsilon"),
        ("arch__attention__head_count", [4, 2, 4], "do not describe the model that it holds (its layers differ"),
        ("arch__feed_forward_length", 40, "but its settings ask for (40, 32)"),
        ("arch__vocab_size", 60, "but its settings ask for (60, 32)"),
        ("llamb__rope__freq_base", 500.0, "says llamb.rope.freq_base, but its architecture is llama"),
        ("general__architecture", "bert", "a model of architecture bert"),
        ("general__type", "adapter", "is a adapter of architecture llama"),
    ],
)
def test_settings_that_do_not_fit_the_tensors_are_refused(
    tmp_path: Path, model: Model, key: str, value: Any, words: str
):
    path = write_gguf(model, tmp_path / "m.gguf", **{key: value})
    refused(lambda: load(path), words)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_v.weight", "blk.2.ffn_norm.weight"]
)
def test_a_missing_tensor_is_refused_and_nothing_is_kept(tmp_path: Path, cache_folder: Path, model: Model, name: str):
    refused(
        lambda: load(write_gguf(model, tmp_path / "m.gguf", without=[name])),
        re.compile("lacks 1 tensors|has no token_embd"),
    )
    assert not list(cache_folder.glob("models-2/*"))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.1.ffn_gate_exps.weight", "blk.0.attn_sinks.weight",
             "rope_factors_long.weight", "mm.0.weight", "output.scale"]
)  # fmt: skip
def test_a_tensor_that_the_model_has_no_place_for_is_refused_by_name(tmp_path: Path, model: Model, name: str):
    path = write_gguf(model, tmp_path / "m.gguf", extra={name: torch.ones(4)})
    refused(lambda: load(path), name, "which kvprobe cannot use")


def split_in_parts(model: Model, folder: Path) -> list[Path]:
    folder.mkdir()
    write_gguf(model, folder / "m.gguf", split=8)
    return sorted(folder.iterdir())


def test_a_split_file_is_joined_whichever_part_is_given(tmp_path: Path, model: Model):
    parts = split_in_parts(model, tmp_path / "parts")
    whole = load(write_gguf(model, tmp_path / "m.gguf"))
    first = same_numbers(parts[0], model)
    assert first.fingerprint == load(parts[2]).fingerprint == whole.fingerprint


def test_a_part_that_is_absent_or_of_another_model_is_refused(tmp_path: Path, cache_folder: Path, model: Model):
    parts = split_in_parts(model, tmp_path / "parts")
    other = split_in_parts(llama(1, tokenizer=tiny_tokenizer(), num_hidden_layers=2), tmp_path / "other")
    assert len(parts) == 4
    kept = parts[1].read_bytes()
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        refused(lambda part=part: load(part), "is one of 4 parts of a model", f"{parts[1].name} is not beside it")
    for stray in (parts[2].read_bytes(), other[1].read_bytes(), other[0].read_bytes()):
        parts[1].write_bytes(stray)
        refused(lambda: load(parts[0]), f"{parts[1].name} does not say that it is part 2 of the 4")
    parts[1].write_bytes(kept)
    alone = parts[0].rename(tmp_path / "m.gguf")
    refused(lambda: load(alone), "is of a model in 4 parts, but its name is that of 1")
    refused(lambda: load(shutil.copy(alone, tmp_path / "m-00001-of-00001.gguf")), "is of a model in 4 parts")
    refused(lambda: load(shutil.copy(alone, tmp_path / "m-00002-of-00001.gguf")), "is not beside it")
    assert not list(cache_folder.glob("models-2/*"))


@pytest.mark.parametrize(
    ("said", "start", "end"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_eos_token": True}, False, True),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "tekken"}, True, False),
        ({"pre": "qwen2"}, False, False),
    ],
)
def test_start_and_end_tokens_are_those_of_the_file(
    tmp_path: Path, model: Model, said: dict[str, Any], start: bool, end: bool
):
    path = write_gguf(model, tmp_path / "m.gguf", **{f"tokenizer__ggml__{key}": value for key, value in said.items()})
    for tokenizer in (load(path).tokenizer, load(path).tokenizer):
        ids = tokenizer("bad")["input_ids"]
        assert ids[:1] == [0] if start else ids[0] > 1
        assert ids[-1:] == [1] if end else ids[-1] > 1
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_answers_end_at_the_ends_of_turns_and_messages(tmp_path: Path, model: Model):
    said: dict[str, Any] = {"tokenizer__ggml__eot_token_id": 7, "tokenizer__ggml__eom_token_id": 9}
    plain = load(write_gguf(model, tmp_path / "m.gguf", **said)).lanes.plain
    assert plain.generation_config is not None
    assert plain.generation_config.eos_token_id == [1, 7, 9]


def test_digits_and_spaces_are_split_as_the_file_says(tmp_path: Path, model: Model):
    tokens = {
        split: load(write_gguf(model, tmp_path / f"{split}.gguf", tokenizer__ggml__pre=split)).tokenizer("b 12")
        for split in ("gpt-2", "starcoder", "smollm")
    }
    # "Ġ1" is a token of the vocabulary, but not where each digit is split off first.
    assert len(tokens["gpt-2"]["input_ids"]) + 1 == len(tokens["starcoder"]["input_ids"])
    assert tokens["smollm"]["input_ids"] == tokens["starcoder"]["input_ids"]


@pytest.mark.parametrize("split", [None, "default"])
def test_a_file_that_does_not_say_how_it_splits_text_is_warned_of(tmp_path: Path, model: Model, split: str | None):
    path = write_gguf(model, tmp_path / "m.gguf", tokenizer__ggml__pre=split)
    with pytest.warns(UserWarning, match="it is split as for GPT-2"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pre", "some-new-one", "tokenizer.ggml.pre='some-new-one' is not known"),
        ("model", "rwkv", "tokenizer.ggml.model='rwkv' is not known"),
        ("bos_token_id", 999, "tokenizer.ggml.bos_token_id=999, but 64 tokens"),
        ("eos_token_id", 64, "tokenizer.ggml.eos_token_id=64, but 64 tokens"),
        ("remove_extra_whitespaces", True, "tokenizer.ggml.remove_extra_whitespaces=True is not known"),
        ("something_new", 1, "tokenizer.ggml.something_new=1 is not known"),
        ("merges", ["a", "b c d"], "cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, model: Model, key: str, value: Any, words: str
):
    path = write_gguf(model, tmp_path / "m.gguf", **{f"tokenizer__ggml__{key}": value})
    refused(lambda: load(path), words)


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_space_stands_before_a_text_of_sentencepiece_unless_the_file_says_no(
    tmp_path: Path, model: Model, prefix: bool | None
):
    entries = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", *(f"x{number}" for number in range(57))]
    said: dict[str, Any] = {"model": "llama", "pre": None, "merges": None, "bos_token_id": None, "eos_token_id": None}
    said |= {"tokens": entries, "scores": [-float(rank) for rank in range(64)], "token_type": [2, 3, 3] + [1] * 61}
    said |= {"add_space_prefix": prefix}
    path = write_gguf(model, tmp_path / "m.gguf", **{f"tokenizer__ggml__{key}": value for key, value in said.items()})
    tokenizer = load(path).tokenizer
    ids = tokenizer("ab a")["input_ids"]
    assert ids == [1, *([4, 5, 6] if prefix is False else [6, 5, 6])]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab a"


def test_a_flipped_byte_of_the_header_ends_at_once_in_a_model_or_a_sentence(tmp_path: Path):
    path = write_gguf(tiny("Llama", num_hidden_layers=1), tmp_path / "m.gguf")
    whole, draws = path.read_bytes(), random.Random(0)
    broken = tmp_path / "broken.gguf"
    for place in range(whole.index(b"blk.0.attn_norm.weight") + 60):
        flipped = bytearray(whole)
        flipped[place] ^= draws.choice([0x01, 0x10, 0x80, 0xFF])
        broken.write_bytes(flipped)
        started = time.process_time()
        try:
            header = read_header([broken])
            if place < 400 or place % 16 == 0:
                write_folder(header, tmp_path / f"{place}")
        except UserError:
            pass
        assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("place", "bytes_"),
    [
        (4, b"\x01\0\0\0"),
        (4, b"\0\0\0\3"),
        (8, b"\xff" * 8),
        (16, b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
        (24, b"\xff" * 8),
    ],
)
def test_a_header_of_absurd_counts_is_refused(tmp_path: Path, model: Model, place: int, bytes_: bytes):
    path = write_gguf(model, tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + bytes_ + whole[place + len(bytes_) :])
    refused(lambda: load(path), "m.gguf is not a GGUF file that is whole")


@pytest.mark.parametrize("more", [b"\0" * 64, b"abc"])
def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path, model: Model, more: bytes):
    path = write_gguf(model, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes() + more)
    refused(lambda: load(path), "its tensors end at byte")


def test_numbers_stored_in_a_way_that_is_not_known_are_refused(tmp_path: Path, model: Model):
    path = write_gguf(model, tmp_path / "m.gguf")
    whole = path.read_bytes()
    place = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    assert whole[place : place + 4] == bytes(4)
    path.write_bytes(whole[:place] + int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little") + whole[place + 4 :])
    refused(lambda: load(path), "stores 'output_norm.weight' as I32, which kvprobe cannot read")
