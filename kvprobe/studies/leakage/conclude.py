"""From what probes and the model made of the secrets to findings."""

from collections.abc import Iterator, Mapping
from math import nan
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Difference, Estimand, HeldOut, Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.probing.intervals import LEVEL
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import DIFFERENCE, SHARE, Estimate
from kvprobe.studies.leakage import Config
from kvprobe.studies.leakage.collect import CHANGED
from kvprobe.studies.leakage.reading import HIDDEN_SEGMENTS
from kvprobe.tasks.passcode import conversation
from kvprobe.tasks.secrets import secret
from kvprobe.tidy import Rows
from kvprobe.wording import few_clusters

SINGLE_CONTEXT = (
    "This does not generalise: all samples share one conversation, as in most published probes. The accuracy below "
    "separates secrets within this one template; a probe may do so by features that exist in no other conversation. It "
    "does not say that they can be read from a conversation that the probe has not seen. Run with more contexts for "
    "that."
)
ANSWER: dict[str, Any] = {"together": (), "family": "answer"}
"""All that the answer may claim has intervals that hold together."""


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    """Findings, controls and facts of a run."""
    findings = findings_of(tables, config)
    findings.number("precision", model.round_off / 100)
    near, far = (findings.at("reach", layers=layers).mean for layers in ("0 and 1", "last"))
    light_cone = Control(
        "Light cone: with one turn masked between, K and V of T3 at layers 0 and 1 cannot depend on the secret. They "
        f"vary by {near:.1e} of their size (allowed for round-off: {model.round_off:.1e}), at the last layer by "
        f"{far:.1e}.",
        near <= model.round_off,
    )
    hidden = secret(config.secret)
    text = hidden.draw(1, 1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0][0]
    chat = conversation(hidden.contexts[0], text)
    facts = {
        "chat": chat_record(chat, masked=HIDDEN_SEGMENTS, marked=text, only_in=("T2", "T3")),
        "layers": model.geometry.n_layers,
    }
    warnings = [SINGLE_CONTEXT] if config.contexts == 1 else few_clusters(config.contexts, "conversations")
    return Conclusion(findings, [light_cone], facts, warnings)


def findings_of(tables: Mapping[str, Rows], config: Config) -> Findings:
    """All numbers of a run, from the tables of `collect`."""
    samples, single = tables["samples"], config.contexts == 1
    # In one conversation only samples can be left out, and the claim is about that conversation alone.
    rows = samples.assign(cluster=samples["sample" if single else "context"], lead=samples["right"] - samples["floor"])
    findings = measure(rows, estimands(single))
    clusters = rows["cluster"].nunique()
    findings.extend(read_by_probes(tables, clusters))
    for (arm, split), sites in tables["probes"].dropna(subset="p_family").groupby(["arm", "split"], sort=False):
        detected = sites[sites["p_family"] <= LEVEL]
        numbers = {"sites": len(sites), "detected": len(detected), "lowest_layer": detected["layer"].min()}
        for name, value in {**numbers, "best": sites["accuracy"].max(), "p": sites["p_family"].min()}.items():
            findings.number(name, value, arm=arm, split=split)
    picks: Any = tables["picks"].groupby(["arm", "split", "family", "layer", "read"], sort=False).size()
    for keys in picks.reset_index(name="folds").to_dict("records"):
        findings.number("picked", keys.pop("folds"), **keys)
    codes = tables["codelength"].groupby(["arm", "split"], sort=False)[["bits", "context_bits", "uniform_bits"]].mean()
    for (arm, split), lengths in codes.iterrows():
        for code, bits in lengths.items():
            findings.number("codelength", bits, "bits", arm=arm, split=split, code=code)
    reach: Any = tables["reach"].groupby("layer")["varies"].max()
    findings.number("reach", reach[reach.index < 2].max(), layers="0 and 1")
    findings.number("reach", reach.iloc[-1], layers="last")
    findings.number("chance", secret(config.secret).target.chance)
    return findings


def estimands(single: bool) -> Iterator[Estimand]:
    """What is estimated from samples: what the model makes of the secret, and what the answer may claim of probes."""
    headline = "random" if single else "leave-context-out"
    pair: dict[str, Any] = {"where": {"condition": "retained"}, "less": {"condition": "restart"}, "cluster": "cluster"}
    for name in ("logprob", "margin", "kl_from_full"):
        of: dict[str, Any] = {"of": name, "unit": "nats"}
        yield Mean(name=name, by=("condition",), where={"measure": "use"}, cluster="cluster", **of)
        yield Difference(name="gained", keys={"measure": name}, **of, **pair)
    right: dict[str, Any] = {"name": "token_accuracy", "of": "token_accuracy", "within": SHARE}
    yield Mean(by=("condition",), where={"measure": "use"}, cluster="cluster", **right)
    yield Difference(name="use", of="margin", unit="nats", **pair, **ANSWER)
    leaks = [("masked", headline)]
    leaks += [] if single else [(CHANGED["masked"], headline), ("masked", "paired")]
    for arm, split in leaks:
        of_arm: dict[str, Any] = {"where": {"condition": arm, "split": split}, "keys": {"arm": arm, "split": split}}
        yield HeldOut(name="leak", of="lead", within=DIFFERENCE, cluster="cluster", **of_arm, **ANSWER)
    masked = {"condition": "masked", "split": headline}
    yield HeldOut(name="by_place", of="right", by=("place",), where=masked, within=SHARE, cluster="cluster")


def read_by_probes(tables: Mapping[str, Rows], clusters: int) -> Iterator[Finding]:
    """What probings have estimated already: of the sites chosen on inner folds, of all sites, and of few dimensions."""
    reading = ("arm", "split", "reading")
    for name, unit in {"accuracy": "", "bits": "bits", "lead": ""}.items():
        yield from given(tables["readings"], name, name, reading, clusters, unit, f"{name}_")
    yield from given(tables["probes"], "site", "accuracy", ("arm", "split", "family", "read", "layer"), clusters)
    yield from given(tables["sparse"], "sparse", "accuracy", ("arm", "split", "k"), clusters)
    yield from given(
        tables["sparse"].drop(columns=["low", "high"]), "sparse_random", "random", ("arm", "split", "k"), 0
    )


def given(
    table: Rows, name: str, of: str, by: tuple[str, ...], clusters: int, unit: str = "", prefix: str = ""
) -> Iterator[Finding]:
    """The numbers of a column, with the intervals that stand beside them in columns that begin with `prefix`."""
    for row in table.dropna(subset=of).to_dict("records"):
        low, high, smallest, largest = (
            row.get(f"{prefix}{end}", nan) for end in ("low", "high", "smallest", "largest")
        )
        value = Estimate(row[of], low, high, clusters, smallest, largest)
        yield Finding(name, {key: row[key] for key in by}, value, unit)
