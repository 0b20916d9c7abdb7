"""A canary as a page: which properties of a cache hold, the floors, and the smallest prompts that fail."""

from pathlib import Path
from statistics import median

from kvprobe.detection.canary.findings import Canary
from kvprobe.detection.canary.floor import FALSE_ALARMS
from kvprobe.files import write_whole
from kvprobe.report.document import SeenPassage
from kvprobe.report.views.page import render


def save_canary(result: Canary, path: str | Path) -> Path:
    """Write the page as one HTML file that needs no other."""
    return write_whole(path, canary_page(result))


def canary_page(result: Canary) -> str:
    """The page."""
    return render(
        "canary.html.j2",
        [],
        title=f"Canary of {result.target}",
        question="Is each answer from the engine's cache the one that the engine gives without it?",
        answer=result.verdict,
        passages=[
            SeenPassage(
                finding.name,
                " → ".join(step.kind for step in failure.script),
                failure.text,
                False,
                f"{failure.gap:.3g} nats",
            )
            for finding in result.findings
            if (failure := finding.failure) is not None
        ],
        findings=result.findings,
        floors={kind: (len(gaps), median(gaps), max(gaps)) for kind, gaps in result.floors.items() if gaps},
        wrong=median(result.wrong_blocks),
        result=result,
        false_alarms=FALSE_ALARMS,
    )


def canary_lines(result: Canary) -> list[str]:
    """The same as lines of text, for a terminal."""
    lines = [f"{'property':16}{'':14}{'answers':>8}{'reused':>8}{'worst':>10}"]
    for finding in result.findings:
        reused = "–" if finding.reused is None else str(finding.reused)
        lines.append(f"{finding.name:16}{finding.state:14}{finding.compared:8}{reused:>8}{finding.worst:10.3g}")
        if (failure := finding.failure) is not None:
            steps = ", ".join(step.kind for step in failure.script)
            lines.append(f"  smallest: {steps}; list of {failure.length} tokens; off by {failure.gap:.3g} nats")
    return [
        *lines,
        "",
        f"Threshold {result.threshold:.3g} nats ({result.long_threshold:.3g} for prompts as long as what is read at "
        f"once), for {FALSE_ALARMS:.0%} false alarms a run; a wrong block moves an answer by "
        f"{median(result.wrong_blocks):.3g} (median), and {result.power:.0%} of wrong blocks would be seen.",
        f"{result.requests} requests in {result.seconds:.0f} s.",
        result.verdict,
    ]
