"""From what probes and the model made of the secrets to findings."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Difference, Estimand, HeldOut, Mean, measure
from kvprobe.experiments.light_cone import light_cone
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.probings import probing_findings
from kvprobe.stats import DIFFERENCE, SHARE
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
    samples, single, hidden = tables["samples"], config.contexts == 1, secret(config.secret)
    # In one conversation only samples can be left out, and the claim is about that conversation alone.
    rows = samples.assign(cluster=samples["sample" if single else "context"], lead=samples["right"] - samples["floor"])
    findings = measure(rows, estimands(single))
    findings.extend(probing_findings(tables, rows["cluster"].nunique()))
    findings.number("chance", hidden.target.chance)
    findings.number("precision", model.round_off / 100)
    cannot = "with one turn masked between, K and V of T3 at layers 0 and 1 cannot depend on the secret"
    control = light_cone(findings, "reach", tables["reach"], model.round_off, cannot)
    text = hidden.draw(1, 1, np.random.default_rng([config.seed, 1]), model.tokenizer)[0][0]
    chat = conversation(hidden.contexts[0], text)
    facts = {
        "chat": chat_record(chat, masked=HIDDEN_SEGMENTS, marked=text, only_in=("T2", "T3")),
        "layers": model.geometry.n_layers,
    }
    warnings = [SINGLE_CONTEXT] if single else few_clusters(config.contexts, "conversations")
    return Conclusion(findings, [control], facts, warnings)


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
