"""What the band report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.experiments.trial_settings import TIMINGS
from kvprobe.inference.model import Model
from kvprobe.report.document import Report, Section, Table, passages_of
from kvprobe.studies.bands.analyse import conditions, together
from kvprobe.studies.bands.collect import CUTS, tasks_of
from kvprobe.studies.bands.config import NOISES, Config
from kvprobe.studies.bands.figures import NOISE_NAMES, PART_LABELS, main_part
from kvprobe.studies.bands.results import (
    MEASURE_NAMES,
    bands_section,
    differs,
    in_order,
    layers_section,
    order_section,
    parts_section,
    seed_section,
)
from kvprobe.wording import estimate_of, few_clusters, percent, plain

QUESTION = (
    "“KV Cache is More Robust Than You Think in Large Language Models” (canarypwn) strikes bands of Qwen2.5-7B's "
    "layers with Gaussian noise at the layer's own scale, K and V together. Answers suffer most in the last quarter, "
    "“where reasoning happens”, and hardly in the third, “a buffer”. Does this model show that order, and does the "
    "order stay when noise has another scale, or strikes K or V alone?"
)
UNCHANGED = 1e-6
"""Nats of KL that a row in which nothing is struck may be from the clean one."""

MEANINGS = {
    "layer": "layer: mean and deviation of all numbers of the layer's K (or V), as in the article. A few channels with "
    "large constant keys make this scale large, and all other channels are then hit with it.",
    "head": "head: mean and deviation of each KV head's numbers.",
    "channel": "channel: mean and covariance of each head's channels, so that a struck slot looks like another slot of "
    "that head in every channel.",
    "effect": "effect: layer noise mixed into what stands there, in the share at which striking one slot moves the "
    "layer's attention output as far, relative to its norm, in every layer; K and V each have a share and a target of "
    "their own.",
}
UNIT_MEANINGS = {
    "slot": "slots are drawn once and struck in all layers and heads of the band",
    "layer": "each layer draws slots of its own",
    "head": "each KV head of each layer draws slots of its own",
    "number": "single numbers are drawn, for K and for V apart",
}


def narrate(metrics: Mapping[str, Any], config: Config, model: Model, environment: Mapping[str, Any]) -> Report:
    """The report of a run."""
    told = [sentence for task in metrics["tasks"] for sentence in findings(task, config)]
    sections = [Section(title="What was found", points=told), _done_section(metrics, config, model)]
    for place, task in enumerate(metrics["tasks"]):
        name = f": {task['task']}" if len(metrics["tasks"]) > 1 else ""
        sections += [
            section(metrics, task, config, place, name)
            for section in (seed_section, bands_section, order_section, layers_section, parts_section)
            if section is not seed_section or "published" in task
        ]
    return Report(
        title=f"Noise by layer, and at which scale: {model.name}",
        question=QUESTION,
        answer=" ".join(" ".join(findings(task, config)[:2]) for task in metrics["tasks"]),
        warnings=warnings(metrics, config),
        sections=[
            *sections,
            _controls_section(metrics, config),
            _limits_section(metrics, config, model),
            reproduce_section(
                "bands",
                config,
                environment,
                also=["Data: samples.parquet (one row per item and case) and metrics.json beside this page."],
            ),
        ],
    )


def findings(task: Mapping[str, Any], config: Config) -> list[str]:
    """What one task shows, the answer in the first two sentences: which part of the article's claim holds under which
    noise, and what carries the damage."""
    part = main_part(config)
    sentences = [
        f"On {task['task']} ({task['items']} items, clean accuracy {percent(estimate_of(task['clean']))}), noise in "
        f"{PART_LABELS[part]}, all rates together."
    ]
    orders = [each for each in task["orders"] if (each["cut"], each["parts"], each["rate"]) == ("quarters", part, None)]
    if not orders:
        sentences.append("The order of the quarters was not measured.")
    for measure, name in MEASURE_NAMES.items():
        mine = {each["noise"]: each for each in orders if each["measure"] == measure}
        if mine:
            first = next(iter(mine))
            sentences.append(
                f"By {name}: that the last quarter bears noise worst {claimed(mine, 'last_most')}; that the third is a "
                f"buffer, which bears it best, {claimed(mine, 'buffer_least')}. Under {NOISE_NAMES[first]} the order "
                f"is {in_order(mine[first])}."
            )
    if not task["judged"]:
        sentences.append("By accuracy nothing is ranked, because the model cannot do this task.")
    return [*sentences, *_scale_sentences(task, part), *_part_sentences(task)]


def claimed(orders: Mapping[str, Mapping[str, Any]], key: str) -> str:
    """Under which noises a claim on the quarters holds, fails, or is not decided."""
    ways = {
        "yes": "holds under {} (significantly beyond each other quarter)",
        "no": "fails under {} (another quarter is significantly beyond it)",
        "open": "is not decided under {}",
    }
    found = []
    for way, words in ways.items():
        noises = [noise for noise, order in orders.items() if order[key] == way]
        if noises:
            every = len(noises) == len(orders) > 1
            named = f"all {len(orders)} noises" if every else _joined([NOISE_NAMES[noise] for noise in noises])
            found.append(words.format(named))
    return ", ".join(found)


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _scale_sentences(task: Mapping[str, Any], part: str) -> list[str]:
    """How much of the last quarter's lead is the noise's scale, and whether the ranking of single layers survives."""
    sentences = []
    known = [each for each in task["last_against_others"] if each["parts"] == part and each["ratio"] is not None]
    if known:
        ratios = [f"{plain(estimate_of(each['ratio']))} under {NOISE_NAMES[each['noise']]}" for each in known]
        sentences.append(f"The last quarter's mean KL over that of the other quarters is {'; '.join(ratios)}.")
    changes = {each["noise"]: each["change"] for each in known if each["change"] is not None}
    changed = [NOISE_NAMES[noise] for noise, change in changes.items() if differs(change, 1.0)]
    if changed:
        sentences.append(f"It differs significantly from that at the layer's scale under {_joined(changed)}.")
    elif changes:
        sentences.append("That it depends on the noise's scale was not detected.")
    layers = [
        f"{NOISE_NAMES[each['noises'][1]]} {plain(estimate_of(each['rho']))}"
        for each in task["agreement"]
        if each["parts"] == part and each["rho"] is not None and each["noises"][0] == "layer"
    ]
    if layers:
        sentences.append(
            "Single layers ranked by KL correlate with their ranks under noise at the layer's scale: "
            f"{'; '.join(layers)}."
        )
    return sentences


def _part_sentences(task: Mapping[str, Any]) -> list[str]:
    """Whether K or V carries the damage, all rates together."""
    sentences = []
    for measure, name in MEASURE_NAMES.items():
        found = []
        for noise in NOISES:
            rows = [
                each["more"][measure]
                for each in task["keys_against_values"]
                if (each["group"], each["noise"], each["rate"]) == (CUTS, noise, None) and each["more"].get(measure)
            ]
            keys = sum(estimate_of(each).above() for each in rows)
            values = sum(estimate_of(each).below() for each in rows)
            if rows:
                apart = (
                    f"K in {keys} and V in {values} of {len(rows)} bands" if keys or values else "neither in any band"
                )
                found.append(f"{apart} under {NOISE_NAMES[noise]}")
        if found:
            sentences.append(
                f"Whose noise costs significantly more by {name}, K's alone or V's alone: {'; '.join(found)}."
            )
    return sentences


def warnings(metrics: Mapping[str, Any], config: Config) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    for task in metrics["tasks"]:
        if few := few_clusters(task["items"], f"items of {task['task']}"):
            found.append(few)
        if task["too_hard"]:
            found.append(task["too_hard"])
        broken = task["broken"]
        if broken["rows"]:
            found.append(
                f"In {broken['rows']} of {broken['of']} rows of {task['task']} a number was no longer finite, in the "
                f"first of them {broken['first']}. They count as wrong and are left out of every KL."
            )
        if not _control_holds(task["control"]):
            found.append(
                f"The control on {task['task']} DOES NOT HOLD: with nothing struck, answers change. Doubt this run."
            )
        beside = task.get("published")
        if beside and beside["model"].lower() not in config.model.lower():
            found.append(f"The reported table is of {beside['model']}; this run is of {config.model}.")
    if not config.follow:
        found.append("KL was not measured (follow is off), so single layers and bands are compared by accuracy alone.")
    return found


def _control_holds(control: Mapping[str, Any]) -> bool:
    same = control["struck"] == 0 and control["same"] == control["rows"]
    return same and (control["kl"] is None or control["kl"] <= UNCHANGED)


def _done_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    task = tasks_of(config)[0]
    item = task.items(1, config.seed)[0]
    rates = ", ".join(f"{rate:g}" for rate in config.rates)
    noises, parts = (dict.fromkeys(each) for each in zip(*conditions(config), strict=True))
    single = (
        f" Each of the {metrics['layers']} layers is also struck by itself, at {config.single:g} %."
        if config.single
        else ""
    )
    return Section(
        title="What was done",
        paragraphs=[
            f"Bands of layers are struck with Gaussian noise in {rates} % of their slots, prompt and answer "
            f"alike.{single} Timing `{config.timing}`: {TIMINGS[config.timing]}. Unit `{config.unit}`: "
            f"{UNIT_MEANINGS[config.unit]}. All rows of an item share random draws: whatever the band, the noise or "
            "the part, the same slots are struck at one rate, and those of a lower rate are among those of a higher "
            "one.",
            f"Each item is answered greedily under every case and once with a clean cache, of which the first is shown"
            f"{f' (its reply begins “{item.lead}”; the reference is “{item.answer}”)' if item.lead else ''}."
            + (
                " Then every row reads the clean answer, and KL is that of its next-token distributions from the clean "
                "run's, the mean over the answer's tokens."
                if config.follow
                else ""
            ),
            "Noise is matched to what it replaces in these ways:",
        ],
        passages=passages_of(item.chat),
        tables=[
            Table(
                columns=["task", "score", "clean accuracy", "chance", "items", "tokens of a prompt"],
                rows=[
                    [
                        each["task"],
                        each["scorer"],
                        percent(estimate_of(each["clean"])),
                        f"{100 * each['chance']:.3g} %",
                        str(each["items"]),
                        f"{each['slots'][0]} to {each['slots'][1]}",
                    ]
                    for each in metrics["tasks"]
                ],
                caption="Before any fault; Wilson's 95 % interval over items.",
            ),
            Table(
                columns=["band", "layers", "how many"],
                rows=[
                    [band, f"{first} to {last}", str(last - first + 1)]
                    for band, (first, last) in metrics["bands"].items()
                ],
                caption=f"The bands of {model.name}. In each, {_joined([PART_LABELS[part] for part in parts])} are "
                "struck.",
            ),
        ],
        points=[MEANINGS[noise] for noise in noises],
    )


def _controls_section(metrics: Mapping[str, Any], config: Config) -> Section:
    checks = []
    for task in metrics["tasks"]:
        control = task["control"]
        kl = "" if control["kl"] is None else f", KL at most {control['kl']:.1e} nats (allowed: {UNCHANGED:.0e})"
        checks.append(
            f"Nothing struck, nothing changed ({task['task']}): at rate 0 {control['same']} of {control['rows']} "
            f"answers are the clean ones{kl}, {control['struck']} vectors struck. The control "
            f"{'holds' if _control_holds(control) else 'DOES NOT HOLD: doubt this run'}."
        )
    checks += [
        "The clean row is decoded in the same batch as the damaged ones, by the same kernels.",
        f"A task on which the clean model is too near chance is not ranked by accuracy; of {len(metrics['tasks'])} "
        f"here {sum(task['judged'] for task in metrics['tasks'])} are.",
    ]
    if config.single and config.follow:
        checks.append(
            "Each noise's agreement with itself on other items stands beside its agreement with other noises."
        )
    return Section(title="Controls", points=checks)


def _limits_section(metrics: Mapping[str, Any], config: Config, model: Model) -> Section:
    sizes = {last - first + 1 for band, (first, last) in metrics["bands"].items() if band.startswith("quarter")}
    uneven = (
        [f"Quarters have {min(sizes)} or {max(sizes)} layers, so a little of their difference may be length."]
        if len(sizes) > 1
        else []
    )
    return Section(
        title="Limits",
        points=[
            f"{model.name} is one model with {metrics['layers']} layers, in "
            f"{str(model.lanes.dtype).removeprefix('torch.')}; what it shows does not carry over to others.",
            "That a band bears noise badly says that answers depend on reading its K and V intact. It does not say "
            "that reasoning happens there: damage in an early layer can be diluted, or overwritten, before the output, "
            "and a late one's cannot.",
            *uneven,
            "Means and deviations are over the prompt's slots, the first included, whose keys are often outliers; it "
            "is struck as any other.",
            "Equal effect is measured at the layer's own attention output, one slot at a time, for the prompt's last "
            "queries; what later layers make of it is what the study measures. With several slots struck at once "
            "effects need not add up.",
            "One set of draws for each item: intervals hold for items and draws together, but one item's answer is one "
            "draw.",
            f"All rates together weighs each of {len(together(config)) - 1} rates alike, so that in KL the rate at "
            "which it is largest counts most.",
            "One way of drawing slots and one timing; the article does not say whether its noise piles up.",
        ],
    )
