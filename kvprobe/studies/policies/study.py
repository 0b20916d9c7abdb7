"""The policies study: its declaration, and two figures that no declaration of the framework draws."""

from typing import Any

import numpy as np

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots import styled
from kvprobe.report.plots.figure import Labels
from kvprobe.studies.policies import Config
from kvprobe.studies.policies.collect import FULL, KINDS, RANDOM, RANDOM_SINKS, SINKS, collect
from kvprobe.studies.policies.conclude import GAINS, NAMES, conclude
from kvprobe.tasks.instructions import PLACES

PANELS = {
    "kl": "KL from the full cache (nats, log scale)",
    "agreement": "next token as with the full cache (share)",
    "code": "digits of the hidden code recalled (share)",
    "instructions": "instructions followed (share)",
}


class QualityByMemory:
    """Each measure against the memory kept: a line per policy, the band of random eviction, the full cache, chance."""

    file = "quality_by_memory"
    caption = (
        "Means over conversations. Grey band: 95 % interval of random eviction; the tables hold the others. A policy "
        "that keeps everything has a KL of zero, which is off the scale."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        import matplotlib.pyplot as plt

        with styled():
            figure, grid = plt.subplots(2, 2, figsize=(9.6, 8.0), sharex=True)
            for axis, (measure, label) in zip(grid.flat, PANELS.items(), strict=True):
                for name in findings.values("floor", "kind"):
                    _line(axis, findings, measure, str(name), labels)
                if measure != "kl":
                    whole = findings.at("quality", measure=measure, kind=FULL, level=100)
                    axis.axhline(whole.mean, color="black", ls="--", lw=0.9, label="full cache")
                    axis.set_ylim(-0.02, 1.04)
                if chance := findings.get("chance", measure=measure):
                    axis.axhline(chance.mean, color="black", ls=":", lw=0.9, label="chance")
                axis.set_ylabel(label)
                axis.set_xlim(0, 102)
            if any(finding.value.mean > 0 for finding in findings.where("quality", measure="kl")):
                grid[0, 0].set_yscale("log")
            for axis in grid[-1]:
                axis.set_xlabel("memory kept (% of the full cache at 16 bits)")
            figure.suptitle(title, fontsize=10)
            figure.legend(
                *grid[1, 1].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, handlelength=3
            )
            figure.tight_layout(rect=(0, 0.85 / figure.get_figheight(), 1, 1))
        return figure


class InstructionsByPlace:
    """Share of conversations that follow the instruction at each place of the system prompt, a row per policy."""

    file = "instructions_by_place"
    caption = (
        "Instructions followed by their place in the system prompt, in % of the conversations, with the same share of "
        "the slots in each panel; quantisation alone keeps all slots."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        import matplotlib.pyplot as plt
        import seaborn as sns

        budgets = [int(level) for level in findings.values("gain", "level")]
        if not budgets:
            return None
        places = range(1, PLACES + 1)
        with styled():
            figure, axes = plt.subplots(1, len(budgets), figsize=(1.6 + 3.9 * len(budgets), 6.2), squeeze=False)
            for axis, budget in zip(axes[0], budgets, strict=True):
                rows = at_budget(findings, budget)
                shares = [
                    [findings.at("quality", measure=f"instruction{place}", **row.keys).mean for place in places]
                    for row in rows
                ]
                sns.heatmap(
                    100 * np.array(shares),
                    ax=axis,
                    vmin=0,
                    vmax=100,
                    cmap="Blues",
                    annot=True,
                    fmt=".0f",
                    annot_kws={"fontsize": 8},
                    linewidths=0.5,
                    cbar=False,
                    yticklabels=[_called(row, labels) for row in rows] if axis is axes[0, 0] else False,
                    xticklabels=[str(place) for place in places],
                )
                axis.set_title(f"budget {budget} % of the slots")
                axis.set_xlabel("place in the system prompt")
                axis.tick_params(left=False, bottom=False)
                plt.setp(axis.get_yticklabels(), rotation=0)
            chance = 100 * findings.at("chance", measure="instructions").mean
            figure.suptitle(f"Instructions followed (%; chance {chance:g} %). {title}", fontsize=10)
            figure.tight_layout()
        return figure


def at_budget(findings: Findings, budget: int) -> list[Finding]:
    """The memory of the full cache, of the conditions of one budget, and of those that have none."""
    return [
        finding
        for finding in findings.where("memory")
        if (kind := str(finding.keys["kind"])) == FULL or KINDS[kind].bits or finding.keys["level"] == budget
    ]


def _called(row: Finding, labels: Labels) -> str:
    kind = str(row.keys["kind"])
    return f"quantised ({row.keys['level']} bits)" if kind != FULL and KINDS[kind].bits else labels("kind", kind)


def _line(axis: Any, findings: Findings, measure: str, name: str, labels: Labels) -> None:
    kind, label = KINDS[name], labels("kind", name)
    points = sorted(findings.where("memory", kind=name), key=lambda point: point.value.mean)
    if measure == "kl":
        # A condition that changes nothing has a KL of zero, which a log scale cannot show.
        points = [point for point in points if point.value.mean < 1]
    memory = [100 * point.value.mean for point in points]
    values = [findings.at("quality", measure=measure, **point.keys) for point in points]
    if name == RANDOM:
        lows, highs = zip(*(value.ends for value in values), strict=True)
        axis.fill_between(memory, lows, highs, color=kind.colour, alpha=0.2, lw=0, label=f"{label}, 95 % interval")
    axis.plot(
        memory,
        [value.mean for value in values],
        color=kind.colour,
        marker=kind.marker,
        ls=kind.dashes or "none",
        lw=1.3,
        ms=9 if kind.marker == "*" else 5,
        label=label,
        zorder=3 if kind.dashes else 4,
    )
    if kind.bits:
        for point, x, value in zip(points, memory, values, strict=True):
            axis.annotate(str(point.keys["level"]), (x, value.mean), (5, -9), textcoords="offset points", fontsize=7)


STUDY = Study(
    name="policies",
    title="Cache policies, quality for memory",
    question=(
        "A conversation of some hundred tokens holds instructions and a number that will be asked for later. Cache "
        "policies throw parts of its KV cache away, or round them. What does each policy cost in quality for the "
        "memory that it saves?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(QualityByMemory(), InstructionsByPlace()),
    claims=tuple(Claim(name, above="better", below="worse") for name in GAINS.values()),
    labels={
        "kind": {FULL: "full cache"} | {name: kind.label for name, kind in KINDS.items()},
        "level": "{:g} %".format,
        "measure": NAMES,
        "baseline": {RANDOM: "random eviction", RANDOM_SINKS: f"random eviction that spares the first {SINKS} slots"},
    },
)
