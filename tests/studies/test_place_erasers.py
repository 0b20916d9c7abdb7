"""Erasers for places of conversations: which slots each edits, and what is left to read."""

import numpy as np
import pytest
import torch

from kvprobe.erasing import interchange
from kvprobe.inference.model import Model
from kvprobe.studies.use.checks import ANEW, INTACT, SAME
from kvprobe.studies.use.place_erasers import (
    INLP,
    LEACE,
    RANDOM_0,
    Erasers,
    Places,
    check_places,
    eraser_sizes,
    fit_places,
    interchange_place,
)
from kvprobe.studies.use.variants import PARTS, VariantReads, average_cache, read_variants
from tests.studies.test_use_variants import CLASSES, PLACES, variants

SLOTS: Places = {"code": (0, 1), "after": (None,)}


@pytest.fixture(scope="module")
def reads(tiny_llama: Model) -> list[dict[str, torch.Tensor]]:
    pairs = map(variants, range(6))
    return [read_variants(tiny_llama, rows, PLACES, labels, apart=("code",)) for rows, labels in pairs]


def fitted(reads: list[dict[str, torch.Tensor]], seed: int = 0) -> Erasers:
    return fit_places(VariantReads(reads[:3]), SLOTS, CLASSES, 1, np.random.default_rng(seed), 0.1)


def test_each_slot_of_a_place_and_each_place_has_its_erasers(reads: list[dict[str, torch.Tensor]]):
    erasers = fitted(reads)
    assert set(erasers) == {
        (place, slot, part, name)
        for place, slots in SLOTS.items()
        for slot in slots
        for part in PARTS
        for name in (LEACE, INLP, RANDOM_0)
    }
    sizes = eraser_sizes(erasers).set_index(["place", "slot", "part", "name"])
    assert sizes.loc[("code", 0, "V", LEACE), "rank"] < sizes.loc[("code", 1, "V", LEACE), "rank"]
    assert sizes["width"].nunique() == 1
    drawn = [fitted(reads, seed)["after", None, "K", RANDOM_0].read for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_probes_read_the_token_of_a_slot_in_its_first_layer_until_it_is_erased(reads: list[dict[str, torch.Tensor]]):
    erasers = fitted(reads)
    table = check_places(VariantReads(reads[3:]), VariantReads(reads[:3]), erasers, SLOTS, CLASSES, [LEACE, RANDOM_0])
    assert len(table) == 2 * len(PARTS) * 3 * 2 * 3 * int(table["layer"].nunique())
    first = table[(table["place"] == "code") & (table["part"] == "V") & (table["layer"] == 0)]
    means = first.groupby(["probe", "state"])["accuracy"].mean()
    for probe in (SAME, ANEW):
        assert means[probe, INTACT] > 0.9
        assert means[probe, LEACE] < 0.6


def test_an_interchange_edits_the_slots_of_its_place_and_its_layers_alone(
    tiny_llama: Model, reads: list[dict[str, torch.Tensor]]
):
    rows, _ = variants(4)
    base = tiny_llama.prefill(rows[0])
    average, erasers = average_cache(base, reads[4], 3), fitted(reads)
    for place, slots in PLACES.items():
        others = [slot for slot in range(base.slots) if slot not in slots]
        edited = interchange_place(base, average, erasers, SLOTS, (place, LEACE), slots, layers=[1])
        for part in ("keys", "values"):
            now, before = getattr(edited, part), getattr(base, part)
            assert torch.equal(now[1][:, :, others], before[1][:, :, others])
            assert not torch.equal(now[1][:, :, list(slots)], before[1][:, :, list(slots)])
            assert torch.equal(now[2], before[2])
    both = interchange_place(base, average, erasers, SLOTS, ("code", LEACE), PLACES["code"], layers=[0])
    for number, slot in enumerate(PLACES["code"]):
        own = {(0, part): erasers["code", number, part, LEACE].at(0) for part in PARTS}
        alone = interchange(base, average, own, slots=[slot])
        assert torch.equal(both.values[0][:, :, slot], alone.values[0][:, :, slot])
