"""The use study: its declaration."""

from kvprobe.experiments.study import Claim, Study
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.lines import Lines, Style
from kvprobe.studies.use import Config
from kvprobe.studies.use.checks import INTACT, SAME
from kvprobe.studies.use.collect import NOTHING, collect
from kvprobe.studies.use.conclude import NEAR, conclude
from kvprobe.studies.use.effects import BOTH, CODE_MASKED, ERASE, FULL, IN_VIEW, SITES, SWAP, TURN_MASKED
from kvprobe.studies.use.place_erasers import INLP, LEACE, RANDOM
from kvprobe.wording import count, formatted, percent, plain, share, signed

PLACES = {"code": "the code's own slots", "after": "its turn after it", "summary": "the summary"}
EDITS = {LEACE: "LEACE, the probe's subspace", RANDOM: "random, same rank", INLP: "INLP", FULL: "whole vectors"}
PARTS = {"K": "K", "V": "V", BOTH: "K and V"}
STYLES = {
    INTACT: Style("#0072b2"),
    LEACE: Style("#d55e00", "s"),
    RANDOM: Style("#009e73", "^"),
    FULL: Style("#7f7f7f", "D"),
    INLP: Style("#cc79a7", "v"),
}


STUDY = Study(
    name="use",
    title="Use of what a probe reads",
    question=(
        "A probe reads a 5-digit code in K and V of several slots of a conversation. When the model is asked for the "
        "code, does it use what the probe reads there? The code is erased from the cache along the probe's subspace, "
        "or exchanged for another code's, and the model asked again."
    ),
    config=Config,
    collect=collect,
    conclude=conclude,
    figures=(
        Dots(
            "read_and_used",
            "Left: digits that a probe of the other half's conversations reads in V, mean over layers. Right: what the "
            "model loses when K and V of all layers are erased there. 95 % intervals over conversations.",
            (
                Panel(
                    finding="read",
                    down="place",
                    line="state",
                    styles={name: STYLES[name] for name in (INTACT, LEACE, RANDOM)},
                    label="digits that the probe reads (share)",
                    where={"part": "V", "probe": SAME},
                    level=("chance", "chance", {}),
                ),
                Panel(
                    finding="lost",
                    down="site",
                    line="edit",
                    styles={name: STYLES[name] for name in (LEACE, RANDOM, FULL)},
                    label="margin of the true code lost (nats)",
                    where={"band": EVERY_LAYER, "part": BOTH},
                    level=("the margin with everything in view", "margin", {"view": IN_VIEW}),
                ),
            ),
        ),
        Lines(
            file="by_band",
            finding="beyond",
            caption="Nats of the true code's margin lost to LEACE beyond random subspaces, band by band; all other "
            "layers stay as they were. 95 % intervals over conversations.",
            x="band",
            line="part",
            panel="site",
            x_label="layers",
            y_label="margin lost beyond random (nats)",
            size=(2.2, 2.8),
        ),
        Lines(
            file="doses",
            finding="dose",
            caption="At strength 1 all is erased or exchanged; beyond it the difference to the average, or to the "
            "other code, is exaggerated. Shaded: 95 % intervals over conversations.",
            x="strength",
            line="edit",
            panel="kind",
            y_label="",
            styles=STYLES,
            curves=True,
            own_scales=True,
            size=(3.4, 3.0),
        ),
        Lines(
            file="probes",
            finding="read_layer",
            caption="Digits read by the probe that was erased and by one trained anew, intact and after each erasure. "
            "Dotted: chance. Shaded: 95 % intervals over conversations.",
            x="layer",
            line="state",
            panel="place",
            row=lambda keys: f"{keys['probe']}, {keys['part']}",
            y_label="digits read (share)",
            styles=STYLES,
            level=("chance", "chance"),
            curves=True,
            limits=(0.0, 1.03),
            size=(2.6, 2.4),
        ),
    ),
    claims=(
        Claim("used", above="used", below="random takes more"),
        Claim("left", above="still reads it", below="near chance", unclear="not decided", against=NEAR),
        Claim("step", above="takes more", below="takes less"),
    ),
    labels={
        "n": "{} conversations".format,
        "view": {
            IN_VIEW: "everything in view",
            CODE_MASKED: "the code's own slots masked",
            TURN_MASKED: "T1 and T2 masked",
        },
        "site": {site: site.replace(place, PLACES[place], 1) for (_, place), site in SITES.items()},
        "place": PLACES,
        "band": {EVERY_LAYER: "all"},
        "part": PARTS,
        "edit": EDITS | {NOTHING: "nothing"},
        "state": {INTACT: "intact"} | EDITS,
        "key": {"view": "the question sees"},
        "kind": {ERASE: "erased: margin lost (nats)", SWAP: "exchanged: R, share of the way"},
    },
    written={
        "nats": plain,
        "logits": signed,
        "": percent,
        **dict.fromkeys(("beyond", "used", "step"), formatted("+.2f")),
        "kl": formatted(".3f"),
        **dict.fromkeys(("chance", "share"), share),
        **dict.fromkeys(("rank", "width"), count),
    },
)
