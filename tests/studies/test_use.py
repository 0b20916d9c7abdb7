"""The use study on a tiny model: what is edited is what its name says; and what made-up effects decide."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.studies.use import Config, effects
from kvprobe.studies.use.checks import ANEW, INTACT, SAME
from kvprobe.studies.use.collect import chosen_places
from kvprobe.studies.use.conclude import NEAR, SITES, conclude
from kvprobe.studies.use.effects import BOTH, CONTROL, DONOR, ERASE, FULL, IN_VIEW, ITSELF, SWAP, VIEWS
from kvprobe.studies.use.place_erasers import INLP, LEACE, RANDOM_0
from kvprobe.studies.use.places import PLACES, cases_of, places_of, read_case
from kvprobe.studies.use.study import STUDY
from kvprobe.studies.use.variants import PARTS
from kvprobe.tasks import passcode
from kvprobe.tasks.passcode import Coded, conversation
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.refusals import refused
from tests.studies.runs import every, whole_run
from tests.tasks.made_up import short_contexts

SMALL = Config(contexts=8, codes=12, bands=2, randoms=1, strengths=(0.0, 1.0), batch=5)
CONTEXTS = short_contexts(8, longer="so ")


@pytest.fixture(scope="module")
def finished(roomy: Model, root: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passcode, "contexts", lambda: CONTEXTS)
        return whole_run(STUDY, SMALL, roomy, root, [True, True])


@pytest.fixture(scope="module")
def case(roomy: Model) -> Coded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passcode, "contexts", lambda: CONTEXTS)
        return cases_of(SMALL, roomy.tokenizer)[1]


def test_a_digit_is_read_in_its_slot(roomy: Model, case: Coded):
    read = read_case(roomy, case, SMALL.batch)
    tokens = conversation(case.context, case.codes[4]).tokens(roomy.tokenizer)
    text = roomy.tokenizer.decode([tokens.ids[slot] for slot in places_of(tokens)["code"]])
    assert text == case.codes[4] == "".join(map(str, read["labels"][:, 4].tolist()))


def test_a_whole_exchange_holds_the_source_in_its_place_alone(roomy: Model, case: Coded):
    scene = effects.CodedScene.of(roomy, case, read_case(roomy, case, SMALL.batch), {})
    for place, slots in scene.places.items():
        full = scene.edited(scene.donor, place, FULL, range(roomy.geometry.n_layers))
        others = [slot for slot in range(scene.base.slots) if slot not in slots]
        torch.testing.assert_close(full.values[2][:, :, list(slots)], scene.donor.values[2][:, :, list(slots)])
        assert torch.equal(full.keys[2][:, :, others], scene.base.keys[2][:, :, others])


def test_a_run_holds_every_table_and_figure_and_its_controls(finished: Run):
    samples, conclusion = finished.df(), Conclusion.of(finished.metrics)
    assert set(samples["view"]) == set(VIEWS)
    assert len(conclusion.findings.where("beyond")) == len(SITES) * (SMALL.bands + 1) * 3
    assert len(finished.df("doses")) == SMALL.contexts * len(SMALL.strengths) * 2 * 3
    assert len(finished.df("replies")) == len(conclusion.facts["replies"])


def test_no_strength_is_no_edit_and_all_of_it_is_that_of_the_sweep(finished: Run):
    doses = finished.df("doses")
    assert doses.query("strength == 0").eval("margin - intact_margin").abs().max() < 1e-3
    keys = ["context", "view", "place", "band", "part", "kind", "name"]
    both = doses[doses["strength"] == 1].merge(finished.df(), on=keys, suffixes=("", "_swept"))
    assert len(both)
    assert (both["margin"] - both["margin_swept"]).abs().max() < 1e-3


def test_the_place_of_a_half_is_chosen_on_the_other():
    table = every(half=(0, 1), band=("0–1", "2–3"), name=(LEACE, RANDOM_0))
    most = (table["name"] == LEACE) & ((table["half"] == 0) == (table["band"] == "0–1"))
    table = table.assign(kind=ERASE, view=IN_VIEW, place="code", part="V", intact_margin=9.0, margin=8.0 - 5.0 * most)
    assert chosen_places(table) == ((IN_VIEW, "code", "2–3", "V"), (IN_VIEW, "code", "0–1", "V"))


Lost = Callable[[str, str, float], float]
"""Nats that are lost at a site to an edit of this strength."""
NAMES = (LEACE, RANDOM_0, "random 1", FULL)


def edits(table: pd.DataFrame, lost: Lost, rng: np.random.Generator, way: float) -> pd.DataFrame:
    """Each conversation's margin is about 20 nats; two codes are so many logits apart with everything in view."""
    view, place = zip(*table["at"], strict=True)
    drawn = rng.normal([20.0, way], [1.0, 0.3], (table["context"].max() + 1, 2))[table["context"]]
    distance = np.where(np.array(view) == IN_VIEW, drawn[:, 1], 0.01 * drawn[:, 0] * (-1) ** table["context"])
    strength = table.get("strength", pd.Series(1.0, table.index))
    edit = zip(table["at"].map(SITES), table["name"].str.split().str[0], strength, strict=True)
    taken = np.array([lost(*arguments) for arguments in edit]) + rng.normal(0, 0.05, len(table))
    turned = table["name"].map({ITSELF: 0.0, DONOR: 1.0, LEACE: 0.9}).fillna(0.1)
    return table.drop(columns="at").assign(
        **{"view": view, "place": place, "half": table["context"] % 2, "kl": taken**2, "said": taken < 10},
        **{"margin": drawn[:, 0] - taken, "intact_margin": drawn[:, 0], "intact_said": True},
        **{"difference": distance * (0.5 - turned), "intact_difference": distance / 2},
        donor_difference=-distance / 2,
    )


def made_up(lost: Lost, rng: np.random.Generator, contexts: int = 16, way: float = 8.0, **left: float) -> Conclusion:
    """What is concluded where edits take this much, give or take noise, and the two probes read this much after
    LEACE."""
    case: Any = {"context": range(contexts)}
    where = {**case, "at": list(SITES), "part": (*PARTS, BOTH)}
    controls = {"at": [(view, "") for view in VIEWS], "kind": [CONTROL], "name": [ITSELF, DONOR]}
    samples = [
        every(**where, kind=[ERASE], band=[EVERY_LAYER], name=(*NAMES, INLP)),
        every(**where, kind=[ERASE], band=("0–1", "2–3"), name=(LEACE, RANDOM_0)),
        every(**where, kind=[SWAP], band=[EVERY_LAYER], name=NAMES),
        every(**case, **controls, band=[EVERY_LAYER], part=[BOTH]),
    ]
    chosen: Any = {**case, "at": [(IN_VIEW, "code")], "part": ["V"], "band": ["0–1"], "kind": [ERASE, SWAP]}
    site: Any = {"place": list(PLACES), "part": PARTS}
    probes = every(**site, layer=range(3), **case, state=(INTACT, LEACE, RANDOM_0, INLP), probe=(SAME, ANEW))
    reads = probes["probe"].map({SAME: left.get("same", 0.1), ANEW: left.get("anew", 0.4)})
    tables = {
        "samples": edits(pd.concat(samples, ignore_index=True), lost, rng, way),
        "doses": edits(every(**chosen, name=(LEACE, RANDOM_0, FULL), strength=Config().strengths), lost, rng, way),
        "probes": probes.assign(accuracy=rng.binomial(120, reads.where(probes["state"] == LEACE, 0.7)) / 120),
        "erasers": every(**site, name=(LEACE, RANDOM_0, INLP)).assign(rank=26.0, share=0.4, width=192),
        "replies": every(context=[0], code=["48213"], place=["code"], name=[LEACE, RANDOM_0], reply=["It is the."]),
    }
    return conclude(tables, Config(), any_model())


def dosed(site: str, edit: str, strength: float) -> float:
    """The code is used in its own slots, in proportion to the strength up to 1; a trace of it after them."""
    known = {"code": 15.0 * min(strength, 1.0), "after": 0.5}
    return known.get(site, 0.0) if edit in (LEACE, FULL) else 0.0


def example() -> tuple[Config, Conclusion]:
    return Config(), made_up(dosed, np.random.default_rng(0))


def noise(rng: np.random.Generator) -> Conclusion:
    """LEACE takes no more than random subspaces, at any strength, and probes read as much as counts as near chance."""
    return made_up(lambda *_: float(rng.normal(2.0)), rng, same=NEAR, anew=NEAR)


def test_the_answer_says_where_the_code_is_used_what_an_exchange_turns_and_what_is_left(tmp_path: Path):
    words = answer_of(STUDY, *example(), tmp_path)
    assert words.startswith("The model uses what the probe reads in the code's own slots; it uses a trace (below 5 %")
    assert (
        "in its turn after it; no use was detected of what the probe reads in its turn after it (code masked)" in words
    )
    assert "turns the answer 90.0 % (no spread) of the way to that code, random subspaces 10.0 %." in words
    assert "more than 15 % of the digits in 0 of 6 cases (places, K and V), and one trained anew in 6 of 6." in words


def test_random_subspaces_that_take_more_and_codes_that_do_not_differ_are_said_to(tmp_path: Path):
    conclusion = made_up(lambda _, edit, __: 3.0 * (edit == "random"), np.random.default_rng(1), way=0.0)
    words = answer_of(STUDY, Config(), conclusion, tmp_path)
    assert words.startswith("Erasing what the probe reads takes less than erasing at random in the code's own slots")
    assert "no way for an exchange to go" in words
    assert not conclusion.findings.where("turned")
    assert {finding.value.clusters for finding in conclusion.findings.where("moved")} == {16}


def test_few_conversations_decide_nothing_and_are_warned_of(tmp_path: Path):
    conclusion = made_up(dosed, np.random.default_rng(2), contexts=6)
    words = answer_of(STUDY, Config(), conclusion, tmp_path)
    assert words.startswith("Conversations are too few to say whether the model uses")
    assert "in an unknown number of 6 cases (places, K and V), and one trained anew in an unknown number of 6." in words
    assert "too few to tell" in conclusion.warnings[0]


def test_a_step_is_claimed_where_more_erasure_takes_more_and_random_draws_count_once():
    findings = example()[1].findings
    claims = {step.keys["strength"]: STUDY.claim(findings, "step", **step.keys) for step in findings.where("step")}
    assert claims == {more: "takes more" if more <= 1 else "not detected" for more in Config().strengths[1:]}
    assert findings.finding("used", site="code").comparisons == len(SITES)
    (drawn,) = findings.where("lost", site="code", edit="random", band=EVERY_LAYER, part=BOTH)
    assert drawn.value.clusters == 16


def test_digits_that_share_a_token_are_refused(roomy: Model):
    joined = Coded(0, CONTEXTS[0], ("48213", "482135"), ("", ""))
    refused(lambda: read_case(roomy, joined, batch=2), "tokenises digits apart")
