"""Cells of one's own, each measured by several metrics, against caches that are patched by hand and read on."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.patching import KL, Cell, LogProb, suffix_logits, swap_cells
from tests.random_caches import random_tokens
from tests.refusals import refused

SPANS = {"system": 4, "T1": 6, "T2": 3}
SUFFIX = random_tokens(3, {"ask": 6}, start=13)
ANSWER = (SUFFIX.ids[-1], 9)


def test_swaps_are_what_patching_by_hand_and_reading_on_gives(tiny_llama: Model):
    base, donor = (tiny_llama.prefill(random_tokens(seed, SPANS)) for seed in (1, 2))
    everywhere = (0, 1, 2)
    cells = [
        Cell((2,), (11,), "V", labels={"group": "late"}),
        *(Cell(everywhere, (5, 6), part, labels={"group": "T1"}) for part in ("K", "V", "KV")),
        Cell(everywhere, tuple(range(13)), "KV", content="self", labels={"group": "self"}),
        Cell(everywhere, tuple(range(13)), "KV", labels={"group": "all"}),
    ]
    metrics: dict[str, Any] = {"kl": KL(4), "logprob": LogProb(ANSWER)}
    table = swap_cells(tiny_llama, base, donor, SUFFIX, cells, metrics)
    assert list(table.columns) == ["group", "part", "slots", "metric", "value", "base", "donor", "effect", "way"]
    assert len(table) == len(cells) * len(metrics)
    assert table["group"].iloc[-1] == "late"
    assert (table["effect"] - (table["value"] - table["base"])).abs().max() == 0

    def of(group: str, part: str, column: str) -> list[float]:
        """Of both metrics."""
        return table[(table["group"] == group) & (table["part"] == part)].set_index("metric")[column].to_list()

    theirs = suffix_logits(tiny_llama, donor, SUFFIX, 4).log_softmax(-1)
    assert torch.allclose(theirs, tiny_llama.extend(donor, SUFFIX, logits=4)[1][0].log_softmax(-1), atol=1e-4)
    for cell in cells[1:4]:
        slots = torch.zeros(1, 13, dtype=torch.bool)
        slots[0, list(cell.slots)] = True
        part: Any = cell.part
        patched = base.patch(donor, slots=slots, part=part)
        logits = tiny_llama.extend(patched, SUFFIX, logits=4)[1][0].log_softmax(-1)
        kl = float((theirs.exp() * (theirs - logits)).sum(-1).mean())
        assert of("T1", part, "value") == pytest.approx([kl, float(logits[[-2, -1], list(ANSWER)].sum())], abs=1e-4)
    assert of("self", "KV", "effect") == pytest.approx([0, 0], abs=1e-5)
    assert of("all", "KV", "effect") == pytest.approx(of("all", "KV", "way"), abs=1e-4)
    assert of("all", "KV", "donor")[0] == pytest.approx(0, abs=1e-6)
    refused(lambda: swap_cells(tiny_llama, base, donor.fork(2), SUFFIX, cells, metrics), "has 2 rows")
    refused(lambda: swap_cells(tiny_llama, base, donor, SUFFIX, cells, {}), "nothing to measure")


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (Cell((2, 0), (5,), "V"), "layers=(2, 0); give them in order"),
        (Cell((-1,), (5,), "V"), "layers=(-1,); give numbers from 0 to 2"),
        (Cell((), (5,), "V"), "layers=()"),
        (Cell((0,), (5, 5), "V"), "slots=(5, 5); give numbers from 0 to 12, each once"),
        (Cell((0,), (13,), "V"), "slots=(13,)"),
        (Cell((0,), (5,), "V", kv_heads=(2,)), "kv_heads=(2,)"),
        (Cell((0,), (5,), "V", query_heads=(4,)), "query_heads=(4,)"),
        (Cell((0,), (5,), "V", queries=(6,)), "queries=(6,)"),
        (Cell((0,), (5,), "v"), "no part called 'v'"),
        (Cell((0,), (5,), "resid_pre"), "no part called 'resid_pre'"),
        (Cell((0,), (5,), "V", content="rest"), "no content called 'rest'"),
    ],
    ids=str,
)
def test_cells_of_what_is_not_there_are_refused(tiny_llama: Model, cell: Cell, sentence: str):
    base = tiny_llama.prefill(random_tokens(1, SPANS))
    refused(lambda: swap_cells(tiny_llama, base, base, SUFFIX, [cell], {"kl": KL(4)}), sentence)


@pytest.mark.parametrize("spans", [{**SPANS, "T1": 7}, {"system": 4, "T2": 3}])
def test_slots_that_the_donor_has_nothing_for_are_refused(tiny_llama: Model, spans: dict[str, int]):
    base, donor = (tiny_llama.prefill(random_tokens(1, each)) for each in (SPANS, spans))
    cells = [Cell((0,), (2,), "V"), Cell((0,), (5,), "V")]
    refused(lambda: swap_cells(tiny_llama, base, donor, SUFFIX, cells, {"kl": KL(4)}), "T1")
    controls = [replace(cell, content="self") for cell in cells]
    for allowed in (cells[:1], controls):
        assert len(swap_cells(tiny_llama, base, donor, SUFFIX, allowed, {"kl": KL(4)})) == len(allowed)


def test_a_suffix_at_taken_or_missing_positions_is_not_read_in_silence(tiny_llama: Model):
    base, short = (tiny_llama.prefill(random_tokens(1, spans)) for spans in (SPANS, {"system": 4, "T1": 6, "T2": 1}))
    cells, early = [Cell((0,), (2,), "V")], random_tokens(3, {"ask": 6})
    with pytest.warns(UserWarning, match="new tokens start at position 0, but the cache holds live slots up to 12"):
        swap_cells(tiny_llama, base, base, early, cells, {"kl": KL(4)})
    refused(lambda: swap_cells(tiny_llama, base, short, early, cells, {"kl": KL(4)}), "position -2")
