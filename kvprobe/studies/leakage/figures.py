"""The figures of the leakage study that no declaration of the framework draws."""

from typing import Any

import numpy as np

from kvprobe.report.findings import Findings
from kvprobe.report.plots import ARM_COLOURS, styled
from kvprobe.report.plots.figure import Labels

SEGMENTS = {
    "before": "summary 1",
    "hidden": "T2 after it",
    "direct": "summary 2",
    "masked": "T3 masked",
    "restart": "T3 restart",
}
"""What each arm reads, in the order of the conversation."""
PANELS = {
    "margin": "margin of the true secret over others (nats)",
    "token_accuracy": "share of its tokens that the model gets right",
    "kl_from_full": "KL from full context, first token (nats)",
}
COLOURS = {"full": ARM_COLOURS["direct"], "retained": ARM_COLOURS["masked"], "restart": ARM_COLOURS["restart"]}


class LayerBySegment:
    """Accuracy per label by layer and segment, a panel for each family."""

    file = "layer_by_segment"
    caption = "Where the secret can be read, in conversations that the probe never saw: accuracy by layer and segment."

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        import matplotlib.pyplot as plt
        import seaborn as sns

        chosen: Any = findings.frame("site") if "site" in findings else None
        if chosen is None:
            return None
        split = "leave-context-out" if "leave-context-out" in set(chosen["split"]) else "random"
        chosen = chosen[(chosen["split"] == split) & (chosen["read"] == "mean") & chosen["arm"].isin(list(SEGMENTS))]
        families, chance = list(chosen["family"].unique()), findings.at("chance").mean
        with styled():
            figure, axes = plt.subplots(1, len(families), figsize=(10.5, 5.6), sharey=True, squeeze=False)
            for axis, family in zip(axes[0], families, strict=True):
                accuracy = chosen[chosen["family"] == family].pivot(index="layer", columns="arm", values="mean")
                bar, top = family == families[-1], max(0.2, chosen["mean"].max())
                look = {"cmap": "rocket_r", "cbar": bar, "cbar_kws": {"label": "accuracy per label (pale: chance)"}}
                sns.heatmap(accuracy[list(SEGMENTS)].rename(columns=SEGMENTS), ax=axis, vmin=chance, vmax=top, **look)
                axis.invert_yaxis()
                axis.set(title=labels("family", family), xlabel="", ylabel="" if axis is not axes[0, 0] else "layer")
                axis.tick_params(axis="y", rotation=0)
                plt.setp(axis.get_xticklabels(), rotation=35, ha="right")
            figure.suptitle(title, fontsize=10)
            figure.tight_layout()
        return figure


class Use:
    """What the model makes of the secret with each cache, a panel for each measure."""

    file = "use"
    caption = (
        "What the model makes of the secret with three caches; bars are 95 % intervals, often smaller than the dot."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        import matplotlib.pyplot as plt

        with styled():
            figure, axes = plt.subplots(1, len(PANELS), figsize=(10.5, 2.6), sharey=True)
            for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
                for place, (condition, colour) in enumerate(COLOURS.items()):
                    value = findings.at(name, condition=condition)
                    error = np.abs(np.array([value.ends]).T - value.mean)
                    axis.errorbar([value.mean], [place], xerr=error, fmt="o", color=colour, capsize=3, markersize=6)
                axis.set_yticks(range(len(COLOURS)), [labels("condition", condition) for condition in COLOURS])
                axis.set_ylim(len(COLOURS) - 0.5, -0.5)
                axis.set_xlabel(label)
            figure.suptitle(title, fontsize=10)
            figure.tight_layout()
        return figure
