"""The figures of the patching study, and its maps as the report has them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.report.document import HeatMap, TokenView
from kvprobe.report.plots import save, styled
from kvprobe.studies.patching.analyse import PARTS
from kvprobe.studies.patching.collect import SLOTS, TOKENS, TOTAL
from kvprobe.wording import ends, whiskers

PART_NAMES = {"K": "K", "V": "V", "KV": "K and V"}
PART_STYLES = {"K": ("#0072b2", "o"), "V": ("#d55e00", "s"), "KV": ("black", "D")}
UNIT = "of the way"
_SHARE = "share of the way to the donor"


def draw_all(metrics: Mapping[str, Any], name: str, folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG; none where there were too few pairs."""
    matplotlib.use("Agg")
    if not metrics["enough"]:
        return
    title = f"{name}, {metrics['pairs']['able_facts']} facts"
    save(whole_by_segment(metrics, title), folder / "whole_by_segment")
    save(layer_by_segment(metrics, title), folder / "layer_by_segment")
    save(layer_by_head(metrics, title), folder / "layer_by_head")
    if metrics["residual"]:
        save(reader_and_total(metrics, title), folder / "reader_and_total")
    if metrics["example"] is not None:
        save(layer_by_slot(metrics["example"], name), folder / "layer_by_slot")


def whole_by_segment(metrics: Mapping[str, Any], title: str) -> Any:
    """All layers of a segment, or of the whole cache, swapped at once."""
    import matplotlib.pyplot as plt

    segments = list(dict.fromkeys(cell["segment"] for cell in metrics["whole"]))
    with styled():
        figure, axis = plt.subplots(figsize=(7.2, 3.0))
        for place, part in enumerate(PARTS):
            cells = [cell for cell in metrics["whole"] if cell["part"] == part] + [metrics["everything"][part]]
            where = np.arange(len(cells)) + 0.2 * (place - 1)
            means = [cell["mean"] for cell in cells]
            errors = np.hstack([whiskers(cell) for cell in cells])
            colour, marker = PART_STYLES[part]
            axis.errorbar(
                where, means, yerr=errors, color=colour, marker=marker, ls="none", ms=5, label=PART_NAMES[part]
            )
        axis.axhline(0, color="0.5", lw=0.8)
        axis.axhline(1, color="0.5", lw=0.8, ls="--")
        axis.set_xticks(range(len(segments) + 1), [*segments, "all slots"])
        axis.set_ylabel(_SHARE)
        axis.legend(frameon=False, title="swapped", loc="center left", bbox_to_anchor=(1.0, 0.5))
        axis.set_title(f"{title}: all layers swapped at once, 95 % intervals")
        figure.tight_layout()
    return figure


def layer_by_segment(metrics: Mapping[str, Any], title: str) -> Any:
    """Single layers by segment: a panel for each part, on one scale."""
    tables = {PART_NAMES[part]: layer_table(metrics, part) for part in PARTS}
    return _panels(tables, f"{title}: one layer swapped at a time", "segment")


def layer_by_head(metrics: Mapping[str, Any], title: str) -> Any:
    """Single KV heads of the value's own slots: a panel for K and one for V."""
    tables = {part: head_table(metrics, part) for part in ("K", "V")}
    return _panels(tables, f"{title}: KV heads of the value's slots, by attribution", "KV head")


def reader_and_total(metrics: Mapping[str, Any], title: str) -> Any:
    """The residual stream at the value's slots, layer by layer, beside the same slots' V seen by the suffix alone."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axis = plt.subplots(figsize=(6.6, 3.0))
        layers = [cell["layer"] for cell in metrics["residual"]]
        means = [cell["mean"] for cell in metrics["residual"]]
        lows, highs = zip(*(ends(cell) for cell in metrics["residual"]), strict=True)
        axis.fill_between(layers, lows, highs, color="#009e73", alpha=0.18, lw=0)
        axis.plot(layers, means, color="#009e73", marker="o", ms=4, label="total: residual stream from this layer on")
        for part in ("K", "V"):
            own = layer_table(metrics, part)["value"]
            colour, marker = PART_STYLES[part]
            axis.plot(own.index, own, color=colour, marker=marker, ms=3, label=f"reader: {part} of this layer alone")
        axis.axhline(0, color="0.5", lw=0.8)
        axis.set_xlabel("layer")
        axis.set_ylabel(_SHARE)
        axis.set_xticks(layers)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axis.set_title(f"{title}: the value's slots")
        figure.tight_layout()
    return figure


def layer_by_slot(example: Mapping[str, Any], name: str) -> Any:
    """One run, slot by slot, by attribution: K above, V below."""
    tables = {part: slot_table(example, part) for part in ("K", "V")}
    return _panels(tables, f"{name}, fact {example['fact']}: layer by slot, by attribution", "", stacked=True)


def layer_table(metrics: Mapping[str, Any], part: str) -> pd.DataFrame:
    """Layers by segments."""
    return _wide([cell for cell in metrics["layers"] if cell["part"] == part], "segment", "mean")


def head_table(metrics: Mapping[str, Any], part: str) -> pd.DataFrame:
    """Layers by KV heads."""
    return _wide([cell for cell in metrics["heads"] if cell["part"] == part], "head", "mean")


def slot_table(example: Mapping[str, Any], part: str) -> pd.DataFrame:
    """Layers by slots, which are named by their tokens."""
    cells = [cell for cell in example["cells"] if cell["grid"] == SLOTS and cell["part"] == part]
    table = _wide(cells, "slot", "share")
    texts = dict(zip(example["slots"], example["texts"], strict=True))
    return table.set_axis([f"{slot} {_shown(texts[slot])}" for slot in table.columns], axis=1)


def layer_maps(metrics: Mapping[str, Any]) -> list[HeatMap]:
    """Layer by segment for K, V and both."""
    return [
        _map(layer_table(metrics, part), f"{PART_NAMES[part]} of one layer and segment, mean over facts.", "segment")
        for part in PARTS
    ]


def head_maps(metrics: Mapping[str, Any]) -> list[HeatMap]:
    return [
        _map(
            head_table(metrics, part),
            f"{part} of one KV head of the value's slots, by attribution, mean over facts.",
            "KV head",
        )
        for part in ("K", "V")
    ]


def slot_maps(example: Mapping[str, Any]) -> list[HeatMap]:
    return [
        _map(
            slot_table(example, part),
            f"{part} of one layer and slot of fact {example['fact']}, by attribution.",
            "slot",
        )
        for part in ("K", "V")
    ]


def token_view(example: Mapping[str, Any]) -> TokenView:
    """All layers of each slot swapped: as the suffix sees it, and where it was measured, as the prompt does as well."""
    shown = {
        "reader: K and V": (TOKENS, "KV"),
        "reader: K": (TOKENS, "K"),
        "reader: V": (TOKENS, "V"),
        "total: K and V": (TOTAL, "KV"),
    }
    found = {(cell["grid"], cell["part"], cell["slot"]): cell["share"] for cell in example["cells"]}
    return TokenView(
        caption=f"Fact {example['fact']}: share of the way to the donor when all layers of one slot are swapped. Total "
        "patches were run for the value and the rest of its turn only; other tokens are 0 there.",
        tokens=example["texts"],
        labels=list(shown),
        values=[[found.get((grid, part, slot), 0.0) for slot in example["slots"]] for grid, part in shown.values()],
    )


def _wide(cells: Sequence[Mapping[str, Any]], columns: str, value: str) -> pd.DataFrame:
    table = pd.DataFrame(cells)
    return table.pivot(index="layer", columns=columns, values=value).reindex(
        columns=list(dict.fromkeys(table[columns]))
    )


def _map(table: pd.DataFrame, caption: str, columns: str) -> HeatMap:
    return HeatMap(
        caption=caption,
        rows=[str(layer) for layer in table.index],
        columns=[str(column) for column in table.columns],
        values=[[float(value) for value in row] for row in table.to_numpy()],
        unit=UNIT,
        row_axis="layer",
        column_axis=columns,
    )


def _panels(tables: Mapping[str, pd.DataFrame], title: str, label: str, stacked: bool = False) -> Any:
    """Heat maps on one scale around zero, layers from below."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    bound = max(1e-6, *(float(table.abs().to_numpy().max()) for table in tables.values()))
    across = max(len(table.columns) for table in tables.values())
    with styled():
        size = (max(7.0, 1.5 + 0.16 * across), 7.6) if stacked else (2.6 * len(tables) + 0.8, 4.6)
        shape = (len(tables), 1) if stacked else (1, len(tables))
        figure, grid = plt.subplots(
            *shape, figsize=size, squeeze=False, sharex=stacked, sharey=True, layout="constrained"
        )
        for axis, (name, table) in zip(grid.flat, tables.items(), strict=True):
            sns.heatmap(
                table, ax=axis, cmap="RdBu", vmin=-bound, vmax=bound, center=0, cbar=False, yticklabels=3,
                xticklabels=True,
            )  # fmt: skip
            axis.invert_yaxis()
            axis.set_title(name)
            axis.set_xlabel("" if axis is not grid[-1, 0] and stacked else label)
            axis.set_ylabel("layer" if axis in grid[:, 0] else "")
            axis.tick_params(axis="y", rotation=0)
            axis.tick_params(axis="x", rotation=90 if stacked else 35, labelsize=6 if stacked else 8)
        figure.colorbar(grid[0, 0].collections[0], ax=grid, label=_SHARE, shrink=0.7)
        figure.suptitle(title, fontsize=10)
    return figure


def _shown(text: str) -> str:
    """A token that can stand under a figure: `$` begins mathematics in matplotlib."""
    return text.replace("\n", "↵").replace("$", r"\$").strip() or "·"
