"""Saved slots of memories that no tiny model has here: latent attention, states, windows, several streams."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

import kvprobe as kv
from kvprobe.cache.precision import computed_as
from kvprobe.editing import splice, zero
from kvprobe.engines.llamacpp import told
from kvprobe.engines.slot import SlotLayout, read_slot, stored, write_slot
from kvprobe.text.tokens import Tokens
from tests.engines.made_slots import F16, F32, a_slot, attention, states
from tests.engines.test_untrusted_caches import damaged, read
from tests.refusals import refused

TOKENS = [5, 6, 7, 8, 9]
RNG = np.random.default_rng(0)


def made(slots: int, numbers: int = 64) -> list[np.ndarray]:
    """Rows of two layers."""
    return [RNG.standard_normal((slots, numbers)).astype(np.float32) for _ in range(2)]


KEYS, VALUES, LATENT = made(5), made(5), made(5, 12)
WINDOW = made(2), made(2)
STATES = states(4, 4, [RNG.standard_normal(6).astype(np.float32)] * 2, [RNG.standard_normal(8).astype(np.float32)] * 2)
OF_LATENT = SlotLayout(2, (1, 1), ((0, 1),), rope=4, paired=4)
OF_WINDOWS = SlotLayout(4, (2,) * 4, ((0, 2), (1, 3)), numbers=32)
SLOTS: dict[str, tuple[bytes, SlotLayout | None]] = {
    "one memory": (attention(range(5), KEYS, VALUES), None),
    "transposed values": (attention(range(5), KEYS, VALUES, transposed=True), None),
    "halves, of the second of three streams": (
        attention(range(5), KEYS, VALUES, transposed=True, kind=F16, streams=3, stream=1),
        None,
    ),
    "eight bits": (attention(range(5), KEYS, VALUES, kind=GGMLQuantizationType.Q8_0), None),
    "four bits": (attention(range(5), KEYS, VALUES, kind=GGMLQuantizationType.Q4_0), None),
    "gaps": (attention([0, 1, 4], [part[:3] for part in KEYS], [part[:3] for part in VALUES]), None),
    "latent": (attention(range(5), LATENT), OF_LATENT),
    "latent, values would be transposed": (attention(range(5), LATENT, transposed=True), OF_LATENT),
    "states": (attention(range(5), KEYS, VALUES) + STATES, None),
    "windows": (attention(range(5), KEYS, VALUES) + attention([3, 4], *WINDOW), OF_WINDOWS),
}


@pytest.mark.parametrize(("memories", "layout"), SLOTS.values(), ids=SLOTS)
def test_a_slot_that_nothing_was_done_to_is_written_bit_for_bit(
    memories: bytes, layout: SlotLayout | None, tmp_path: Path
):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, memories))
    like = read_slot(path)
    again = write_slot(tmp_path / "b", stored(like, layout), like, layout)
    assert again.path.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", [F32, F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
def test_a_cache_of_a_slot_says_how_it_was_computed_wherever_it_goes(kind: GGMLQuantizationType, tmp_path: Path):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, attention(range(5), KEYS, VALUES, kind=kind)))
    (tmp_path / "b").write_bytes(a_slot(TOKENS, attention(range(5), KEYS, VALUES)))
    free = replace(other := stored(read_slot(tmp_path / "b")).cache(), ledger=replace(other.ledger, engine=None))
    cache = stored(read_slot(path)).cache()
    cache.save(tmp_path / "c")
    kv.save_plain(cache, tmp_path / "d.json", engine="mine 1.0")
    moved = replace(free.ledger, positions=free.ledger.positions + 5, following=torch.tensor([10]))
    whole = Tokens.of(TOKENS, "text")
    assert computed_as(free) == "float32"
    wanted = computed_as(kv.open_cache(path))
    assert wanted == f"llama.cpp {kind.name.lower()}"
    for one in (
        cache,
        told(cache, whole),
        cache.evict(slots=[3]),
        cache.append(replace(free, ledger=moved)),
        kv.KVCache.join([free, cache]),
        free.patch(cache, slots=[2]),
        splice(free, cache),
        zero(cache, slots=[2]),
        kv.KVCache.load(tmp_path / "c"),
        kv.open_cache(tmp_path / "c"),
        kv.open_cache(tmp_path / "d.json"),
        kv.open_cache(tmp_path / "d.json").cache(),
    ):
        assert computed_as(one) == wanted, one
    assert "computed by llama.cpp" in repr(cache)
    damaged = bytearray((tmp_path / "c").read_bytes())
    place = damaged.index(b"llama.cpp ")
    damaged[place : place + 5] = b"other"
    (tmp_path / "c").write_bytes(damaged)
    refused(lambda: kv.open_cache(tmp_path / "c"), "computed by 'other.cpp")


STRANGE = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 6e-8, 65504.0]
"""What changes on a way through other numbers, or is not equal to itself."""


@pytest.mark.parametrize(
    ("kind", "transposed"),
    [(F32, False), (F32, True), (F16, False), (F16, True), (GGMLQuantizationType.Q8_0, False)],
)
def test_nan_and_infinity_are_written_bit_for_bit(kind: GGMLQuantizationType, transposed: bool, tmp_path: Path):
    whole = a_slot(TOKENS, attention(range(5), KEYS, VALUES, kind=kind, transposed=transposed))
    start = len(whole) - 60  # in V of the last layer
    for strange in (*STRANGE, "signalling NaN"):
        halves = b"\x01\x7d" if isinstance(strange, str) else np.float16(strange).tobytes()
        for step in range(2, 20):
            (path := tmp_path / "a").write_bytes(whole[:start] + halves * step + whole[start + 2 * step :])
            like = read_slot(path)
            cache = stored(like).cache()
            assert write_slot(tmp_path / "b", cache, like).path.read_bytes() == path.read_bytes()
            write_slot(tmp_path / "b", cache.mask(slots=[1]), like)


def test_numbers_that_a_kind_does_not_hold_are_refused_where_slots_changed(tmp_path: Path):
    for kind, unheld in {F16: [7e4], GGMLQuantizationType.Q8_0: [7e4, np.inf, np.nan], F32: []}.items():
        (path := tmp_path / "a").write_bytes(a_slot(TOKENS, attention(range(5), KEYS, VALUES, kind=kind)))
        like = read_slot(path)
        cache = stored(like).cache()
        for number in (7e4, np.inf, -np.inf, np.nan):
            keys = [key.clone() for key in cache.keys]
            keys[1][0, 0, 2, 3] = number
            changed = cache.with_parts({"K": keys})
            if abs(number) in unheld or (number != number and len(unheld) > 1):
                refused(
                    lambda changed=changed, like=like: write_slot(tmp_path / "b", changed, like), "start the server"
                )
            else:
                again = stored(write_slot(tmp_path / "b", changed, like)).cache()
                assert torch.equal(again.keys[1].nan_to_num(9), keys[1].nan_to_num(9))


def test_slots_stand_at_their_positions_in_whatever_order_they_lie(tmp_path: Path):
    order = [3, 1, 0, 4, 2]
    (path := tmp_path / "a").write_bytes(
        a_slot(TOKENS, attention(order, [part[order] for part in KEYS], [part[order] for part in VALUES]))
    )
    cache = kv.open_cache(path).cache()
    assert cache.ledger.positions.tolist() == [[*range(5)]]
    for layer, keys, values in zip(cache.layers, KEYS, VALUES, strict=True):
        assert torch.equal(layer["K"][0, 0], torch.from_numpy(keys))
        assert torch.equal(layer["V"][0, 0], torch.from_numpy(values))
    assert kv.open_cache(write_slot(tmp_path / "b", cache, read_slot(path)).path).layers[0]["K"].equal(cache.keys[0])


def test_latent_attention_is_its_rotated_key_with_pairs_apart_and_then_its_latent(tmp_path: Path):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, attention(range(5), LATENT)))
    for layer, held in zip(stored(read_slot(path), OF_LATENT).layers, LATENT, strict=True):
        assert torch.equal(layer["rope"][0, 0], torch.from_numpy(held[:, [0, 2, 1, 3]]))
        assert torch.equal(layer["latent"][0, 0], torch.from_numpy(held[:, 4:]))
    refused(lambda: kv.open_cache(path), "latent attention", "give its model")


def test_layers_that_slide_have_their_own_slots_live_alone(tmp_path: Path):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, *SLOTS["windows"][:1]))
    cache = stored(read_slot(path), OF_WINDOWS).cache()
    assert cache.ledger.live[:, 0, 0].tolist() == [[True] * 5, [False] * 3 + [True] * 2] * 2
    for number, keys in ((0, KEYS[0]), (2, KEYS[1]), (1, WINDOW[0][0]), (3, WINDOW[0][1])):
        assert torch.equal(cache.keys[number][0, :, -len(keys) :].transpose(0, 1).flatten(1), torch.from_numpy(keys))


def test_without_a_model_slots_that_left_a_window_may_not_come_nearer(tmp_path: Path):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, SLOTS["windows"][0]))
    like = read_slot(path)
    cache = stored(like).cache()
    assert write_slot(tmp_path / "b", cache.mask(slots=[1]), like).attention[0].positions == (0, 2, 3, 4)
    refused(
        lambda: write_slot(tmp_path / "b", cache.rewind(slots=4), like), "needs slot 2 of row 0", "read the text again"
    )
    assert write_slot(tmp_path / "b", cache.mask(slots=[2]).rewind(slots=4), like).tokens == tuple(TOKENS[:4])
    (path := tmp_path / "c").write_bytes(
        a_slot(TOKENS, attention(range(5), KEYS, VALUES), attention(range(5), made(5), made(5)))
    )
    refused(lambda: write_slot(tmp_path / "b", cache, read_slot(path)), "needs slot 0 of row 0")


def test_states_are_written_after_as_many_tokens_as_they_are_of(tmp_path: Path):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, SLOTS["states"][0]))
    like = read_slot(path)
    cache = stored(like).cache()
    masked = write_slot(tmp_path / "b", cache.mask(slots=[1]), like)
    assert masked.attention[0].positions == (0, 2, 3, 4)
    assert masked.path.read_bytes()[-len(STATES) :] == STATES
    refused(lambda: write_slot(tmp_path / "b", cache.rewind(slots=3), like), "after 3 tokens", "after 5")


def test_rows_of_no_numbers_and_heads_of_another_size_are_refused(tmp_path: Path):
    (path := tmp_path / "a").write_bytes(a_slot(TOKENS, attention(range(5), made(5, 0), VALUES)))
    refused(lambda: kv.open_cache(path), "no numbers")
    path.write_bytes(a_slot(TOKENS, attention(range(5), KEYS, VALUES)))
    refused(lambda: stored(read_slot(path), SlotLayout(2, (2, 2), ((0, 1),), numbers=16)), "64 numbers", "2 heads")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["latent", "states", "windows", "four bits", "halves, of the second of three streams"])
def test_a_damaged_slot_is_read_or_refused_in_a_sentence(name: str, tmp_path: Path):
    whole, path = a_slot(TOKENS, SLOTS[name][0]), tmp_path / "a"
    for seed in range(150):
        path.write_bytes(damaged(whole, random.Random(seed)))
        read(path, times=64 * 8)  # slots out of the window, and four bits of 32


def test_layers_that_would_fill_far_more_than_they_hold_are_refused(tmp_path: Path):
    few, many = [np.zeros((1, 2**16), np.float32)], [np.zeros((1000, 1), np.float32)]
    (path := tmp_path / "a").write_bytes(
        a_slot([5] * 1000, attention(range(1000), many, many), attention([999], few, few))
    )
    refused(lambda: kv.open_cache(path), "few of its 1,000 positions")
