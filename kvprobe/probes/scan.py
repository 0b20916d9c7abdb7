"""The scan: what published probes can still read about masked messages, segment by segment, in one conversation.

The conversation is processed twice: once with the messages in view until they were answered (or until a later message)
and then masked; and once without them, at the same positions. The second pass is the restart floor. Only what a probe
reads in a segment beyond this floor comes from the hidden messages, however confident the probe is.

Probes are trained on exchanges, a user's message with its answer. So a segment that ends with a user's message is read
together with the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import pandas as pd
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.checks import names_of
from kvprobe.errors import UserError
from kvprobe.inference.capture import Captured
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.names import unknown
from kvprobe.probes.card import Card, published_probes
from kvprobe.probes.probe import Probe
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

LEAK, NONE, FAR, OTHERWISE, UNPROVEN = (
    "leak",
    "no leak shown",
    "far from training",
    "trained otherwise",
    "unproven probe",
)
VERDICTS = {
    LEAK: "the hidden messages make the predicted class more likely, by so many bits that nine of ten such readings "
    "were right in the probe's training conversations, each held out in turn",
    NONE: "they do not make it more likely, or not by enough",
    FAR: "the exchange lies farther from the probe's training samples than 99 % of the held-out conversations, so its "
    "probabilities need not hold",
    OTHERWISE: "the probe was trained on slots that were read in view of the hidden text and not after its mask, or "
    "the reverse, or on the hidden text itself, so its card does not apply to these",
    UNPROVEN: "in conversations that it had not seen, the probe was not shown to read more than chance and more "
    "than the restart",
}


@dataclass(frozen=True, repr=False)
class Scan(Brief):
    """What the probes read.

    Attributes:
        table: one row per exchange, probe and place: `segment`, its name or names; `masked`, whether the messages were
            hidden when it was read; `probe`, `place`; `reads`, the most likely class; `probability`, `base_rate` and
            `restart_probability` of that class; `restart_reads`, the most likely class of the restart; `bits`, the
            logarithm of probability over restart probability, and `gain`, the bits that make a leak; `distance` from
            the training mean, and `far`, the 99th percentile of training conversations; `promised`, the accuracy in
            unseen conversations by the card; `verdict`, a key of `VERDICTS`.
        chat: the conversation, with the segments of an exchange joined.
        hidden: the segments that were masked.
        until: the last segment that was read with them in view.
        cards: of the probes, by name.
        model: its name.
    """

    table: pd.DataFrame
    chat: Transcript
    hidden: tuple[str, ...]
    until: str
    cards: dict[str, Card]
    model: str

    def df(self) -> pd.DataFrame:
        """The table."""
        return self.table

    @property
    def answer(self) -> str:
        """The result, in a sentence or two."""
        judged: Any = self.table[self.table["verdict"].isin([LEAK, NONE])]
        hidden, leaks = ", ".join(self.hidden), judged[judged["verdict"] == LEAK]
        if not len(judged):
            return (
                f"Nothing can be said about {hidden}: none of {len(self.table)} readings is by a probe that was shown "
                "to read such exchanges."
            )
        by = f"{len(judged)} reading{'s' if len(judged) > 1 else ''} by probes that were shown to read such exchanges"
        if not len(leaks):
            return f"No leak of {hidden} was detected in {by}; this does not prove that there is none."
        strongest = [
            f"{row['reads']} in {row['segment']} ({row['probability']:.0%}, {row['restart_probability']:.0%} without)"
            for row in leaks.sort_values("bits", ascending=False).head(3).to_dict("records")
        ]
        most = "" if len(leaks) <= 3 else "most of all "
        show = "shows" if len(leaks) == 1 else "show"
        listed = most + "; ".join(strongest)
        return f"Of {by}, {len(leaks)} {show} content of {hidden} that is not read without it: {listed}."


@checked_arguments
def scan(
    model: Model,
    chat: Transcript,
    hide: str | Sequence[str],
    probes: Sequence[Probe] | None = None,
    *,
    until: str | None = None,
) -> Scan:
    """Run probes over every exchange that comes after masked segments, or between them.

    Args:
        hide: segments to be hidden, or the only one.
        probes: the published ones of this model by default.
        until: the last segment that is read with them in view; by default the next one in which the assistant speaks.

    Raises:
        UserError: no such segment, nothing to read after the masked ones, no probe, or one of another model.
    """
    hide = names_of(hide)
    probes = published_for(model) if probes is None else list(probes)
    if not probes:
        raise UserError("There are no probes to scan with; name at least one.")
    for number, probe in enumerate(probes):
        probe.check(model)
        if probe.name in (other.name for other in probes[:number]):
            raise UserError(f"Two of the probes are called {probe.name!r}; scan with one of them at a time.")
    chat, until = _in_exchanges(chat, hide, _until(chat, hide, until))
    hidden_from = chat.segments.index(until) + 1
    later = chat.segments[min(map(chat.segments.index, hide)) :]
    segments = [name for name in later if name not in hide]

    tokens, fresh = chat.tokens(model.tokenizer), chat.without(*hide).tokens(model.tokenizer)
    in_view = _Stretch.of(model, tokens[: tokens.span(until).stop], tokens.span(later[0]).start, probes)
    stretches = dict.fromkeys(chat.segments[:hidden_from], in_view)
    if hidden_from < len(chat.segments):
        assert in_view.cache is not None
        after = _Stretch.after(model, in_view.cache.mask(*hide), tokens[tokens.span(until).stop :], probes)
        stretches |= dict.fromkeys(chat.segments[hidden_from:], after)
    restart = _Stretch.of(model, fresh, fresh.span(segments[0]).start, probes)

    rows = [
        row
        for segment in segments
        for probe in probes
        for row in _readings(probe, segment, stretches[segment], restart, stretches[segment] is not in_view)
    ]
    cards = {probe.name: probe.card for probe in probes}
    return Scan(pd.DataFrame(rows), chat, hide, until, cards, model.name)


def published_for(model: Model) -> list[Probe]:
    """The probes that ship with kvprobe and read this model, except those of the hidden text itself, which later slots
    do not resemble.

    Raises:
        UserError: there are none.
    """
    catalogue = [Probe.load(name) for name in published_probes()]
    fitting = [probe for probe in catalogue if probe.card.training.arm != "hidden" and probe.fits(model)]
    if not fitting:
        others = sorted({probe.card.model for probe in catalogue})
        known = f"; those that ship with kvprobe read {', '.join(others)}" if others else ""
        raise UserError(
            f"No published probe reads {model.name} with the weights {model.fingerprint}{known}; make some with "
            "`kvprobe run leakage` and `kvprobe publish`, and name their folders with --probes."
        )
    return fitting


@dataclass(frozen=True)
class _Stretch:
    """Consecutive tokens, with what the probes need of them."""

    captured: Captured
    tokens: Tokens

    @classmethod
    def of(cls, model: Model, tokens: Tokens, start: int, probes: Sequence[Probe]) -> "_Stretch":
        """Of the tokens from `start` on."""
        return cls.after(model, model.prefill(tokens[:start]) if start else None, tokens[start:], probes)

    @classmethod
    def after(cls, model: Model, past: KVCache | None, tokens: Tokens, probes: Sequence[Probe]) -> "_Stretch":
        """Of tokens that follow a cache."""
        families: list[Family] = sorted({probe.site.family for probe in probes})
        layers = sorted({probe.site.layer for probe in probes})
        return cls(model.capture(tokens, families, layers=layers, past=past, keep_cache=True), tokens)

    @property
    def cache(self) -> KVCache | None:
        return self.captured.cache

    def slots(self, probe: Probe, segment: str) -> Tensor:
        """A segment's slots as the probe's site shows them."""
        return self.captured[probe.site.family, probe.site.layer][..., self.tokens.span(segment), :]


def _readings(
    probe: Probe, segment: str, stretch: _Stretch, restart: _Stretch, masked: bool
) -> list[dict[str, object]]:
    """What a probe reads in a segment, one row per place."""
    shown, fresh = (probe.read_out(source.slots(probe, segment)) for source in (stretch, restart))
    vectors = probe.features(shown, fresh)
    probabilities, floor = (probe.probabilities(inputs)[0] for inputs in (vectors, probe.features(fresh, fresh)))
    distance, training = float(probe.distance(vectors)[0]), probe.card.training
    promised = probe.card.measure("accuracy")
    assert promised is not None
    rows = []
    for place, name in enumerate(probe.target.places):
        best = int(probabilities[place].argmax())
        probability, without = float(probabilities[place, best]), float(floor[place, best])
        bits = log2(probability / max(without, 1e-12))
        row = {
            "segment": segment,
            "masked": masked,
            "probe": probe.name,
            "place": name,
            "reads": probe.target.classes[best],
            "probability": probability,
            "base_rate": float(probe.base_rates[place, best]),
            "restart_probability": without,
            "restart_reads": probe.target.classes[int(floor[place].argmax())],
            "bits": bits,
            "gain": training.gain,
            "distance": distance,
            "far": training.far,
            "promised": promised.mean,
            "verdict": _verdict(probe.card, masked, bits, distance),
        }
        rows.append(row)
    return rows


def _verdict(card: Card, masked: bool, bits: float, distance: float) -> str:
    training = card.training
    if training.power is None or not card.reads_unseen:
        return UNPROVEN
    if training.arm != ("retained" if masked else "direct"):
        return OTHERWISE
    if distance > training.far:
        return FAR
    return LEAK if training.gain is not None and bits >= training.gain else NONE


def _in_exchanges(chat: Transcript, hide: Sequence[str], until: str) -> tuple[Transcript, str]:
    """The conversation with each exchange as one segment, and the exchange that ends with `until`. No exchange goes
    beyond `until`, and none holds a masked segment."""
    names: dict[str, str] = {}
    open_ones: list[str] = []
    for segment, following in zip(chat.segments, [*chat.segments[1:], None], strict=True):
        open_ones.append(segment)
        last_role = [message.role for message in chat.messages if message.segment == segment][-1]
        if last_role != "user" or segment in (*hide, until) or following in (*hide, None):
            names |= dict.fromkeys(open_ones, "+".join(open_ones))
            open_ones = []
    messages = tuple(replace(message, segment=names[message.segment]) for message in chat.messages)
    return replace(chat, messages=messages, hidden=frozenset(names[name] for name in chat.hidden)), names[until]


def _until(chat: Transcript, hide: Sequence[str], until: str | None) -> str:
    """The last segment that is read with the masked ones in view."""
    if not hide:
        raise UserError("Nothing is masked, so nothing can leak; name at least one segment to mask.")
    for name in (*hide, *([] if until is None else [until])):
        if name not in chat.segments:
            raise UserError(unknown("segment", name, chat.segments))
    last = max(map(chat.segments.index, hide))
    after = chat.segments[last + 1 :]
    if not after:
        raise UserError(
            f"Nothing comes after {chat.segments[last]!r}, so nothing can have seen it; mask an earlier message, or "
            "add one after it."
        )
    if until is None:
        speaks = [
            message.segment for message in chat.messages if message.role == "assistant" and message.segment in after
        ]
        return (speaks or after)[0]
    if chat.segments.index(until) < last:
        raise UserError(
            f"{until!r} comes before {chat.segments[last]!r} and cannot be the last segment that sees it; name a later "
            "one, or leave it out to use the next answer of the assistant."
        )
    return until
