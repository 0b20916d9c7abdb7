"""From bytes and seconds to findings: how far the budget is off, and how a token's time grows with length and batch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.memory.budget import Budget
from kvprobe.memory.table import parts, rows
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots.budget import Along
from kvprobe.stats import Estimate
from kvprobe.studies.memory import Config
from kvprobe.studies.memory.stack_figure import stack_findings
from kvprobe.studies.memory.timed import power_of_length
from kvprobe.tidy import Rows
from kvprobe.units import both, short

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
    peaks, batches, growth, times = (tables[name] for name in ("samples", "batches", "growth", "times"))
    slope = Mean(name="slope", of="slope", by=("way",), cluster="repeat", together=())
    findings = measure(slopes(times, "length", WAYS), [slope])
    by_batch = slopes(batches, "batch", ("seconds",))
    findings.extend(measure(by_batch, [Mean(name="batch_slope", of="slope", cluster="repeat", together=())]))
    add_errors(findings, peaks)
    add_batches(findings, batches)
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
    others = max(float(taken["others"].max()) for taken in (times, batches))
    return Conclusion(findings, [Control(seen, difference <= SAME)], facts, list(warnings_of(budget, others)))


def warnings_of(budget: Budget, others: float) -> Iterator[str]:
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


def add_batches(findings: Findings, batches: Rows) -> None:
    """Bytes of the cache and of the peak by batch, measured and predicted, and milliseconds of a step: the median over
    repeats with their range."""
    for batch, repeats in batches.groupby("batch"):
        for what in ("cache", "peak"):
            for name, of in (("at_batch", "measured"), ("at_batch_budget", "predicted")):
                findings.number(name, repeats[f"{what}_{of}"].iloc[0] / 1e6, "MB", batch=int(batch), measure=what)
        step = {"batch": int(batch), "measure": "step"}
        findings.add(Finding("at_batch", step, milliseconds(repeats["seconds"]), "ms"))
    once = batches.drop_duplicates("batch")
    findings.number("batches", len(once))
    findings.number("equal_batches", (once["cache_measured"] == once["cache_predicted"]).sum())
    off = once["peak_predicted"] / once["peak_measured"] - 1
    findings.number("worst_batch", off[off.abs().idxmax()])


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
        medians = {way: milliseconds(repeats[way]) for way in WAYS}
        for way, value in medians.items():
            findings.add(Finding("time", {"way": way, "length": int(length)}, value, "ms"))
        findings.number("faster", medians["anew"].mean / medians["cached"].mean, length=int(length))


def milliseconds(seconds: Rows) -> Estimate:
    """The median, with the range."""
    median, low, high = (1e3 * float(value) for value in (seconds.median(), seconds.min(), seconds.max()))
    return Estimate(median, clusters=len(seconds), smallest=low, largest=high)


def slopes(times: Rows, along: str, ways: Sequence[str]) -> Rows:
    """For each repeat and way, by what power of the length or batch a pass's time grows."""
    tables = []
    for way in ways:
        seconds = times.pivot(index="repeat", columns=along, values=way)
        slope = power_of_length(np.array(seconds.columns, float), seconds.to_numpy(float))
        tables.append(pd.DataFrame({"repeat": seconds.index, "way": way, "slope": slope}))
    return pd.concat(tables, ignore_index=True)
