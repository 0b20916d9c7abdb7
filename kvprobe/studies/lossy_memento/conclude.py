"""From answers and probes to findings; each block is a cluster, for the models as they were trained."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, HeldOutDifference, Mean, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.layer_readers import LINEAR, MLP
from kvprobe.studies.lossy_memento import Config
from kvprobe.studies.lossy_memento.collect import ANSWERS, LAYERS, MODEL, PROBES, REACH, WHOLE
from kvprobe.studies.lossy_memento.reading import OMITTED, RESTART, RETAINED, STAND_IN, STATED, trained
from kvprobe.tasks.lossy_mementos import BASE, BITS, BLOCK
from kvprobe.tidy import Rows

MODELS = ("provenance", "asked", "slots", "seed")
DESIGNS = ("provenance", "asked", "slots")
READERS = (MODEL, LINEAR, WHOLE, MLP)


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    findings = findings_of(tables)
    known = trained(model)
    design = known.design
    digits = [(7 * place + 3) % BASE for place in range(design.places)]
    facts = {
        "chat": chat_record(design.conversation(digits, design.places - 1), masked=(BLOCK,)),
        "main": {name: getattr(known, name) for name in MODELS},
        "chance": 1 / BASE,
        "parameters": sum(parameter.numel() for parameter in model.lanes.plain.parameters()),
    }
    return Conclusion(findings, controls(tables, findings, model), facts)


def findings_of(tables: Mapping[str, Rows]) -> Findings:
    """All numbers of a run."""
    answers = tables[ANSWERS]
    asked = answers[answers["kind"] == OMITTED]
    read = pd.concat([tables[PROBES], asked.assign(reader=MODEL)], ignore_index=True)
    read = read[read["arm"].isin([RETAINED, RESTART])]
    read = read.assign(
        per_slot=read["bits"] / read["slots"],
        per_digit=read["bits"] / read["asked"],
        share=read["bits"] / (read["asked"] * BITS),
    )
    return measure(answers, of_answers(), (read, of_read()), (tables[LAYERS], OF_LAYERS))


def of_answers() -> Iterator[Estimand]:
    """Of answers to questions."""
    mean = partial(Mean, cluster="trace", within=SHARE)
    claimed: dict[str, Any] = {"by": MODELS, "cluster": "trace", **HEADLINE}
    omitted = {"kind": OMITTED, "arm": RETAINED}
    yield mean(name="answered", of="right", by=(*MODELS, "kind", "arm"))
    yield mean(name="taken", of="follows", by=(*MODELS, "arm"), where={"kind": OMITTED})
    yield Mean(name="margin", of="margin", by=(*MODELS, "arm"), where={"kind": OMITTED}, cluster="trace", unit="nats")
    yield Difference(
        name="gain", of="right", where=omitted, less={**omitted, "arm": RESTART}, within=DIFFERENCE, **claimed
    )
    swapped = {"kind": OMITTED, "arm": STAND_IN}
    yield Mean(name="follows", of="follows", where=swapped, within=SHARE, **claimed)
    yield Mean(name="left", of="right", where=swapped, within=SHARE, **claimed)
    stated = {"kind": STATED, "arm": RETAINED}
    yield Difference(
        name="harm", of="right", where={**stated, "arm": RESTART}, less=stated, within=DIFFERENCE, **claimed
    )


def of_read() -> Iterator[Estimand]:
    """Of what readers know of omitted digits."""
    claimed: dict[str, Any] = {"cluster": "trace", **HEADLINE}
    held, keys = {"arm": RETAINED}, ("reader", *MODELS)
    yield Mean(name="read", of="right", by=(*keys, "arm"), cluster="trace", within=SHARE)
    yield HeldOutDifference(
        name="leak",
        of="right",
        by=MODELS,
        where={**held, "reader": LINEAR},
        less={"arm": RESTART, "reader": LINEAR},
        within=DIFFERENCE,
        **claimed,
    )
    yield Mean(name="per_digit", of="per_digit", by=(*keys, "arm"), cluster="trace", unit="bits")
    designs = partial(Mean, by=("reader", *DESIGNS), where=held, cluster="trace")
    yield designs(name="held", of="bits", unit="bits")
    yield designs(name="per_slot", of="per_slot", unit="bits")
    yield Mean(name="by_seed", of="bits", by=keys, where=held, cluster="trace", unit="bits")
    yield Mean(name="full", of="share", by=DESIGNS, where={**held, "reader": MODEL, "provenance": RETAINED}, **claimed)


OF_LAYERS: tuple[Estimand, ...] = (
    Mean(name="by_layer", of="right", by=(*MODELS, "arm", "layer"), cluster="trace", within=SHARE),
)


def controls(tables: Mapping[str, Rows], findings: Findings, model: Model) -> list[Control]:
    """A restart cannot know what the text omits, no reader knows it either then, and the text itself is read."""
    varies = float(tables[REACH]["varies"].max())
    known = [finding.value for finding in findings.where("per_digit", arm=RESTART)]
    most = max(value.mean for value in known)
    text = [
        finding.value.mean
        for finding in findings.where("answered", kind=STATED)
        if finding.keys["arm"] == (RETAINED if finding.keys["provenance"] == "retained" else RESTART)
    ]
    worst = min(text, default=1.0)
    return [
        Control(
            "After a restart, K and V of a memento are the same whatever it omits, to "
            f"{varies:.1e} of their size (allowed for round-off: {model.round_off:.1e}).",
            varies <= model.round_off,
        ),
        Control(
            f"After a restart no reader detectably knows what the text omits: the most is {most:.4f} bits of a digit.",
            not any(value.above() for value in known),
        ),
        Control(
            f"Questions for stated digits, asked as in the training, are answered right in {worst:.1%} at the least "
            "(90 % wanted): what follows of omitted digits is not for want of understanding the question.",
            worst >= 0.9,
        ),
    ]
