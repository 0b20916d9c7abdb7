"""The control that causality gives: what a text cannot have reached varies with it by round-off alone."""

from kvprobe.experiments.study import Control
from kvprobe.report.findings import Findings
from kvprobe.tidy import Rows


def light_cone(findings: Findings, name: str, variation: Rows, allowed: float, cannot: str) -> Control:
    """Whether the layers 0 and 1 of slots that are two steps from a text stay out of its reach.

    How far these layers vary with the text, and the last one, which may, become findings of this name by `layers`.

    Args:
        variation: `variation` by `layer`, such as `kvprobe.probing.arms.Arms.variation` gives.
        allowed: for round-off, relative to the size of what varies.
        cannot: what cannot depend on what.
    """
    by_layer = variation.groupby("layer")["variation"].max()
    near, far = float(by_layer[by_layer.index < 2].max()), float(by_layer.iloc[-1])
    findings.number(name, near, layers="0 and 1")
    findings.number(name, far, layers="last")
    seen = f"by {near:.1e} of their size (allowed for round-off: {allowed:.1e}); at the last layer by {far:.1e}"
    return Control(f"Light cone: {cannot}. They vary {seen}.", near <= allowed)
