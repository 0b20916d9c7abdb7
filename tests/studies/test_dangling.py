"""The dangling study: a whole run on a tiny model, tables with known answers, and what is said of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.dangling.collect as collecting
import kvprobe.studies.dangling.study as study
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.report.page import write_report
from kvprobe.stats import FEWEST
from kvprobe.studies.dangling.analyse import PLACES, analyse
from kvprobe.studies.dangling.collect import (
    CLOSED,
    FULL,
    HIDDEN,
    MASKED,
    RANDOM,
    SHARED,
    TOP,
    cases_of,
    in_view_of,
    measure_memos,
    rescue,
    sets_by_half,
)
from kvprobe.studies.dangling.config import Config
from kvprobe.studies.dangling.narrative import answer, controls, memo_sentence, rescued, warnings
from kvprobe.tasks.ordinal import VERBS
from tests.refusals import refused
from tests.studies.runs import FOUR_FACTS, give, resumed_after

SMALL = Config(kinds=("code",), prompts=4, rescued=(1, 2, 4), random=3, memos=0)
N_LAYERS = 4


@pytest.fixture(autouse=True, scope="module")
def four_facts(deep: Model) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, deep)
        patch.setattr(collecting, "facts", lambda _: FOUR_FACTS)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study.run(SMALL, tmp_path_factory.mktemp("runs"))


# ---- a whole run


def test_arms_and_heads_are_all_there_and_controls_hold(finished: Run):
    table = finished.df()
    assert set(table.loc[table["grid"] == "arms", "arm"]) == {FULL, MASKED, CLOSED}
    heads = table[(table["grid"] == "heads") & (table["arm"] == MASKED)]
    assert len(heads) == 4 * N_LAYERS * 4
    assert heads["dangling"].min() > 0
    assert all(holds for _, holds in controls(finished.metrics))
    assert finished.metrics["arms"][FULL]["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert finished.metrics["arms"][MASKED]["kl"]["mean"] > 1e-4


def test_the_report_shows_the_heads_of_one_conversation_before_and_after(finished: Run):
    page = write_report(finished.path, finished.report).read_text(encoding="utf-8")
    assert page.count("<img") == 3
    assert page.count('data-component="AttentionView"') == 2


def test_an_interrupted_run_resumes_with_the_same_numbers_whatever_was_drawn_before(finished: Run, tmp_path: Path):
    torch.manual_seed(123)
    again = resumed_after(study, SMALL, tmp_path, "collect_rescues", (collecting, "measure"))
    assert again.metrics == finished.metrics


# ---- heads that see the turn again


def test_a_turn_in_view_of_all_heads_or_of_none_is_the_full_or_the_masked_run(deep: Model):
    case = cases_of(SMALL, deep)[0]
    shape = deep.geometry
    every = [(layer, head) for layer in range(shape.n_layers) for head in range(shape.n_kv_heads)]
    table = rescue(deep, case, {(TOP, 8, 0): every, (TOP, 0, 0): []}).set_index("size")
    assert table.loc[8, "kl"] == pytest.approx(0, abs=1e-5)
    masked = deep.extend(deep.prefill(case.prompt).mask(HIDDEN), case.suffix)[1][0]
    assert table.loc[0, "margin"] == pytest.approx(float(case.metric(masked)), abs=1e-4)


def test_the_turn_is_live_for_the_chosen_heads_alone(deep: Model):
    clean = deep.prefill(cases_of(SMALL, deep)[0].prompt)
    ledger = in_view_of(clean, [(1, 0), (3, 0), (3, 1)]).ledger
    hidden = ledger.in_segments([HIDDEN])[0]
    live = ledger.live.expand(deep.geometry.n_layers, 1, deep.geometry.n_kv_heads, -1)[:, 0]
    assert live[..., hidden].all(-1).tolist() == [[False, False], [True, False], [False, False], [True, True]]
    assert live[..., ~hidden].all()


def heads_table(mass: np.ndarray) -> pd.DataFrame:
    """Eight conversations, four of each half, whose heads look at the turn with this mass."""
    layers, heads = mass.shape
    rows = [
        {
            "grid": "heads",
            "arm": MASKED,
            "prompt": f"p{prompt}",
            "half": prompt % 2,
            "layer": layer,
            "head": head,
            "dangling": mass[layer, head] + 0.01 * (prompt % 2),
            "sink": 0.5 * mass[layer, head] + 0.01 * (prompt % 2),
            "later": 0.5 * mass[layer, head],
            "local": 0.0,
            "elsewhere": 0.0,
        }
        for prompt in range(FEWEST)
        for layer in range(layers)
        for head in range(heads)
    ]
    return pd.DataFrame(rows)


def test_heads_are_ranked_by_the_mass_of_their_group(deep: Model):
    group = deep.geometry.n_heads // deep.geometry.n_kv_heads
    mass = np.zeros((N_LAYERS, deep.geometry.n_heads))
    mass[2, group] = 0.4  # one query head of KV head 1
    mass[1, :group] = 0.15  # all of KV head 0
    for sets in sets_by_half(heads_table(mass), SMALL, deep).values():
        assert sets[TOP, 1, 0] == [(2, 1)]
        assert sets[TOP, 2, 0] == [(2, 1), (1, 0)]
        assert len({tuple(sets[RANDOM, 4, draw]) for draw in range(3)}) > 1
        assert all(len(set(heads)) == size for (_, size, _), heads in sets.items())


# ---- tables with known answers


def tables(top: float, random: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    heads = heads_table(np.full((2, 2), 0.2))
    heads = pd.concat([heads, heads.assign(arm=SHARED)])
    arms = pd.DataFrame(
        [
            {
                "grid": "arms",
                "arm": arm,
                "prompt": f"p{prompt}",
                "half": prompt % 2,
                "margin": margin,
                "kl": kl,
                "kl_masked": 0.1,
            }
            for prompt in range(FEWEST)
            for arm, margin, kl in ((FULL, 4.0, 0.0), (MASKED, 0.0, 1.0))
        ]
    )
    rescues = pd.DataFrame(
        [
            {
                "sort": sort,
                "size": size,
                "draw": draw,
                "prompt": f"p{prompt}",
                "half": prompt % 2,
                "margin": 4 * share,
                "kl": 1 - share,
            }
            for prompt in range(FEWEST)
            for size in (1, 2)
            for sort, share, draws in ((TOP, top * size / 2, 1), (RANDOM, random * size / 2, 3))
            for draw in range(draws)
        ]
    )
    return pd.concat([heads, arms], ignore_index=True), rescues


def memos_that_follow(crossed: dict[str, float]) -> pd.DataFrame:
    """Memos of which this share follows the payload when crossed, and the rest the pointer."""
    return pd.DataFrame(
        [
            {
                "memo": memo,
                "reference": reference,
                "arm": arm,
                "payload": follows,
                "pointer": not follows or arm != "crossed",
            }
            for reference, share in crossed.items()
            for arm in ("seen", "masked", "crossed")
            for memo in range(40)
            for follows in [arm != "crossed" or memo < 40 * share]
        ]
    )


def test_shares_are_those_that_were_put_in():
    metrics = analyse(*tables(0.8, 0.2), None, SMALL)
    [_, two] = metrics["rescues"]
    assert two[TOP]["margin"]["mean"] == pytest.approx(0.8)
    assert two[RANDOM]["kl"]["mean"] == pytest.approx(0.2)
    assert two["difference"]["margin"]["mean"] == pytest.approx(0.6)
    assert metrics["went"]["later"]["mean"] == pytest.approx(0.1 / 0.205)
    assert sum(metrics["went"][place]["mean"] for place in PLACES) == pytest.approx(1)
    assert metrics["able"] == FEWEST
    assert metrics["able_masked"] == 0


@pytest.mark.parametrize(("top", "said"), [(0.8, "shown to random ones, 20.0 %"), (0.2, "no more of the answer")])
def test_the_answer_says_whether_the_heads_matter(top: float, said: str):
    assert said in rescued(analyse(*tables(top, 0.2), None, SMALL))


@pytest.mark.parametrize(
    ("crossed", "said"),
    [
        ({"payload": 1.0, "pointer": 0.0, "free": 0.5}, "tells a payload from a pointer"),
        ({"payload": 0.5, "pointer": 0.5, "free": 0.5}, "does not tell"),
    ],
)
def test_the_trained_model_says_whether_the_interchange_can_tell(crossed: dict[str, float], said: str):
    metrics = analyse(*tables(0.8, 0.2), memos_that_follow(crossed), SMALL)
    assert said in memo_sentence(metrics)
    assert memo_sentence(metrics) in answer(metrics)
    assert all(holds for _, holds in controls(metrics))


def test_sizes_at_which_the_heads_do_worse_are_named():
    assert rescued(analyse(*tables(0.2, 0.6), None, SMALL)).endswith(
        "With 1 or 2 they bring back less than random ones."
    )


def test_where_nothing_was_lost_nothing_is_brought_back():
    table, rescues = tables(0.8, 0.2)
    table.loc[(table["grid"] == "arms") & (table["arm"] == MASKED), "margin"] = 4.5
    assert "nothing is said of bringing it back" in rescued(analyse(table, rescues, None, SMALL))


def test_the_softmax_alone_shares_attention_out_in_proportion(deep: Model):
    case = cases_of(SMALL, deep)[0]
    arms = {
        arm: collecting.read(deep, cache, case)
        for arm, cache in collecting.arms_of(deep, deep.prefill(case.prompt)).items()
    }
    shared, full = collecting.shared_out(arms), arms[FULL]
    assert torch.allclose(shared.weights.sum(-1), torch.ones(()), atol=1e-5)
    assert float(shared.mass(HIDDEN).max()) == 0
    kept = 1 - full.mass(HIDDEN)
    assert torch.allclose(shared.mass("T2") * kept, full.mass("T2"), atol=1e-5)
    # In the first layer no score can have changed: there it is what masking does.
    assert torch.allclose(shared.weights[0], arms[MASKED].weights[0], atol=1e-5)


def test_more_heads_than_there_are_is_refused(tmp_path: Path):
    refused(lambda: study.run(Config(kinds=("code",), rescued=(1, 8), memos=0), tmp_path), "has 8")


def test_what_cannot_be_right_is_said():
    lost = analyse(*tables(0.8, 0.2), None, SMALL) | {"balance": 0.01, "able": 0}
    assert any("doubt this run" in text for text in warnings(lost))
    assert any("little to bring back" in text for text in warnings(lost))


# ---- the trained model


def test_answers_of_the_trained_model_follow_what_it_was_trained_to_hold():
    model = collecting.load("ordinal", device="cpu", dtype="float32")
    shares: dict[str, Any] = {}
    for reference in ("payload", "pointer"):
        table = measure_memos(model, reference, Config(memos=30))
        shares[reference] = table.groupby("arm")[["payload", "pointer"]].mean()
        assert shares[reference].loc["seen", "payload"] > 0.9
    assert shares["payload"].loc["crossed", "payload"] > 0.9 > shares["payload"].loc["crossed", "pointer"]
    assert shares["pointer"].loc["crossed", "pointer"] > 0.9 > shares["pointer"].loc["crossed", "payload"]
    assert shares["payload"].loc["masked", "payload"] > 0.9 > shares["pointer"].loc["masked", "payload"]
    assert set(VERBS) == {"payload", "pointer", "free"}
