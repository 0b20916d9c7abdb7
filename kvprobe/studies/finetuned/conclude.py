"""From readings to findings: shares of the way from the reader's own answer to the other model's.

A share is the mean of what moved over the mean way, with intervals over conversations. Shares of parts need not add up.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Estimand, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.ranks import spearman
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import SHARE, binomial, jackknife
from kvprobe.studies.finetuned import Config
from kvprobe.studies.finetuned.collect import ALL, ITSELF, LONE, OTHER, SHUFFLED, SUM, WHO, conversations
from kvprobe.tidy import Rows, Where, beside, chosen
from kvprobe.wording import few_clusters

UNIT = "of the way"
SAME = 2e-3
"""Nats by which two ways to the same reading may differ."""


def way(
    name: str,
    by: tuple[str, ...],
    where: Where,
    of: str = "moved",
    together: tuple[str, ...] | None = None,
) -> Ratio:
    """A share of the way from the reader's own answer to the other's."""
    keys = ("behaviour", "reader", *by)
    return Ratio(name=name, of=of, over="way", by=keys, where=where, unit=UNIT, together=together)


ESTIMANDS: tuple[Estimand, ...] = (
    Mean(name="margin", of="margin", by=("behaviour", "reader"), where={"what": "end"}, unit="nats"),
    Mean(name="says", of="says", by=("behaviour", "reader"), where={"what": "end"}, within=SHARE),
    way("whole", ("part", "segment"), {"what": "whole"}, together=()),
    way("content", ("segment",), {"what": "whole", "part": "V"}, "content", together=()),
    way("handover", ("segment",), {"what": "handover"}),
    way("band", ("part", "segment", "layer"), {"what": "band"}),
    way("weights", ("layer",), {"what": "band of weights"}),
    way("matrix", ("place",), {"what": "matrix"}),
    way("control", ("place",), {"what": "control", "place": (SHUFFLED, OTHER)}),
    Mean(name="rest", of="margin", by=("behaviour", "reader", "place"), where={"what": "rest"}, unit="nats"),
)  # fmt: skip


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    return concluded(table, config)


def concluded(table: Rows, config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    keys = {"what": "whole", "part": "K"}
    by_keys = beside(table, "moved", keys, ("sample", "behaviour", "reader", "segment"))
    findings = measure(table.assign(content=table["moved"] - by_keys), ESTIMANDS)
    for behaviour in config.behaviours:
        for reader in WHO:
            add_agreement(findings, table, behaviour, reader)
    told = {name: conversations(config, name)[0] for name in config.behaviours}
    facts = {
        "behaviours": list(config.behaviours),
        "chats": {name: chat_record(one.transcript(one.answer)) for name, one in told.items()},
    }
    return Conclusion(findings, [*controls_of(table, findings)], facts, few_clusters(config.prompts, "conversations"))


def add_agreement(findings: Findings, table: Rows, behaviour: str, reader: str) -> None:
    """The rank correlation over bands between what moves if a band of the cache is patched and if one of the weights
    is changed; an interval over conversations."""
    rows = chosen(table, {"behaviour": behaviour, "reader": reader})
    cells = {
        what: chosen(rows, where).pivot(index="sample", columns="layer", values="moved").to_numpy(float)
        for what, where in {
            "cache": {"what": "band", "part": "KV", "segment": ALL},
            "weights": {"what": "band of weights"},
        }.items()
    }
    count = len(cells["cache"])
    if cells["cache"].shape[1] < 3:
        return
    every = np.ones((count + 1, count), dtype=bool)
    every[1:][np.eye(count, dtype=bool)] = False
    rhos = spearman(*(np.stack([moved[kept].mean(0) for kept in every]) for moved in cells.values()))
    estimate = jackknife(float(rhos[0]), rhos[1:], (-1, 1))
    if estimate.has_interval:
        # Leaving one out changes few ranks or none, by chance: others may change them, as often as all could be missed.
        seen = binomial(count, count).low
        low, high = seen * (rhos[0] + 1) - 1, 1 - seen * (1 - rhos[0])
        estimate = replace(estimate, low=min(estimate.low, float(low)), high=max(estimate.high, float(high)))
    findings.add(Finding("agreement", {"behaviour": behaviour, "reader": reader}, estimate))


def controls_of(table: Rows, findings: Findings) -> Iterator[Control]:
    control = chosen(table, {"what": "control"})

    def most(rows: pd.Series) -> float:
        return float(rows.abs().max())

    itself = most(chosen(control, {"place": ITSELF})["moved"])
    yield Control(f"The base's own cache, put into the base's, moves at most {itself:.1e} nats.", itself <= SAME)
    lone = most(chosen(control, {"place": LONE})["moved"])
    yield Control(
        f"A conversation read at once gives what reading its last token from the cache gives, to {lone:.1e} nats.",
        lone <= SAME,
    )
    added = chosen(control, {"place": SUM})
    off = most(added["moved"] - added["way"])
    yield Control(
        f"With all that the adapter adds, the base is the fine-tune, and without it the fine-tune is the base: to "
        f"{off:.1e} nats.",
        off <= SAME,
    )
    whole = chosen(table, {"what": "whole", "part": "KV", "segment": ALL})
    handed = chosen(table, {"what": "handover", "segment": "header"})
    keys = ["sample", "behaviour", "reader"]
    same = most(whole.set_index(keys)["moved"] - handed.set_index(keys)["moved"])
    yield Control(f"All slots patched at once are the other's cache handed over: to {same:.1e} nats.", same <= SAME)
    shares = [finding.value for finding in findings.where("control", place=SHUFFLED)]
    largest = max((max(map(abs, (share.low, share.high))) for share in shares), default=np.nan)
    if not np.isfinite(largest):
        yield Control("Too few conversations to say how far the cache of shuffled changes moves the base.", None)
        return
    yield Control(
        "The cache of a fine-tune with shuffled changes of the same norm moves the base by at most "
        f"{largest:.0%} of the way to the fine-tune, at the far end of its interval.",
        largest < 0.25,
    )
