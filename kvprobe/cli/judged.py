"""How a command ends that judges something: what it found as text or JSON, a page, and the exit code."""

import sys
from collections.abc import Callable, Mapping
from json import dumps
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Judgement(Protocol):
    """What was found."""

    def as_mapping(self) -> Mapping[str, object]: ...


Found = TypeVar("Found", bound=Judgement)


def end(found: Found, wrong: bool, json: bool, out: Path | None, save: Callable[[Found, Path], Path]) -> NoReturn:
    """Print what was found, write its page if it is asked for, and end with exit code 1 where something is wrong."""
    print(dumps(found.as_mapping(), indent=2) if json else found)
    if out is not None:
        print(f"\nPage: {save(found, out)}", file=sys.stderr if json else sys.stdout)
    sys.exit(int(wrong))
