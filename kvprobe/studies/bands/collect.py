"""Noise or pruning in every band of layers and in every single layer, at every scale and rate, as rows of one batch for
each prompt.

All rows of a prompt share random draws: whatever the band, the scale or the part, the same slots are struck at one
rate, and those of a lower rate are among those of a higher one. With `unit="slot"` they are the same in all layers,
too.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, product
from typing import cast

import pandas as pd

from kvprobe.experiments.runs import Run
from kvprobe.faults import Distractor, Gaussian, Scope, Zeros, bands
from kvprobe.faults.fault import Fault
from kvprobe.faults.gaussian import Matched
from kvprobe.faults.scope import Parts, Unit
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Trial
from kvprobe.inference.trials import AskedItem, Case
from kvprobe.models.geometry import Geometry
from kvprobe.policies.catalogue import SINKS
from kvprobe.studies.answers import WHEN, collect_answers
from kvprobe.studies.bands import BANDS, PRUNED, Config, Cut, Noise

CONTROL, CUTS, SINGLES = "control", "bands", "singles"
"""Groups of cases: nothing struck, a band of layers struck, a single layer struck."""

_SINGULAR = {"halves": "half", "thirds": "third", "quarters": "quarter", "sixths": "sixth"}
_NEUTRAL: dict[Noise, Callable[..., Fault]] = {"zeros": Zeros, "scaffold": partial(Distractor, "scaffold")}


def names_of(cut: Cut) -> list[str]:
    """What the bands of a cut are called, from the first layers to the last."""
    return [cut] if cut == "all" else [f"{_SINGULAR[cut]} {place}" for place in range(1, BANDS[cut] + 1)]


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """All items of all tasks under all cases; see `kvprobe.inference.trials.answer` for the columns."""
    return collect_answers(model, config, run, of_item)


def of_item(shape: Geometry, config: Config, asked: AskedItem) -> list[Case]:
    """The cases of one item."""
    return cases(config, shape.n_layers, len(asked.tokens) - 1)


def cut_bands(config: Config, n_layers: int) -> dict[str, range]:
    """The layers of each band of a config, for a model of so many layers.

    Raises:
        UserError: the model has fewer layers than bands.
    """
    pieces = [zip(names_of(cut), bands(n_layers, BANDS[cut]), strict=True) for cut in config.bands]
    return dict(chain(*pieces))


def cases(config: Config, n_layers: int, slots: int) -> list[Case]:
    """Every case of a prompt of so many slots: a control, at which no slot is struck, then bands and single layers.

    Cases of one noise stand side by side, because rows that are damaged alike are written together.
    """
    cuts = [(CUTS, band, rate) for band in cut_bands(config, n_layers).items() for rate in config.rates]
    singles = [(SINGLES, (f"layer {layer}", range(layer, layer + 1)), config.single) for layer in range(n_layers)]
    struck = [*cuts, *(singles if config.single else ())]
    nothing = (CONTROL, ("all", range(n_layers)), 0.0, config.noises[0], config.parts[0])
    every = [nothing, *((*place, *how) for how in product(config.noises, config.parts) for place in struck)]
    return [_case(config, slots, *case) for case in every]


def _case(
    config: Config, slots: int, group: str, band: tuple[str, range], rate: float, noise: Noise, parts: str
) -> Case:
    (name, layers), (at, transient) = band, WHEN[config.timing]
    if noise in PRUNED:
        trial = Trial(
            Zeros(scope=Scope(rate=0.0)), hidden=_pruned(noise, round(rate / 100 * slots), slots, layers, config)
        )
    else:
        fault = _NEUTRAL.get(noise) or partial(Gaussian, cast(Matched, noise))
        scope = Scope(
            rate=rate / 100,
            layers=layers,
            parts=cast(Parts, parts),
            unit=cast(Unit, config.unit),
            among="prompt" if noise in _NEUTRAL else "all",
        )
        trial = Trial(fault(scope=scope, at=at, transient=transient))
    where = {"group": group, "band": name, "first": layers[0], "last": layers[-1]}
    return Case({**where, "noise": noise, "parts": parts, "rate": rate}, trial)


def _pruned(noise: Noise, gone: int, slots: int, layers: range, config: Config) -> Scope:
    """So many of the slots, or all but the spared ones; of a window those after the sinks."""
    first = 0 if noise == "random" else SINKS
    last = first + gone if noise == "window" else slots
    among = range(first, max(first + 1, min(last, slots)))
    return Scope(count=gone, slots=among, layers=layers, unit=cast(Unit, config.unit))
