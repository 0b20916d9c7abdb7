import json
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvprobe as kv
from kvprobe.cache.stored import StoredCache
from kvprobe.engines.plain import open_plain
from tests.random_caches import random_cache
from tests.refusals import refused

SLOTS, BLOCK = 7, 3


@pytest.fixture
def cache() -> kv.KVCache:
    return random_cache(0, batch=1, slots=SLOTS, gaps=True)


def assert_holds(stored: StoredCache, cache: kv.KVCache) -> None:
    read = stored.cache()
    for actual, expected in zip(read.tensors, cache.tensors, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    for column in ("tokens", "positions", "origins", "following"):
        assert torch.equal(getattr(read.ledger, column), getattr(cache.ledger, column))


def dump(path: Path, tensors: Mapping[str, torch.Tensor], **header: Any) -> Path:
    """A dump as another engine would write it."""
    save_file(dict(tensors), path.with_suffix(".safetensors"))
    path.write_text(json.dumps({"format": "plain-kv-1", "layers": 3} | header))
    return path


def paged(cache: kv.KVCache, axes: tuple[str, ...], table: list[int]) -> dict[str, torch.Tensor]:
    """The tensors of a cache in blocks, of which two hold something else, with these axes."""
    tensors = {"tokens": cache.ledger.tokens[0], "positions": cache.ledger.positions[0], "blocks": torch.tensor(table)}
    for number, layer in enumerate(cache.layers):
        for part, tensor in layer.items():
            padded = torch.nn.functional.pad(tensor[0], (0, 0, 0, -SLOTS % BLOCK))
            pool = torch.randn(5, BLOCK, *(tensor.shape[1], tensor.shape[3]))
            pool[table] = padded.unflatten(1, (-1, BLOCK)).permute(1, 2, 0, 3)
            order = [("blocks", "slots", "heads", "numbers").index(name) for name in axes]
            tensors[f"{part}.{number}"] = pool.permute(order).contiguous()
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_dump_holds_the_cache_bit_for_bit(dtype: torch.dtype, tmp_path: Path):
    cache = random_cache(0, batch=1, slots=SLOTS, gaps=True, dtype=dtype)
    kv.save_plain(cache, tmp_path / "a.json", engine="mine 1.2", model="tiny", block=4)
    stored = open_plain(tmp_path)
    assert_holds(stored, cache)
    assert (stored.origin, stored.block) == ("a plain dump of mine 1.2 (tiny)", 4)
    kv.save_plain(stored, tmp_path / "b.json")
    assert_holds(open_plain(tmp_path / "b.json"), cache)


@pytest.mark.parametrize("axes", permutations(("blocks", "slots", "heads", "numbers")))
def test_blocks_are_put_in_the_order_of_their_table_whatever_the_order_of_axes(
    axes: tuple[str, ...], cache: kv.KVCache, tmp_path: Path
):
    stored = open_plain(dump(tmp_path / "a.json", paged(cache, axes, [4, 0, 2]), axes=" ".join(axes)))
    assert_holds(stored, cache)
    assert stored.block == BLOCK


def test_slots_without_positions_stand_at_their_index(cache: kv.KVCache, tmp_path: Path):
    tensors = paged(cache, ("blocks", "slots", "heads", "numbers"), [0, 1, 2])
    del tensors["positions"]
    stored = open_plain(dump(tmp_path / "a.json", tensors, axes="blocks slots heads numbers"))
    assert stored.ledger.positions.tolist() == [[*range(SLOTS)]]


HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"format": "plain-kv-2"}, "'plain-kv-1'"),
    "a key that is not known": ({"layouts": "x"}, "layouts"),
    "more layers than any model": ({"layers": 10**9}, "1000000000 layers"),
    "no layers": ({"layers": 0}, "0 layers"),
    "fewer layers": ({"layers": 2}, "2 layers"),
    "an axis that is not known": ({"axes": "slots heads channels"}, "axes"),
    "an axis twice": ({"axes": "slots slots heads numbers"}, "axes"),
    "an axis of blocks": ({"axes": "blocks slots heads numbers"}, "shape"),
    "other axes": ({"axes": "numbers heads slots"}, "different numbers"),
    "axes of other lengths": ({"axes": "heads slots numbers"}, "7 tokens"),
    "empty blocks": ({"block": 0}, "blocks of 0"),
    "a text with two lines": ({"engine": "a\nb"}, "printed"),
}


@pytest.mark.parametrize(("header", "words"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_does_not_fit_is_refused(header: dict[str, Any], words: str, cache: kv.KVCache, tmp_path: Path):
    kv.save_plain(cache, path := tmp_path / "a.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | header))
    refused(lambda: open_plain(path), words)


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no tokens": ({"tokens": None}, "no tokens"),
    "fewer tokens": ({"tokens": torch.arange(3), "positions": None}, "3 tokens"),
    "tokens that are not whole": ({"tokens": torch.zeros(SLOTS)}, "whole numbers"),
    "tokens of two rows": ({"tokens": torch.zeros(1, SLOTS).long()}, "whole numbers"),
    "a token below zero": ({"tokens": -torch.arange(SLOTS)}, "-6"),
    "a position beyond all models": (
        {"positions": torch.tensor([*range(SLOTS - 1), 2**63 - 1])},
        "9223372036854775807",
    ),
    "fewer positions": ({"positions": torch.arange(3)}, "3 positions"),
    "a table without blocks": ({"blocks": torch.arange(3)}, "no axis of blocks"),
    "half of a layer": ({"V.1": None}, "Layer 1"),
    "no layer": ({f"{part}.{number}": None for part in "KV" for number in range(3)}, "no layer"),
    "a layer too many": ({"K.3": torch.zeros(SLOTS, 2, 4), "V.3": torch.zeros(SLOTS, 2, 5)}, "'K.3'"),
    "a layer of fewer slots": ({"K.1": torch.zeros(6, 2, 4)}, "different numbers"),
    "a layer of no numbers": ({"K.1": torch.zeros(SLOTS, 2, 0)}, "shape (7, 2, 0)"),
}


@pytest.mark.parametrize(("changes", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    changes: dict[str, torch.Tensor | None], words: str, cache: kv.KVCache, tmp_path: Path
):
    kv.save_plain(cache, path := tmp_path / "a.json")
    tensors = load_file(path.with_suffix(".safetensors")) | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, path.with_suffix(".safetensors")
    )
    refused(lambda: open_plain(path), words)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([0, 1], "6 slots"),
        ([0, 1, 2, 3], "12 slots"),
        ([0, 1, 5], "up to 5"),
        ([0] * 6, "6 entries"),
        ([4, 3, 4], "2 of them different"),
    ],
    ids=str,
)
def test_a_block_table_that_does_not_fit_is_refused(table: list[int], words: str, cache: kv.KVCache, tmp_path: Path):
    tensors = paged(cache, ("blocks", "slots", "heads", "numbers"), [0, 1, 2]) | {"blocks": torch.tensor(table)}
    path = dump(tmp_path / "a.json", tensors, axes="blocks slots heads numbers")
    refused(lambda: open_plain(path), words)


def test_a_header_that_says_something_twice_or_has_no_end_is_refused(cache: kv.KVCache, tmp_path: Path):
    kv.save_plain(cache, path := tmp_path / "a.json")
    path.write_text('{"format": "plain-kv-1", "layers": 1, "layers": 3}')
    refused(lambda: open_plain(path), "'layers' is there twice")
    path.unlink()
    path.symlink_to("/dev/zero")
    for place in (path, tmp_path):
        refused(lambda place=place: kv.open_cache(place), "There is no file")
    refused(lambda: kv.open_cache(path.with_suffix(".safetensors")), "no cache that kvprobe reads")


@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_and_heads_that_differ_are_refused_when_the_layer_is_read(cache: kv.KVCache, tmp_path: Path):
    kv.save_plain(cache, path := tmp_path / "a.json")
    tensors = load_file(path.with_suffix(".safetensors"))
    tensors |= {"K.0": tensors["K.0"].to(torch.int8), "K.2": tensors["K.2"][:, :1].contiguous()}
    save_file(tensors, path.with_suffix(".safetensors"))
    stored = open_plain(path)
    refused(lambda: stored.layers[0], "int8")
    refused(lambda: stored.layers[2], "layer 2")
    assert torch.equal(stored.layers[1]["K"], cache.keys[1])


def test_what_the_layout_has_no_place_for_is_not_written(tmp_path: Path, cache: kv.KVCache):
    path = tmp_path / "a.json"
    refused(lambda: kv.save_plain(random_cache(0), path), "one text")
    refused(lambda: kv.save_plain(cache.mask("T2"), path), "evict")
    refused(lambda: kv.save_plain(cache.reindex(), path), "reindex")
    refused(lambda: kv.save_plain(cache.evict(slots=[SLOTS - 1]), path), "goes on right after its last slot")
    refused(lambda: kv.save_plain(cache, tmp_path / "a"), ".json")
    refused(lambda: kv.save_plain(cache.rewind(slots=0), path), "one text")
    refused(lambda: kv.save_plain(cache, path, block=0), "at least 1")
    refused(lambda: kv.save_plain(cache, path, engine="a\nb"), "printed")
    assert not [*tmp_path.iterdir()]


def test_a_dump_takes_the_place_of_a_dump_and_of_no_other_file(tmp_path: Path, cache: kv.KVCache):
    """The tensors of `model.json` would be written to `model.safetensors`."""
    (weights := tmp_path / "model.safetensors").write_bytes(b"weights")
    refused(lambda: kv.save_plain(cache, tmp_path / "model.json"), "no part of a dump")
    assert weights.read_bytes() == b"weights"
    for _ in range(2):
        kv.save_plain(cache, tmp_path / "a.json")
    assert kv.open_cache(tmp_path / "a.json").ledger.slots == SLOTS
