"""The dangling study on a tiny model, what its two models must do, and what made-up tables decide."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.dangling.collect as collecting
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.views.patterns import heads_view
from kvprobe.stats import FEWEST
from kvprobe.studies import dangling
from kvprobe.studies.dangling import Config
from kvprobe.studies.dangling.collect import CLOSED, FULL, HIDDEN, MASKED, RANDOM, SHARED, TOP
from kvprobe.studies.dangling.conclude import PLACES, concluded, findings_of
from kvprobe.studies.dangling.study import STUDY
from kvprobe.tasks.facts import conversation, facts
from kvprobe.tasks.ordinal import VERBS
from tests.experiments.made_up import answer_of
from tests.refusals import refused
from tests.tasks.made_up import FOUR_FACTS

SMALL = Config(kinds=("code",), prompts=4, rescued=(1, 2, 4), random=3, memos=0)
MODEL, HOLD, UNDRAWN = "deep", [True], ["memos"]
MADE_UP = Config(rescued=(1, 2), random=3)


@pytest.fixture(scope="module", autouse=True)
def four_facts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "facts", lambda _, each: FOUR_FACTS[:each])
        yield


def test_a_run_holds_all_arms_and_heads_and_shows_one_conversation(finished: Run, deep: Model):
    table, concluded = finished.df(), Conclusion.of(finished.metrics)
    assert set(table.loc[table["grid"] == "arms", "arm"]) == {FULL, MASKED, CLOSED}
    heads: Any = table[(table["grid"] == "heads") & (table["arm"] == MASKED)]
    assert len(heads) == 4 * deep.geometry.n_layers * deep.geometry.n_heads
    assert heads["dangling"].min() > 0
    assert concluded.findings.at("kl", arm=FULL).mean == pytest.approx(0, abs=1e-6)
    assert concluded.findings.at("kl", arm=MASKED).mean > 1e-4
    assert (finished.path / "report.html").read_text().count('data-component="AttentionView"') == 1


def test_heads_with_most_attention_and_random_ones_are_given_their_view_back(deep: Model):
    rows = [
        {"grid": "heads", "arm": MASKED, "half": half, "layer": layer, "head": head, "dangling": layer + head / 8}
        for half, layer, head in product((0, 1), range(deep.geometry.n_layers), range(deep.geometry.n_heads))
    ]
    pair = collecting.pairs_of(SMALL, deep)[0]
    for sets in collecting.sets_by_half(pd.DataFrame(rows), SMALL, deep).values():
        assert sets[TOP, 2, 0] == [(3, 1), (3, 0)]
        assert len({tuple(sets[RANDOM, 4, draw]) for draw in range(3)}) > 1
        assert all(len(set(heads)) == size for (_, size, _), heads in sets.items())
        chosen = {key: sets[key] for key in ((TOP, 1, 0), (RANDOM, 4, 2))}
        table = collecting.rescue(deep, SMALL, pair, {1 - pair.half: chosen})
        assert table[["sort", "size", "draw"]].to_numpy().tolist() == [[TOP, 1, 0], [RANDOM, 4, 2]]


def test_more_heads_than_there_are_is_refused(deep: Model, tmp_path: Path):
    config = Config(kinds=("code",), rescued=(1, 8), memos=0)
    refused(lambda: dangling.run(config, tmp_path, model=deep), "has 8")


GAINED = {MASKED: (0.11, 0.09, 0.0, 0.0), CLOSED: (0.06, 0.09, 0.05, 0.0), SHARED: (0.08, 0.12, 0.0, 0.0)}


def tables(top: float, random: float, *, full: float = 4.0, crossed: tuple[float, ...] = (1.0, 0.0, 0.5)) -> Any:
    """The two sorts of heads bring these shares of the way back at size 2, half of it at size 1; these shares of
    crossed memos follow the payload."""
    known = [{"prompt": f"p{number}", "half": number % 2} for number in range(FEWEST)]
    places = [dict(zip(("layer", "head"), place, strict=True)) for place in np.ndindex(2, 2)]
    heads = [
        {"grid": "heads", "arm": arm, **prompt, **place, "dangling": 0.2, **dict(zip(PLACES, gained, strict=True))}
        for arm, gained in GAINED.items()
        for prompt in known
        for place in places
    ]
    arms = [
        {"grid": "arms", "arm": arm, **prompt, "margin": margin, "kl": kl, "kl_masked": 0.1}
        for prompt in known
        for arm, margin, kl in ((FULL, full, 0.0), (MASKED, 0.0, 1.0), (CLOSED, -0.1, 1.0))
    ]
    rescues = [
        {"sort": sort, "size": size, **prompt, "margin": 2 * (share + off) * size, "kl": 1 - share * size / 2}
        for prompt in known
        for size in MADE_UP.rescued
        for sort, share in ((TOP, top), (RANDOM, random))
        for off in ([0.0] if sort == TOP else [0.05 * (-1) ** prompt["half"]] * 3)
    ]
    memos = [
        {"memo": memo, "reference": name, "arm": arm, "payload": saw, "pointer": not saw or arm != "crossed"}
        for name, share in zip(VERBS, crossed, strict=True)
        for arm in ("seen", "masked", "crossed")
        for memo in range(40)
        for saw in [arm != "crossed" or memo < 40 * share]
    ]
    records = {"samples": [*heads, *arms], "rescues": rescues, "memos": memos}
    return {name: pd.DataFrame(rows) for name, rows in records.items()}


def numbers(made_up: Any) -> Conclusion:
    fact, weights = facts()[0], torch.full((1, 2, 1, 3), 1 / 3)
    views = [heads_view(weights, ["a", "<b>", "c"], "made up", index=np.array([[0.1, 0.2]]), index_name="mass")]
    chat = chat_record(conversation(fact, fact.values[0]), masked=(HIDDEN,))
    shown = {"chat": chat, "layers": 2, "views": [vars(view) for view in views]}
    return concluded(findings_of(made_up), shown)


def example() -> tuple[Config, Conclusion]:
    return MADE_UP, numbers(tables(0.8, 0.2))


def noise(rng: np.random.Generator) -> Conclusion:
    """No part of the cache gains more than another, hiding costs nothing, and no set of heads does more than others."""
    made_up = tables(0.5, 0.5, crossed=(0.5, 0.5, 0.5))
    heads = made_up["samples"]["grid"] == "heads"
    gains = rng.dirichlet(np.full(len(PLACES), 2.0), int(heads.sum()))
    made_up["samples"].loc[heads, list(PLACES)] = 0.2 * gains
    for table, rows in (("samples", ~heads), ("rescues", made_up["rescues"]["size"] > 0)):
        made_up[table].loc[rows, ["margin", "kl"]] = rng.gamma(2.0, size=(int(rows.sum()), 2))
    follows = rng.permutation(made_up["memos"]["payload"] & (made_up["memos"]["arm"] == "crossed"))
    return numbers({**made_up, "memos": made_up["memos"].assign(payload=follows, pointer=rng.permutation(follows))})


def test_shares_are_those_that_were_put_in():
    findings = numbers(tables(0.8, 0.2)).findings
    assert findings.at("rescued", measure="margin", size=2, sort=TOP).mean == pytest.approx(0.8)
    assert findings.at("rescued", measure="kl", size=2, sort=RANDOM).mean == pytest.approx(0.2)
    assert findings.at("gap", measure="margin", size=2).mean == pytest.approx(0.6)
    assert findings.finding("way", measure="margin").comparisons == 3
    assert [findings.at("went", arm=MASKED, place=place).mean for place in PLACES] == pytest.approx([0.55, 0.45, 0, 0])
    assert findings.at("moved").mean == pytest.approx(0.05 / 0.2)
    assert findings.at("beyond", place="sink").mean == pytest.approx(0.03 / 0.2)
    assert findings.at("lead", first="sink", second="later").mean == pytest.approx(0.1)
    assert findings.at("closing").mean == pytest.approx(-0.1)
    assert [findings.at("able", arm=arm).mean for arm in (FULL, MASKED)] == [FEWEST, 0]


BACK = "80.0 % (no spread) of the right answer's margin, which is more than when shown to random ones, 20.0 %"
LED = "more to the first slot than to the later turn."
FOLLOWED = "what the summary saw for payloads, and what stands in the list now for pointers"


@pytest.mark.parametrize(
    ("made_up", "phrases"),
    [
        (tables(0.8, 0.2), (BACK, LED, FOLLOWED)),
        (tables(0.2, 0.2), ("not detectably more than when shown to random",)),
        (tables(0.2, 0.6), ("which is less than when shown to random",)),
        (tables(0.8, 0.2, full=-0.5), ("nothing is claimed of bringing it back",)),
        (tables(0.8, 0.2, crossed=(0.5, 0.5, 0.5)), ("neither of the two more often for payloads",)),
    ],
)
def test_the_answer_is_decided_by_intervals(made_up: Any, phrases: tuple[str, ...], tmp_path: Path):
    said = answer_of(STUDY, MADE_UP, numbers(made_up), tmp_path)
    assert all(phrase in said for phrase in phrases)


def test_lost_attention_wrong_memos_and_a_model_that_cannot_answer_are_reported():
    made_up = tables(0.8, 0.2, full=-1.0)
    made_up["samples"]["sink"] += 0.01
    made_up["memos"]["payload"] &= made_up["memos"]["memo"] < 30
    conclusion = numbers(made_up)
    assert [control.holds for control in conclusion.controls] == [False, False]
    assert any("little to bring back" in warning for warning in conclusion.warnings)
