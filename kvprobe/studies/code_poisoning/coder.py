"""A model that is asked for functions: prompts begin the answer with the function's first line, and rows share a
batch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.generate import generate, row_generators, stop_tokens
from kvprobe.inference.model import Model
from kvprobe.studies.code_poisoning.tasks import Function
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns

TEMPERATURE = 0.8
"""Of the first answers that are drawn; all others are the likeliest."""
FENCE = "```"


@dataclass(frozen=True)
class Prompt:
    """What is read before an answer.

    Attributes:
        lead: the beginning of the answer, which the model is given.
        hidden: a segment that is masked before the last message is read.
    """

    tokens: Tokens
    lead: str = ""
    hidden: str = ""


@dataclass(frozen=True)
class CodeReply:
    """An answer, with its lead, and what it cost.

    Attributes:
        read, generated: tokens.
        seconds: of the batch, shared out by the tokens generated.
        slot_bytes: of a token in the cache.
    """

    text: str
    read: int
    generated: int
    seconds: float
    slot_bytes: int


@dataclass(frozen=True)
class Coder:
    """A model that is asked for functions.

    Attributes:
        new: most tokens of an answer.
        rows: answers at once.
    """

    model: Model
    new: int
    rows: int

    @property
    def turns(self) -> Turns:
        return Turns.of(self.model)

    def prompt(self, tokens: Tokens, function: Function) -> Prompt:
        """A prompt whose answer begins as a block of code with this function."""
        lead = f"{FENCE}python\ndef {function.call}:\n"
        return Prompt(tokens + self.turns.after(tokens, "lead", lead), lead)

    def asked(self, function: Function, *texts: str) -> Prompt:
        """A conversation whose last message asks for this function."""
        return self.prompt(self.turns.chat(*texts), function)

    def replies(self, prompts: Sequence[Prompt], seed: int | None = None) -> list[CodeReply]:
        """The likeliest answers; with a seed, answers drawn.

        An answer with a lead ends with its block of code; others have twice as many tokens.
        """
        order = sorted(range(len(prompts)), key=lambda place: (bool(prompts[place].hidden), not prompts[place].lead))
        found: dict[int, CodeReply] = {}
        while order:
            first = prompts[order[0]]
            alike = [
                at
                for at in order[: self.rows]
                if (bool(prompts[at].hidden), not prompts[at].lead) == (bool(first.hidden), not first.lead)
            ]
            order = order[len(alike) :]
            found.update(zip(alike, self._together([prompts[at] for at in alike], seed, alike[0]), strict=True))
        return [found[place] for place in range(len(prompts))]

    def _together(self, prompts: Sequence[Prompt], seed: int | None, first: int) -> list[CodeReply]:
        """One batch, of prompts that all have a lead or none, and a hidden segment or none."""
        started, lanes = time.perf_counter(), self.model.lanes
        past, unread = self._past(prompts) if prompts[0].hidden else (None, [prompt.tokens for prompt in prompts])
        ends = stop_tokens(lanes) + (self.turns.ids(FENCE) if prompts[0].lead else [])
        drawn = (
            {} if seed is None else {"temperature": TEMPERATURE, "generators": self._generators(seed, first, prompts)}
        )
        most = self.new if prompts[0].lead else 2 * self.new  # words before the code
        made = generate(lanes, unread, past, max_new_tokens=most, stop=ends, **drawn)
        seconds = (time.perf_counter() - started) / sum(map(len, made.tokens))
        slot_bytes = made.cache.nbytes // (made.cache.batch * made.cache.slots)
        return [
            CodeReply(
                f"{prompt.lead}{text.rstrip()}\n{FENCE}" if prompt.lead else text,
                len(prompt.tokens),
                len(ids),
                seconds * len(ids),
                slot_bytes,
            )
            for prompt, text, ids in zip(prompts, made.texts, made.tokens, strict=True)
        ]

    def _generators(self, seed: int, first: int, prompts: Sequence[Prompt]) -> list[torch.Generator]:
        """Those of these rows, among all that are drawn with a seed."""
        return row_generators(seed, first + len(prompts), self.model.lanes.device)[first:]

    def _past(self, prompts: Sequence[Prompt]) -> tuple[KVCache, list[Tokens]]:
        """The caches of all but the last message, with a segment masked; and what is left to read."""
        cuts = [last_message(prompt.tokens) for prompt in prompts]
        cache = self.model.extend(None, [prompt.tokens[:cut] for prompt, cut in zip(prompts, cuts, strict=True)])[0]
        return cache.mask(prompts[0].hidden), [prompt.tokens[cut:] for prompt, cut in zip(prompts, cuts, strict=True)]


def last_message(tokens: Tokens) -> int:
    """Where the user's last message begins."""
    return tokens.span(max((name for name in tokens.names if name.startswith("user ")), key=len_and_name)).start


def len_and_name(name: str) -> tuple[int, str]:
    """The order of `user 2` and `user 10`."""
    return len(name), name


def without(prompt: Prompt, segment: str) -> Prompt:
    """The prompt as if a segment had never been read; all else stays where it stands."""
    places = [place for place, name in enumerate(prompt.tokens.segments) if name != segment]
    return replace(prompt, tokens=prompt.tokens.at(places), hidden="")
