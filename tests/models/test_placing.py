"""Weights on disk, and weights of 8 and 4 bits: what kvprobe computes with them, and whose caches they read."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprobe.cli.flags import Loading
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.stages import refuse_other_models
from kvprobe.experiments.work import TABLE, Work, part_of
from kvprobe.inference.elsewhere import SameModel
from kvprobe.inference.model import Model, load
from kvprobe.inference.room import loading_bytes
from kvprobe.models.files import bounded, check_folder
from kvprobe.models.loading import free_bytes
from kvprobe.models.placing import Placing, use_quanto_uncompiled
from tests.models import llama, tiny_tokenizer
from tests.models.test_adapters import adapter
from tests.refusals import refused

TEXT, MORE = "the user had a house", " the end"
ON_DISK: dict[str, Any] = {"device_map": {"": "disk"}}
LAYER = "model.layers.1.self_attn.v_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    model, path = llama(tokenizer=tiny_tokenizer()), tmp_path_factory.mktemp("models") / "sharded"
    model.lanes.plain.save_pretrained(path, max_shard_size="40KB")
    model.tokenizer.save_pretrained(path)
    assert len([*path.glob("*.safetensors")]) > 2
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> Model:
    return load(folder)


def answers(model: Model) -> list[torch.Tensor]:
    """Logits with a slot masked and another patched, on both lanes."""
    cache, donor = model.prefill(TEXT), model.prefill("the user had a mouse")
    edited = cache.mask(slots=[1]).patch(donor, slots=[4])
    return [model.extend(edited, MORE, lane=lane)[1] for lane in ("plain", "hooked")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_read_from_disk_are_the_same_model(folder: Path, whole: Model, dtype: str):
    model = load(folder, dtype=dtype, **ON_DISK)
    assert {weight.device.type for weight in model.lanes.plain.parameters()} == {"meta"}
    assert model.lanes.device.type == "cpu"
    same = whole if dtype == "float32" else load(folder, dtype=dtype)
    assert model.fingerprint == same.fingerprint
    for ours, theirs in zip(answers(model), answers(same), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(model.lanes.output_weights(1), same.lanes.output_weights(1))
    assert same.extend(model.prefill(TEXT), MORE)[0].slots > len(TEXT.split())


def test_memory_that_is_too_small_leaves_weights_on_disk(folder: Path, whole: Model, monkeypatch: pytest.MonkeyPatch):
    model = load(folder, max_memory={"cpu": "60 KB"})
    assert {weight.device.type for weight in model.lanes.plain.parameters()} == {"cpu", "meta"}
    assert model.fingerprint == whole.fingerprint
    assert torch.equal(model.prefill(TEXT).layers[2]["V"], whole.prefill(TEXT).layers[2]["V"])
    held = sum(weight.nbytes for weight in model.lanes.plain.parameters() if not weight.is_meta)
    largest = max(weight.nbytes for weight in model.lanes.plain.parameters() if weight.is_meta)
    assert model.budget(context=8).weights == held + largest <= 60_000 < whole.budget(context=8).weights
    saved = [loading_bytes(folder, torch.float32, Placing(max_memory=most)) for most in (None, {"cpu": "60 KB"})]
    assert saved[0] - saved[1] == whole.budget(context=8).weights - 60_000
    monkeypatch.setattr("kvprobe.inference.room.free_bytes", lambda _: 60_000)
    refused(lambda: load(folder, max_memory={"cpu": "60 KB"}), "use dtype='bfloat16', less max_memory or a smaller")
    assert load(folder, device_map={"": "disk"}).fingerprint == whole.fingerprint
    monkeypatch.setattr("kvprobe.inference.room.PROVED", 1)
    beside = loading_bytes(folder, torch.float32, Placing(max_memory={"cpu": "1B"})) - 1
    monkeypatch.setattr("kvprobe.inference.room.free_bytes", lambda _: beside + 60_000)
    room = load(folder, device_map="auto")
    assert room.lanes.plain.hf_device_map == model.lanes.plain.hf_device_map
    assert room.placing == Placing("auto")


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "float32"), ("int4", "float32"), ("int8", "bfloat16")])
def test_rounded_weights_are_another_model_on_both_lanes(folder: Path, whole: Model, quantization: Any, dtype: str):
    model = load(folder, quantization=quantization, dtype=dtype)
    assert model.name == f"{folder} in {quantization}"
    assert f"weights in {quantization} by quanto" in str(model)
    plain, hooked = answers(model)
    assert torch.allclose(plain, hooked, atol=1e-5 if dtype == "float32" else 0.2)
    rounded = model.lanes.output_weights(1) - whole.lanes.output_weights(1)
    assert 0 < float(rounded.abs().max()) < (0.02 if quantization == "int8" else 0.3)
    assert model.fingerprint == load(folder, quantization=quantization, dtype=dtype).fingerprint
    refused(lambda: load(folder, dtype=dtype).extend(model.prefill(TEXT), MORE), "differs in weights")


def test_bits_are_unpacked_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    from optimum.quanto.library.extensions import cpp, extension

    def compiled(**_: Any) -> None:
        raise AssertionError("a compiler was asked for")

    monkeypatch.setattr(extension, "load", compiled)
    monkeypatch.setattr(cpp.ext, "_lib", None)
    use_quanto_uncompiled()
    packed = torch.tensor([[0b11100100], [0b00000001]], dtype=torch.uint8)
    assert torch.ops.quanto.unpack(packed, 2)[:, 0].tolist() == [0, 1, 1, 0, 2, 0, 3, 0]
    assert torch.ops.quanto.unpack(packed, 4)[:, 0].tolist() == [4, 1, 14, 0]


@pytest.mark.parametrize("placed", [ON_DISK, {"quantization": "int8"}, {"quantization": "int4"}])
def test_an_adapter_beside_such_weights_is_one_more_model(
    folder: Path, whole: Model, tmp_path: Path, placed: dict[str, Any]
):
    weights = {LAYER: whole.lanes.plain.get_parameter(f"{LAYER}.weight").clone()}
    added = adapter(tmp_path / "adapter", str(folder), weights)
    base, merged = load(folder, **placed), load(folder, adapter=added)
    tuned = base.adapted(added)
    value = tuned.prefill(TEXT).layers[1]["V"]
    moved = float((merged.prefill(TEXT).layers[1]["V"] - whole.prefill(TEXT).layers[1]["V"]).abs().max())
    apart = float((merged.prefill(TEXT).layers[1]["V"] - value).abs().max())
    assert apart <= {None: 1e-5, "int8": 0.05, "int4": 0.4}[placed.get("quantization")] * moved
    plain, hooked = answers(tuned)
    assert torch.allclose(plain, hooked, atol=1e-5 * float(plain.abs().max()))
    assert tuned.fingerprint == load(added, **placed).fingerprint != base.fingerprint
    for one, other in ((base, tuned), (tuned, base)):
        refused(lambda one=one, other=other: one.extend(other.prefill(TEXT), MORE), "differs in weights")


def test_two_adapters_beside_rounded_weights_add_up(folder: Path, whole: Model, tmp_path: Path):
    weights = {LAYER: whole.lanes.plain.get_parameter(f"{LAYER}.weight").clone()}
    added = adapter(tmp_path / "adapter", str(folder), weights)
    models = [load(folder, quantization="int8")]
    for _ in range(2):
        models.append(models[-1].adapted(added))
    values = [model.prefill(TEXT).layers[1]["V"] for model in models]
    assert torch.allclose(values[2] - values[1], values[1] - values[0], atol=1e-4)
    assert len({model.fingerprint for model in models}) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": "cpu", **ON_DISK}, "device and device_map both say where the model is"),
        ({"offload_folder": "elsewhere"}, "offload_folder is for weights that device_map puts on disk"),
        ({"quantization": "int8", **ON_DISK}, "leave out device_map"),
        ({"quantization": "bnb-nf4"}, "bitsandbytes"),
        ({"max_memory": {"cpu": "much"}}, "max_memory is 'much'"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_loaded(folder: Path, given: dict[str, Any], words: str):
    refused(lambda: load(folder, **given), words)


def test_a_loaded_model_is_not_placed_again(whole: Model):
    refused(lambda: load(whole, quantization="int8"), "is loaded already")
    refused(lambda: load(whole.lanes.plain, device_map="auto"), "is loaded already")


@pytest.mark.parametrize(
    ("packing", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq need gptqmodel, which is not installed"),
        ({"load_in_4bit": True}, "bitsandbytes need bitsandbytes, which is not installed"),
        ({"quant_method": "quark"}, "quantised by 'quark'"),
        ("fp8", "an unnamed method"),
    ],
)
def test_weights_quantised_by_what_is_not_installed_or_read_are_refused(
    folder: Path, tmp_path: Path, packing: object, words: str
):
    import json

    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": packing}))
    refused(lambda: check_folder(tmp_path), words)


def test_a_file_of_packed_weights_may_describe_a_model_of_more_numbers():
    def built() -> None:
        with torch.device("meta"):
            torch.nn.Linear(2**14, 2**13, bias=False)

    with pytest.raises(UserError, match="much larger model"), bounded([2**24]):
        built()
    with bounded([2**24], packed=8):
        built()


def test_flags_of_the_command_line_are_the_arguments_of_load():
    flags = Loading(max_memory=("0=20GiB", "cpu=8GB"), device_map="auto", chunk=512)
    assert flags.choices() == {
        "device_map": "auto",
        "max_memory": {0: "20GiB", "cpu": "8GB"},
        "offload_folder": None,
        "quantization": None,
        "chunk": 512,
    }
    refused(Loading(max_memory=("20GiB",)).choices, "max_memory has '20GiB'")


def test_of_an_adapter_its_base_is_held_against_free_memory(
    folder: Path, whole: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    added = adapter(
        tmp_path / "adapter", str(folder), {LAYER: whole.lanes.plain.get_parameter(f"{LAYER}.weight").clone()}
    )
    monkeypatch.setattr("kvprobe.inference.room.free_bytes", lambda _: 3 * 2**10)
    refused(lambda: load(added), f"The weights of {folder.name} and what tests them need")
    assert load(added, check_memory=False).fingerprint != whole.fingerprint


def group(folder: Path, names: tuple[str, str], limit: str, used: int, table: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip((*names, "memory.stat"), (limit, str(used), table), strict=True):
        (folder / name).write_text(content + "\n")


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize("first", [False, True])
def test_free_memory_is_what_the_tightest_group_around_the_process_leaves(tmp_path: Path, first: bool):
    groups, own = tmp_path / "groups", tmp_path / "own"
    own.write_text("4:cpu,memory:/pod/job/task\n0::/\n" if first else "1:name=systemd:/\n0::/pod/job/task\n")
    names, root, field = (V1, groups / "memory", "total_inactive_file") if first else (V2, groups, "inactive_file")

    def free() -> int:
        return free_bytes(torch.device("cpu"), groups, own)

    unlimited = free()
    group(root / "other", names, "10", 5, f"{field} 0")
    group(root / "pod/job/task", names, "9223372036854771712" if first else "max", 50, f"{field} 1")
    assert abs(free() - unlimited) < 2**30
    group(root / "pod/job", names, "5000", 3000, f"active_file 7\n{field} 500")
    group(root / "pod", names, "9000", 3000, f"{field} 0")
    assert free() == 2500
    group(root, names, "4000", 3900, f"{field} 0")
    assert free() == 100


def in_two_dtypes(model: Model, config: Settings, folder: Path) -> Iterator[dict[str, str]]:
    """Loads one name in several kinds of numbers."""
    kinds: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"quantization": "int8"}, {}]
    for kind in kinds:
        yield {"name": load(folder, **kind).name}


def test_models_of_workers_are_held_against_each_other_in_the_same_numbers(folder: Path, whole: Model, tmp_path: Path):
    _, loaded = part_of(whole, folder, Work("names", in_two_dtypes, (), TABLE), Settings())
    assert list(loaded) == [
        f"{folder} in {kind}" for kind in ("bfloat16", "float32, weights in int8 by quanto", "float32")
    ]
    known = {f"{folder} in float32": whole.fingerprint}
    for _ in range(2):
        refuse_other_models(tmp_path, loaded, known)
    for name in loaded:
        refused(
            lambda name=name: refuse_other_models(tmp_path, loaded | {name: "0" * 16 + "-0-0"}, known),
            f"{name!r} of one worker is not that of another",
        )


def test_what_is_not_loaded_by_its_name_alone_is_refused_to_a_cluster(folder: Path, whole: Model, tmp_path: Path):
    weights = {LAYER: whole.lanes.plain.get_parameter(f"{LAYER}.weight").clone()}
    added = adapter(tmp_path / "adapter", str(folder), weights)
    begin = "A cluster loads models by their name alone, and"
    refused(lambda: SameModel.of(whole.adapted(added)), begin, "load the adapter's own folder as the model")
    named = replace(whole, name="smollm2-135m with owner/adapter")
    refused(lambda: SameModel.of(named), begin, "has an adapter added")
    refused(lambda: SameModel.of(load(whole.lanes.plain)), begin, "'LlamaForCausalLM' was loaded from an object")
    for loaded in (load(added), load(folder, **ON_DISK)):
        again = SameModel.of(loaded)()
        assert (again.fingerprint, again.placing) == (loaded.fingerprint, loaded.placing)
