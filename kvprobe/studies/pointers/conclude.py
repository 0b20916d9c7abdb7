"""From answers to findings: what an exchange of the pointer turns, and what is left when the payload is hidden."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.experiments.estimands import HEADLINE, Difference, Estimand, Mean, Ratio, Share, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, SHARE
from kvprobe.studies.pointers import Config
from kvprobe.studies.pointers.cases import FORMS, KNOWN, MOVED, RENAMED, SHIFTED, shown
from kvprobe.studies.pointers.collect import ARMS, EXCHANGED, LATE, LOOKED, MASS, RESTART, VIEW, WHOLE
from kvprobe.tidy import Rows

ABLE = 0.9
"""Share of right answers in view below which nothing is concluded from what an exchange does not turn."""
ONCE: dict[str, Any] = {"by": ("form",), "cluster": "case", **HEADLINE}
OF_ARMS: Sequence[Estimand] = (
    Share(name="right", of="right", by=("form", "arm"), cluster="case"),
    Mean(name="margin", of="margin", by=("form", "arm"), cluster="case", unit="logits"),
    Mean(name="bits", of="bits", by=("form", "arm"), cluster="case", unit="bits"),
    Difference(name="lost", of="right", where={"arm": VIEW}, less={"arm": LATE}, within=DIFFERENCE, **ONCE),
    Difference(name="kept", of="margin", where={"arm": LATE}, less={"arm": RESTART}, unit="logits", **ONCE),
)
WHOLLY = dict(zip(("band", "part"), WHOLE, strict=True))
OF_EXCHANGES: Sequence[Estimand] = (
    *(
        Ratio(name=name, of="turned", over="way", where={**WHOLLY, "donor": donor}, **ONCE)
        for name, donor in (("address", MOVED), ("position", SHIFTED), ("content", RENAMED))
    ),
    *(
        Ratio(name=f"{name}_at", of="turned", over="way", by=("form", "part", "band"), where=where, cluster="case")
        for name, where in (("address", {"donor": MOVED}), ("content", {"donor": RENAMED}))
    ),
)
OF_LOOKS: Sequence[Estimand] = (Ratio(name="looked", of="lost", over="own", by=("form", "band"), cluster="case"),)
OF_MASS: Sequence[Estimand] = (Mean(name="mass", of="mass", by=("form", "layer"), cluster="case", within=SHARE),)


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    findings = findings_of(tables)
    facts = {
        "chats": {form: chat_record(shown(form), masked=("list",)) for form in FORMS},
        "able": {form: findings.at("right", form=form, arm=VIEW).mean >= ABLE for form in FORMS},
    }
    return Conclusion(findings, [control(findings)], facts)


def findings_of(tables: Mapping[str, Rows]) -> Findings:
    """All numbers of a run."""
    exchanged, looked = tables[EXCHANGED], tables[LOOKED]
    return measure(
        tables[ARMS],
        OF_ARMS,
        (exchanged.assign(turned=exchanged["own"] - exchanged["margin"]), OF_EXCHANGES),
        (looked.assign(lost=looked["own"] - looked["margin"]), OF_LOOKS),
        (tables[MASS].astype({"layer": int}), OF_MASS),
    )


def control(findings: Findings) -> Control:
    """What is known of `ordinal` is found."""
    located, copied = KNOWN
    share = {
        (form, name): findings.at(name, form=form).mean for form in (located, copied) for name in ("address", "content")
    }
    found = min(share[located, "address"], share[copied, "content"])
    other = max(share[located, "content"], share[copied, "address"])
    return Control(
        "In the model ordinal, whose slots are known, pointers are found to hold an address and payloads content: "
        f"{found:.0%} of the way at the least, and {other:.0%} at most of what they do not hold.",
        found > 0.5 > other,
    )
