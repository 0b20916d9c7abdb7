"""What a canary asks: an engine behind a few methods, and what only some engines offer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Token = int | str
"""The number of a token; a piece of text, where an engine has no numbers for its users."""
Prompt = tuple[Token, ...]


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine generated, greedily.

    Attributes:
        tokens: what was generated.
        tops: of each generated token, the most likely tokens and their log-probabilities, in nats.
        reused: tokens of the prompt that came from a cache; None where the engine does not report it.
    """

    tokens: Prompt
    tops: Sequence[Mapping[Token, float]]
    reused: int | None = None


@runtime_checkable
class CanaryTarget(Protocol):
    """An engine.

    Attributes:
        name: for the report.
    """

    name: str

    def tokens(self, text: str, first: bool = False) -> Prompt:
        """The tokens of a text; `first`: with what stands before every prompt, such as a start token."""
        ...

    def text(self, prompt: Prompt) -> str:
        """The text of tokens, for the report."""
        ...

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        """EngineAnswer prompts with `new` tokens each, all of them at once where the engine can.

        Args:
            reuse: whether caches may be used and filled; if not, each prompt is read anew, whatever was asked before.
        """
        ...


@runtime_checkable
class SavesSlots(Protocol):
    """An engine that saves its cache to a file and takes it back."""

    def save(self, prompt: Prompt) -> None:
        """Read a prompt, and save its cache."""
        ...

    def restore(self) -> None:
        """Put back what was saved last."""
        ...


@runtime_checkable
class KnowsBlock(Protocol):
    """An engine that reports how many tokens a block of its cache has.

    Attributes:
        block: that number.
    """

    block: int


@runtime_checkable
class Forgets(Protocol):
    """An engine that drops its own cache on request, so that the next hit comes from a store outside of it."""

    def forget(self) -> None: ...
