"""The patching study: whole runs on a tiny model, bands and numbers of tables with known answers, and claims."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvprobe.studies.patching.collect as collecting
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.studies import patching
from kvprobe.studies.patching import Config
from kvprobe.studies.patching.collect import VALUE, Grid, measure_bands, pairs_of
from kvprobe.studies.patching.conclude import conclude
from kvprobe.studies.patching.study import STUDY
from kvprobe.tasks.facts import Fact, pair
from tests.experiments.made_up import page_of
from tests.models import any_model
from tests.tasks.made_up import made_up_fact

N_LAYERS = 4
SMALL = Config(kinds=("code", "name"), facts=3, step=2, check=8)
MODEL, HOLD = "deep", [True, True, True]


def by_margin(model: Model, kind: str) -> list[tuple[str, str]]:
    """Pairs of values, from those that the model says most clearly, each in its own run, to those that it confuses."""
    letters, said, id_of = "bcdefghijkmnopqrsu", {}, {}
    for letter in letters:
        letter_pair = pair(made_up_fact(0, kind, (letter, "v")), model.tokenizer)
        said[letter] = model.extend(model.prefill(letter_pair.prompts[0]), [letter_pair.suffix])[1][0, -1]
        id_of[letter] = letter_pair.answers[0]

    def margin(values: tuple[str, str]) -> float:
        return min(float(said[one][id_of[one]] - said[one][id_of[other]]) for one, other in (values, values[::-1]))

    return sorted(combinations(letters, 2), key=margin, reverse=True)


@pytest.fixture(scope="module", autouse=True)
def tiny_facts(deep: Model) -> Iterator[tuple[Fact, ...]]:
    """Five facts, of two kinds, that this model happens to say right in both runs, and one that it does not."""
    codes, names = by_margin(deep, "code"), by_margin(deep, "name")
    chosen = [("code", values) for values in codes[:3]] + [("name", values) for values in (*names[:2], names[-1])]
    tiny = tuple(made_up_fact(number, kind, values) for number, (kind, values) in enumerate(chosen))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "facts", lambda *_: tiny)
        yield tiny


def test_a_run_leaves_what_the_model_cannot_do_out_of_the_maps_and_shows_all_others(finished: Run):
    table, conclusion = finished.df(), Conclusion.of(finished.metrics)
    findings = conclusion.findings
    counts = (findings.at("facts").mean, findings.at("able_facts").mean, findings.at("able", kind="name").mean)
    assert counts == (6, 5, 2)
    always = {Grid.WHOLE, Grid.EVERYTHING, Grid.SAME}
    assert set(table.loc[~table["able"], "grid"]) == always
    assert set(table.loc[table["able"], "grid"]) >= always | {Grid.LAYERS, Grid.HEADS, Grid.RESIDUAL}
    assert {finding.value.clusters for finding in findings.where("segment")} == {5}
    assert (finished.path / "report.html").read_text().count('data-component="ColoredTokensMulti"') == 1
    # Before the first layer, the value's tokens in the residual stream are all that the two runs differ in.
    first = table[(table["grid"] == Grid.RESIDUAL) & (table["layer"] == 0)]
    np.testing.assert_allclose(first["normalised"], [1] * 5, atol=1e-3)


def test_too_few_facts_are_reported_and_nothing_else(
    deep: Model, tiny_facts: tuple[Fact, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(collecting, "facts", lambda *_: tiny_facts[-1:])
    run = patching.run(Config(kinds=("name",), facts=1, check=8), tmp_path, model=deep)
    assert "right value in both runs of 0 of 1 facts, and 4 are the fewest" in answer(STUDY, run)
    assert Conclusion.of(run.metrics).findings.names == ["runs", "able", "facts", "able_facts", "largest", "off"]


def test_ways_take_each_fact_both_ways_or_in_turn(deep: Model, tiny_facts: tuple[Fact, ...]):
    one, both = (pairs_of(Config(kinds=("code", "name"), facts=3, ways=ways), deep.tokenizer) for ways in (1, 2))
    assert [case.id for case in both[::2]] == [case.id for case in one] == [fact.id for fact in tiny_facts]
    for there, back in zip(both[::2], both[1::2], strict=True):
        assert (there.prompts, there.answers, there.half) == (back.prompts[::-1], back.answers[::-1], back.half)
    assert [case.prompts for case in one] == [both[2 * place + place % 2].prompts for place in range(len(one))]
    assert [case.number for case in both] == list(range(12))
    assert sorted(case.half for case in one) == [0, 0, 0, 1, 1, 1]


def test_a_run_tests_the_band_of_the_other_half(deep: Model):
    case = pairs_of(SMALL, deep.tokenizer)[0]
    table = measure_bands(deep, SMALL, case, {"V": {case.half: range(0, 1), 1 - case.half: range(1, 3)}})
    assert dict(zip(table["where"], table["band"], strict=True)) == {"inside": "1–2", "outside": "0+3"}


def table_with(
    shares: Mapping[str, float], facts: int = 16, seed: Any = 0, noise: float = 0.02, added: bool = False
) -> pd.DataFrame:
    """Facts whose K and V carry these shares, at layers 3 and 2; both are the donor, or the sum of each and noise."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(facts):
        way = -5.0 + rng.normal(0, 0.5)
        known = {"pair": number, "cluster": f"f{number}", "kind": "code", "half": number % 2, "able": True, "way": way}
        fact_shares = {part: share + rng.normal(0, noise) for part, share in shares.items()}
        fact_shares["KV"] = sum(fact_shares.values()) + rng.normal(0, noise) if added else 1.0

        def cell(share: float, grid: Grid, part: str, known: dict[str, Any] = known, **labels: Any) -> None:
            effect = share * known["way"]
            ends = {"value": 2.5 + effect, "donor": 2.5 + known["way"], "effect": effect}
            rows.append({**known, **ends, "grid": grid.value, "part": part, **labels})

        for part, share in fact_shares.items():
            cell(share, Grid.EVERYTHING, part)
            for segment in ("system", VALUE, "T2"):
                cell(share * (segment == VALUE), Grid.WHOLE, part, segment=segment)
            for layer in range(N_LAYERS):
                hit = share * (layer == {"K": 3, "V": 2}.get(part))
                scores = {"head": 0, "score": 2 * hit * way, "linear": hit}
                cell(hit, Grid.LAYERS, part, segment=VALUE, layer=layer)
                cell(hit, Grid.HEADS, part, segment=VALUE, layer=layer, **scores)
            cell(0.9 * share, Grid.BANDS, part, where="inside")
            cell(0.1 * share, Grid.BANDS, part, where="outside")
        cell(1.0, Grid.RESIDUAL, "resid_pre", segment=VALUE, layer=0)
        cell(0.0, Grid.SAME, "KV")
    return pd.DataFrame(rows)


def numbers(table: pd.DataFrame) -> Conclusion:
    """With an example of two slots, of which the second carries half of the way, for the reader."""
    rows = []
    for slot, text in ((7, "\n"), (8, "$b <i>")):
        known = {"cluster": "f0", "way": -5.0, "slot": slot, "text": text, "effect": -2.5 * (slot - 7)}
        layers = [(Grid.SLOTS, part, layer) for part in ("K", "V") for layer in range(N_LAYERS)]
        for grid, part, layer in (*layers, *((Grid.TOKENS, part, np.nan) for part in ("K", "V", "KV"))):
            rows.append({**known, "grid": grid.value, "part": part, "layer": layer, "score": known["effect"]})
    rows.append({**known, "grid": Grid.TOTAL.value, "part": "KV", "effect": -5.0})
    return conclude({"samples": table, "example": pd.DataFrame(rows)}, Config(), any_model(N_LAYERS))


def example() -> tuple[Config, Conclusion]:
    return Config(), numbers(table_with({"K": 0.1, "V": 0.8}))


def noise(rng: np.random.Generator) -> Conclusion:
    """Neither K nor V moves the answer, nor do both together."""
    return numbers(table_with({"K": 0.0, "V": 0.0}, seed=rng, noise=0.3, added=True))


def test_known_shares_layers_and_bands_come_back():
    findings = example()[1].findings
    for name, keys, value in (
        ("everything", {"part": "V"}, 0.8),
        ("difference", {}, 0.7),
        ("interaction", {}, 0.1),
        ("layer", {"layer": 2, "segment": VALUE, "part": "V"}, 0.8),
        ("head", {"layer": 2, "head": 0, "part": "V"}, 1.6),
        ("band", {"part": "V", "where": "outside"}, 0.08),
        ("of_whole", {"part": "V"}, 0.9),
        ("agreement", {"score": "score", "part": "V", "quartile": "low"}, 1),
        ("agreement", {"score": "linear", "part": "V", "quartile": "high"}, -1),
        ("slot", {"layer": 3, "token": "8 $b <i>", "part": "K"}, 0.5),
        ("slot", {"layer": 3, "token": "7 ↵", "part": "K"}, 0),
        ("token", {"seen": "total: KV", "token": "8 $b <i>"}, 1),
    ):
        assert findings.at(name, **keys).mean == pytest.approx(value, abs=0.03), name
    assert {finding.value.mean for finding in findings.where("band_layer", part="V")} == {2}


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"K": 0.1, "V": 0.8}, ("V carries more", "its V alone", "at layer 2: bands", "give 90.0 %")),
        ({"K": 0.8, "V": 0.1}, ("K carries more", "its K alone", "at layer 3: bands", "give 90.0 %")),
        ({"K": 0.5, "V": 0.5}, ("not decided",)),
        ({"K": -0.9, "V": -0.3}, ("V carries more", "That either alone carries the fact was not detected")),
    ],
)
def test_the_answer_follows_the_intervals(shares: dict[str, float], words: tuple[str, ...], tmp_path: Path):
    said = answer(STUDY, page_of(STUDY, Config(), numbers(table_with(shares)), tmp_path))
    assert all(word in said for word in words)
    assert ("carries most" in said) == (len(words) == 4)


def test_what_both_need_and_what_both_do_are_distinguished():
    for share, said in ((0.3, "part takes both"), (0.5, "not detected"), (0.9, "part is in either")):
        findings = numbers(table_with(dict.fromkeys("KV", share))).findings
        assert STUDY.claim(findings, "interaction") == said


def test_few_facts_and_a_broken_control_are_warned_of():
    table: Any = table_with({"K": -0.1, "V": 0.8}, facts=6)
    assert numbers(table).warnings[0].startswith("6 facts are too few to tell")
    assert numbers(table).findings.values("band_layer", "part") == ["V"]
    assert numbers(table[table["pair"] < 3]).facts["enough"] is False
    table.loc[(table["grid"] == Grid.WHOLE) & (table["segment"] == "system"), "effect"] = 0.5
    assert [control.holds for control in numbers(table).controls] == [False, True, True]
