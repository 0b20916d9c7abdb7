"""The study of wrong answers in code: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.lines import Style
from kvprobe.stats import Estimate
from kvprobe.studies.code_poisoning import Config
from kvprobe.studies.code_poisoning.answers import FIXES
from kvprobe.studies.code_poisoning.collect import collect, inputs
from kvprobe.studies.code_poisoning.conclude import conclude
from kvprobe.studies.code_poisoning.noticing import HASH, TEXT
from kvprobe.wording import percent, plain, points

DRAFTS = {
    "own wrong": Style("#d55e00", "s"),
    "planted": Style("#cc79a7", "D"),
    "own right": Style("#0072b2"),
    "sound": Style("#56b4e9", "^"),
}
READERS = {
    "residual": Style("#d55e00", "s"),
    "K": Style("#0072b2"),
    "V": Style("#009e73", "D"),
    TEXT: Style("#7f7f7f", "^"),
    HASH: Style("#000000", "v"),
}


def lost(value: Estimate) -> str:
    """Points that are lost, so that a plus would confuse."""
    return points(value).replace("+", "")


def helps(finding: str) -> Claim:
    return Claim(finding, above="helps", below="harms", unclear="does not detectably help")


STUDY = Study(
    name="code_poisoning",
    title="What is left of a wrong answer in code",
    question=(
        "A model has answered a little task in code, and the answer is wrong. Does a review mend it, do the tests, or "
        "a new conversation? Are fixes fixes? Does the model see the wrong line, and what does each way cost?"
    ),
    config=Config,
    collect=collect,
    inputs=inputs,
    conclude=conclude,
    figures=(
        Dots(
            "code_poisoning",
            "a: right answers by what is done after a first answer. b: what fixes are, where the model was asked to "
            "review a wrong answer and fix it. c: right and wrong solutions of templates never seen, as a probe "
            "distinguishes them; dashed: chance. 95 % intervals over templates.",
            (
                Panel(finding="right", down="arm", line="draft", styles=DRAFTS, label="right answers"),
                Panel(
                    finding="fix",
                    down="fix",
                    line="draft",
                    styles={kind: DRAFTS[kind] for kind in ("own wrong", "planted")},
                    label="share of fixes",
                    where={"arm": "review"},
                ),
                Panel(
                    finding="read",
                    down="place",
                    line="reader",
                    styles=READERS,
                    label="distinguished",
                    level=("chance", "chance", {}),
                ),
            ),
        ),
    ),
    claims=(
        Claim(
            "poisons",
            above="lowers the share of right answers",
            below="raises the share of right answers",
            unclear="does not detectably change the share of right answers",
        ),
        Claim(
            "spreads",
            above="makes errors in another function likelier",
            below="makes errors in another function less likely",
            unclear="does not detectably make errors in another function likelier",
        ),
        *map(helps, ("restart", "warned", "handed", "masked", "cleared", "builds")),
        Claim(
            "outdoes",
            above="ends rightly more often",
            below="ends rightly less often",
            unclear="ends rightly not detectably more often",
        ),
        Claim(
            "left",
            above="leaves most wrong answers wrong",
            below="mends most wrong answers",
            unclear="mends about half of the wrong answers; more is not known",
            against=0.5,
        ),
        Claim(
            "breaks",
            above="breaks some right answers",
            below="breaks none",
            unclear="breaks no right answers detectably",
        ),
        Claim(
            "suspects",
            above="suspects a bug more often where there is one",
            below="suspects a bug less often where there is one",
            unclear="does not detectably suspect a bug more often where there is one",
        ),
        Claim(
            "seen",
            above="tells a wrong line from a right one",
            below="tells a wrong line from a right one worse than chance",
            unclear="does not detectably tell a wrong line from a right one",
            against=0.5,
        ),
        Claim(
            "beyond",
            above="reads more than the tokens of the line give",
            below="reads less than the tokens of the line give",
            unclear="does not detectably read more than the tokens of the line give",
        ),
        Claim("costs", above="takes more tokens", below="takes fewer tokens", unclear="takes about as many tokens"),
    ),
    labels={
        "n": "{} templates".format,
        "draft": {
            "own wrong": "own wrong answer",
            "own right": "own right answer",
            "planted": "planted bug",
            "sound": "the same without it",
        },
        "arm": {
            "review": "review and fix",
            "critique": "critique, then fix",
            "failing": "the tests fail",
            "warned": "fresh session, warned",
            "fresh": "fresh session",
            "masked": "reviewed, the part masked",
            "recomputed": "reviewed, never read it",
            "other's": "as another's, reviewed",
            "next": "another function",
        },
        "fix": FIXES,
        "place": {"before": "line before", "at": "wrong line", "after": "end of the answer"},
        "reader": {"residual": "residual stream", TEXT: "tokens of the line", HASH: "control labels, residual"},
        "asked": {"own": "of its own", "other's": "of another's"},
        "route": {
            "single": "one answer",
            "loop": "mended in the conversation",
            "restarts": "mended in new ones",
            "steps": "built from a step",
        },
        "how": {"likeliest": "the likeliest", "drawn": "drawn"},
    },
    written={
        **dict.fromkeys(
            ("restart", "warned", "handed", "masked", "cleared", "builds", "outdoes", "suspects", "beyond"), points
        ),
        **dict.fromkeys(("poisons", "spreads"), lost),
        **dict.fromkeys(
            ("right", "code", "first", "fix", "left", "breaks", "suspicion", "arrives", "seen", "read", "chance"),
            percent,
        ),
        "tokens": lambda value: plain(value, 0),
        "seconds": lambda value: plain(value, 2),
        "bytes": lambda value: plain(value, 0),
    },
)
