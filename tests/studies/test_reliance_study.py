"""The reliance study: a whole run on a tiny model, and numbers of made-up tables."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from kvprobe.inference.forced import given_answer
from kvprobe.policies import RestartInPlace
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.compaction.replies import answers_after
from kvprobe.studies.reliance import Config, collect
from kvprobe.studies.reliance.collect import (
    EXCHANGED,
    AskedAfter,
    Source,
    answers_rightly,
    exchanged,
    lead_of,
    measure,
    states_of,
)
from kvprobe.studies.reliance.stated_twice import LEAD, Word, stated_twice
from kvprobe.studies.reliance.study import STUDY, conclude
from tests import models
from tests.experiments.made_up import answer_of
from tests.studies.runs import every, whole_run

SMALL, ALL = (
    Config(contexts=2, bands=2, turns=(0, 1), leads=("model",), answer=2),
    Config(turns=(0, 2), leads=("model",)),
)
CONVERSATIONS = 24


@pytest.fixture(scope="module")
def finished(root: Path) -> Run:
    return whole_run(STUDY, SMALL, models.any_model(), root, [True, True])


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert len(findings.where("logprob")) == 2 * 4 * 3 * 2
    assert len(findings.where("undone")) == 2 * (SMALL.bands + 1) * len(EXCHANGED)
    assert len(findings.where("right")) == 2 * 2 * 3


def test_retained_summaries_differ_by_what_was_in_view_and_recomputed_ones_do_not(finished: Run):
    table = finished.df().query("turns == 1").set_index(["context", "state", "source", "word"])["logprob"]
    rows = table[table.index[0][0]]
    assert rows["recomputed", "own", "own"] == pytest.approx(rows["recomputed", "unrelated", "own"], abs=1e-5)
    assert rows["retained", "own", "own"] != pytest.approx(rows["retained", "unrelated", "own"], abs=1e-4)


def test_turns_lie_between_and_leads_are_the_models_own_where_it_answers_rightly(monkeypatch: pytest.MonkeyPatch):
    model, case = models.any_model(), stated_twice(2)[1]
    said = f"You said that it is {case.answers['own']}, I think."
    monkeypatch.setattr(collect, "answers_after", lambda _, rows, *__: SimpleNamespace(texts=[said] * rows.batch))
    rows = measure(model, replace(ALL, answer=1), case)
    assert set(rows["words"].dropna()) == {"You said that it is"}
    tokens = case.talk("own", "own", 2, "You said that it is").tokens(model.tokenizer)
    begins, answer = tokens.span("B1").start, tokens.part("answer")
    retained = model.prefill(tokens[:begins]).mask(*HIDDEN_SEGMENTS)
    expected = given_answer(model, retained, tokens[begins : answer.start], tokens.ids[answer]).log_prob
    row = rows.query("turns == 2 and source == 'own' and state == 'retained' and word == 'own'").iloc[0]
    assert row["logprob"] == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(collect, "answers_after", lambda *_: SimpleNamespace(texts=["I do not know."]))
    assert lead_of(model, case, retained, tokens[begins:], "model") == LEAD


@pytest.mark.parametrize("bands", [1, 2])
def test_an_exchange_is_that_of_its_layers_and_part(bands: int):
    model, case = models.any_model(), stated_twice(2)[1]
    named = named_bands(model.geometry.n_layers, bands)
    states, asked = states_of(model, case, "own"), AskedAfter.of(model, case, "own", "own", 0, LEAD)
    found = exchanged(model, states, asked, named)
    tokens = case.talk("own", "own").tokens(model.tokenizer)
    ask, answer = tokens.span("ask").start, tokens.part("answer")
    cache = model.prefill(tokens[:ask])
    retained, again = cache.mask(*HIDDEN_SEGMENTS), model.apply(RestartInPlace(HIDDEN_SEGMENTS), cache)

    # What is computed again has no slots for the hidden turns.
    in_view = retained.ledger.live_somewhere[0].nonzero()[:, 0]

    def swapped(kind: str, chosen: bool, layers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        pairs = enumerate(zip(getattr(retained, kind), getattr(again, kind), strict=True))
        return tuple(
            old.index_copy(2, in_view, new) if chosen and layer in layers else old for layer, (old, new) in pairs
        )

    def worth(left: KVCache) -> float:
        return given_answer(model, left, tokens[ask : answer.start], tokens.ids[answer]).log_prob

    for (band, layers), part in product(named.items(), EXCHANGED):
        keys, values = swapped("keys", "K" in part, layers), swapped("values", "V" in part, layers)
        undone = worth(retained.with_parts({"K": keys, "V": values})) - worth(retained)
        assert found[band, part] == pytest.approx(undone, abs=1e-4)


Number = Callable[[int], float]


def made_up(
    own: Number = lambda case: -2.0 - 0.1 * (case % 3),
    other: Number = lambda case: -0.1 * (case % 2),
    unrelated: Number = lambda case: -0.5 + 0.1 * (case % 2),
    reworded: Number = lambda case: -1.5 + 0.1 * (case % 2),
    shown: Number = lambda case: 1.0 + 0.1 * (case % 2),
    lost: Number = lambda case: -1.0 - 0.1 * (case % 2),
    off: Number = lambda _: 0.0,
    wrong_later: int = 22,
) -> dict[str, pd.DataFrame]:
    """What retaining gains: of the summary's answer by source; of the other answer where the turns stated it, and where
    they stated the summary's. Half of it sits in K of layers 0–1, the other in V of all layers."""
    rows, replies = [], []
    for case, turns, source in product(range(CONVERSATIONS), ALL.turns, get_args(Source)):
        gain = {"own": own, "reworded": reworded, "other": other, "unrelated": unrelated}[source]
        of_other = {"own": lost, "other": shown}.get(source, lambda _: 0.0)(case)
        cell = {"turns": turns, "source": source, "context": case}
        for word in get_args(Word):
            level = -5.0 if word == "own" else -9.0
            more = gain(case) if word == "own" else of_other
            alone = level + off(case) * (source == "unrelated")
            for state, value in (("view", 0.0), ("retained", level + more), ("recomputed", alone)):
                rows.append({**cell, "state": state, "word": word, "logprob": value})
        for state in ("view", "retained", "recomputed"):
            wrong = source == "own" and state == "retained" and turns and case < wrong_later
            replies.append({**cell, "state": state, "right": float(not wrong)})
    held = every(context=range(CONVERSATIONS), turns=ALL.turns, band=("0–1", "2–3", EVERY_LAYER), part=EXCHANGED)
    parts = (held["part"] != "V").astype(int) * (held["band"] != "2–3") + (held["part"] != "K")
    return {
        "samples": pd.DataFrame(rows).assign(lead="model", words=LEAD),
        "replies": pd.DataFrame(replies),
        "exchanged": held.assign(undone=-parts * held["context"].map(own) / 2, lead="model"),
    }


ALIKE: dict[str, Number] = {"unrelated": lambda _: 0.0, "lost": lambda _: 0.0}


def concluded(tables: dict[str, pd.DataFrame]) -> Conclusion:
    return conclude(tables, ALL, models.any_model())


def example() -> tuple[Config, Conclusion]:
    return ALL, concluded(made_up())


def noise(rng: np.random.Generator) -> Conclusion:
    """Retaining changes nothing on average, whatever was in view."""

    def normal(_: int) -> float:
        return float(rng.normal())

    tables = made_up(normal, normal, normal, normal, normal, normal)
    coins = rng.integers(2, size=len(tables["replies"])).astype(float)
    return concluded(tables | {"replies": tables["replies"].assign(right=coins)})


def test_planted_numbers_are_found():
    findings = example()[1].findings
    cases = np.arange(CONVERSATIONS)
    own, unrelated = -2.0 - 0.1 * (cases % 3), -0.5 + 0.1 * (cases % 2)
    other, lost = -0.1 * (cases % 2), -1.0 - 0.1 * (cases % 2)
    for when, turns in (("at once", 0), ("later", 2)):
        assert findings.at("worse", when=when).mean == pytest.approx(own.mean())
        assert findings.at("relies", when=when).mean == pytest.approx((own - lost - unrelated).mean())
        poisoned = other - 1.0 - 0.1 * (cases % 2) - unrelated
        assert findings.at("poisoned", when=when).mean == pytest.approx(poisoned.mean())
        assert findings.at("general", when=when).mean == pytest.approx(-1.05)
        assert findings.at("reworded", when=when).mean == pytest.approx(-1.0)
        cell = {"turns": turns, "lead": "model"}
        assert findings.at("gain", source="own", word="margin", **cell).mean == pytest.approx((own - lost).mean())
        assert findings.at("gain", source="other", word="other", **cell).mean == pytest.approx(1.05)
        assert findings.at("undone", when=when, band="0–1", part="K").mean == pytest.approx(-own.mean() / 2)
        assert findings.at("right", turns=turns, source="own", state="retained").mean == pytest.approx(
            2 / 24 if turns else 1.0
        )
        assert STUDY.claim(findings, "undone", when=when, band="2–3", part="K") == "not detected"
        assert STUDY.claim(findings, "undone", when=when, band=EVERY_LAYER, part="KV") == "gives back"
        assert {findings.finding(claim.finding, when=when).comparisons for claim in STUDY.claims[:6]} == {12}
    assert findings.at("price", when="later").mean == pytest.approx(-22 / 24)
    assert STUDY.claim(findings, "price", when="later") == "lowers"
    assert STUDY.claim(findings, "price", when="at once") == "does not detectably change"


def test_replies_are_those_that_the_model_gives_after_each_cache():
    model, case = models.any_model(), stated_twice(2)[1]
    states = states_of(model, case, "own")
    question = case.talk("own", None).tokens(model.tokenizer, generation_prompt=True)
    asked = question[question.span("ask").start :]
    texts = [answers_after(model, left, [asked], 3).texts[0] for left in states.values()]
    said = texts[1].strip()[:4] or texts[1]
    asked_for = replace(case, compaction=replace(case.compaction, summary_answer=said))
    found = answers_rightly(model, asked_for, KVCache.join(list(states.values())), asked, 3)
    assert found == [float(said.lower() in text.lower()) for text in texts]
    assert found[1] == 1.0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"own": lambda case: 1.0 + case / 10}, "rises, the opposite of reliance"),
        ({"shown": lambda case: -1 - case / 10, **ALIKE}, "rises, the opposite of poison"),
        ({"lost": lambda case: 1 + case / 10}, "states gains"),
        ({}, "lowers the log-probability of the answer that it states"),
    ],
)
def test_the_answer_follows_the_intervals(rows: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, ALL, concluded(made_up(**rows)), tmp_path)


def test_the_control_fails_where_it_should():
    sound, off = made_up(), made_up(off=lambda case: case / 100)
    apart = sound | {"exchanged": sound["exchanged"].assign(undone=0.0)}
    holds = [[control.holds for control in concluded(tables).controls] for tables in (sound, off, apart)]
    assert holds == [[True, True], [False, True], [True, False]]
