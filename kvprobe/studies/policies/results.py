"""The sections of the policies report that hold its results: quality for memory, policies against random eviction, and
which instructions are forgotten."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.report.document import Figure, Section, Table
from kvprobe.studies.policies.analyse import MEASURES, TOLERANCE, judged_budgets
from kvprobe.studies.policies.collect import KINDS, RANDOM, RANDOM_SINKS, SINKS
from kvprobe.studies.policies.config import Config
from kvprobe.studies.policies.figures import at_budget, budget_maps, label_of
from kvprobe.wording import estimate_of, percent, plain, points, signed

BASELINES = {RANDOM: "random eviction", RANDOM_SINKS: f"random eviction that spares the first {SINKS} slots"}


def quality_section(metrics: Mapping[str, Any], config: Config) -> Section:
    ceiling = {name: percent(estimate_of(metrics["ceiling"][name])) for name in metrics["chance"]}
    chance = metrics["chance"]
    budgets = judged_budgets(config)
    tables = [
        Table(
            columns=["policy", "memory", "KL (nats)", "same next token", "code", "instructions"],
            rows=[
                [
                    label_of(each),
                    f"{100 * each['memory']:.0f} %",
                    plain(estimate_of(each["measures"]["kl"]), 3),
                    *(percent(estimate_of(each["measures"][name])) for name in MEASURES[1:]),
                ]
                for each in at_budget(metrics, budget)
            ],
            caption=f"With {budget} % of the slots (quantisation alone keeps all of them); 95 % intervals.",
        )
        for budget in budgets
    ]
    tables.append(
        Table(
            columns=["policy", "KL", "same next token", "code", "instructions"],
            rows=[
                [KINDS[name].label, *(shown_least(metrics, name, measure) for measure in MEASURES)]
                for name in metrics["enough"]
            ],
            caption="The least memory with which a policy stays near the full cache: a KL of at most "
            f"{TOLERANCE['kl']} nats, or at most {100 * TOLERANCE['agreement']:.0f} points below it, at every measured "
            "budget from the largest down; between two budgets on the line through both (not between bits), below the "
            "smallest not at all. In brackets 95 % intervals.",
        )
    )
    return Section(
        title="Quality for memory",
        paragraphs=[
            f"With the full cache, which at 16 bits takes {metrics['full']['bytes'] / 2**20:.1f} MiB, the model "
            f"recalls {ceiling['code']} of the code (chance {shown_chance(chance['code'])}) and follows "
            f"{ceiling['instructions']} of the instructions (chance {shown_chance(chance['instructions'])}). No policy "
            "can be expected to do better.",
        ],
        figures=[
            Figure(
                "quality_by_memory",
                "Means over conversations. Grey band: 95 % interval of random eviction; the tables hold the others. A "
                "policy that keeps everything has a KL of zero, which is off the scale.",
            )
        ],
        maps=budget_maps(metrics),
        tables=tables,
    )


def shown_least(metrics: Mapping[str, Any], kind: str, measure: str) -> str:
    """The least memory that suffices, as far as it was measured."""
    if not metrics["judged"].get(measure, True):
        return "cannot be judged"
    enough = metrics["enough"][kind]
    floor = enough["least_measured"]

    def shown(memory: float | None) -> str:
        if memory is None:
            return "not reached"
        return f"at most {100 * floor:.0f} %" if memory <= floor else f"{100 * memory:.0f} %"

    least = shown(enough[measure]["mean"])
    if not enough[measure].get("known", True):
        return f"{least} (no interval)"
    low, high = (shown(enough[measure][key]) for key in ("low", "high"))
    return least if low == high == least else f"{least} ({low} to {high})"


def random_section(metrics: Mapping[str, Any], config: Config) -> Section:
    tables = []
    for baseline, name in BASELINES.items():
        for budget in judged_budgets(config):
            rows = [
                _gain_row(each)
                for each in metrics["against"]
                if each["baseline"] == baseline
                and each["level"] == budget
                and not KINDS[each["kind"]].bits
                and (baseline, each["kind"]) != (RANDOM_SINKS, RANDOM)
            ]
            tables.append(_gain_table(rows, f"Gain on {name}, both with {budget} % of the slots."))
        rows = [
            _gain_row(each, f"{label_of(each)}, against {each['baseline_level']} %")
            for each in metrics["against"]
            if each["baseline"] == baseline and KINDS[each["kind"]].bits
        ]
        if rows:
            tables.append(
                _gain_table(
                    rows, f"Gain on {name} with the next larger measured budget, which has at least as much memory."
                )
            )
    count = sum(len(table.rows) for table in tables) * len(MEASURES)
    return Section(
        title="Against random eviction",
        paragraphs=[
            "A policy that scores slots must beat one that draws at random. But random draws often lose the first "
            "slots, on which many models park attention that they need for nothing else; a policy may beat random "
            "eviction by keeping those and know nothing more. So there is a second baseline, random eviction that "
            f"spares the first {SINKS} slots.",
            "Differences are between conditions of the same conversations; above zero is better, and a policy is said "
            f"to beat a baseline where the whole interval is above zero. These are {count} comparisons, "
            f"each with its own 95 % interval: about {max(1, round(count / 40))} would seem to beat their baseline by "
            "chance if none did.",
        ],
        tables=tables,
    )


def _gain_row(entry: Mapping[str, Any], label: str | None = None) -> list[str]:
    gain = {name: estimate_of(entry["gain"][name]) for name in MEASURES}
    return [label or label_of(entry), signed(gain["kl"]), *(points(gain[name]) for name in MEASURES[1:])]


def _gain_table(rows: Sequence[Sequence[str]], caption: str) -> Table:
    return Table(
        columns=["policy", "less KL (nats)", "same next token", "code", "instructions"], rows=rows, caption=caption
    )


def instructions_section(metrics: Mapping[str, Any], config: Config) -> Section:
    samples, several = metrics["samples"], metrics["full"]["several_followed"]
    budgets = judged_budgets(config)
    forgotten = {(each["kind"], each["level"]): estimate_of(each["one_forgotten"]) for each in metrics["conditions"]}
    rows = [
        [kind.label, *(percent(forgotten[name, budget]) for budget in budgets)]
        for name, kind in KINDS.items()
        if not kind.bits
    ]
    rows += [
        [label_of(each), *[percent(estimate_of(each["one_forgotten"]))] * len(budgets)]
        for each in metrics["conditions"]
        if each["kind"] in KINDS and KINDS[each["kind"]].bits
    ]
    return Section(
        title="Which instructions are forgotten",
        paragraphs=[
            "An assistant that forgets all its instructions is soon found out; one that forgets a single one is not. "
            "The table holds the share of conversations in which, of the instructions that the full cache follows, "
            "some are lost and some are kept. That can only be seen where the full cache follows at least two: "
            f"{several} of {samples} conversations.",
        ],
        figures=[
            Figure(
                "instructions_by_place",
                "Instructions followed by their place in the system prompt, in % of the conversations; the tables "
                "above hold intervals of the means over places.",
            )
        ],
        tables=[
            Table(
                columns=["policy", *(f"{budget} % of the slots" for budget in budgets)],
                rows=rows,
                caption="Conversations in which some of these instructions are forgotten and some are not, with 95 % "
                "intervals. Quantisation alone keeps all slots.",
            )
        ],
    )


def shown_chance(chance: float) -> str:
    return f"{100 * chance:.3g} %"
