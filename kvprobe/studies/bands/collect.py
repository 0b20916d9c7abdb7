"""Noise in every band of layers and in every single layer, at every scale and rate, as rows of one batch for each
prompt.

All rows of a prompt share random draws: whatever the band, the scale or the part, the same slots are struck at one
rate, and those of a lower rate are among those of a higher one. With `unit="slot"` they are the same in all layers,
too.
"""

from dataclasses import dataclass
from typing import cast

import pandas as pd

from kvprobe.experiments.runs import Run
from kvprobe.faults import Gaussian, Scope, bands
from kvprobe.faults.gaussian import Matched
from kvprobe.faults.scope import Parts, Unit
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Trial
from kvprobe.inference.trials import Case
from kvprobe.studies.answers import WHEN, collect_answers
from kvprobe.studies.bands import BANDS, Config, Cut

CONTROL, CUTS, SINGLES = "control", "bands", "singles"
"""Groups of cases: nothing struck, a band of layers struck, a single layer struck."""

_SINGULAR = {"halves": "half", "quarters": "quarter"}


def names_of(cut: Cut) -> list[str]:
    """What the bands of a cut are called, from the first layers to the last."""
    return [cut] if cut == "all" else [f"{_SINGULAR[cut]} {place}" for place in range(1, BANDS[cut] + 1)]


@dataclass(frozen=True)
class Band:
    """Consecutive layers under a name."""

    name: str
    layers: range


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """All items of all tasks under all cases; see `kvprobe.inference.trials.answer` for the columns."""
    every = cases(config, model.geometry.n_layers)
    return collect_answers(model, config, run, lambda _: every)


def cut_bands(config: Config, n_layers: int) -> list[Band]:
    """The bands of a config for a model of so many layers.

    Raises:
        UserError: the model has fewer layers than bands.
    """
    cuts = []
    for cut in config.bands:
        pieces = bands(n_layers, BANDS[cut])
        cuts += [Band(name, layers) for name, layers in zip(names_of(cut), pieces, strict=True)]
    return cuts


def single_bands(n_layers: int) -> list[Band]:
    """Every layer as a band of its own."""
    return [Band(f"layer {layer}", range(layer, layer + 1)) for layer in range(n_layers)]


def cases(config: Config, n_layers: int) -> list[Case]:
    """Every case of a prompt: a control, at which no slot is struck, then bands and single layers.

    Cases of one noise stand side by side, because rows that are damaged alike are written together.
    """
    whole = Band("all", range(n_layers))
    every = [_case(config, CONTROL, whole, config.noises[0], config.parts[0], 0.0)]
    singles = single_bands(n_layers) if config.single else []
    for noise in config.noises:
        for part in config.parts:
            every += [
                _case(config, CUTS, band, noise, part, rate)
                for band in cut_bands(config, n_layers)
                for rate in config.rates
            ]
            every += [_case(config, SINGLES, band, noise, part, config.single) for band in singles]
    return every


def _case(config: Config, group: str, band: Band, noise: str, parts: str, rate: float) -> Case:
    at, transient = WHEN[config.timing]
    scope = Scope(rate=rate / 100, layers=band.layers, parts=cast(Parts, parts), unit=cast(Unit, config.unit))
    fault = Gaussian(cast(Matched, noise), scope=scope, at=at, transient=transient)
    labels: dict[str, str | int | float] = {
        "group": group,
        "band": band.name,
        "first": band.layers[0],
        "last": band.layers[-1],
        "noise": noise,
        "parts": parts,
        "rate": rate,
    }
    return Case(labels, Trial(fault))
