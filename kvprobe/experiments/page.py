"""The page of a declared study's run: one HTML file, made again at any time from the run's files alone."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from markupsafe import Markup

from kvprobe.errors import UserError
from kvprobe.experiments.reproduce import reproduced
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.files import write_whole
from kvprobe.names import head_name, one_line
from kvprobe.plain_data import filled
from kvprobe.report.document import LIMITS, AttentionView, Passage, TokenView
from kvprobe.report.findings import Findings, Key
from kvprobe.report.page import picture, pieces
from kvprobe.report.plots.figure import Figure
from kvprobe.report.views.of_findings import maps_of, tokens_of
from kvprobe.report.views.page import Part, drawn, page, render, templates


def write_page(study: Study[Any], run: Run) -> Path:
    """Write a finished run's `report.html` from its files; nothing is measured or estimated again.

    Raises:
        UserError: the run's files are not those of this study, or were altered.
    """
    made = _Page(study, run)
    body = Markup(made.rendered())
    return write_whole(run.path / "report.html", render("report.html.j2", made.parts, title=made.title, body=body))


def write_views(study: Study[Any], run: Run) -> Path:
    """Write the maps and other views of a run's page as `views.html`, a page of their own.

    Raises:
        UserError: the run's files are not those of this study, or were altered; or its page has no views.
    """
    made = _Page(study, run)
    made.rendered()
    if not made.parts:
        raise UserError(f"The report of {run.path} has no views; see its figures with `kvprobe report {run.path}`.")
    return write_whole(run.path / "views.html", page(made.parts, made.title))


def answer(study: Study[Any], run: Run) -> str:
    """The answer of a run's page, as plain text."""
    return str(Markup(_Page(study, run).rendered(answering=True)).striptags())


@dataclass
class _Page:
    """What templates may use: its public methods, beside what `rendered` names.

    Attributes:
        parts: the views that the page showed, which decide what scripts it needs.
    """

    study: Study[Any]
    run: Run
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = from_mapping(self.study.config, self.run.config.get("settings") or {})
        self.study = self.study.instead(self.config) or self.study
        self.conclusion = Conclusion.of(self.run.metrics)
        self.title = f"{self.study.title}: {self.config.model}{self.config.and_more}"

    @property
    def findings(self) -> Findings:
        return self.conclusion.findings

    def rendered(self, answering: bool = False) -> str:
        """The page's body, or its answer alone."""
        try:
            folder = self.study.page_folder
            template = templates(folder).get_template("page.html.j2" if folder else "study.html.j2")
            return template.render(self._known, answering=answering)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Files of a run are untrusted: facts of another shape fail anywhere in a template.
            raise UserError(
                f"The files of {self.run.path} do not fit the page of {self.study.name} ({one_line(error)}); they were "
                f"altered, or the page is wrong, so run the study again."
            ) from error

    @property
    def _known(self) -> dict[str, Any]:
        """What templates may name."""
        return {
            **{name: getattr(self, name) for name in ("study", "config", "findings", "title", "figures")},
            **{name: getattr(self, name) for name in ("show", "heat", "tokens", "view")},
            **{name: getattr(self.conclusion, name) for name in ("facts", "controls", "warnings")},
            "label": self.study.label,
            "head_name": head_name,
            "tables": sorted(path.name for path in self.run.path.glob("*.parquet")),
            "claim": partial(self.study.claim, self.findings),
            "picture": partial(picture, self.run.path / "figures"),
            "pieces": lambda passage: pieces(filled(Passage, passage, "a passage", LIMITS)),
            "attention": lambda record: self.view(filled(AttentionView, record, "a view of attention", LIMITS)),
            "coloured": lambda record: self.view(filled(TokenView, record, "a coloured text", LIMITS)),
            "reproduced": reproduced(self.study.command, self.config, self.run.environment),
        }

    @property
    def figures(self) -> dict[str, Figure]:
        """Those that were drawn, by file."""
        folder = self.run.path / "figures"
        return {figure.file: figure for figure in self.study.figures if (folder / f"{figure.file}.png").is_file()}

    def show(self, name: str, **keys: Key) -> str:
        """A number as the study writes it; a dash where there is none."""
        return self.study.write(self.findings.find(name, **keys))

    def heat(self, *keys: Any, **more: Any) -> Markup:
        """Findings as interactive maps; see `kvprobe.report.views.of_findings.maps_of`."""
        maps = maps_of(self.findings, self.study.label, *keys, **more)
        return Markup('<div class="maps">{}</div>').format(Markup("").join(map(self.view, maps)))

    def tokens(self, *keys: Any, **more: Any) -> Markup:
        """Findings as a text with coloured tokens; see `kvprobe.report.views.of_findings.tokens_of`."""
        return self.view(tokens_of(self.findings, self.study.label, *keys, **more))

    def view(self, part: Part) -> Markup:
        """A view, drawn."""
        self.parts.append(part)
        return drawn(part)
