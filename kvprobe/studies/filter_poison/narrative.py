"""What the filter-poison report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.report.document import AttentionView, Figure, Report, Section, Table
from kvprobe.stats import Estimate
from kvprobe.studies.filter_poison.analyse import FILTER, POISON
from kvprobe.studies.filter_poison.collect import STRUCK
from kvprobe.studies.filter_poison.config import FALSE, Config
from kvprobe.studies.filter_poison.figures import KIND_NAMES, family_name, maps
from kvprobe.wording import estimate_of, few_clusters, percent, plain, signed

QUESTION = (
    "A cache is damaged in several ways, or says what is not so. Which attention blocks, MLPs and heads pass the "
    "damage on to the answer, and which keep it away?"
)
EXACT = 1e-3
"""How much of the damage may be left when everything is restored, and KL in nats where nothing is damaged."""
NAMED = 5
"""Components named in a sentence."""


def narrate(
    metrics: Mapping[str, Any],
    config: Config,
    model: Model,
    environment: Mapping[str, Any],
    views: Sequence[AttentionView],
) -> Report:
    """The report of a run."""
    return Report(
        title=f"Filter or poison: {model.name}",
        question=QUESTION,
        answer=answer(metrics),
        warnings=warnings(metrics),
        sections=[
            _found_section(metrics, views),
            _tested_section(metrics, config),
            _looks_section(metrics),
            _states_section(metrics),
            _done_section(metrics, config),
            Section(title="Controls", points=[text for text, _ in controls(metrics)]),
            _limits_section(metrics, model),
            reproduce_section(
                "filter_poison",
                config,
                environment,
                also=["Data: maps.parquet, states.parquet, heads.parquet and metrics.json beside this page."],
            ),
        ],
    )


def answer(metrics: Mapping[str, Any]) -> str:
    """How many are what, and whether heads so called do what the name says elsewhere."""
    told = "; ".join(f"of {_all(metrics, kind)} {KIND_NAMES[kind]} {_counted(metrics, kind)}" for kind in KIND_NAMES)
    poison, filters = (told_of(metrics, sort) for sort in (POISON, FILTER))
    return f"In at least two of {len(metrics['families'])} kinds of damage, {told}. {poison} {filters}"


def _counted(metrics: Mapping[str, Any], kind: str) -> str:
    """How many components of a kind have a verdict, where these are more than chance gives."""
    if not _any_verdict(metrics):
        return "none can be judged"
    if sum(_count(metrics, kind, name) for name in (POISON, FILTER)) <= metrics["by_chance"][kind]["high"]:
        return "no more have a verdict than chance gives"
    return _counts(metrics, kind)


def _any_verdict(metrics: Mapping[str, Any]) -> bool:
    """Whether there are enough conversations for a verdict on anything."""
    return any(row["verdict"] != "unknown" for row in metrics["components"])


def told_of(metrics: Mapping[str, Any], sort: str) -> str:
    """Whether the heads that were found on one half did on the other what was predicted, in a sentence."""
    own = _tested(metrics, "all", sort)
    chosen, random, difference = (estimate_of(own[name]) for name in ("chosen", "random", "difference"))
    which = "highest" if sort == POISON else "lowest"
    done = (
        f"Restoring together the {metrics['top']} heads with the {which} index on one half of the conversations "
        f"{removed(chosen)} the damage on the other; doing so with random heads of the same layers {removed(random)} "
        f"it, and {own['as_far']} of {own['sets']} random sets go as far"
    )
    beyond = difference.above() if sort == POISON else difference.below()
    contrary = difference.below() if sort == POISON else difference.above()
    if beyond and own["as_far"] <= 0.05 * own["sets"]:
        if sort == FILTER and not chosen.below():
            return f"{done}: less than random heads, but they are not shown to keep any damage away."
        return f"{done}: as predicted."
    return f"{done}: the opposite of what was predicted." if contrary else f"{done}: the prediction is not confirmed."


def removed(share: Estimate) -> str:
    """What restoring does to the damage: takes a share of it away, or adds one to it."""
    if share.mean >= 0:
        return f"takes away {percent(share)} of"
    return f"adds {percent(-share)} to"


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    if few := few_clusters(metrics["prompts"], "conversations"):
        found.append(few)
    for kind in KIND_NAMES:
        called, chance = sum(_count(metrics, kind, name) for name in (POISON, FILTER)), metrics["by_chance"][kind]
        if 0 < called <= chance["high"]:
            found.append(
                f"{called} of the {KIND_NAMES[kind]} have a verdict, where chance gives {chance['mean']:.1f} on "
                f"average and may give {chance['high']:.0f}: they may be chance."
            )
    if failed := [text for text, holds in controls(metrics) if not holds]:
        found.append(f"A control does not hold, doubt this run: {failed[0]}")
    return found


def controls(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each control in words, and whether it holds."""
    own = metrics["controls"]

    def checked(name: str, claim: str) -> tuple[str, bool]:
        holds = own[name] <= EXACT
        return f"{claim} {own[name]:.1e} (allowed: {EXACT:g}). It {'holds' if holds else 'DOES NOT HOLD'}.", holds

    return [
        checked(
            "undamaged",
            "With the clean cache in place of the damaged one, blocks and bands restored or not, KL in nats is at most",
        ),
        checked(
            "everything", "With all outputs of all layers restored, the share of the damage that is left is at most"
        ),
    ]


def _found_section(metrics: Mapping[str, Any], views: Sequence[AttentionView]) -> Section:
    points = [_named_sentence(metrics, kind) for kind in KIND_NAMES]
    points += [_chance_sentence(metrics, kind) for kind in KIND_NAMES]
    own = metrics["baselines"]
    points.append(
        "Beside measures that need no damage, as rank correlations over layers with the mean index: KL when the layer "
        f"is dropped, {own['drop_attn']:+.2f} for attention and {own['drop_mlp']:+.2f} for MLPs; 1 − cos of the stream "
        f"before and after the layer, {own['angle_attn']:+.2f} and {own['angle_mlp']:+.2f} (without intervals)."
    )
    return Section(
        title="What was found",
        paragraphs=[
            "The index π of a component is the share of the damage (KL from the clean run over the last tokens before "
            "the answer) that goes away when the component's output is as in the clean run. Above zero the component "
            "transmits damage (poison); below zero its reaction kept some away (filter). It is called so only if a 95 "
            "% interval over conversations excludes zero in at least two families, and on the other side in none.",
        ],
        points=points,
        figures=[
            Figure("strips", "Indices below −1 are drawn as triangles at the edge. Heads are coloured by verdict."),
            Figure("heads", "Mean index of every head; a dot marks those that are called filter or poison."),
        ],
        maps=maps(metrics),
        heads=views,
        tables=[_bands_table(metrics)],
    )


def _named_sentence(metrics: Mapping[str, Any], kind: str) -> str:
    said = []
    for sort, sign in ((POISON, -1), (FILTER, 1)):
        own = [row for row in metrics["components"] if row["kind"] == kind and row["verdict"] == sort]
        own.sort(key=lambda row: sign * row["pi"])
        names = ", ".join(f"{_place(row)} ({row['pi']:+.2f})" for row in own[:NAMED])
        more = f" and {len(own) - NAMED} more" if len(own) > NAMED else ""
        said.append(f"{sort}: {names}{more}" if own else f"{sort}: none")
    return f"Of the {KIND_NAMES[kind]}, with the mean index of the families in brackets. {'; '.join(said)}."


def _chance_sentence(metrics: Mapping[str, Any], kind: str) -> str:
    """Verdicts, beside what chance alone would give."""
    called, chance = sum(_count(metrics, kind, name) for name in (POISON, FILTER)), metrics["by_chance"][kind]
    told = "more than chance gives" if called > chance["high"] else "no more than chance may give"
    return (
        f"Verdicts on {KIND_NAMES[kind]}: {called}, {told}: {chance['mean']:.1f} on average and at most "
        f"{chance['high']:.0f} in 99 % of cases, were each conversation's effects as likely of either sign."
    )


def _index(metrics: Mapping[str, Any], row: Mapping[str, Any], family: str) -> Estimate:
    names = {"mean": "pi", "low": "low", "high": "high", "smallest": "smallest", "largest": "largest"}
    return estimate_of({name: row[f"{key}_{family}"] for name, key in names.items()} | {"clusters": metrics["prompts"]})


def _bands_table(metrics: Mapping[str, Any]) -> Table:
    noised = {(row["band"], row["family"]): row["share"] for row in metrics["noised"]}

    def cell(row: Mapping[str, Any], family: str) -> str:
        restored = percent(_index(metrics, row, family))
        return f"{restored}; {100 * noised[row['band'], family]:.0f} %"

    return Table(
        columns=["layers", *(family_name(family) for family in metrics["families"])],
        rows=[[row["band"], *(cell(row, family) for family in metrics["families"])] for row in metrics["bands"]],
        caption="Attention and MLPs of a band of layers together: the share of the damage that goes away when they are "
        "restored; and, after the semicolon, the share that they alone bring into the clean run when their outputs are "
        "as in the damaged one.",
    )


def _tested_section(metrics: Mapping[str, Any], config: Config) -> Section:
    rows = []
    for family in (*metrics["families"], "all"):
        for sort in (POISON, FILTER):
            own = _tested(metrics, family, sort)
            name = "all" if family == "all" else family_name(family)
            rows.append(
                [
                    name,
                    "highest" if sort == POISON else "lowest",
                    *(percent(estimate_of(own[which])) for which in ("chosen", "random", "difference")),
                ]
            )
    overlap = metrics["overlap"]
    return Section(
        title="Do they do it elsewhere?",
        paragraphs=[
            f"The {metrics['top']} heads with the highest and the {metrics['top']} with the lowest mean index on each "
            f"half of the conversations are restored together on the other half, beside {config.random} sets of random "
            "heads, as many of each layer. Prediction: restoring the first removes more damage than random heads do, "
            "restoring the second less.",
        ],
        points=[
            told_of(metrics, POISON),
            told_of(metrics, FILTER),
            f"Heads that both halves chose: {overlap[POISON]} of {metrics['top']} with the highest, {overlap[FILTER]} "
            "with the lowest index.",
        ],
        tables=[
            Table(
                columns=["damage", "index", "found on the other half", "random, same layers", "difference"],
                rows=rows,
                caption="Share of the damage that goes away; in “all” every family counts alike.",
            )
        ],
        figures=[Figure("tested", "The same.")],
    )


def _looks_section(metrics: Mapping[str, Any]) -> Section:
    names = {"mass": "attention on them", "lift": "the same over the clean run's", "contribution": "what is read there"}
    of = {(entry["family"], entry["look"]): entry for entry in metrics["looks"]}
    families = metrics["families"]
    known = [entry["within"] for entry in metrics["looks"] if entry["within"]]
    sure = [value for value in known if estimate_of(value).differs()]
    largest = max((value["mean"] for value in known), key=abs, default=0.0)

    def cell(entry: Mapping[str, Any]) -> str:
        return "; ".join(signed(estimate_of(entry[name]), 2) if entry[name] else "–" for name in ("all", "within"))

    return Section(
        title="Does attention tell?",
        paragraphs=[
            "Heads that look at struck slots, and heads that pass damage on: are they the same? Rank correlations over "
            "heads with the index in the same family; the second number compares heads of one layer only."
        ],
        points=[
            f"Within layers, {len(sure)} of {len(known)} correlations exclude zero; the largest is {largest:+.2f}, "
            "where 1 would be the same order."
        ],
        tables=[
            Table(
                columns=["struck slots", *(family_name(family) for family in families)],
                rows=[[said, *(cell(of[family, look]) for family in families)] for look, said in names.items()],
                caption="Rank correlation over all heads; within layers. 95 % intervals over conversations. “What is "
                "read there” is the norm of what a head takes from these slots, relative to its layer's attention "
                "output; there is nothing where all heads are alike (zeros).",
            )
        ],
    )


def _states_section(metrics: Mapping[str, Any]) -> Section:
    layers = metrics["n_layers"]
    points = []
    for family in metrics["families"]:
        own = {row["layer"]: row for row in metrics["states"] if row["family"] == family}
        top = max(own.values(), key=lambda row: row["rho_after"] or 0)
        points.append(
            f"{family_name(family)}: the stream is off by {own[layers - 1]['rho_after']:.2f} of its norm after the "
            "last layer"
            + (
                f", and most after layer {top['layer']} ({top['rho_after']:.2f})."
                if top["layer"] < layers - 1
                else ", its most."
            )
        )
    return Section(
        title="The residual stream",
        paragraphs=[
            "δ is the deviation of the stream over the suffix from the clean run. A layer erases what lies against δ "
            "in the change of its output: 1 undoes it, below 0 adds to it. A stream that grows makes the deviation "
            "smaller in proportion without erasing anything, and damage keeps coming in through every layer's own K "
            "and V; so these are descriptions, not causes.",
        ],
        points=points,
        figures=[Figure("states", "Medians over conversations.")],
    )


def _done_section(metrics: Mapping[str, Any], config: Config) -> Section:
    def said(family: str, percentage: float) -> str:
        if family == FALSE:
            return (
                "another fact: nothing is broken; the cache is that of the conversation with the other value of the "
                "fact"
            )
        return f"{family_name(family)}: {CATALOGUE[family].content}, in {percentage:g} % of the slots"

    damage = {entry["family"]: entry for entry in metrics["damage"]}
    return Section(
        title="What was done",
        paragraphs=[
            f"{metrics['prompts']} hand-written conversations state a fact and ask for it. All but the last "
            f"{config.suffix} tokens before the answer are cached, the cache is damaged in the segments "
            f"{', '.join(STRUCK)} (never the system prompt with its attention sink, nor the question), and the last "
            f"{config.suffix} tokens are read after it, once for each component restored.",
        ],
        points=[
            f"{said(family, percentage)}. Damage: {plain(estimate_of(damage[family]), 3)} nats, median "
            f"{damage[family]['median']:.3f}."
            for family, percentage in config.rates.items()
        ],
    )


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger "
            "ones.",
            "Damage of a cache comes in through attention alone, so a block that reads the cache passes some of it on: "
            "of attention, compare sizes, not signs.",
            f"Of the random heads {100 * metrics['shared'][POISON]:.0f} % (beside the highest) and "
            f"{100 * metrics['shared'][FILTER]:.0f} % (beside the lowest) are themselves among the chosen, for want of "
            "others in their layer.",
            "A verdict says that an index differs significantly from zero, not that it is large; the numbers in "
            "brackets do.",
            "Restoring one output leaves what others made of the damage, and they may make up for one another; indices "
            "do not add up.",
            "Where the damage is small its shares are unsteady; conversations count by their damage, so the most "
            "damaged decide.",
            "KL of the next tokens sees every change of the prediction, not only whether the answer is right.",
            "Intervals are per component; of so many some exclude zero by chance, as counted above.",
        ],
    )


def _tested(metrics: Mapping[str, Any], family: str, sort: str) -> Mapping[str, Any]:
    (found,) = (entry for entry in metrics["tested"] if entry["family"] == family and entry["sort"] == sort)
    return found


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['layer']}" if row["head"] is None else f"{row['layer']}.{row['head']}"


def _count(metrics: Mapping[str, Any], kind: str, verdict: str) -> int:
    return sum(row["count"] for row in metrics["counts"] if row["kind"] == kind and row["verdict"] == verdict)


def _all(metrics: Mapping[str, Any], kind: str) -> int:
    return sum(row["count"] for row in metrics["counts"] if row["kind"] == kind)


def _counts(metrics: Mapping[str, Any], kind: str) -> str:
    return f"{_count(metrics, kind, POISON)} pass it on and {_count(metrics, kind, FILTER)} keep it away"
