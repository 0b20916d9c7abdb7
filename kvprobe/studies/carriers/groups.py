"""The slots that stay, by what they are, and the cells of the study: which of them are swapped, at which layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.patching import Cell
from kvprobe.tasks.compaction import PLACE_KINDS, places_by_kind
from kvprobe.text.tokens import Tokens

HIDDEN = "T2"
BEFORE = "before"
"""Slots before the hidden turn, which cannot know whether it was there."""
KINDS = PLACE_KINDS
UNIONS = {"summary": KINDS[:3], "later turns": KINDS[3:], "all after": KINDS}
GROUPS = (*KINDS, *UNIONS)
PARTS = ("K", "V", "KV")
SELF = "base itself"
"""Every slot swapped for the base's own: nothing may change."""
TOKEN = "token"
"""One slot after the hidden turn, at all layers."""

Slots = tuple[int, ...]


def groups(tokens: Tokens) -> dict[str, Slots]:
    """The slots of each kind, of each union of kinds, and those before the hidden turn, which itself has no slot.

    Args:
        tokens: of the conversation without the hidden turn, which are those of either cache.
    """
    kinds = places_by_kind(tokens)
    unions = {name: tuple(sorted(slot for kind in parts for slot in kinds[kind])) for name, parts in UNIONS.items()}
    return kinds | unions | {BEFORE: tuple(range(min(unions["all after"])))}


def cells(slots: Mapping[str, Slots], layers: Mapping[str, Slots]) -> list[Cell]:
    """What is swapped: every group at all layers and every kind in every band, K and V separately where the study
    reports it; and the controls."""
    wanted = [_cell(group, slots[group], layers, part=part) for group in GROUPS for part in PARTS]
    for band in layers:
        if band != EVERY_LAYER:
            wanted += [_cell("all after", slots["all after"], layers, band, part) for part in PARTS]
            wanted += [_cell(kind, slots[kind], layers, band) for kind in KINDS]
    itself = replace(_cell(SELF, slots["all after"], layers), content="self")
    return [*wanted, _cell(BEFORE, slots[BEFORE], layers), itself]


def code_cells(slots: Mapping[str, Slots], layers: Mapping[str, Slots]) -> list[Cell]:
    """What is swapped between two codes: every group at all layers, K and V together, and the slots before the code."""
    return [_cell(group, slots[group], layers) for group in (*GROUPS, BEFORE)]


def token_cells(slots: Sequence[int], layers: Mapping[str, Slots]) -> list[Cell]:
    """Each slot alone, at all layers."""
    return [_cell(TOKEN, (slot,), layers, slot=slot) for slot in slots]


def _cell(
    group: str, slots: Slots, layers: Mapping[str, Slots], band: str = EVERY_LAYER, part: str = "KV", slot: int = -1
) -> Cell:
    return Cell(layers[band], slots, part, labels={"group": group, "band": band, "slot": slot})
