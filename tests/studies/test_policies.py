"""The policies study on real weights, small: what policies keep, what is said from it, and what the numbers decide."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.policies.study as study
from kvprobe.cache.cache import KVCache
from kvprobe.cache.footprint import footprint
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.policies.policy import Scene
from kvprobe.studies.policies import collect as collecting
from kvprobe.studies.policies.analyse import MARGINS, MEASURES, Collected, analyse, judged_budgets, least_memory
from kvprobe.studies.policies.collect import (
    FULL,
    KINDS,
    RANDOM,
    RANDOM_SINKS,
    SINKS,
    WINDOW,
    Condition,
    Script,
    conditions,
    outcomes_of,
    read_sample,
    sample_conversation,
    say,
    write_script,
)
from kvprobe.studies.policies.config import Config
from kvprobe.studies.policies.figures import MAPS, budget_maps
from kvprobe.studies.policies.narrative import answer_memory, answer_random, warnings
from kvprobe.tasks.instructions import DEPTHS, PLACES, VALUES, instructions, needles
from kvprobe.text.tokens import Tokens
from tests.refusals import refused
from tests.studies.runs import assert_figures, give, interrupted

SMALL = Config(samples=2, length=160, budgets=(20, 100))
MEASURED = (RANDOM, RANDOM_SINKS, "quantise")
"""Few enough kinds for all of them to be asked within seconds; the others are held to the cache that they leave."""
EVICTING = [name for name, kind in KINDS.items() if not kind.rounds]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A conversation that was read, and what is asked of it."""

    scene: Scene
    script: Script

    def act(self, model: Model, kind: str, level: int) -> KVCache:
        return model.apply(Condition(kind, level).policy(self.scene.cache.slots, SMALL.seed), self.scene)


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Short continuations: these tests ask whether numbers are right, not what they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "CONTINUED", 6)
        yield


def run_few(smol: Model, root: Path) -> Run:
    """The study with few kinds of policies."""
    with pytest.MonkeyPatch.context() as patch:
        give(patch, smol)
        for name in KINDS.keys() - set(MEASURED):
            patch.delitem(KINDS, name)
        patch.setitem(KINDS, "quantise", replace(KINDS["quantise"], bits=(4,)))
        return study.run(SMALL, root)


@pytest.fixture(scope="module")
def finished(smol: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_few(smol, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def prepared(smol: Model) -> Prepared:
    given, chat = sample_conversation(smol, SMALL, 0)
    scene = replace(smol.watch(chat, queries=WINDOW), samples=(0,))
    return Prepared(scene, write_script(smol, scene.cache, given, chat))


def test_a_conversation_holds_what_was_drawn_where_it_was_wanted(smol: Model):
    config = replace(SMALL, length=512)
    for sample in range(3):
        given, chat = sample_conversation(smol, config, sample)
        tokens = chat.tokens(smol.tokenizer)
        assert abs(len(tokens) - config.length) < 40
        code = tokens.part("code")
        assert smol.tokenizer.decode(tokens.ids[code]) == given.code
        assert set(tokens.segments[code]) == {"needle"}
        assert abs(code.start / len(tokens) - given.depth) < 0.08
        assert DEPTHS[0] <= given.depth <= DEPTHS[1]
        for place, (instruction, value) in enumerate(given.instructions, start=1):
            text = smol.tokenizer.decode(tokens.ids[tokens.part(f"instruction{place}")])
            assert text.strip() == instruction.text.replace("{value}", value)
            assert set(tokens.segments[tokens.part(f"instruction{place}")]) == {"system"}


def test_a_conversation_longer_than_its_small_talk_is_refused(smol: Model):
    given, _ = sample_conversation(smol, SMALL, 0)
    refused(lambda: collecting.conversation(given, 50_000, smol.tokenizer), "small talk")


def test_every_instruction_and_needle_has_its_place_to_fill():
    assert all(each.text.count("{value}") == 1 and len(set(each.values)) == VALUES for each in instructions())
    assert all(each.text.count("{code}") == 1 and "{" not in each.question + each.lead for each in needles())


def test_a_policy_that_may_keep_everything_changes_nothing(smol: Model, prepared: Prepared):
    caches = [prepared.act(smol, name, 100) for name in EVICTING]
    start = prepared.scene.cache.slots
    assert all(int(cache.ledger.following[0]) == start for cache in caches)
    rows = [prepared.script.continuation.shifted(start)] * (len(caches) + 1)
    _, logits = smol.extend(KVCache.join([prepared.scene.cache, *caches]), rows, logits=prepared.script.continued)
    kl, agreement = collecting.divergence(logits[:1].expand_as(logits), logits)
    assert float(kl.max()) < 1e-6
    assert bool(agreement.all())


@pytest.mark.parametrize("name", [*EVICTING, "sinks-quantised"])
def test_a_budget_is_the_share_of_memory_that_is_kept(smol: Model, prepared: Prepared, name: str):
    whole = footprint(prepared.scene.cache.ledger, prepared.scene.cache.shape, 2)
    slots = prepared.scene.cache.slots
    for level in (10, 20, 50):
        cache = prepared.act(smol, name, level)
        kept, budget = footprint(cache.ledger, cache.shape, 2) / whole * slots, round(level * slots / 100)
        if name == "pyramidkv":  # its published steps between layers are rounded down
            assert budget <= kept <= budget + (cache.n_layers - 2) / 2
        elif name == "adakv":  # its published shares of heads are rounded
            assert budget - 1.5 <= kept <= budget + 0.5
        elif name in EVICTING:
            assert kept == pytest.approx(budget, rel=1e-9)
        else:
            assert kept <= budget


def test_fewer_bits_take_less_memory(smol: Model, prepared: Prepared):
    taken = [
        footprint(cache.ledger, cache.shape, 2)
        for cache in (prepared.act(smol, "quantise", bits) for bits in KINDS["quantise"].bits)
    ]
    assert taken == sorted(taken, reverse=True)


def test_the_baseline_that_spares_sinks_differs_in_nothing_else(smol: Model, prepared: Prepared):
    spared = prepared.act(smol, RANDOM_SINKS, 20).ledger.positions[0].tolist()
    drawn = prepared.act(smol, RANDOM, 20).ledger.positions[0].tolist()
    assert spared[:SINKS] == list(range(SINKS))
    assert len(spared) == len(drawn)
    assert set(spared[SINKS:]) <= set(drawn)


def test_what_is_said_is_that_of_reading_token_by_token_on_a_cache_evicted_by_hand(smol: Model, prepared: Prepared):
    cache, script = prepared.scene.cache, prepared.script
    kept = round(0.5 * cache.slots)
    index = torch.arange(cache.slots)[None]
    by_hand = cache.select(slots=(index < SINKS) | (index >= cache.slots - (kept - SINKS))).reindex("contiguous")

    def next_tokens(start: KVCache, tokens: Tokens, wanted: int) -> torch.Tensor:
        """Log-probabilities after each of the last tokens, which are read one at a time at consecutive positions."""
        found, position, before = [], start.slots, tokens.ids[:-wanted]
        start, _ = smol.extend(start, [Tokens.of(before, "by hand", position)])
        for place, token in enumerate(tokens.ids[-wanted:], start=position + len(before)):
            start, logits = smol.extend(start, [Tokens.of([token], "by hand", place)])
            found.append(logits[0, -1].log_softmax(-1))
        return torch.stack(found)

    full = say(smol, cache, script)
    found = outcomes_of(script, say(smol, prepared.act(smol, "sinks", 50), script), full)

    said = next_tokens(by_hand, script.continuation, script.continued)
    reference = next_tokens(cache, script.continuation, script.continued)
    kl = (reference.exp() * (reference - said)).sum(1).mean()
    assert found["kl"] == pytest.approx(float(kl), rel=1e-3)
    assert found["agreement"] == float((reference.argmax(1) == said.argmax(1)).double().mean())

    code = script.codes[0]
    digits = next_tokens(by_hand, script.questions[0], len(code))
    others = torch.stack([digits[place, script.codes[1:, place]].mean() for place in range(len(code))])
    margin = (digits.gather(1, code[:, None])[:, 0] - others).sum()
    assert found["code_margin"] == pytest.approx(float(margin), abs=1e-2)
    assert found["code"] == float((digits.argmax(1) == code).double().mean())

    last = next_tokens(by_hand, script.questions[2], 1)[0][script.values[1]]
    assert found["instruction2"] == float(int(last.argmax()) == script.chosen[1])


def test_the_codes_hold_every_digit_at_every_place_and_the_values_are_told_apart(smol: Model, prepared: Prepared):
    script = prepared.script
    digits = [set(smol.tokenizer.convert_ids_to_tokens(column.tolist())) for column in script.codes.T]
    assert digits == [set("0123456789")] * script.codes.shape[1]
    assert all(len(set(row.tolist())) == VALUES for row in script.values)
    true = [
        smol.tokenizer.decode(script.values[place, chosen].tolist()).strip()
        for place, chosen in enumerate(script.chosen)
    ]
    given, _ = sample_conversation(smol, SMALL, 0)
    assert all(value.startswith(begun) for begun, (_, value) in zip(true, given.instructions, strict=True))


def test_a_run_holds_every_condition_number_and_figure(finished: Run):
    assert finished.finished
    samples = finished.df()
    assert len(samples) == SMALL.samples * (2 * 2 + 1 + 1)
    assert samples.groupby("condition").size().eq(SMALL.samples).all()
    assert (samples["bytes"] <= samples[samples["kind"] == FULL]["bytes"].max()).all()
    assert_figures(finished, "quality_by_memory", "instructions_by_place")
    assert finished.metrics["unchanged"]["kl"] < 1e-6
    assert "The control holds." in json.dumps(finished.report)
    (quality,) = [each for each in finished.report["sections"] if each["title"] == "Quality for memory"]
    assert len(quality["maps"]) == 2 + sum(finished.metrics["judged"].values())


def test_with_everything_in_view_the_model_recalls_the_code(finished: Run):
    assert finished.metrics["ceiling"]["code"]["mean"] > 0.5
    assert finished.metrics["ceiling"]["code_margin"]["smallest"] > 0


def test_a_sample_does_not_depend_on_the_others(finished: Run, smol: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collecting, "conditions", lambda _: [Condition(RANDOM, 20)])
    alone = read_sample(smol, SMALL, 1).set_index("condition")
    together = finished.df().query("sample == 1").set_index("condition").loc[alone.index]
    pd.testing.assert_frame_equal(alone, together)


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def of_the_run(model: Model, config: Config, sample: int) -> pd.DataFrame:
        """What the run itself read, which `test_a_sample_does_not_depend_on_the_others` lets us take from it."""
        return finished.df().query("sample == @sample")

    resumed, calls = interrupted(lambda: run_few(smol, tmp_path), monkeypatch, collecting, "read_sample", 2, of_the_run)
    assert [sample for *_, sample in calls] == [0, 1, 1]
    assert json.dumps(resumed.metrics) == json.dumps(finished.metrics)
    assert resumed.report["answer"] == finished.report["answer"]


MADE_UP = Config(samples=16, budgets=(20, 50, 100))


def made_up(values: Callable[[str, str, int], float], full: float = 0.9) -> dict[str, Any]:
    """Metrics of a run whose measures are these, by measure (or `instruction1` …), kind and level, the same in each
    conversation; those of the full cache are `full`."""
    known = {"slots": 500, "reach": 560, "depth": 0.5, "continued": 32, "code_tokens": 5, "bytes_held": 1, "bytes": 1}
    rows = []
    for sample in range(MADE_UP.samples):
        every = [Condition(FULL, 100), *conditions(MADE_UP)]
        for each in every:
            is_full = each.kind == FULL
            memory = 1.0 if is_full else each.level / (16 if KINDS[each.kind].bits else 100)
            measures = (*MEASURES, *MARGINS, *(f"instruction{place}" for place in range(1, PLACES + 1)))
            told = {name: full if is_full else values(name, each.kind, each.level) for name in measures}
            if is_full:
                told |= {"kl": 0.0, "agreement": 1.0}
            names = {"condition": FULL if is_full else each.name, "kind": each.kind, "level": each.level}
            rows.append({"sample": sample, **names, "memory": memory, **known, **told})
    collected = Collected.of(pd.DataFrame(rows))
    return analyse(collected, MADE_UP)


def test_the_answer_says_who_beats_random_eviction_and_who_does_worse():
    def values(measure: str, kind: str, level: int) -> float:
        better = {"snapkv": 0.3, "sliding": -0.2, RANDOM_SINKS: 0.1}.get(kind, 0.0)
        return 0.5 + (better if measure == "agreement" and level == 20 else 0.0)

    at_20, spared_20, at_50, spared_50 = answer_random(made_up(values), MADE_UP).split(". ")[:4]
    assert at_20.startswith("At 20 % of the slots")
    assert "next token, SnapKV (worse: sliding window);" in at_20
    assert "hidden code, none;" in at_20
    assert spared_20.endswith("agreement: SnapKV")
    assert "next token, none;" in at_50
    assert "agreement: none" in spared_50


def test_the_shorter_way_of_naming_policies_is_taken():
    def values(measure: str, kind: str, level: int) -> float:
        return 0.5 if kind in (RANDOM, "tova") else 0.7

    assert "next token, all but TOVA;" in answer_random(made_up(values), MADE_UP)


def test_a_measure_at_which_the_full_cache_fails_is_not_judged():
    metrics = made_up(lambda *_: 0.15, full=0.15)
    assert metrics["judged"] == {"code": False, "instructions": False}
    assert "cannot be judged on this model" in answer_random(metrics, MADE_UP)
    assert sum("cannot be judged" in warning for warning in warnings(metrics, MADE_UP)) == 2
    assert "hidden code" not in answer_memory(metrics)


def test_the_maps_of_budgets_are_differences_from_the_full_cache_for_measures_that_are_judged():
    def values(measure: str, kind: str, level: int) -> float:
        return {"snapkv": 0.6, "quantise": 5.0}.get(kind, 0.2) + level / 1000

    maps = budget_maps(made_up(values))
    assert [each.caption.split(",")[0] for each in maps] == [caption.split(",")[0] for caption, _ in MAPS.values()]
    kl, agreement, code, _ = maps
    assert code.columns == ["20 %", "50 %", "100 %"]
    assert code.rows == [kind.label for kind in KINDS.values() if not kind.bits]
    snapkv = code.rows.index(KINDS["snapkv"].label)
    assert kl.values[snapkv] == pytest.approx([0.62, 0.65, 0.7])
    assert agreement.values[snapkv] == pytest.approx([-0.38, -0.35, -0.3])
    assert code.values[snapkv] == pytest.approx([-0.28, -0.25, -0.2])
    assert code.values[code.rows.index(KINDS["h2o"].label)] == pytest.approx([-0.68, -0.65, -0.6])
    assert len(budget_maps(made_up(lambda *_: 0.15, full=0.15))) == 2


def test_few_conversations_and_a_missing_control_are_warned_of():
    metrics = made_up(lambda *_: 0.9)
    assert warnings(metrics, MADE_UP) == []
    few = warnings(metrics | {"samples": 3, "unchanged": None}, MADE_UP)
    assert "too few for an interval" in few[0]
    assert "was not checked" in few[1]


def test_the_cheapest_policy_near_the_full_cache_is_named():
    def values(measure: str, kind: str, level: int) -> float:
        return 1.0 if kind == "h2o" and level >= 50 else 0.1

    answer = answer_memory(made_up(values))
    assert "on agreement with the full cache's next token, H2O with 48 % (43 % to not reached) of the memory" in answer
    assert "hidden code, H2O with" in answer


def test_some_instructions_forgotten_and_some_kept_is_told_from_all_forgotten():
    def values(measure: str, kind: str, level: int) -> float:
        return float(kind not in ("tova", "snapkv") or (kind == "snapkv" and measure != "instruction1"))

    found = {each["kind"]: each["one_forgotten"]["mean"] for each in made_up(values, full=1.0)["conditions"]}
    assert (found["h2o"], found["tova"], found["snapkv"], found[FULL]) == (0, 0, 1, 0)


def test_the_least_memory_is_where_the_line_crosses_the_tolerance():
    memory = np.array([1.0, 0.5, 0.2])
    losses = np.array([[0.0, 0.0, 0.1], [0.0, 0.2, 0.0], [0.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    np.testing.assert_allclose(least_memory(memory, losses, 0.05, True), [0.35, 0.875, 0.2, np.inf])
    np.testing.assert_allclose(least_memory(memory, losses, 0.05, False), [0.5, 1.0, 0.2, np.inf])
    losses[1, 2] = np.nan
    np.testing.assert_allclose(least_memory(memory, losses, 0.05, True), [0.35, np.nan, 0.2, np.inf])


def test_policies_are_judged_at_the_measured_budgets_nearest_to_those_wanted():
    assert judged_budgets(Config(budgets=(5, 25, 40, 100))) == [25, 40]
    assert judged_budgets(Config(budgets=(30, 100))) == [30]
