"""The pointers study: what is known of the model ordinal is found, conversations of one layout, made-up tables."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model, load
from kvprobe.studies.pointers import Config
from kvprobe.studies.pointers.cases import (
    FORMS,
    KNOWN,
    MOVED,
    OBJECT,
    PLACE,
    RENAMED,
    SHIFTED,
    WORDINGS,
    PointerCase,
    binding,
    memo_case,
)
from kvprobe.studies.pointers.collect import (
    ARMS,
    EXCHANGED,
    LATE,
    LOOKED,
    MASS,
    PARTS,
    RESTART,
    STAND_IN,
    VIEW,
    WHOLE,
    outcomes,
    read_case,
)
from kvprobe.studies.pointers.conclude import conclude
from kvprobe.studies.pointers.study import STUDY
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.refusals import refused

SMALL = Config(conversations=8, shots=0, bands=2, memos=8)
MODEL, HOLD = "wordy", [True]
LOCATED, COPIED = KNOWN


def test_a_run_holds_every_number_and_finds_what_is_known_of_ordinal(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert findings.values("right", "form") == [*FORMS, *KNOWN]
    assert findings.values("right", "arm", form=OBJECT) == [VIEW, LATE, RESTART, STAND_IN]
    for form, held, other in ((LOCATED, "address", "content"), (COPIED, "content", "address")):
        assert findings.at("right", form=form, arm=VIEW).mean == 1
        assert findings.at(held, form=form).mean > 0.7
        assert abs(findings.at(other, form=form).mean) < 0.2
    assert findings.at("right", form=COPIED, arm=LATE).mean == 1, "content outlives the list"
    assert findings.at("right", form=COPIED, arm=STAND_IN).mean == 0
    assert findings.at("lost", form=LOCATED).mean > 0.2, "an address does not"


@pytest.mark.parametrize("form", FORMS)
def test_conversations_and_their_donors_have_one_layout_and_differ_as_they_say(smol: Model, form: str):
    rng, worded = np.random.default_rng(0), set()
    for place in (0, 1) * 4:
        case = binding(smol, form, place, 1, rng)
        assert [*case.donors] == [MOVED, RENAMED, *[SHIFTED] * (form == OBJECT)]
        assert {(donor.segments, len(donor)) for donor in case.donors.values()} == {(case.own.segments, len(case.own))}
        every = {"own": case.own, **case.donors}
        listed, pointer = (
            {name: read(smol, tokens, segment) for name, tokens in every.items()} for segment in ("list", "pointer")
        )
        pairs = {name: pairs_of(text) for name, text in listed.items()}
        assert set(pairs["own"]) == set(pairs[MOVED]) != set(pairs[RENAMED])
        assert pairs["own"] == pairs[MOVED][::-1]
        assert pointer["own"] == pointer[RENAMED]
        assert (pointer["own"] == pointer[MOVED]) == (form == OBJECT)
        right, wrong = (smol.tokenizer.decode([token]).strip() for token in (case.right, case.wrong))
        assert (listed["own"].index(right) < listed["own"].index(wrong)) == (place == 0)
        assert not {right, wrong} & set(pointer["own"].replace(".", " ").split())
        assert smol.tokenizer.decode(case.own.ids).endswith("We ask")
        worded |= {at for at, (entry, _) in enumerate(WORDINGS) if entry.split()[2] in listed["own"]}
        if form == OBJECT:
            assert pairs["own"] == pairs[SHIFTED]
            assert pointer["own"] == pointer[SHIFTED]
            assert position(case, MOVED) == position(case, SHIFTED) != position(case, "own")
            assert position(case, MOVED) == position(case, "own", case.wrong)
    assert worded == {0, 1}


def pairs_of(listed: str) -> list[tuple[str, str]]:
    return re.findall(r"The (\w+) (?:is with|belongs to) (\w+)", listed)


def position(case: PointerCase, name: str, person: int | None = None) -> int:
    """Of a person in the list; by default the one who is meant."""
    tokens = case.own if name == "own" else case.donors[name]
    span = tokens.span(case.payload)
    return span.start + [*tokens[span].ids].index(case.right if person is None else person)


def read(model: Model, tokens: Any, segment: str) -> str:
    return model.tokenizer.decode(tokens[tokens.span(segment)].ids)


def test_an_exchange_of_all_that_differs_is_the_other_conversation():
    """With the list exchanged too, the answer is that of the renamed conversation, whose way is the whole."""
    model = load("ordinal")
    case = memo_case(model, LOCATED, np.random.default_rng(3))
    own, renamed = (model.prefill(tokens[: case.cut]) for tokens in (case.own, case.donors[RENAMED]))
    table = read_case(model, case, 1)
    both = outcomes(model, [own.patch(renamed, case.payload, case.pointer)], case.own[case.cut :], case)
    row = chosen(table, {"table": EXCHANGED, "donor": RENAMED, "band": EVERY_LAYER, "part": "KV"})
    assert row["own"].item() - both["margin"].item() == pytest.approx(row["way"].item(), abs=1e-3)
    assert chosen(table, {"table": LOOKED})["margin"].iloc[-1] == pytest.approx(
        chosen(table, {"table": ARMS, "arm": LATE})["margin"].item(), abs=1e-4
    )


def test_each_donor_gives_its_own_slots(smol: Model):
    case = binding(smol, OBJECT, 1, 0, np.random.default_rng(0))
    table = chosen(read_case(smol, case, 1), {"table": EXCHANGED, "band": EVERY_LAYER, "part": "KV"})
    own = smol.prefill(case.own[: case.cut])
    for donor, tokens in case.donors.items():
        patched = own.patch(smol.prefill(tokens[: case.cut]), case.pointer)
        margin = outcomes(smol, [patched], case.own[case.cut :], case)["margin"].item()
        assert chosen(table, {"donor": donor})["margin"].item() == pytest.approx(margin, abs=1e-3)
    assert len({round(margin, 2) for margin in table["margin"]}) == len(case.donors)


def test_a_tokenizer_that_splits_names_is_refused(roomy: Model):
    refused(lambda: binding(roomy, PLACE, 1, 0, np.random.default_rng(0)), "'Anna' as several tokens")


def test_a_sentence_that_is_not_as_long_as_an_entry_is_refused(smol: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvprobe.studies.pointers.cases.SKY", "The sky is clear.")
    refused(lambda: binding(smol, OBJECT, 1, 0, np.random.default_rng(0)), "fewer tokens than an entry")


def made_up(
    address: float = 0.0,
    position: float = 0.0,
    content: float = 0.0,
    right: float = 1.0,
    late: float = 0.5,
    kept: float = 0.0,
    known: float = 1.0,
) -> dict[str, pd.DataFrame]:
    """By default what is in view is looked up by the pointer's text, and nothing is held."""
    cases, wave = np.arange(24), 0.02 * (-1.0) ** np.arange(24)
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in (ARMS, EXCHANGED, LOOKED, MASS)}
    for form in (*FORMS, *KNOWN):
        turned = {MOVED: address, RENAMED: content} | ({SHIFTED: position} if form == OBJECT else {})
        if form in KNOWN:
            turned = {MOVED: known * (form == LOCATED), RENAMED: known * (form == COPIED)}
        keys = {"form": form, "case": cases}
        for arm, share in ((VIEW, right), (LATE, late), (RESTART, 0.5), (STAND_IN, 0.5)):
            margin = 4.0 * (arm == VIEW) + kept * (arm == LATE) + wave
            bits = 1.0 * (arm == VIEW) + wave
            tables[ARMS].append(
                {**keys, "arm": arm, "right": cases < share * len(cases), "margin": margin, "bits": bits}
            )
        for donor, band, part in product(turned, ("0–1", EVERY_LAYER), PARTS):
            if donor == SHIFTED and (band, part) != WHOLE:
                continue
            margin = 4.0 - 8.0 * turned[donor] + wave
            where = {"donor": donor, "band": band, "part": part}
            tables[EXCHANGED].append({**keys, **where, "margin": margin, "own": 4.0, "way": 8.0 + wave})
        tables[LOOKED] += [{**keys, "band": band, "margin": 2.0 + wave, "own": 4.0} for band in ("0–1", EVERY_LAYER)]
        tables[MASS] += [{**keys, "layer": layer, "mass": 0.1 + wave} for layer in range(2)]
    frames = {name: pd.concat(map(pd.DataFrame, rows), ignore_index=True) for name, rows in tables.items()}
    frames[ARMS]["right"] = frames[ARMS]["right"].astype(float)
    return frames


def concluded(**numbers: float) -> Conclusion:
    return conclude(made_up(**numbers), Config(), any_model())


def example() -> tuple[Config, Conclusion]:
    return Config(), concluded()


def noise(rng: np.random.Generator) -> Conclusion:
    """Nothing is held anywhere, and hiding changes nothing."""
    tables = made_up(known=0.0, right=0.5)
    for name, column in ((EXCHANGED, "margin"), (ARMS, "margin")):
        tables[name][column] = 4.0 + rng.normal(size=len(tables[name]))
    tables[ARMS]["right"] = rng.integers(2, size=len(tables[ARMS])).astype(float)
    return conclude(tables, Config(), any_model())


def test_planted_numbers_are_found():
    findings = concluded(address=0.25, position=0.125, content=0.5, late=0.75, kept=1.5).findings
    assert findings.at("position", form=OBJECT).mean == pytest.approx(0.125, abs=0.01)
    for name, value in (("address", 0.25), ("content", 0.5), ("lost", 0.25), ("kept", 1.5)):
        assert findings.at(name, form=PLACE).mean == pytest.approx(value, abs=0.01), name
    assert findings.at("content_at", form=OBJECT, part="V", band="0–1").mean == pytest.approx(0.5, abs=0.01)
    assert findings.at("looked", form=OBJECT, band="0–1").mean == pytest.approx(0.5, abs=0.01)
    assert {claim.finding: findings.where(claim.finding)[0].comparisons for claim in STUDY.claims} == dict.fromkeys(
        ("address", "position", "content", "lost", "kept"), 17
    )


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, ("holds no address that was detected", "holds nothing that was detected of whom it means")),
        ({}, ("Hiding the list then costs right answers", "nothing of the hidden list was detected in the answer")),
        ({"address": 0.5}, ("other positions, it was not seen to turn the answer (0.0 %",)),
        ({"position": 0.5}, ("other positions, it turns the answer (50.0 %",)),
        ({"address": 0.5, "content": 0.5}, ("A pointer by its thing holds an address", "and holds whom it means")),
        ({"right": 0.75}, ("fewer than nine in ten, so what was not detected is undecided",)),
        ({"kept": 1.0, "late": 1.0}, ("No cost of hiding", "still leans the answer to the right one")),
    ],
)
def test_the_answer_follows_the_intervals(numbers: dict[str, float], expected: tuple[str, ...], tmp_path: Path):
    said = answer_of(STUDY, Config(), concluded(**numbers), tmp_path)
    assert [phrase for phrase in expected if phrase not in said] == []


def test_the_control_fails_where_what_is_known_is_not_found():
    assert [concluded(known=known).controls[0].holds for known in (1.0, 0.3)] == [True, False]
