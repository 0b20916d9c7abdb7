"""The parts of the band report that hold results: the article's table, bands, their order, single layers, K against
V."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvprobe.report.document import Figure, Section, Table
from kvprobe.studies.bands.analyse import BUFFER, LAST, conditions, told
from kvprobe.studies.bands.collect import CUTS, SINGLES
from kvprobe.studies.bands.config import NOISES, Config
from kvprobe.studies.bands.figures import NOISE_NAMES, PART_LABELS, file_of, layer_map, main_part
from kvprobe.wording import estimate_of, percent, plain, points, signed

MEASURE_NAMES = {"kl": "KL from the clean run", "lost": "accuracy lost"}


def seed_section(metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, place: int, name: str) -> Section:
    beside = task["published"]
    part = main_part(config)
    noises = [noise for noise, parts in conditions(config) if parts == part]
    measured = {
        (cell["band"], cell["rate"], cell["noise"]): cell["accuracy"]
        for cell in task["cells"]
        if cell["group"] == CUTS and cell["parts"] == part
    }

    def shown(band: str, rate: float, noise: str) -> str:
        found = measured.get((band, rate, noise))
        return "not measured" if found is None else percent(estimate_of(found))

    def difference(row: Mapping[str, Any]) -> str:
        return "not measured" if row["difference"] is None else points(estimate_of(row["difference"]))

    compared = [row["difference"] for row in beside["rows"] if row["difference"] is not None]
    apart = sum(differs(each, 0.0) for each in compared)
    clean = [
        "clean",
        "0",
        percent(estimate_of(beside["clean"])),
        points(estimate_of(beside["clean_difference"])),
        *[percent(estimate_of(task["clean"]))] * len(noises),
    ]
    return Section(
        title=f"Beside the article's table{name}",
        paragraphs=[
            f"{beside['source']}: {beside['model']}, {beside['samples']} items. The article strikes K and V at the "
            f"layer's scale; under that noise {apart} of {len(compared)} accuracies differ from the article's, which "
            "has few items too. Clean, this run's accuracy minus the article's is "
            f"{points(estimate_of(beside['clean_difference']))}.",
        ],
        tables=[
            Table(
                columns=[
                    "band",
                    "rate (%)",
                    "canarypwn",
                    "layer's scale minus canarypwn",
                    *(f"measured: {noise}" for noise in noises),
                ],
                rows=[
                    clean,
                    *(
                        [
                            row["band"],
                            f"{row['rate']:g}",
                            percent(estimate_of(row["theirs"])),
                            difference(row),
                            *(shown(row["band"], row["rate"], noise) for noise in noises),
                        ]
                        for row in beside["rows"]
                    ),
                ],
                caption=f"Accuracy with noise in {PART_LABELS[part]}, beside what canarypwn reports for K and V. "
                "Wilson's 95 % intervals, the article's from its own number of items; differences as of independent "
                "samples (Newcombe).",
            )
        ],
    )


def bands_section(
    metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, place: int, name: str
) -> Section:
    figures = []
    if task["judged"]:
        figures.append(
            Figure(
                file_of("accuracy_by_band", place),
                "The article's figure 3, once for each way to match the noise. Points of a rate stand side by side so "
                "that their intervals can be seen."
                + (" Open marks are the article's own, at the layer's scale." if "published" in task else ""),
            )
        )
    if config.follow:
        figures.append(
            Figure(
                file_of("kl_by_band", place),
                "Whiskers that leave the figure reach zero, which a log scale cannot show. Bands may differ in their "
                "number of layers.",
            )
        )
    tables = []
    for part in dict.fromkeys(parts for _, parts in conditions(config)):
        rows = [
            [
                cell["band"],
                cell["noise"],
                f"{cell['rate']:g}",
                percent(estimate_of(cell["accuracy"])),
                points(estimate_of(cell["lost"])),
                _kl(cell["kl"]),
                percent(estimate_of(cell["same"])),
                str(cell["broken"]),
            ]
            for cell in task["cells"]
            if (cell["group"], cell["parts"]) == (CUTS, part)
        ]
        tables.append(
            Table(
                columns=["band", "noise", "rate (%)", "accuracy", "accuracy lost", "KL (nats)", "unchanged", "broken"],
                rows=rows,
                caption=f"Noise in {PART_LABELS[part]}, 95 % intervals: Wilson's for shares of items, the jackknife's "
                "over items for the rest. Unchanged: the whole answer is the clean one.",
            )
        )
    clean = (
        f"With a clean cache {percent(estimate_of(task['clean']))} of the answers are right (guessing: "
        f"{100 * task['chance']:.3g} %)."
    )
    return Section(
        title=f"Bands{name}",
        paragraphs=[clean, *([task["too_hard"]] if task["too_hard"] else [])],
        figures=figures,
        tables=tables,
    )


def _kl(value: Mapping[str, float] | None) -> str:
    return "not known" if value is None else plain(estimate_of(value), 4)


def order_section(
    metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, place: int, name: str
) -> Section:
    tables = []
    for measure, called in MEASURE_NAMES.items():
        for cut in ("quarters", "halves"):
            orders = [each for each in task["orders"] if (each["cut"], each["measure"]) == (cut, measure)]
            if not orders:
                continue
            quarters = cut == "quarters"
            tables.append(
                Table(
                    columns=[
                        "noise",
                        "in",
                        "rate (%)",
                        f"{cut}, most sensitive first",
                        *(("last the worst?", "third a buffer?") if quarters else ()),
                    ],
                    rows=[
                        [
                            each["noise"],
                            PART_LABELS[each["parts"]],
                            "all" if each["rate"] is None else f"{each['rate']:g}",
                            in_order(each),
                            *((each["last_most"], each["buffer_least"]) if quarters else ()),
                        ]
                        for each in orders
                    ],
                    caption=f"{cut.capitalize()} by {called}. Between neighbours, > says that their paired difference "
                    "is significant, ≥ that it is not."
                    + (
                        f" Yes: {LAST} (or, as a buffer, {BUFFER}) is significantly beyond each other quarter; no: "
                        "another is significantly beyond it; open: neither."
                        if quarters
                        else ""
                    ),
                )
            )
            tables.append(_pairs_table(orders, cut, measure))
    tables += _ratio_tables(task)
    count = sum(len(each["pairs"]) for each in task["orders"])
    return Section(
        title=f"Order of the bands{name}",
        paragraphs=[
            "Differences are between rows of the same items that strike the same slots. All rates together is each "
            "item's mean over rates. Intervals of differences hold together (Bonferroni) over the pairs of a cut, all "
            f"noises and all tasks; not over parts, rates and measures, which make {count} comparisons in all."
        ],
        tables=tables,
    )


def in_order(order: Mapping[str, Any]) -> str:
    """Bands with > or ≥ between neighbours."""
    apart = {(pair["more"], pair["less"]): told(pair) for pair in order["pairs"]}
    names = [each["band"] for each in order["bands"]]
    text = names[0]
    for more, less in pairwise(names):
        text += f" {'>' if apart[more, less] else '≥'} {less}"
    return text


def _pairs_table(orders: Sequence[Mapping[str, Any]], cut: str, measure: str) -> Table:
    rows = [
        [
            order["noise"],
            PART_LABELS[order["parts"]],
            f"{pair['more']} over {pair['less']}",
            "not known"
            if pair["difference"] is None
            else (signed if measure == "kl" else points)(estimate_of(pair["difference"])),
            "yes" if told(pair) else "not found",
        ]
        for order in orders
        if order["rate"] is None
        for pair in order["pairs"]
    ]
    return Table(
        columns=["noise", "in", "bands", "difference", "significant"],
        rows=rows,
        caption=f"Paired differences between {cut} in {MEASURE_NAMES[measure]}{' (nats)' if measure == 'kl' else ''}, "
        "all rates together, with 95 % intervals; metrics.json has every rate.",
    )


def _ratio_tables(task: Mapping[str, Any]) -> list[Table]:
    rows = [
        [
            each["noise"],
            PART_LABELS[each["parts"]],
            "not known" if each["ratio"] is None else plain(estimate_of(each["ratio"])),
            "" if each["change"] is None else plain(estimate_of(each["change"])),
        ]
        for each in task["last_against_others"]
    ]
    if not rows:
        return []
    return [
        Table(
            columns=["noise", "in", "last quarter / others", "that, over the same at the layer's scale"],
            rows=rows,
            caption="How many times the mean KL of the other three quarters the last one has, all rates together; "
            "above 1 it is the more sensitive. The last column says by what factor another scale changes that: an "
            "interval without 1 means that scale matters.",
        )
    ]


def layers_section(
    metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, place: int, name: str
) -> Section:
    title = f"Single layers{name}"
    if not (config.single and config.follow):
        return Section(title=title, paragraphs=["Not measured in this run (setting `single`, or `follow`)."])
    alone = {(each["noise"], each["parts"]): each["rho"] for each in task["self_agreement"]}

    def ceiling(noise: str, parts: str) -> str:
        return f"{alone[noise, parts]:.2f}" if (noise, parts) in alone else "too few items"

    return Section(
        title=title,
        paragraphs=[
            "Does the picture of which layers matter survive another scale? Spearman's rank correlation of the layers' "
            "mean KL between two noises is 1 if they rank layers alike and 0 if one says nothing of the other. Noise "
            "of the items lowers it; how far is seen from each noise's correlation with itself, between halves of the "
            "items.",
        ],
        figures=[Figure(file_of("kl_by_layer", place), "Bands: 95 % intervals over items.")],
        maps=[layer_map(task)],
        tables=[
            Table(
                columns=["in", "noises", "rank correlation", "first with itself", "second with itself"],
                rows=[
                    [
                        PART_LABELS[each["parts"]],
                        " and ".join(each["noises"]),
                        "not known" if each["rho"] is None else plain(estimate_of(each["rho"])),
                        *(ceiling(noise, each["parts"]) for noise in each["noises"]),
                    ]
                    for each in task["agreement"]
                ],
                caption="Across single layers, with 95 % intervals over items; with itself: between halves of the "
                "items, the mean over halvings, which is below what all items would give.",
            ),
            Table(
                columns=["in", "noise", "most sensitive layers", "least sensitive layers"],
                rows=[
                    [PART_LABELS[parts], noise, *_extreme_layers(task, noise, parts)]
                    for noise, parts in conditions(config)
                ],
                caption="By mean KL (nats); extremes of many are partly luck, see the intervals in the figure.",
            ),
        ],
    )


def _extreme_layers(task: Mapping[str, Any], noise: str, parts: str) -> tuple[str, str]:
    cells = [
        cell
        for cell in task["cells"]
        if (cell["group"], cell["noise"], cell["parts"]) == (SINGLES, noise, parts) and cell["kl"] is not None
    ]
    ranked = sorted(cells, key=lambda cell: -cell["kl"]["mean"])

    def shown(some: Sequence[Mapping[str, Any]]) -> str:
        return ", ".join(f"{cell['first']} ({cell['kl']['mean']:.2g})" for cell in some)

    return shown(ranked[:3]), shown(ranked[:-4:-1])


def parts_section(
    metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, place: int, name: str
) -> Section:
    title = f"K against V{name}"
    if not task["keys_against_values"]:
        return Section(title=title, paragraphs=["Not measured in this run: it takes both k and v among `parts`."])
    measures = [measure for measure in MEASURE_NAMES if measure in task["keys_against_values"][0]["more"]]
    rows = []
    for each in task["keys_against_values"]:
        if each["group"] == CUTS:
            known = [each["more"][measure] for measure in measures]
            shown = [
                "not known" if value is None else (signed if measure == "kl" else points)(estimate_of(value))
                for measure, value in zip(measures, known, strict=True)
            ]
            rows.append([each["noise"], each["band"], "all" if each["rate"] is None else f"{each['rate']:g}", *shown])
    return Section(
        title=title,
        paragraphs=[
            "What noise in K alone costs more than noise in V alone, in the same slots. Under the first three noises "
            "each has its own scale; under equal effect K and V have targets of their own, so there, too, it says "
            "which of two measured doses hurts more, not which of K and V matters more.",
            *_layers_by_part(task),
        ],
        tables=[
            Table(
                columns=[
                    "noise",
                    "band",
                    "rate (%)",
                    *(f"K minus V: {MEASURE_NAMES[measure]}" for measure in measures),
                ],
                rows=rows,
                caption="Paired, with 95 % intervals; above zero, noise in K costs more.",
            )
        ],
    )


def _layers_by_part(task: Mapping[str, Any]) -> list[str]:
    told = []
    for noise in NOISES:
        rows = [
            each["more"]["kl"]
            for each in task["keys_against_values"]
            if (each["group"], each["noise"]) == (SINGLES, noise) and each["more"].get("kl")
        ]
        if rows:
            keys = sum(estimate_of(each).above() for each in rows)
            values = sum(estimate_of(each).below() for each in rows)
            told.append(f"under {NOISE_NAMES[noise]} K in {keys} and V in {values} of {len(rows)}")
    return [f"Of single layers, by KL, noise is significantly worse: {'; '.join(told)}."] if told else []


def differs(value: Mapping[str, float], reference: float) -> bool:
    """Whether an interval excludes a number."""
    return estimate_of(value).differs(reference)
