"""What the patching report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.report.document import Figure, Report, Section, Table, passages_of
from kvprobe.stats import Estimate
from kvprobe.studies.patching.analyse import FEWEST, PARTS, SHARE
from kvprobe.studies.patching.collect import VALUE
from kvprobe.studies.patching.config import Config
from kvprobe.studies.patching.figures import PART_NAMES, head_maps, layer_maps, slot_maps, token_view
from kvprobe.tasks.facts import conversation, facts
from kvprobe.wording import estimate_of, few_clusters, percent, span, verdict

QUESTION = (
    "A conversation states a fact and is asked for it two turns later. From which layers, slots and heads of the cache "
    "is the fact read, and from K or from V?"
)
SLACK = 1e-4
"""How far a control may be off, as a share of the largest logit difference."""


def narrate(metrics: Mapping[str, Any], config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    found = _found_sections(metrics) if metrics["enough"] else []
    return Report(
        title=f"From where a fact is read: {model.name}",
        question=QUESTION,
        answer=answer(metrics),
        warnings=warnings(metrics),
        sections=[
            *found,
            _done_section(metrics, config),
            _controls_section(metrics),
            _limits_section(metrics, model),
            reproduce_section(
                "patching",
                config,
                environment,
                also=[
                    "Data: samples.parquet (one row per run and cell), example.parquet and metrics.json beside this "
                    "page."
                ],
            ),
        ],
    )


def answer(metrics: Mapping[str, Any]) -> str:
    """The answer in a sentence or two: K or V, how much, which layers, which slots."""
    if not metrics["enough"]:
        return (
            f"Too few facts to say: the model says the right value in both runs of {metrics['pairs']['able_facts']} of "
            f"{metrics['pairs']['facts']} facts, and {FEWEST} are the fewest from which anything is said."
        )
    shares = {part: estimate_of(metrics["everything"][part]) for part in PARTS}
    told = (
        f"V alone carries {percent(shares['V'])} of the way from one answer to the other, K alone "
        f"{percent(shares['K'])}, both together {percent(shares['KV'])}"
    )
    part = leading(metrics)
    if part is None:
        if not shares["K"].above() and not shares["V"].above():
            return f"That K or V alone carries the fact was not detected: {told}."
        return (
            f"The fact is not read from one of K and V more than from the other, as far as this run can tell: {told}."
        )
    where, band = _main_segment(metrics, part), metrics["bands"][part]
    slots = f"; {part} of {_name(where['segment'])} alone gives {percent(estimate_of(where))}"
    if band is None:
        return f"The fact is read from {part}: {told}{slots}. No band of layers was tested."
    return (
        f"The fact is read from {part}, at {_at(band['layers'])}: {told}{slots}. Bands found on one half of the facts "
        f"and swapped at once on the other give {percent(estimate_of(band['of_whole']))} of what {part} of all layers "
        "gives."
    )


def leading(metrics: Mapping[str, Any]) -> str | None:
    """The part that carries significantly more, and something; None if there is none."""
    difference = estimate_of(metrics["difference"])
    part = "V" if difference.above() else "K" if difference.below() else None
    return part if part is not None and estimate_of(metrics["everything"][part]).above() else None


def findings(metrics: Mapping[str, Any]) -> list[str]:
    """What the numbers show beyond the answer."""
    difference, rest = (estimate_of(metrics[name]) for name in ("difference", "interaction"))
    sentences = [
        f"V less K: {_signed(difference)} of the way. "
        + verdict(difference, "V carries more.", "K carries more.", "Which of the two carries more is not decided."),
        f"Both together less the sum of each alone: {_signed(rest)}. "
        + verdict(
            rest,
            "Part of the effect needs both.",
            "K and V each do what the other does as well.",
            "No more than the sum is found.",
        ),
    ]
    for part in ("K", "V"):
        sentences.append(_band_sentence(metrics, part))
    top = max(metrics["heads"], key=lambda cell: cell["mean"])
    sentences.append(
        f"Of the {len(metrics['heads'])} KV heads of K and of V at the value's own slots, the one with the largest "
        f"attribution is {top['part']} of layer {top['layer']}, head {top['head']}: {percent(estimate_of(top))}."
    )
    kinds = dict.fromkeys(cell["kind"] for cell in metrics["by_kind"])
    for kind in kinds:
        own = {cell["part"]: estimate_of(cell) for cell in metrics["by_kind"] if cell["kind"] == kind}
        sentences.append(f"Facts of kind {kind}: K {percent(own['K'])}, V {percent(own['V'])}.")
    return sentences


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    found = []
    if metrics["enough"] and (few := few_clusters(metrics["pairs"]["able_facts"], "facts")):
        found.append(few)
    if failed := [text for text, holds in controls(metrics) if not holds]:
        found.append(f"A control does not hold, doubt this run: {failed[0]}")
    return found


def controls(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each control in words, and whether it holds."""
    own = metrics["controls"]
    allowed = SLACK * max(1.0, own["largest"])

    def checked(name: str, claim: str) -> tuple[str, bool]:
        holds = own[name] <= allowed
        verdict = "holds" if holds else "DOES NOT HOLD"
        return f"{claim}: off by at most {own[name]:.1e} logits (allowed: {allowed:.1e}). It {verdict}.", holds

    return [
        checked(
            "light_cone", "Light cone: K and V before the value cannot depend on it, so that swapping them does nothing"
        ),
        checked("same", "Swapping K and V of every layer and slot for the run's own does nothing"),
        checked("donor", "Swapping K and V of every layer and slot for the donor's gives the donor's value"),
    ]


def _found_sections(metrics: Mapping[str, Any]) -> list[Section]:
    segments = list(dict.fromkeys(cell["segment"] for cell in metrics["whole"]))
    rows = [
        [_name(segment), *(percent(estimate_of(_cell(metrics["whole"], segment=segment, part=part))) for part in PARTS)]
        for segment in segments
    ]
    rows.append(["all slots", *(percent(estimate_of(metrics["everything"][part])) for part in PARTS)])
    sections = [
        Section(
            title="What was found",
            points=findings(metrics),
            tables=[
                Table(
                    columns=["swapped, all layers", *(PART_NAMES[part] for part in PARTS)],
                    rows=rows,
                    caption="Share of the way from the base's logit difference to the donor's: mean effect over mean "
                    "way, with 95 % intervals over facts.",
                )
            ],
            figures=[Figure("whole_by_segment", "The same; the dashed line is the donor.")],
        ),
        Section(
            title="Layer by segment",
            paragraphs=["One layer of one segment at a time. Effects of single layers need not add up to that of all."],
            maps=layer_maps(metrics),
            figures=[Figure("layer_by_segment", "The three maps on one scale.")],
        ),
        Section(
            title="Layer by KV head",
            paragraphs=[_attribution_sentence(metrics["attribution"])],
            maps=head_maps(metrics),
            figures=[Figure("layer_by_head", "KV heads of the value's own slots, by attribution.")],
        ),
    ]
    if metrics["residual"]:
        sections.append(
            Section(
                title="Reader and total",
                paragraphs=[
                    "Up to here only the suffix sees what was swapped. Here the residual stream of the value's slots "
                    "is swapped before a layer, and all later layers and tokens go on from there. What is read from "
                    "layers below has then been read already: where the line falls, the fact has left the value's "
                    "slots."
                ],
                points=[f"Before layer {cell['layer']}: {percent(estimate_of(cell))}." for cell in metrics["residual"]],
                figures=[Figure("reader_and_total", "The line may fall before the last layer at which V matters.")],
            )
        )
    if (example := metrics["example"]) is not None:
        sections.append(
            Section(
                title="One fact, slot by slot",
                paragraphs=[
                    "The first fact that the model can do, from two slots before the value on. The first two slots "
                    "cannot know the value."
                ],
                views=[token_view(example)],
                maps=slot_maps(example),
                figures=[Figure("layer_by_slot", "Layer by slot for K and V, by attribution.")],
            )
        )
    return sections


def _band_sentence(metrics: Mapping[str, Any], part: str) -> str:
    band = metrics["bands"][part]
    if band is None:
        return f"{part}: single layers do not add up to an effect toward the donor, so no band was sought."
    told = (
        f"{part}: the smallest run of layers that holds {SHARE:.0%} of the sum over single layers is "
        f"{_run(band['layers'])}; "
    )
    halves = " and ".join(_run(layers) for layers in band["halves"])
    told += f"of the two halves of the facts, {halves}. Each half's band, swapped at once on the other half, moves "
    told += f"{percent(estimate_of(band['inside']))} of the way"
    if band["outside"] is None:
        return f"{told}; it holds all layers."
    told += (
        f"; all other layers move {percent(estimate_of(band['outside']))}. Single layers add up to "
        f"{band['summed']:.1%}."
    )
    return told


def _attribution_sentence(found: Mapping[str, Any]) -> str:
    def of(name: str) -> str:
        own = found[name]
        return "unknown" if own is None else f"{own['median']:.2f} (quartiles {own['low']:.2f} to {own['high']:.2f})"

    return (
        "Scores are first order from the attention output of the patched layer on, exact below. Against exact "
        f"patching of {found['cells']} cells drawn at random, the rank correlation within a run is, as a median over "
        f"runs, {of('score_K')} for K and {of('score_V')} for V; of the plain gradient, {of('linear_K')} and "
        f"{of('linear_V')}. 1 is the same order, 0 is chance."
    )


def _done_section(metrics: Mapping[str, Any], config: Config) -> Section:
    fact = facts(config.kinds[:1])[0]
    passages = passages_of(conversation(fact, fact.values[0]), marked=fact.values[0], only_in=("fact", "question"))
    able = [f"{entry['kind']} {entry['able']} of {entry['runs']}" for entry in metrics["pairs"]["kinds"]]
    return Section(
        title="What was done",
        paragraphs=[
            "Each fact is stated twice with different values, in prompts that agree token by token but for the value. "
            "The question and the reply, up to the value, are read after each prompt's cache. The measure is the logit "
            "of the run's own value less that of the other; 0 % of the way is the run unpatched, 100 % the run whose K "
            "and V are swapped in (the donor).",
            "One conversation:",
        ],
        passages=passages,
        points=[
            f"{metrics['pairs']['facts']} facts, {metrics['pairs']['runs']} runs. The model says each run's own value "
            f"in {metrics['pairs']['able_runs']} runs ({'; '.join(able)}); all others are left out of the maps.",
            "The turn of the fact is cut into what stands before the value, the value, and what stands after it with "
            "the reply.",
            "A band is the smallest run of adjacent layers whose single-layer effects, averaged over facts and summed "
            f"over segments, add up to {SHARE:.0%} of the sum over all layers. It is found on one half of the facts "
            "and patched on the other, and the reverse, so that no fact tests a band that it helped to find.",
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
            f"{metrics['pairs']['facts']} hand-written English conversations with a fact said once and asked for two "
            "turns later; the two values share their place. A fact that must be found by its value, not by its place, "
            "may need K.",
            "A patched cache holds K of one run and V of another, which no prompt gives.",
            "The logit difference sees only these two values; a patch that breaks both answers alike is not seen.",
            "Facts that the model cannot do are left out, so the numbers hold for what it can recall.",
        ],
    )


def _main_segment(metrics: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    return max((cell for cell in metrics["whole"] if cell["part"] == part), key=lambda cell: cell["mean"])


def _cell(cells: Sequence[Mapping[str, Any]], **labels: str) -> Mapping[str, Any]:
    (found,) = (cell for cell in cells if all(cell[name] == value for name, value in labels.items()))
    return found


def _name(segment: str) -> str:
    return "the value's own slots" if segment == VALUE else segment


def _at(layers: Sequence[int]) -> str:
    return f"layer{'s' if layers[0] < layers[1] else ''} {_run(layers)}"


def _run(layers: Sequence[int]) -> str:
    first, last = layers
    return str(first) if first == last else f"{first}–{last}"


def _signed(value: Estimate) -> str:
    return f"{100 * value.mean:+.1f} % ({span(value, lambda share: f'{100 * share:+.1f}')})"
