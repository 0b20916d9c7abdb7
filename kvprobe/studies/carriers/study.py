"""The carriers study: its declaration."""

from typing import Any

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.stats import Estimate
from kvprobe.studies.carriers import Config
from kvprobe.studies.carriers.collect import CODES, collect
from kvprobe.studies.carriers.conclude import BOTH, conclude
from kvprobe.studies.carriers.groups import KINDS
from kvprobe.wording import formatted, percent, points, signed, span

STYLES = {"K": Style("#0072b2"), "V": Style("#d55e00", "s"), "KV": Style("#000000", "D")}


def by(x: str, file: str, finding: str, line: str, caption: str, **more: Any) -> Lines:
    """A panel for each direction, along groups of slots or bands of layers."""
    known: dict[str, Any] = {"panel": "direction", "styles": STYLES, "rules": {0.0: "", 1.0: ""}, "size": (3.6, 3.3)}
    known |= {"x_label": "layers" if x == "band" else "", "y_label": "share of the KL between the two caches"}
    return Lines(x=x, file=file, finding=finding, line=line, caption=f"{caption} 95 % intervals.", **known | more)


def fine(share: Estimate) -> str:
    return f"{100 * share.mean:+.2f} % ({span(share, lambda end: f'{100 * end:+.2f}')})"


STUDY = Study(
    name="carriers",
    title="Carriers",
    question=(
        "A turn of a conversation was masked. The slots after it were computed while it was in view, and so the model "
        "does not go on as if that turn had never been said. Which of these slots carry its effect: the summary's "
        "text, the chat template's delimiters, later turns; at which layers, and in K or in V?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        by(
            "group",
            "shares",
            "share",
            "part",
            "Swaps at all layers, both questions together. Restoring: the retained cache's slots in the recomputed "
            "one; removing: the other way round.",
            where={"question": BOTH, "metric": "kl"},
        ),
        by(
            "band",
            "layers",
            "band_share",
            "part",
            "Every slot after the hidden turn swapped in one band of layers, both questions together.",
            where={"group": "all after"},
        ),
        by(
            "band",
            "kinds",
            "band_share",
            "group",
            "One kind of slot swapped in one band of layers, K and V, both questions together.",
            where={"part": "KV"},
            drawn=KINDS.__contains__,
        ),
        by(
            "group",
            "codes",
            "code_effect",
            "part",
            "Swaps for slots that have seen another code, at all layers.",
            y_label="moved towards the other code (logits)",
            rules={0.0: ""},
        ),
    ),
    claims=(
        Claim(
            "gap",
            above="significantly more than {second}",
            below="significantly less than {second}",
            unclear="not detectably more or less than {second}",
        ),
        Claim(
            "lead",
            above="significantly more than every other band",
            below="significantly less than another band",
            unclear="not detectably more than every other band",
        ),
        Claim(
            "code_masked",
            above="The slots also hold something of the code itself",
            below="The slots turn the answer away from the code",
            unclear="That the slots hold the code itself was not detected",
        ),
    ),
    labels={
        "n": "{} conversations".format,
        "question": {"hidden": "code in the hidden turn", "summary": "answer in the first summary", BOTH: "both"},
        "part": {"KV": "K and V"},
        "second": {"summary delimiters": "its delimiters"},
        "cache": {"full": "everything in view"},
        "direction": {CODES: "another code's slots swapped in"},
    },
    written={
        **dict.fromkeys(("share", "band_share", "foretold"), percent),
        **dict.fromkeys(("gap", "ahead", "lead"), points),
        **dict.fromkeys(("effect", "code_masked", "code_effect"), signed),
        "code_share": fine,
        "distance": formatted(".4f"),
    },
)
