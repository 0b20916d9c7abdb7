"""A fingerprint is the same for a model however it is loaded, and differs where a result could."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

from kvprobe import fingerprint as fingerprints
from kvprobe.cache.cache import KVCache
from kvprobe.fingerprint import PARTS, Maker, differing, fingerprint, state_of
from kvprobe.inference.model import Model, load
from kvprobe.models import unproved
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused


def test_a_model_that_is_saved_and_loaded_again_has_the_same_fingerprint(tiny: Model, tmp_path: Path):
    tiny.lanes.plain.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path, device="cpu", dtype="float32")
    assert again.fingerprint == tiny.fingerprint
    assert again.lanes.hooked
    assert load(again.lanes.plain, tokenizer=again.tokenizer).fingerprint == tiny.fingerprint


def test_reading_and_truncating_change_no_fingerprint():
    model = llama(tokenizer=tiny_tokenizer())
    before = model.fingerprint
    model.tokenizer("a b c", truncation=True, max_length=2)
    model.prefill("abc")
    with model.lanes.attention_replaced_by(lambda given: given.query):
        assert fingerprint(model.lanes.plain, model.tokenizer) == before


def _weight(plain: Any, tokenizer: Any) -> None:
    with torch.no_grad():
        next(plain.parameters()).view(-1)[3] += 1e-3


def _theta(plain: Any, tokenizer: Any) -> None:
    plain.config.rope_parameters["rope_theta"] = 20_000.0


def _norm(plain: Any, tokenizer: Any) -> None:
    plain.config.rms_norm_eps = 1e-4


def _stop(plain: Any, tokenizer: Any) -> None:
    plain.generation_config.eos_token_id = 5


def _template(plain: Any, tokenizer: Any) -> None:
    tokenizer.chat_template += " "


def _token(plain: Any, tokenizer: Any) -> None:
    tokenizer.add_tokens(["zzz"])


def _special(plain: Any, tokenizer: Any) -> None:
    tokenizer.bos_token = "a"


@pytest.mark.parametrize(
    ("part", "change"), [(0, _weight), (1, _theta), (1, _norm), (1, _stop), (2, _template), (2, _token), (2, _special)]
)
def test_every_setting_that_changes_results_changes_the_fingerprint(part: int, change: Callable[[Any, Any], None]):
    model = llama(tokenizer=tiny_tokenizer())
    plain, tokenizer = copy.deepcopy(model.lanes.plain), copy.deepcopy(model.tokenizer)
    before = fingerprint(plain, tokenizer)
    change(plain, tokenizer)
    assert differing(before, fingerprint(plain, tokenizer)) == PARTS[part]


def test_a_write_to_the_weights_changes_the_fingerprint():
    model = llama()
    before, rounded = model.fingerprint, model.lanes.rounded_fingerprint
    assert differing(before, rounded) == "weights"
    _weight(model.lanes.plain, None)
    assert differing(before, model.fingerprint) == "weights"
    assert differing(rounded, model.lanes.rounded_fingerprint) == "weights"


@pytest.mark.parametrize("known", [False, True])
def test_a_cache_of_other_weights_of_the_same_model_is_refused(tmp_path: Path, known: bool):
    model = llama(tokenizer=tiny_tokenizer())
    before = model.prefill("abc")
    if known:
        before.save(tmp_path / "before")
    _weight(model.lanes.plain, None)
    after = model.prefill("abc")
    after.save(tmp_path / "after")
    words = "it differs in weights" if known else "has other weights now"
    refused(lambda: model.extend(before, "d"), words)
    refused(lambda: KVCache.join([before, after]), "made by another model" if known else words)
    model.extend(KVCache.load(tmp_path / "after"), "d")
    if known:
        refused(lambda: model.extend(KVCache.load(tmp_path / "before"), "d"), words)


def test_the_config_of_a_maker_is_known_without_hashing_weights(monkeypatch: pytest.MonkeyPatch):
    model = llama()
    same, changed, gone = model.lanes.maker, Maker(model.lanes), llama().lanes.maker
    expected = fingerprint(model.lanes.plain, None).split("-")[1]
    monkeypatch.setattr(fingerprints, "_weights", lambda *_: pytest.fail("weights were hashed"))
    assert same.config == expected
    assert Maker(f"0-{expected}-2").config == expected
    assert Maker("of another format").config is None
    gc.collect()
    assert gone.config is None
    _weight(model.lanes.plain, None)
    assert changed.config is None


def test_a_fingerprint_of_an_older_format_differs_in_its_format():
    assert differing("0123456789abcdef", llama().fingerprint) == "fingerprint of another format"


class Switched(torch.nn.Linear):
    """A layer with an adapter that is switched by a plain attribute, as those of PEFT are."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.scaling = {"default": 2.0}
        self._disable_adapters = False
        self.factor, self.chosen, self.settings = torch.ones(1), {1, 2}, SimpleNamespace(factor=1.0)
        self.register_buffer("shift", torch.zeros(base.out_features))
        self.register_buffer("large", torch.ones(8, 1024), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        usual = super().forward(input)
        return usual if self._disable_adapters else usual * (1 + self.scaling["default"])


def _switch(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj._disable_adapters = True


def _scale(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.scaling["default"] = 3.0


def _replace(plain: Any) -> None:
    plain.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def _override(plain: Any) -> None:
    plain.model.layers[1].mlp.act_fn.forward = torch.relu


def _attend_sharper(plain: Any) -> None:
    plain.model.layers[1].self_attn.scaling *= 2


def _epsilon(plain: Any) -> None:
    plain.model.norm.variance_epsilon = 0.1


def _frequencies(plain: Any) -> None:
    plain.model.rotary_emb.inv_freq[1] *= 2


def _double(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.weight.data.mul_(2)


def _first_number(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1


def _by_numpy(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.weight.detach().numpy()[:] *= 2


def _persistent_buffer(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.shift.data[5] = 1


def _large_buffer(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.large.mul_(2)


def _tensor(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.factor.data.mul_(2)


def _set(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.chosen.add(3)


def _object(plain: Any) -> None:
    plain.model.layers[0].mlp.up_proj.settings.factor = 2.0


def _training(plain: Any) -> None:
    plain.model.layers[1].train()


def _other_parameter(plain: Any) -> None:
    plain.model.norm.weight = torch.nn.Parameter(plain.model.norm.weight + 1)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        _switch, _scale, _replace, _override, _attend_sharper, _epsilon, _frequencies, _training,
        _other_parameter, _double, _first_number, _by_numpy, _persistent_buffer, _large_buffer, _tensor, _set, _object,
    ],
)  # fmt: skip
def test_a_cache_is_refused_once_the_model_computes_something_else(change: Callable[[Any], None], known: bool):
    model = llama(tokenizer=tiny_tokenizer())
    layer: Any = model.lanes.plain.model.layers[0].mlp
    layer.up_proj = Switched(layer.up_proj)
    model.lanes.__dict__["masks_by_head"] = True  # the gate is not what is tried here
    before = model.prefill("abc")
    if known:
        assert before.made_by is not None
        assert before.made_by.fingerprint == model.fingerprint
    model.extend(before, "d")
    change(model.lanes.plain)
    of_weights = (_other_parameter, _double, _first_number, _by_numpy, _persistent_buffer)
    expected = f"it differs in {PARTS[0 if change in of_weights else 1]}" if known else "has other weights now"
    refused(lambda: model.extend(before, "d"), expected)
    model.extend(model.prefill("abc"), "d")


def test_a_file_is_written_and_read_under_the_hash_of_all_weights(tmp_path: Path):
    """A single number that was written through `.data` shows in no sample."""
    model = llama(tokenizer=tiny_tokenizer())
    model.prefill("abc").save(tmp_path / "before")
    kept = model.prefill("abc")
    weight: Any = model.lanes.plain.model.layers[0].mlp.up_proj.weight
    number = weight[1, 2].item()
    weight.data[1, 2] = 1
    model.extend(kept, "d")  # as docs/reference/limits.md says
    refused(lambda: kept.save(tmp_path / "kept"), "written through `.data` since it was first known")
    refused(lambda: model.extend(KVCache.load(tmp_path / "before"), "d"), "it differs in weights")
    refused(lambda: model.extend(kept, "d"), "it differs in weights")
    model.prefill("abc").save(tmp_path / "after")
    model.extend(KVCache.load(tmp_path / "after"), "d")
    weight.data[1, 2] = number
    refused(lambda: model.extend(KVCache.load(tmp_path / "after"), "d"), "written through `.data`")
    model.extend(KVCache.load(tmp_path / "before"), "d")


def test_the_model_is_looked_at_once_in_a_generation(monkeypatch: pytest.MonkeyPatch):
    model, looks = llama(tokenizer=tiny_tokenizer()), list[object]()
    cache = model.prefill("abc")
    monkeypatch.setattr(unproved, "state_of", lambda plain: looks.append(plain) or state_of(plain))
    model.generate(cache, "d", max_new_tokens=5)
    assert len(looks) == 1

    def switch(step: int, cache: KVCache) -> None:
        _training(model.lanes.plain)

    refused(lambda: model.generate(cache, "d", max_new_tokens=5, stop=[], on_step=switch), "has other weights now")


def test_a_switch_that_is_put_back_leaves_the_cache_readable():
    model = llama(tokenizer=tiny_tokenizer())
    before, fingerprint_before = model.prefill("abc"), model.fingerprint
    attention: Any = model.lanes.plain.model.layers[0].self_attn
    attention.scaling *= 2
    assert model.fingerprint != fingerprint_before
    attention.scaling /= 2
    assert model.fingerprint == fingerprint_before
    model.extend(before, "d")


class Doubling(ModelHook):
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor


def test_a_hook_of_accelerate_counts_unless_its_class_is_accelerates_own():
    model = llama()
    for path in ("model.layers.1.mlp", ""):
        plain = copy.deepcopy(model.lanes.plain)
        module = plain.get_submodule(path)
        add_hook_to_module(module, ModelHook())
        add_hook_to_module(module, ModelHook(), append=True)
        assert fingerprint(plain, None) == fingerprint(model.lanes.plain, None)
        add_hook_to_module(module, Doubling(), append=True)
        add_hook_to_module(module, ModelHook(), append=True)
        doubled, state = fingerprint(plain, None), state_of(plain)
        assert differing(fingerprint(model.lanes.plain, None), doubled) == PARTS[1]
        vars(module)["_hf_hook"].hooks[0].hooks[1].factor = 3.0
        assert differing(doubled, fingerprint(plain, None)) == PARTS[1]
        assert state_of(plain) != state
