"""Pages of results hold the numbers of the runs that lie beside them.

Every interval in a table is that of the finding which docs/results/rows.csv names for its row and column. One in prose
is that of some finding of a run that the page names.
"""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import numpy as np
import pytest

from kvprobe.presets import presets
from kvprobe.report.reported import reported
from kvprobe.studies import find

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def script(path: str) -> ModuleType:
    """A script of the project as a module."""
    file = RESULTS.parent.parent / path
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[file.stem] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


bound = script("figures/rows.py")


def intervals(text: str) -> set[str]:
    """As `x (a to b)`."""
    return {f"{mean} ({low} to {high})" for mean, low, high in bound.INTERVAL.findall(text)}


@pytest.mark.parametrize("page", bound.pages())
def test_every_interval_of_a_page_is_that_of_a_run_beside_it(page: str):
    findings = np.array([*bound.findings_of(page).values()]).reshape(-1, 3)
    assert not {interval for interval in intervals(bound.text_of(page)) if not bound.is_among(interval, findings).any()}


@pytest.mark.parametrize("page", sorted({*bound.pages(), *(cell.page for cell, _ in bound.recorded())}))
def test_every_interval_in_a_table_is_that_of_the_finding_recorded_for_its_cell(page: str):
    places, recorded = [*bound.cells(page)], bound.recorded_of(page)
    assert [cell for cell, _ in places] == [cell for cell, _ in recorded], "run figures/rows.py, and read what changed"
    findings = bound.findings_of(page)
    for (cell, interval), (_, finding) in zip(places, recorded, strict=True):
        assert bound.is_among(interval, np.array([findings[finding]])).all(), (cell, interval, finding)


def test_every_interval_of_the_index_is_on_a_page_that_it_links():
    links = re.findall(r"\]\(([\w-]+)\.md\)", bound.text_of("index"))
    assert bare(bound.text_of("index")) <= {interval for link in links for interval in bare(bound.text_of(link))}


def bare(text: str) -> set[str]:
    """The intervals of a text, whose signs of gain or loss may differ."""
    return {re.sub("[−+]", "", interval) for interval in intervals(text)}


@pytest.mark.parametrize(
    ("written", "is_held"),
    [
        ("0.125 (−0.250 to 0.375)", True),
        ("12 (−25 to 38)", True),
        ("13 (−25 to 37)", True),
        ("−12.5 (−37.5 to 25.0)", True),
        ("0.13 (−0.25 to 0.39)", False),
        ("12.5 (−25.0 to 37.0)", False),
        ("12.5 (25.0 to 37.5)", False),
    ],
)
def test_an_interval_is_held_to_the_digit_in_percent_and_with_its_sign_turned(written: str, is_held: bool):
    one = np.array([[0.125, -0.25, 0.375]])
    findings = np.concatenate([one, 100 * one, -100 * one[:, [0, 2, 1]]])
    assert bound.is_among(written, findings).any() == is_held


def test_the_table_of_poisoning_over_seeds_is_that_of_its_runs():
    seeds = script("models/dense_or_mixture.py")
    rows = [*seeds.rows_of(RESULTS / "runs" / "poisoning-seeds.csv")]
    page = (RESULTS / "poisoning.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in seeds.table(rows) if line not in page] == []


def gallery() -> ModuleType:
    return script("figures/draw.py")


def test_every_figure_of_the_gallery_is_one_of_its_presets_study():
    for preset, figure in gallery().FIGURES.values():
        declared = find(presets()[preset].study).declaration.figures
        assert not isinstance(figure, str) or figure in [each.file for each in declared], preset


def test_the_figure_of_gsm8k_has_all_rates_of_three_runs_and_all_published_ones():
    figure = gallery().gsm8k()
    published = {"gaussian": 0, "zeros": 2, "distractor": 3}
    for fault, place in published.items():
        lines = [dots.lines[0].get_xydata() for dots in figure.axes[place].containers]
        table = reported("canarypwn-1.5b")
        rates = [0.0, *table.rates]
        ours = {min(rates, key=lambda rate, x=x: abs(rate - x)) for line in lines[:-1] for x in line[:, 0]}
        assert ours == set(rates), fault
        assert lines[-1][:, 1].tolist() == pytest.approx([table.clean, *table.rows[fault]])
    plt.close(figure)


def test_the_figure_of_compaction_shows_the_paired_differences_of_its_run():
    found = gallery().published("compaction")
    arms = next(figure for figure in found.study.figures if figure.file == "arms")
    figure = arms.draw(found.findings, found.study.label, "")
    shares, beyond, nats = ([dots.lines[0].get_xdata()[0] for dots in axis.containers] for axis in figure.axes[6:])
    for shown, name, outcomes in ((shares, "gap", 8), (beyond, "beyond", 6), (nats, "gap", 3)):
        known = {round(each.value.mean, 6) for each in found.findings.where(name)}
        assert len(shown) == outcomes
        assert {round(float(x), 6) for x in shown} <= known, name
    plt.close(figure)
