"""Running a canary: each property, then the floors, then a verdict, and the smallest script that fails."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from kvprobe.arguments import AtLeastZero, checked_arguments
from kvprobe.detection.canary.findings import Canary, PropertyFinding, SmallestFailure
from kvprobe.detection.canary.floor import distances, threshold
from kvprobe.detection.canary.prompts import Prompts
from kvprobe.detection.canary.properties import (
    CHUNK,
    NEW,
    PROPERTIES,
    SIDE_BY_SIDE,
    CacheProperty,
    ScriptSizes,
    ScriptStep,
)
from kvprobe.detection.canary.target import CanaryTarget, EngineAnswer, Forgets, KnowsBlock, Prompt, SavesSlots
from kvprobe.errors import UserError

FLOOR_PROMPTS = 16
"""From which the floors are measured at a time; an even number, since two are asked side by side."""
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
LONG = "long", CHUNK.name
"""What is judged by the threshold of long prompts: kernels change with the length."""
Played = Sequence[tuple[int, Sequence["HeldAnswer"]]]
"""What a property's scripts gave, by the length in tokens."""


@dataclass(frozen=True)
class HeldAnswer:
    """An answer, held against that of the same engine without reuse.

    Attributes:
        step: of the script.
        gaps: the distance of each token, in nats.
        cold: the answer without reuse.
        reused: tokens of the prompt that came from the cache; None where that is not known.
    """

    step: int
    prompt: Prompt
    gaps: Sequence[float]
    cold: EngineAnswer
    reused: int | None

    @property
    def worst(self) -> float:
        return max(self.gaps)


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
        offered = [one for one in PROPERTIES if one.needs is None or isinstance(self._target, one.needs)]
        played = {one.name: self._play(one) for one in offered}
        floors, wrong = self._floors(played[CHUNK.name])
        judged = sum(len(one.gaps) for runs in played.values() for _, compared in runs for one in compared)
        while np.mean(np.array(wrong) > max(limits := _limits(floors, len(wrong), judged))) < POWER:
            if len(wrong) >= MOST_FLOOR_PROMPTS:
                raise UserError(
                    f"Benign differences of {self._target.name} would hide a wrong block: they reach {max(limits):.3g} "
                    f"nats, and a wrong block moves the answer by {np.median(wrong):.3g}; give other words (another "
                    "seed), a model that can recite a list, or a less noisy engine."
                )
            more, wrong_too = self._floors()
            floors, wrong = {kind: floors[kind] + more[kind] for kind in floors}, wrong + wrong_too
        known = [one.reused for runs in played.values() for _, compared in runs for one in compared]
        if all(reused == 0 for reused in known):
            raise UserError(f"{self._target.name} never reused a token, so its cache was not tested; turn reuse on.")
        findings = [
            self._judge_floor(kind, floors[kind], limits[kind in LONG], float(np.median(wrong)))
            for kind in WITHOUT_REUSE
        ]
        for one in PROPERTIES:
            findings.append(
                self._judge(one, played[one.name], limits[one.name in LONG], float(np.median(wrong)))
                if one in offered
                else PropertyFinding(one.name, one.meaning, "not offered")
            )
        seconds = time.monotonic() - began
        return Canary(
            self._target.name, self._seed, self._sizes, *limits, floors, wrong, findings, self._requests, seconds
        )

    def _floors(self, long: Played | None = None) -> tuple[dict[str, list[float]], list[float]]:
        """Distances of benign differences by kind, and of answers where the block that is asked for is another.

        Prompts have four to seven blocks, as those of most scripts, and end at each place of a block of 16.

        Args:
            long: what the longest prompts gave, whose answers without reuse are then not asked for again.
        """
        floors: dict[str, list[float]] = {kind: [] for kind in WITHOUT_REUSE}
        wrong: list[float] = []
        block = self._sizes.block
        before: tuple[Prompt, EngineAnswer] | None = None
        for number in range(FLOOR_PROMPTS):
            length = (4 + number % 3) * block + number
            listing, other = self._prompts.listing(length), self._prompts.listing(length)
            place = block // 2 + number % 3 * block
            prompt = listing.asking(place, length)
            clean = self._cold(prompt)
            floors["repeated"] += distances(clean, self._cold(prompt))
            floors["token by token"] += self._token_by_token(prompt, clean)
            swapped = prompt[:place] + other.body[place : place + block] + prompt[place + block :]
            wrong.append(max(distances(clean, self._cold(swapped))))
            if before is None:
                before = prompt, clean
            else:
                alone = before[1], clean
                together = self._ask([before[0], prompt], NEW, reuse=False)
                floors["in company"] += [gap for pair in zip(alone, together, strict=True) for gap in distances(*pair)]
                before = None
        for _, compared in self._play(CHUNK) if long is None else long:
            floors["long"] += self._token_by_token(compared[0].prompt, compared[0].cold)
        return floors, wrong

    def _token_by_token(self, prompt: Prompt, clean: EngineAnswer) -> list[float]:
        """How far the rest of an answer is from that after the same prompt and its first token, read at once."""
        rest = EngineAnswer(clean.tokens[1:], clean.tops[1:])
        return distances(rest, self._cold(prompt + clean.tokens[:1], NEW - 1))

    def _play(self, one: CacheProperty) -> Played:
        return [(length, [*self._compare(self._script(one, length))]) for length in one.lengths(self._sizes)]

    def _script(self, played: CacheProperty, length: int, steps: Sequence[int] | None = None) -> list[ScriptStep]:
        """A script, or some of its steps, on new prompts."""
        script = played.make(self._prompts, self._sizes, length)
        return [step for number, step in enumerate(script) if steps is None or number in steps]

    def _compare(self, script: Sequence[ScriptStep]) -> Iterator[HeldAnswer]:
        """Run a script, and hold its answers against those without reuse, one after the other."""
        answered = [
            (number, prompt, answer) for number, step in enumerate(script) for prompt, answer in self._take(step)
        ]
        # Only now: a request without reuse may take the place of what the script has left in the cache.
        cold: dict[Prompt, EngineAnswer] = {}
        for number, prompt, answer in answered:
            if prompt not in cold:
                cold[prompt] = self._cold(prompt)
            yield HeldAnswer(number, prompt, distances(cold[prompt], answer), cold[prompt], answer.reused)

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

    def _judge_floor(self, kind: str, gaps: Sequence[float], limit: float, block: float) -> PropertyFinding:
        state = _state(gaps, limit, block, lambda: max(self._floors()[0][kind], default=0.0))
        return PropertyFinding(kind, WITHOUT_REUSE[kind], state, len(gaps), max(gaps, default=0.0))

    def _judge(self, one: CacheProperty, runs: Played, limit: float, block: float) -> PropertyFinding:
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

        state = _state(gaps, limit, block, again)
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


def _limits(floors: Mapping[str, Sequence[float]], prompts: int, judged: int) -> tuple[float, float]:
    """The thresholds of short and of long prompts, where the floors are judged, and so many distances beside."""
    comparisons = judged + sum(map(len, floors.values()))
    short = {kind: gaps for kind, gaps in floors.items() if kind not in LONG}
    return threshold(short, prompts, comparisons), threshold(floors, prompts, comparisons)


def _state(
    gaps: Sequence[float], limit: float, block: float, again: Callable[[], float]
) -> Literal["sound", "not repeated", "failed"]:
    """What distances say; `again` measures the worst on new prompts, and is asked only where it decides.

    Args:
        block: how far a wrong block moves answers.
    """
    worst = max(gaps, default=0.0)
    if worst <= limit:
        return "sound"
    return "failed" if worst > max(block, CERTAIN * limit) or again() > limit else "not repeated"
