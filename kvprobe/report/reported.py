"""Tables that others reported, to be shown beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.shipped import shipped_entries


@dataclass(frozen=True)
class Reported:
    """Accuracies by condition and rate, as someone reported them.

    Attributes:
        source: author, title, table.
        samples: items behind each accuracy.
        clean: accuracy without any fault.
        rates: in percent, of which `rows` hold one accuracy each.
    """

    name: str
    source: str
    model: str
    task: str
    samples: int
    clean: float
    rates: tuple[float, ...]
    rows: Mapping[str, tuple[float, ...]]

    def is_about(self, task: str) -> bool:
        """Whether it is about this task, wherever its items were read from."""
        return task.partition(":")[0] == self.task


def reported(name: str) -> Reported:
    """A table by name.

    Raises:
        UserError: kvprobe has no table of this name.
    """
    if name not in tables():
        raise UserError(unknown("reported table", name, tables()))
    return tables()[name]


@cache
def tables() -> dict[str, Reported]:
    """All tables that kvprobe has."""
    return {
        name: Reported(
            **{name: entry[name] for name in ("source", "model", "task", "samples")},
            name=name,
            clean=float(entry["clean"]),
            rates=tuple(map(float, entry["rates"])),
            rows={row: tuple(map(float, values)) for row, values in entry["rows"].items()},
        )
        for name, entry in shipped_entries("report/reported").items()
    }
