"""The dangling study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.dangling import Config
from kvprobe.studies.dangling.collect import CLOSED, FULL, MASKED, RANDOM, SHARED, TOP, collect
from kvprobe.studies.dangling.conclude import PLACES, conclude
from kvprobe.tasks.ordinal import VERBS
from kvprobe.wording import count, formatted, percent, points

SAW, NOW = "what the summary saw", "what stands in the list now"
PLACE_LABELS = {
    "sink": "the first slot",
    "later": "the later turn",
    "local": "the question and reply",
    "elsewhere": "other slots",
}
PLACE_LOOKS = dict(zip(PLACES, (("#7f7f7f",), ("#009e73", "s"), ("#0072b2", "D"), ("#e69f00", "^")), strict=True))

STUDY = Study(
    name="dangling",
    title="Dangling attention",
    question=(
        "A turn is hidden after later turns have seen it, and then asked about. Where does the attention go that would "
        "have looked at it; which heads miss it; and does anything that is left point to it?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="went",
            finding="layer_gained",
            caption="The attention that each part of the cache gains when the turn is hidden, layer by layer, mean "
            "over heads; together they gain what was spent on the turn. Shaded: 95 % intervals over conversations.",
            x="layer",
            line="place",
            panel="arm",
            y_label="attention gained",
            styles={place: Style(*look) for place, look in PLACE_LOOKS.items()},
            curves=True,
        ),
        Lines(
            file="rescues",
            finding="rescued",
            caption="What the turn, in view of some KV heads, brings back. The heads were found on one half of the "
            "conversations and are given their view back on the other. 0: hidden from all heads; 1: in view of all. "
            "95 % intervals over conversations.",
            x="size",
            line="sort",
            panel="measure",
            x_label="KV heads that see the turn",
            y_label="share that comes back",
            styles={TOP: Style("#d55e00"), RANDOM: Style("#7f7f7f", "s")},
            rules={0.0: "", 1.0: ""},
            size=(3.4, 3.2),
        ),
        Lines(
            file="memos",
            finding="followed",
            caption="What the answers of ordinal follow, by what its summaries were trained to hold. Where nothing is "
            "crossed, what the summary saw is what stands there now. 95 % intervals over memos.",
            x="reference",
            line="follows",
            panel="memo",
            x_label="trained to hold",
            y_label="answers (share)",
            title="ordinal",
            styles={"payload": Style("#0072b2"), "pointer": Style("#d55e00", "s")},
            limits=(-0.03, 1.03),
        ),
    ),
    claims=(
        *(Claim(name, above="more", below="less", unclear="not detectably more") for name in ("lead", "gap")),
        Claim("beyond", above="more", below="less"),
        Claim("way", above="hiding lowers it", below="hiding raises it"),
        Claim("closing", above="closing raises it", below="closing lowers it"),
        Claim("leans", above=SAW, below=NOW, unclear="neither of the two more often"),
    ),
    labels={
        "n": "{} conversations".format,
        **dict.fromkeys(("place", "first", "second"), PLACE_LABELS),
        "arm": {FULL: "in view", MASKED: "hidden", CLOSED: "hidden, gap closed", SHARED: "softmax alone"},
        "measure": {"margin": "right answer's margin", "kl": "damage (KL) that goes away"},
        "sort": {TOP: "most attention on it", RANDOM: "random"},
        "reference": {name: f"{verb} ({name})" for name, verb in VERBS.items()},
        "memo": {"seen": "as it was read", "masked": "list hidden", "crossed": "summary of the other list"},
        "follows": {"payload": SAW, "pointer": NOW},
        "key": {"arm": "the turn is"},
    },
    written={
        **dict.fromkeys(("mass", "went", "moved", "rescued", "followed", "head_mass"), percent),
        **dict.fromkeys(("beyond", "lead", "gap", "leans"), points),
        **dict.fromkeys(("margin", "way", "closing"), formatted("+.2f")),
        **dict.fromkeys(("kl", "kl_masked"), formatted(".3f")),
        "able": count,
    },
)
