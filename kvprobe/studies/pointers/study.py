"""The pointers study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.pointers import Config
from kvprobe.studies.pointers.cases import FORMS
from kvprobe.studies.pointers.collect import LATE, RESTART, STAND_IN, VIEW, collect
from kvprobe.studies.pointers.conclude import conclude
from kvprobe.wording import formatted, percent, points

PART_LOOKS = {"K": Style("#e69f00"), "V": Style("#009e73", "s"), "KV": Style("#000000", "D")}


def exchanged(file: str, name: str, donor: str) -> Lines:
    """How far an exchange with a donor turns the answer."""
    return Lines(
        file=file,
        finding=f"{name}_at",
        x="band",
        x_label="layers exchanged",
        y_label="turned (share of the way)",
        line="part",
        panel="form",
        where={"form": FORMS},
        styles=PART_LOOKS,
        rules={0.0: "", 1.0: ""},
        caption=f"How far the answer turns when the pointer's slots are those of the conversation {donor}: 0 not at "
        "all, 1 as far as the other answer. Bars: 95 % intervals over conversations.",
    )


STUDY = Study(
    name="pointers",
    title="Pointers",
    question=(
        "A turn points to a person whom an earlier turn has named. Do its slots hold an address, which leads nowhere "
        "once that turn is hidden, or whom it means, or neither?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        exchanged("address", "address", "whose list is in another order (address)"),
        exchanged("content", "content", "whose people have changed places (content)"),
        Lines(
            file="mass",
            finding="mass",
            x="layer",
            line="form",
            where={"form": FORMS},
            y_label="attention on the list",
            curves=True,
            caption="Attention of the last token before the answer to the list in view, mean over heads: what dangles "
            "when it is hidden.",
        ),
    ),
    claims=(
        Claim(
            "address",
            above="holds an address",
            below="holds the opposite of an address",
            unclear="holds no address that was detected",
        ),
        Claim(
            "position",
            above="turns the answer",
            below="turns the answer the other way",
            unclear="was not seen to turn the answer",
        ),
        Claim(
            "content",
            above="holds whom it means",
            below="holds the opposite of whom it means",
            unclear="holds nothing that was detected of whom it means",
        ),
        Claim(
            "lost",
            above="hiding the list then costs right answers",
            below="hiding the list then gives right answers",
            unclear="no cost of hiding the list was detected",
        ),
        Claim(
            "kept",
            above="the hidden list still leans the answer to the right one",
            below="the hidden list leans the answer to the wrong one",
            unclear="nothing of the hidden list was detected in the answer",
        ),
    ),
    labels={
        "n": "{} cases".format,
        "arm": {
            VIEW: "list in view",
            LATE: "hidden after the pointer",
            RESTART: "hidden before the pointer",
            STAND_IN: "hidden, pointer of the renamed conversation",
        },
    },
    written={
        **dict.fromkeys(
            ("right", "address", "position", "content", "address_at", "content_at", "looked", "mass"), percent
        ),
        "lost": points,
        **dict.fromkeys(("margin", "kept"), formatted("+.2f")),
        "bits": formatted("+.3f"),
    },
)
