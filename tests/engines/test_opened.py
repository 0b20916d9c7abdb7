from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvprobe as kv
from kvprobe.engines.formats import FORMATS
from kvprobe.engines.slot import read_slot, stored, write_slot
from kvprobe.listing import known, lines
from tests.engines.made_slots import a_slot, attention
from tests.engines.test_made_slots import KEYS, TOKENS, VALUES
from tests.random_caches import assert_bit_identical, random_cache
from tests.refusals import refused


def test_a_cache_of_kvprobe_is_read_layer_by_layer(tmp_path: Path):
    cache = random_cache(0, gaps=True, some_masked=True)
    cache.save(tmp_path / "cache")
    stored = kv.open_cache(tmp_path / "cache")
    assert_bit_identical(stored.cache(), cache)
    assert torch.equal(stored.layers[-1]["V"], cache.values[-1])
    assert [layer["K"].shape for layer in stored.layers[1:]] == [keys.shape for keys in cache.keys[1:]]


def test_a_damaged_cache_is_opened_though_it_is_not_loaded(tmp_path: Path):
    random_cache(0).save(path := tmp_path / "cache")
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 64
    path.write_bytes(damaged)
    refused(lambda: kv.KVCache.load(path), "altered")
    assert len([*kv.open_cache(path).layers]) == 3


def save_slot(seed: int, path: Path) -> None:
    path.write_bytes(a_slot(TOKENS, attention(range(5), [keys + seed for keys in KEYS], VALUES)))


WRITES: dict[str, Callable[[int, Path], None]] = {
    "a": lambda seed, path: random_cache(seed, batch=1).save(path),
    "a.json": lambda seed, path: kv.save_plain(random_cache(seed, batch=1), path),
    "a.bin": save_slot,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_was_written_again_is_not_read_on(name: str, tmp_path: Path):
    """Of the same size, it would be read as a cache of the old ledger."""
    WRITES[name](0, path := tmp_path / name)
    held = kv.open_cache(path)
    first = held.layers[0]["K"]
    assert torch.equal(held.layers[0]["K"], first)
    WRITES[name](1, path)
    refused(lambda: held.layers[0], "written again since it was opened; open it once more.")
    refused(held.cache, "written again")
    assert not torch.equal(kv.open_cache(path).layers[0]["K"], first)


def test_a_slot_whose_file_was_written_again_is_no_template(tmp_path: Path):
    save_slot(0, path := tmp_path / "a")
    like = read_slot(path)
    cache = stored(like).cache()
    save_slot(1, path)
    refused(lambda: write_slot(tmp_path / "b", cache, like), "written again")


def test_a_file_that_is_gone_is_refused(tmp_path: Path):
    random_cache(0).save(path := tmp_path / "cache")
    stored = kv.open_cache(path)
    path.unlink()
    refused(lambda: stored.layers[0], "no cache file")


def test_the_content_says_which_format_a_file_has(tmp_path: Path):
    cache = random_cache(0, batch=1)
    cache.save(tmp_path / "a.json")
    assert kv.open_cache(tmp_path / "a.json").origin == "a cache of kvprobe"
    kv.save_plain(cache, tmp_path / "a.json", engine="mine")
    for name in ("a.json", "a.safetensors", ""):
        assert kv.open_cache(tmp_path / name).origin == "a plain dump of mine"


@pytest.mark.parametrize("content", [b"", b"{", b"\x00" * 40, b"\x93NUMPY" + b"\x00" * 40, b"PK\x03\x04" + b"x" * 60])
def test_a_file_that_holds_no_cache_is_refused(content: bytes, tmp_path: Path):
    (path := tmp_path / "file").write_bytes(content)
    refused(lambda: kv.open_cache(path), str(path))


def test_weights_and_folders_of_models_are_refused(tmp_path: Path):
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    refused(lambda: kv.open_cache(tmp_path / "model.safetensors"), "no cache that kvprobe reads")
    refused(lambda: kv.open_cache(tmp_path), "0 JSON files")
    refused(lambda: kv.open_cache(tmp_path / "nothing"), "no file")


def test_formats_and_the_engines_that_are_here_are_listed():
    listed = "\n".join(lines("engines", known(["engines"])["engines"]))
    for kind in FORMATS:
        assert kind.name in listed
        assert kind.content in listed
