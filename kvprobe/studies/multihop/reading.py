"""Reading the sessions: K and V of every summary in every arm, and what the model itself makes of the code at the end.

Every turn is masked as soon as its summary is written; the arms differ in the summaries that stay in view. Distance 0
is the summary of the first turn, which saw it; distance d is the summary d turns later. Each session is read once up to
the code. The codes are rows of one batch from there on, and the arms fork where they begin to differ. The restart arm,
which never sees the first turn, is read once per session. What is masked for good is evicted, which is the same and
costs less.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.capture import Captured
from kvprobe.inference.forced import asked_logits
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probing.arms import arm_read_outs
from kvprobe.probing.variants import Logits, Variants
from kvprobe.studies.multihop.hops import SUMMARY_NAMES, TURN_NAMES, TURNS, HopSession, conversation
from kvprobe.studies.multihop.light_cone import lowest_layers
from kvprobe.text.tokens import Tokens

Arm = Literal["all", "open", "hop-forced", "skip"]
ALL: Arm = "all"
"""The arm of what is the same in all of them."""
ARMS: tuple[Arm, ...] = ("open", "hop-forced", "skip")
DISTANCES = range(TURNS)
FORK = 2
"""The distance from which on the arms differ: the second summary sees the first alone in all of them."""
SHOWN = "T1 shown"
"""The question alone sees T1 again, beside what it sees in the arm `open`: what the model could say if it saw the
code."""
USE_ARMS = (SHOWN, *ARMS, *(f"restart, {arm}" for arm in ARMS))

Place = tuple[Arm, int]
"""Arm and distance."""


def summaries_seen(arm: Arm, turn: int) -> tuple[str, ...]:
    """The summaries in view while this turn (from 1 on; TURNS + 1 is the last question) and its summary are read.

    `open`: all of them. `hop-forced`: the last one alone, so that what arrives has passed through each. `skip`: the
    first one alone, so that what arrives has passed through none but that.
    """
    before = SUMMARY_NAMES[: turn - 1]
    return {"hop-forced": before[-1:], "skip": before[:1]}.get(arm, before)


def lowest_layer(arm: Arm, distance: int) -> int:
    """The first layer at which K and V of the summary at this distance can vary with what the first turn held."""
    views = {summary: summaries_seen(arm, turn) for turn, summary in enumerate(SUMMARY_NAMES, 1)}
    lowest = lowest_layers(TURN_NAMES[0], {**views, SUMMARY_NAMES[0]: TURN_NAMES[:1]})[SUMMARY_NAMES[distance]]
    assert lowest is not None
    return lowest


def place(arm: Arm, distance: int) -> Place:
    """Under which name features are kept: those before the fork belong to all arms."""
    return (arm if distance >= FORK else ALL), distance


PLACES: tuple[Place, ...] = tuple(dict.fromkeys(place(arm, distance) for arm in ARMS for distance in DISTANCES))


def name_of(condition: str, at: Place) -> str:
    """What is read at a place, as `kvprobe.probing.arms` calls it."""
    return f"{condition}.{at[0]}.{at[1]}"


def read_session(
    model: Model, session: HopSession, codes: Sequence[str], families: Sequence[Family], batch: int
) -> dict[str, Tensor]:
    """Features and use measurements for one session and its codes.

    Returns:
        `retained.arm.distance.family` of shape `[codes, layers, reads, dim]` for each of `PLACES`, and the same with
        `restart` and one row; the digits as `labels` `[codes, digits]`; and what `use_measurements` gives for
        `USE_ARMS`.
    """
    variants = Variants.of((conversation(session, code) for code in codes), model.tokenizer)
    layout = variants.layout
    start, second, answer = layout.part("code").start, layout.span(TURN_NAMES[1]).start, layout.part("answer")
    question = layout[layout.span("Q").start : answer.start]
    without = conversation(session, codes[0]).without(TURN_NAMES[0]).tokens(model.tokenizer)
    afresh = without[: without.span(TURN_NAMES[1]).start]

    begun = model.capture(afresh, families, segments=SUMMARY_NAMES[:1], keep_cache=True)
    shared, restarted = follow(model, begun, layout, families, "restart")
    prefix = model.prefill(layout[:start])

    def read(rows: Sequence[Tokens]) -> tuple[dict[str, Tensor], list[Logits]]:
        begun = model.capture(
            [row[start:second] for row in rows], families, past=prefix, segments=SUMMARY_NAMES[:1], keep_cache=True
        )
        tensors, caches = follow(model, begun, layout, families, "retained")
        asked = [_with_all_in_view(caches["open"]), *caches.values(), *restarted.values()]
        codes = [row[answer] for row in rows]
        return tensors, [asked_logits(model, cache, question, codes) for cache in asked]

    digits = torch.tensor([[int(digit) for digit in code] for code in codes])
    return variants.read(batch, read) | shared | {"labels": digits}


def follow(
    model: Model, begun: Captured, layout: Tokens, families: Sequence[Family], condition: str
) -> tuple[dict[str, Tensor], dict[Arm, KVCache]]:
    """Follow a session from its second turn on in every arm: what probes read of each summary, and what the last
    question sees in each arm.

    Args:
        begun: of the tokens before; its first turn, where there is one, is hidden now.
        layout: the tokens of the session, of which all from the second turn up to the answer hold no code.
        condition: names what is read.
    """
    assert begun.cache is not None
    hidden = [name for name in TURN_NAMES[:1] if name in begun.cache.ledger.names]
    caches: dict[Arm, KVCache] = {ALL: begun.cache.mask(*hidden) if hidden else begun.cache}
    tensors = arm_read_outs(name_of(condition, PLACES[0]), begun)
    for arm, distance in PLACES[1:]:
        named = SUMMARY_NAMES[distance : distance + 1]
        tokens = layout[layout.span(TURN_NAMES[distance]).start : layout.span(*named).stop]
        past = in_view(caches.get(arm, caches[ALL]), arm, distance + 1)
        read = model.capture([tokens] * past.batch, families, past=past, segments=named, keep_cache=True)
        assert read.cache is not None
        caches[arm] = read.cache
        tensors |= arm_read_outs(name_of(condition, (arm, distance)), read)
    return tensors, {arm: in_view(caches[arm], arm, TURNS + 1) for arm in ARMS}


def in_view(cache: KVCache, arm: Arm, turn: int) -> KVCache:
    """The cache of what is seen while this turn is read. In the arm `open` the first turn stays, masked, to be shown
    again."""
    kept = ("system", *(TURN_NAMES[:1] if arm in (ALL, "open") else ()), *summaries_seen(arm, turn))
    return cache.select(*(name for name in kept if name in cache.ledger.names))


def _with_all_in_view(cache: KVCache) -> KVCache:
    return replace(cache, ledger=replace(cache.ledger, live=torch.ones_like(cache.ledger.live)))
