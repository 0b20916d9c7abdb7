"""The audit: is this cache what the model could have written? Judged without a reference cache.

Every place of the cache (layer, part, head, block, slot) is held against what clean caches of the model hold, and a few
columns are computed anew from the slots before them. Nothing is read again as a whole, so that a cache can be audited
whose text is long, was edited, or cannot be reproduced.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief, Table
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.precision import Fp8Format, fp8_parts
from kvprobe.cache.stored import AnyCache, StoredCache
from kvprobe.detection.clean import Clean, CleanRecipe, clean_of
from kvprobe.detection.columns import computable, spots_of, unedited
from kvprobe.detection.rows import judged_slots, refuse_other_shape, scores_of
from kvprobe.detection.scores import BLOCK, FIRST_SLOTS, Score
from kvprobe.errors import UserError
from kvprobe.fingerprint import differing
from kvprobe.inference.model import Model
from kvprobe.models.geometry import embedded_tokens
from kvprobe.names import number_ranges

UNSEEN = (
    "A change too small to leave what clean caches hold, such as the flip of a low bit, or rounding to 8 bits.",
    "Whole blocks that exchanged their places with their positions and tokens: attention is a sum, so nothing changes.",
    "A right cache of another text in which the ledger names the tokens of that other text.",
    "A slot whose text before it was another one, where its tokens are right and none of the columns that are computed "
    "anew depends on it: beyond layer 1 its numbers are those of a clean cache.",
)
"""What no audit sees, whatever the cache."""

_ROOT, _LOG, _PLAIN, _SHARE = "deviations", "times", "", "%"
_WORDS = {
    "finite": ("holds NaN or infinity", _PLAIN),
    "zeros": ("holds nothing but zeros", _PLAIN),
    "copies": ("holds the very numbers of a slot of another token", _PLAIN),
    "grid": ("of neighbouring numbers are equal in size: they lie on a coarse grid", _SHARE),
    "norm": ("deviations is the norm from its mean", _LOG),
    "distance": ("deviations from the mean of clean caches", _ROOT),
    "distance of a block": ("deviations from the mean of clean caches, over the block", _ROOT),
    "token": ("deviations from what its token gives", _ROOT),
    "token, of a block": ("deviations from what its tokens give, over the block", _ROOT),
    "layer below": ("deviations from what the layer below predicts", _ROOT),
    "layer below, of a block": ("deviations from what the layer below predicts, over the block", _ROOT),
    "number": ("deviations of a single number from what is predicted", _LOG),
    "step": ("deviations between the slots before and after", _ROOT),
    "position": ("times as near to what is predicted at another position", _LOG),
    "computed anew": ("of its size is it off when computed anew from the slots before it", "%log"),
}
"""What the number of each check is, and how the score becomes that number."""


@dataclass(frozen=True)
class Unusual:
    """The most unusual place of one check.

    Attributes:
        excess: how surprising it is, as a multiple of what is allowed.
        value, limit: the number of the check, and what it may be there.
        layers: all layers in which this check found something.
        shift: by how many positions keys seem to be off, where that is what was found.
    """

    check: str
    row: int
    layer: int
    part: str
    head: int
    slot: int
    length: int
    excess: float
    value: float
    limit: float
    layers: tuple[int, ...]
    shift: int | None = None

    @property
    def place(self) -> str:
        """Where it is, in words."""
        slots = f"slot {self.slot}" if self.length == 1 else f"slots {self.slot} to {self.slot + self.length - 1}"
        row = f", row {self.row}" if self.row else ""
        return f"{self.part} of layer {self.layer}, head {self.head}, {slots}{row}"

    def __str__(self) -> str:
        words, kind = _WORDS[self.check]
        unit = " %" if kind.startswith(_SHARE) else ""
        moved = f" (they fit {self.shift:+d} positions on)" if self.shift is not None else ""
        more = f"; layers {number_ranges(self.layers)}" if len(self.layers) > 1 else ""
        if kind == _PLAIN:
            return f"{self.place} {words}{more}."
        return f"{self.place}: {self.value:.3g}{unit} {words}{moved}; allowed {self.limit:.3g}{unit}{more}."


@dataclass(frozen=True, repr=False)
class Audit(Brief):
    """What an audit found.

    Attributes:
        findings: the most unusual place of each check that found something, the most unusual first.
        rate: share of clean caches that would be called suspicious.
        supplied: whether it was held against clean caches that were given, not learnt by default.
        unseen: what this audit cannot see, a sentence each.
        excess: the largest excess of each layer in each block of 16 slots, over rows, heads, parts and checks.
    """

    findings: tuple[Unusual, ...]
    model: str
    origin: str
    slots: int
    rate: float
    supplied: bool
    unseen: tuple[str, ...]
    excess: Float[Tensor, "layers blocks"] = field(repr=False)

    @property
    def suspicious(self) -> bool:
        """Whether some check found something."""
        return bool(self.findings)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        by = ", by the supplied clean caches" if self.supplied else ""
        if not self.suspicious:
            return f"Clean: nothing in it is unusual for {self.model}{by}."
        first = min(layer for finding in self.findings for layer in finding.layers)
        return (
            f"Suspicious: {self.model} would not have written this, by "
            f"{', '.join(one.check for one in self.findings)}; first in layer {first}{by}."
        )

    def as_mapping(self) -> dict[str, object]:
        """For JSON."""
        return {
            "verdict": "suspicious" if self.suspicious else "clean",
            "model": self.model,
            "cache": self.origin,
            "slots": self.slots,
            "rate": self.rate,
            "clean_from": "supplied" if self.supplied else "learnt",
            "findings": [
                {**vars(finding), "excess": min(finding.excess, 1e9), "sentence": str(finding)}
                for finding in self.findings
            ],
            "unseen": list(self.unseen),
        }

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  {finding.check}: {finding}" for finding in self.findings)]
        lines.append(f"Of clean caches of texts like those learnt, {self.rate:.0%} are suspicious. What it cannot see:")
        return "\n".join([*lines, *(f"  {sentence}" for sentence in self.unseen)])

    def _facts(self) -> Iterator[str]:
        yield "suspicious" if self.suspicious else "clean"
        yield f"{self.slots} slots of {self.model}"
        yield from (finding.check for finding in self.findings)

    def _table(self) -> Table:
        rows = [(finding.check, finding.place, finding.value, finding.limit) for finding in self.findings]
        return ("check", "place", "value", "allowed"), rows


@checked_arguments
def audit(model: Model, cache: AnyCache, clean: Clean | None = None) -> Audit:
    """Whether a cache is what this model could have written, layer by layer.

    Args:
        clean: what clean caches of the model hold, in fp8 where the cache is; by default learnt on first use, in about
            a minute, and kept.

    Raises:
        UserError: the cache is of another shape than the model's, or its tokens are not the model's; or `clean` is of
            another model, or of parts in fp8 that are not in this cache, or the other way round.
    """
    cache.ledger.refuse_fitted("An audit")
    cache.ledger.refuse_mixed("An audit")
    _refuse_foreign(model, cache)
    stored, supplied = fp8_parts(cache, model.geometry.parts), clean is not None
    if clean is None:
        clean = clean_of(model, CleanRecipe(fp8=stored))
    else:
        _refuse_other_clean(model, stored, clean)
    excess = torch.zeros(len(cache.layers), max(1, math.ceil(cache.ledger.slots / BLOCK)))
    worst: dict[str, Unusual] = {}
    layers: dict[str, set[int]] = {}
    for row, scores in enumerate(scores_of(model, cache, clean.parts)):
        for score in scores:
            if not score.values.numel():
                continue
            finding = _worst_place(clean, score, row, excess)
            if finding.excess > 1:
                layers.setdefault(score.check, set()).add(score.layer)
                worst[score.check] = max(worst.get(score.check, finding), finding, key=lambda one: one.excess)
    findings = [
        Unusual(**{**vars(finding), "layers": tuple(sorted(layers[check]))}) for check, finding in worst.items()
    ]
    findings.sort(key=lambda one: one.excess, reverse=True)
    origin = cache.origin if isinstance(cache, StoredCache) else "a cache in memory"
    unseen = _unseen(model, cache, clean)
    return Audit(tuple(findings), model.name, origin, cache.ledger.slots, clean.recipe.rate, supplied, unseen, excess)


def _worst_place(clean: Clean, score: Score, row: int, excess: Float[Tensor, "layers blocks"]) -> Unusual:
    """The most unusual place of a score; what each block has is noted in `excess`."""
    by_place = clean.excess(score)
    blocks = score.slots // BLOCK
    excess[score.layer].scatter_reduce_(0, blocks, by_place.amax(0).float(), "amax")
    head, place = divmod(int(by_place.argmax()), by_place.shape[1])
    kind = _WORDS[score.check][1]
    value, limit = (
        _shown(float(values[head, place]), kind) for values in (score.values, clean.allowed(score).expand_as(by_place))
    )
    excess_there = float(by_place[head, place])
    shift = score.shift(head, place) if score.shift is not None and excess_there > 1 else None
    slot = int(score.slots[place])
    return Unusual(
        score.check, row, score.layer, score.part, head, slot, score.length, excess_there, value, limit,
        (score.layer,), shift,
    )  # fmt: skip


def _shown(value: float, kind: str) -> float:
    """The number of a check, from its score."""
    if kind == _PLAIN:
        return value
    if kind == _SHARE:
        return 100 * value
    return {_ROOT: 1.0, _LOG: 1.0}.get(kind, 100.0) * math.exp(min(700.0, value / 2 if kind == _ROOT else value))


def _refuse_foreign(model: Model, cache: AnyCache) -> None:
    if len(cache.layers) != model.geometry.n_layers:
        raise UserError(
            f"The cache has {len(cache.layers)} layers, but {model.name} has {model.geometry.n_layers}; audit a cache "
            "with the model that made it."
        )
    refuse_other_shape(model, 0, cache.layers[0])  # before anything is learnt; the others when they are read
    tokens = cache.ledger.tokens[~cache.ledger.padding]
    if not len(tokens):
        raise UserError("The cache holds no token; audit one after a text was read.")
    judged = torch.stack([judged_slots(cache.ledger, row) for row in range(cache.ledger.batch)])
    if not bool(judged.any()):
        raise UserError(
            "Each slot is hidden in some layer, so nothing can be judged; audit the cache before slots are."
        )
    if not bool((judged & ~_barely_judged(model, cache.ledger)).any()):
        raise UserError(
            f"Nothing is known of what the model gives at the first {FIRST_SLOTS} positions, and these slots cannot be "
            "computed anew, so nothing can be judged; audit a longer cache, or one that was not edited."
        )
    vocabulary = embedded_tokens(model.lanes.plain)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise UserError(
            f"The cache names token {int(tokens.max())}, but {model.name} has {vocabulary} tokens; audit a cache with "
            "the model that made it."
        )


def _refuse_other_clean(model: Model, stored: Mapping[str, Fp8Format], clean: Clean) -> None:
    if clean.model != (known := model.lanes.rounded_fingerprint):
        raise UserError(
            f"The clean caches given were learnt of another model than {model.name} (other "
            f"{differing(clean.model, known)}); leave `clean` out, or learn it with this model."
        )
    if clean.recipe.fp8 != stored:
        raise UserError(
            f"The clean caches given have {_stored(clean.recipe.fp8)}, and this one has {_stored(stored)}; leave "
            f"`clean` out, or learn it with CleanRecipe(fp8={dict(stored)})."
        )


def _stored(parts: Mapping[str, Fp8Format]) -> str:
    """Which parts are in fp8, in words."""
    return " and ".join(f"{name} in fp8 ({kind})" for name, kind in sorted(parts.items())) or "no part in fp8"


def _barely_judged(model: Model, ledger: Ledger) -> Bool[Tensor, "rows slots"]:
    """Judged slots at the first positions that are not computed anew: nothing is predicted of what they hold."""
    barely = torch.stack([judged_slots(ledger, row) for row in range(ledger.batch)]) & (ledger.origins < FIRST_SLOTS)
    if computable(model.lanes):
        for row in range(ledger.batch):
            barely[row, spots_of(unedited(ledger, row))] = False
    return barely


def _unseen(model: Model, cache: AnyCache, clean: Clean) -> tuple[str, ...]:
    """What an audit of this cache cannot see."""
    ledger, longest = cache.ledger, clean.recipe.longest
    sentences = [cache.lacks] if isinstance(cache, StoredCache) and cache.lacks else list[str]()
    if ledger.slots > longest:
        sentences.append(
            f"Texts of at most {longest} tokens were learnt, and this has {ledger.slots} slots: of so long clean "
            "caches more may be called suspicious."
        )
    judged = torch.stack([judged_slots(ledger, row) for row in range(ledger.batch)])
    if apart := int((~ledger.padding & ~judged).sum()):
        sentences.append(f"{apart} slots that some layer does not hold, or hides, are judged in none.")
    if not computable(model.lanes):
        sentences.append(
            "This model keeps states or chooses slots by an index, so no column is computed anew, no token is held "
            "against its layer, and the first slots are only looked at for zeros, copies and infinity."
        )
    else:
        held = (~ledger.padding).sum(1).tolist()
        counts = [unedited(ledger, row) for row in range(ledger.batch)]
        row = max(range(ledger.batch), key=lambda row: held[row] - counts[row])
        if counts[row] < held[row]:
            sentences.append(
                f"Slots were edited, so columns are computed anew among the first {counts[row]} of {held[row]} "
                f"slots{f' of row {row}' if row else ''} only."
            )
        if early := int(_barely_judged(model, ledger).sum()):
            sentences.append(
                f"{early} of the first slots are not computed anew, but only looked at for zeros, copies and infinity."
            )
    if clean.recipe.fp8:
        sentences.append(
            f"It was held against clean caches with {_stored(clean.recipe.fp8)}: what is as small as that rounding "
            "goes unseen."
        )
    if not model.lanes.can_reindex:
        sentences.append("Keys of this model cannot be rotated back, so their positions are not checked.")
    if ledger.slots < BLOCK:
        sentences.append(f"The cache has fewer than {BLOCK} slots, so blocks are not judged.")
    return (*sentences, *UNSEEN)
