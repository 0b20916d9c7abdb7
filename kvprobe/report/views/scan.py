"""A scan as a page: the conversation, what each probe reads in each segment, and how reliable that is."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from kvprobe.files import write_whole
from kvprobe.probes.card import CARD_SPLITS, Card
from kvprobe.probes.page import ARMS, where
from kvprobe.probes.scan import LEAK, VERDICTS, Scan
from kvprobe.report.document import HeatMap, SeenPassage
from kvprobe.report.views.page import render
from kvprobe.wording import percent, points

TERMS = {
    "probe": "a linear classifier that reads one fact about a conversation from the model's state; the last table says "
    "which, where, and on what it was trained",
    "reads": "the class that the probe finds most likely, such as a digit or a topic",
    "probability": "how likely the probe finds that class, calibrated on conversations that it was not trained on",
    "restart": "the same visible text, read again by the model without the hidden messages, so that it cannot know "
    "them; the probability of the same class there, and under restart reads the class that is most likely there",
    "base rate": "how often the class occurred in training",
    "bits": "the logarithm, to base 2, of the probability over that in the restart: +1 is twice as likely",
    "needed": "the bits from which nine of ten readings were right in held-out conversations, so one leak in ten names "
    "a wrong class; – where no number of bits was enough",
    "distance": "how far the segment lies from the training data, in standard deviations of each feature, and the "
    "distance that 1 % of held-out conversations exceed",
    "promised": "how often the probe is right in conversations not used for training, by its card",
}
"""The columns of the page's tables."""


def save_scan(scan: Scan, path: str | Path) -> Path:
    """Write the page as one HTML file that needs no other."""
    return write_whole(path, scan_page(scan))


def scan_page(scan: Scan) -> str:
    """The page."""
    hidden, rows = ", ".join(scan.hidden), scan.df().to_dict("records")
    return render(
        "scan.html.j2",
        [_map(scan)],
        title=f"What can still be read of {hidden}",
        question=f"{scan.model} read the conversation with {hidden} visible up to the end of {scan.until}, and masked "
        "after it. What can published probes still read in the slots of each segment?",
        answer=scan.answer,
        passages=_passages(scan),
        segments={
            segment: [row for row in rows if row["segment"] == segment]
            for segment in dict.fromkeys(row["segment"] for row in rows)
        },
        named=named,
        model=Path(scan.model).name,
        terms=TERMS,
        when=_when,
        gain=_gain,
        cards=_cards(scan),
        splits=CARD_SPLITS,
        verdicts=VERDICTS,
        leak=LEAK,
    )


def scan_lines(scan: Scan) -> list[str]:
    """The same as lines of text, for a terminal."""
    rows = scan.df().to_dict("records")
    width = max(len(named(row)) for row in rows) + 4
    classes = max(len(row["reads"]) for row in rows) + 2
    lines = [
        f"{'':{width}}{'reads':{classes}}{'prob.':>7}{'restart':>9}{'base':>7}{'bits':>7}{'needed':>8}"
        f"{'distance':>10}{'promised':>10}  verdict"
    ]
    segment = None
    for row in rows:
        if row["segment"] != segment:
            segment = row["segment"]
            lines.append(f"{segment}, {_when(row)}")
        lines.append(
            f"  {named(row):{width - 2}}{row['reads']:{classes}}{row['probability']:7.1%}"
            f"{row['restart_probability']:9.1%}{row['base_rate']:7.1%}{row['bits']:+7.2f}{_gain(row['gain']):>8}"
            f"{row['distance']:10.2f}{row['promised']:10.0%}  {row['verdict']}"
        )
    lines += ["", "In conversations that were not used for training, by the probes' cards:"]
    lines += [f"  {name:{width - 2}}right in {promise(card)}" for name, card in scan.cards.items()]
    return [*lines, "", scan.answer]


def named(row: Mapping[Hashable, Any], model: str = "") -> str:
    """A probe and its place; without the model's name, which is on the page."""
    probe = row["probe"].removeprefix(f"{model}-")
    return f"{probe}, {row['place']}" if row["place"] else probe


def _gain(bits: float | None) -> str:
    """The bits that a leak needs, as text."""
    return "–" if bits is None or bits != bits else f"{bits:.2f}"


def _when(row: Mapping[Hashable, Any]) -> str:
    """In what state of the cache a segment was read."""
    return "read after the mask" if row["masked"] else "read with the hidden messages visible"


def promise(card: Card) -> str:
    """How often a card says that the probe is right in conversations not used for training, beside chance."""
    accuracy = card.measure("accuracy")
    assert accuracy is not None
    return f"{percent(accuracy)}; chance {100 * card.chance:.1f} %"


def _map(scan: Scan) -> HeatMap:
    """Bits by segment, and probe and place."""
    table = scan.df()
    columns = [
        named(row, Path(scan.model).name) for row in table.drop_duplicates(["probe", "place"]).to_dict("records")
    ]
    segments = list(dict.fromkeys(table["segment"]))
    values = table["bits"].to_numpy().reshape(len(segments), len(columns))
    return HeatMap(
        caption=f"Bits that {', '.join(scan.hidden)} adds to the class that is read: the logarithm of its probability "
        "divided by that in the restart. A value below what the probe needs (column needed, above) is not a leak.",
        rows=segments,
        columns=columns,
        values=values.tolist(),
        unit="bits",
        row_axis="segment",
        column_axis="probe",
    )


def _passages(scan: Scan) -> list[SeenPassage]:
    segments = scan.chat.segments
    until, first = segments.index(scan.until), min(map(segments.index, scan.hidden))
    passages = []
    for message in scan.chat.messages:
        place = segments.index(message.segment)
        masked = message.segment in scan.hidden
        note = "masked" if masked else "" if place < first else "saw it" if place <= until else "after the mask"
        passages.append(SeenPassage(message.segment, message.role, message.said, masked, note))
    return passages


def _cards(scan: Scan) -> list[list[str]]:
    """What the cards say, a row each."""
    rows = []
    for name, card in scan.cards.items():
        training, leak = card.training, card.measure("leak")
        accuracies = [card.measure("accuracy", split) for split in CARD_SPLITS]
        rows.append(
            [
                name,
                training.what,
                where(card.site),
                f"segment {training.segment}, {ARMS[training.arm]}",
                *("" if accuracy is None else percent(accuracy) for accuracy in accuracies),
                f"{100 * card.chance:.1f} %",
                "not measured" if leak is None else points(leak),
                "" if training.power is None else f"{100 * training.power:.0f} %",
            ]
        )
    return rows
