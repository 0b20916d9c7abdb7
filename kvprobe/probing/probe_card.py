"""The card of a published probe: what it reads, of which weights, where, how well, and what follows from that.

A card is data from a stranger: a YAML file of bounded size, whose every key, type and number is checked. What it says in
words for people is written by `kvprobe.probing.card_page` from the same numbers.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from kvprobe.designs import Target
from kvprobe.lens import Family
from kvprobe.presets import shipped
from kvprobe.probing.intervals import LEVEL
from kvprobe.stats import Estimate
from kvprobe.studyconfig import read_yaml
from kvprobe.suggest import unknown

FORMAT = "kvprobe-probe-1"
CARD, WEIGHTS = "card.yaml", "weights.safetensors"
MAX_BYTES, MAX_TEXT, MAX_ENTRIES = 2**16, 600, 1_000

Arm = Literal["retained", "direct", "hidden"]
"""What the slots were computed with: after the hidden text was masked, while it was in view, or as part of it."""

MEASURES = ("accuracy", "floor", "leak", "text", "permuted", "p", "selectivity", "bits", "use")
CARD_SPLITS = ("random", "leave-context-out", "paired")
UNSEEN = "leave-context-out"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")


@dataclass(frozen=True)
class Where:
    """What a probe reads.

    Attributes:
        family: what is read; see `kvprobe.lens.Family`.
        head: one KV head; None for all of them side by side, and for what has no heads.
        read: how a segment's slots become one vector: their mean, or the last one.
        less_restart: whether that of the same slots, computed again without the hidden text, is taken off.
    """

    family: Family
    layer: int
    head: int | None
    read: Literal["mean", "last"]
    less_restart: bool = False


@dataclass(frozen=True)
class Training:
    """What a probe was trained on.

    Attributes:
        study: the study that made it.
        what: completes "It reads …".
        segment: whose slots it was trained on.
        searched: among how many sites its own was chosen, on inner folds; 1 if it was fixed beforehand.
        agreed: share of the folds that chose it.
        samples, contexts: how many conversations, and how many that share nothing.
        penalty: of ridge regression, per sample.
        temperature: what the evidence of each place was divided by.
        typical, far: distance of conversations held out from the others, the median and the 99th percentile; see
            `Probe.distance`.
        gain: bits by which the class that is read must be likelier than in the restart for the reading to be called a leak: of
            readings of conversations held out that gain as much, 90 % are right. None if there is no such gain.
        power: share of readings there that gain as much; None if no restart is known.
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


@dataclass(frozen=True)
class Measure:
    """One number of a probe with its 95 % interval.

    Numbers are of the whole procedure: for each test fold, the site that did best on its inner fold. The search over sites
    does not flatter them.

    Attributes:
        measure: `accuracy`; `floor`, that on recomputed slots; `leak`, their difference; `text`, the accuracy of a table from
            the text that is read; `permuted`, that with labels permuted within contexts, and its `p`, family-wise over all
            sites, both without an interval; `selectivity`, over the hash control task; `bits` of information per label;
            `use`, what the retained cache adds, against the restarted one, to the model's own log-probability of the truth less
            its mean over the other answers, in nats.
        split: one of `CARD_SPLITS`, or "" for what has none.
        low, high: None where there are too few contexts for an interval.
    """

    measure: str
    split: str
    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, measure: str, split: str, value: Estimate) -> "Measure":
        ends = (value.low, value.high) if value.has_interval else (None, None)
        return cls(measure, split, value.mean, *ends)

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


@dataclass(frozen=True)
class Card:
    """All that is known of a probe but its weights.

    Attributes:
        name: of its folder.
        model: what its model was loaded as.
        weights: the model's fingerprint.
        rounded: the same of its weights rounded to bfloat16, by which they are known in another dtype.
        dtype: of the model that it was trained on.

    Raises:
        ValueError: a name that is no folder's, an unknown measure, split or arm, one of them twice, or no accuracy.
    """

    name: str
    target: Target
    model: str
    weights: str
    rounded: str
    dtype: str
    site: Where
    training: Training
    measures: tuple[Measure, ...]
    made: Made = Made()
    licence: str = "Apache-2.0"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} cannot be the name of a probe; use lower-case letters, digits, dots and dashes, 80 at most."
            )
        seen = [(each.measure, each.split) for each in self.measures]
        for measure, split in seen:
            if measure not in MEASURES:
                raise ValueError(unknown("measure", measure, MEASURES))
            if split not in (*CARD_SPLITS, ""):
                raise ValueError(unknown("split", split, CARD_SPLITS))
            if seen.count((measure, split)) > 1:
                raise ValueError(f"The card of {self.name} gives {measure} under {split!r} twice; give it once.")
        for split in CARD_SPLITS:
            if ("accuracy", split) not in seen:
                raise ValueError(f"The card of {self.name} has no accuracy under the {split} split; give all three.")

    def measure(self, measure: str, split: str = UNSEEN) -> Estimate | None:
        """A number of the card, if it has it."""
        found = [each for each in self.measures if (each.measure, each.split) == (measure, split)]
        return found[0].estimate if found else None

    @property
    def reads_unseen(self) -> bool:
        """Whether it was shown to read conversations that it was not trained on: above chance, above the restart floor, and
        better than with labels permuted within conversations, where they were."""
        accuracy, leak, p = (self.measure(each) for each in ("accuracy", "leak", "p"))
        assert accuracy is not None
        confirmed = p is None or p.mean <= LEVEL
        return accuracy.above(self.target.chance) and leak is not None and leak.above() and confirmed

    def write(self, folder: Path) -> None:
        """Write `card.yaml` into a folder."""
        content = {"format": FORMAT} | _plain(dataclasses.asdict(self))
        (folder / CARD).write_text(yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Card":
        """The card of a folder.

        Raises:
            ValueError: there is none, it is too large, not YAML, of another format, or a key is unknown, missing, of the wrong
                type or out of bounds.
        """
        path = folder / CARD
        try:
            content = read_yaml(path, MAX_BYTES)
        except RecursionError as error:
            raise ValueError(f"{path} nests too deep for a card; it was not written by kvprobe.") from error
        except ValueError as error:  # of YAML, too, for a month that does not exist or a number without end
            raise ValueError(
                f"{path} cannot be read as a card ({str(error).rstrip('.')}); copy the folder again."
            ) from error
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not the card of a probe of format {FORMAT!r}; publish the probe again.")
        try:
            return _filled(cls, content, "the card")
        except ValueError as error:
            raise ValueError(f"In {path}: {error}") from error


def published_probes() -> dict[str, Path]:
    """The folders of the probes that ship with kvprobe, by name."""
    return {path.parent.name: path.parent for path in sorted(shipped("probes").glob(f"*/{CARD}"))}


def _plain(value: Any) -> Any:
    """Tuples as lists, which is all that YAML knows."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _filled(kind: Any, content: Any, where: str) -> Any:
    """A value of this type from what YAML gave, or a refusal."""
    if dataclasses.is_dataclass(kind):
        return _filled_dataclass(kind, content, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(content, list) or len(content) > MAX_ENTRIES:
            raise ValueError(f"{where} must be a list of at most {MAX_ENTRIES:,}.")
        return tuple(_filled(arguments[0], each, f"an entry of {where}") for each in content)
    if origin is Literal:
        if content not in arguments:
            raise ValueError(f"{where} is {_shown(content)}; expected one of {', '.join(map(repr, arguments))}.")
        return content
    if origin is UnionType:
        (other,) = (each for each in arguments if each is not NoneType)
        return None if content is None else _filled(other, content, where)
    if kind is float and type(content) is int and abs(content) < 2**53:
        content = float(content)
    if type(content) is not kind:
        raise ValueError(f"{where} is {_shown(content)}, a {type(content).__name__}; expected a {kind.__name__}.")
    if isinstance(content, str) and not (len(content) <= MAX_TEXT and (content.isprintable() or not content)):
        raise ValueError(f"{where} is no line of at most {MAX_TEXT} printable characters.")
    if isinstance(content, float) and not math.isfinite(content):
        raise ValueError(f"{where} is {content}; expected a finite number.")
    return content


def _filled_dataclass(kind: Any, content: Any, where: str) -> Any:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be a mapping, not a {type(content).__name__}.")
    types = get_type_hints(kind)
    for key in content:
        if key not in types:
            raise ValueError(unknown("key", str(key)[:40], types))
    missing = [field.name for field in dataclasses.fields(kind) if field.name not in content]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}.")
    return kind(**{key: _filled(types[key], each, repr(key)) for key, each in content.items()})


def _shown(content: Any) -> str:
    # A few aliases of YAML can stand for lists that no memory holds when they are written out.
    return f"of {len(content)} entries" if isinstance(content, list | dict) else repr(content)[:60]
