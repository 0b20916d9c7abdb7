"""Pages of results hold the numbers of the runs that lie beside them.

Every interval on a page is that of a finding of a run that the page names. For some tables it is held, too, that each
cell has the finding of its row.
"""

import csv
import json
import re
import sys
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from math import nan
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import numpy as np
import pytest

from kvprobe.experiments.study import Conclusion
from kvprobe.presets import presets
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.reported import reported
from kvprobe.studies import find
from kvprobe.studies.bands import PARTS
from kvprobe.wording import percent, plain

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
LINKED = ("claims", "index")
"""Pages whose intervals are those of the pages that they link; claims has tests of its own."""
NUMBER = r"[−+]?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(
    rf"(?<![\w.,–/−+-])({NUMBER})(?:[^()|\d]{{0,60}}\(|(?: %| (?:points|nats|logits)[a-z ]*)?, )"
    rf"({NUMBER}) to ({NUMBER})(?=[ %a-z]*[),;])"
)
"""A number and its interval: "x (a to b)", "x points (a to b)", "(x %, a to b)"."""
VARIANTS = (1, -1, 100, -100)
"""A finding may be written in percent, and as a loss in place of a gain."""
ENDS = ("mean", "low", "high", "smallest", "largest")

COLUMNS = [
    ("gaussian", "accuracy"),
    ("gaussian", "published"),
    ("gaussian-channel", "accuracy"),
    ("zeros", "accuracy"),
    ("zeros", "published"),
    ("distractor", "accuracy"),
    ("distractor", "published"),
]


BANDS = {f"layers {first}–{first + 6}": f"quarter {first // 7 + 1}" for first in (0, 7, 14, 21)} | {"all": "all"}
STRUCK = {"slots, the same in all layers": "slot", "slots, others in each layer": "layer", "single numbers": "number"}
FAULTS = {"zeros": ("zero-keys", "zero-values"), "distractor": ("distractor-keys", "distractor-values")}
ARMS = {
    "gone on with: right": "continue",
    "the same text in a new conversation": "handed",
    "reviewed as another's": "other's",
    "erratum": "erratum",
    "“wait”": "wait",
    "each step in a conversation of its own": "alone",
}
EDITS = {"undone by V of the right step": "V", "… by K": "K", "… by the upper third of the layers": "upper layers"}
WHEN = {"once, after the prompt": "once", "anew before each token": "fresh", "anew, and stays": "piling"}


def findings_and_cells(run: str, row: str, page: str = "robustness") -> tuple[Findings, list[str]]:
    """Of a run, and the cells of the last row of a page that starts so."""
    metrics = json.loads((RESULTS / "runs" / run / "metrics.json").read_text())
    *_, found = re.findall(rf"^\| {row} \|(.*)\|$", (RESULTS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
    return Conclusion.of(metrics).findings, [cell.strip(" *") for cell in found.split("|")]


def written(finding: Finding) -> str:
    """As on the page, where 12.5 % is 13 %."""
    share = finding.value
    return f"{100 * share.mean + 1e-9:.0f} % ({100 * share.low:.0f} to {100 * share.high:.0f})"


def text_of(page: str) -> str:
    return " ".join((RESULTS / f"{page}.md").read_text(encoding="utf-8").split())


def intervals(text: str) -> set[str]:
    """As `x (a to b)`."""
    return {f"{mean} ({low} to {high})" for mean, low, high in INTERVAL.findall(text)}


@cache
def ends_of(run: str) -> np.ndarray:
    """Means of a run with both ends of each: of the interval, or of the range where there is none."""
    with (RESULTS / "runs" / run / ("" if run.endswith(".csv") else "metrics.json")).open(encoding="utf-8") as file:
        records = list(csv.DictReader(file)) if run.endswith(".csv") else json.load(file)["findings"]
    table = np.array(
        [[float(nan if record.get(end) in ("", None) else record[end]) for end in ENDS] for record in records]
    )
    _, low, high, *_ = table.T
    return np.where((np.isnan(low) | np.isnan(high))[:, None], table[:, [0, 3, 4]], table[:, :3])


def held(page: str) -> set[str]:
    """The intervals of a page that are those of a run that it names, to the digit."""
    declared = re.findall(r"\(runs/([\w.-]+?)(?:/config\.yaml)?\)", text_of(page).rpartition(" Runs: ")[2])
    if not declared:
        return set()
    variants = variants_of(np.concatenate([ends_of(run) for run in declared]))
    return {interval for interval in intervals(text_of(page)) if is_among(interval, variants)}


def variants_of(findings: np.ndarray) -> np.ndarray:
    """Findings in all the ways they may be written."""
    variants = np.concatenate([findings * times for times in VARIANTS])
    return np.column_stack([variants[:, 0], np.sort(variants[:, 1:], axis=1)])


def is_among(interval: str, findings: np.ndarray) -> bool:
    numbers = re.findall(NUMBER, interval)
    values = [float(number.replace("−", "-").replace(",", "")) for number in numbers]
    half = [0.5001 * 10.0 ** -len(number.partition(".")[2]) for number in numbers]
    return bool((np.abs(findings - values) <= half).all(1).any())


@pytest.mark.parametrize("page", sorted({page.stem for page in RESULTS.glob("*.md")} - {*LINKED}))
def test_every_interval_of_a_page_is_that_of_a_run_beside_it(page: str):
    assert intervals(text_of(page)) <= held(page)


def test_every_interval_of_the_index_is_on_a_page_that_it_links():
    links = re.findall(r"\]\(([\w-]+)\.md\)", text_of("index"))
    assert bare(text_of("index")) <= {interval for link in links for interval in bare(text_of(link))}


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
    assert is_among(written, findings) is is_held


@pytest.mark.parametrize("rate", [2, 10, 30])
def test_the_table_of_gsm8k_is_that_of_its_run(rate: int):
    findings, cells = findings_and_cells("gsm8k-qwen2.5-coder-1.5b", f"{rate} %")
    for cell, (fault, name) in zip(cells, COLUMNS, strict=True):
        (finding,) = findings.where(name, fault=fault, rate=float(rate))
        assert cell == written(finding), (fault, name)


@pytest.mark.parametrize("rate", [5, 8, 15, 20, 25, 40, 50])
def test_the_table_of_other_rates_is_that_of_its_runs(rate: int):
    findings, cells = findings_and_cells("gsm8k-qwen2.5-coder-1.5b-rates", f"{rate} %")
    noise, _ = findings_and_cells("gsm8k-qwen2.5-coder-1.5b-rates-gaussian", f"{rate} %")
    columns = [column for column in COLUMNS if column[0] != "gaussian-channel"]
    for cell, (fault, name) in zip(cells, columns, strict=True):
        (finding,) = (noise if fault == "gaussian" else findings).where(name, fault=fault, rate=float(rate))
        assert cell == written(finding), (fault, name)


@pytest.mark.parametrize("layers", BANDS)
def test_the_table_of_bands_is_that_of_its_run(layers: str):
    findings, cells = findings_and_cells("bands-qwen2.5-coder-1.5b", layers)
    columns = [("accuracy", "kv"), ("published", "kv"), ("accuracy", "k"), ("accuracy", "v")]
    for cell, (name, parts) in zip(cells, columns, strict=True):
        found = findings.where(name, parts=parts, band=BANDS[layers], rate=2.0)
        assert cell == "".join(map(written, found)), (name, parts)


def test_the_sound_cache_of_bands_is_that_of_its_run():
    findings, cells = findings_and_cells("bands-qwen2.5-coder-1.5b", "no layer")
    assert cells == [*(written(*findings.where(name)) for name in ("sound", "published_sound")), "", ""]


@pytest.mark.parametrize("struck", STRUCK)
@pytest.mark.parametrize("when", WHEN)
def test_the_table_of_readings_is_that_of_its_run(struck: str, when: str):
    findings, cells = findings_and_cells("gsm8k-qwen2.5-coder-1.5b-readings", f"{struck}: {when}")
    for cell, fault in zip(cells, ("gaussian", "zeros", "distractor"), strict=True):
        (finding,) = findings.where("reading", fault=fault, drawn=STRUCK[struck], timing=WHEN[when])
        assert cell == written(finding), fault


@pytest.mark.parametrize(("written_with", "faults"), FAULTS.items())
@pytest.mark.parametrize("rate", [2, 10])
def test_the_table_of_k_and_v_apart_is_that_of_its_run(written_with: str, faults: tuple[str, str], rate: int):
    findings, cells = findings_and_cells("gsm8k-qwen2.5-coder-1.5b-parts", f"{rate} % of the slots, {written_with}")
    for cell, fault in zip(cells, faults, strict=True):
        (finding,) = findings.where("accuracy", fault=fault, rate=float(rate))
        assert cell == written(finding), fault


def test_the_sound_cache_of_k_and_v_apart_is_that_of_its_run():
    findings, cells = findings_and_cells("gsm8k-qwen2.5-coder-1.5b-parts", "no slots")
    assert cells == [written(*findings.where("sound")), ""]


@pytest.mark.parametrize(("row", "arm"), ARMS.items())
def test_the_answers_to_poisoned_gsm8k_are_those_of_its_run(row: str, arm: str):
    findings, cells = findings_and_cells("poisoning-gsm8k", row, "poisoning")
    assert cells == [percent(findings.at("right", arm=arm, draft=draft)) for draft in ("sound", "slip")]


@pytest.mark.parametrize(("row", "edit"), EDITS.items())
def test_what_undoes_the_poison_of_gsm8k_is_that_of_its_run(row: str, edit: str):
    findings, cells = findings_and_cells("poisoning-gsm8k", row, "poisoning")
    assert cells == [percent(findings.at("undone", edit=f"sound step, {edit}")).replace("-", "−")]


def test_the_other_numbers_of_poisoned_gsm8k_are_those_of_its_run():
    findings, fresh = findings_and_cells("poisoning-gsm8k", "the problem from the beginning: right", "poisoning")
    assert fresh == [percent(findings.at("right", arm="fresh", draft="slip")), ""]
    handed_on = findings_and_cells("poisoning-gsm8k", "… with what follows from the slip", "poisoning")[1]
    assert handed_on == [percent(findings.at("handed_on", arm="continue", draft=draft)) for draft in ("sound", "slip")]
    layers = findings_and_cells("poisoning-gsm8k", "… by single layers: 22 and 23 of 28", "poisoning")[1]
    assert layers == [" and ".join(percent(findings.at("undone_layer", layer=layer)) for layer in (22, 23))]
    for row, name, words in (
        (r"that the slip takes \(logits\)", "poison", partial(plain, digits=1)),
        ("left in later steps with the wrong one masked", "ghost", percent),
        ("slope of errors", "conditioned", plain),
    ):
        assert findings_and_cells("poisoning-gsm8k", row, "poisoning")[1] == [
            words(findings.at(name)).replace("-", "−")
        ], name


def test_the_table_of_poisoning_over_seeds_is_that_of_its_runs():
    seeds = script("models/dense_or_mixture.py")
    rows = [*seeds.rows_of(RESULTS / "runs" / "poisoning-seeds.csv")]
    page = (RESULTS / "poisoning.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in seeds.table(rows) if line not in page] == []


FACTORS = {
    "the layer's mean and spread (the article's)": "layer",
    "each channel's mean": "mean",
    "each channel's spread": "spread",
    "each channel's correlations": "covariance",
    "mean and spread": "mean+spread",
    "mean and correlations": "mean+covariance",
    "spread and correlations": "spread+covariance",
    "all three": "channel",
}


@pytest.mark.parametrize("row", FACTORS)
def test_the_table_of_the_factors_of_noise_is_that_of_its_run(row: str):
    findings, (right, *kl) = findings_and_cells("bands-factors-smollm2", re.escape(row))
    assert right == written(findings.where("accuracy", noise=FACTORS[row], parts="kv")[0])
    for cell, parts in zip(kl, PARTS, strict=True):
        assert cell == in_nats(findings.where("kl_all", noise=FACTORS[row], parts=parts)[0])


@pytest.mark.parametrize(("row", "factor"), [("means", "mean"), ("spreads", "spread"), ("correlations", "covariance")])
def test_what_each_factor_of_noise_does_is_that_of_its_run(row: str, factor: str):
    findings, cells = findings_and_cells("bands-factors-smollm2", row)
    *each, alone = cells
    assert alone == in_nats(findings.where("alone", factor=factor, parts="kv")[0])
    assert each == [in_nats(findings.where("factor", factor=factor, parts=parts)[0]) for parts in PARTS]


def in_nats(finding: Finding) -> str:
    value = finding.value
    return f"{value.mean:.2f} ({value.low:.2f} to {value.high:.2f})"


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


ANSWERED = {
    "answered right, memento retained": ("answered", {"kind": "omitted", "arm": "retained"}),
    "answered right, memento computed again": ("answered", {"kind": "omitted", "arm": "restart"}),
    "answered right, memento from a stand-in": ("answered", {"kind": "omitted", "arm": "stand-in"}),
    "the stand-in's digit is answered": ("taken", {"arm": "stand-in"}),
    "… with the stand-in's K alone": ("taken", {"arm": "K of the stand-in"}),
    "… with the stand-in's V alone": ("taken", {"arm": "V of the stand-in"}),
    "read by a linear probe of all layers, memento retained": (
        "read",
        {"reader": "linear probe of all layers", "arm": "retained"},
    ),
    "… of one layer": ("read", {"reader": "linear probe", "arm": "retained"}),
    "… of one layer, memento computed again": ("read", {"reader": "linear probe", "arm": "restart"}),
    "… of one layer, by a probe with a hidden layer, memento retained": (
        "read",
        {"reader": "probe with a hidden layer", "arm": "retained"},
    ),
}


@pytest.mark.parametrize("row", ANSWERED)
def test_the_table_of_lossy_mementos_is_that_of_its_run(row: str):
    findings, cells = findings_and_cells("lossy_memento", row, "lossy-memento")
    name, keys = ANSWERED[row]
    for cell, provenance in zip(cells, ("retained", "recomputed"), strict=True):
        (finding,) = findings.where(name, provenance=provenance, asked=8, **keys)
        numbers = re.findall(r"[\d.]+", cell)
        for number, value in zip(numbers, (finding.value.mean, *finding.value.ends), strict=True):
            assert 100 * value == pytest.approx(float(number), abs=0.51 * 10 ** -len(number.partition(".")[2])), cell


LATER_ARMS = ("in view", "attention alone", "states alone", "both")
"""The columns of the table of answers, of models whose turn was hidden after the talk."""
STATES = {"attention alone": "later", "both": "later", "both, at once": "at once", "restart": "later"}


@pytest.mark.parametrize("row", [f"recall-{kind}-{seed}" for kind in ("hybrid", "mamba") for seed in (0, 1)])
def test_the_tables_of_ghost_states_are_those_of_their_run(row: str):
    findings, cells = findings_and_cells("ghost_state", f"`{row}`", "ghost-state")

    def written_of(name: str, **keys: str) -> str:
        (finding,) = findings.where(name, model=row, **keys)
        return percent(finding.value)

    swapped = [written_of("taken", when="later", arm="states of a stand-in" + more) for more in ("", ", in view")]
    assert cells == [*(written_of("answered", when="later", arm=arm) for arm in LATER_ARMS), *swapped]
    _, cells = findings_and_cells("ghost_state", f"states of `{row}`", "ghost-state")
    linear = {"part": "state", "reader": "linear probe"}
    read = [written_of("read", arm=arm.split(",")[0], when=when, **linear) for arm, when in STATES.items()]
    blank = {**linear, "reader": "linear probe, untrained model"}
    assert cells == [*read, written_of("read", arm="attention alone", when="later", **blank)]


POINTERS = {
    r"turned by a donor whose list is in another order \(address\)": ("address", {}),
    r"turned by a donor whose things have changed places \(content\)": ("content", {}),
    "right answers, list in view": ("right", {"arm": "in view"}),
    "right answers, list hidden after the summary": ("right", {"arm": "hidden after"}),
    "right answers, list hidden before it": ("right", {"arm": "computed again"}),
}


@pytest.mark.parametrize("row", POINTERS)
def test_the_table_of_pointers_is_that_of_its_run(row: str):
    findings, cells = findings_and_cells("pointers-quick", row, "pointers")
    name, keys = POINTERS[row]
    for cell, form in zip(cells, ("located (pointer)", "copied (payload)"), strict=True):
        assert cell == percent(findings.at(name, form=form, **keys)).replace("-", "−")
