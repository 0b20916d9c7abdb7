"""Figures of the filter-poison study: the index by layer and by head, the state of the stream, and the test on other
conversations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.attention import attend
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView, HeatMap
from kvprobe.report.plots import save, styled
from kvprobe.report.views.attention import patterns_view
from kvprobe.studies.filter_poison.analyse import FILTER, POISON
from kvprobe.studies.filter_poison.collect import Case, damages, struck_of
from kvprobe.studies.filter_poison.config import FALSE, Config
from kvprobe.wording import ends

BOUND = 1.0
"""Indices below minus this are drawn at the edge: an MLP whose reaction was protective may leave several times the
damage."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
MARKERS = "os^DPx*+"
VERDICTS = {POISON: "#0072b2", FILTER: "#d55e00", "mixed": "#e69f00", "neutral": "0.75"}
"""Blue above zero and red below it, as in the maps."""
SHOWN = 4
"""Layers of the example."""
KIND_NAMES = {"attn": "attention blocks", "mlp": "MLPs", "head": "heads"}


def draw_all(metrics: Mapping[str, Any], name: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    save(strips(metrics, name), folder / "strips")
    save(heads(metrics, name), folder / "heads")
    save(states(metrics, name), folder / "states")
    save(tested(metrics, name), folder / "tested")


def family_name(family: str) -> str:
    return "another fact" if family == FALSE else CATALOGUE[family].label


def strips(metrics: Mapping[str, Any], name: str) -> Any:
    """The causal index of every attention block and MLP in each family, and of every head as the mean of families."""
    import matplotlib.pyplot as plt

    table: Any = pd.DataFrame(metrics["components"])
    with styled():
        figure, axes = plt.subplots(3, 1, figsize=(10.4, 8.4), sharex=True)
        for axis, kind in zip(axes, KIND_NAMES, strict=True):
            own = table[table["kind"] == kind]
            axis.axhline(0, color="0.4", lw=0.8)
            axis.set_ylabel(f"{KIND_NAMES[kind]}: π")
            if kind == "head":
                for verdict, colour in reversed(VERDICTS.items()):
                    some = own[own["verdict"] == verdict]
                    _dots(axis, some["layer"], some["pi"], colour, "o", f"{verdict} ({len(some)})")
                axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title="mean of families")
                continue
            offsets = np.linspace(-0.3, 0.3, len(metrics["families"]))
            for place, family in enumerate(metrics["families"]):
                colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
                where = own["layer"] + offsets[place]
                low, high = (
                    own[f"{end}_{family}"].fillna(own[f"{widest}_{family}"]).astype(float).clip(lower=-BOUND)
                    for end, widest in (("low", "smallest"), ("high", "largest"))
                )
                axis.vlines(where, low, high, color=colour, lw=0.7, alpha=0.6)
                _dots(axis, where, own[f"pi_{family}"], colour, marker, family_name(family))
            if kind == "attn":
                axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title="damage")
        axes[-1].set_xlabel("layer")
        axes[0].set_title(f"{name}: share of the damage that goes away when one output is restored (95 % intervals)")
        figure.subplots_adjust(left=0.08, right=0.78, top=0.95, bottom=0.06, hspace=0.12)
    return figure


def _dots(axis: Any, where: Any, values: Any, colour: str, marker: str, label: str) -> None:
    """Points, those beyond the edge as triangles that point to where they are."""
    where, values = np.asarray(where, float), np.asarray(values, float)
    inside = values >= -BOUND
    axis.plot(where[inside], values[inside], marker, color=colour, ms=3.4, label=label)
    axis.plot(where[~inside], np.full((~inside).sum(), -BOUND), "v", color=colour, ms=4.5, clip_on=False)


def head_table(metrics: Mapping[str, Any], column: str = "pi") -> Any:
    """Layers by heads."""
    table: Any = pd.DataFrame([row for row in metrics["components"] if row["kind"] == "head"])
    return table.pivot(index="layer", columns="head", values=column)


def heads(metrics: Mapping[str, Any], name: str) -> Any:
    """The mean index of every head; a dot where it has a verdict."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    table, verdicts = head_table(metrics).astype(float), head_table(metrics, "verdict")
    bound = max(1e-3, float(np.nanquantile(table.abs().to_numpy(), 0.99)))
    with styled():
        figure, axis = plt.subplots(
            figsize=(max(7.0, 1.6 + 0.38 * len(table.columns)), 1.2 + 0.14 * len(table)), layout="constrained"
        )
        label = "π, mean of families"
        sns.heatmap(
            table, ax=axis, cmap="RdBu", vmin=-bound, vmax=bound, center=0, cbar_kws={"label": label}, yticklabels=2
        )
        for row, layer in enumerate(table.index):
            for column, head in enumerate(table.columns):
                if verdicts.loc[layer, head] in (POISON, FILTER):
                    axis.plot(column + 0.5, row + 0.5, ".", color="black", ms=4)
        axis.invert_yaxis()
        axis.tick_params(axis="y", rotation=0)
        axis.set_title(f"{name}: heads", fontsize=10)
    return figure


def states(metrics: Mapping[str, Any], name: str) -> Any:
    """How far the stream over the suffix is off, and what attention and MLPs do about it."""
    import matplotlib.pyplot as plt

    table: Any = pd.DataFrame(metrics["states"])
    titles = {
        "rho": "‖δ‖ / ‖h‖ before the layer",
        "erasure_attn": "erased by attention",
        "erasure_mlp": "erased by the MLP",
    }
    with styled():
        figure, axes = plt.subplots(1, 3, figsize=(11.0, 3.2), layout="constrained")
        for axis, (column, title) in zip(axes, titles.items(), strict=True):
            for place, family in enumerate(metrics["families"]):
                own = table[table["family"] == family]
                # Before the second layer there is hardly a deviation to be erased, and its share is any number.
                own = own if column == "rho" else own[own["layer"] > 1]
                axis.plot(
                    own["layer"],
                    own[column].astype(float),
                    color=COLOURS[place % len(COLOURS)],
                    label=family_name(family),
                    marker=MARKERS[place % len(MARKERS)],
                    ms=3,
                    lw=1,
                )
            axis.axhline(0, color="0.4", lw=0.8)
            axis.set_title(title, fontsize=9)
            axis.set_xlabel("layer")
        axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.suptitle(f"{name}: the residual stream over the suffix, medians over conversations", fontsize=10)
    return figure


def tested(metrics: Mapping[str, Any], name: str) -> Any:
    """Heads found on one half of the conversations, restored together on the other, beside random heads of the same
    layers."""
    import matplotlib.pyplot as plt

    with styled():
        rows = [*metrics["families"], "all"]
        figure, axes = plt.subplots(1, 2, figsize=(9.0, 1.6 + 0.36 * len(rows)), sharey=True, layout="constrained")
        for axis, sort in zip(axes, (POISON, FILTER), strict=True):
            for row, family in enumerate(rows):
                [own] = [entry for entry in metrics["tested"] if entry["family"] == family and entry["sort"] == sort]
                for which, colour, shift in (("chosen", VERDICTS[sort], -0.13), ("random", "0.5", 0.13)):
                    value = own[which]
                    axis.plot(ends(value), [row + shift] * 2, color=colour, lw=1.4)
                    axis.plot(
                        value["mean"],
                        row + shift,
                        "o",
                        color=colour,
                        ms=4.5,
                        label=which if not row else None,
                    )
            axis.axvline(0, color="0.4", lw=0.8)
            axis.set_yticks(range(len(rows)), [family_name(row) if row != "all" else "all" for row in rows])
            axis.set_title(f"heads with the {'highest' if sort == POISON else 'lowest'} index", fontsize=9)
            axis.set_xlabel("share of the damage that goes away")
        axes[0].invert_yaxis()
        for axis in axes:
            axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
        figure.suptitle(f"{name}: heads found on one half of the conversations, restored on the other", fontsize=10)
    return figure


def maps(metrics: Mapping[str, Any]) -> list[HeatMap]:
    """Heads by layer, and families by layer for attention blocks and MLPs, to be pointed at."""
    table = head_table(metrics)
    found = [
        HeatMap(
            caption="Mean index of every head over the families.",
            rows=[str(layer) for layer in table.index],
            columns=[str(head) for head in table.columns],
            values=_values(table),
            unit="of the damage",
            row_axis="layer",
            column_axis="head",
        )
    ]
    components: Any = pd.DataFrame(metrics["components"])
    for kind in ("attn", "mlp"):
        own = components[components["kind"] == kind].set_index("layer")[[f"pi_{name}" for name in metrics["families"]]]
        found.append(
            HeatMap(
                caption=f"Index of {KIND_NAMES[kind]} in each family.",
                rows=[str(layer) for layer in own.index],
                columns=[family_name(name) for name in metrics["families"]],
                values=_values(own),
                unit="of the damage",
                row_axis="layer",
                column_axis="damage",
            )
        )
    return found


def example(model: Model, config: Config, case: Case, metrics: Mapping[str, Any]) -> list[AttentionView]:
    """One conversation read with its cache whole and damaged, in the layers whose heads matter most, index beside each
    head."""
    table = head_table(metrics).astype(float)
    layers = sorted(table.abs().max(axis=1).nlargest(SHOWN).index)
    found = []
    family, clean, damaged = damages(model, config, case)[0]
    for cache, caption in (
        (clean, "as it was read"),
        (damaged, f"with damage by {family_name(family)}, its slots marked"),
    ):
        patterns = attend(model, case.suffix, cache, queries=range(len(case.suffix)), layers=layers)
        struck = struck_of(clean, cache).tolist()
        index = table.loc[layers].to_numpy(float)
        found.append(
            patterns_view(
                patterns, model.tokenizer, f"Conversation {case.name}, {caption}.", damaged=struck, index=index,
                index_name="causal index π, mean of families",
            )
        )  # fmt: skip
    return found


def _values(table: Any) -> list[list[float | None]]:
    return [[None if pd.isna(value) else float(value) for value in row] for row in table.to_numpy()]
