"""What the features report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.probing.intervals import LEVEL
from kvprobe.report.document import Figure, Report, Section, Table, TokenView, passages_of
from kvprobe.stats import Estimate
from kvprobe.studies.features.analyse import ARMS, FLIPS, PARTS
from kvprobe.studies.features.collect import HIDDEN_SEGMENTS, READERS, RESTARTED, SPLICED
from kvprobe.studies.features.config import Config
from kvprobe.studies.features.figures import ARM_NAMES, READER_NAMES, SET_NAMES, curves_file
from kvprobe.tasks.passcode import contexts, conversation
from kvprobe.wording import estimate_of, few_clusters, percent, plain, points

QUESTION = (
    "A turn that holds a random number is summarised without it and then masked. In terms of sparse features: which "
    "latents differ between the cache that saw the turn and one recomputed without it, on the same text; do single "
    "latents tell the number better than single dimensions do; and do the latents that differ matter to the answer?"
)
_ROUND_OFF = 100
"""Steps of the dtype's precision that a control may vary by."""


def narrate(
    metrics: Mapping[str, Any],
    curves: Any,
    config: Config,
    model: Model,
    environment: Mapping[str, Any],
    views: Mapping[str, Sequence[TokenView]],
) -> Report:
    """The report of a run.

    Args:
        views: by place, the texts of the latents that are shown.
    """
    return Report(
        title=f"Sparse features after masking: {model.name}",
        question=QUESTION,
        answer=f"{answer_differs(metrics)} {answer_tells(curves, metrics)}",
        warnings=warnings(metrics),
        sections=[
            _read_section(config),
            _quality_section(metrics, config),
            _difference_section(metrics),
            *(_latents_section(place, metrics, views[place]) for place in metrics["places"]),
            _decoding_section(metrics, curves),
            _exchange_section(metrics),
            Section(title="Controls", points=[text for text, _ in controls(metrics)]),
            _limits_section(metrics, model, config),
            reproduce_section(
                "features",
                config,
                environment,
                also=[
                    "Data: samples.parquet (quality), differences.parquet, curves.parquet, exchanges.parquet and "
                    "metrics.json beside this page"
                    + ("; the dictionaries are in dictionaries/." if config.trains else "."),
                    "k-sparse probing: Gurnee et al. 2023 (arXiv 2305.01610). TopK: arXiv 2406.04093; JumpReLU: arXiv "
                    "2407.14435.",
                ],
            ),
        ],
    )


def answer_differs(metrics: Mapping[str, Any]) -> str:
    """How many latents of the first place differ in T3, beside raw dimensions, and whether those that differ most
    matter most."""
    place = metrics["places"][0]
    counts, entry = metrics["differing"][place]["T3"], metrics["exchange"][place]
    apart = estimate_of(entry["claim"])
    verb = (
        "too few conversations to say whether more than random ones"
        if not apart.has_interval
        else "more than random ones"
        if apart.above()
        else "less than random ones"
        if apart.below()
        else "not significantly more or less than random ones"
    )
    return (
        f"At {place}, {counts['latents']['claimed']} of {counts['latents']['alive']} latents "
        f"({counts['raw']['claimed']} of {counts['raw']['alive']} raw dimensions) differ in T3 between the retained "
        f"and the recomputed cache, and the {metrics['exchanged']} that differ most on other conversations carry "
        f"{percent(estimate_of(entry['sets']['differing']))} of the distance between the predictions, {verb} (the "
        f"whole activation {percent(estimate_of(entry['sets']['whole']))})."
    )


def answer_tells(curves: Any, metrics: Mapping[str, Any]) -> str:
    """Whether one latent tells a digit better than one raw dimension, where the label is to be read at all."""
    claims = {
        name: {place: estimate_of(own) for place, own in metrics["claims"][name].items()} for name in ("single", "read")
    }
    better, worse = [], []
    for place, apart in claims["single"].items():
        latents, raw = (best_single(curves, place, "hidden", "paired", reader) for reader in ("latents", "raw"))
        told = f"{place} ({percent(latents)} against {percent(raw)})"
        better += [told] * apart.above()
        worse += [told] * apart.below()
    told = [f"{word} at {', '.join(each)}" for word, each in (("better", better), ("worse", worse)) if each]
    single = "In T2 itself the best single latent"
    if not any(each.has_interval for each in claims["single"].values()):
        found = [f"{single} and the best single dimension cannot be compared over so few conversations"]
    elif told:
        found = [f"{single} tells a digit {' and '.join(told)} than the best single dimension"]
    else:
        found = [f"{single} does not tell a digit significantly better or worse than the best single dimension"]
    parts = [best(curves, metrics["places"][0], "hidden", "paired", part) for part in PARTS]
    found.append(
        f"at {metrics['places'][0]} a probe reads {percent(parts[0])} of the digits from all of the reconstruction and "
        f"{percent(parts[1])} from what it leaves out"
    )
    read = claims["read"].values()
    if any(each.has_interval for each in read):
        verb = "read" if any(each.above() for each in read) else "are not significantly read"
        found.append(f"in conversations that the probe has not seen, T3's latents {verb} above the recomputed floor")
    return f"{'; '.join(found)}."


def best_single(curves: Any, place: str, arm: str, split: str, reader: str) -> Estimate:
    """Accuracy of the one column that the training part chose."""
    return _at(curves, place, arm, split, reader, 1)


def best(curves: Any, place: str, arm: str, split: str, reader: str) -> Estimate:
    """Accuracy from all columns."""
    own = _own(curves, place, arm, split, reader)
    return _at(curves, place, arm, split, reader, int(own["k"].max()))


def _own(curves: Any, place: str, arm: str, split: str, reader: str) -> Any:
    chosen = {"place": place, "arm": arm, "split": split, "reader": reader}
    own = curves
    for name, value in chosen.items():
        own = own[own[name] == value]
    return own


def _at(curves: Any, place: str, arm: str, split: str, reader: str, k: int) -> Estimate:
    own = _own(curves, place, arm, split, reader)
    (row,) = own[own["k"] == k].to_dict("records")
    return Estimate(row["accuracy"], row["low"], row["high"])


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    if few := few_clusters(metrics["contexts"], "conversations"):
        found.append(few)
    for place in metrics["places"]:
        judged = metrics["quality"][place]
        if judged["recovered"]["mean"] < 0.5:
            found.append(
                f"The dictionary of {place} brings back only {percent(estimate_of(judged['recovered']))} of what the "
                "mean activation costs: what it does not see, this report does not see."
            )
    if failed := [text for text, holds in controls(metrics) if not holds]:
        found.append(f"A control does not hold, doubt this run: {failed[0]}")
    return found


def controls(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each control in words, and whether it holds."""
    slack = _ROUND_OFF * metrics["precision"]
    found = []
    for place in metrics["places"]:
        off = metrics["untouched"][place]
        found.append(
            (
                f"Light cone, {place}: the system message stands before everything that is hidden, so that nothing may "
                f"differ there. It differs by {off:.1e} of its size (allowed for round-off: {slack:.1e}).",
                off <= slack,
            )
        )
        judged = metrics["quality"][place]
        turned, own = (estimate_of(judged[name]) for name in ("unexplained_turned", "unexplained"))
        holds = own.high < turned.low if own.has_interval else own.mean < turned.mean
        found.append(
            (
                f"Turned dictionary, {place}: turned at random, it leaves {percent(turned)} of the variance "
                f"unexplained; as trained, {percent(own)}.",
                holds,
            )
        )
    return found


def _read_section(config: Config) -> Section:
    context = contexts()[0]
    code = "48213"
    passages = passages_of(conversation(context, code), masked=HIDDEN_SEGMENTS, marked=code, only_in=("T2", "T3"))
    return Section(
        title="What is read",
        paragraphs=[
            f"One of {config.contexts} hand-written conversations, each with {config.codes} random codes. Retained: T1 "
            "and T2 are masked when T3 begins, but summary 2 was computed while T2 was in view. Restart: the same "
            "tokens at the same positions, computed afresh without T1 and T2.",
        ],
        passages=passages,
    )


def _quality_section(metrics: Mapping[str, Any], config: Config) -> Section:
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


def _difference_section(metrics: Mapping[str, Any]) -> Section:
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


def _latents_section(place: str, metrics: Mapping[str, Any], views: Sequence[TokenView]) -> Section:
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


def _decoding_section(metrics: Mapping[str, Any], curves: Any) -> Section:
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


def _exchange_section(metrics: Mapping[str, Any]) -> Section:
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


def _limits_section(metrics: Mapping[str, Any], model: Model, config: Config) -> Section:
    trained = [entry.get("kvprobe_tokens") for entry in metrics["trained_on"]]
    recorded = [entry.get("kvprobe_recorded") for entry in metrics["trained_on"]]
    size: Sequence[str] = (
        [
            f"Dictionaries published for research see 10⁸ tokens and more; these saw {max(map(int, recorded)):,}, "
            f"again and again ({max(map(int, trained)):,} in all), of a narrow distribution. What they lack is no "
            "evidence that the model lacks it.",
        ]
        if all(trained) and all(recorded)
        else ["What the dictionaries were trained on is what their own cards say."]
    )
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what its features do says nothing of "
            "larger ones.",
            *size,
            "Unless the model was trained to go on from masked turns, a retained cache is out of distribution for it. "
            "There is no arm with an irrelevant masked block, so a latent that differs may tell of masking as such.",
            "Means over slots hide where in a segment a latent differs.",
            f"One dictionary for each place, one seed; losses were measured on {min(SPLICED, config.contexts)} "
            "conversations.",
            "Other seeds give other latents (their numbers mean nothing), and features that dictionaries agree on may "
            "be few.",
        ],
    )
