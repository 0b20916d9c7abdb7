"""Names and values in sentences: unknown names with their near matches; operators, errors and plain data in short."""

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LISTED = 32
"""Known names in a sentence, at most."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for an unknown `name` of some `kind`: with its near matches, or else with the known names."""
    known = list(known)
    near = get_close_matches(str(name), known, n=3, cutoff=0.6)
    if near:
        return f"There is no {kind} called {name!r}; did you mean {' or '.join(map(repr, near))}?"
    if not known:
        return f"There is no {kind} called {name!r}; there are none here."
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"There is no {kind} called {name!r}; known are {', '.join(map(repr, known[:LISTED]))}{more}."


def short_repr(operator: "DataclassInstance") -> str:
    """A dataclass as one would write it, without the fields that have their default."""
    values = [(field, getattr(operator, field.name)) for field in fields(operator) if field.init]
    arguments = ", ".join(
        f"{field.name}={value}" for field, value in values if field.default is MISSING or value != field.default
    )
    return f"{type(operator).__name__}({arguments})"


def head_name(layer: int, head: int) -> str:
    """A head as the field writes it, such as L8H0."""
    return f"L{layer}H{head}"


def full_repr(value: Any) -> str:
    """The repr of plain data with each dataclass in full, however the dataclass shows itself; for digests."""
    if is_dataclass(type(value)):
        named = (f"{field.name}={full_repr(getattr(value, field.name))}" for field in fields(value) if field.repr)
        return f"{type(value).__qualname__}({', '.join(named)})"
    if type(value) not in (tuple, list):
        return repr(value)
    entries = ", ".join(map(full_repr, value))
    return f"[{entries}]" if type(value) is list else f"({entries}{',' if len(value) == 1 else ''})"


def one_line(error: BaseException, limit: int = 200) -> str:
    """The message of another library's error as part of a sentence: on one line, cut, and without a full stop."""
    return " ".join(str(error).split())[:limit].rstrip(".")


def shown(content: Any) -> str:
    """Plain data in at most 60 characters; of a list or mapping only its size."""
    return f"of {len(content)} entries" if isinstance(content, list | dict) else repr(content)[:60]


def number_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in order, runs of them as `0–4, 7`."""
    runs = ([one for _, one in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]))
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
