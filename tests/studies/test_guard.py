"""The guard study: a whole run on a tiny model, what is drawn and counted, and what the numbers decide."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.studies.guard import Config
from kvprobe.studies.guard.collect import (
    BITS,
    BOTH,
    DAMAGED,
    GUARDS,
    KNOWN,
    SOUND,
    TALK,
    TASK,
    TENFOLD,
    fault_of,
    struck_slots,
    without,
)
from kvprobe.studies.guard.conclude import concluded
from kvprobe.studies.guard.study import STUDY
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.random_caches import random_cache
from tests.studies.runs import every

SMALL = Config(samples=2, learnt=36, alarms=5.0, faults=("gaussian", BITS), rates=(10.0,))
MODEL, HOLD = "roomy", [True]


def test_a_run_holds_every_arm_and_knowing_what_was_struck_evicts_that_alone(finished: Run):
    rows = finished.df()
    assert set(rows[rows["text"] == TALK].groupby("sample").size()) == {len(GUARDS)}
    task = rows[rows["text"] == TASK]
    assert set(task.groupby("sample").size()) == {(2 + 2) * (2 + len(GUARDS))}
    struck = task["found"].notna()
    assert not struck[task["fault"] == SOUND].any()
    assert (task[struck & (task["arm"] == KNOWN)]["found"] == 1).all()
    assert (task[task["arm"].isin([KNOWN, DAMAGED])]["alarms"] == 0).all()
    assert (task[struck & (task["arm"] == DAMAGED)]["found"] == 0).all()
    sound = chosen(task, {"fault": SOUND, "arm": DAMAGED})
    assert sound["kl"].abs().max() < 1e-5
    assert (task[(task["fault"] == "gaussian") & (task["arm"] == DAMAGED)]["kl"] > 1e-5).all()


def test_one_number_of_as_many_slots_as_the_rate_says_is_flipped():
    cache = random_cache(0, 1, 400)
    flipped = cache.corrupt(fault_of(BITS, 10.0, cache))
    pairs = zip((*flipped.keys, *flipped.values), (*cache.keys, *cache.values), strict=True)
    changed = torch.cat([(one - other).abs()[0] > 0.01 * other.abs()[0] for one, other in pairs], -1)
    assert 20 < int(changed.sum()) < 60
    tenfold = cache.corrupt(fault_of(TENFOLD, 10.0, cache))
    hit = struck_slots(cache, tenfold)
    assert int(hit.sum()) == 40
    torch.testing.assert_close(tenfold.values[0][:, :, hit[0]], 10 * cache.values[0][:, :, hit[0]], rtol=0.1, atol=0.2)
    assert without(tenfold, hit).slots == 360


def made_up(accuracy: dict[str, float], alarms: float = 0.01, found: float = 1.0, tenfold: float = 1.0) -> pd.DataFrame:
    """Twenty-four items and twelve conversations; guards have the same numbers whatever they learnt from."""
    arms, samples = [DAMAGED, KNOWN, *GUARDS], 24
    cases = every(text=[TASK], sample=range(samples), fault=[SOUND, "zeros", TENFOLD], rate=[10.0], arm=arms)
    talk = every(text=[TALK], sample=range(12), fault=[SOUND], rate=[0.0], arm=list(GUARDS))
    table = pd.concat([cases, talk], ignore_index=True)
    kind = table["arm"].where(table["arm"].isin([DAMAGED, KNOWN]), "guard")
    share = kind.map(accuracy).where(table["fault"] != SOUND, 1.0)
    wave = 0.002 * (-1.0) ** table["sample"]
    return table.assign(
        rate=table["rate"].where(table["fault"] != SOUND, 0.0),
        right=(table["sample"] < share * samples).astype(float).where(table["text"] == TASK),
        kl=(1.5 - share + wave).where(table["text"] == TASK),
        broken=0.0,
        alarms=alarms + wave,
        found=(pd.Series(found, table.index).where(table["fault"] != TENFOLD, tenfold)).where(table["fault"] != SOUND),
    )


CONFIG = Config(samples=24, faults=("zeros",), rates=(10.0,))


def example() -> tuple[Config, Conclusion]:
    return CONFIG, concluded(made_up({DAMAGED: 0.25, KNOWN: 1.0, "guard": 0.75}), CONFIG)


def noise(rng: np.random.Generator) -> Conclusion:
    """Damage costs nothing, and guards neither cost nor save."""
    table = made_up({DAMAGED: 0.5, KNOWN: 0.5, "guard": 0.5})
    table["right"] = rng.integers(2, size=len(table)).astype(float)
    table["kl"] = rng.exponential(size=len(table))
    return concluded(table, CONFIG)


def test_planted_numbers_are_found(tmp_path: Path):
    config, conclusion = example()
    findings = conclusion.findings
    for arm, gain in ((BOTH, 0.5), (KNOWN, 0.75)):
        assert findings.at("saved", fault="zeros", rate=10.0, arm=arm).mean == pytest.approx(gain)
        assert findings.at("nearer", fault="zeros", rate=10.0, arm=arm).mean == pytest.approx(-gain)
    assert findings.at("cost", arm=BOTH).mean == 0
    assert findings.at("alarms", text=TALK, arm=TASK).mean == pytest.approx(0.01)
    assert findings.at("found", fault="zeros", rate=10.0, arm=TALK).mean == 1
    assert {claim.finding: findings.where(claim.finding)[0].comparisons for claim in STUDY.claims} == {
        "cost": 3,
        "saved": 4,
        "nearer": 4,
    }
    said = answer_of(STUDY, config, conclusion, tmp_path)
    assert "with the guard learnt from both saves answers" in said
    assert "costs no right answers that were detected" in said


def test_the_control_fails_where_slots_ten_times_too_large_are_missed():
    accuracy = {DAMAGED: 0.25, KNOWN: 1.0, "guard": 0.75}
    assert [concluded(made_up(accuracy, tenfold=seen), CONFIG).controls[0].holds for seen in (1.0, 0.9)] == [
        True,
        False,
    ]
