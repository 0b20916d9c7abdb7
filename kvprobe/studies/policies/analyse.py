"""From samples to numbers: every condition against the full cache and against random eviction, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED, estimate, means
from kvprobe.studies.policies.collect import FULL, KINDS, RANDOM, RANDOM_SINKS, Condition
from kvprobe.studies.policies.config import Config
from kvprobe.tasks.instructions import PLACES, VALUES
from kvprobe.tasks.passcode import CODE_LENGTH
from kvprobe.wording import estimate_of

MEASURES = ("kl", "agreement", "code", "instructions")
MARGINS = ("code_margin", "instruction_margin")
BETTER = {"kl": -1, "agreement": 1, "code": 1, "instructions": 1, "code_margin": 1, "instruction_margin": 1}
"""Which way each measure gets better."""
TOLERANCE = {"kl": 0.1, "agreement": 0.05, "code": 0.05, "instructions": 0.05}
"""How far from the full cache is near enough: nats, and shares."""
JUDGED = (20, 50)
"""At which budgets, or those nearest to them, policies are held against random eviction."""
ABOVE_CHANCE = 0.1
"""By how much the full cache must significantly exceed chance for a measure to show anything."""


@dataclass(frozen=True)
class Collected:
    """All samples together.

    Attributes:
        table: one row per sample and condition.
        conditions: their names, the full cache first.
        values: of each measure and `memory`, a number per condition and sample.
        kept: whether each instruction is followed.
    """

    table: pd.DataFrame
    conditions: tuple[str, ...]
    values: dict[str, Float[np.ndarray, "conditions samples"]]
    kept: Float[np.ndarray, "places conditions samples"]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Collected":
        """Join the tables that `collect` wrote."""
        return cls.of(pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True))

    @classmethod
    def of(cls, table: pd.DataFrame) -> "Collected":
        """Samples as `read_sample` gives them."""
        names = tuple(table["condition"].unique())

        def array(column: str) -> Float[np.ndarray, "conditions samples"]:
            return table.pivot_table(index="condition", columns="sample", values=column).loc[list(names)].to_numpy()

        values = {name: array(name) for name in (*MEASURES, *MARGINS, "memory", "bytes", "bytes_held")}
        return cls(table, names, values, np.stack([array(f"instruction{place}") for place in range(1, PLACES + 1)]))

    def number(self, kind: str, level: int) -> int:
        """The place of a condition among all."""
        return self.conditions.index(Condition(kind, level).name)

    def gain(self, measure: str, condition: int, baseline: int) -> Float[np.ndarray, "samples"]:
        """How much better a condition does than another, sample by sample."""
        values = self.values[measure]
        return BETTER[measure] * (values[condition] - values[baseline])


def _range_of(measure: str) -> tuple[float, float]:
    """The natural range of a difference of a measure."""
    return UNBOUNDED if measure == "kl" or measure in MARGINS else DIFFERENCE


def _mean(measure: str, values: Float[np.ndarray, "samples"]) -> dict[str, Any]:
    return estimate(values, within=UNBOUNDED if _range_of(measure) == UNBOUNDED else SHARE).record()


def _difference(measure: str, values: Float[np.ndarray, "samples"], comparisons: int = 1) -> dict[str, Any]:
    return estimate(values, within=_range_of(measure), comparisons=comparisons).record()


def _claims(config: Config) -> int:
    """Comparisons that a headline picks from: policies with a budget, by budget, on three measures and once more with
    sinks spared."""
    policies = sum(not kind.baseline and not kind.bits for kind in KINDS.values())
    return policies * len(judged_budgets(config)) * 4


def analyse(collected: Collected, config: Config) -> dict[str, Any]:
    """The numbers of a run; each difference is between conditions of the same conversations."""
    samples = collected.kept.shape[2]
    table = collected.table.drop_duplicates("sample")
    chance = {"code": 0.1 ** (CODE_LENGTH / np.mean(table["code_tokens"])), "instructions": 1 / VALUES}
    ceiling = {name: _mean(name, collected.values[name][0]) for name in (*chance, *MARGINS)}
    followed = collected.kept[:, 0].sum(0)
    return {
        "samples": samples,
        "full": {
            "slots": _range(table["slots"]),
            "reach": _range(table["reach"]),
            "depth": _range(table["depth"]),
            "continued": _range(table["continued"]),
            "bytes": float(collected.values["bytes"][0].mean()),
            "several_followed": int((followed >= 2).sum()),
        },
        "chance": chance,
        "ceiling": ceiling,
        "judged": {name: estimate_of(ceiling[name]).above(chance[name] + ABOVE_CHANCE) for name in chance},
        "conditions": [_condition(collected, index) for index in range(len(collected.conditions))],
        "against": _against(collected, config),
        "enough": _enough(collected, config),
        "unchanged": _unchanged(collected, config),
    }


def judged_budgets(config: Config) -> list[int]:
    """The measured budgets nearest to those at which policies are judged."""
    nearest = (min(config.budgets, key=lambda percent: abs(percent - wanted)) for wanted in JUDGED)
    return list(dict.fromkeys(nearest))


def _condition(collected: Collected, index: int) -> dict[str, Any]:
    first = collected.table[collected.table["condition"] == collected.conditions[index]].iloc[0]
    values = {name: each[index] for name, each in collected.values.items()}
    followed, kept = collected.kept[:, 0] > 0, collected.kept[:, index] > 0
    lost_some_but_not_all = (followed & ~kept).any(0) & (followed & kept).any(0)
    return {
        "condition": collected.conditions[index],
        "kind": str(first["kind"]),
        "level": int(first["level"]),
        "memory": float(values["memory"].mean()),
        "bytes": float(values["bytes"].mean()),
        "bytes_held": float(values["bytes_held"].mean()),
        "measures": {name: _mean(name, values[name]) for name in (*MEASURES, *MARGINS)},
        "from_full": {
            name: _difference(name, values[name] - collected.values[name][0]) for name in (*MEASURES, *MARGINS)
        },
        "one_forgotten": estimate(lost_some_but_not_all.astype(float), within=SHARE).record(),
        "places": [estimate(place[index], within=SHARE).record() for place in collected.kept],
    }


def _against(collected: Collected, config: Config) -> list[dict[str, Any]]:
    """What each policy gains on random eviction of the same budget; a policy with budgets of its own, on random
    eviction with as much memory or more. The headline picks from these gains: their intervals hold together."""
    memory = collected.values["memory"].mean(1)
    claims = _claims(config)
    found = []
    for baseline in (RANDOM, RANDOM_SINKS):
        for name, kind in KINDS.items():
            if name == baseline:
                continue
            for level in kind.bits or judged_budgets(config):
                own = collected.number(name, level)
                rival = level
                if kind.bits:
                    larger = [
                        each for each in config.budgets if memory[collected.number(baseline, each)] >= memory[own]
                    ]
                    if not larger:
                        continue
                    rival = larger[0]
                other = collected.number(baseline, rival)
                gains = {m: _difference(m, collected.gain(m, own, other), claims) for m in (*MEASURES, *MARGINS)}
                found.append(
                    {"kind": name, "level": level, "baseline": baseline, "baseline_level": rival, "gain": gains}
                )
    return found


def _enough(collected: Collected, config: Config) -> dict[str, dict[str, Any]]:
    """For each policy and measure the least memory that keeps it near the full cache; None where no measured budget
    does.

    It is a crossing, which no jackknife follows: its interval (where `known`) is between where the ends of the loss's
    intervals cross.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, kind in KINDS.items():
        numbers = [collected.number(name, level) for level in kind.bits or config.budgets]
        memory = collected.values["memory"][numbers].mean(1)
        order = np.argsort(-memory)
        found[name] = {"least_measured": float(memory.min())}
        for measure in MEASURES:
            losses = -np.stack([collected.gain(measure, number, 0) for number in numbers])[order]
            rows = np.stack(means(losses, np.arange(losses.shape[1]), _range_of(measure)))
            least = least_memory(memory[order], rows, TOLERANCE[measure], between=not kind.bits)
            values = [float(value) if np.isfinite(value) else None for value in least]
            known = not np.isnan(least).any()
            found[name][measure] = {"known": known, **dict(zip(("mean", "low", "high"), values, strict=True))}
    return found


def least_memory(
    memory: Float[np.ndarray, "levels"], losses: Float[np.ndarray, "draws levels"], tolerance: float, between: bool
) -> Float[np.ndarray, "draws"]:
    """The least memory down to which every measured level loses at most `tolerance`; infinite if the first loses more,
    NaN for losses that are not known.

    Args:
        memory: of each level, falling.
        between: whether there is something between two levels, so that the line from the last level that is near
            enough to the next one says where it is crossed. Below the last level measured nothing is assumed.
    """
    near = np.cumprod(losses <= tolerance, axis=1).sum(1)
    last = np.clip(near - 1, 0, None)
    after = np.clip(near, None, len(memory) - 1)
    rows = np.arange(len(losses))
    inside, outside = losses[rows, last], losses[rows, after]
    crosses = (near > 0) & (near < len(memory)) & between
    way = np.where(crosses, (tolerance - inside) / np.where(crosses, outside - inside, 1.0), 0.0)
    least = np.where(near > 0, memory[last] + way * (memory[after] - memory[last]), np.inf)
    return np.where(np.isnan(losses).any(1), np.nan, least)


def _unchanged(collected: Collected, config: Config) -> dict[str, Any] | None:
    """How far policies that may keep everything, and round nothing, are from the full cache; None if none may."""
    if 100 not in config.budgets:
        return None
    numbers = [collected.number(name, 100) for name, kind in KINDS.items() if not kind.rounds]
    return {
        "conditions": len(numbers),
        "kl": float(collected.values["kl"][numbers].max()),
        "agreement": float(collected.values["agreement"][numbers].min()),
        "memory": float(collected.values["memory"][numbers].min()),
    }


def _range(column: Any) -> dict[str, float]:
    return {"mean": float(column.mean()), "min": float(column.min()), "max": float(column.max())}


def full_condition(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """The full cache among a run's conditions."""
    return next(each for each in metrics["conditions"] if each["kind"] == FULL)
