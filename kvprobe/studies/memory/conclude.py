"""From bytes and seconds to findings: how far the budget is off, and how a token's time grows with the length."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.memory.budget import Budget
from kvprobe.memory.table import parts, rows
from kvprobe.memory.units import both, short
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots.budget import Along
from kvprobe.stats import Estimate
from kvprobe.studies.memory import Config
from kvprobe.studies.memory.stack_figure import stack_findings
from kvprobe.studies.memory.timed import power_of_length
from kvprobe.tidy import Rows

ALLOWED = 0.05
"""Relative error of a peak that a budget may have and still be called right."""
SAME = 1e-2
"""By how much of their spread the logits of the same token may differ, read with the cache and without."""
QUIET = 0.2
"""Cores that other processes may use while tokens are timed."""
WAYS = ("cached", "anew")
VIEWS = ("transformers", "vLLM", "logical", "measured")


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    return concluded(tables, model.budget(context=config.prompt, memory=config.memory), str(model.lanes.device))


def concluded(tables: Mapping[str, Rows], budget: Budget, device: str = "cpu") -> Conclusion:
    """What `conclude` gives, without the model.

    Args:
        tables: see `collect`.
        budget: of the prompt after which the cache was watched.
    """
    peaks, growth, times = (tables[name] for name in ("samples", "growth", "times"))
    slope = Mean(name="slope", of="slope", by=("way",), cluster="repeat", together=())
    findings = measure(slopes(times), [slope])
    add_errors(findings, peaks)
    add_growth(findings, growth)
    add_times(findings, times)
    for along in get_args(Along):
        findings.extend(stack_findings(budget, along, int(peaks["context"].max()) if along == "context" else 0))
    off = {what: findings.at("worst", what=what).mean for what in ("reading", "generating")}
    beside = max(off, key=lambda what: abs(off[what]))
    facts = {
        "device": device,
        "beside": beside,
        "right": abs(off[beside]) <= ALLOWED,
        "budget": {
            "parameters": budget.parameters,
            "dtype": budget.request.dtype.name,
            "per_token": sum(budget.bytes_per_token),
            "context": budget.request.context,
        },
        "layers": [
            [which, kind, f"{per_token:,}", short(held), short(made)]
            for which, kind, per_token, held, made in rows(budget)
        ],
        "parts": [[name, both(size)] for name, size in parts(budget)],
    }
    difference = float(times["difference"].max())
    seen = f"With the cache and without it the logits differ by {difference:.1e} of their spread (allowed: {SAME:g})."
    return Conclusion(findings, [Control(seen, difference <= SAME)], facts, list(warnings_of(budget, times)))


def warnings_of(budget: Budget, times: Rows) -> Iterator[str]:
    others = float(times["others"].max())
    if others > QUIET:
        yield f"Other processes used {others:.1f} cores while tokens were timed, so seconds are too long."
    if not budget.widths.exact:
        yield "The activations of this family are an estimate."


def add_errors(findings: Findings, peaks: Rows) -> None:
    """Bytes predicted and measured, and of each kind the largest relative error, with its sign and context."""
    errors = peaks["predicted"] / peaks["measured"] - 1
    for (_, row), error in zip(peaks.iterrows(), errors, strict=True):
        keys: dict[str, Any] = {"context": int(row["context"]), "what": str(row["what"])}
        findings.number("predicted", row["predicted"], "bytes", **keys)
        findings.number("measured", row["measured"], "bytes", **keys)
        findings.number("error", error, **keys)
    for what, of_kind in errors.groupby(peaks["what"], sort=False):
        worst = of_kind.abs().idxmax()
        findings.number("worst", of_kind[worst], what=str(what))
        findings.number("worst_at", peaks["context"][worst], "tokens", what=str(what))


def add_growth(findings: Findings, growth: Rows) -> None:
    """Bytes of the cache by generated token, as predicted by three views and as measured."""
    for view in VIEWS:
        for new, size in zip(growth["new"], growth[view], strict=True):
            findings.number("cache", size / 1e6, "MB", new=int(new), view=view)
    findings.number("looks", len(growth))
    findings.number("equal_looks", (growth["measured"] == growth["transformers"]).sum())


def add_times(findings: Findings, times: Rows) -> None:
    """Milliseconds to the next token by length, the median over repeats with their range, and how many times as long
    one takes without the cache."""
    for length, repeats in times.groupby("length"):
        medians = {way: float(repeats[way].median()) for way in WAYS}
        for way in WAYS:
            low, high = 1e3 * repeats[way].min(), 1e3 * repeats[way].max()
            value = Estimate(1e3 * medians[way], clusters=len(repeats), smallest=low, largest=high)
            findings.add(Finding("time", {"way": way, "length": int(length)}, value, "ms"))
        findings.number("faster", medians["anew"] / medians["cached"], length=int(length))


def slopes(times: Rows) -> Rows:
    """For each repeat and way, by what power of the length a token's time grows."""
    tables = []
    for way in WAYS:
        seconds = times.pivot(index="repeat", columns="length", values=way)
        slope = power_of_length(np.array(seconds.columns, float), seconds.to_numpy(float))
        tables.append(pd.DataFrame({"repeat": seconds.index, "way": way, "slope": slope}))
    return pd.concat(tables, ignore_index=True)
