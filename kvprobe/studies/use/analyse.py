"""From edits to numbers: what an erasure takes from the model beyond a random one, and how far an exchange turns its
answer.

Each conversation is a cluster. Random subspaces of one conversation are averaged before anything else.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.patching.pairs import pooled, summarise
from kvprobe.probing.intervals import held_out
from kvprobe.stats import SHARE, estimate, wilson
from kvprobe.studies.use.collect import Place
from kvprobe.studies.use.effects import BOTH, CONTROL, DONOR, ERASE, ITSELF, SWAP, VIEWS
from kvprobe.studies.use.fit import INLP, LEACE, RANDOM, Erasers, roles
from kvprobe.studies.use.read import PARTS, PLACES
from kvprobe.wording import estimate_of

CHANCE = 0.1
CLAIMS = sum(map(len, VIEWS.values()))
"""What the answer may claim: a use at each place in each view."""
SITE = ["view", "place", "band", "part"]

Record = dict[str, Any]


def analyse(
    effects: Any, doses: Any, checked: Any, places: tuple[Place, Place], erasers: tuple[Erasers, Erasers]
) -> Record:
    """The numbers of a run from what `collect` and `check` give."""
    measured = _grouped(effects[effects["kind"] != CONTROL])
    return {
        "conversations": int(effects["context"].nunique()),
        "chance": CHANCE,
        "scale": _scale(effects),
        "erased": _erased(measured[measured["kind"] == ERASE]),
        "swapped": _swapped(measured[measured["kind"] == SWAP]),
        "doses": _doses(_grouped(doses, "strength")),
        "chosen": [dict(zip(SITE, place, strict=True)) for place in places],
        "probes": _probes(checked),
        "size": _size(erasers),
        "controls": _controls(effects),
    }


def found(metrics: Mapping[str, Any], table: str, view: str, place: str, part: str = BOTH, **labels: Any) -> Record:
    """The record of an edit, by default of K and V of all layers."""
    wanted = {"view": view, "place": place, "part": part, "band": EVERY_LAYER} | labels
    return next(each for each in metrics[table] if wanted.items() <= each.items())


def _grouped(table: Any, *also: str) -> Any:
    """One row per conversation and edit: random subspaces as one, `random`."""
    drawn = table["name"].str.startswith(RANDOM)
    table = table.assign(
        name=table["name"].where(~drawn, RANDOM),
        lost=table["intact_margin"] - table["margin"],
        effect=table["intact_difference"] - table["difference"],
        way=table["intact_difference"] - table["donor_difference"],
        said=table["said"].astype(float),
    )
    columns = ["lost", "effect", "way", "kl", "right", "said", "intact_margin"]
    by = ["context", "half", "kind", *SITE, "name", *also]
    return table.groupby(by, sort=False)[columns].mean().reset_index()


def _mean(values: Any, comparisons: int = 1) -> Record:
    """A mean over conversations, one value each."""
    return estimate(np.asarray(values, dtype=float), comparisons=comparisons).record()


def _scale(effects: Any) -> Record:
    """What is said of the code without any edit, by view."""
    scale = {}
    for view in VIEWS:
        once = effects[effects["view"] == view].drop_duplicates("context")
        scale[view] = {
            "margin": _mean(once["intact_margin"]),
            "said": wilson(int(once["intact_said"].sum()), len(once)).record(),
            "way": _mean(once["intact_difference"] - once["donor_difference"]),
        }
    return scale


def _erased(measured: Any) -> list[Record]:
    """By view, place, band and part: nats of the margin that are lost to each edit, and to the eraser beyond random
    ones."""
    records = []
    for site, edits in measured.groupby(SITE, sort=False):
        lost = edits.pivot(index="context", columns="name", values="lost")
        record: Record = dict(zip(SITE, site, strict=True))
        record["lost"] = {name: _mean(lost[name]) for name in lost.columns}
        record["beyond"] = _mean(lost[LEACE] - lost[RANDOM])
        record["claim"] = _mean(lost[LEACE] - lost[RANDOM], CLAIMS)
        record["margin"] = float(edits["intact_margin"].mean())
        for name in ("kl", "said"):
            record[name] = {edit: float(own[name].mean()) for edit, own in edits.groupby("name", sort=False)}
        records.append(record)
    return records


def _swapped(measured: Any) -> list[Record]:
    """By view, place and part: the share of the way to the other code, and logits, for each subspace."""
    pairs = measured.assign(pair=measured["context"], cluster=measured["context"])
    records = []
    for site, edits in pairs.groupby(SITE, sort=False):
        moved = edits.pivot(index="context", columns="name", values="effect")
        way = _mean(edits.drop_duplicates("context")["way"])
        shares = {row["name"]: pooled(row).record() for row in summarise(edits, ["name"]).to_dict("records")}
        records.append(
            dict(zip(SITE, site, strict=True))
            | {
                "way": way,
                # Where the two runs hardly differ, a share of their difference is no number.
                "share": shares if estimate_of(way).above() else None,
                "moved": {name: _mean(moved[name]) for name in moved.columns},
                "beyond": _mean(moved[LEACE] - moved[RANDOM]),
            }
        )
    return records


def _doses(measured: Any) -> list[Record]:
    """By kind, edit and strength: margin lost (erasing), share of the way (exchanging), each at the half's own
    place."""
    pairs = measured.assign(pair=measured["context"], cluster=measured["context"])
    records = []
    for (kind, name, strength), edits in pairs.groupby(["kind", "name", "strength"], sort=False):
        if kind == ERASE:
            value = _mean(edits["lost"])
        else:
            value = pooled(summarise(edits, ["name"]).to_dict("records")[0]).record()
        records.append({"kind": kind, "name": name, "strength": float(strength), "value": value})
    return records


def _probes(checked: Any) -> list[Record]:
    """Accuracy per digit over all layers, and by layer, by place, part, probe and state of the features."""
    records = []
    for (place, part, probe, state), rows in checked.groupby(["place", "part", "probe", "state"], sort=False):
        layers = rows.groupby("layer")["accuracy"].mean()
        records.append(
            {"place": place, "part": part, "probe": probe, "state": state}
            | {"accuracy": _accuracy(rows.groupby("context")["accuracy"].mean())}
            | {"layers": layers.tolist()}
        )
    return records


def _accuracy(values: Any) -> Record:
    """A mean of what probes read of each conversation, trained on others."""
    own = np.asarray(values, dtype=float)
    return held_out(own, np.arange(len(own)), SHARE).record()


def _size(erasers: tuple[Erasers, Erasers]) -> list[Record]:
    """Mean rank and mean share of the variance that is moved, by place, part and edit; and of how many dimensions."""
    records = []
    for place in PLACES:
        for part in PARTS:
            for name in (LEACE, f"{RANDOM} 0", INLP):
                own = [half[place, role, part, name] for half in erasers for role in roles(place)]
                records.append(
                    {"place": place, "part": part, "name": name, "of": own[0].mean.shape[-1]}
                    | {"rank": float(np.mean([float(each.rank.double().mean()) for each in own]))}
                    | {"share": float(np.mean([float(each.share.mean()) for each in own]))}
                )
    return records


def _controls(effects: Any) -> Record:
    """What must be nothing, and what must be everything, in logits."""
    controls = effects[effects["kind"] == CONTROL]
    itself, donor = (controls[controls["name"] == name] for name in (ITSELF, DONOR))
    return {
        "itself": float((itself["difference"] - itself["intact_difference"]).abs().max()),
        "donor": float((donor["difference"] - donor["donor_difference"]).abs().max()),
        "largest": float(effects[["intact_difference", "donor_difference"]].abs().to_numpy().max()),
    }
