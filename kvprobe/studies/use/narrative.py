"""The use report: the answer and the sections that support it."""

from collections.abc import Mapping
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Figure, Passage, Report, Section, Table
from kvprobe.studies.use.analyse import found
from kvprobe.studies.use.check import ANEW, INTACT, SAME
from kvprobe.studies.use.collect import cases_of
from kvprobe.studies.use.config import Config
from kvprobe.studies.use.effects import BOTH, ERASE, FULL, STRENGTHS, SWAP
from kvprobe.studies.use.figures import PART_NAMES, PLACE_NAMES, SITES, accuracy, band_map
from kvprobe.studies.use.fit import INLP, LEACE, RANDOM, SHRINKAGE
from kvprobe.studies.use.read import PARTS, PLACES
from kvprobe.studies.use.sentences import (
    VIEW_NAMES,
    answer_probes,
    answer_swap,
    answer_use,
    controls,
    dose,
    dose_sentence,
    site_name,
    warnings,
)
from kvprobe.tasks.passcode import conversation
from kvprobe.wording import estimate_of, percent, plain, signed

QUESTION = (
    "A probe reads a 5-digit code in K and V of several slots of a conversation. When the model is asked for the code, "
    "does it use what the probe reads there? The code is erased from the cache along the probe's subspace, or "
    "exchanged for another code's, and the model asked again."
)
NAMES = {LEACE: "LEACE", RANDOM: "random", FULL: "whole vectors"}


def narrate(
    metrics: Mapping[str, Any], replies: Any, config: Config, model: Model, environment: Mapping[str, Any]
) -> Report:
    """The report of a run."""
    return Report(
        title=f"Use of what a probe reads: {model.name}",
        question=QUESTION,
        answer=f"{answer_use(metrics)} {answer_swap(metrics)} {answer_probes(metrics)}",
        warnings=warnings(metrics),
        sections=[
            _erased_section(metrics, replies),
            _swapped_section(metrics),
            _doses_section(metrics),
            _probes_section(metrics),
            _done_section(metrics, config, model),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "use",
                config,
                environment,
                also=[
                    "Data: samples.parquet (every edit), doses.parquet, probes.parquet, replies.parquet and "
                    "metrics.json beside this page.",
                    "LEACE: arXiv 2306.03819. INLP: arXiv 2004.07667. Interchange: arXiv 2303.02536; its pitfalls: "
                    "2311.17030.",
                ],
            ),
        ],
    )


def _erased_section(metrics: Mapping[str, Any], replies: Any) -> Section:
    rows = []
    for view, place in SITES:
        for part in (*PARTS, BOTH):
            own = found(metrics, "erased", view, place, part)
            rows.append(
                [
                    site_name(view, place),
                    PART_NAMES[part],
                    *(plain(estimate_of(own["lost"][name])) for name in (LEACE, RANDOM, INLP, FULL)),
                    signed(estimate_of(own["beyond"]), 2),
                    f"{own['kl'][LEACE]:.3f} / {own['kl'][RANDOM]:.3f}",
                    f"{own['said'][LEACE]:.0%} / {own['said'][RANDOM]:.0%}",
                ]
            )
    scale = [
        [
            VIEW_NAMES[view],
            plain(estimate_of(each["margin"])),
            percent(estimate_of(each["said"])),
            signed(estimate_of(each["way"])),
        ]
        for view, each in metrics["scale"].items()
    ]
    return Section(
        title="Erased",
        paragraphs=[
            "The margin is the log-probability of the true code less the mean over other codes, over all five digits, "
            "the true ones before each given. Without knowledge of the code it is zero."
        ],
        figures=[
            Figure(
                "read_and_used",
                "Left: a probe of the other half's conversations, on features as they are and erased. Right: what the "
                "model loses.",
            ),
            Figure(
                "by_band",
                "Nats lost to the eraser beyond random subspaces, band by band; all other layers stay as they were.",
            ),
        ],
        tables=[
            Table(
                columns=["the question sees", "margin (nats)", "code is said", "logits between two codes"],
                rows=scale,
                caption="Without any edit. Where two codes make no difference, nothing can be lost.",
            ),
            Table(
                columns=[
                    "erased in",
                    "of",
                    *("LEACE", "random", "INLP", "whole vectors"),
                    "LEACE beyond random",
                    "KL: LEACE / random",
                    "code still said: LEACE / random",
                ],
                rows=rows,
                caption="All layers. Nats of the margin lost, with 95 % intervals over conversations; KL is from the "
                "unedited answer, at the first digit.",
            ),
            Table(
                columns=["code", "erased, K and V of all layers", "the model's greedy reply"],
                rows=[[each["code"], _edit(each["erased"]), each["reply"]] for each in replies.to_dict("records")],
                caption="Some replies, with everything in view.",
            ),
        ],
        maps=[band_map(metrics)],
    )


def _edit(erased: str) -> str:
    """What was erased, and where, in words."""
    place, told, name = erased.partition(": ")
    return f"{PLACE_NAMES[place]}: {NAMES[name.split()[0]]}" if told else erased


def _swapped_section(metrics: Mapping[str, Any]) -> Section:
    rows = []
    for view, place in SITES:
        for part in (*PARTS, BOTH):
            own = found(metrics, "swapped", view, place, part)
            share = own["share"]
            rows.append(
                [
                    site_name(view, place),
                    PART_NAMES[part],
                    *(
                        "no way to go" if share is None else percent(estimate_of(share[name]))
                        for name in (LEACE, RANDOM, FULL)
                    ),
                    *(signed(estimate_of(own["moved"][name])) for name in (LEACE, FULL)),
                    signed(estimate_of(own["beyond"])),
                ]
            )
    return Section(
        title="Exchanged for another code's",
        paragraphs=[
            "R = (difference as it was − difference after the exchange) / (difference as it was − the other run's), "
            "the difference being logit(own first digit) − logit(the other code's), pooled over conversations: 0 where "
            "nothing changes, 1 where the other code's answer is given. Of what a subspace turns, the whole vectors "
            "show how much there was to turn.",
            _ways(metrics),
        ],
        tables=[
            Table(
                columns=[
                    "exchanged in",
                    "of",
                    *("R, LEACE's subspace", "R, random", "R, whole vectors"),
                    *("logits: LEACE", "logits: whole", "logits: LEACE less random"),
                ],
                rows=rows,
                caption="All layers, with 95 % intervals over conversations.",
            )
        ],
    )


def _ways(metrics: Mapping[str, Any]) -> str:
    ways = [
        f"{signed(estimate_of(each['way']))} logits with {VIEW_NAMES[view]}" for view, each in metrics["scale"].items()
    ]
    return f"Two runs that differ in nothing but the code are apart by {', '.join(ways)}."


def _doses_section(metrics: Mapping[str, Any]) -> Section:
    chosen = [
        f"{site_name(each['view'], each['place'])}, {PART_NAMES[each['part']]} of layers {each['band']}"
        for each in metrics["chosen"]
    ]
    where = (
        f"both halves chose {chosen[0]}"
        if chosen[0] == chosen[1]
        else f"the halves were tried at {chosen[0]}, and at {chosen[1]}"
    )
    return Section(
        title="Dose and response",
        paragraphs=[
            "The band, part and place at which the eraser took most beyond random subspaces was chosen on one half of "
            f"the conversations and tried on the other: {where}. {dose_sentence(metrics)}"
        ],
        figures=[
            Figure(
                "doses",
                "1 erases or exchanges; beyond it the difference to the average, or to the other code, is exaggerated.",
            )
        ],
        tables=[
            Table(
                columns=[
                    "strength",
                    *(f"{kind}: {name}" for kind in ("nats lost", "R") for name in NAMES.values()),
                ],
                rows=[
                    [
                        f"{strength:g}",
                        *(
                            plain(estimate_of(dose(metrics, kind, name, strength)))
                            for kind in (ERASE, SWAP)
                            for name in NAMES
                        ),
                    ]
                    for strength in STRENGTHS
                ],
                caption="With 95 % intervals over conversations.",
            )
        ],
    )


def _probes_section(metrics: Mapping[str, Any]) -> Section:
    states = {INTACT: "intact", LEACE: "LEACE", f"{RANDOM} 0": "random", INLP: "INLP"}
    rows = [
        [
            PLACE_NAMES[place],
            part,
            probe,
            *(percent(estimate_of(accuracy(metrics, place, part, probe, state))) for state in states),
        ]
        for place in PLACES
        for part in PARTS
        for probe in (SAME, ANEW)
    ]
    sizes = [
        [
            PLACE_NAMES[each["place"]],
            each["part"],
            {LEACE: "LEACE", INLP: "INLP"}.get(each["name"], "random"),
            f"{each['rank']:.0f} of {each['of']}",
            f"{each['share']:.0%}",
        ]
        for each in metrics["size"]
    ]
    return Section(
        title="Was it erased?",
        paragraphs=[
            "The same probe was trained on the other half's conversations as they are, and reads those of this half "
            "before and after they were erased by the other half's eraser. The other is trained anew on what is left, "
            "and tested on conversations that it has not seen. Of a code slot its own digit is read, of the others all "
            "five digits from the mean over slots; features are centred within their conversation.",
            "K and V are functions of the code without any noise, so that a remainder however small can be read. LEACE "
            "makes it zero on average over the conversations of its fit, not in each new one. INLP goes on until a new "
            "probe is at chance, and the table says what that takes.",
        ],
        figures=[Figure("probes", "Lines: V; dotted: K. Dashed: chance.")],
        tables=[
            Table(
                columns=["place", "part", "probe", *states.values()],
                rows=rows,
                caption="Accuracy per digit, mean over all layers, with 95 % intervals over conversations.",
            ),
            Table(
                columns=["place", "part", "eraser", "directions", "variance moved"],
                rows=sizes,
                caption="Mean over layers and halves, of how much varies with the code. Random subspaces have LEACE's "
                "rank and are drawn where all directions have unit variance.",
            ),
        ],
    )


def _done_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    case = cases_of(config, model.tokenizer)[0]
    passages = [
        Passage(
            message.segment,
            message.role,
            message.text,
            marked=case.pair[0] if message.segment in ("T2", "T3") else None,
        )
        for message in conversation(case.context, case.pair[0]).messages
    ]
    return Section(
        title="What was done",
        paragraphs=[
            f"Each of {metrics['conversations']} conversations is read with {config.codes} codes of its own. Of K and "
            "V of each slot the average over these codes is taken off; what is left varies with the code alone. On one "
            "half of the conversations LEACE finds, for each layer and place and for K and V over all KV heads, the "
            "directions that covary with the digits. In the other half's conversations, with a code that was not among "
            "those, what lies in these directions is set to the conversation's average (erased), or to what another "
            "code leaves there (exchanged), before the question is read; and the reverse.",
            "One conversation:",
        ],
        passages=passages,
        points=[
            "Places: the code's own slots, each with an eraser of its own, of the digits up to its own; the slots of "
            "its turn after it, with the reply; the summary of the turn and the request for it. Slots of the last two "
            "share an eraser, for which every slot is a sample: what covaries with the digits is the same for slots "
            "and for their mean, so that a probe of the mean is guarded as well.",
            f"Keys are taken as they are attended to. Covariances are shrunk by {SHRINKAGE:.0%}; without it random "
            "subspaces would move new conversations by many times their variance.",
            "Random subspaces have the same rank and as much whitened variance, and are drawn for each half anew.",
        ],
    )


def _controls_section(metrics: Mapping[str, Any]) -> Section:
    return Section(title="Controls", points=[text for text, _ in controls(metrics)])


def _limits_section(metrics: Mapping[str, Any], model: Model) -> Section:
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {model.geometry.n_layers} layers; what it does says nothing of larger "
            "ones.",
            f"{metrics['conversations']} hand-written English conversations and random digits; another concept may be "
            "used elsewhere.",
            "That erasing in one place takes nothing does not say that nothing is read there: the same may be read "
            "elsewhere while it is in view. The view in which the code's own slots are masked answers that for its "
            "turn.",
            "Setting a subspace to an average makes K and V that no text gives; random subspaces and whole vectors do "
            "so, too.",
            "LEACE erases what is linear and common to conversations. What a model reads by other means is left; whole "
            "vectors bound it.",
            "Intervals leave out one conversation at a time, with erasers and random subspaces held fixed. Those of "
            "the answer are wide enough for all its places; those of tables are not adjusted for how many there are.",
        ],
    )
