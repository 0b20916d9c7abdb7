"""From tables to findings: what is read at each distance, by which way it came, and whether the model uses it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.estimands import Difference, Estimand, HeldOut, Mean, Total, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.probing.intervals import INFORMATION
from kvprobe.probing.ridge import VARIANCE_FLOOR
from kvprobe.probing.splits import SPLITS
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, POSITIVE, SHARE, UNBOUNDED
from kvprobe.studies.multihop import Config
from kvprobe.studies.multihop.hops import TURN_NAMES, conversation, sessions
from kvprobe.studies.multihop.reading import ALL, ARMS, DISTANCES, PLACES, lowest_layer
from kvprobe.tasks.passcode import CODE
from kvprobe.tidy import Rows, beside
from kvprobe.wording import few_clusters

AT = ("split", "arm", "distance")
SITE = ("family", "layer", "read")


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    probes = by_arm(tables["probes"])
    findings = measure(
        prepared(tables),
        estimands(),
        (tested(tables["transfer"]), TRANSFER),
        (tables["picks"].assign(folds=1), PICKS),
        (probes.assign(above=probes["accuracy"] - CODE.chance), (BY_LAYER,)),
    )
    findings.number("chance", CODE.chance)
    control = light_cone(findings, tables["variation"], model.round_off)
    chat = conversation(sessions()[0], code := str(tables["samples"]["code"][0]))
    facts = {
        "chat": chat_record(chat, masked=TURN_NAMES, marked=code, only_in=(TURN_NAMES[0], "Q")),
        "layers": model.geometry.n_layers,
        "variance_floor": VARIANCE_FLOOR,
    }
    return Conclusion(findings, [control], facts, few_clusters(config.sessions, "sessions"))


def prepared(tables: Mapping[str, Rows]) -> Rows:
    """All rows, by kind: `place`, what is read at each place; `arm`, the same with what all arms share in each of them;
    `use`. `leak` is what is read beyond the restart, `direct` what is read beyond the arm in which hops are forced."""
    read = tables["read"].copy()
    at_restart = beside(read, "accuracy", {"condition": "restart"}, ("sample", *AT))
    forced = {"condition": "retained", "arm": "hop-forced"}
    read["leak"] = read["accuracy"] - at_restart
    read["direct"] = read["accuracy"] - beside(read, "accuracy", forced, ("sample", "split", "distance"))
    used = tables["samples"].assign(kind="use", distance=0)
    return pd.concat([read.assign(kind="place"), by_arm(read).assign(kind="arm"), used], ignore_index=True)


def by_arm(rows: Rows) -> Rows:
    """The rows of each arm, with what all arms share in each of them."""
    return pd.concat([rows[rows["arm"].isin((ALL, arm))].assign(arm=arm) for arm in ARMS])


def estimands() -> Iterator[Estimand]:
    """The intervals that the answer is chosen from hold together, and so do those of the rest of a table."""

    def family(name: str, headline: bool) -> dict[str, Any]:
        together = {"together": (), "family": "headline"} if headline else {"together": ("split",), "family": name}
        return {"cluster": "context", **together}

    by = ("condition", *AT)
    yield HeldOut(name="read", of="accuracy", by=by, where={"kind": "arm"}, cluster="context", within=SHARE)
    yield HeldOut(name="bits", of="bits", by=by, where={"kind": "arm"}, cluster="context", within=INFORMATION)
    restart = {"kind": "place", "condition": "restart"}
    yield HeldOut(name="floor", of="accuracy", by=("split",), where=restart, cluster="context", within=SHARE)
    for split in SPLITS:
        place, arm = ({"kind": kind, "condition": "retained", "split": split} for kind in ("place", "arm"))
        later = {**arm, "distance": tuple(DISTANCES[1:])}
        leak = family("leak", split == "paired")
        yield HeldOut(name="leak", of="leak", by=AT, where=place, within=DIFFERENCE, **leak)
        beyond = family("beyond", split == "leave-context-out")
        yield HeldOut(name="beyond", of="leak", by=("split", "arm"), where=later, within=DIFFERENCE, **beyond)
        for way in ("open", "skip"):
            direct = family("direct", (split, way) == ("paired", "skip"))
            yield HeldOut(name="direct", of="direct", by=AT, where={**place, "arm": way}, within=DIFFERENCE, **direct)
    for name, within in {"logprob": UNBOUNDED, "margin": UNBOUNDED, "kl": POSITIVE, "token_accuracy": SHARE}.items():
        known: dict[str, Any] = {"within": within, "unit": "nats" if within != SHARE else ""}
        yield Mean(name=name, of=name, by=("condition",), where={"kind": "use"}, cluster="context", **known)
    for name in ARMS:
        masked, restarted = ({"kind": "use", "condition": condition} for condition in (name, f"restart, {name}"))
        pair: dict[str, Any] = {"where": masked, "less": restarted, "keys": {"arm": name}, "unit": "nats"}
        yield Difference(name="gain", of="margin", **pair, **family("gain", True))
        yield Difference(name="gain_logprob", of="logprob", cluster="context", **pair)


def tested(transfer: Rows) -> Rows:
    """Transfer, and whether a probe was trained where it is tested."""
    return transfer.assign(tested_at=np.where(transfer["trained"] == transfer["tested"], "the same", "another"))


TRANSFER: tuple[Estimand, ...] = tuple(
    HeldOut(name=name, of="accuracy", by=("split", "arm", *by), cluster="context", within=SHARE)
    for name, by in (("transfer", ("trained", "tested")), ("transfer_mean", ("tested_at",)))
)
BY_LAYER = Total(
    name="by_layer",
    of="above",
    by=("family", "arm", "layer", "distance"),
    where={"condition": "retained", "split": "paired", "read": "mean"},
)
"""Accuracy above chance of the probe of averaged slots."""
PICKS: tuple[Estimand, ...] = (
    Total(name="picked", of="folds", by=(*AT, *SITE), where={"picks": "read"}),
    Total(name="transfer_picked", of="folds", by=("split", "arm", *SITE), where={"picks": "transfer"}),
)


def light_cone(findings: Findings, variation: Rows, allowed: float) -> Control:
    """Whether the code stays out of the layers that it cannot reach; how far K and V vary with it becomes findings."""
    varies = variation[variation["family"] != "resid_post"].groupby(["arm", "distance", "layer"])["variation"].max()
    worst = 0.0
    for arm, distance in PLACES:
        by_layer = varies[arm, distance]
        lowest = lowest_layer(arm, distance)
        findings.number("lowest", lowest, arm=arm, distance=distance)
        worst = max(worst, below := float(by_layer[by_layer.index < lowest].max()))
        for layers, value in {"below": below, "there": by_layer.get(lowest), "last": by_layer.iloc[-1]}.items():
            if value is not None:
                findings.number("variation", value, arm=arm, distance=distance, layers=layers)
    return Control(
        "Light cone: a slot that attends to slots which vary with the code from layer l on does so itself from layer "
        f"l + 1 on. Below the layers that the code can so reach, K and V vary with it by at most {worst:.1e} of their "
        f"size (allowed for round-off: {allowed:.1e}).",
        worst <= allowed,
    )
