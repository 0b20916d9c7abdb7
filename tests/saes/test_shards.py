"""Recordings: what is on disk is what the model computes, however often the recording was interrupted."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import kvprobe.saes.shards as recording
from kvprobe.inference.model import Model
from kvprobe.saes import Place, Shards, record
from kvprobe.saes.places import FAMILIES, joined
from kvprobe.saes.shards import FIRST
from kvprobe.text.tokens import Tokens
from tests.refusals import refused
from tests.saes.planted import PLACE, planted

TEXTS = [
    Tokens.of(np.random.default_rng(number).integers(0, 60, length).tolist())
    for number, length in enumerate([9, 14, 5, 30, 22, 7])
]
PLACES = [Place(family, layer) for family in FAMILIES for layer in (0, 2)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SHARD", 32)
    monkeypatch.setattr(recording, "ROWS", 2)


def test_recorded_activations_are_those_of_the_model_without_the_first_slot(tiny_llama: Model, tmp_path: Path):
    shards = record(tiny_llama, TEXTS, PLACES, tmp_path / "shards")
    assert len(shards.files) > 2
    assert shards.tokens == sum(map(len, TEXTS)) - FIRST * len(TEXTS)
    captured = [tiny_llama.capture(text, FAMILIES, layers=[0, 2]) for text in TEXTS]
    for place in PLACES:
        expected = torch.cat([joined(tensors[place.family, place.layer])[0, FIRST:] for tensors in captured])
        torch.testing.assert_close(torch.cat(list(shards.activations(place))), expected, rtol=1e-4, atol=1e-5)
    ids, text, slot = (torch.cat(parts) for parts in zip(*shards.words(), strict=True))
    assert all(TEXTS[t].ids[s] == token for token, t, s in zip(ids.tolist(), text.tolist(), slot.tolist(), strict=True))


def test_nothing_beyond_the_deepest_place_is_computed_and_no_hook_is_left(tiny_llama: Model, tmp_path: Path):
    def hooks() -> int:
        modules = tiny_llama.lanes.plain.modules()
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)

    calls, before = [], hooks()
    handle = tiny_llama.lanes.blocks[2].register_forward_hook(lambda *_: calls.append(1))
    record(tiny_llama, TEXTS, [Place("v", 0), Place("resid_post", 1)], tmp_path / "shards")
    handle.remove()
    assert not calls
    assert hooks() == before


def test_a_resumed_recording_equals_an_uninterrupted_one(
    tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = record(tiny_llama, TEXTS, PLACES[:2], tmp_path / "whole")
    made, shard = [], recording._shard

    def stop(*arguments: object) -> dict[str, torch.Tensor]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return shard(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        record(tiny_llama, TEXTS, PLACES[:2], tmp_path / "resumed")
    refused(lambda: Shards.open(tmp_path / "resumed"), "unfinished")
    monkeypatch.setattr(recording, "_shard", shard)
    resumed = record(tiny_llama, TEXTS, PLACES[:2], tmp_path / "resumed")
    for one, other in zip(whole.files, resumed.files, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_each_pass_of_the_batches_gives_every_token_once_and_a_seed_gives_the_same_order(tmp_path: Path):
    shards, _ = planted(tmp_path / "shards", shards=11, tokens=150)
    activations = torch.cat(list(shards.activations(PLACE)))

    def batches(seed: int) -> list[torch.Tensor]:
        # The 1,650 tokens twice.
        return list(islice(shards.batches(PLACE, 75, np.random.default_rng(seed)), 44))

    batches_drawn = batches(0)
    for half in (batches_drawn[:22], batches_drawn[22:]):
        assert torch.equal(torch.cat(half).sort(0).values, activations.sort(0).values)
    assert not torch.equal(torch.cat(batches_drawn[:22]), torch.cat(batches_drawn[22:]))
    assert all(torch.equal(one, other) for one, other in zip(batches_drawn, batches(0), strict=True))
    assert not torch.equal(batches_drawn[0], batches(1)[0])


def test_a_batch_may_be_larger_than_the_recording(tmp_path: Path):
    shards, _ = planted(tmp_path / "shards", shards=2, tokens=50)
    batches_drawn = list(islice(shards.batches(PLACE, 250, np.random.default_rng(0)), 2))
    assert [len(batch) for batch in batches_drawn] == [250, 250]
    activations = torch.cat(list(shards.activations(PLACE))).repeat(5, 1)
    assert torch.equal(torch.cat(batches_drawn).sort(0).values, activations.sort(0).values)


def test_mean_and_spread_are_those_of_all_tokens(tmp_path: Path):
    shards, _ = planted(tmp_path / "shards")
    activations = torch.cat(list(shards.activations(PLACE)))
    mean, spread = shards.mean_and_spread(PLACE)
    torch.testing.assert_close(mean, activations.mean(0), rtol=1e-5, atol=1e-4)
    assert spread == pytest.approx(float(activations.var(0, correction=0).mean().sqrt()), rel=1e-4)


def test_a_folder_with_another_recording_is_refused(tiny_llama: Model, tmp_path: Path):
    record(tiny_llama, TEXTS[:2], PLACES[:1], tmp_path)
    refused(lambda: record(tiny_llama, TEXTS[1:3], PLACES[:1], tmp_path), "holds a recording of other texts")
    refused(lambda: Shards.open(tmp_path / "elsewhere"), "no recording")
    refused(lambda: next(Shards.open(tmp_path).activations(Place("resid_mid", 1))), "resid_mid.1 was not recorded")


def test_places_that_a_model_does_not_have_are_refused(
    tiny_llama: Model, tiny_models: dict[str, Model], tmp_path: Path
):
    refused(lambda: record(tiny_llama, TEXTS, [Place("v", 9)], tmp_path), "no layer 9; the model has layers 0 to 2")
    refused(
        lambda: record(tiny_models["gpt_neox"], TEXTS, [Place("k_pre", 0)], tmp_path),
        "no module that computes 'k_pre' alone",
    )
    refused(lambda: record(tiny_llama, [], [Place("v", 0)], tmp_path), "nothing to record")


@pytest.mark.parametrize("place", PLACES)
def test_a_place_is_found_again_by_its_name_and_by_its_hook(place: Place):
    assert Place.parse(str(place)) == place
    assert Place.of_hook(place.hook) == place


@pytest.mark.parametrize("text", ["k.3", "resid_pos.3", "v", "v.x", ""])
def test_text_that_is_not_a_place_is_refused(text: str):
    refused(lambda: Place.parse(text), "family")
