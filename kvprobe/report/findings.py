"""Findings: the numbers of a run in one long table, from which its figures, tables, claims and text are made."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import nan
from typing import SupportsFloat

import pandas as pd

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.plain_data import Limits, filled
from kvprobe.stats import Estimate
from kvprobe.tidy import Key

COLUMNS = ("name", "unit", "mean", "low", "high", "clusters", "smallest", "largest", "comparisons")
"""Of the table of findings, beside its keys."""
LIMITS = Limits(text=4096, entries=1_000_000)
"""Of findings that are read from a file."""


@dataclass(frozen=True)
class Finding:
    """One number of a run.

    Attributes:
        name: what was measured, such as `accuracy`.
        keys: under which conditions, such as `{"task": "recite", "rate": 10.0}`.
        value: with its interval, if it has one.
        unit: such as `nats`; empty for a share or a count.
        comparisons: number of findings over which the interval holds together (Bonferroni), so that a claim may be
            chosen from them; 0 for one that stands by itself, about which nothing is claimed.
    """

    name: str
    keys: Mapping[str, Key]
    value: Estimate
    unit: str = ""
    comparisons: int = 0


class Findings:
    """The findings of a run, in the order in which they were added."""

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._by_name: dict[str, dict[frozenset[tuple[str, Key]], Finding]] = {}
        self.extend(findings)

    def __repr__(self) -> str:
        counts = Counter((finding.name, tuple(finding.keys)) for finding in self)
        shown = [f"{count} {name}({', '.join(keys)})" for (name, keys), count in counts.items()]
        return f"Findings({'; '.join(shown)})"[:1000]

    def __len__(self) -> int:
        return sum(map(len, self._by_name.values()))

    def __iter__(self) -> Iterator[Finding]:
        """Name by name, each in the order in which they were added."""
        return chain.from_iterable(named.values() for named in self._by_name.values())

    def __contains__(self, name: object) -> bool:
        """Whether there is a finding of this name."""
        return name in self._by_name

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def add(self, finding: Finding) -> None:
        """Add one.

        Raises:
            ValueError: there is one of this name and these keys, or a key is named like a column.
        """
        if reserved := finding.keys.keys() & COLUMNS:
            raise ValueError(f"The keys {sorted(reserved)} of {finding.name!r} are names of columns; rename them.")
        known, place = self._by_name.setdefault(finding.name, {}), frozenset(finding.keys.items())
        if place in known:
            raise ValueError(f"The finding {_called(finding.name, finding.keys)} was added twice; add it once.")
        known[place] = finding

    def extend(self, findings: Iterable[Finding]) -> None:
        """Add several; see `add`."""
        for finding in findings:
            self.add(finding)

    def number(self, name: str, value: SupportsFloat | None, unit: str = "", **keys: Key) -> None:
        """Add a number without an interval; None and NaN stand for one that is not known."""
        self.add(Finding(name, keys, Estimate(nan if value is None else float(value)), unit))

    def get(self, name: str, **keys: Key) -> Estimate | None:
        """The number under exactly these keys; None if there is none."""
        finding = self.find(name, **keys)
        return None if finding is None else finding.value

    def find(self, name: str, **keys: Key) -> Finding | None:
        """The number under exactly these keys, with its unit and comparisons; None if there is none."""
        return self._by_name.get(name, {}).get(frozenset(keys.items()))

    def at(self, name: str, **keys: Key) -> Estimate:
        """The number under exactly these keys.

        Raises:
            UserError: there is none.
        """
        return self.finding(name, **keys).value

    def finding(self, name: str, **keys: Key) -> Finding:
        """The number under exactly these keys, with its unit and comparisons; see `at`."""
        finding = self.find(name, **keys)
        if finding is not None:
            return finding
        alike = self.where(name)
        if not alike:
            raise UserError(unknown("finding", name, self.names))
        raise UserError(
            f"There is no {_called(name, keys)}; an example of what there is: {_called(name, alike[0].keys)}."
        )

    def where(self, name: str, **keys: Key | tuple[Key, ...]) -> list[Finding]:
        """All findings of this name whose keys include these; one of several values, where a tuple is given."""
        wanted = [(key, value if isinstance(value, tuple) else (value,)) for key, value in keys.items()]
        return [
            finding
            for finding in self._by_name.get(name, {}).values()
            if all(finding.keys.get(key) in values for key, values in wanted)
        ]

    def values(self, name: str, key: str, **keys: Key | tuple[Key, ...]) -> list[Key]:
        """The different values of a key among those of `where(name, **keys)` that have it, in order."""
        return list(dict.fromkeys(finding.keys[key] for finding in self.where(name, **keys) if key in finding.keys))

    def frame(self, name: str | None = None) -> pd.DataFrame:
        """All findings, or those of one name, as a tidy table: one row each, keys that do not apply missing."""
        rows = [
            {
                "name": finding.name,
                **finding.keys,
                "unit": finding.unit,
                **vars(finding.value),
                "comparisons": finding.comparisons,
            }
            for finding in self
            if name in (None, finding.name)
        ]
        keys = dict.fromkeys(key for row in rows for key in row if key not in COLUMNS)
        return pd.DataFrame(rows, columns=["name", *keys, *COLUMNS[1:]])

    def heads(self, name: str, most: int, **keys: Key) -> pd.DataFrame:
        """The means of a finding of each `layer` and `head`, as a table of these: the layers with the `most` largest
        heads (in size), from the first one on."""
        rows = [{**finding.keys, "mean": finding.value.mean} for finding in self.where(name, **keys)]
        table = pd.DataFrame(rows).pivot(index="layer", columns="head", values="mean")
        return table.loc[sorted(table.abs().max(axis=1).nlargest(most).index)]

    def records(self) -> list[dict[str, object]]:
        """For strict JSON; `from_records` reads them back."""
        return [
            {"name": finding.name, "keys": dict(finding.keys), **finding.value.record()}
            | {"unit": finding.unit, "comparisons": finding.comparisons}
            for finding in self
        ]

    @classmethod
    def from_records(cls, content: object) -> "Findings":
        """The findings that `records` gave.

        Raises:
            UserError: anything else.
        """
        records: Sequence[_Record] = filled(Sequence[_Record], content, "the findings", LIMITS)
        try:
            return cls(record.finding() for record in records)
        except ValueError as error:
            raise UserError(f"The findings are not those of a run: {error}") from error


@dataclass(frozen=True)
class _Record:
    """A finding as JSON holds it."""

    name: str
    keys: Mapping[str, Key]
    mean: float | None
    low: float | None
    high: float | None
    clusters: int
    smallest: float | None
    largest: float | None
    unit: str
    comparisons: int

    def finding(self) -> Finding:
        known = (self.mean, self.low, self.high, self.clusters, self.smallest, self.largest)
        mean, low, high, clusters, smallest, largest = (nan if value is None else value for value in known)
        value = Estimate(mean, low, high, int(clusters), smallest, largest)
        return Finding(self.name, self.keys, value, self.unit, self.comparisons)


def _called(name: str, keys: Mapping[str, Key]) -> str:
    """A finding as its reader asks for it."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in keys.items())})"
