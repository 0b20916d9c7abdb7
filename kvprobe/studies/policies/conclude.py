"""From rows to findings: every condition against the full cache and against random eviction of the same budget."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Estimand, Mean, Share, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.policies.catalogue import CATALOGUE, SINKS, TAIL, WINDOW
from kvprobe.report.crossing import least_within
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import DIFFERENCE, SHARE, UNBOUNDED, Estimate
from kvprobe.studies.policies import Config
from kvprobe.studies.policies.collect import CONTINUED, FULL, LAST_TURN, sample_conversation
from kvprobe.tasks.instructions import PLACES, VALUES
from kvprobe.tasks.passcode import CODE_LENGTH
from kvprobe.tidy import Rows, beside, chosen, groups
from kvprobe.wording import few_clusters, percent

MEASURES = ("kl", "agreement", "code", "instructions")
MARGINS = ("code_margin", "instruction_margin")
BY_PLACE = tuple(f"instruction{place}" for place in range(1, PLACES + 1))
IN_NATS = ("kl", *MARGINS)
NAMES = {
    "kl": "distance from the full cache (KL)",
    "agreement": "agreement with the full cache's next token",
    "code": "recall of the hidden code",
    "instructions": "instructions followed",
}
TOLERANCE = {"kl": 0.1, "agreement": 0.05, "code": 0.05, "instructions": 0.05}
"""How far from the full cache is near enough: nats, and shares."""
JUDGED = (20, 50)
"""At which budgets, or those nearest to them, policies are held against random eviction."""
BASELINES = ("random", "random-sinks")
GAINS = {"policy": "gain", "quantised": "gain_quantised", "baseline": "gain_baseline"}
"""The finding that says what each kind of condition gains on random eviction."""
ABOVE_CHANCE = 0.1
"""By how much the full cache must significantly exceed chance for a measure to show anything."""
UNCHANGED = 1e-6
"""Nats of KL that a policy which keeps everything may be from the full cache; smaller distances count as this one."""
CONDITION = ("measure", "kind", "level")


def conclude(rows: pd.DataFrame, config: Config, model: Model) -> Conclusion:
    given, chat = sample_conversation(model, config, 0)
    instruction, value = given.instructions[0]
    shape = model.geometry
    facts = {
        "chat": chat_record(chat, marked=given.code, only_in=("needle",)),
        "code": [given.needle.question, given.needle.lead],
        "instruction": [instruction.query, instruction.lead, value],
        "layers": shape.n_layers,
        "windows": [shape.n_layers - shape.windows.count(None), shape.shortest_window or 0],
        "dtype": model.dtype,
    }
    return concluded(rows, config, facts)


def concluded(table: Rows, config: Config, facts: Mapping[str, Any]) -> Conclusion:
    """What `conclude` gives, without the model.

    Args:
        table: see `collect`.
        facts: of the model and of an example.
    """
    rows, findings = prepared(table), Findings()
    add_sizes(findings, table)
    beside_baselines = ((gained(rows, findings, config, name), gains(name)) for name in BASELINES)
    findings.extend(measure(rows, ESTIMANDS, *beside_baselines))
    add_least(findings, rows, config)
    judged = {
        name: name not in findings.values("chance", "measure")
        or whole_cache(findings, name).above(findings.at("chance", measure=name).mean + ABOVE_CHANCE)
        for name in MEASURES
    }
    slots = round(findings.at("conversation", of="slots", statistic="mean").mean)
    facts = {
        **facts,
        "judged": judged,
        "tolerance": TOLERANCE,
        "sinks": SINKS,
        "window": WINDOW,
        "tail": TAIL,
        "continued": CONTINUED,
        "last_turn": LAST_TURN,
        "baselines": [name for name, kind in CATALOGUE.items() if kind.baseline],
        "budgets": judged_budgets(config),
        "bits": {name: list(kind.bits) for name, kind in CATALOGUE.items() if kind.bits},
        "policies": {name: shown_policy(name, slots) for name in CATALOGUE},
    }
    return Conclusion(findings, [control_of(findings)], facts, list(warnings_of(findings, config, judged)))


def prepared(table: Rows) -> Rows:
    """A row for each sample, condition and measure, with what it is beside the full cache.

    `held` is the value as it is held against others: of KL the logarithm, as distances differ by orders of magnitude.

    `forgotten` is whether, of the instructions that the full cache follows, some are lost and some are kept.
    """
    followed = np.stack([beside(table, place, {"kind": FULL}, ("sample",)) > 0 for place in BY_PLACE])
    kept = np.stack([table[place] > 0 for place in BY_PLACE])
    forgotten = (followed & ~kept).any(0) & (followed & kept).any(0)
    rows = table.assign(forgotten=forgotten.astype(float), role=table["kind"].map(role)).melt(
        ["sample", "kind", "level", "role"], [*MEASURES, *MARGINS, *BY_PLACE, "forgotten"], "measure"
    )
    from_full = rows["value"] - beside(rows, "value", {"kind": FULL}, ("sample", "measure"))
    distance = rows["measure"] == "kl"
    better = np.where(distance, -1, 1)
    held = np.where(distance, np.log(rows["value"].clip(lower=UNCHANGED)), rows["value"])
    return rows.assign(from_full=from_full, loss=-better * from_full, better=better, held=held)


def role(kind: str) -> str:
    """Whether a condition is a policy with a budget, quantisation, a baseline or the full cache."""
    if kind == FULL:
        return FULL
    return "baseline" if CATALOGUE[kind].baseline else "quantised" if CATALOGUE[kind].bits else "policy"


ESTIMANDS: tuple[Estimand, ...] = (
    Mean(name="quality", of="value", by=CONDITION, where={"measure": IN_NATS}, unit="nats"),
    Mean(name="log_kl", of="held", by=("kind", "level"), where={"measure": "kl"}, unit="log nats"),
    Mean(
        name="quality",
        of="value",
        by=CONDITION,
        where={"measure": (*MEASURES[1:], *BY_PLACE, "forgotten")},
        within=SHARE,
    ),
    *(
        Mean(name=name, of="from_full", by=CONDITION, where={"measure": of, "role": roles}, within=within, unit=unit)
        for of, within, unit in ((IN_NATS, UNBOUNDED, "nats"), (MEASURES[1:], DIFFERENCE, ""))
        for name, roles in (("from_full", ("policy", "baseline")), ("from_full_quantised", ("quantised",)))
    ),
)


def gains(baseline: str) -> Iterator[Estimand]:
    """What conditions gain on one baseline; for each kind of condition the intervals hold together.

    A gain in KL is the logarithm of how many times nearer a condition is; a difference of means would be that of the
    few conversations that lost their first slots. `nearer` is in how many conversations it is nearer.
    """
    by, keys = (*CONDITION, "against"), {"baseline": baseline}
    for names, within, unit in ((("kl",), UNBOUNDED, "log ratio"), (MEASURES[1:], DIFFERENCE, "")):
        for role, name in GAINS.items():
            yield Mean(
                name=name,
                of="gain",
                by=by,
                where={"role": role, "measure": names},
                keys=keys,
                within=within,
                unit=unit,
                together=("baseline",),
            )
    yield Share(name="nearer", of="nearer", by=by, where={"measure": "kl"}, keys=keys, together=("baseline",))
    yield Mean(name="gain_margin", of="gain", by=by, where={"measure": MARGINS}, keys=keys, unit="nats")


def gained(rows: Rows, findings: Findings, config: Config, baseline: str) -> Rows:
    """Rows at the judged budgets, with what they gain on a baseline of the same budget (`against`), and whether they
    are `nearer`; half where both are as near.

    Quantisation, which keeps all slots, is held against the next larger budget with at least as much memory.
    """

    def memory(kind: str, level: int) -> float:
        return findings.at("memory", kind=kind, level=level).mean

    rivals = {
        (name, bits): next((budget for budget in config.budgets if memory(baseline, budget) >= memory(name, bits)), -1)
        for name, kind in CATALOGUE.items()
        for bits in kind.bits
    }
    pairs = zip(rows["kind"], rows["level"], strict=True)
    rows = rows.assign(against=[rivals.get(pair, pair[1]) for pair in pairs])
    rival = beside(rows, "held", {"kind": baseline}, ("sample", "measure", "against"))
    judged = (rows["role"] == "quantised") | rows["level"].isin(judged_budgets(config))
    others = judged & ~rows["kind"].isin((FULL, baseline))
    gain = rows["better"] * (rows["held"] - rival)
    return rows.assign(gain=gain, nearer=(1 + np.sign(gain)) / 2)[others]


def judged_budgets(config: Config) -> list[int]:
    """The measured budgets nearest to those at which policies are judged."""
    nearest = (min(config.budgets, key=lambda percent: abs(percent - wanted)) for wanted in JUDGED)
    return list(dict.fromkeys(nearest))


def add_sizes(findings: Findings, table: Rows) -> None:
    """Numbers without intervals: memory, lengths, chance, and what nothing evicted left unchanged."""
    for keys, rows in groups(table, ("kind", "level"), {}):
        for name, unit in {"memory": "", "bytes": "bytes", "bytes_held": "bytes"}.items():
            findings.number(name, rows[name].mean(), unit, **keys)
    once = table.drop_duplicates("sample")
    for column in ("slots", "reach", "depth", "continued"):
        for statistic in ("mean", "min", "max"):
            findings.number("conversation", float(once[column].agg(statistic)), of=column, statistic=statistic)
    findings.number("chance", 0.1 ** (CODE_LENGTH / once["code_tokens"].mean()), measure="code")
    findings.number("chance", 1 / VALUES, measure="instructions")
    followed = (chosen(table, {"kind": FULL})[list(BY_PLACE)] > 0).sum(axis=1)
    findings.number("several_followed", int((followed >= 2).sum()))
    exact = tuple(name for name, kind in CATALOGUE.items() if not kind.rounds)
    whole = chosen(table, {"kind": exact, "level": 100})
    if len(whole):
        findings.number("unchanged", whole["kind"].nunique(), of="conditions")
        for name, worst in {"kl": "max", "agreement": "min", "memory": "min"}.items():
            findings.number("unchanged", float(whole[name].agg(worst)), of=name)


def add_least(findings: Findings, rows: Rows, config: Config) -> None:
    """For each policy and measure the least memory that keeps it near the full cache (see `least_within`). Those of one
    measure hold together over all policies but the baselines."""
    policies = sum(not kind.baseline for kind in CATALOGUE.values())
    for name, kind in CATALOGUE.items():
        memory = {level: findings.at("memory", kind=name, level=level).mean for level in kind.bits or config.budgets}
        levels = sorted(memory, key=lambda level: -memory[level])
        findings.number("floor", min(memory.values()), kind=name)
        for of in MEASURES:
            within = UNBOUNDED if of in IN_NATS else DIFFERENCE
            losses = Mean(name="loss", of="loss", by=("level",), where={"measure": of, "kind": name}, within=within)
            by_level = {cell.keys["level"]: cell.estimated(policies) for cell in losses.cells(rows)}
            falling = [by_level[level] for level in levels]
            least = least_within([memory[level] for level in levels], falling, TOLERANCE[of], between=not kind.bits)
            findings.add(Finding("least", {"measure": of, "kind": name}, least, "", policies))


def control_of(findings: Findings) -> Control:
    """Whether policies that may keep everything, and round nothing, are the full cache."""
    if "unchanged" not in findings:
        return Control("No budget is 100 %, so it was not checked that a policy that keeps all changes nothing.", None)
    count, kl, agreement, memory = (finding.value.mean for finding in findings.where("unchanged"))
    return Control(
        f"Nothing evicted, nothing changed: {count:g} policies with a budget of 100 % keep at least {memory:.0%} of "
        f"the memory, differ from the full cache by a KL of at most {kl:.1e} nats (allowed: {UNCHANGED:.0e}) and agree "
        f"with it on at least {agreement:.0%} of the tokens.",
        kl <= UNCHANGED and agreement == memory == 1,
    )


def warnings_of(findings: Findings, config: Config, judged: Mapping[str, bool]) -> Iterator[str]:
    yield from few_clusters(config.samples, "conversations")
    for name in (name for name in MEASURES if not judged[name]):
        whole, chance = whole_cache(findings, name), findings.at("chance", measure=name).mean
        yield (
            f"{NAMES[name].capitalize()}: with the full cache it is {percent(whole)}, not significantly "
            f"{100 * ABOVE_CHANCE:.0f} points above chance ({100 * chance:.3g} %). What policies cost there cannot be "
            "judged on this model."
        )


def whole_cache(findings: Findings, name: str) -> Estimate:
    """A measure with the full cache."""
    return findings.at("quality", measure=name, kind=FULL, level=100)


def shown_policy(name: str, slots: int) -> str:
    """A kind as the library would be asked for it, for a conversation of so many slots at half of them."""
    level = CATALOGUE[name].bits[0] if CATALOGUE[name].bits else 50
    return f"{CATALOGUE[name].at(level, slots)} at {level} {'bits' if CATALOGUE[name].bits else '%'}"
