"""Reading the sessions: K and V of every summary in every arm, and what the model itself makes of the code at the end.

Every turn is masked as soon as its summary is written; the arms differ in the summaries that stay in view. Distance 0
is the summary of the first turn, which saw it; distance d is the summary d turns later. Each session is read once up to
the code. The codes are rows of one batch from there on, and the arms fork where they begin to differ. The restart arm,
which never sees the first turn, is read once per session. What is masked for good is evicted, which is the same and
costs less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.capture import Captured
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import use_measurements
from kvprobe.models.lens import Family
from kvprobe.probing.features import read_outs
from kvprobe.tasks.hops import SUMMARY_NAMES, TURN_NAMES, TURNS, Session, agreeing, conversation
from kvprobe.text.tokens import Tokens

Arm = Literal["open", "hop-forced", "skip"]
ARMS: tuple[Arm, ...] = ("open", "hop-forced", "skip")
DISTANCES = range(TURNS)
FORK = 2
"""The distance from which on the arms differ: the second summary sees the first alone in all of them."""
SHOWN = "T1 shown"
"""The question alone sees T1 again, beside what it sees in the arm `open`: what the model could say if it saw the
code."""
USE_ARMS = (SHOWN, *ARMS, *(f"restart, {arm}" for arm in ARMS))

Place = tuple[str, int]
"""Arm and distance."""


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


def place(arm: Arm, distance: int) -> Place:
    """Under which name features are kept: those before the fork belong to all arms."""
    return (arm if distance >= FORK else "all"), distance


PLACES: tuple[Place, ...] = tuple(dict.fromkeys(place(arm, distance) for arm in ARMS for distance in DISTANCES))


def read_session(
    model: Model, session: Session, codes: Sequence[str], families: Sequence[Family], batch: int
) -> dict[str, Tensor]:
    """Features and use measurements for one session and its codes.

    Returns:
        `retained.arm.distance.family` of shape `[codes, layers, reads, dim]` for each of `PLACES`, and the same with
        `restart` and one row; `digits` `[codes, digits]`; and what `use_measurements` gives for `USE_ARMS`.
    """
    whole = agreeing(session, codes, model.tokenizer)
    layout = whole[0]
    start, second = layout.part("code").start, layout.span(TURN_NAMES[1]).start
    without = conversation(session, codes[0]).without(TURN_NAMES[0]).tokens(model.tokenizer)
    afresh = without[: without.span(TURN_NAMES[1]).start]

    restart = onwards(
        model, model.capture(afresh, families, segments=SUMMARY_NAMES[:1], keep_cache=True), layout, families
    )
    prefix = model.prefill(layout[:start])
    every_code = torch.tensor([row.ids[layout.part("answer")] for row in whole], device=model.lanes.device)
    pieces = []
    for first in range(0, len(codes), batch):
        rows = whole[first : first + batch]
        begun = model.capture(
            [row[start:second] for row in rows], families, past=prefix, segments=SUMMARY_NAMES[:1], keep_cache=True
        )
        retained = onwards(model, begun, layout, families)
        caches = {SHOWN: _with_all_in_view(retained.caches["open"])} | dict(retained.caches)
        asked = [*caches.values(), *restart.caches.values()]
        logits = [code_logits(model, cache, rows) for cache in asked]
        mine = range(first, first + len(rows))
        pieces.append(retained.named("retained") | use_measurements(logits, every_code, mine))

    digits = torch.tensor([[int(digit) for digit in code] for code in codes])
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    tensors = joined | restart.named("restart") | {"digits": digits}
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Followed:
    """A session that was followed to its end in every arm.

    Attributes:
        features: what probes read of each summary.
        caches: what the last question sees.
    """

    features: Mapping[tuple[Place, Family], Float[Tensor, "rows layers reads dim"]]
    caches: Mapping[str, KVCache]

    def named(self, condition: str) -> dict[str, Tensor]:
        """The features under the names of their file."""
        return {name_of(condition, *key): tensor for key, tensor in self.features.items()}


def name_of(condition: str, at: Place, family: str) -> str:
    """The name of features in a session's file."""
    return f"{condition}.{at[0]}.{at[1]}.{family}"


def onwards(model: Model, begun: Captured, layout: Tokens, families: Sequence[Family]) -> Followed:
    """Follow a session from its second turn on in every arm.

    Args:
        begun: of the tokens before; its first turn, where there is one, is hidden now.
        layout: the tokens of the session, of which all from the second turn up to the answer hold no code.
    """
    assert begun.cache is not None
    features: dict[tuple[Place, Family], Tensor] = {}

    def note(at: Place, captured: Captured) -> KVCache:
        features.update({(at, family): read_outs(captured.stack(family)) for family in families})
        assert captured.cache is not None
        return captured.cache

    def read_turn(cache: KVCache, arm: Arm, distance: int) -> KVCache:
        tokens = layout[layout.span(TURN_NAMES[distance]).start : layout.span(SUMMARY_NAMES[distance]).stop]
        past, named = in_view(cache, arm, distance + 1), SUMMARY_NAMES[distance : distance + 1]
        rows = [tokens] * cache.batch
        return note(place(arm, distance), model.capture(rows, families, past=past, segments=named, keep_cache=True))

    cache = note(place("open", 0), begun)
    if TURN_NAMES[0] in cache.ledger.names:
        cache = cache.mask(TURN_NAMES[0])
    forked = read_turn(cache, "open", 1)
    caches = {}
    for arm in ARMS:
        cache = forked
        for distance in DISTANCES[FORK:]:
            cache = read_turn(cache, arm, distance)
        caches[arm] = in_view(cache, arm, TURNS + 1)
    return Followed(features, caches)


def in_view(cache: KVCache, arm: Arm, turn: int) -> KVCache:
    """The cache of what is seen while this turn is read. In the arm `open` the first turn stays, masked, to be shown
    again."""
    kept = ("system", *(TURN_NAMES[:1] if arm == "open" else ()), *summaries_seen(arm, turn))
    return cache.select(*(name for name in kept if name in cache.ledger.names))


def _with_all_in_view(cache: KVCache) -> KVCache:
    return replace(cache, ledger=replace(cache.ledger, live=torch.ones_like(cache.ledger.live)))


def code_logits(model: Model, cache: KVCache, rows: Sequence[Tokens]) -> Float[Tensor, "rows code_tokens vocab"]:
    """The distribution of each code token at the end of the question, the true ones before it given.

    Args:
        cache: of one row, which all of `rows` share, or of as many.
    """
    question, answer = rows[0].span("Q").start, rows[0].part("answer")
    asked, first = model.extend(cache, [rows[0][question : answer.start]] * cache.batch)
    return forced_logits(model, asked, first, [row[answer] for row in rows])
