"""Running a canary: floors first, then each property, then a verdict, and the smallest script that fails."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Literal

import numpy as np

from kvprobe.arguments import AtLeastZero, checked_arguments
from kvprobe.detection.canary.floor import FALSE_ALARMS, distance, distances, threshold
from kvprobe.detection.canary.prompts import Prompts
from kvprobe.detection.canary.properties import NEW, PROPERTIES, SIDE_BY_SIDE, CacheProperty, ScriptSizes, ScriptStep
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer, Forgets, KnowsBlock, Prompt, SavesSlots
from kvprobe.errors import UserError

CanaryState = Literal["sound", "not reported", "not repeated", "failed", "not exercised", "not offered"]
"""Not reported: answers are alike, but the engine does not say whether they came from its cache. Not repeated:
something lay beyond the threshold once, less than twice as far or less than most wrong blocks do, and nothing did on
new prompts."""
FLOOR_PROMPTS = 16
"""From which the floors are measured at a time."""
MOST_FLOOR_PROMPTS = 48
"""So many are measured before an engine is refused for its noise: with more, less is added for want of knowing it."""
REPEATS = 2
"""How often a script is run again, on new prompts, to see whether a small failure comes back."""
CERTAIN = 2
"""Times the threshold: no nearer excess fails without coming back, however near wrong blocks are."""
POWER = 0.9
"""The share of wrong blocks that must be felt; with less, the run shows nothing."""
WITHOUT_REUSE = {
    "repeated": "The same request again is answered alike.",
    "in company": "Without reuse, other requests in the batch change nothing.",
    "token by token": "Without reuse, tokens read one by one are answered as if read at once.",
    "long": "Without reuse, this also holds after prompts as long as what is read at once.",
}
"""Benign differences, which give the floors, and what must hold of each."""


@dataclass(frozen=True)
class HeldAnswer:
    """An answer, held against that of the same engine without reuse.

    Attributes:
        step: of the script.
        gaps: the distance of each token, in nats.
        reused: tokens of the prompt that came from the cache; None where that is not known.
    """

    step: int
    prompt: Prompt
    gaps: Sequence[float]
    reused: int | None

    @property
    def worst(self) -> float:
        return max(self.gaps)


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
        floors: distances of benign differences by kind, in nats.
        wrong_blocks: how far answers move if the block that is asked for is another, each in nats.
    """

    target: str
    seed: int
    sizes: ScriptSizes
    threshold: float
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


@checked_arguments
def canary(target: Any, *, sizes: ScriptSizes | None = None, seed: AtLeastZero = 0) -> Canary:
    """Hold an engine's answers with reuse against its own without: which property of its cache fails?

    Args:
        target: the engine; see `kvprobe.detection.canary.target.CanaryTarget`.
        sizes: how large the scripts are; by default for the blocks that the engine reports, or of 16 tokens.
        seed: of the random words. No list is sent twice within a run, but by two runs with one seed.

    Raises:
        UserError: the engine has blocks of another size, reuses where it must not, never reuses, or is so noisy that a
            wrong block would be hidden.
    """
    if not isinstance(target, CanaryTarget):
        raise UserError(
            f"A {type(target).__name__} is not a target; give what llama_server, openai_endpoint or "
            "vllm_endpoint return, or an object with a name, tokens, text and ask."
        )
    sizes = sizes or ScriptSizes.of(target)
    if isinstance(target, KnowsBlock) and sizes.block % target.block:
        raise UserError(
            f"{target.name} has blocks of {target.block} tokens, and 'block' is {sizes.block}; give a multiple of "
            f"{target.block}, or none."
        )
    return _Session(target, sizes, seed).run()


class _Session:
    """One run against one engine."""

    def __init__(self, target: CanaryTarget, sizes: ScriptSizes, seed: int) -> None:
        self._target, self._sizes, self._seed, self._requests = target, sizes, seed, 0
        self._prompts = Prompts(target, seed)
        self._last: Prompt = ()

    def run(self) -> Canary:
        began = time.monotonic()
        floors, wrong = self._floors()
        offered = [one for one in PROPERTIES if one.needs is None or isinstance(self._target, one.needs)]
        played = {
            one.name: [(length, self._compare(self._script(one, length))) for length in one.lengths(self._sizes)]
            for one in offered
        }
        judged = sum(len(one.gaps) for runs in played.values() for _, compared in runs for one in compared)
        while np.mean(np.array(wrong) > (limit := _limit(floors, len(wrong), judged))) < POWER:
            if len(wrong) >= MOST_FLOOR_PROMPTS:
                raise UserError(
                    f"Benign differences of {self._target.name} would hide a wrong block: they reach {limit:.3g} nats, "
                    f"and a wrong block moves the answer by {np.median(wrong):.3g}; give other words (another seed), a "
                    "model that can recite a list, or a less noisy engine."
                )
            more, wrong_too = self._floors()
            floors, wrong = {kind: floors[kind] + more[kind] for kind in floors}, wrong + wrong_too
        known = [one.reused for runs in played.values() for _, compared in runs for one in compared]
        if all(reused == 0 for reused in known):
            raise UserError(f"{self._target.name} never reused a token, so its cache was not tested; turn reuse on.")
        certain = max(float(np.median(wrong)), CERTAIN * limit)
        findings = [
            PropertyFinding(
                kind,
                meaning,
                _state(floors[kind], limit, certain, lambda kind=kind: max(self._floors()[0][kind], default=0.0)),
                len(floors[kind]),
                max(floors[kind], default=0.0),
            )
            for kind, meaning in WITHOUT_REUSE.items()
        ]
        for one in PROPERTIES:
            findings.append(
                self._judge(one, played[one.name], limit, certain)
                if one in offered
                else PropertyFinding(one.name, one.meaning, "not offered")
            )
        seconds = time.monotonic() - began
        return Canary(
            self._target.name, self._seed, self._sizes, limit, floors, wrong, findings, self._requests, seconds
        )

    def _floors(self) -> tuple[dict[str, list[float]], list[float]]:
        """Distances of benign differences by kind, and of answers where the block that is asked for is another."""
        floors: dict[str, list[float]] = {kind: [] for kind in WITHOUT_REUSE}
        wrong = []
        for number in range(FLOOR_PROMPTS):
            length = 4 * self._sizes.block + number
            listing, other = self._prompts.listing(length), self._prompts.listing(length)
            place = self._sizes.block // 2 + number % 3 * self._sizes.block
            prompt, beside = listing.asking(place, length), other.asking(0, length)
            clean, again = self._cold(prompt), self._cold(prompt)
            together = self._ask([prompt, beside], NEW, reuse=False)[0]
            floors["repeated"] += distances(clean, again)
            floors["in company"] += distances(clean, together)
            for count in range(1, NEW):
                after = self._cold(prompt + clean.tokens[:count], 1)
                floors["token by token"].append(distance(clean.tops[count], after.tops[0]))
            swapped = (
                prompt[:place] + other.body[place : place + self._sizes.block] + prompt[place + self._sizes.block :]
            )
            wrong.append(max(distances(clean, self._cold(swapped))))
        for length in self._sizes.around_chunk:
            prompt = self._prompts.listing(length).asking(0, length)
            clean = self._cold(prompt)
            for count in (1, NEW - 1):
                after = self._cold(prompt + clean.tokens[:count], 1)
                floors["long"].append(distance(clean.tops[count], after.tops[0]))
        return floors, wrong

    def _script(self, played: CacheProperty, length: int, steps: Sequence[int] | None = None) -> list[ScriptStep]:
        """A script, or some of its steps, on new prompts."""
        script = played.make(self._prompts, self._sizes, length)
        return [step for number, step in enumerate(script) if steps is None or number in steps]

    def _compare(self, script: Sequence[ScriptStep]) -> list[HeldAnswer]:
        """Run a script, and hold its answers against those without reuse."""
        answered = [
            (number, prompt, answer) for number, step in enumerate(script) for prompt, answer in self._take(step)
        ]
        # Only now: a request without reuse may take the place of what the script has left in the cache.
        cold = {prompt: self._cold(prompt) for prompt in dict.fromkeys(prompt for _, prompt, _ in answered)}
        return [
            HeldAnswer(number, prompt, distances(cold[prompt], answer), answer.reused)
            for number, prompt, answer in answered
        ]

    def _take(self, step: ScriptStep) -> list[tuple[Prompt, EngineAnswer]]:
        """Take a step, and return the prompts and answers that are to be compared."""
        target = self._target
        if step.kind == "wait":
            time.sleep(self._sizes.idle)
        elif step.kind == "fill":
            for first in range(0, len(step.prompts), SIDE_BY_SIDE):
                self._ask(step.prompts[first : first + SIDE_BY_SIDE], 1, reuse=True)
        elif step.kind == "save" and isinstance(target, SavesSlots):
            target.save(step.prompts[0])
        elif step.kind == "restore" and isinstance(target, SavesSlots):
            target.restore()
        elif step.kind == "forget" and isinstance(target, Forgets):
            target.forget()
        else:
            prompts = [self._last + prompt for prompt in step.prompts] if step.kind == "go on" else [*step.prompts]
            answers = self._ask(prompts, NEW, reuse=True)
            self._last = prompts[-1] + answers[-1].tokens
            return list(zip(prompts, answers, strict=True))
        return []

    def _cold(self, prompt: Prompt, new: int = NEW) -> EngineAnswer:
        answer = self._ask([prompt], new, reuse=False)[0]
        if answer.reused:
            raise UserError(
                f"{self._target.name} reused {answer.reused} tokens of a request that was to be read anew, so there is "
                "nothing to hold its cache against; see which requests without reuse it offers."
            )
        if not len(answer.tokens) == len(answer.tops) == new:
            raise UserError(
                f"{self._target.name} gave {len(answer.tokens)} tokens and log-probabilities of {len(answer.tops)}, "
                f"where {new} were asked for; let it go on after an end of text, and give those of each token."
            )
        return answer

    def _ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        self._requests += len(prompts)
        return self._target.ask(prompts, new, reuse)

    def _judge(
        self, one: CacheProperty, runs: Sequence[tuple[int, Sequence[HeldAnswer]]], limit: float, certain: float
    ) -> PropertyFinding:
        answers = [answer for _, compared in runs for answer in compared]
        known = [answer.reused for answer in answers if answer.reused is not None]
        gaps = [answer.worst for answer in answers]
        failing = [length for length, compared in runs if any(answer.worst > limit for answer in compared)]
        exercised = all(
            one.exercised([answer.reused for answer in compared], len(compared[-1].prompt), self._sizes)
            for _, compared in runs
        )

        def again() -> float:
            """The worst of the scripts that failed, on new prompts."""
            scripts = [self._script(one, length) for length in failing for _ in range(REPEATS)]
            return max(answer.worst for script in scripts for answer in self._compare(script))

        state = _state(gaps, limit, certain, again)
        if state == "sound":
            state = "not exercised" if not exercised else "sound" if known else "not reported"
        finding = PropertyFinding(one.name, one.meaning, state, len(answers), max(gaps), sum(known) if known else None)
        return replace(finding, failure=self._smallest(one, failing[0], limit)) if state == "failed" else finding

    def _smallest(self, one: CacheProperty, length: int, limit: float) -> SmallestFailure | None:
        """The shortest prompt, by bisection over blocks, and the fewest steps that still fail; None where the failure
        does not come back."""

        def fails(length: int, steps: Sequence[int]) -> SmallestFailure | None:
            script = self._script(one, length, steps)
            wrong = next((answer for answer in self._compare(script) if answer.worst > limit), None)
            if wrong is None:
                return None
            return SmallestFailure(length, wrong.worst, self._target.text(wrong.prompt), script[: wrong.step + 1])

        steps = list(range(len(one.make(self._prompts, self._sizes, length))))
        smallest = fails(length, steps)
        if smallest is None:
            return None
        block = self._sizes.block
        sound, failing = 1, length // block  # in blocks; a list of one block holds no whole line
        while failing - sound > 1:
            middle = (sound + failing) // 2
            shorter = fails(length % block + middle * block, steps)
            smallest, sound, failing = (smallest, middle, failing) if shorter is None else (shorter, sound, middle)
        length = smallest.length
        steps = steps[: len(smallest.script)]
        for step in steps[:-1]:
            fewer = [other for other in steps if other != step]
            if (without := fails(length, fewer)) is not None:
                smallest, steps = without, fewer
        return smallest


def _limit(floors: Mapping[str, Sequence[float]], prompts: int, judged: int) -> float:
    """The threshold of a run in which the floors are judged, and so many distances beside."""
    return threshold(floors, prompts, judged + sum(map(len, floors.values())))


def _state(
    gaps: Sequence[float], limit: float, certain: float, again: Callable[[], float]
) -> Literal["sound", "not repeated", "failed"]:
    """What distances say; `again` measures the worst on new prompts, and is asked only where it decides."""
    worst = max(gaps, default=0.0)
    if worst <= limit:
        return "sound"
    return "failed" if worst > certain or again() > limit else "not repeated"


def _finite(value: Any) -> Any:
    """Plain data without infinities, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
