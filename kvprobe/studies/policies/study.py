"""The policies study: its declaration, and its second figure."""

from typing import Any

import numpy as np

from kvprobe.experiments.study import Claim, Study
from kvprobe.policies.catalogue import CATALOGUE, SINKS
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots import styled
from kvprobe.report.plots.figure import Labels
from kvprobe.studies.policies import Config
from kvprobe.studies.policies.collect import FULL, collect
from kvprobe.studies.policies.conclude import GAINS, NAMES, conclude
from kvprobe.studies.policies.on_tasks import ON_TASKS, inputs
from kvprobe.studies.policies.tradeoff import Tradeoff
from kvprobe.tasks.instructions import PLACES


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
        if (kind := str(finding.keys["kind"])) == FULL or CATALOGUE[kind].bits or finding.keys["level"] == budget
    ]


def _called(row: Finding, labels: Labels) -> str:
    kind = str(row.keys["kind"])
    return f"quantised ({row.keys['level']} bits)" if kind != FULL and CATALOGUE[kind].bits else labels("kind", kind)


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
    instead=lambda config: ON_TASKS if config.tasks else None,
    figures=(
        Tradeoff(),
        InstructionsByPlace(),
    ),
    claims=(
        *(Claim(name, above="better", below="worse") for name in GAINS.values()),
        Claim("nearer", above="nearer", below="farther", against=0.5),
    ),
    inputs=inputs,
    labels={
        "n": "{} conversations".format,
        "kind": {FULL: "full cache"} | {name: kind.label for name, kind in CATALOGUE.items()},
        "level": "{:g} %".format,
        "measure": NAMES,
        "baseline": {
            "random": "random eviction",
            "random-sinks": f"random eviction that spares the first {SINKS} slots",
        },
    },
)
