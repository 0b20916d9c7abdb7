"""Adapters: LoRA in a folder is added to its base; what cannot be added, or lies around a model, is refused."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model, load
from tests.models import gpt2, llama, tiny_tokenizer
from tests.refusals import refused

RANK, ALPHA = 2, 6
IDS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, path = llama(tokenizer=tiny_tokenizer()), tmp_path_factory.mktemp("models") / "base"
    model.lanes.plain.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


def adapter(folder: Path, base: str, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A folder as PEFT saves it, with adapters of the linear layers with these weights; and the weights changed."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        down, up = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
        tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        weight.data += (ALPHA / (math.sqrt(RANK) if changes.get("use_rslora") else RANK)) * (up @ down)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": base, "bias": "none"}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model.lanes.plain(input_ids=IDS).logits


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_folder_is_its_base_with_the_adapter_added(base: Path, tmp_path: Path, rslora: bool):
    expected = load(base)
    plain = expected.lanes.plain
    names = ["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"]
    weights: dict[str, torch.Tensor] = {name: plain.get_parameter(f"{name}.weight") for name in names}
    folder = adapter(tmp_path / "adapter", str(base), weights, use_rslora=rslora)
    model = load(folder)
    assert torch.allclose(logits(model), logits(expected), atol=1e-5)
    assert not torch.allclose(logits(model), logits(load(base)), atol=1e-2)
    assert model.fingerprint != load(base).fingerprint
    assert model.tokens("the user") == expected.tokens("the user")
    model.prefill("the user", lane="hooked")


def test_a_base_beside_the_adapter_and_weights_that_stand_transposed(tmp_path: Path):
    model = gpt2(tokenizer=tiny_tokenizer())
    model.lanes.plain.save_pretrained(tmp_path / "base")
    weight = model.lanes.plain.get_parameter("transformer.h.1.attn.c_attn.weight")
    folder = adapter(
        tmp_path / "adapter", "../base", {"transformer.h.1.attn.c_attn": weight.data.T}, fan_in_fan_out=True
    )
    assert torch.allclose(logits(load(folder)), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "has peft_type='PREFIX_TUNING'"),
        ({"use_dora": True}, "has use_dora='True'"),
        ({"bias": "all"}, "has bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
        ({"alpha_pattern": {"q_proj": 2}}, "has alpha_pattern="),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 2]]}, "has layer_replication="),
        ({"megatron_config": {"a": 1}}, "has megatron_config="),
        ({"something_new": 3}, "has something_new='3'"),
        ({"r": "2"}, "has r and lora_alpha="),
        ({"base_model_name_or_path": "owner/absent"}, "an adapter of 'owner/absent', which is not on this machine"),
        ({"base_model_name_or_path": None}, "which is not on this machine"),
    ],
)
def test_an_adapter_that_cannot_be_added_is_refused(base: Path, tmp_path: Path, changes: dict[str, Any], words: str):
    refused(lambda: load(adapter(tmp_path / "adapter", str(base), {}, **changes)), words)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (2, 64), "which kvprobe cannot add to a weight"),
        ("base_model.model.lm_head.weight", (64, 32), "which kvprobe cannot add to a weight"),
        (
            "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight",
            (2, 32),
            "does not fit model.layers.9.mlp.up_proj",
        ),
        (
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
            (2, 32),
            "does not fit model.layers.0.mlp.up_proj",
        ),
    ],
)
def test_tensors_that_do_not_belong_to_the_base_are_refused(
    base: Path, tmp_path: Path, name: str, shape: tuple[int, ...], words: str
):
    folder = adapter(tmp_path / "adapter", str(base), {})
    save_file({name: torch.ones(shape)}, folder / "adapter_model.safetensors")
    refused(lambda: load(folder), words)
    (folder / "adapter_model.safetensors").unlink()
    refused(lambda: load(folder), "is not there or no safetensors file")


def grown(folder: Path, base: Path, layer: int, **changes: Any) -> Path:
    """An adapter of the keys and the up-projection of one layer."""
    names = [f"model.layers.{layer}.self_attn.k_proj", f"model.layers.{layer}.mlp.up_proj"]
    plain = load(base).lanes.plain
    return adapter(folder, str(base), {name: plain.get_parameter(f"{name}.weight") for name in names}, **changes)


def test_adapters_of_one_model_share_the_weights_that_they_leave_alone(base: Path, tmp_path: Path):
    model = load(base)
    before, known = logits(model), model.fingerprint
    folders = [grown(tmp_path / str(layer), base, layer) for layer in (0, 2)]
    both = {folder: model.adapted(folder) for folder in folders}
    assert torch.equal(logits(model), before)
    assert model.fingerprint == known
    own: Any = model.lanes.plain
    for layer, (folder, tuned) in zip((0, 2), both.items(), strict=True):
        assert torch.equal(logits(tuned), logits(load(folder)))
        assert tuned.fingerprint == load(folder).fingerprint == load(base, adapter=folder).fingerprint
        assert tuned.name == f"{base} with {folder}"
        other = {
            name
            for (name, weight), (_, ours) in zip(
                tuned.lanes.plain.named_parameters(), own.named_parameters(), strict=True
            )
            if weight.data_ptr() != ours.data_ptr()
        }
        assert other == {f"model.layers.{layer}.{part}.weight" for part in ("self_attn.k_proj", "mlp.up_proj")}
    added = [logits(model.adapted(one).adapted(two)) for one, two in (folders, folders[::-1])]
    assert torch.allclose(added[0], added[1], atol=1e-4)


def test_both_lanes_compute_with_the_adapter(base: Path, tmp_path: Path):
    model = load(base)
    _ = model.lanes.hooked  # a bridge that is there must not become the adapted model's
    tuned = model.adapted(grown(tmp_path / "adapter", base, 1))
    plain, hooked = (tuned.prefill("the user", lane=lane) for lane in ("plain", "hooked"))
    for part in ("K", "V"):
        assert torch.allclose(plain.layers[2][part], hooked.layers[2][part], atol=1e-5)
        assert not torch.allclose(plain.layers[2][part], model.prefill("the user").layers[2][part], atol=1e-3)


def test_caches_with_and_without_an_adapter_refuse_each_other(base: Path, tmp_path: Path):
    model = load(base)
    one, other = (model.adapted(grown(tmp_path / str(layer), base, layer)) for layer in (0, 2))
    caches = [model.prefill("the user"), one.prefill("the user"), other.prefill("the user")]
    for first, second in ((0, 1), (1, 0), (1, 2)):
        words = "was made by another model than the base (it differs in weights)"
        refused(lambda first=first, second=second: caches[first].patch(caches[second], slots=[0]), words)
    refused(lambda: one.extend(caches[0], "the user"), "was made by another model")
    caches[1].save(tmp_path / "cache.kv")
    loaded = KVCache.load(tmp_path / "cache.kv")
    assert one.extend(loaded, "the user")[0].slots > loaded.slots
    refused(lambda: model.extend(loaded, "the user"), "was made by another model")


def test_what_is_no_adapter_of_this_model_is_refused(base: Path, tmp_path: Path):
    model = load(base)
    refused(lambda: model.adapted(base), "is a whole model, not an adapter")
    refused(lambda: load(base, adapter="elsewhere"), "hub id (owner/name) called 'elsewhere'")
    folder = adapter(tmp_path / "wide", str(base), {"model.layers.0.mlp.up_proj": torch.zeros(8, 32)})
    refused(lambda: model.adapted(folder), "is of another shape than model.layers.0.mlp.up_proj")
    broken = adapter(tmp_path / "nan", str(base), {"model.layers.0.mlp.up_proj": torch.zeros(48, 32)}, lora_alpha=1e39)
    refused(lambda: model.adapted(broken), "NaN")


class Around(torch.nn.Module):
    """What PEFT puts around a model."""

    def __init__(self, inside: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.inside, self.factor = inside, factor

    def get_base_model(self) -> torch.nn.Module:
        return self.inside

    def forward(self, **given: Any) -> Any:
        result = self.inside(**given)
        result.logits = result.logits * self.factor
        return result


def test_a_model_within_a_peft_model_is_taken_where_it_computes_the_same(base: Path):
    plain = load(base).lanes.plain
    assert load(Around(plain, 1.0)).lanes.plain is plain
    refused(lambda: load(Around(plain, 2.0)), "computes something else than the model in it")


@pytest.mark.parametrize(("name", "value"), [("alora_invocation_tokens", [5, 6]), ("n_tasks", 2), ("xlora_depth", 1)])
def test_an_adapter_that_acts_as_peft_says_at_each_call_is_refused(base: Path, name: str, value: object):
    """Without its invocation tokens, an Activated LoRA is silent."""
    for whole in (Around(load(base).lanes.plain, 1.0), load(base).lanes.plain):
        settings: Any = {"default": SimpleNamespace(r=4), "other": SimpleNamespace(**{name: value})}
        anything: Any = whole
        anything.peft_config = settings
        refused(lambda whole=whole: load(whole), f"has an adapter with {name}={value!r}, which acts on some tokens")


def test_an_output_projection_with_an_adapter_has_no_single_w_o(base: Path):
    model = load(base)
    attention: Any = model.lanes.attention_modules[0]
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    refused(lambda: model.lanes.output_weights(0), "is a Sequential, whose W_O is not its weight alone")
