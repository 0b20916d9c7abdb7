"""The sections of the bit-flip report that hold its results: flips by bit, where they do more, flips at a rate, and
examples."""

from collections.abc import Mapping
from typing import Any

from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.faults.scope import bands
from kvprobe.report.document import Figure, Section, Table
from kvprobe.studies.bitflips.analyse import CONTRASTS, MEASURES, tolerated
from kvprobe.studies.bitflips.collect import FIELDS
from kvprobe.studies.bitflips.figures import LINES, bit_maps, has_kl
from kvprobe.wording import estimate_of, percent, points, span, verdict


def bits_section(task: Mapping[str, Any], number: int) -> Section:
    ranked = task["too_hard"] is None
    kinds = ("nothing", "words", "breaks") if ranked else ("same", "different", "nonfinite")
    heads = list(kinds) if ranked else ["same answer", "another", "not finite"]

    def cells(each: Mapping[str, Any]) -> list[str]:
        shares = each["right"] if ranked else each
        return [
            *(percent(estimate_of(shares[kind])) for kind in kinds),
            f"{each['nonfinite_flips']} of {each['flips']}",
            shown_kl(each["kl"]),
        ]

    columns = [*heads, "NaN or infinity", "KL (nats)"]
    of = f"{task['right']} items whose clean answer is right" if ranked else f"all {task['items']} items"
    figures = [
        Figure(
            f"shares_by_bit_{number}",
            f"Over {of}. The sign is on the left, the lowest bit of the mantissa on the right; the same places are "
            "struck at each bit.",
        )
    ]
    if has_kl(task):
        figures.append(
            Figure(
                f"kl_by_bit_{number}",
                "Flips after which numbers were not finite have no KL and are counted above. A change too small to "
                "matter still moves what is computed by round-off; the KL of the lowest bits shows how much that is.",
            )
        )
    return Section(
        title=f"By bit: {task['task']}",
        paragraphs=[
            f"On a sound cache {percent(estimate_of(task['clean']))} of {task['items']} items are right "
            f"({task['scorer']}; guessing gives {100 * task['chance']:.3g} %). {task['too_hard'] or ''}".strip(),
            f"Shares are over {of}; NaN or infinity and KL over all items.",
        ],
        figures=figures,
        maps=bit_maps(task),
        tables=[
            Table(
                columns=["dtype", "field", *columns],
                rows=[
                    [dtype["dtype"], field, *cells(each)]
                    for dtype in task["dtypes"]
                    for field, each in [*dtype["fields"].items(), ("all", dtype["all"])]
                ],
                caption="One flip of a bit of this field, mean over its bits; 95 % intervals.",
            ),
            *(
                Table(
                    columns=["bit", "field", *columns],
                    rows=[[str(each["bit"]), each["field"], *cells(each)] for each in dtype["bits"][::-1]],
                    caption=f"One flip of each bit of {dtype['dtype']}; 95 % intervals.",
                )
                for dtype in task["dtypes"]
            ),
        ],
    )


def where_section(task: Mapping[str, Any], layers: int) -> Section:
    thirds = bands(layers, min(3, layers))
    first = task["dtypes"][0]
    measure = "breaks" if task["too_hard"] is None else "changed"
    told = [_verdict(first, name, measure) for name in CONTRASTS]
    rows = [
        [
            dtype["dtype"],
            CONTRASTS[name],
            *(points(estimate_of(held[measure])) if held[measure] else "–" for measure in MEASURES[:2]),
            shown_kl(held["kl"], sign=True),
        ]
        for dtype in task["dtypes"]
        for name, held in dtype["contrasts"].items()
    ]
    count = len(rows) * len(MEASURES)
    return Section(
        title=f"Where flips do more: {task['task']}",
        paragraphs=[
            f"In {first['dtype']}, by answers that {'break' if measure == 'breaks' else 'change'}: {'; '.join(told)}.",
            _distribution(first, measure),
            f"Fields and bits are compared at the same places. K and V, and layers {thirds[-1][0]} to {thirds[-1][-1]} "
            f"(late) and {thirds[0][0]} to {thirds[0][-1]} (early), are other flips of the same items, drawn at "
            f"random. These are {count} comparisons, each with its own 95 % interval"
            + ("; flips of one place in several dtypes are much alike." if len(task["dtypes"]) > 1 else "."),
        ],
        tables=[
            Table(
                columns=["dtype", "comparison", "breaks", "answers that changed", "KL (nats)"],
                rows=rows,
                caption="By how much the first exceeds the second, with 95 % intervals.",
            )
        ],
    )


def _distribution(dtype: Mapping[str, Any], measure: str) -> str:
    """What canarypwn expects of numbers out of distribution, and whether it was found."""
    gap = estimate_of(dtype["contrasts"]["top - rest"][measure])
    power = 2 ** (LAYOUTS[dtype["dtype"]].exponent - 1)
    if gap.above():
        found = f"This run agrees: it does more harm than the other exponent bits, by {points(gap)}."
    elif gap.below():
        found = f"This run disagrees: it does less harm than the other exponent bits, by {points(gap)}."
    else:
        found = f"That it does more harm than the other exponent bits was not detected: {points(gap)}."
    return (
        "Canarypwn expects a bit flip to be catastrophic if it gives activations out of distribution. The highest "
        f"exponent bit is the one that does: it multiplies numbers below 2 by 2^{power}, and divides larger ones by as "
        f"much. {found}"
    )


def _verdict(dtype: Mapping[str, Any], name: str, measure: str) -> str:
    held = dtype["contrasts"][name][measure]
    if held is None:
        return f"{CONTRASTS[name]}, no flips fell on both"
    gap = estimate_of(held)
    found = verdict(gap, "more", "fewer", "no difference was detected")
    return f"{CONTRASTS[name]}, {found}: {points(gap)}"


def rates_section(task: Mapping[str, Any], number: int) -> Section:
    ranked = task["too_hard"] is None
    numbers = task["numbers"]
    said = []
    if ranked:
        for field in FIELDS:
            bearable = tolerated(task, field)
            limit = f"up to {shown_rate(bearable)}" if bearable else "at no rate measured"
            said.append(f"{LINES[field][0]}, {limit}")
    columns = ["bits", "rate", "flips expected", "vectors struck", "items without a flip", "accuracy", "from clean"]
    return Section(
        title=f"Flips at a rate: {task['task']}",
        paragraphs=[
            f"The cache holds {numbers:,.0f} numbers on average when it is struck ({task['slots'] - 1:.0f} slots), "
            f"stored in {task['dtypes'][0]['dtype']}. "
            + (
                f"Rates up to which accuracy is nowhere significantly below clean: {'; '.join(said)}. "
                "Accuracy may still be lower: few items cannot show a small loss."
                if ranked
                else str(task["too_hard"])
            )
        ],
        figures=[
            Figure(
                f"damage_by_rate_{number}",
                "A row that is not finite counts as wrong. Lines are drawn side by side; 95 % intervals over items.",
            )
        ],
        tables=[
            Table(
                columns=[*columns, "answers that changed", "NaN or infinity", "KL (nats)"],
                rows=[
                    [
                        LINES[each["field"]][0],
                        _share(each),
                        _count(each),
                        f"{each['struck']:,.1f}",
                        f"{each['untouched']} of {task['items']}",
                        percent(estimate_of(each["accuracy"])),
                        points(estimate_of(each["from_clean"])),
                        percent(estimate_of(each["changed"])),
                        f"{each['nonfinite_rows']} of {task['items']}",
                        shown_kl(each["kl"]),
                    ]
                    for each in task["rates"]
                ],
                caption=f"Clean accuracy is {percent(estimate_of(task['clean']))}, that of guessing "
                f"{100 * task['chance']:.3g} %. Vectors struck: K or V of one head and slot with at least one flip, "
                "mean over items. KL leaves out what is not finite.",
            )
        ],
    )


def examples_section(task: Mapping[str, Any]) -> Section:
    return Section(
        title=f"What it says then: {task['task']}",
        tables=[
            Table(
                columns=["flip", "item", "clean", "struck", "reference", "still right"],
                rows=[
                    [
                        f"{each['dtype']}, bit {each['bit']} ({each['field']}), {each['part'].upper()} of layer "
                        f"{each['layer']}, KV head {each['head']}",
                        each["item"],
                        _short(each["clean_text"]),
                        _short(each["text"]),
                        _short(each["answer"]),
                        "yes" if each["right"] else "no",
                    ]
                    for each in task["examples"]
                ],
                caption="For each dtype and field, if there is one, an answer that differs while all numbers are "
                "finite: the first to break a right answer, else another.",
            )
        ],
    )


def shown_rate(each: Mapping[str, Any]) -> str:
    return f"{_share(each)} (about {_count(each)} flips)"


def _share(each: Mapping[str, Any]) -> str:
    return f"{each['rate']:.3g}".replace("e-0", "e-")


def _count(each: Mapping[str, Any]) -> str:
    expected = each["expected"]
    return f"{expected:,.0f}" if expected >= 100 else f"{expected:.2g}"


def shown_kl(value: Mapping[str, float] | None, sign: bool = False) -> str:
    if value is None:
        return "–"
    form = "{:+.1e}" if sign else "{:.1e}"
    known = estimate_of(value)
    return f"{form.format(known.mean)} ({span(known, form.format)})"


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
