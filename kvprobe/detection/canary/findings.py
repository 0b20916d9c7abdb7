"""What a canary found: each property of a cache, and the smallest script that fails."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np

from kvprobe.detection.canary.floor import FALSE_ALARMS
from kvprobe.detection.canary.properties import ScriptSizes, ScriptStep

CanaryState = Literal["sound", "not reported", "not repeated", "failed", "not exercised", "not offered"]
"""Not reported: answers are alike, but the engine does not say whether they came from its cache. Not repeated:
something lay beyond the threshold once, less than twice as far or less than most wrong blocks do, and nothing did on
new prompts."""


@dataclass(frozen=True)
class SmallestFailure:
    """The smallest script that still fails.

    Attributes:
        length: tokens of its prompt, without the question where that follows.
        gap: the distance of its last answer from that without reuse, in nats.
        text: the prompt of its last step.
    """

    length: int
    gap: float
    text: str
    script: Sequence[ScriptStep]


@dataclass(frozen=True)
class PropertyFinding:
    """What was seen of one property.

    Attributes:
        compared: answers.
        worst: the largest distance, in nats.
        reused: tokens that came from the cache in all; None where that is not known.
    """

    name: str
    meaning: str
    state: CanaryState
    compared: int = 0
    worst: float = 0.0
    reused: int | None = None
    failure: SmallestFailure | None = None


@dataclass(frozen=True)
class Canary:
    """What a canary found.

    Attributes:
        threshold: the distance, in nats, from which an answer is wrong: if something is beyond it again on new prompts,
            or this one is twice as far, and farther off than the median of `wrong_blocks`.
        long_threshold: the same for prompts as long as what the engine reads at once.
        floors: distances of benign differences by kind, in nats.
        wrong_blocks: how far answers move if the block that is asked for is another, each in nats.
    """

    target: str
    seed: int
    sizes: ScriptSizes
    threshold: float
    long_threshold: float
    floors: dict[str, list[float]]
    wrong_blocks: list[float]
    findings: Sequence[PropertyFinding]
    requests: int
    seconds: float

    @property
    def failed(self) -> list[str]:
        """Names of the properties that do not hold."""
        return [finding.name for finding in self.findings if finding.state == "failed"]

    @property
    def power(self) -> float:
        """The share of wrong blocks that are felt."""
        return float(np.mean(np.array(self.wrong_blocks) > self.threshold))

    @property
    def verdict(self) -> str:
        """In a sentence."""
        tried = [finding for finding in self.findings if finding.state not in ("not exercised", "not offered")]
        silent = any(finding.state == "not reported" for finding in tried)
        if not self.failed:
            doubt = " The engine does not report what it reuses, so its cache may not have been used." if silent else ""
            if once := [finding.name for finding in tried if finding.state == "not repeated"]:
                doubt += f" Beyond the threshold once, and not on new prompts: {', '.join(once)}."
            return f"Sound: {len(tried)} properties hold in {sum(one.compared for one in tried)} answers.{doubt}"
        return f"Failed: {', '.join(self.failed)} ({len(self.failed)} of {len(tried)} properties)."

    def record(self) -> dict[str, Any]:
        """For JSON; distances that are infinite become None."""
        return {"verdict": self.verdict, "power": self.power, "false_alarms": FALSE_ALARMS} | _finite(asdict(self))


def _finite(value: Any) -> Any:
    """Plain data without infinities, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
