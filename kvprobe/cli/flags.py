"""Flags that several commands have."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from kvprobe.errors import UserError
from kvprobe.models.catalogue import Dtype, Quantization, Spread, check_source
from kvprobe.units import shares_in

if TYPE_CHECKING:
    from kvprobe.inference.model import Model


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
Json = Annotated[bool, Parameter(help="Print JSON for a program.", negative="")]
StudyFile = Annotated[Path | None, Parameter(help="The Python file of a study of your own.")]
Chat = Annotated[Path, Parameter(help="A conversation in JSON or JSONL: OpenAI's messages, ShareGPT's, Anthropic's.")]
Chosen = Annotated[str | None, Parameter(help="Which of several in the file: its number from 0, or its id.")]
Hidden = Annotated[tuple[str, ...], several("Messages to hide: m0, m1, ….")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a model's weights lie, in which numbers they are kept, and how it reads."""

    device_map: Annotated[
        Spread | None, Parameter(help="`auto` fills the GPUs, then memory, then the disk; in place of --device.")
    ] = None
    max_memory: Annotated[tuple[str, ...], several("How much of each it may fill: 0=20GiB cpu=8GiB.")] = ()
    offload_folder: Annotated[
        Path | None, Parameter(help="For weights on disk that the model's files have in another form.")
    ] = None
    quantization: Annotated[Quantization | None, Parameter(help="Round the weights as they are loaded.")] = None
    chunk: Annotated[
        int | None, Parameter(help="Tokens of a prompt that are read at once; all by default.", converter=whole)
    ] = None

    def choices(self) -> dict[str, Any]:
        """The arguments of `kvprobe.load`."""
        return {
            "device_map": self.device_map,
            "max_memory": shares_in(self.max_memory) or None,
            "offload_folder": self.offload_folder and str(self.offload_folder),
            "quantization": self.quantization,
            "chunk": self.chunk,
        }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Loading(Placed):
    """How a model is loaded."""

    adapter: Adapter = None
    device: str = "auto"
    dtype: Dtype = "auto"

    def model(self, source: str) -> "Model":
        """The model of this name, loaded so."""
        from kvprobe.inference.model import load

        return load(source, **self._arguments())

    def code(self, source: str) -> str:
        """The Python that gives the same model."""
        usual = USUAL._arguments()
        given = {name: value for name, value in self._arguments().items() if value != usual[name]}
        written = (f"{name}={value!r}" for name, value in given.items())
        return f"kv.load({', '.join([repr(source), *written])})"

    def _arguments(self) -> dict[str, Any]:
        return {"adapter": self.adapter, "device": self.device, "dtype": self.dtype, **self.choices()}


USUAL = Loading()
