"""A study as a declaration: what it asks, what it measures, what it concludes, and which figures and page show that.

The rows that a study collects become findings (`kvprobe.experiments.estimands`). Figures, tables, claims and the page
are made of findings alone, so a finished run can be shown again from its files.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd

from kvprobe.errors import UserError
from kvprobe.experiments.measuring import digest_of_measuring
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.extensions import extensions
from kvprobe.inference.model import Model
from kvprobe.plain_data import Limits, filled
from kvprobe.report.claims import Claim
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots.figure import Figure
from kvprobe.stats import Estimate
from kvprobe.wording import plain

Config = TypeVar("Config", bound=Settings)
LIMITS = Limits(text=2**20, entries=10_000)
"""Of the controls and warnings of a run."""


@dataclass(frozen=True)
class Control:
    """A check of the run itself. One that fails is a warning at the top of the report.

    Attributes:
        seen: what was seen, in sentences.
        holds: None where it is no control, as `seen` then says why.
    """

    seen: str
    holds: bool | None


@dataclass(frozen=True)
class Conclusion:
    """What a study makes of its rows.

    Attributes:
        facts: what the page needs beside numbers, such as example answers; plain data.
        warnings: what a reader must know before the numbers.
    """

    findings: Findings
    controls: Sequence[Control] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def record(self) -> dict[str, Any]:
        """For strict JSON; `of` reads it back."""
        return {
            "findings": self.findings.records(),
            "controls": [vars(control) for control in self.controls],
            "facts": dict(self.facts),
            "warnings": list(self.warnings),
        }

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> "Conclusion":
        """The conclusion of a run from its metrics.

        Raises:
            UserError: they are not those of a declared study, or were altered.
        """
        controls = filled(tuple[Control, ...], metrics.get("controls"), "the controls", LIMITS)
        warnings = filled(tuple[str, ...], metrics.get("warnings"), "the warnings", LIMITS)
        return cls(Findings.from_records(metrics.get("findings")), controls, metrics.get("facts") or {}, warnings)


Tables = pd.DataFrame | Mapping[str, pd.DataFrame]
Written = Callable[[Estimate], str]
"""How a number is written."""


@dataclass(frozen=True, kw_only=True)
class Study(Generic[Config]):
    """A study.

    Attributes:
        name: as `kvprobe run` calls it.
        title: of its page, before the model's name.
        question: what it asks, in words for someone who does not know kvprobe.
        config: the dataclass of its settings.
        collect: measures; gives the rows of `samples.parquet`, one per sample and condition, or several such tables by
            name. Parts that it writes with `kvprobe.experiments.parts` let an interrupted run resume.
        conclude: findings, controls and facts, from what `collect` gave, config and model.
        folder: where its page is, a Jinja template `page.html.j2` that extends `study.html.j2`. Without one, kvprobe's
            own studies have theirs beside their settings, and others a page that shows every claim and finding.
        done: what was done, in sentences, for the default page.
        figures: the first is shown below the answer.
        claims: all that the page may claim.
        labels: how values of keys are written: a mapping or a function for each key.
        written: how numbers are written, by the name of the finding or by its unit; with two digits by default.
        inputs: for settings that name files, a digest of what these hold. It also refuses settings that do not fit.
        instead: the study of the same name and settings that runs where these ask for it.
    """

    name: str
    title: str
    question: str
    config: type[Config]
    collect: Callable[[Model, Config, Run], Tables]
    conclude: Callable[[Any, Config, Model], Conclusion]
    folder: Path | None = None
    done: str = ""
    figures: Sequence[Figure] = ()
    claims: Sequence[Claim] = ()
    labels: Mapping[str, Mapping[Any, str] | Callable[[Any], str]] = field(default_factory=dict)
    written: Mapping[str, Written] = field(default_factory=dict)
    inputs: Callable[[Config], Mapping[str, str]] = lambda _: {}
    instead: "Callable[[Config], Study[Config] | None]" = lambda _: None

    @property
    def ships(self) -> bool:
        """Whether it is one of kvprobe's own."""
        return self.config.__module__.startswith("kvprobe.")

    @property
    def page_folder(self) -> Path | None:
        """Where its page is; None for the page that shows everything."""
        return Path(inspect.getfile(self.config)).parent if self.folder is None and self.ships else self.folder

    @property
    def command(self) -> str:
        """What `kvprobe run` calls it: a study that neither ships nor was added by a package is a file of its name."""
        return self.name if self.ships or self.name in extensions("studies") else f"{self.name}.py"

    @property
    def measuring(self) -> dict[str, str]:
        """A digest of what a study measures with that does not ship with kvprobe, see `digest_of_measuring`; its
        `conclude` and the rest of `STUDY` may change while the rows stay.

        Raises:
            UserError: the code cannot be read.
        """
        if self.ships:
            return {}
        without = {getattr(self.conclude, "__name__", ""), "STUDY"}
        return {"code": digest_of_measuring(self.collect, [self.config, self.inputs], without)}

    def label(self, key: str, value: Key) -> str:
        """How the value of a key is written."""
        labels = self.labels.get(key, {})
        if callable(labels):
            return labels(value)
        return labels.get(value, f"{value:g}" if isinstance(value, float) else str(value))

    def write(self, finding: Finding | None) -> str:
        """How a number is written; a dash for one that is not there."""
        if finding is None:
            return "–"
        return self.written.get(finding.name, self.written.get(finding.unit, plain))(finding.value)

    def claim(self, findings: Findings, name: str, **keys: Key) -> str:
        """What may be said of a finding.

        Raises:
            KeyError: the study declares no claim on it.
            UserError: there is no such finding, or its interval holds by itself alone.
        """
        finding = findings.finding(name, **keys)
        if not finding.comparisons:
            raise UserError(f"Nothing may be claimed of {name!r}; give its estimand `together`, as () for all of them.")
        claim = {claim.finding: claim for claim in self.claims}[name]
        labels = {key: self.label(key, value) for key, value in keys.items()}
        return claim.said(finding.value).format(value=self.write(finding), **labels)
