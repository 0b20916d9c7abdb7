"""Cells of one's own, each measured by several metrics, against caches that are patched by hand and read on."""

from typing import Any

import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.patching import KL, Cell, LogProb, suffix_logits, swap_cells
from tests.random_caches import random_tokens
from tests.refusals import refused

SPANS = {"system": 4, "T1": 6, "T2": 3}
SUFFIX = random_tokens(3, {"ask": 6}, start=13)
ANSWER = (7, 9)


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
