"""What a report says, as data. A study builds it from its numbers; `report` renders it.

All text here is plain and untrusted: the renderer escapes it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Passage:
    """A message of an example conversation: `struck` if it is masked, `marked` the text in it that is hidden."""

    segment: str
    role: str
    text: str
    struck: bool = False
    marked: str | None = None


@dataclass(frozen=True)
class Figure:
    """A figure in the run's `figures/` folder; `file` without suffix."""

    file: str
    caption: str


@dataclass(frozen=True)
class Table:
    """Rows of text under a caption."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order."""

    title: str
    paragraphs: Sequence[str] = ()
    passages: Sequence[Passage] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    points: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """A report page: the question, the answer in a sentence or two, and the sections that support it."""

    title: str
    question: str
    answer: str
    warnings: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        """The report that `to_dict` gave."""

        def section(entry: Mapping[str, Any]) -> Section:
            return Section(
                title=entry["title"],
                paragraphs=entry["paragraphs"],
                passages=[Passage(**passage) for passage in entry["passages"]],
                tables=[Table(**table) for table in entry["tables"]],
                figures=[Figure(**figure) for figure in entry["figures"]],
                points=entry["points"],
            )

        return cls(
            title=data["title"],
            question=data["question"],
            answer=data["answer"],
            warnings=data["warnings"],
            sections=[section(entry) for entry in data["sections"]],
        )
