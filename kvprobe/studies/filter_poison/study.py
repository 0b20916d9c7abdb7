"""The filter-poison study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.layers.head_sets import ALL, CHOSEN, FILTER, POISON, RANDOM
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.filter_poison import FALSE, Config
from kvprobe.studies.filter_poison.collect import collect
from kvprobe.studies.filter_poison.conclude import KINDS, conclude
from kvprobe.wording import count, formatted, percent, points

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES = {family: Style(*look) for family, *look in zip(Config().rates, COLOURS, "os^DPx", strict=True)}


STUDY = Study(
    name="filter_poison",
    title="Filter or poison",
    question=(
        "A cache is damaged in several ways, or states another fact. Which attention blocks, MLPs and heads pass the "
        "damage on to the answer, and which keep it away?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="strips",
            caption="The share of the damage that goes away when the output of one attention block or MLP is restored. "
            "Shaded: 95 % intervals.",
            finding="pi",
            x="layer",
            row=lambda keys: KINDS[str(keys["kind"])],
            panel="family",
            where={"kind": ("attn", "mlp")},
            y_label="causal index π",
            curves=True,
            limits=(-1.05, 1.05),
            size=(1.9, 2.4),
        ),
        Heatmaps(
            file="heads",
            caption="Mean index of every head; a dot marks those that are called filter or poison.",
            finding="called",
            rows="layer",
            columns="head",
            label="π, mean of families",
            where={"kind": "head"},
            stacked=True,
            within=0.99,
            marked=lambda keys: keys["verdict"] in (POISON, FILTER),
        ),
        Lines(
            file="tested",
            caption="The share of the damage that goes away when heads found on one half of the conversations are "
            "restored together on the other. In “all” every kind of damage counts alike. 95 % intervals.",
            finding="removed",
            x="family",
            line="heads",
            panel="sort",
            x_label="damage",
            y_label="share of the damage that goes away",
            styles={CHOSEN: Style("#0072b2"), RANDOM: Style("#7f7f7f", "s")},
            own_scales=True,
            size=(3.6, 3.4),
        ),
        Lines(
            file="states",
            caption="Medians over conversations, without intervals. What is erased is drawn from layer 2 on: before "
            "there is hardly a deviation.",
            finding="stream",
            x="layer",
            line="family",
            panel="measure",
            y_label="share",
            styles=STYLES,
            curves=True,
            own_scales=True,
        ),
    ),
    claims=(
        *(Claim(name, "removes more", "removes less", "not detected") for name in ("beyond", "beyond_one")),
        Claim("look_within", above="pass more on", below="pass less on"),
    ),
    labels={
        "n": "{} conversations".format,
        "kind": KINDS,
        "family": {name: fault.label for name, fault in CATALOGUE.items()} | {FALSE: "another fact", ALL: "all"},
        "content": {name: fault.content for name, fault in CATALOGUE.items()}
        | {FALSE: "nothing is broken; the cache is that of the conversation with the other value of the fact"},
        "sort": {POISON: "the highest index", FILTER: "the lowest index"},
        "heads": {CHOSEN: "found on the other half", RANDOM: "random, same layers"},
        "look": {"mass": "attention on them", "lift": "the same over the clean run's", "contribution": "what is read"},
        "measure": {
            "rho": "‖δ‖ / ‖h‖ before the layer",
            "erasure_attn": "erased by attention",
            "erasure_mlp": "erased by the MLP",
            "drop": "KL when the layer is dropped",
            "angle": "1 − cos of the stream before and after the layer",
        },
    },
    written={
        **dict.fromkeys(("pi", "noised", "removed", "unrelated"), percent),
        **dict.fromkeys(("beyond", "beyond_one", "reaction"), points),
        **dict.fromkeys(("look", "look_within"), formatted("+.2f")),
        "damage": formatted(".3f"),
        "median_damage": lambda nats: f"{nats.mean:.3f}",
        "baseline": lambda rho: f"{rho.mean:+.2f}",
        **dict.fromkeys(("count", "as_far", "sets", "overlap"), count),
    },
)
