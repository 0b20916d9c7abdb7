"""From tables to findings: how good the dictionaries are, which latents differ, which show the code, which matter."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Estimand, HeldOut, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.probing.intervals import LEVEL
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings
from kvprobe.saes.quality import by_density
from kvprobe.stats import DIFFERENCE, POSITIVE, SHARE, estimate
from kvprobe.studies.features import Config
from kvprobe.studies.features.collect import DIGITS, EXCHANGED
from kvprobe.studies.features.differences import compare_latents, fewest
from kvprobe.studies.features.reading import HIDDEN_SEGMENTS, READERS, UNTOUCHED
from kvprobe.tasks.passcode import contexts, conversation
from kvprobe.tidy import Rows, beside, chosen
from kvprobe.wording import few_clusters, percent

FLIPS = 1999
"""Sign flips of the null; no p can be below 1 / (FLIPS + 1)."""
STEP = 0.125
"""Of a histogram, in powers of ten."""
COUNTED = 2
"""Claims that are counts: that latents differ, and that raw dimensions do."""
CODE = "48213"
SPLICES = ("spliced", "mean", "zero")
TEXT: dict[str, Any] = {"by": ("place",), "cluster": "text"}
LOSS: dict[str, Any] = {"over": "predicted", "unit": "nats", **TEXT}
QUALITY: tuple[Estimand, ...] = (
    Ratio(name="unexplained", of="error", over="variance", **TEXT),
    Ratio(name="unexplained_turned", of="turned", over="variance", **TEXT),
    Ratio(name="active", of="active", over="tokens", **TEXT),
    Ratio(name="recovered", of="recovered", over="kl_mean", **TEXT),
    *(Ratio(name="loss", of=name, keys={"reading": name}, **LOSS) for name in ("clean", *SPLICES)),
    *(Ratio(name="loss_added", of=f"added_{name}", keys={"reading": name}, **LOSS) for name in SPLICES),
    *(Ratio(name="kl", of=f"kl_{name}", keys={"reading": name}, within=POSITIVE, **LOSS) for name in SPLICES),
)
RIGHT: dict[str, Any] = {"of": "right", "cluster": "context", "within": SHARE}
DECODING: tuple[Estimand, ...] = (
    HeldOut(name="accuracy", by=("place", "arm", "split", "reader", "k"), where={"reader": READERS}, **RIGHT),
    HeldOut(name="whole", by=("place", "arm", "split", "reader"), where={"every": True}, **RIGHT),
)
SETS = ("whole", "all", "differing", "random")
APART: dict[str, Any] = {"over": "retained", "cluster": "context"}
EXCHANGE: tuple[Estimand, ...] = (
    Mean(
        name="distance",
        of="kl",
        by=("place",),
        where={"set": "retained"},
        cluster="context",
        within=POSITIVE,
        unit="nats",
    ),
    Ratio(name="carried", of="gone", by=("segment", "place", "set"), where={"set": SETS}, **APART),
)
LEAD: dict[str, Any] = {"of": "lead", "by": ("place",), "cluster": "context", "within": DIFFERENCE}
SINGLE = HeldOut(name="single", where={"reader": "latents"}, **LEAD)
SEEN = HeldOut(name="seen", where={"arm": "T3"}, **LEAD)
BEYOND = Ratio(name="beyond", of="apart", by=("place",), where={"set": "random"}, **APART)


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    texts, samples, exchanges = (tables[name] for name in ("texts", "samples", "exchanges"))
    added = {f"added_{name}": texts[name] - texts["clean"] for name in SPLICES}
    texts = texts.assign(recovered=texts["kl_mean"] - texts["kl_spliced"], **added)
    exchanges = compared(exchanges)
    findings = measure(texts, QUALITY, (samples, DECODING), (exchanges, EXCHANGE))
    one = ahead(samples, {"arm": "hidden", "split": "paired", "k": 1}, {"reader": "raw"})
    new = {"every": True, "split": "leave-context-out", "reader": "latents"}
    floor = ahead(samples, new, {"arm": "restart T3"})
    claims = ((one, SINGLE), (floor, SEEN), (exchanges, BEYOND))
    comparisons = COUNTED + len(claims) * texts["place"].nunique()
    for rows, estimand in claims:
        findings.extend(measure(rows, [replace(estimand, claims=comparisons)]))
    findings.number("chance", 1 / DIGITS)
    add_latents(findings, tables)
    add_differences(findings, tables, comparisons, config.seed)
    chat = conversation(contexts()[0], CODE)
    facts: dict[str, Any] = {
        "chat": chat_record(chat, masked=HIDDEN_SEGMENTS, marked=CODE, only_in=("T2", "T3")),
        "exchanged": EXCHANGED,
        "flips": FLIPS,
        "level": LEVEL,
        "shown": tables["shown"][["place", "why", "latent"]].to_dict("records"),
        "texts": [
            {**row, "view": json.loads(row["view"])}
            for row in tables["activating"][["place", "latent", "words", "view"]].to_dict("records")
        ],
        "trained_on": [json.loads(notes) for notes in tables["dictionaries"]["notes"]],
        "layers": model.geometry.n_layers,
    }
    return Conclusion(findings, list(controls(findings, model.round_off)), facts, list(warnings(findings, config)))


def compared(exchanges: Rows) -> Rows:
    """With the KL of the context as it is (`retained`), what is `gone` of it, and how much more with the latents that
    differ most (`apart`)."""
    retained, differing = (
        beside(exchanges, "kl", {"set": name}, ("place", "context")) for name in ("retained", "differing")
    )
    kl = exchanges["kl"]
    return exchanges.assign(segment="T3", retained=retained, gone=retained - kl, apart=kl - differing)


def ahead(samples: Rows, where: Mapping[str, Any], other: Mapping[str, Any]) -> Rows:
    """The chosen rows with how much more of a code is read (`lead`) than in others of them."""
    rows = chosen(samples, where)
    return rows.assign(lead=rows["right"] - beside(rows, "right", other, ("place", "sample")))


def add_latents(findings: Findings, tables: Mapping[str, Rows]) -> None:
    """How many latents are active how often in the conversations: hardly ever, nearly always, and by the logarithm of
    the share of tokens, in steps. Of those that stand out, how often they are active in the recorded texts, and the
    share of their variance that lies between digits (`eta`)."""
    for place, latents in tables["latents"].groupby("place", sort=False):
        density = latents["density"].to_numpy(float)
        for of, count in (("all", density.size), ("silent", (density == 0).sum()), ("dense", (density > 0.5).sum())):
            findings.number("latents", count, place=place, of=of)
        for above, count in by_density(density, STEP).items():
            findings.number("densities", count, place=place, reader="latents", above=above)
    for name, table, of in (("recorded", "activating", "density"), ("eta", "shown", "eta")):
        for row in tables[table].dropna(subset=of).to_dict("records"):
            findings.number(name, row[of], place=row["place"], latent=row["latent"])


def add_differences(findings: Findings, tables: Mapping[str, Rows], comparisons: int, seed: int) -> None:
    """Of every place, segment and reader: how many columns differ at the level, and where it is shared with all that
    the answer claims; how many are not always zero; how few hold half of the squared difference. The means of each
    latent, p of those that differ, and the difference of those that stand out. The largest difference where there can
    be none."""
    shown = {(row["place"], row["why"], row["latent"]) for row in tables["shown"].to_dict("records")}
    for (place, segment, reader), means in tables["means"].groupby(["place", "segment", "reader"], sort=False):
        retained, restart = (
            means[arm].to_numpy(float).reshape(means["context"].nunique(), -1) for arm in ("retained", "restart")
        )
        change, keys = retained - restart, {"place": place, "segment": segment}
        if segment == UNTOUCHED:
            findings.number("round_off", np.abs(change).max() / np.abs(retained).max(), place=place)
            continue
        latents: Rows = compare_latents(retained, restart, FLIPS, np.random.default_rng([seed, 3]))
        p, mean, alive = latents["p"], latents["difference"], latents["alive"]
        for of, count in {
            "differ": (p <= LEVEL).sum(),
            "claimed": (p <= LEVEL / comparisons).sum(),
            "up": ((p <= LEVEL) & (mean > 0)).sum(),
            "alive": alive.sum(),
            "half": fewest(mean.to_numpy() ** 2),
        }.items():
            findings.number("count", count, **keys, reader=reader, of=of)
        for latent, row in latents[alive].iterrows() if reader == "latents" else ():
            findings.number("retained", row["one"], **keys, latent=latent)
            findings.number("restart", row["other"], **keys, latent=latent)
            stands_out = (place, segment, latent) in shown
            if stands_out or row["p"] <= LEVEL:
                findings.number("p", row["p"], **keys, latent=latent)
            if stands_out:
                findings.add(Finding("difference", {**keys, "latent": latent}, estimate(change[:, latent])))


def controls(findings: Findings, allowed: float) -> Iterator[Control]:
    """Whether nothing differs where nothing can, and whether the dictionaries are better than turned ones."""
    for place in map(str, findings.values("unexplained", "place")):
        off = findings.at("round_off", place=place).mean
        yield Control(
            f"Light cone, {place}: the system message stands before everything that is hidden, so that nothing may "
            f"differ there. It differs by {off:.1e} of its size (allowed for round-off: {allowed:.1e}).",
            off <= allowed,
        )
        turned, trained = (findings.at(name, place=place) for name in ("unexplained_turned", "unexplained"))
        yield Control(
            f"Turned dictionary, {place}: turned at random, it leaves {percent(turned)} of the variance unexplained; "
            f"as trained, {percent(trained)}.",
            trained.high < turned.low if trained.has_interval else trained.mean < turned.mean,
        )


def warnings(findings: Findings, config: Config) -> Iterator[str]:
    yield from few_clusters(config.contexts, "conversations")
    for recovered in findings.where("recovered"):
        if recovered.value.mean < 0.5:
            yield (
                f"The dictionary of {recovered.keys['place']} brings back only {percent(recovered.value)} of what the "
                "mean activation costs: what it does not see, this report does not see."
            )
