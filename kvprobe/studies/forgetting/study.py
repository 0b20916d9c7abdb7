"""The forgetting study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.lines import Style
from kvprobe.studies.forgetting import Config
from kvprobe.studies.forgetting.collect import collect
from kvprobe.studies.forgetting.conclude import conclude
from kvprobe.studies.forgetting.frontier import Frontier
from kvprobe.studies.forgetting.ways import ALL, ERASED, MATCHED, OTHER, PLACED, RESTART
from kvprobe.wording import formatted, percent, plain, points

KIND_STYLES = {
    "code": Style("#0072b2", "s"),
    "name": Style("#d55e00", "^"),
    "instruction": Style("#009e73", "D"),
    "steps": Style("#7f7f7f", "o"),
}


def way_label(way: object) -> str:
    """How a way is called."""
    name = str(way)
    if name == ALL:
        return "other text, all after it read again"
    if name.startswith(MATCHED):
        return f"{name.removeprefix(MATCHED).strip()} fitted slots in its place"
    if name.startswith(ERASED):
        return f"{name.removeprefix(ERASED).strip()} trained slots in its place"
    if name.startswith(OTHER):
        slots = name.removeprefix(OTHER).strip()
        return f"other text, {slots} slots read again" if slots else "other text in its place"
    return {
        "nothing": "nothing is done",
        "mask": "masked",
        "evict": "evicted",
        "re-index": "evicted, gap closed",
        "zero values": "V set to zero",
        "steer": "V steered to other text",
        "erratum": "a request to forget it",
        PLACED: "restart in place",
        RESTART: "restart",
    }.get(name, name)


STUDY = Study(
    name="forgetting",
    title="What ways to forget leave, cost and break",
    question=(
        "A user's message is taken out of a running session, in each of the ways that engines and papers have. What of "
        "it can still be read, found and used, how much has the model to read again, and what else changes?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Frontier(),
        Dots(
            file="kinds",
            caption="The same by what must go, with 95 % intervals over conversations. Left: bits that a probe reads "
            "that knows the conversation, as a share of the secret's. Right: what exchanging the cache for that of "
            "another secret takes from the secret as an answer.",
            panels=(
                Panel(finding="bits_by_kind", down="way", line="kind", styles=KIND_STYLES, label="share of the bits"),
                Panel(finding="use_by_kind", down="way", line="kind", styles=KIND_STYLES, label="nats"),
            ),
        ),
    ),
    claims=(
        Claim(
            "use",
            above="the model still leans to the secret",
            below="the model leans away from the secret",
            unclear="the model is not shown to lean to the secret or away",
        ),
        Claim(
            "beyond",
            above="more can be read than from behind a mask",
            below="less can be read than from behind a mask",
            unclear="it is not shown that more or less can be read than from behind a mask",
        ),
    ),
    labels={
        "n": "{} conversations".format,
        "way": way_label,
        "kind": {"name": "person's name", "instruction": "instructions", "steps": "wrong steps"},
    },
    written={
        **dict.fromkeys(
            (
                "read",
                "read_by_kind",
                "bits",
                "bits_by_kind",
                "whole",
                "tried",
                "chance",
                "chance_by_kind",
                "chance_tried",
                "said",
                "said_by_kind",
                "same",
                "decided",
                "used",
                "cost",
                "computation",
                "duration",
            ),
            percent,
        ),
        "beyond": points,
        "chance_whole": formatted(".2g"),
        **dict.fromkeys(("use", "use_by_kind"), formatted("+.2f")),
        **dict.fromkeys(("kl", "restarted", "moved"), lambda number: plain(number, 4)),
        "cosine": formatted(".4f"),
        **dict.fromkeys(("tokens", "flops"), formatted(".1f")),
        "time": formatted(".2f"),
    },
)
