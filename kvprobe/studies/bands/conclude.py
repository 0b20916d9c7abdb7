"""From answers to findings: what noise or pruning costs in each band and layer, which bands differ, and whether scales
agree."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, get_args

import numpy as np
from jaxtyping import Float

from kvprobe.experiments.estimands import Difference, Estimand, Mean, Share, Total, measure
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.gaussian import FACTORS, factors_of
from kvprobe.inference.model import Model
from kvprobe.ranks import halves_agree, spearman
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.published import add_published, published_facts
from kvprobe.report.reported import reported
from kvprobe.stats import DIFFERENCE, POSITIVE, UNBOUNDED, Estimate, estimate, newcombe, statistic
from kvprobe.studies import answers
from kvprobe.studies.answers import NATS, SOUND
from kvprobe.studies.bands import NEUTRAL, NOISES, PARTS, PRUNED, Config, Cut, Scale
from kvprobe.studies.bands.collect import CONTROL, CUTS, SINGLES, names_of
from kvprobe.studies.bands.order import Ranking
from kvprobe.tasks.task import Task
from kvprobe.tidy import Rows, Where, beside, chosen, groups

LAST, BUFFER = "quarter 4", "quarter 3"
"""Canarypwn's article finds the last quarter the most sensitive, and calls the third a buffer."""
COMPARED: tuple[Cut, ...] = ("quarters", "halves")
UNCHANGED = 1e-6
"""Nats of KL that a row in which nothing is struck may be from the clean one."""
FACTORIAL: tuple[Scale, ...] = ("layer", "channel", *get_args(Scale)[4:])
"""Noise in which each factor of a channel is the layer's or its own."""
PUBLISHED: dict[str, Key] = {"noise": "layer", "parts": "kv"}
"""How the article strikes."""

NOISE = ("task", "noise", "parts")
BAND = (*NOISE, "band")
LAYER = (*NOISE, "layer")
MEASURES: dict[str, tuple[Where, tuple[float, float], tuple[float, float], str]] = {
    "kl": ({}, POSITIVE, UNBOUNDED, NATS),
    "lost": ({"able": True}, DIFFERENCE, DIFFERENCE, ""),
}
"""What bands, and K and V, are compared by: which rows count, the natural ranges of it and of differences, and the
unit."""


def levels(prefix: str, by: tuple[str, ...], where: Where) -> list[Estimand]:
    """What noise costs in each band at each rate, or in each layer."""
    return [
        Share(name=f"{prefix}accuracy", of="correct", by=by, where=where),
        Mean(name=f"{prefix}lost", of="lost", by=by, where=where, within=DIFFERENCE),
        Mean(name=f"{prefix}kl", of="kl", by=by, where=where, within=POSITIVE, unit=NATS),
        Share(name=f"{prefix}same", of="same", by=by, where=where),
        Total(name=f"{prefix}broken", of="broke", by=by, where=where),
    ]


def compared(of: str) -> Iterator[Estimand]:
    """By one measure: each band with all rates together, each two bands of a cut, and K less V in bands and layers."""
    where, of_level, within, unit = MEASURES[of]
    keys: dict[str, Any]
    known: dict[str, Any] = {"within": within, "unit": unit}
    struck = {**where, "group": CUTS}
    yield Mean(name=f"{of}_all", of=f"{of}_all", by=BAND, where=struck, **{**known, "within": of_level})
    for cut in COMPARED:
        for first, second in combinations(names_of(cut), 2):
            pair: dict[str, Any] = {
                "where": {**struck, "band": first},
                "less": {**struck, "band": second},
                "keys": {"cut": cut, "first": first, "second": second},
                **known,
            }
            family = ("cut", "parts")
            yield Difference(name=f"pair_{of}", of=f"{of}_all", by=NOISE, together=family, **pair)
            at, family = (*NOISE, "rate"), (*family, "rate")
            yield Difference(name=f"pair_{of}_at", of=of, by=at, together=family, **pair)
    keys = {"where": {**struck, "noise": "zeros"}, "less": {**struck, "noise": "scaffold"}, **known}
    yield Difference(name=f"zeros_{of}", of=f"{of}_all", by=("task", "parts", "band"), together=(), **keys)
    for prefix, group, place in (("", CUTS, "band"), ("layer_", SINGLES, "layer")):
        by = ("task", "noise", place)
        struck = {**where, "group": group}
        keys = {"where": {**struck, "parts": "k"}, "less": {**struck, "parts": "v"}, **known}
        yield Difference(name=f"{prefix}keys_{of}", of=f"{of}_all", by=by, together=None if of == "kl" else (), **keys)
        if of == "kl":
            yield Share(name=f"{prefix}keys_more", of="keys_more", by=by, where=keys["where"], together=())
        if group == CUTS:
            yield Difference(name=f"keys_{of}_at", of=of, by=(*by, "rate"), **keys)


ESTIMANDS: tuple[Estimand, ...] = (
    Share(name="sound", of="correct", by=("task",), where=SOUND),
    *levels("", (*BAND, "rate"), {"group": CUTS}),
    *levels("layer_", LAYER, {"group": SINGLES}),
    *compared("kl"),
    *compared("lost"),
)
"""Intervals of differences between bands hold together over the pairs of a cut, all noises and all tasks; those of K
beside V over all bands (or layers), noises and tasks. Of K's KL beside V's only the sign is claimed: KLs of items
differ by factors of thousands, so that a few may decide the means, and logarithms decide little."""


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    tasks = answers.tasks_of(config)
    rows = prepared(table, tasks)
    findings = measure(rows, ESTIMANDS)
    for task in tasks:
        findings.number("chance", task.chance, task=task.name)
    add_leads(findings, rows)
    add_agreement(findings, rows, config)
    add_factors(findings, rows)
    published = reported(config.reported) if config.reported else None
    if published is not None:
        add_published(findings, tasks, published, "band", PUBLISHED)
        add_less_published(findings)
    bands = table[table["group"] == CUTS].drop_duplicates("band")[["band", "first", "last"]].to_dict("records")
    item = tasks[0].items(1, config.seed)[0]
    facts: dict[str, Any] = {
        "tasks": {task.name: answers.task_facts(table, task, findings) for task in tasks},
        "layers": int(table["last"].max()) + 1,
        "bands": {str(band["band"]): [int(band["first"]), int(band["last"])] for band in bands},
        "part": next(part for part in PARTS if part in config.parts),
        "last_of": {cut: names_of(cut)[-1] for cut in config.bands},
        "orders": orders(findings, config),
        "example": {"chat": chat_record(item.chat, marked=item.answer), "lead": item.lead, "answer": item.answer},
        "dtype": model.dtype,
        "pruned": config.noises[0] in PRUNED,
        "neutral": [noise for noise in config.noises if noise in NEUTRAL],
        "published": None if published is None else published_facts(published, config.model),
    }
    controls = [
        answers.nothing_struck(chosen(table, {"group": CONTROL, "task": task.name}), UNCHANGED, f" ({task.name})")
        for task in tasks
    ]
    return Conclusion(findings, controls, facts, list(warnings_of(table, config, facts)))


def prepared(table: Rows, tasks: Sequence[Task]) -> Rows:
    """A row for each answer; a broken row is wrong whatever it said, and has no KL.

    `keys_more` is whether an item's mean KL over rates is larger with noise in K than in V.
    """
    broke = table["broken"] != ""
    rows = table.assign(
        correct=(table["right"].astype(bool) & ~broke).astype(float),
        kl=table["kl"].astype(float).mask(broke),
        broke=broke,
        layer=table["first"].fillna(-1).astype(int),
    )
    lost = beside(rows, "correct", SOUND, ("task", "sample")) - rows["correct"]
    rows = rows.assign(
        able=answers.able(rows, tasks, "correct"),
        lost=lost,
        lost_all=lost,
        kl=complete(rows, ("case",)),
        kl_all=complete(rows, ("group", "noise", "parts", "band")),
    )
    item = ("task", "sample", "group", "noise", "band")
    k, v = (beside(rows, "kl_all", {"parts": part}, item) for part in ("k", "v"))
    return rows.assign(keys_more=(k > v).astype(float).where((k - v).abs() > 0))


def complete(rows: Rows, by: tuple[str, ...]) -> Rows:
    """KL, where it is known in all of an item's rows that agree on `by`, and so in at least half of the items."""
    known = rows.assign(known=rows["kl"].notna())
    whole = known.groupby(["task", "sample", *by], dropna=False)["known"].transform("all")
    share = known.assign(known=whole).groupby(["task", *by], dropna=False)["known"].transform("mean")
    return rows["kl"].where(whole & (share >= 0.5))


def by_noise(rows: Rows, of: str, along: str, where: Where) -> dict[tuple[Key, ...], Float[np.ndarray, "along items"]]:
    """A column as an array for each task, noise and part, in a fixed order whatever the config's."""
    arrays = {
        tuple(keys.values()): rows_of_noise.groupby([along, "sample"])[of].mean().unstack("sample").to_numpy()
        for keys, rows_of_noise in groups(rows, NOISE, where)
    }
    tasks = dict.fromkeys(task for task, *_ in arrays)
    every = [(task, noise, parts) for task in tasks for parts in PARTS for noise in NOISES]
    return {place: arrays[place] for place in every if place in arrays}


def last_over_others(means: Float[np.ndarray, "draws bands"]) -> Float[np.ndarray, "draws"]:
    """The last band's mean over the mean of the others."""
    return means[:, -1] / means[:, :-1].mean(1)


def add_leads(findings: Findings, rows: Rows) -> None:
    """How many times the mean KL of the other quarters the last one has, all rates together, and by what factor that is
    larger than under noise at the layer's scale."""
    quarters = by_noise(rows, "kl_all", "band", {"band": tuple(names_of("quarters"))})
    changed = [place for place in quarters if place[1] != "layer" and (place[0], "layer", place[2]) in quarters]
    for place, means in quarters.items():
        _add(findings, "lead", place, statistic([means], last_over_others, POSITIVE))
    for task, noise, parts in changed:
        family = sum(place[2] == parts for place in changed)
        pair = [quarters[task, noise, parts], quarters[task, "layer", parts]]
        factor = statistic(pair, lambda one, two: last_over_others(one) / last_over_others(two), POSITIVE, family)
        _add(findings, "change", (task, noise, parts), factor, family)


def add_agreement(findings: Findings, rows: Rows, config: Config) -> None:
    """Spearman's correlation across single layers of the mean KL between two noises, and of each noise with itself
    between halves of the items."""
    single = by_noise(rows, "kl", "layer", {"group": SINGLES})
    for (one, first), (other, second) in combinations(single.items(), 2):
        if (one[0], one[2]) == (other[0], other[2]):
            rho = statistic([first, second], spearman, DIFFERENCE)
            _add(findings, "agreement", one, rho, other=other[1])
    draws = {task: np.random.default_rng([config.seed, 1, 6]) for task, *_ in single}
    for place, layers in single.items():
        rho = halves_agree(layers, draws[place[0]])
        _add(findings, "self_agreement", place, None if rho is None else Estimate(rho))


def add_factors(findings: Findings, rows: Rows) -> None:
    """By how many times KL grows with noise in all layers if each channel has a factor for itself, in place of the
    layer's: the geometric mean over items and the settings of the other factors. Alone: the others are the layer's."""
    whole = by_noise(rows, "kl_all", "band", {"band": "all", "group": CUTS})
    cells: dict[tuple[Key, Key], dict[Key, Float[np.ndarray, "*items"]]] = {}
    for (task, noise, parts), (kl,) in whole.items():
        if noise in FACTORIAL:
            cells.setdefault((task, parts), {})[noise] = np.log(np.maximum(kl, UNCHANGED))
    full = {place: logs for place, logs in cells.items() if len(logs) == len(FACTORIAL)}
    for (task, parts), logs in full.items():
        for factor in FACTORS:
            signs = {noise: 1 if factor in factors_of(noise) else -1 for noise in FACTORIAL}
            steps = {
                "factor": np.sum([sign * logs[noise] for noise, sign in signs.items()], axis=0) * 2 / len(signs),
                "alone": logs[factor] - logs["layer"],
            }
            for name, step in steps.items():
                times = estimate(step[np.isfinite(step)], comparisons=len(FACTORS) * len(full))
                keys = {"task": task, "parts": parts, "factor": factor}
                findings.add(Finding(name, keys, times.exponential, "", len(FACTORS) * len(full)))


def _add(
    findings: Findings, name: str, place: tuple[Key, ...], value: Estimate | None, comparisons: int = 0, **more: Key
) -> None:
    if value is not None:
        findings.add(Finding(name, {**dict(zip(NOISE, place, strict=True)), **more}, value, "", comparisons))


def add_less_published(findings: Findings) -> None:
    """What was measured less what was published."""
    for name, measured in {"published_sound": "sound", "published": "accuracy"}.items():
        for theirs in findings.where(name):
            ours = findings.get(measured, **theirs.keys)
            if ours is not None:
                findings.add(Finding(f"less_{name}", theirs.keys, newcombe(ours, theirs.value)))


def orders(findings: Findings, config: Config) -> list[dict[str, Any]]:
    """The bands of each cut, most sensitive first, which neighbours differ, and what is decided of the article's
    claims; one for each rate, and one for all rates together, whose `rate` is None."""
    decided = []
    tasks, rates = findings.values("sound", "task"), (*config.rates, None)
    for cut, of, task, parts, noise, rate in product(COMPARED, MEASURES, tasks, PARTS, NOISES, rates):
        at: dict[str, Key] = {"task": task, "noise": noise, "parts": parts}
        level, pair = (f"{of}_all", f"pair_{of}") if rate is None else (of, f"pair_{of}_at")
        at |= {} if rate is None else {"rate": rate}
        means = {name: findings.get(level, **at, band=name) for name in names_of(cut)}
        pairs = {
            (first, second): findings.get(pair, **at, cut=cut, first=first, second=second)
            for first, second in combinations(names_of(cut), 2)
        }
        order = Ranking.of(means, pairs)
        if order is not None:
            known = {"cut": cut, "measure": of, "rate": rate, "bands": [*order.names], "apart": order.apart}
            decided.append({**at, **known, "last": order.largest(LAST), "buffer": order.smallest(BUFFER)})
    return decided


def warnings_of(table: Rows, config: Config, facts: Mapping[str, Any]) -> Iterator[str]:
    yield from answers.warnings_of(config, facts["tasks"])
    yield from answers.broken_rows(table, "band", "noise", "rate")
    published = facts["published"]
    if published and published["model"].lower() not in config.model.lower():
        yield f"The reported table is of {published['model']}; this run is of {config.model}."
