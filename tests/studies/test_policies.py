"""The policies study: what is said from a cache that a policy left, and what the numbers decide."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.policies.catalogue import CATALOGUE, SINKS, WINDOW
from kvprobe.studies.policies import Config
from kvprobe.studies.policies import collect as collecting
from kvprobe.studies.policies.collect import FULL
from kvprobe.studies.policies.conclude import BY_PLACE, MARGINS, MEASURES, concluded, judged_budgets
from kvprobe.studies.policies.study import STUDY
from kvprobe.text.tokens import Tokens
from kvprobe.wording import times
from tests.experiments.made_up import page_of
from tests.studies.runs import whole_run

SMALL = Config(samples=2, length=160, budgets=(20, 100))
MEASURED = ("sliding", "random", "random-sinks", "quantise")
"""Few enough policies for all of them to be asked within seconds; tests/policies/test_catalogue.py has the others."""


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Short continuations: these tests ask whether numbers are right, not what they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "CONTINUED", 6)
        yield


@pytest.fixture(scope="module")
def finished(wordy: Model, root: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        for name in CATALOGUE.keys() - set(MEASURED):
            patch.delitem(CATALOGUE, name)
        patch.setitem(CATALOGUE, "quantise", replace(CATALOGUE["quantise"], bits=(4,)))
        return whole_run(STUDY, SMALL, wordy, root, [True])


def test_what_is_said_is_that_of_reading_token_by_token_on_a_cache_evicted_by_hand(wordy: Model):
    given, chat = collecting.sample_conversation(wordy, SMALL, 0)
    scene = replace(wordy.watch(chat, queries=WINDOW), samples=(0,))
    cache, script = scene.cache, collecting.write_script(wordy, scene.cache, given, chat)
    kept = round(0.5 * cache.slots)
    index = torch.arange(cache.slots)[None]
    by_hand = cache.select(slots=(index < SINKS) | (index >= cache.slots - (kept - SINKS))).reindex("contiguous")

    def next_tokens(start: KVCache, tokens: Tokens, wanted: int) -> torch.Tensor:
        """Log-probabilities after each of the last tokens, which are read one at a time at consecutive positions."""
        logprobs, position, before = [], start.slots, tokens.ids[:-wanted]
        start, _ = wordy.extend(start, [Tokens.of(before, "by hand", position)])
        for place, token in enumerate(tokens.ids[-wanted:], start=position + len(before)):
            start, logits = wordy.extend(start, [Tokens.of([token], "by hand", place)])
            logprobs.append(logits[0, -1].log_softmax(-1))
        return torch.stack(logprobs)

    evicted = wordy.apply(CATALOGUE["sinks"].at(50, cache.slots), scene)
    full = collecting.say(wordy, cache, script)
    outcomes = collecting.outcomes_of(script, collecting.say(wordy, evicted, script), full)

    said = next_tokens(by_hand, script.continuation, script.continued)
    reference = next_tokens(cache, script.continuation, script.continued)
    kl = (reference.exp() * (reference - said)).sum(1).mean()
    assert outcomes["kl"] == pytest.approx(float(kl), rel=1e-3)
    assert outcomes["agreement"] == float((reference.argmax(1) == said.argmax(1)).double().mean())

    code = script.codes[0]
    digits = next_tokens(by_hand, script.questions[0], len(code))
    others = torch.stack([digits[place, script.codes[1:, place]].mean() for place in range(len(code))])
    margin = (digits.gather(1, code[:, None])[:, 0] - others).sum()
    assert outcomes["code_margin"] == pytest.approx(float(margin), abs=1e-2)
    assert outcomes["code"] == float((digits.argmax(1) == code).double().mean())

    _, unasked = wordy.extend(None, [script.questions[2].shifted(0)])
    last = (next_tokens(by_hand, script.questions[2], 1)[0] - unasked[0, -1].log_softmax(-1))[script.values[1]]
    assert outcomes["instruction2"] == float(int(last.argmax()) == script.true[1])


def test_a_run_holds_every_condition_and_its_control(finished: Run):
    samples = finished.df()
    conditions = 3 * len(SMALL.budgets) + 1 + 1
    assert samples.groupby("condition").size().tolist() == [SMALL.samples] * conditions
    assert bool((samples["bytes"] <= samples.query("kind == @FULL")["bytes"].max()).all())


def test_a_sample_does_not_depend_on_the_others(finished: Run, wordy: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collecting, "conditions", lambda _: [("random", 20)])
    alone = collecting.read_sample(wordy, SMALL, 1).set_index("condition")
    together = finished.df().query("sample == 1").set_index("condition").loc[alone.index]
    pd.testing.assert_frame_equal(alone, together)


MADE_UP = Config(samples=16, budgets=(20, 50, 100))
Values = Callable[[str, str, int, int], float]
FACTS = {
    "chat": [{"segment": "needle", "role": "user", "text": "the code is 12345", "masked": False, "marked": "12345"}],
    "code": ["What is the code?", "It is"],
    "instruction": ["What tone?", "It is", "warm"],
    "layers": 3,
    "windows": [2, 512],
    "dtype": "float32",
}


def made_up(values: Values, full: float = 0.9, config: Config = MADE_UP) -> Conclusion:
    """The conclusion of rows whose measures are these, by measure (or `instruction1` …), kind, level and sample; those
    of the full cache are `full`."""
    known = {"slots": 500, "reach": 560, "depth": 0.5, "continued": 32, "code_tokens": 5, "bytes_held": 1, "bytes": 1}
    whole = dict.fromkeys((*MEASURES, *MARGINS, *BY_PLACE), full)
    rows: list[dict[str, Any]] = []
    for sample in range(config.samples):
        perfect = {"kl": 0.0, "agreement": 1.0, "memory": 1.0}
        rows.append({"sample": sample, "kind": FULL, "level": 100, **whole, **perfect})
        for kind, level in collecting.conditions(config):
            row = {name: values(name, kind, level, sample) for name in whole}
            memory = level / (16 if CATALOGUE[kind].bits else 100)
            rows.append({"sample": sample, "kind": kind, "level": level, "memory": memory, **row})
    return concluded(pd.DataFrame(rows).assign(**known), config, FACTS)


def graded(measure: str, kind: str, level: int, _: int) -> float:
    """At 20 % SnapKV is better than random eviction, a sliding window worse, and sparing the first slots is half of
    what SnapKV does; H2O is near the full cache from 50 % on."""
    if kind == "h2o" and level >= 50:
        return 1.0
    better = {"snapkv": 0.3, "sliding": -0.2, "random-sinks": 0.15}.get(kind, 0.0)
    return 0.5 + (better if measure == "agreement" and level == 20 else 0.0)


def example() -> tuple[Config, Conclusion]:
    unchanged = {"kl": 0.0, "agreement": 1.0}
    return MADE_UP, made_up(lambda *at: unchanged.get(at[0], 0.9) if at[2] == 100 else graded(*at))


def noise(rng: np.random.Generator) -> Conclusion:
    """No policy is better than another at any budget; conversations differ in how hard they are."""
    able = rng.uniform(0.3, 1.0, MADE_UP.samples)

    def values(measure: str, kind: str, level: int, sample: int) -> float:
        if measure == "kl":
            return float(rng.gamma(2.0) * able[sample])
        if measure in MARGINS:
            return float(rng.normal(able[sample]))
        trials = {"agreement": 32, "code": 5, "instructions": 4}.get(measure, 1)
        return float(rng.binomial(trials, able[sample]) / trials)

    return made_up(values)


def test_the_answer_says_who_beats_random_eviction_who_does_worse_and_how_little_suffices(tmp_path: Path):
    shown = page_of(STUDY, MADE_UP, made_up(graded), tmp_path)
    said = " ".join(answer(STUDY, shown).split())
    first, named, spared, least = said.split(". ")[:4]
    assert first.startswith("With 20 % of the slots, one of the policies holds")
    assert first.endswith("more often than random eviction, and others less often")
    assert named == "Of 9 policies, these do so more often: SnapKV; these less often: sliding window"
    assert spared.split()[-3:] == ["still", "do:", "SnapKV"]
    assert least.split("is ")[-1] == "47 % (37 to not reached), by H2O."


def test_gains_are_on_the_same_budget_and_those_of_quantisation_on_as_much_memory_or_more():
    findings = made_up(lambda measure, kind, level, _: 0.5 + level / 1000 + 0.1 * (kind == "tova")).findings
    for measure, gain in {"kl": -np.log(0.65 / 0.55), "agreement": 0.1}.items():
        keys = {"kind": "tova", "level": 50, "against": 50, "baseline": "random-sinks"}
        assert findings.at("gain", measure=measure, **keys).mean == pytest.approx(gain)
    quantised = findings.where("gain_quantised", baseline="random")
    assert {finding.keys["level"]: finding.keys["against"] for finding in quantised} == {8: 50, 4: 50, 3: 20, 2: 20}
    (of_code,) = findings.where("gain_quantised", measure="code", level=8, baseline="random")
    assert of_code.value.mean == pytest.approx(-0.042)
    assert findings.at("from_full", measure="code", kind="tova", level=50).mean == pytest.approx(0.65 - 0.9)
    assert set(findings.values("gain", "level")) == {20, 50}
    comparisons = {finding.comparisons for finding in findings.where("gain")}
    assert comparisons == {len(findings.where("gain", baseline="random"))} == {72}


def test_a_policy_that_is_always_ten_times_nearer_is_nearer_though_one_conversation_has_nearly_all_the_distance():
    def values(measure: str, kind: str, level: int, sample: int) -> float:
        hard = 30.0 if sample == 3 else 0.01 * (1 + sample % 5)
        return hard * (0.1 if kind == "h2o" else 0.0 if level == 100 else 1.0) if measure == "kl" else 0.9

    findings = made_up(values).findings
    for baseline in ("random", "random-sinks"):
        keys = {"measure": "kl", "level": 50, "against": 50, "baseline": baseline}
        nearer = findings.at("gain", kind="h2o", **keys)
        assert (nearer.low, nearer.mean, nearer.high) == pytest.approx((np.log(10),) * 3)
        assert findings.at("gain", kind="tova", **keys).mean == 0
        assert findings.at("nearer", kind="h2o", **keys).mean == 1
        assert findings.at("nearer", kind="h2o", **keys).above(0.5)
        assert findings.at("nearer", kind="tova", **keys).mean == 0.5
    assert times(nearer) == "10 (no spread)"
    only = made_up(values, config=replace(MADE_UP, budgets=(100,))).findings
    assert only.at("gain", measure="kl", kind="tova", level=100, against=100, baseline="random").mean == 0


def test_a_measure_at_which_the_full_cache_fails_is_not_judged(tmp_path: Path):
    conclusion = made_up(lambda *_: 0.15, full=0.15)
    assert conclusion.facts["judged"] == {"kl": True, "agreement": True, "code": False, "instructions": False}
    assert sum("cannot be judged" in warning for warning in conclusion.warnings) == 2
    page = page_of(STUDY, MADE_UP, conclusion, tmp_path).read("report.html")
    assert page.count("<td>cannot be judged</td>") == 2 * len(CATALOGUE) + 2 * 9 * 2
    assert "less that of the full cache" in page
    assert "Recall of the hidden code, less" not in page


def test_few_conversations_are_warned_of_and_a_missing_control_is_named():
    assert made_up(lambda *_: 0.9).warnings == []
    few = made_up(lambda *_: 0.9, config=replace(MADE_UP, samples=3, budgets=(20, 50)))
    assert "too few to tell" in few.warnings[0]
    assert [control.holds for control in few.controls] == [None]


def test_some_instructions_forgotten_and_some_kept_differs_from_all_forgotten():
    def values(measure: str, kind: str, level: int, _: int) -> float:
        return float(kind not in ("tova", "snapkv") or (kind == "snapkv" and measure != "instruction1"))

    findings = made_up(values, full=1.0).findings
    forgotten = {finding.keys["kind"]: finding.value.mean for finding in findings.where("quality", measure="forgotten")}
    assert (forgotten["h2o"], forgotten["tova"], forgotten["snapkv"], forgotten[FULL]) == (0, 0, 1, 0)


def test_policies_are_judged_at_the_measured_budgets_nearest_to_those_wanted():
    assert judged_budgets(Config(budgets=(5, 25, 40, 100))) == [25, 40]
    assert judged_budgets(Config(budgets=(30, 100))) == [30]
