"""Figures of the dangling study, and the example in which a reader can look for himself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView, HeatMap
from kvprobe.report.plots import save, styled
from kvprobe.report.views.attention import patterns_view
from kvprobe.studies.dangling.analyse import PLACES
from kvprobe.studies.dangling.collect import FULL, MASKED, RANDOM, TOP, Case, arms_of, read
from kvprobe.tasks.ordinal import VERBS
from kvprobe.wording import ends

PLACE_NAMES = {
    "sink": "the first slot",
    "later": "the later turn",
    "local": "the question and reply",
    "elsewhere": "other slots",
}
COLOURS = {"sink": "#7f7f7f", "later": "#009e73", "local": "#0072b2", "elsewhere": "#e69f00"}
ARM_NAMES = {"seen": "as it was read", "masked": "list hidden", "crossed": "summary from the other list"}
SHOWN = 4
"""Layers of the example: those that hold the heads of which most attention dangles."""


def draw_all(metrics: Mapping[str, Any], name: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save(heads(metrics, name), folder / "heads")
    save(went(metrics, name), folder / "went")
    save(rescues(metrics, name), folder / "rescues")
    if metrics["memos"]:
        save(memos(metrics), folder / "memos")


def head_table(metrics: Mapping[str, Any]) -> Any:
    """Layers by heads."""
    return pd.DataFrame(metrics["heads"]).pivot(index="layer", columns="head", values="dangling")


def heads(metrics: Mapping[str, Any], name: str) -> Any:
    """The attention that each head spent on the turn that is then hidden."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    table = head_table(metrics)
    with styled():
        size = (max(7.0, 1.6 + 0.38 * len(table.columns)), 1.2 + 0.14 * len(table))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        sns.heatmap(
            table, ax=axis, cmap="viridis", vmin=0, cbar_kws={"label": "attention on the hidden turn"}, yticklabels=2
        )
        axis.invert_yaxis()
        axis.tick_params(axis="y", rotation=0)
        axis.set_title(f"{name}: before it is hidden", fontsize=10)
    return figure


def went(metrics: Mapping[str, Any], name: str) -> Any:
    """What each part of the cache gains, layer by layer, mean over heads."""
    import matplotlib.pyplot as plt

    table: Any = pd.DataFrame(metrics["heads"]).groupby("layer")[["dangling", *PLACES]].mean()
    with styled():
        figure, axis = plt.subplots(figsize=(8.6, 3.2), layout="constrained")
        above, below = np.zeros(len(table)), np.zeros(len(table))
        for place in PLACES:
            own = table[place].to_numpy()
            axis.bar(
                table.index,
                own,
                bottom=np.where(own >= 0, above, below),
                color=COLOURS[place],
                label=PLACE_NAMES[place],
            )
            above, below = above + own.clip(min=0), below + own.clip(max=0)
        axis.plot(table.index, table["dangling"], "k.", ms=4, label="spent on the hidden turn before")
        axis.axhline(0, color="0.4", lw=0.8)
        axis.set_xlabel("layer")
        axis.set_ylabel("attention gained")
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axis.set_title(f"{name}: where the attention goes when the turn is hidden")
    return figure


def rescues(metrics: Mapping[str, Any], name: str) -> Any:
    """The turn back in view for some KV heads: the share of the answer's margin, and of the damage, that they bring
    back."""
    import matplotlib.pyplot as plt

    titles = {"margin": "share of the right answer's margin", "kl": "share of the damage (KL) that goes away"}
    with styled():
        figure, axes = plt.subplots(1, 2, figsize=(9.4, 3.2), layout="constrained")
        for axis, (measure, title) in zip(axes, titles.items(), strict=True):
            sizes = [entry["size"] for entry in metrics["rescues"]]
            for sort, colour, marker in ((TOP, "#d55e00", "o"), (RANDOM, "0.5", "s")):
                own = [entry[sort][measure] for entry in metrics["rescues"]]
                low, high = zip(*(ends(value) for value in own), strict=True)
                axis.fill_between(sizes, low, high, color=colour, alpha=0.2, lw=0)
                label = "most attention on it" if sort == TOP else "random"
                axis.plot(sizes, [value["mean"] for value in own], color=colour, marker=marker, ms=4, label=label)
            axis.axhline(0, color="0.4", lw=0.8)
            axis.axhline(1, color="0.4", lw=0.8, ls="--")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.set_xlabel("KV heads that see the turn")
            axis.set_title(title, fontsize=9)
        axes[0].legend(frameon=False)
        figure.suptitle(
            f"{name}: heads found on one half of the conversations, given their view back on the other", fontsize=10
        )
    return figure


def memos(metrics: Mapping[str, Any]) -> Any:
    """What the trained model's answers follow, by what its summaries were trained to hold."""
    import matplotlib.pyplot as plt

    table: Any = pd.DataFrame(metrics["memos"])
    with styled():
        figure, axes = plt.subplots(1, len(ARM_NAMES), figsize=(10.4, 2.8), sharey=True, layout="constrained")
        for axis, (arm, title) in zip(axes, ARM_NAMES.items(), strict=True):
            for follows, colour, shift in (("payload", "#0072b2", -0.12), ("pointer", "#d55e00", 0.12)):
                if arm != "crossed" and follows == "pointer":
                    continue  # the two are one
                own = (
                    table[(table["arm"] == arm) & (table["follows"] == follows)].set_index("reference").loc[list(VERBS)]
                )
                places = np.arange(len(own)) + (shift if arm == "crossed" else 0)
                axis.vlines(places, own["low"], own["high"], color=colour, lw=1.4)
                label = f"the {follows}'s thing" if arm == "crossed" else None
                axis.plot(places, own["mean"], "o", color=colour, ms=5, label=label)
            axis.set_xticks(range(len(VERBS)), [f"{verb}\n({reference})" for reference, verb in VERBS.items()])
            axis.set_ylim(-0.03, 1.03)
            axis.set_xlim(-0.4, len(VERBS) - 0.6)
            axis.set_title(title, fontsize=9)
            if arm == "crossed":
                axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes[0].set_ylabel("share of answers")
        figure.suptitle("ordinal: the thing that the summary saw, or the thing that stands there now", fontsize=10)
    return figure


def maps(metrics: Mapping[str, Any]) -> list[HeatMap]:
    table = head_table(metrics)
    return [
        HeatMap(
            caption="Attention of the question's and the reply's tokens on the turn before it is hidden, mean over "
            "conversations.",
            rows=[str(layer) for layer in table.index],
            columns=[str(head) for head in table.columns],
            values=table.to_numpy(float).tolist(),
            unit="of a head's attention",
            row_axis="layer",
            column_axis="head",
        )
    ]


def example(model: Model, case: Case, metrics: Mapping[str, Any]) -> list[AttentionView]:
    """One conversation before and after, in the layers with the most dangling heads."""
    table = head_table(metrics)
    layers = sorted(table.max(axis=1).nlargest(SHOWN).index)
    captions = {
        FULL: f"Conversation {case.name} with everything in view.",
        MASKED: "The same with the turn hidden: struck through, and seen by no token of the question and the reply.",
    }
    found = []
    for arm, cache in arms_of(model, model.prefill(case.prompt)).items():
        if arm in captions:
            patterns = read(model, cache, case).of_layers(layers)
            index = table.loc[layers].to_numpy(float)
            view = patterns_view(
                patterns, model.tokenizer, captions[arm], index=index, index_name="attention on the hidden turn"
            )
            found.append(view)
    return found
