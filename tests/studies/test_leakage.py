"""The leakage study on real weights, small: what is shared must equal what is read one by one; and what made-up tables
decide."""

from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.probing.features import read_outs
from kvprobe.probing.splits import SPLITS
from kvprobe.report.findings import Findings
from kvprobe.stats import FEWEST
from kvprobe.studies import leakage
from kvprobe.studies.leakage import Config, reading
from kvprobe.studies.leakage.collect import ARMS, CHANGED
from kvprobe.studies.leakage.conclude import conclude
from kvprobe.studies.leakage.reading import FAMILIES, FLOORS, USE_ARMS, read_context
from kvprobe.studies.leakage.study import READINGS, STUDY
from kvprobe.tasks.passcode import contexts, conversation
from tests.models import any_model
from tests.refusals import refused
from tests.studies.runs import assert_figures, close, in_steps, page_of

SMALL = Config(contexts=8, samples=48, folds=3, permutations=9, batch=10)
CODES = ("48213", "90577", "13662")


@pytest.fixture(scope="module")
def without_residual() -> Iterator[None]:
    """Runs of K and V alone: probes of the residual stream take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "FAMILIES", ("k", "v"))
        yield


@pytest.fixture(scope="module")
def finished(smol: Model, without_residual: None, root: Path) -> Run:
    return in_steps(lambda: leakage.run(SMALL, root, model=smol))


@pytest.fixture(scope="module")
def read(smol: Model) -> dict[str, torch.Tensor]:
    return read_context(smol, contexts()[0], CODES, batch=2)


@pytest.mark.parametrize("row", range(len(CODES)))
def test_shared_prefixes_change_nothing(smol: Model, read: dict[str, torch.Tensor], row: int):
    tokens = conversation(contexts()[0], CODES[row]).tokens(smol.tokenizer)
    third, answer = tokens.span("T3"), tokens.part("answer")
    first = smol.capture(tokens[: third.start], FAMILIES, segments=["summary2"], keep_cache=True)
    assert first.cache is not None
    asked = tokens[third.start : answer.start]
    masked = smol.capture(asked, FAMILIES, past=first.cache.mask("T1", "T2"))
    for family in FAMILIES:
        close(read[f"direct.{family}"][row], read_outs(first.stack(family))[0])
        close(read[f"masked.{family}"][row], read_outs(masked.stack(family))[0])


@pytest.mark.parametrize("arm", USE_ARMS)
def test_the_log_probability_of_the_code_is_that_of_reading_it_token_by_token(
    smol: Model, read: dict[str, torch.Tensor], arm: str
):
    chat = conversation(contexts()[0], CODES[1])
    tokens = (chat.without("T1", "T2") if arm == "restart" else chat).tokens(smol.tokenizer)
    start = tokens.span("T3").start
    cache = smol.prefill(tokens[:start])
    if arm == "retained":
        cache = cache.mask("T1", "T2")
    answer = tokens.part("answer")
    cache, logits = smol.extend(cache, tokens[start : answer.start])
    for index, place in enumerate(range(answer.start, answer.stop)):
        expected = logits[0, -1].log_softmax(-1)[tokens.ids[place]]
        logprob = read["logprob"][1, USE_ARMS.index(arm), index]
        torch.testing.assert_close(logprob, expected, rtol=1e-3, atol=1e-3)
        cache, logits = smol.extend(cache, tokens[place : place + 1])


def test_the_full_arm_is_no_distance_from_itself_and_the_others_are(read: dict[str, torch.Tensor]):
    torch.testing.assert_close(read["kl"][:, 0], torch.zeros(3), atol=1e-5, rtol=0)
    assert (read["kl"][:, 1:] > 0.1).all()


def test_each_floor_is_the_same_tokens_computed_without_the_hidden_turns(smol: Model, read: dict[str, torch.Tensor]):
    tokens = conversation(contexts()[0], CODES[0]).without("T1", "T2").tokens(smol.tokenizer)
    for arm, segment in (("direct restart", "summary2"), ("restart", "T3")):
        span = tokens.span(segment)
        stop = tokens.part("answer").start if segment == "T3" else span.stop
        fresh = smol.capture(tokens[:stop], ["v"], segments=[segment])
        close(read[f"{arm}.v"], read_outs(fresh.stack("v")))


def test_codes_that_shift_the_tokens_around_them_are_refused(smol: Model, monkeypatch: pytest.MonkeyPatch):
    refused(lambda: read_context(smol, contexts()[0], ["48213", "482135"], batch=2), "digits")


def test_a_run_holds_every_table_number_and_figure(finished: Run):
    sites = 30 * 2 * 2
    assert len(finished.df("probes")) == sites * (len(ARMS) + len(CHANGED)) * len(SPLITS)
    samples = finished.df()
    assert samples.groupby("condition").size().to_dict() == {
        **dict.fromkeys(("full", "retained"), 48),
        **dict.fromkeys((*ARMS, *CHANGED.values()), 48 * 5 * len(SPLITS)),
        "restart": 48 * (5 * len(SPLITS) + 1),
    }
    assert_figures(finished, "accuracy_by_layer_mean", "accuracy_by_layer_last", "layer_by_segment", "use")
    assert len(list((finished.path / "probes").glob("*/card.yaml"))) == 5
    assert (finished.path / "report.html").read_text().count('data-component="HeatMap"') == 2
    concluded = Conclusion.of(finished.metrics)
    assert [control.holds for control in concluded.controls] == [True]
    assert concluded.findings.at("reach", layers="last").mean > 1e-4


def test_numbers_are_those_of_the_probings(finished: Run):
    findings, readings = Conclusion.of(finished.metrics).findings, finished.df("readings")
    assert set(findings.values("accuracy", "reading", arm="masked")) == set(READINGS) - {"untrained"}
    for finding in findings.where("leak"):
        lead = findings.at("lead", reading="restart", **finding.keys)
        assert finding.value.mean == pytest.approx(lead.mean)
        assert finding.value.low < lead.low
        assert finding.value.high > lead.high
    direct = readings[(readings["arm"] == "direct") & (readings["split"] == "random")].set_index("reading")["accuracy"]
    lead = findings.at("lead", arm="direct", split="random", reading="restart").mean
    assert lead == pytest.approx(direct["retained"] - direct["restart"])
    assert findings.at("accuracy", arm="hidden", split="random", reading="retained").low > 0.1
    for floor in ("restart", "before"):
        assert findings.at("accuracy", arm="masked", split="random", reading=floor).mean < 0.2
    assert findings.at("token_accuracy", condition="full").mean > 0.9
    assert findings.at("token_accuracy", condition="restart").mean < 0.3


TOPICS = Config(secret="topic", contexts=3, samples=30, folds=3, permutations=1)


def test_runs_are_read_beside_an_untrained_model(
    wordy: Model, without_residual: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvprobe.experiments.running.draw", lambda *_: None)
    run = leakage.run(replace(TOPICS, untrained=True), tmp_path, model=wordy)
    findings = Conclusion.of(run.metrics).findings
    assert findings.get("accuracy", arm="masked", split="paired", reading="untrained")


def test_other_secrets_are_known_by_the_model(
    smol: Model, without_residual: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvprobe.experiments.running.draw", lambda *_: None)
    run = leakage.run(TOPICS, tmp_path, model=smol)
    findings = Conclusion.of(run.metrics).findings
    margin = findings.at("margin", condition="full")
    assert margin.mean > 1
    assert not margin.has_interval  # three conversations are too few
    assert "of the topics" in answer(STUDY, run)
    assert set(run.df()["secret"]) <= {"music", "sport", "food", "animals", "science", "travel", "plants", "crafts"}


def test_one_context_says_that_it_does_not_generalise(
    wordy: Model, without_residual: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvprobe.experiments.running.draw", lambda *_: None)
    run = leakage.run(replace(SMALL, contexts=1, samples=40), tmp_path, model=wordy)
    conclusion = Conclusion.of(run.metrics)
    assert conclusion.findings.values("accuracy", "split") == ["random"]
    assert conclusion.findings.at("leak", arm="masked", split="random").clusters == 40
    assert "does not say" in conclusion.warnings[0]
    assert "within this one conversation" in answer(STUDY, run)


# ---- made-up tables

PROBED = ("masked", "direct", "hidden", *CHANGED.values())
WIDE = {"low": 0.2, "high": 0.4, "smallest": 0.1, "largest": 0.5}


def tables(
    leak: float,
    inside: float = 0.0,
    use: float = 0.0,
    *,
    changed: float | None = None,
    p: float = 0.02,
    count: int = FEWEST,
    noise: np.random.Generator | None = None,
) -> dict[str, pd.DataFrame]:
    """What probes read above the floor, and what masking adds to the margin, give or take 0.01 (or noise).

    Args:
        inside: in the paired split.
        changed: less the restart; as much as `leak` by default.
        p: of labels permuted within conversations.
        count: of conversations.
    """
    headline, splits = ("random", ("random",)) if count == 1 else ("leave-context-out", SPLITS)
    masked_changed = leak if changed is None else changed
    leads = {("masked", headline): leak, (CHANGED["masked"], headline): masked_changed, ("masked", "paired"): inside}
    per_context = 40 // count
    known = [{"sample": n, "context": n // per_context, "secret": "4-8"} for n in range(count * per_context)]

    def off(sample: dict[str, Any]) -> float:
        return float(noise.normal()) if noise else 0.01 * (-1) ** (sample["sample" if count == 1 else "context"])

    samples = [
        {**sample, "measure": "use", "condition": condition, "logprob": margin - 9, "margin": margin + off(sample)}
        | {"kl_from_full": 0.5, "token_accuracy": 0.5}
        for sample in known
        for condition, margin in (("full", 5.0), ("retained", use))
    ]
    at_restart = {"logprob": -9.0, "margin": 0.0, "kl_from_full": 0.6, "token_accuracy": 0.1}
    samples += [{**sample, "measure": "use", "condition": "restart", **at_restart} for sample in known]
    sites = [(arm, split) for arm in (*PROBED, "before", "restart") for split in splits]
    samples += [
        {**sample, "measure": "probe", "condition": arm, "split": split, "place": place, "floor": 0.1}
        | {"right": 0.1 + leads.get((arm, split), 0.0) + (0.1 if noise else 1) * off(sample)}
        for sample in known
        for arm, split in sites
        for place in ("1", "2")
    ]
    probes = [
        {"arm": arm, "split": split, "family": family, "read": slots, "layer": layer, "accuracy": 0.3, **WIDE}
        | {"p_family": p if arm in (*FLOORS, *CHANGED.values()) else nan}
        for arm, split in sites
        for family in FAMILIES
        for slots in ("mean", "last")
        for layer in (0, 1)
    ]
    at = [{"arm": arm, "split": split} for arm in PROBED for split in splits]
    ends = {f"{name}_{end}": value for name in ("accuracy", "bits", "lead") for end, value in WIDE.items()}
    records = {
        "samples": samples,
        "probes": probes,
        "readings": [
            {**keys, "reading": name, "accuracy": 0.3, "bits": 0.3, "lead": nan if name == "retained" else 0.3, **ends}
            for keys in at
            for name in READINGS
        ],
        "codelength": [{**keys, "bits": 3.0, "context_bits": 3.3, "uniform_bits": 3.4} for keys in at],
        "sparse": [
            {**keys, "k": k, "accuracy": 0.3, "low": 0.2, "high": 0.4, "random": 0.1} for keys in at for k in (1, 8)
        ],
        "picks": [{**keys, "fold": fold, "family": "v", "layer": 1, "read": "mean"} for keys in at for fold in (0, 1)],
        "reach": [{"family": "k", "layer": layer, "varies": 0.1 * (layer > 1)} for layer in (0, 1, 2)],
    }
    return {name: pd.DataFrame(rows) for name, rows in records.items()}


def numbers(made_up: Any) -> tuple[Config, Conclusion]:
    config = Config(contexts=made_up["samples"]["context"].nunique(), samples=len(made_up["samples"]))
    return config, conclude(made_up, config, any_model())


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return numbers(tables(0.2, 0.2, 0.5))


def noise(rng: np.random.Generator) -> Conclusion:
    """No probe reads more than the floor, and masking adds nothing to the margin."""
    return numbers(tables(0.0, count=20, noise=rng))[1]


def test_claims_hold_together_and_numbers_are_those_that_were_put_in():
    findings: Findings = example()[1].findings
    expected = {("masked", "leave-context-out"), (CHANGED["masked"], "leave-context-out"), ("masked", "paired")}
    assert {(finding.keys["arm"], finding.keys["split"]) for finding in findings.where("leak")} == expected
    for claimed, mean in ((findings.finding("use"), 0.5), *((finding, 0.2) for finding in findings.where("leak"))):
        assert claimed.comparisons == 4
        assert claimed.value.mean == pytest.approx(mean)
    assert findings.at("by_place", place="2").mean == pytest.approx(0.3)
    assert findings.at("gained", measure="kl_from_full").mean == pytest.approx(-0.1)
    assert findings.at("picked", arm="masked", split="paired", family="v", layer=1, read="mean").mean == 2


LEAKS, NONE, USES = "Information leaks:", "No leak was detected:", "The model uses some of what is left:"
CENTRED = "centred on other secrets of the same conversation, information leaks"


@pytest.mark.parametrize(
    ("made_up", "said", "unsaid"),
    [
        (tables(0.2, 0.2, 0.5), (LEAKS, CENTRED, USES, "in view gives 5"), ()),
        (tables(0.2), (LEAKS, "conversation, no leak was detected", "No use by the model"), (CENTRED,)),
        (tables(0.0, 0.2), (NONE, CENTRED), ()),
        (tables(-0.1, 0.0, -0.5), ("doubt the run", "The retained cache turns the model away"), (LEAKS,)),
        (tables(0.0, changed=0.2), (NONE, "from the visible text, information leaks"), (LEAKS,)),
        (tables(0.2, p=0.1), ("A leak is not confirmed",), (LEAKS, "information leaks")),
        (tables(0.5, 0.5, 0.5, count=5), (NONE, "No use by the model"), (LEAKS, "information leaks")),
        (tables(0.2, count=1), ("Information leaks within this one conversation",), ("not trained on", "visible text")),
    ],
)
def test_the_answer_follows_intervals_and_permuted_labels(
    made_up: Any, said: tuple[str, ...], unsaid: tuple[str, ...], tmp_path: Path
):
    config, conclusion = numbers(made_up)
    page = answer(STUDY, page_of(STUDY, config, conclusion, tmp_path))
    assert [phrase for phrase in said if phrase not in page] == []
    assert [phrase for phrase in unsaid if phrase in page] == []


def test_slots_that_vary_where_they_cannot_fail_the_control():
    made_up = tables(0.2)
    made_up["reach"]["varies"] += 1e-3
    assert [control.holds for control in numbers(made_up)[1].controls] == [False]
