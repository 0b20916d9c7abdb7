"""The three ways in which summaries see each other, and from which layer on each can know what the first turn held.

Every turn is masked as soon as its summary is written; the arms differ in the summaries that stay in view. Distance 0
is the summary of the first turn, which saw it; distance d is the summary d turns later.
"""

from typing import Literal

from kvprobe.tasks.hops import SUMMARY_NAMES, TURNS

Arm = Literal["open", "hop-forced", "skip"]
ARMS: tuple[Arm, ...] = ("open", "hop-forced", "skip")
DISTANCES = range(TURNS)
FORK = 2
"""The distance from which on the arms differ: the second summary sees the first alone in all of them."""


def summaries_seen(arm: Arm, turn: int) -> tuple[str, ...]:
    """The summaries in view while this turn (from 2 on; TURNS + 1 is the last question) and its summary are read.

    `open`: all of them. `hop-forced`: the last one alone, so that what arrives has passed through each. `skip`: the
    first one alone, so that what arrives has passed through none but that.
    """
    seen = {"open": slice(0, turn - 1), "hop-forced": slice(turn - 2, turn - 1), "skip": slice(0, 1)}
    return SUMMARY_NAMES[seen[arm]]


def lowest_layer(arm: Arm, distance: int) -> int:
    """The first layer at which K and V of the summary at this distance can vary with what the first turn held.

    The turn's own K and V vary from layer 0 on, as its tokens do. A slot that attends to slots which vary from layer l
    on does so itself in the residual stream after layer l, and so in K and V from layer l + 1 on.
    """
    first = {SUMMARY_NAMES[0]: 1}
    for turn in range(2, distance + 2):
        first[SUMMARY_NAMES[turn - 1]] = 1 + min(first[name] for name in summaries_seen(arm, turn))
    return first[SUMMARY_NAMES[distance]]
