"""Conversations of a user and a model, in the tokens of a model that something is asked of."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from kvprobe.errors import UserError
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

ROLES = ("user", "assistant")

Kind = TypeVar("Kind", bound="Turns")


@runtime_checkable
class Speaker(Protocol):
    """What a model must have for something to be asked of it."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...


class Turns:
    """Turns of a conversation as tokens, each a segment: `user 0`, `assistant 0`, `user 1` …"""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """Args:
            name: of the model, for messages.

        Raises:
            UserError: there is no tokenizer.
        """
        if tokenizer is None:
            raise UserError(f"{name} has no tokenizer, so nothing can be asked of it; give one to `load`.")
        self.tokenizer = tokenizer

    @classmethod
    def of(cls: type[Kind], model: Speaker) -> Kind:
        """In the tokens of this model."""
        return cls(model.tokenizer, model.name)

    def chat(self, *texts: str) -> Tokens:
        """A conversation up to the answer: a user's turn, an answer, a user's turn, and so on."""
        return self.transcript(*texts).tokens(self.tokenizer, generation_prompt=True)

    def transcript(self, *texts: str) -> Transcript:
        turns = [{"role": ROLES[number % 2], "content": text.strip()} for number, text in enumerate(texts)]
        return Transcript.from_messages(turns, [f"{turn['role']} {number // 2}" for number, turn in enumerate(turns)])

    def after(self, before: Tokens, segment: str, text: str) -> Tokens:
        """More of the answer."""
        return Tokens.of(self.ids(text), segment, before.following)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
            UserError: the tokenizer does not know its words, as that of a model `steps` of another vocabulary.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in ids:
            raise UserError(
                f"The tokenizer does not know all words of {text.strip()!r}; take a model that reads English."
            )
        return ids


def question_and_answer(question: str, answer: str) -> Transcript:
    """A conversation of two turns, in the segments `question` and `answer`."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Transcript.from_messages(turns, ["question", "answer"])


Name = TypeVar("Name", bound=str)


def as_long(drafts: Mapping[Name, Tokens]) -> Mapping[Name, Tokens]:
    """Drafts that are each as long as the others.

    Raises:
        UserError: they are not, so that what follows would stand at other positions.
    """
    if len({len(tokens) for tokens in drafts.values()}) > 1:
        raise UserError("The drafts have different numbers of tokens, so their later tokens stand at other positions.")
    return drafts
