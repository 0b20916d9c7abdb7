"""The multihop study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.report.plots.bars import Bars
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.report.probings import FAMILIES
from kvprobe.studies.multihop import Config
from kvprobe.studies.multihop.collect import TRANSFERRED, collect
from kvprobe.studies.multihop.conclude import conclude
from kvprobe.studies.multihop.reading import ALL, USE_ARMS, lowest_layer
from kvprobe.tasks.passcode import CODE
from kvprobe.wording import formatted, percent, plain, points, signed

SPLITS = {"leave-context-out": "new sessions", "paired": "paired (centred in session)"}
LATER = "turns after the hidden one"

STUDY = Study(
    name="multihop",
    title="Leak against distance",
    question=(
        "A session has eight turns. Each is summarised and then masked; the first holds a random 5-digit number that "
        "no summary mentions. How many turns later can it still be read from the KV cache of a summary, and does it "
        "come straight from the first summary or by hops from one summary to the next?"
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Lines(
            file="by_distance",
            finding="read",
            caption="Digits read by distance, for three ways to hold samples out. open: all earlier summaries in view; "
            "hop-forced: the last alone; skip: the first alone. Dashed black: the restart floor, mean over all "
            "summaries; grey: chance. Shaded: 95 % intervals over sessions.",
            x="distance",
            line="arm",
            panel="split",
            where={"condition": "retained"},
            x_label=LATER,
            y_label="digits read (share)",
            styles={"open": Style("#0072b2"), "hop-forced": Style("#d55e00", "s"), "skip": Style("#cc79a7", "^")},
            band=("floor", "restart floor"),
            rules={CODE.chance: "chance"},
            curves=True,
            own_scales=True,
        ),
        *(
            Heatmaps(
                file=f"by_layer_{family}",
                finding="by_layer",
                caption=f"Digits read above chance: {name}, paired, slots averaged, by layer and by {LATER}. Below the "
                "green line the code cannot reach.",
                rows="layer",
                columns="distance",
                panel="arm",
                label="share of digits above chance",
                where={"family": family},
                edge=lambda arm, distance, after=int(family == "resid_post"): lowest_layer(arm, distance) - after,
            )
            for family, name in FAMILIES.items()
        ),
        *(
            Heatmaps(
                file="transfer" if split == "paired" else f"transfer_{split}",
                finding="transfer",
                caption=f"Digits read, by the distance trained at (rows) and tested at (columns): {SPLITS[split]}.",
                rows="trained",
                columns="tested",
                panel="arm",
                label="share of digits read (pale: chance)",
                where={"split": split},
                middle=CODE.chance,
                written=".0%",
            )
            for split in TRANSFERRED
        ),
        Bars(
            "use",
            "gain",
            "arm",
            "margin of the true code over others,\nmasked less restarted (nats)",
            "Margin gained by masking instead of restarting; zero is no use. 95 % intervals that hold together.",
        ),
        Bars(
            "said",
            "token_accuracy",
            "condition",
            "code tokens right (share)",
            "How many code tokens are the likeliest, the true ones before given; a guess among digits is 0.1.",
        ),
    ),
    claims=(
        *(Claim(name, above="above the floor", below="below the floor") for name in ("leak", "beyond")),
        Claim("direct", above="more without hops", below="less without hops"),
        Claim("gain", above="used", below="turned away", unclear="no use detected", negligible=1e-3),
    ),
    labels={
        "n": "{} conversations".format,
        "arm": {ALL: "all arms"},
        "condition": {name: name.replace(", ", ",\n") for name in USE_ARMS},
        "split": SPLITS,
        "family": FAMILIES,
    },
    written={
        **dict.fromkeys(("read", "floor", "token_accuracy", "transfer", "transfer_mean"), percent),
        **dict.fromkeys(("leak", "beyond", "direct"), points),
        "logprob": plain,
        **dict.fromkeys(("gain", "gain_logprob"), signed),
        "margin": formatted("+.2f"),
        "kl": formatted(".3f"),
    },
)
