"""What must hold of a cache: each property is a short script of requests, whose answers are those of a cold engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvprobe.checks import require
from kvprobe.detection.canary.prompts import Prompts
from kvprobe.detection.canary.target import Forgets, KnowsBlock, Prompt, SavesSlots

NEW = 4
"""Tokens of an answer: as many as a code has digits."""
SIDE_BY_SIDE = 4
"""Requests at once."""
Kind = Literal["ask", "go on", "fill", "wait", "save", "restore", "forget"]


@dataclass(frozen=True)
class ScriptStep:
    """One step of a script.

    Attributes:
        kind: `ask` all prompts at once, with reuse; `go on` from the last request and its answer with what is in
            `prompts`; `fill` the engine's cache with prompts whose answers nobody compares; `wait`; `save` a prompt's
            cache and `restore` it; `forget` the engine's own cache.
    """

    kind: Kind
    prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True)
class ScriptSizes:
    """How large the scripts are.

    Attributes:
        block: tokens of a block of the engine's cache, or a multiple.
        chunk: tokens that the engine reads at once.
        fill: tokens of other requests that push a prompt out of the cache.
        idle: seconds without a request.
    """

    block: int = 16
    chunk: int = 512
    fill: int = 2048
    idle: float = 1.0

    def __post_init__(self) -> None:
        require("block", self.block, 8)
        require("chunk", self.chunk, 2 * self.block, 2**17)
        require("fill", self.fill, 0, 2**24)
        require("idle", self.idle, 0, 86_400)

    @classmethod
    def of(cls, target: object) -> "ScriptSizes":
        """Of the blocks that an engine reports, or of 16 tokens."""
        return cls(block=target.block) if isinstance(target, KnowsBlock) else cls()

    @property
    def around_blocks(self) -> list[int]:
        """Lengths one token short of a few blocks, of just as many, and one more."""
        return [count * self.block + more for count in (4, 5) for more in (-1, 0, 1)]

    @property
    def around_chunk(self) -> list[int]:
        """Lengths one token short of what is read at once, of just as many, and one more."""
        return [self.chunk + more for more in (-1, 0, 1)]


@dataclass(frozen=True)
class CacheProperty:
    """A property of a cache.

    Attributes:
        meaning: what holds, in a sentence.
        make: the script at one length, in tokens, on new prompts.
        lengths: at which it is run.
        needs: what only some engines can.
        pushes_out: whether it shows something only where its last answer had lost a block, not where one was reused.
    """

    name: str
    meaning: str
    make: Callable[[Prompts, ScriptSizes, int], Sequence[ScriptStep]]
    lengths: Callable[[ScriptSizes], Sequence[int]] = field(default=lambda sizes: [6 * sizes.block])
    needs: type | None = None
    pushes_out: bool = False

    def exercised(self, reused: Sequence[int | None], prompt: int, sizes: ScriptSizes) -> bool:
        """Whether the cache did what this is about, by what each answer reused; yes, where that is not reported.

        Args:
            prompt: tokens of the last prompt.
        """
        known = [count for count in reused if count is not None]
        if not known:
            return True
        return known[-1] < prompt - sizes.block if self.pushes_out else any(known)


def _places(sizes: ScriptSizes, length: int) -> range:
    """A place in each block."""
    return range(sizes.block // 2, length, sizes.block)


def _again(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    prompt = prompts.listing(length).asking(sizes.block, length)
    return [ScriptStep("ask", (prompt,)), ScriptStep("ask", (prompt,))]


def _prefix(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing = prompts.listing(length + 2 * sizes.block)
    whole = listing.after(length - sizes.block // 2, len(listing.body))
    return [ScriptStep("fill", (listing.body[:length],)), ScriptStep("ask", (whole,))]


def _branch(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing = prompts.listing(length)
    return [ScriptStep("ask", (listing.after(place, length),)) for place in [*_places(sizes, length), 0]]


def _shorter(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing = prompts.listing(length)
    middle = length // 2 + 1
    long, short = listing.after(sizes.block, length), listing.after(sizes.block, middle)
    return [ScriptStep("ask", (long,)), ScriptStep("ask", (short,)), ScriptStep("ask", (long,))]


def _other_beginning(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    mine, other = (prompts.listing(length).after(2 * sizes.block, length) for _ in range(2))
    theirs = (
        other[: sizes.block] + mine[sizes.block :]
    )  # its first block is found, too: only then is the next looked up
    return [
        ScriptStep("ask", (mine,)),
        ScriptStep("fill", (other,)),
        ScriptStep("ask", (theirs,)),
        ScriptStep("ask", (mine,)),
    ]


def _go_on(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing = prompts.listing(length)
    following = prompts.listing(sizes.block)
    return [
        ScriptStep("ask", (listing.asking(sizes.block, length),)),
        ScriptStep("go on", (listing.question(2 * sizes.block),)),
        ScriptStep("go on", (following.body + listing.question(3 * sizes.block),)),
    ]


def _filling(prompts: Prompts, sizes: ScriptSizes, length: int) -> ScriptStep:
    """Other requests, each as long as the prompt that they push out."""
    return ScriptStep("fill", tuple(prompts.listing(length).body[:length] for _ in range(-(-sizes.fill // length))))


def _evict(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    prompt = prompts.listing(length).asking(sizes.block, length)
    return [ScriptStep("ask", (prompt,)), _filling(prompts, sizes, length), ScriptStep("ask", (prompt,))]


def _side_by_side(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing, others = prompts.listing(length), [prompts.listing(length) for _ in range(SIDE_BY_SIDE - 2)]
    together = ScriptStep(
        "ask",
        (
            listing.after(0, length),
            listing.after(2 * sizes.block, length),
            *(other.asking(sizes.block, length) for other in others),
        ),
    )
    return [ScriptStep("fill", (listing.body[:length],)), together, together]


def _idle(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    first, again = _again(prompts, sizes, length)
    return [first, ScriptStep("wait"), again]


def _saved(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing = prompts.listing(length)
    steps = [ScriptStep("save", (listing.body[:length],)), ScriptStep("fill", (prompts.listing(length).body,))]
    for place in _places(sizes, length):
        steps += [ScriptStep("restore"), ScriptStep("ask", (listing.after(place, length),))]
    return steps


def _loaded(prompts: Prompts, sizes: ScriptSizes, length: int) -> list[ScriptStep]:
    listing = prompts.listing(length)
    return [
        ScriptStep("ask", (listing.after(0, length),)),
        *(
            step
            for place in _places(sizes, length)
            for step in (ScriptStep("forget"), ScriptStep("ask", (listing.after(place, length),)))
        ),
    ]


CHUNK = CacheProperty(
    "chunk",
    "A prompt longer than what is read at once is answered alike, however it is cut.",
    _again,
    lambda sizes: sizes.around_chunk,
)
"""The one whose prompts are much longer than those of the others."""
PROPERTIES = (
    CacheProperty(
        "hit",
        "A prompt that fills its blocks, or nearly, or hardly, is answered alike twice.",
        _again,
        lambda sizes: sizes.around_blocks,
    ),
    CacheProperty(
        "prefix",
        "A cached beginning and what follows it are answered as if read at once.",
        _prefix,
        lambda sizes: sizes.around_blocks,
    ),
    CacheProperty("branch", "Many continuations of one beginning do not touch each other, or the beginning.", _branch),
    CacheProperty(
        "shorter",
        "After a long prompt, its beginning alone is answered as if nothing had followed.",
        _shorter,
        lambda sizes: [6 * sizes.block, 6 * sizes.block + 1],
    ),
    CacheProperty("beginning", "Equal text after another beginning is not taken from the cache.", _other_beginning),
    CHUNK,
    CacheProperty(
        "go on",
        "A conversation goes on from generated tokens as if they had been read.",
        _go_on,
        lambda sizes: [6 * sizes.block + more for more in (-5, -2, 0)],
    ),
    CacheProperty(
        "evict", "A prompt that other requests have pushed out is answered as before.", _evict, pushes_out=True
    ),
    CacheProperty("side by side", "Requests that run at once do not touch each other.", _side_by_side),
    CacheProperty("idle", "After a pause a prompt is answered as before.", _idle),
    CacheProperty("slot file", "A saved slot that is put back goes on as if it had stayed.", _saved, needs=SavesSlots),
    CacheProperty(
        "load", "A cache that comes from a store outside the engine goes on as its own.", _loaded, needs=Forgets
    ),
)
