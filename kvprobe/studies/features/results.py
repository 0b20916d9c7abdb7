"""The sections of the features report that hold its results: how good the dictionaries are, which latents differ, how
well the code is read from them, and whether they matter."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.probing.intervals import LEVEL
from kvprobe.report.document import Figure, Section, Table, TokenView
from kvprobe.stats import Estimate
from kvprobe.studies.features.analyse import ARMS, FLIPS, PARTS
from kvprobe.studies.features.collect import READERS, RESTARTED
from kvprobe.studies.features.config import Config
from kvprobe.studies.features.figures import ARM_NAMES, READER_NAMES, SET_NAMES, curves_file
from kvprobe.wording import estimate_of, percent, plain, points


def quality_section(metrics: Mapping[str, Any], config: Config) -> Section:
    rows, losses = [], []
    for place in metrics["places"]:
        judged = metrics["quality"][place]
        loss = judged["loss"]
        rows.append(
            [
                place,
                f"{judged['width']:,}",
                f"{judged['active']:.1f}",
                str(judged["dead"]),
                percent(estimate_of(judged["unexplained"])),
                percent(estimate_of(judged["unexplained_turned"])),
            ]
        )
        losses.append(
            [
                place,
                plain(estimate_of(loss["clean"])),
                plain(estimate_of(judged["loss_added"]), 3),
                *(f"{loss[name]['mean'] - loss['clean']['mean']:+.3f}" for name in ("mean", "zero")),
                *(f"{judged['kl'][name]['mean']:.3f}" for name in ("spliced", "mean")),
                percent(estimate_of(judged["recovered"])),
            ]
        )
    texts = metrics["quality"][metrics["places"][0]]
    source = (
        "They were trained by this run on hand-written conversations of other tasks and on texts that the model wrote "
        "itself, a narrow distribution; none of the conversations below was among them."
        if config.trains
        else f"They were loaded: {', '.join(config.dictionaries)}."
    )
    return Section(
        title="How good the dictionaries are",
        paragraphs=[
            f"A sparse autoencoder writes each token's activation as a sum of a few of many latents. {source} K is "
            "read before it is turned by its position, V and K with the KV heads side by side; the first slot, an "
            "attention sink, is left alone.",
        ],
        tables=[
            Table(
                columns=["place", "latents", "active", "silent", "unexplained", "unexplained if turned"],
                rows=rows,
                caption=f"On {texts['texts']} conversations with everything in view. Active: latents of a token. "
                "Silent: latents that are active in no token. Unexplained: share of the variance about the mean; if "
                "turned: by the dictionary turned at random.",
            ),
            Table(
                columns=[
                    "place",
                    "loss",
                    "spliced adds",
                    "mean adds",
                    "zero adds",
                    "KL spliced",
                    "KL mean",
                    "KL recovered",
                ],
                rows=losses,
                caption=f"On {texts['spliced_texts']} of them, in nats a token. Spliced: the model reads on from the "
                "reconstruction, for K and V from a cache that holds it; mean, zero: from the mean activation, from "
                "zeros. KL: from the clean predictions. Recovered: the share of the KL of the mean activation that the "
                "reconstruction does not make.",
            ),
        ],
        figures=[Figure("densities", "In how many tokens each latent is active.")],
    )


def difference_section(metrics: Mapping[str, Any]) -> Section:
    rows = []
    for place in metrics["places"]:
        for segment in RESTARTED:
            counts = metrics["differing"][place][segment]
            rows.append(
                [
                    place,
                    segment,
                    *(f"{counts[reader]['differ']} of {counts[reader]['alive']}" for reader in READERS),
                    " / ".join(str(counts[reader]["half"]) for reader in READERS),
                ]
            )
    return Section(
        title="Which latents differ",
        paragraphs=[
            "Each latent's mean over the segment's slots, retained less restart, paired within conversations and "
            "averaged over their codes. A latent differs where the p-value of its mean difference, corrected for all "
            f"latents of its dictionary, is at most {LEVEL:g} ({FLIPS:,} sign flips of whole conversations, step-down "
            "maximum). The answer counts those that differ at a stricter level, which it shares with all that it "
            "claims. What differs is everything that came of T1 and T2, not of the code alone.",
        ],
        tables=[
            Table(
                columns=["place", "segment", *(READER_NAMES[reader] for reader in READERS), "hold half"],
                rows=rows,
                caption="Columns that differ, of those that are not always zero; and how few latents / raw dimensions "
                "/ turned latents hold half of the squared mean difference. Where turned latents differ as often and "
                "need as many, the dictionary has not found what the difference is made of.",
            )
        ],
        figures=[Figure("differences", "Mean activation of each latent in both arms.")],
    )


def latents_section(place: str, metrics: Mapping[str, Any], views: Sequence[TokenView]) -> Section:
    shown = metrics["shown"][place]
    tables = []
    for segment in RESTARTED:
        rows = [
            [
                str(int(row["latent"])),
                f"{100 * row['density']:.2g} %",
                f"{row['retained']:.3g}",
                f"{row['restart']:.3g}",
                f"{row['difference']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})",
                f"{row['p_family']:.4f}",
                row["words"],
            ]
            for row in shown
            if row["why"] == segment
        ]
        columns = ["latent", "density", "retained", "restart", "difference", "p", "most active at"]
        tables.append(
            Table(columns, rows, f"{ARM_NAMES[segment]}: the latents that differ most; p corrected for all latents.")
        )
    rows = [
        [str(int(row["latent"])), f"{100 * row['density']:.2g} %", f"{100 * row['eta']:.1f} %", row["words"]]
        for row in shown
        if row["why"] == "digits"
    ]
    tables.append(
        Table(
            ["latent", "density", "variance between digits", "most active at"],
            rows,
            "T2 itself, after the code: the latents of whose variance within conversations most lies between digits "
            "(mean over five places; looked for in all conversations, so a description and no test).",
        )
    )
    return Section(
        title=f"What the latents of {place} stand for",
        paragraphs=[
            "As far as the recorded texts tell: the tokens at which each latent is most active, one of each text. A "
            "name that one gives a latent after reading these is a guess."
        ],
        tables=tables,
        views=views,
    )


def decoding_section(metrics: Mapping[str, Any], curves: Any) -> Section:
    one, every = [], []
    for place in metrics["places"]:
        for arm in ARMS:
            for split in ("leave-context-out", "paired"):
                singles = [percent(best_single(curves, place, arm, split, reader)) for reader in READERS]
                one.append([place, ARM_NAMES[arm], split, *singles])
                wholes = [percent(best(curves, place, arm, split, reader)) for reader in ("raw", *PARTS)]
                every.append([place, ARM_NAMES[arm], split, *wholes])
    return Section(
        title="Which latents tell the code",
        paragraphs=[
            "Ridge probes classify each digit from the k latents, or raw dimensions, of largest η² in the training "
            "part. If the dictionary had found a feature for the digit, few latents would tell what takes many "
            "dimensions. What it has not found may be in what it leaves out: so all dimensions of the reconstruction "
            f"are read too, and of the raw activation less the reconstruction. Chance is {metrics['chance']:.0%}; "
            f"{metrics['samples']} samples in {metrics['contexts']} conversations.",
        ],
        tables=[
            Table(
                columns=["place", "slots", "split", *(READER_NAMES[reader] for reader in READERS)],
                rows=one,
                caption="Accuracy per digit from the best one, chosen in the training part, with 95 % intervals over "
                "conversations. The answer compares two readings by the difference of each conversation.",
            ),
            Table(
                columns=["place", "slots", "split", "raw", "reconstruction", "what it leaves out"],
                rows=every,
                caption="Accuracy per digit from all dimensions.",
            ),
        ],
        figures=[
            Figure(curves_file(place), f"{place}: accuracy per digit by the number of latents or dimensions.")
            for place in metrics["places"]
        ],
    )


def best_single(curves: Any, place: str, arm: str, split: str, reader: str) -> Estimate:
    """Accuracy of the one column that the training part chose."""
    return _at(curves, place, arm, split, reader, 1)


def best(curves: Any, place: str, arm: str, split: str, reader: str) -> Estimate:
    """Accuracy from all columns."""
    own = _own(curves, place, arm, split, reader)
    return _at(curves, place, arm, split, reader, int(own["k"].max()))


def _at(curves: Any, place: str, arm: str, split: str, reader: str, k: int) -> Estimate:
    own = _own(curves, place, arm, split, reader)
    (row,) = own[own["k"] == k].to_dict("records")
    return Estimate(row["accuracy"], row["low"], row["high"])


def _own(curves: Any, place: str, arm: str, split: str, reader: str) -> Any:
    chosen = {"place": place, "arm": arm, "split": split, "reader": reader}
    own = curves
    for name, value in chosen.items():
        own = own[own[name] == value]
    return own


def exchange_section(metrics: Mapping[str, Any]) -> Section:
    rows = [
        [
            place,
            plain(estimate_of(entry["kl"])),
            *(percent(estimate_of(entry["sets"][name])) for name in SET_NAMES),
            points(estimate_of(entry["differing_less_random"])),
        ]
        for place, entry in metrics["exchange"].items()
    ]
    return Section(
        title="Whether they matter",
        paragraphs=[
            "T3 is read in the retained arm with some latents moved to what they are, slot by slot, in the restart "
            "arm. The share of the KL (from the restart arm's predictions after each slot of T3) that goes away tells "
            "how much of the difference passes through them. The whole activation at the place is the most that can "
            "pass there; the rest comes through other layers, which still attend to the retained summaries. Sets were "
            f"found on half of the conversations and are tried on the other half; {metrics['exchanged']} latents to a "
            "set.",
        ],
        tables=[
            Table(
                columns=["place", "KL (nats)", *SET_NAMES.values(), "differing less random"],
                rows=rows,
                caption="Share of the KL that goes away, with 95 % intervals; below zero the exchange adds to it.",
            )
        ],
        figures=[Figure("exchange", "The same; bars are 95 % intervals.")],
    )
