"""The reliance study: whole runs on a tiny model, the conversations that it reads, and numbers of made-up tables."""

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import load
from kvprobe.studies import reliance
from kvprobe.studies.reliance import Config
from kvprobe.studies.reliance.collect import TURNS, Source, Word, cases_of, measure, stating, talk
from kvprobe.studies.reliance.study import STUDY, conclude
from tests import models
from tests.studies.runs import answer_of, assert_figures, in_steps

SMALL, ALL = Config(contexts=2), Config()
CONVERSATIONS = 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    return in_steps(lambda: reliance.run(SMALL, root, model=models.any_model()))


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert len(findings.where("logprob")) == 3 * 3 * 2
    assert_figures(finished, "answers_by_source")
    assert finished.metrics["controls"][0]["holds"]


# ---- the conversations


def test_nearly_all_conversations_state_the_answer_in_turns_and_summary():
    assert len(cases_of(ALL)) == 44


@pytest.mark.parametrize("number", range(44))
def test_turns_state_the_other_answer_and_summaries_keep_their_own(number: int):
    context, compaction = cases_of(ALL)[number]
    other = stating(context, compaction, "other")
    turns = " ".join(getattr(other, name) for name in TURNS)
    assert compaction.summary_answer.lower() not in turns.lower()
    assert compaction.summary_other in turns
    assert (other.summary_1, other.summary_2) == (context.summary_1, context.summary_2)
    assert compaction.summary_other.lower() not in " ".join(astuple(context)).lower()
    assert stating(context, compaction, "own") is context


def test_what_is_asked_ends_with_the_answer():
    model, (context, compaction) = load("smollm2-135m"), cases_of(ALL)[0]
    tokens = {word: talk(context, compaction, word).tokens(model.tokenizer) for word in get_args(Word)}
    asks = [tokens[word].span("ask").start for word in tokens]
    assert len(set(asks)) == 1
    for word, said in (("own", compaction.summary_answer), ("other", compaction.summary_other)):
        part = tokens[word].part("answer")
        assert model.tokenizer.decode(list(tokens[word].ids[part])).strip() == said
        text = model.tokenizer.decode(list(tokens[word].ids[asks[0] : part.start]))
        assert compaction.summary_question in text
        assert text.endswith("The answer is")
        assert tokens[word].ids[: part.start] == tokens["own"].ids[: part.start]


def test_retained_summaries_differ_by_what_was_in_view_and_recomputed_ones_do_not():
    context, compaction = cases_of(ALL)[0]
    filler = [other for other, _ in cases_of(ALL)[1:3]]
    table = measure(models.any_model(), context, compaction, filler).set_index(["state", "source", "word"])
    rows = table["logprob"].to_dict()
    assert rows["recomputed", "own", "own"] == pytest.approx(rows["recomputed", "unrelated", "own"], abs=1e-5)
    assert rows["retained", "own", "own"] != pytest.approx(rows["retained", "unrelated", "own"], abs=1e-4)


# ---- made-up tables

Number = Callable[[int], float]


def made_up(
    own: Number = lambda case: -2.0 - 0.1 * (case % 3),
    other: Number = lambda case: -0.1 * (case % 2),
    unrelated: Number = lambda case: -0.5 + 0.1 * (case % 2),
    shown: Number = lambda case: 1.0 + 0.1 * (case % 2),
    lost: Number = lambda case: -1.0 - 0.1 * (case % 2),
    off: Number = lambda _: 0.0,
) -> pd.DataFrame:
    """What retaining gains: of the summary's answer by source; of the other answer where the turns stated it, and where
    they stated the summary's."""
    rows = []
    for case in range(CONVERSATIONS):
        for source, gain in zip(get_args(Source), (own, other, unrelated), strict=True):
            for word in get_args(Word):
                level = -5.0 if word == "own" else -9.0
                of_other = {"own": lost, "other": shown, "unrelated": lambda _: 0.0}[source](case)
                more = gain(case) if word == "own" else of_other
                alone = level + off(case) * (source == "unrelated")
                for state, value in (("view", 0.0), ("retained", level + more), ("recomputed", alone)):
                    row = {"source": source, "state": state, "word": word, "logprob": value}
                    rows.append({**row, "context": case})
    return pd.DataFrame(rows)


ALIKE: dict[str, Number] = {"unrelated": lambda _: 0.0, "lost": lambda _: 0.0}


def concluded(rows: pd.DataFrame) -> Conclusion:
    return conclude(rows, ALL, models.any_model())


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return ALL, concluded(made_up())


def noise(rng: np.random.Generator) -> Conclusion:
    """Retaining changes nothing on average, whatever was in view."""

    def normal(_: int) -> float:
        return float(rng.normal())

    return concluded(made_up(normal, normal, normal, normal, normal))


def test_planted_numbers_are_found():
    findings = example()[1].findings
    cases = np.arange(CONVERSATIONS)
    own, unrelated = -2.0 - 0.1 * (cases % 3), -0.5 + 0.1 * (cases % 2)
    other, lost = -0.1 * (cases % 2), -1.0 - 0.1 * (cases % 2)
    assert findings.at("worse").mean == pytest.approx(own.mean())
    assert findings.at("relies").mean == pytest.approx((own - lost - unrelated).mean())
    assert findings.at("poisoned").mean == pytest.approx((other - 1.0 - 0.1 * (cases % 2) - unrelated).mean())
    assert findings.at("general").mean == pytest.approx(-1.05)
    assert findings.at("gain", source="own", word="margin").mean == pytest.approx((own - lost).mean())
    assert findings.at("gain", source="other", word="other").mean == pytest.approx(1.05)
    assert {findings.finding(claim.finding).comparisons for claim in STUDY.claims} == {4}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({}, "falls, as reliance would have it"),
        ({"own": lambda case: 1.0 + case / 10}, "rises, the opposite of reliance"),
        ({"own": lambda case: (-1) ** case / 10, **ALIKE}, "so no reliance was detected"),
        ({}, "falls, as poison would have it"),
        ({"shown": lambda case: -1 - case / 10, **ALIKE}, "rises, the opposite of poison"),
        ({"other": lambda case: (-1) ** case / 10, "shown": lambda _: 0.0, **ALIKE}, "so no poison was detected"),
        ({}, "loses too, so that something is at work that is neither"),
        ({"lost": lambda case: (-1) ** case / 10}, "does not detectably lose"),
        ({"lost": lambda case: 1 + case / 10}, "state gains"),
        ({}, "lowers the log-probability of the answer that it states"),
        ({"own": lambda case: 1.0 + case / 10}, "raises the log-probability of the answer that it states"),
    ],
)
def test_the_answer_follows_the_intervals(rows: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, ALL, concluded(made_up(**rows)), tmp_path)


def test_the_control_fails_where_it_should():
    holds = [concluded(made_up(off=off)).controls[0].holds for off in (lambda _: 0.0, lambda case: case / 100)]
    assert holds == [True, False]
