"""The table of the sources' sentences rests on published runs: its intervals, its models and n, and its commands."""

import json
import re
from functools import cache

import numpy as np
import pytest

from kvprobe.files import read_yaml
from kvprobe.presets import presets
from tests.test_published_runs import RESULTS, bare, bound, intervals

RUNS = RESULTS / "runs"
TABLE = [line for line in (RESULTS / "claims.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
BODY = [line for line in TABLE if not line.startswith("| sentence |")]
ROWS = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in BODY]
COMMANDS = sorted({pair for row in ROWS for pair in re.findall(r"\[`([^`]+)`\]\(runs/([\w.-]+)", row[4])})
MODELS = {
    "smollm2-135m": "SmolLM2",
    "qwen2.5-coder-0.5b": "Qwen 0.5B",
    "qwen2.5-coder-1.5b": "Qwen 1.5B",
    "gemma3-270m": "Gemma 3",
    "steps-moe-corrected-0": "toy mixture",
    "steps-active-corrected-0": "toy dense",
    "memento-0": "toys",
    "lossy-8-3-retained-0": "toys",
}
"""As the table calls the models of runs."""
TOYS_OF_A_RUN = {"pointers-quick": {48}}
"""The n of findings whose models are toys of the study, not the run's model."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_sentence_has_a_verdict_a_strength_and_what_it_rests_on(row: list[str]):
    _, verdict, strength, found, command = row
    assert re.fullmatch(r"(holds|not here|undecided|untested|not testable here)([,:]? .+)?", verdict)
    assert ("○" in strength) == (verdict == "untested")
    if verdict not in ("untested", "not testable here"):
        assert command != "–"
        assert "](" in found
    assert bool(intervals(found)) != ("no interval: " in found)


@pytest.mark.parametrize("row", [row for row in ROWS if intervals(row[3])], ids=lambda row: row[0])
def test_the_numbers_of_a_sentence_are_those_of_the_page_it_links(row: list[str]):
    found = row[3]
    (page,) = set(re.findall(r"\]\(([\w-]+)\.md\)", found))
    assert bare(found) <= bare(bound.text_of(page))
    for low, high in re.findall(r"([−+]?\d[\d.]*) to ([−+]?\d[\d.]*)", found):
        assert f"{low} to {high}" in bound.text_of(page), (low, high)


@pytest.mark.parametrize("row", [row for row in ROWS if "/config.yaml" in row[4]], ids=lambda row: row[0])
def test_models_and_n_are_those_of_the_findings_that_a_sentence_quotes(row: list[str]):
    _, _, strength, found, command = row
    runs = re.findall(r"\(runs/([\w.-]+)/config\.yaml\)", command)
    quoted = [{pair for run in runs for pair in models_and_n(run, interval)} for interval in intervals(found)]
    written = {
        (model, int(n.replace(",", "")))
        for model, numbers in re.findall(r"([A-Z\w.][\w. ]*) \(([\d, and]+)\)", strength)
        for n in numbers.split(" and ")
    }
    assert all(pairs & written for pairs in quoted)
    assert written <= {pair for pairs in quoted for pair in pairs}


def models_and_n(run: str, interval: str) -> set[tuple[str, int]]:
    """Of the findings of a run that have such an interval."""
    model = MODELS[read_yaml(RUNS / run / "config.yaml")["settings"]["model"]]
    found = zip(clusters_of(run), bound.run_of(run).values(), strict=True)
    clusters = [n for n, ends in found if is_written(interval, ends)]
    return {("toys" if n in TOYS_OF_A_RUN.get(run, ()) else model, n) for n in clusters}


def is_written(interval: str, ends: tuple[float, ...]) -> bool:
    variants = [(times * ends[0], *sorted(times * end for end in ends[1:])) for times in bound.TIMES]
    return bool(bound.is_among(interval, np.array(variants)).any())


@cache
def clusters_of(run: str) -> list[int]:
    findings = json.loads((RUNS / run / "metrics.json").read_text(encoding="utf-8"))["findings"]
    return [finding["clusters"] for finding in findings]


@pytest.mark.parametrize(("command", "run"), [each for each in COMMANDS if not each[0].startswith("python ")])
def test_a_command_has_the_settings_of_the_run_that_it_links(command: str, run: str):
    name, *options = command.split()
    preset, config = presets()[name], read_yaml(RUNS / run / "config.yaml")
    given = {option.removeprefix("--"): value for option, value in zip(options[::2], options[1::2], strict=True)}
    assert preset.study == config["study"]
    for key, value in {**preset.settings, **given}.items():
        assert plain(config["settings"][key]) == plain(value), key


def plain(value: object) -> str:
    """A setting as text, where 1.0 is 1 and the file that holds GSM8K has any name."""
    return re.sub(r"gsm8k:[\w.]+", "gsm8k", re.sub(r"(\d)\.0\b", r"\1", str(value)))


def test_commands_whose_run_is_not_published_are_presets_or_whole():
    rest = {part.strip("`") for row in ROWS for part in row[4].split(", ") if part.startswith("`")}
    assert all(command in presets() or command.startswith("pytest tests/") for command in rest)
