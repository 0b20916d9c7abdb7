"""Slots of several models in one cache: who computed each is kept in the ledger and in files."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.cache.file import _digest
from kvprobe.cache.ledger import OWN, Ledger
from kvprobe.detection.audit import audit
from kvprobe.editing import concatenate, match_attention, recompute, splice
from kvprobe.engines.plain import save_plain
from kvprobe.inference.model import Model, load
from kvprobe.policies.guard import Sound
from kvprobe.text.tokens import Tokens
from tests.models.every import tiny
from tests.refusals import refused

A, B, C = Tokens.of([5, 9, 33, 17], "a"), Tokens.of([40, 8, 21], "b", 4), Tokens.of([60, 12, 3], "c", 7)


@cache
def held(kind: str, seed: int) -> tuple[Model, KVCache]:
    model = load(tiny(kind, seed))
    return model, model.prefill(A + B + C)


def mixed(kind: str = "llama") -> KVCache:
    """The segment b of another model, where it stood."""
    own, other = held(kind, 0)[1], held(kind, 1)[1]
    return splice(own.evict("b"), other.select("b"), at=4, other_maker=True)


def makers(past: KVCache) -> list[str]:
    """The fingerprint of the model that computed each slot."""
    assert past.made_by is not None
    known = [*past.ledger.others, past.made_by]
    return [known[number].fingerprint for number in past.ledger.makers[0].tolist()]


def names(*seeds: int) -> list[str]:
    return [held("llama", seed)[0].fingerprint for seed in seeds]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_spliced_piece_of_another_model_keeps_its_maker_and_its_numbers(kind: str):
    past, (model, own), other = mixed(kind), held(kind, 0), held(kind, 1)[1]
    assert past.ledger.of_others[0].tolist() == [4 <= slot < 7 for slot in range(10)]
    assert past.made_by is own.made_by
    name = next(iter(past.layers[0]))
    assert torch.equal(past.layers[0][name][:, :, 4:7], other.layers[0][name][:, :, 4:7])
    assert other.made_by is not None
    assert f"3 slots of {other.made_by.name}" in repr(past)
    read = model.extend(past, [Tokens.of([7], "next", 10)])[0]
    assert read.ledger.of_others[0].tolist() == [*past.ledger.of_others[0].tolist(), False]
    refused(lambda: splice(own.evict("b"), other.select("b"), at=4), "another model")
    refused(lambda: held(kind, 1)[0].extend(past, [Tokens.of([7], "next", 10)]), "another model")


def test_makers_follow_their_slots_through_every_operation():
    past = mixed()
    whole = names(0, 0, 0, 0, 1, 1, 1, 0, 0, 0)
    assert makers(past) == whole
    assert makers(past.fork(2)) == makers(past.rows([0])) == makers(past.to("cpu")) == makers(past.reindex()) == whole
    assert makers(past.select("b", "c")) == whole[4:]
    assert makers(past.rewind("c")) == whole[:7]
    assert not past.evict("b").ledger.of_others.any()
    joined = KVCache.join([held("llama", 0)[1].select("c"), past])
    assert joined.ledger.of_others.tolist() == [[False] * 10, [4 <= slot < 7 for slot in range(10)]]


def test_a_piece_comes_home_and_a_third_model_is_told_from_the_second():
    own, other, third = (held("llama", seed)[1] for seed in (0, 1, 2))
    home = splice(other.evict("b"), mixed(), at=4, other_maker=True)
    assert makers(home) == names(*[1] * 4, *[0] * 4, *[1] * 3, *[0] * 3, *[1] * 3)
    assert home.made_by is other.made_by
    assert home.ledger.of_others[0].tolist() == [4 <= slot < 8 or 11 <= slot < 14 for slot in range(17)]
    three = concatenate([own, mixed(), third, other], other_maker=True)
    assert makers(three) == names(*[0] * 14, *[1] * 3, *[0] * 3, *[2] * 10, *[1] * 10)
    assert len(three.ledger.others) == 2
    loaded_again = load(tiny("llama", 0))
    assert not concatenate([own, loaded_again.prefill(B.shifted(0))], other_maker=True).ledger.of_others.any()


def test_slots_read_again_are_of_the_model_that_reads():
    model = held("llama", 0)[0]
    assert makers(recompute(model, mixed(), slots=[5])) == names(0, 0, 0, 0, 1, 0, 1, 0, 0, 0)
    assert not recompute(model, mixed(), "b").ledger.of_others.any()


def test_mixed_joined_and_fitted_caches_come_back_from_files(tmp_path: Path):
    model, own = held("llama", 0)
    past = match_attention(model, concatenate([mixed(), own]), slots=range(12, 18), keep=2)
    assert not match_attention(model, mixed(), "b", keep=2).ledger.of_others.any(), "fitted to this model"
    past.save(tmp_path / "cache")
    again = KVCache.load(tmp_path / "cache")
    assert makers(again) == makers(past)
    assert torch.equal(again.ledger.fitted, past.ledger.fitted)
    assert all(torch.equal(one, other) for one, other in zip(again.tensors, past.tensors, strict=True))
    assert torch.equal(*(model.extend(one, [Tokens.of([7], "next", 20)])[1] for one in (past, again)))
    past.evict(slots=past.ledger.of_others).save(tmp_path / "clean")
    assert KVCache.load(tmp_path / "clean").ledger.others == ()


def test_files_of_version_3_are_read(tmp_path: Path):
    held("llama", 0)[1].save(tmp_path / "cache")
    rewritten(tmp_path / "cache", {}, format="kvprobe-cache-3", without=("makers", "others"))
    again = KVCache.load(tmp_path / "cache")
    assert bool((again.ledger.makers == OWN).all())
    assert makers(again) == names(*[0] * 10)
    assert not kv.diff(kv.open_cache(tmp_path / "cache"), held("llama", 0)[1]).differs


def test_a_file_that_names_a_model_which_it_does_not_list_is_refused(tmp_path: Path):
    mixed().save(tmp_path / "cache")
    rewritten(tmp_path / "cache", {"makers": torch.ones(1, 10, dtype=torch.long)})
    refused(lambda: KVCache.load(tmp_path / "cache"), "does not fit its slots")
    rewritten(tmp_path / "cache", {}, without=("makers",))
    refused(lambda: KVCache.load(tmp_path / "cache"), "makers")


def test_what_needs_one_maker_refuses_several(tmp_path: Path):
    model = held("llama", 0)[0]
    refused(lambda: audit(model, mixed()), "slots of one model")
    refused(lambda: save_plain(mixed(), tmp_path / "plain.json"), "slots of one model")
    sound = Sound.of([model.prefill((A + B + C).shifted(0)) for _ in range(4)], [None] * mixed().n_layers, 0.5)
    refused(lambda: sound.scores(mixed()), "slots of one model")


def test_a_patch_that_the_ledger_would_not_show_is_refused():
    own, past = held("llama", 0)[1], mixed()
    refused(lambda: own.patch(past, "b"), "Slot 4 of row 0", "computed by another model")
    refused(lambda: past.patch(own, "b"), "Slot 4 of row 0", "computed by another model")
    assert makers(own.patch(past, "a", "c")) == names(*[0] * 10)
    assert makers(past.patch(past, "b")) == makers(past)


def test_a_cache_of_any_model_takes_what_it_is_given():
    free = replace(held("llama", 0)[1], made_by=None)
    joined = splice(free, held("llama", 1)[1].select("b"))
    assert joined.made_by is None
    assert not joined.ledger.of_others.any()
    assert isinstance(joined.ledger, Ledger)


def rewritten(path: Path, changes: dict[str, torch.Tensor], without: tuple[str, ...] = (), **metadata: str) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()} | changes  # noqa: SIM118 - not a dict
        notes = (file.metadata() or {}) | metadata
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    notes = {name: note for name, note in notes.items() if name not in (*without, "digest")}
    save_file(tensors, path, metadata=notes | {"digest": _digest(tensors, notes)})
