"""From edits to findings: what an erasure takes from the model beyond a random one, how far an exchange turns its
answer, and what probes still read.

Each conversation is a cluster; its random subspaces are averaged before anything else.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from kvprobe.experiments.estimands import Difference, HeldOut, Mean, Ratio, Share, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import POSITIVE, SHARE
from kvprobe.studies.use import Config
from kvprobe.studies.use.collect import chosen_places
from kvprobe.studies.use.effects import BOTH, CONTROL, DONOR, ERASE, ITSELF, SITES, SWAP
from kvprobe.studies.use.place_erasers import INLP, LEACE, RANDOM, RANDOM_0
from kvprobe.studies.use.places import DIGITS, SHRINKAGE, cases_of
from kvprobe.tasks.passcode import conversation
from kvprobe.tidy import Rows, Where, beside
from kvprobe.wording import few_clusters

NEAR = 0.15
"""Share of digits up to which a probe's accuracy counts as near chance."""
SLACK = 100
"""By how many times round-off of the largest logit difference a control may move."""
NATS, LOGITS = "nats", "logits"

EDIT = ("site", "part", "edit")
PROBED = ("place", "part", "probe", "state")
ERASED: Where = {"kind": ERASE}
SWAPPED: Where = {"kind": SWAP}
ALONG: Where = {"edit": LEACE}
"""Along the subspace that a probe reads."""
EVERYWHERE: Where = {"band": EVERY_LAYER, "part": BOTH}

OF_EDITS = (
    Mean(name="margin", of="intact_margin", by=("view",), unit=NATS),
    Share(name="said", of="intact_said", by=("view",)),
    Mean(name="way", of="way", by=("view",), unit=LOGITS),
    Mean(name="lost", of="lost", by=("band", *EDIT), where=ERASED, unit=NATS),
    Mean(name="kl", of="kl", by=("band", *EDIT), where=ERASED, within=POSITIVE, unit=NATS),
    Share(name="still_said", of="said", by=("band", *EDIT), where=ERASED),
    Mean(name="beyond", of="lost_beyond", by=("site", "band", "part"), where={**ERASED, **ALONG}, unit=NATS),
    Mean(name="used", of="lost_beyond", by=("site",), where={**ALONG, **EVERYWHERE, **ERASED}, unit=NATS, together=()),
    Mean(name="moved", of="moved", by=EDIT, where=SWAPPED, unit=LOGITS),
    Mean(name="moved_beyond", of="moved_beyond", by=("site", "part"), where={**SWAPPED, **ALONG}, unit=LOGITS),
)
OF_DOSES = (
    Mean(name="dose", of="lost", by=("kind", "edit", "strength"), where=ERASED, unit=NATS),
    Ratio(name="dose", of="moved", over="way", by=("kind", "edit", "strength"), where=SWAPPED),
)
OF_PROBES = (
    HeldOut(name="read", of="accuracy", by=PROBED, within=SHARE),
    HeldOut(name="read_layer", of="accuracy", by=(*PROBED, "layer"), within=SHARE),
    HeldOut(name="left", of="accuracy", by=PROBED[:3], where={"state": LEACE}, within=SHARE, together=()),
)


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    edits, probes = prepared(tables["samples"]), tables["probes"].rename(columns={"context": "sample"})
    probes = probes.assign(state=probes["state"].replace({RANDOM_0: RANDOM}))
    of_doses = (*OF_DOSES, *steps(config.strengths))
    findings = measure(edits, OF_EDITS, (prepared(tables["doses"]), of_doses), (probes, OF_PROBES))
    # Where two runs hardly differ, a share of their difference means nothing.
    ways = tuple(way.keys["view"] for way in findings.where("way") if way.value.above())
    turned = Ratio(name="turned", of="moved", over="way", by=EDIT, where={**SWAPPED, "view": ways})
    findings.extend(measure(edits, [turned]))
    findings.number("chance", 1 / DIGITS)
    add_sizes(findings, tables["erasers"])
    count = int(edits["sample"].nunique())
    replies = tables["replies"].assign(name=tables["replies"]["name"].replace({RANDOM_0: RANDOM}))
    case = cases_of(config, model.tokenizer)[0]
    facts = {
        "chat": chat_record(conversation(case.context, case.pair[0]), marked=case.pair[0], only_in=("T2", "T3")),
        "layers": model.geometry.n_layers,
        "conversations": count,
        "near": NEAR,
        "shrinkage": SHRINKAGE,
        "chosen": [
            {"site": SITES[view, place], "band": band, "part": part}
            for view, place, band, part in dict.fromkeys(chosen_places(tables["samples"]))
        ],
        "replies": replies[["code", "place", "name", "reply"]].to_dict("records"),
    }
    held = list(controls(findings, edits, model.round_off))
    return Conclusion(findings, held, facts, few_clusters(count, "conversations"))


def steps(strengths: Sequence[float]) -> Iterator[Difference]:
    """What LEACE takes at each strength beyond the one before it."""
    for less, more in pairwise(strengths):
        erased: Where = {**ERASED, **ALONG}
        yield Difference(
            name="step",
            of="lost",
            where={**erased, "strength": more},
            less={**erased, "strength": less},
            keys={"strength": more},
            unit=NATS,
            together=(),
        )


def prepared(table: Rows) -> Rows:
    """A row for each edit, with what it lost and moved, and how much of that is beyond random subspaces."""
    rows = table.rename(columns={"context": "sample"}).assign(
        site=[SITES.get(place) for place in zip(table["view"], table["place"], strict=True)],
        edit=table["name"].where(~table["name"].str.startswith(RANDOM), RANDOM),
        lost=table["intact_margin"] - table["margin"],
        moved=table["intact_difference"] - table["difference"],
        way=table["intact_difference"] - table["donor_difference"],
        said=table["said"].astype(float),
        intact_said=table["intact_said"].astype(float),
    )
    on = ("sample", "kind", "site", "band", "part")
    beyond = {of: rows[of] - beside(rows, of, {"edit": RANDOM}, on) for of in ("lost", "moved")}
    return rows.assign(lost_beyond=beyond["lost"], moved_beyond=beyond["moved"])


def add_sizes(findings: Findings, erasers: Rows) -> None:
    """Mean rank, share of the variance moved and width over the halves' erasers of a place."""
    shown = erasers[erasers["name"].isin((LEACE, RANDOM_0, INLP))]
    for (place, part, name), sizes in shown.groupby(["place", "part", "name"], sort=False):
        keys = {"place": place, "part": part, "edit": RANDOM if name == RANDOM_0 else name}
        for column in ("rank", "share", "width"):
            findings.number(column, sizes[column].mean(), **keys)


def controls(findings: Findings, edits: Rows, round_off: float) -> Iterator[Control]:
    """Whether exchanging everything for the run's own changes nothing, and for the donor's gives the donor's answer."""
    largest = float(edits[["intact_difference", "donor_difference"]].abs().to_numpy().max())
    findings.number("largest", largest, LOGITS)
    allowed = SLACK * round_off * max(1.0, largest)
    for name, end, result in (
        (ITSELF, "intact", "the run's own changes nothing"),
        (DONOR, "donor", "the donor's gives the donor's answer"),
    ):
        exchanged = edits[(edits["kind"] == CONTROL) & (edits["edit"] == name)]
        off = float((exchanged["difference"] - exchanged[f"{end}_difference"]).abs().max())
        findings.number("off", off, LOGITS, control=name)
        yield Control(
            f"Every slot from the code to the summary exchanged for {result}: off by at most {off:.1e} logits "
            f"(allowed: {allowed:.1e}).",
            off <= allowed,
        )
