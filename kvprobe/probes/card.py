"""The card of a published probe: what it reads, of which model, where and how well.

A card is untrusted input: a YAML file of bounded size, whose every key, type and number is checked.
`kvprobe.probes.page` writes the same numbers in words.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Literal

import yaml

from kvprobe.brief import Brief
from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.files import read_yaml, write_whole
from kvprobe.models.lens import Family
from kvprobe.names import unknown
from kvprobe.plain_data import Limits, filled
from kvprobe.probing.intervals import LEVEL
from kvprobe.shipped import shipped
from kvprobe.stats import Estimate
from kvprobe.tasks.designs import Target

FORMAT = "kvprobe-probe-2"
"""The first version identified its model by weights alone, and had no digest of its own."""
CARD, WEIGHTS = "card.yaml", "weights.safetensors"
LIMITS = Limits(text=600, entries=1_000, one_line=True, whole=True)

Arm = Literal["retained", "direct", "hidden"]
"""How the slots were computed: after the hidden text was masked, while it was in view, or as part of it."""

MEASURES = ("accuracy", "floor", "leak", "text", "majority", "permuted", "p", "selectivity", "bits", "use")
CARD_SPLITS = ("random", "leave-context-out", "paired")
UNSEEN = "leave-context-out"

SHARES = ("accuracy", "floor", "text", "majority", "permuted", "p")
"""Measures that lie between 0 and 1."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}-[0-9a-f]{8}")


@dataclass(frozen=True)
class ProbeInput:
    """What a probe reads.

    Attributes:
        family: what is read; see `kvprobe.models.lens.Family`.
        head: one KV head; None for all of them side by side, and for what has no heads.
        read: how a segment's slots become one vector: their mean, or the last one.
        less_restart: whether the vector of the same slots, computed again without the hidden text, is subtracted.
    """

    family: Family
    layer: int
    head: int | None
    read: Literal["mean", "last"]
    less_restart: bool = False

    def __post_init__(self) -> None:
        require("layer", self.layer, 0)
        require("head", self.head or 0, 0)


@dataclass(frozen=True)
class Training:
    """What a probe was trained on.

    Attributes:
        study: the study that made it.
        what: completes "It reads …".
        segment: whose slots it was trained on.
        searched: number of sites among which its own was chosen, on inner folds; 1 if the site was fixed beforehand.
        agreed: share of the folds that chose it.
        samples, contexts: number of conversations, and of contexts, which share nothing with each other.
        penalty: of ridge regression, per sample.
        temperature: the divisor of the evidence, per place.
        typical, far: distance of held-out conversations from the others, the median and the 99th percentile; see
            `Probe.distance`.
        gain: bits by which the predicted class must be more likely than in the restart for the reading to be called a
            leak: of held-out readings that gain as much, 90 % are right. None if there is no such gain.
        power: share of held-out readings that gain as much; None if no restart is known.
    """

    study: str
    what: str
    segment: str
    arm: Arm
    searched: int = 1
    agreed: float = 1.0
    samples: int = 0
    contexts: int = 0
    penalty: float = 0.0
    temperature: tuple[float, ...] = ()
    typical: float = 0.0
    far: float = 0.0
    gain: float | None = None
    power: float | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "contexts", "penalty", "typical", "far"):
            require(name, getattr(self, name), 0)
        require("searched", self.searched, 1)
        require("agreed", self.agreed, 0, 1)
        require("power", self.power or 0, 0, 1)
        require("gain", self.gain or 0, 0)
        if any(value <= 0 for value in self.temperature):
            raise UserError(f"Setting 'temperature' is {list(self.temperature)}; expected numbers above 0.")


@dataclass(frozen=True)
class Measure:
    """One number of a probe with its 95 % interval.

    Numbers describe the whole procedure: for each test fold, the site that did best on its inner fold. So the search
    over sites does not inflate them.

    Attributes:
        measure: `accuracy`; `floor`, the accuracy on recomputed slots; `leak`, their difference; `text`, the accuracy
            of a table from the visible text; `majority`, that of the commonest label; `permuted`, the accuracy with
            labels permuted within contexts, and its `p`, family-wise over all sites, both without an interval;
            `selectivity`, over the hash control task; `bits` of information per label; `use`, what the retained cache
            adds, against the restarted one, to the model's own log-probability of the truth less its mean over the
            other answers, in nats.
        split: one of `CARD_SPLITS`, or "" for a measure without a split.
        low, high: None where there are too few contexts for an interval.
    """

    measure: str
    split: str
    mean: float
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise UserError(f"The interval of {self.measure} goes from {self.low} down to {self.high}; swap its ends.")
        if self.measure in SHARES:
            require(self.measure, self.mean, 0, 1)

    @classmethod
    def of(cls, measure: str, split: str, value: Estimate) -> "Measure":
        """An estimate as a measure; its interval is left out where there is none."""
        ends = (float(value.low), float(value.high)) if value.has_interval else (None, None)
        return cls(measure, split, float(value.mean), *ends)

    @property
    def estimate(self) -> Estimate:
        low, high = (nan if end is None else end for end in (self.low, self.high))
        return Estimate(self.mean, low, high)


@dataclass(frozen=True)
class Made:
    """How to make a probe again."""

    command: str = ""
    commit: str = ""
    kvprobe: str = ""
    seed: int = 0


@dataclass(frozen=True, repr=False)
class Card(Brief):
    """All that is known about a probe, except its weights.

    Attributes:
        name: of its folder.
        model: the name under which its model was loaded.
        weights: the model's fingerprint, which covers its config and tokenizer as well.
        rounded: the same with weights rounded to bfloat16, which identifies them in another dtype.
        dtype: of the model that it was trained on.
        digest: of the probe's own weights; written and compared by `kvprobe.probes.weights`.

    Raises:
        UserError: a name or fingerprint of the wrong form, an unknown measure, split or arm, one of them twice, or no
            accuracy.
    """

    name: str
    target: Target
    model: str
    weights: str
    rounded: str
    dtype: str
    site: ProbeInput
    training: Training
    measures: tuple[Measure, ...]
    made: Made = Made()
    licence: str = "Apache-2.0"
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} cannot be the name of a probe; use lower-case letters, digits, dots and dashes, 80 at "
                "most."
            )
        for text in (self.weights, self.rounded):
            if not _FINGERPRINT.fullmatch(text):
                raise UserError(f"{text[:60]!r} is not the fingerprint of a model; publish the probe again.")
        named = [(number.measure, number.split) for number in self.measures]
        for measure, split in named:
            if measure not in MEASURES:
                raise UserError(unknown("measure", measure, MEASURES))
            if split not in (*CARD_SPLITS, ""):
                raise UserError(unknown("split", split, CARD_SPLITS))
            if named.count((measure, split)) > 1:
                raise UserError(f"The card of {self.name} gives {measure} under {split!r} twice; give it once.")
        for split in CARD_SPLITS:
            if ("accuracy", split) not in named:
                raise UserError(f"The card of {self.name} has no accuracy under the {split} split; give all three.")

    def measure(self, measure: str, split: str = UNSEEN) -> Estimate | None:
        """A number of the card, or None."""
        matching = [number for number in self.measures if (number.measure, number.split) == (measure, split)]
        return matching[0].estimate if matching else None

    @property
    def chance(self) -> float:
        """Accuracy of a blind guess: of any label or, where labels are known to be unbalanced, of the commonest one."""
        guess = self.measure("majority")
        return guess.mean if guess is not None and guess.ends[0] > self.target.chance else self.target.chance

    @property
    def reads_unseen(self) -> bool:
        """Whether it was shown to read conversations that it was not trained on: above chance, above the restart floor,
        and better than with labels permuted within conversations, where this was measured."""
        accuracy, leak, p = (self.measure(name) for name in ("accuracy", "leak", "p"))
        assert accuracy is not None
        confirmed = p is None or p.mean <= LEVEL
        return accuracy.above(self.chance) and leak is not None and leak.above() and confirmed

    def write(self, folder: Path) -> None:
        """Write `card.yaml` into a folder."""
        content = {"format": FORMAT} | {key: _plain(value) for key, value in dataclasses.asdict(self).items()}
        write_whole(folder / CARD, yaml.safe_dump(content, sort_keys=False, width=120))

    @classmethod
    def read(cls, folder: Path) -> "Card":
        """The card of a folder.

        Raises:
            UserError: there is no card, it is too large, not YAML, of another format, or a key is unknown, missing, of
                the wrong type or out of bounds.
        """
        path = folder / CARD
        try:
            content = read_yaml(path)
        except UserError as error:
            raise UserError(
                f"{path} cannot be read as a card ({str(error).rstrip('.')}); copy the folder again."
            ) from error
        if content.pop("format", None) != FORMAT:
            raise UserError(f"{path} is not the card of a probe of format {FORMAT!r}; publish the probe again.")
        try:
            return filled(cls, content, "the card", LIMITS)
        except UserError as error:
            raise UserError(f"In {path}: {error}") from error


def published_probes() -> dict[str, Path]:
    """The folders of the probes that ship with kvprobe, by name."""
    return {path.parent.name: path.parent for path in sorted(shipped("probes").glob(f"*/{CARD}"))}


def _plain(value: object) -> object:
    """Tuples as lists, since YAML has no tuples."""
    if isinstance(value, dict):
        return {key: _plain(content) for key, content in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
