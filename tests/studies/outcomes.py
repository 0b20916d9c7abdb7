"""The same conclusion with other outcomes: what a page must be able to show before an hour's run gives it."""

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

from kvprobe.experiments.study import Conclusion, Control, Study
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import Estimate

OUTCOMES: dict[str, Callable[[float], Estimate]] = {
    "above": lambda against: Estimate(against + 0.4, against + 0.2, against + 0.6, 20, against, against + 1.0),
    "below": lambda against: Estimate(against - 0.4, against - 0.6, against - 0.2, 20, against - 1.0, against),
    "unclear": lambda against: Estimate(against + 0.1, against - 0.2, against + 0.4, 20, against - 1.0, against + 1.0),
    "too few clusters": lambda against: Estimate(against + 0.4, clusters=3, smallest=against, largest=against + 0.6),
    "unknown": lambda _: Estimate(nan),
}
"""Of every number that has an interval or a range, from the value that claims of it are made against."""
FORGED = "<img src=x onerror=alert(1)> & more"
"""A text that must never reach a page as it is."""


def with_outcome(study: Study[Any], conclusion: Conclusion, outcome: str) -> Conclusion:
    """All numbers that have intervals, with this outcome; counts and the like stay."""
    change, against = OUTCOMES[outcome], {claim.finding: claim.against for claim in study.claims}

    def changed(finding: Finding) -> Finding:
        measured = finding.value.clusters > 0
        return replace(finding, value=change(against.get(finding.name, 0.0))) if measured else finding

    return replace(conclusion, findings=Findings(map(changed, conclusion.findings)))


def with_failed_controls(conclusion: Conclusion) -> Conclusion:
    return replace(conclusion, controls=[Control(control.seen, False) for control in conclusion.controls])


def with_forged_texts(conclusion: Conclusion) -> Conclusion:
    """Markup in every text that a model, a task or a file may have given, but for single words, which may be names, and
    packed weights of attention."""

    def forged(content: Any) -> Any:
        if isinstance(content, dict):
            return {key: forged(value) for key, value in content.items()}
        if isinstance(content, str) and content.startswith("eJ"):
            return content  # zlib in base 64
        if isinstance(content, list):
            return [forged(value) for value in content]
        return content + FORGED if isinstance(content, str) and not content.isidentifier() else content

    controls = [Control(control.seen + FORGED, control.holds) for control in conclusion.controls]
    return replace(conclusion, facts=forged(dict(conclusion.facts)), controls=controls, warnings=[FORGED])
