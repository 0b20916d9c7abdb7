"""Model folders are untrusted input: each loads as a model or is refused in a sentence, and runs no code."""

import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprobe.errors import UserError
from kvprobe.inference.model import Model, load
from kvprobe.memory.budget import budget
from kvprobe.models.files import MAX_JSON_BYTES, SPARE_NUMBERS, bounded
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused

REFUSALS = (ValueError, OSError, MemoryError)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and its tokenizer as Hugging Face saves them."""
    path = tmp_path_factory.mktemp("model") / "saved"
    model = llama(tokenizer=tiny_tokenizer(), intermediate_size=64)
    model.lanes.plain.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def changed(path: Path, **values: Any) -> None:
    """The JSON file with some of its values replaced."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class Marks:
    """Unpickled, it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("beside", [None, "other.safetensors"])
def test_pickled_weights_are_not_read_even_beside_safetensors_of_another_name(folder: Path, beside: str | None):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / (beside or "model.safetensors.moved"))
    refused(lambda: load(folder), "no model.safetensors ", "pickled weights are not read")


@pytest.mark.parametrize("name", ["weights.bin", "../weights.safetensors", "/etc/passwd", "absent.safetensors", ""])
def test_an_index_names_safetensors_of_its_own_folder(folder: Path, tmp_path: Path, name: str):
    tensors = load_file(folder / "model.safetensors")
    shutil.move(folder / "model.safetensors", tmp_path / "weights.safetensors")
    (folder / "weights.bin").write_bytes(pickle.dumps(Marks(tmp_path / "ran")))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(lambda: load(folder), "names")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("setting", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_does_not_choose_the_kernel(folder: Path, setting: str):
    changed(folder / "config.json", **{setting: "kernels-community/anything"})
    assert load(folder).lanes.plain.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transformers_weights": "adapter_model.bin"}, "'transformers_weights', which chooses"),
        ({"configuration_files": ["config.9.json"]}, "'configuration_files', which chooses"),
        ({"fusion_config": {"patch_embeddings": True}}, "'fusion_config', which chooses"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq need gptqmodel"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq need gptqmodel"),
        ({"num_hidden_layers": 2}, "leaves out layers"),
        ({"num_hidden_layers": -1}, "leaves out layers"),
        ({"num_hidden_layers": 10**12}, "much larger"),
        ({"vocab_size": 10**9}, "much larger"),
        ({"intermediate_size": 10**8}, "much larger"),
        ({"hidden_size": -32}, "do not agree"),
        ({"num_attention_heads": 0}, "do not agree"),
        ({"num_attention_heads": "4"}, "do not agree"),
        ({"rope_parameters": {"rope_type": "x"}}, "do not agree"),
        ({"model_type": ["llama"]}, "do not agree"),
        ({"model_type": "theirs"}, "do not agree"),
        ({"dtype": "float1"}, "do not agree"),
    ],
    ids=str,
)
def test_a_config_that_describes_another_model_is_refused(folder: Path, changes: dict[str, Any], said: str):
    changed(folder / "config.json", **changes)
    refused(lambda: load(folder), said)


def test_an_adapter_beside_a_model_is_refused(folder: Path):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/other"}))
    refused(lambda: load(folder), "holds an adapter (adapter_config.json) beside a model")


def test_a_tokenizer_runs_no_code_of_its_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "theirs.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\nclass Theirs: pass\n")
    changed(
        folder / "tokenizer_config.json",
        tokenizer_class="Theirs",
        auto_map={"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"]},
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    try:
        load(folder)
    except ValueError as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017 - it may also load, as a tokenizer of the library's own
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", "[" * 100_000, '{"a":' * 100_000, "\x00"], ids=lambda text: text[:4]
)
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, name: str, content: str):
    (folder / name).write_text(content)
    refused(lambda: load(folder), name)


def test_an_endless_file_is_not_read(folder: Path):
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    refused(lambda: load(folder), "neither a file nor a folder")
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(" " * (MAX_JSON_BYTES + 1))
    refused(lambda: load(folder), "larger than 16 MiB")


@pytest.mark.parametrize("ends", ["a", [2, "a"], {"id": 2}, 1.5, True])
def test_stop_tokens_are_whole_numbers(folder: Path, ends: Any):
    changed(folder / "generation_config.json", eos_token_id=ends)
    refused(lambda: load(folder), "eos_token_id")


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**40, 2**40]},
        {"shape": [-1, -32]},
        {"shape": "64"},
        {"dtype": "OBJECT"},
        {"dtype": 5},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [64, 0]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_a_header_that_does_not_describe_its_file_is_refused(folder: Path, change: dict[str, Any]):
    path = folder / "model.safetensors"
    header, data = header_of(path)
    name = next(name for name in header if name != "__metadata__")
    content = json.dumps({**header, name: {**header[name], **change}}).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    refused(lambda: load(folder), "truncated or not a safetensors file")


@pytest.mark.parametrize("size", [0, 1, 2**30, 2**63])
def test_a_header_of_an_impossible_size_is_refused(folder: Path, size: int):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])
    refused(lambda: load(folder), "truncated or not a safetensors file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(lambda: load(folder), f"{name} of ", " has NaN or infinity")


def test_a_loaded_model_that_is_not_finite_is_refused():
    plain = llama().lanes.plain
    with torch.no_grad():
        plain.model.embed_tokens.weight[7, 0] = torch.nan
    refused(lambda: load(plain), "embed_tokens.weight of LlamaForCausalLM has NaN")


def test_large_weights_whose_sum_overflows_are_finite():
    plain = llama().lanes.plain
    with torch.no_grad():
        plain.model.norm.weight.fill_(3e38)
    assert load(plain).lanes.plain is plain


WRONG: list[Any] = [None, True, -1, 0, 7, 10**9, 2**70, 1.5, 1e300, "", "a", "../x", [], [1], {}, {"a": 1}]


def mutated(folder: Path, seed: int) -> None:
    """One of the folder's files changed at random: bytes turned or cut, or a JSON value replaced."""
    rng = random.Random(seed)
    path = rng.choice(sorted(folder.iterdir()))
    kind = rng.choice(["flip", "cut", "value", "value", "value"])
    if kind == "value" and path.suffix == ".json":
        content = json.loads(path.read_text())
        place = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = rng.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
                break
            place = place[key]
        place[key] = rng.choice(WRONG)
        path.write_text(json.dumps(content))
        return
    content = bytearray(path.read_bytes())
    if kind == "cut":
        content = content[: rng.randrange(len(content))]
    else:
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content) if rng.random() < 0.5 else min(400, len(content)))] = rng.randrange(256)
    path.write_bytes(content)


def read_something(model: Model) -> None:
    model.prefill(Tokens.of([1, 2, 3]))
    if model.tokenizer is not None:
        chat = Transcript.from_messages([{"role": "user", "content": "the user asks for 12."}])
        model.generate(chat, max_new_tokens=2)


@pytest.mark.parametrize(
    "seeds", [range(start, start + 30) for start in range(0, 180, 30)], ids=lambda seeds: seeds.start
)
def test_a_mutated_folder_is_read_or_refused_in_a_sentence(saved: Path, tmp_path: Path, seeds: range):
    for seed in seeds:
        folder = Path(shutil.copytree(saved, tmp_path / str(seed)))
        mutated(folder, seed)
        for use in (lambda folder: read_something(load(folder)), lambda folder: budget(folder, context=64)):
            try:
                use(folder)
            except REFUSALS as refusal:
                assert "\n" not in str(refusal), seed  # noqa: PT017 - a mutation may also leave a sound model
            except BaseException as error:  # a panic in Rust is no Exception
                raise AssertionError(f"seed {seed}: {type(error).__name__}") from error


def test_tied_weights_count_once_in_the_size_of_a_model():
    size = SPARE_NUMBERS // 2
    with torch.device("meta"):
        large = torch.nn.Parameter(torch.empty(size))
    with bounded([size]):
        for _ in range(6):
            torch.nn.Module().register_parameter("weight", large)
    with bounded([size]), torch.device("meta"):
        others = [torch.nn.Linear(1, size, bias=False) for _ in range(4)]
        with pytest.raises(UserError, match="much larger model"):
            others.append(torch.nn.Linear(1, size, bias=False))
