import copy
import gc
import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kvprobe.cache.cache import KVCache
from kvprobe.cache.file import _digest
from kvprobe.faults import Zeros
from kvprobe.fingerprint import Maker
from kvprobe.inference.model import Model, load
from tests.models import llama, tiny_tokenizer
from tests.random_caches import assert_bit_identical, copy_of, random_cache, random_tokens
from tests.refusals import refused

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "cache.safetensors"
    random_cache(0, layers=3, kv_heads=2, some_masked=True).save(path)
    return path


def rewrite(path: Path, changes: dict[str, torch.Tensor | None] | None = None, **metadata: str | None) -> None:
    """Alter tensors or metadata of a file; None removes one. The digest is adapted, to reach the other checks."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        notes = file.metadata()
    merged = tensors | (changes or {})
    altered = {name: tensor for name, tensor in merged.items() if tensor is not None}
    written = {k: v for k, v in (notes | metadata).items() if v is not None and k != "digest"}
    save_file(altered, path, metadata=written | {"digest": _digest(altered, written)})


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    slots=st.integers(1, 9),
    n_layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    d_head=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    ragged=st.booleans(),
    padded=st.booleans(),
)
@settings(max_examples=30)
def test_a_saved_cache_loads_bit_identical(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    batch: int,
    slots: int,
    n_layers: int,
    kv_heads: int,
    d_head: int,
    dtype: torch.dtype,
    ragged: bool,
    padded: bool,
):
    path = tmp_path_factory.mktemp("caches") / "cache.safetensors"
    cache = random_cache(seed, batch, slots, n_layers, kv_heads, d_head, dtype, padded=padded, gaps=True)
    if ragged:
        cache = cache.mask("T1", layers=[n_layers - 1]).mask("system", heads=[0])
    cache.save(path)
    assert_bit_identical(KVCache.load(path), cache)


def test_a_fork_and_an_evicted_cache_can_be_saved(tmp_path: Path):
    cache = random_cache(1, batch=1, gaps=True)
    for name, other in {"fork": cache.fork(3), "evicted": cache.evict("T1"), "masked": cache.mask("T2")}.items():
        other.save(tmp_path / name)
        assert_bit_identical(KVCache.load(tmp_path / name), other)


def test_an_empty_cache_can_be_saved(tmp_path: Path):
    empty = random_cache(2).evict("system", "T1", "summary", "T2")
    empty.save(tmp_path / "empty")
    assert_bit_identical(KVCache.load(tmp_path / "empty"), empty)


def test_a_cache_that_holds_nan_is_refused(tmp_path: Path):
    cache = copy_of(random_cache(3))
    cache.values[1][0, 0, 0, 0] = float("nan")
    cache.save(tmp_path / "nan")
    refused(lambda: KVCache.load(tmp_path / "nan"), "V of layer 1, KV head 0, slot 0 (row 0) holds NaN")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(saved: Path, share: float):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(share * len(whole))])
    refused(lambda: KVCache.load(saved), "truncated")


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_a_file_cut_off_around_its_header_length_is_refused(saved: Path, count: int):
    saved.write_bytes(saved.read_bytes()[:count])
    refused(lambda: KVCache.load(saved), "truncated")


def test_a_file_that_lacks_its_last_byte_is_refused(saved: Path):
    saved.write_bytes(saved.read_bytes()[:-1])
    refused(lambda: KVCache.load(saved), "truncated")


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path)
    refused(lambda: KVCache.load(path), "not a kvprobe cache")


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    path = tmp_path / "cache.pt"
    torch.save({"keys": torch.ones(2)}, path)
    refused(lambda: KVCache.load(path), "not a safetensors file")


def test_a_cache_of_an_unknown_format_version_is_refused(saved: Path):
    rewrite(saved, format="kvprobe-cache-0")
    refused(lambda: KVCache.load(saved), "'kvprobe-cache-0', expected 'kvprobe-cache-4'")


def test_every_flipped_bit_is_refused_in_a_sentence(tmp_path: Path):
    path = tmp_path / "small.safetensors"
    random_cache(0, batch=1, slots=2, n_layers=1).save(path)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 23):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        refused(lambda: KVCache.load(path), re.compile(r"altered|truncated|not a kvprobe cache"))


@pytest.mark.usefixtures("unchecked")
def test_a_cache_file_with_another_fingerprint_written_into_it_is_refused(saved: Path):
    with safe_open(saved, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        notes = file.metadata()
    save_file(tensors, saved, metadata=notes | {"made_by": "another"})
    refused(lambda: KVCache.load(saved), "altered")


def test_a_saved_cache_is_read_by_its_model_loaded_again_and_by_no_other(tiny_llama: Model, tmp_path: Path):
    path = tmp_path / "cache"
    cache = tiny_llama.prefill(random_tokens(0, {"T1": 3, "T2": 4})).mask("T2")
    cache.save(path)
    plain = tiny_llama.lanes.plain
    again = load(copy.deepcopy(plain), tokenizer=tiny_llama.tokenizer)
    assert torch.equal(again.extend(KVCache.load(path), "x")[1], tiny_llama.extend(cache, "x")[1])
    other = copy.deepcopy(plain)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 50_000.0}
    stranger = load(other, tokenizer=tiny_llama.tokenizer)
    refused(lambda: stranger.extend(KVCache.load(path), "x"), "differs in config")
    stranger.extend(KVCache.load(path, any_model=True), "x")


@pytest.mark.parametrize(
    "operate",
    [
        lambda cache: cache.mask("prompt"),
        lambda cache: cache.evict("prompt"),
        lambda cache: cache.reindex(),
        lambda cache: cache.fork(2),
        lambda cache: cache.rows([0]),
        lambda cache: cache.to("cpu"),
        lambda cache: cache.patch(cache, "prompt"),
        lambda cache: KVCache.join([cache, cache]),
        lambda cache: cache.corrupt(Zeros()),
        lambda cache: cache.rewind(slots=2),
    ],
)
def test_every_operation_passes_on_which_model_made_the_cache(operate: Callable[[KVCache], KVCache], tiny_llama: Model):
    assert operate(tiny_llama.prefill("abc")).made_by is tiny_llama.lanes.maker


def test_caches_of_two_models_are_not_joined():
    ours, theirs = (replace(random_cache(0), made_by=Maker(name)) for name in ("one", "other"))
    refused(lambda: KVCache.join([ours, theirs]), "another model")
    refused(lambda: KVCache.join([random_cache(0), random_cache(1, dtype=torch.float16)]), "float16")


def test_a_cache_keeps_no_model_in_memory_and_is_not_saved_without_its_fingerprint(tmp_path: Path):
    model = llama(tokenizer=tiny_tokenizer())
    cache, gone = model.prefill("abc"), weakref.ref(model.lanes)
    del model
    gc.collect()
    assert gone() is None
    refused(lambda: cache.save(tmp_path / "cache"), "no longer in memory")


def test_a_missing_file_is_named(tmp_path: Path):
    refused(lambda: KVCache.load(tmp_path / "nowhere.safetensors"), "nowhere.safetensors")


ALTERED_TENSORS = {
    "a segment without a name": {"segments": torch.full((2, 8), 4)},
    "a segment below padding": {"segments": torch.full((2, 8), -2)},
    "positions of fewer slots": {"positions": torch.zeros(2, 7, dtype=torch.long)},
    "tokens of fewer rows": {"tokens": torch.zeros(1, 8, dtype=torch.long)},
    "tokens without rows": {"tokens": torch.zeros(8, dtype=torch.long)},
    "liveness of too many layers": {"live": torch.ones(4, 2, 2, 8, dtype=torch.bool)},
    "liveness of too many heads": {"live": torch.ones(3, 2, 3, 8, dtype=torch.bool)},
    "liveness without heads": {"live": torch.ones(3, 2, 8, dtype=torch.bool)},
    "provenance that is missing": {"recomputed": None},
    "a layer that is missing": {"keys.1": None},
    "a tensor too many": {"keys.7": torch.zeros(2, 2, 8, 4)},
    "keys of fewer slots": {"keys.1": torch.zeros(2, 2, 7, 4)},
    "keys of fewer heads": {"keys.1": torch.zeros(2, 1, 8, 4)},
    "values without heads": {"values.0": torch.zeros(2, 8, 5)},
    "tokens that are not whole numbers": {"tokens": torch.zeros(2, 8)},
    "liveness that is not true or false": {"live": torch.ones(1, 2, 1, 8)},
    "keys that are whole numbers": {"keys.0": torch.zeros(2, 2, 8, 4, dtype=torch.long)},
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("changes", ALTERED_TENSORS.values(), ids=ALTERED_TENSORS.keys())
def test_an_altered_cache_is_refused(saved: Path, changes: dict[str, torch.Tensor | None]):
    rewrite(saved, changes)
    refused(lambda: KVCache.load(saved), re.compile(r"cache|ledger"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "metadata",
    [{"layers": "2"}, {"layers": "many"}, {"layers": None}, {"names": None}, {"names": "["}, {"names": "7"}],
    ids=str,
)
def test_altered_metadata_is_refused(saved: Path, metadata: dict[str, str | None]):
    rewrite(saved, **metadata)
    refused(lambda: KVCache.load(saved), "cache")


@pytest.mark.usefixtures("unchecked")
def test_a_file_without_any_layer_is_refused(saved: Path):
    gone: dict[str, torch.Tensor | None] = {
        f"{kind}.{layer}": None for kind in ("keys", "values") for layer in range(3)
    }
    rewrite(saved, gone, layers="0")
    refused(lambda: KVCache.load(saved), "cache")


def test_a_save_that_fails_leaves_the_older_file_whole(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before = saved.read_bytes()

    def full_disk(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("kvprobe.cache.file.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        random_cache(4).save(saved)
    assert saved.read_bytes() == before


def test_names_are_stored_as_data_and_not_as_code(tmp_path: Path):
    path = tmp_path / "cache"
    random_cache(5).save(path)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["names"]) == ["system", "T1", "summary", "T2"]
