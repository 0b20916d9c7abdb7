"""Flags that several commands have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from kvprobe.errors import UserError
from kvprobe.models.catalogue import check_source


def whole(_: object, tokens: Sequence[Token]) -> int:
    """A flag's whole number; cyclopts would round 3.5."""
    try:
        return int(tokens[0].value)
    except ValueError as error:
        raise UserError(f"{tokens[0].value!r} is not a whole number.") from error


def whole_numbers(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    try:
        return tuple(int(token.value) for token in tokens)
    except ValueError as error:
        values = " ".join(token.value for token in tokens)
        raise UserError(f"Invalid value for {tokens[0].keyword}: {values!r} are not whole numbers.") from error


def several(words: str) -> Parameter:
    """A flag that several values follow."""
    return Parameter(help=words, consume_multiple=True, negative="")


def loadable(_: object, name: str | None) -> None:
    """A model's name, looked at before torch is imported to load it."""
    if name is not None:
        check_source(name)


Source = Annotated[str, Parameter(validator=loadable)]
Adapter = Annotated[str | None, Parameter(help="A LoRA adapter to be added to the model.", validator=loadable)]
Whole = Annotated[int, Parameter(converter=whole)]
StudyFile = Annotated[Path | None, Parameter(help="The Python file of a study of your own.")]
Chat = Annotated[Path, Parameter(help="A conversation in JSON or JSONL: OpenAI's messages, ShareGPT's, Anthropic's.")]
Chosen = Annotated[str | None, Parameter(help="Which of several in the file: its number from 0, or its id.")]
Hidden = Annotated[tuple[str, ...], several("Messages to hide: m0, m1, ….")]
