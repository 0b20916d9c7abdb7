"""Single flips at every bit of every dtype, the same places struck at each; and flips at a rate over the whole
cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvprobe.experiments.runs import Run
from kvprobe.faults import BitFlips, Scope
from kvprobe.faults.bit_flips import LAYOUTS, Field, Stored
from kvprobe.faults.scope import Part
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Trial
from kvprobe.inference.trials import AskedItem, Case, Labels
from kvprobe.models.geometry import Geometry
from kvprobe.studies.answers import collect_answers
from kvprobe.studies.bitflips import Config

ANY = "any"
"""Flips at a rate that may be of any bit."""
FIELDS: dict[str, Field | None] = {ANY: None, "sign": "sign", "exponent": "exponent", "mantissa": "mantissa"}
NOWHERE = -1
"""The layer, head, bit and flip of rows that are not a single flip."""
EVERYWHERE: Labels = {**dict.fromkeys(("bit", "flip", "layer", "head"), NOWHERE), "part": "kv"}

_WHERE = 0x62
"""Keeps the places of flips apart from whatever else is drawn from the same seed and sample."""


@dataclass(frozen=True)
class FlipPlace:
    """Where a flip strikes; slot and channel are drawn by the scope, from the draws of the flip's number."""

    flip: int
    layer: int
    head: int
    part: Part

    @property
    def scope(self) -> Scope:
        return Scope(count=1, layers=(self.layer,), heads=(self.head,), parts=self.part, unit="number")


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """Every item under every flip; see `kvprobe.inference.trials.answer` for the columns that no label names."""
    return collect_answers(model, config, run, of_item)


def of_item(shape: Geometry, config: Config, asked: AskedItem) -> list[Case]:
    """The cases of one item."""
    return list(cases(config, asked, shape))


def cases(config: Config, sample: AskedItem, shape: Geometry) -> Iterator[Case]:
    """Single flips, then error rates, then the control that flips nothing.

    Labels: `group` (single, rate, control), `dtype`, `field`, `bit` (0 the lowest of the mantissa), `flip`, `layer`,
    `head`, `part` and `rate` (share of all numbers).
    """
    # Flips outermost: rows that lie together then share random draws, which are cached for a short while.
    for place in places(config, sample.number, shape):
        for dtype in config.dtypes:
            for bit in range(LAYOUTS[dtype].bits):
                field = LAYOUTS[dtype].field_of(bit)
                labels = {"group": "single", "dtype": dtype, "field": field, "bit": bit, "rate": 0.0, **vars(place)}
                yield Case(labels, Trial(BitFlips(dtype, bit=bit, scope=place.scope), repeat=place.flip))
    for name, field in FIELDS.items():
        for rate in config.error_rates:
            yield _everywhere("rate", config.dtypes[0], name, field, rate)
    for dtype in config.dtypes:
        yield _everywhere("control", dtype, ANY, None, 0.0)


def places(config: Config, sample: int, shape: Geometry) -> list[FlipPlace]:
    """Where the flips of a sample strike, whatever their bit and dtype; more flips begin with those of fewer."""
    rng = np.random.default_rng([config.seed, sample, _WHERE])
    return [
        FlipPlace(
            flip, int(rng.integers(shape.n_layers)), int(rng.integers(shape.n_kv_heads)), rng.choice(("k", "v")).item()
        )
        for flip in range(config.flips)
    ]


def _everywhere(group: str, dtype: Stored, name: str, field: Field | None, rate: float) -> Case:
    labels = {"group": group, "dtype": dtype, "field": name, "rate": rate, **EVERYWHERE}
    return Case(labels, Trial(BitFlips(dtype, field=field, scope=Scope(rate=rate, unit="number"))))
