"""The slots that stay, by what they are, and the cells of the study: which of them are swapped, at which layers."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from kvprobe.cache.ledger import Ledger
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.patching import Cell

HIDDEN = "T2"
SUMMARY, LATER = "summary2", "T3"
BEFORE = "before"
"""Slots before the hidden turn, which cannot know whether it was there."""
KINDS = ("summary request", "summary text", "summary delimiters", "later text", "later delimiters")
"""Every slot after the hidden turn is of one of these kinds."""
UNIONS = {"summary": KINDS[:3], "later turns": KINDS[3:], "all after": KINDS}
GROUPS = (*KINDS, *UNIONS)
PARTS = ("K", "V", "KV")
SELF = "base itself"
"""Every slot swapped for the base's own: nothing may change."""
TOKEN = "token"
"""One slot after the hidden turn, at all layers."""

Slots = tuple[int, ...]


def groups(ledger: Ledger) -> dict[str, Slots]:
    """The slots of each kind, of each union of kinds, and those before the hidden turn, which itself has no slot here.

    The request for the summary is the first run of text in the summary's segment; the summary is the rest of its text.
    """
    segments = [ledger.names[number] for number in ledger.segments[0].tolist()]
    delimiters = ledger.delimiters[0].tolist()
    named = [slot for slot, segment in enumerate(segments) if segment == SUMMARY]
    runs = [list(run) for delimiter, run in groupby(named, key=delimiters.__getitem__) if not delimiter]
    later = [slot for slot, segment in enumerate(segments) if segment == LATER]
    kinds = {
        "summary request": tuple(runs[0]),
        "summary text": tuple(slot for run in runs[1:] for slot in run),
        "summary delimiters": tuple(slot for slot in named if delimiters[slot]),
        "later text": tuple(slot for slot in later if not delimiters[slot]),
        "later delimiters": tuple(slot for slot in later if delimiters[slot]),
    }
    unions = {name: tuple(sorted(slot for kind in parts for slot in kinds[kind])) for name, parts in UNIONS.items()}
    return kinds | unions | {BEFORE: tuple(range(named[0]))}


def cells(slots: Mapping[str, Slots], layers: Mapping[str, Slots]) -> list[Cell]:
    """What is swapped: every group at all layers and every kind in every band, K and V separately where the study
    reports it; and the controls."""
    everywhere = layers[EVERY_LAYER]

    def cell(group: str, band: str, part: str) -> Cell:
        return Cell(layers[band], slots[group], part, labels={"group": group, "band": band})

    wanted = [cell(group, EVERY_LAYER, part) for group in GROUPS for part in PARTS]
    for band in layers:
        if band != EVERY_LAYER:
            wanted += [cell("all after", band, part) for part in PARTS]
            wanted += [cell(kind, band, "KV") for kind in KINDS]
    itself = Cell(everywhere, slots["all after"], "KV", content="self", labels={"group": SELF, "band": EVERY_LAYER})
    return [*wanted, cell(BEFORE, EVERY_LAYER, "KV"), itself]


def code_cells(slots: Mapping[str, Slots], layers: Mapping[str, Slots]) -> list[Cell]:
    """What is swapped between two codes: every group at all layers, K and V together, and the slots before the code."""
    return [
        Cell(layers[EVERY_LAYER], slots[group], "KV", labels={"group": group, "band": EVERY_LAYER})
        for group in (*GROUPS, BEFORE)
    ]


def token_cells(slots: Sequence[int], layers: Mapping[str, Slots]) -> list[Cell]:
    """Each slot alone, at all layers."""
    every = layers[EVERY_LAYER]
    return [Cell(every, (slot,), "KV", labels={"group": TOKEN, "band": EVERY_LAYER, "slot": slot}) for slot in slots]
