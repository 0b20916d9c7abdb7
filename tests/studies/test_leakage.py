"""The leakage study on real weights, small: what is shared must equal what is read one by one."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch

import kvprobe.studies.leakage.analyse as analysing
import kvprobe.studies.leakage.figures as drawing
import kvprobe.studies.leakage.study as study
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import use_measurements
from kvprobe.models.lens import Family
from kvprobe.probing.features import read_outs
from kvprobe.stats import Estimate
from kvprobe.studies.leakage import collect as collecting
from kvprobe.studies.leakage.analyse import ARMS, CHANGED
from kvprobe.studies.leakage.answers import answer_probe, answer_use
from kvprobe.studies.leakage.collect import FAMILIES, USE_ARMS, read_context
from kvprobe.studies.leakage.config import Config
from kvprobe.studies.leakage.figures import FAMILY_NAMES
from kvprobe.tasks.passcode import contexts, conversation
from tests.refusals import refused
from tests.studies.runs import assert_figures, give, interrupted

SMALL = Config(contexts=8, samples=48, folds=3, permutations=9, batch=10)
CODES = ("48213", "90577", "13662")
KEYS_AND_VALUES: tuple[Family, ...] = ("k", "v")


def without_residual(patch: pytest.MonkeyPatch, smol: Model, *, drawn: bool = True) -> None:
    """Runs of K and V alone, or with no figure drawn: probes of the residual stream take most of the time."""
    give(patch, smol)
    for module in (collecting, analysing, drawing):
        patch.setattr(module, "FAMILIES", KEYS_AND_VALUES)
    if not drawn:
        patch.setattr(study, "draw_all", lambda *_: None)


@pytest.fixture(scope="module")
def finished(smol: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        without_residual(patch, smol)
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def read(smol: Model) -> dict[str, torch.Tensor]:
    return read_context(smol, contexts()[0], CODES, batch=2)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


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
        found = read["logprob"][1, USE_ARMS.index(arm), index]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        cache, logits = smol.extend(cache, tokens[place : place + 1])


def test_the_full_arm_is_no_distance_from_itself_and_the_others_are(read: dict[str, torch.Tensor]):
    torch.testing.assert_close(read["kl"][:, 0], torch.zeros(3), atol=1e-5, rtol=0)
    assert (read["kl"][:, 1:] > 0.1).all()


def test_a_run_holds_every_table_number_and_figure(finished: Run):
    assert finished.finished
    probes = finished.df("probes")
    sites = 30 * 2 * len(KEYS_AND_VALUES)
    assert len(probes) == sites * (len(ARMS) + len(CHANGED)) * 3
    assert ((probes["low"] <= probes["accuracy"]) & (probes["accuracy"] <= probes["high"])).all()
    samples = finished.df()
    assert len(samples) == 48 * (len(USE_ARMS) + len(ARMS))
    assert samples.groupby(["measure", "condition"]).size().eq(48).all()
    assert_figures(finished, "accuracy_by_layer_mean", "accuracy_by_layer_last", "layer_by_segment", "use")
    assert len(list((finished.path / "probes").glob("*/card.yaml"))) == 5
    assert finished.metrics["light_cone"]["layers_0_1"] < 1e-5
    assert finished.metrics["light_cone"]["last_layer"] > 1e-4


def test_the_reports_maps_are_the_probes_accuracies_above_chance(finished: Run):
    (section,) = [each for each in finished.report["sections"] if each["title"] == "What a linear probe reads"]
    assert [each["caption"].split(":")[0] for each in section["maps"]] == [
        FAMILY_NAMES[family] for family in KEYS_AND_VALUES
    ]
    values = section["maps"][1]
    probes = finished.df("probes").query("family == 'v' and read == 'mean' and split == 'leave-context-out'")
    for arm, segment in (("masked", "T3 masked"), ("hidden", "T2 after it")):
        column = [row[values["columns"].index(segment)] for row in values["values"]]
        assert column == pytest.approx(list(probes[probes["arm"] == arm].sort_values("layer")["accuracy"] - 0.1))
    assert values["rows"] == [str(layer) for layer in range(30)]


def test_a_leak_is_stated_with_its_split_floor_selectivity_and_use(finished: Run):
    answer = finished.report["answer"]
    assert all(word in answer for word in ("chance", "restart floor", "selectivity", "not trained on", "nats"))
    readings = finished.df("readings")
    kinds = {"retained", "restart", "before", "embedding", "hash control", "context", "text", "majority"}
    assert set(readings[readings["arm"] == "masked"]["reading"]) == kinds
    (section,) = [each for each in finished.report["sections"] if each["title"] == "What else would be read"]
    assert len(section["tables"][0]["rows"]) == len(kinds)
    for split, arms in finished.metrics["scan"].items():
        assert arms["masked"]["sites"] == 120
        own = readings[(readings["arm"] == "direct") & (readings["split"] == split)].set_index("reading")
        leak = own.loc["retained", "accuracy"] - own.loc["restart", "accuracy"]
        assert finished.metrics["leak"][split]["direct"]["mean"] == pytest.approx(leak)


def test_each_floor_is_the_same_tokens_computed_without_the_hidden_turns(smol: Model, read: dict[str, torch.Tensor]):
    tokens = conversation(contexts()[0], CODES[0]).without("T1", "T2").tokens(smol.tokenizer)
    for arm, segment in (("direct restart", "summary2"), ("restart", "T3")):
        span = tokens.span(segment)
        stop = tokens.part("answer").start if segment == "T3" else span.stop
        fresh = smol.capture(tokens[:stop], ["v"], segments=[segment])
        close(read[f"{arm}.v"], read_outs(fresh.stack("v")))


def test_other_secrets_run_and_an_untrained_model_is_read_beside_them(
    smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_residual(monkeypatch, smol, drawn=False)
    config = Config(secret="topic", contexts=3, samples=30, folds=3, permutations=1, untrained=True)
    run = study.run(config, tmp_path)
    readings = run.df("readings").query("arm == 'masked' and split == 'paired'").set_index("reading")["accuracy"]
    assert "untrained" in readings
    assert "topics" in run.report["answer"]
    margin = run.metrics["use"]["full"]["margin"]
    assert margin["mean"] > 1
    assert margin["low"] is None  # three conversations are too few for an interval
    assert set(run.df()["secret"]) <= {"music", "sport", "food", "animals", "science", "travel", "plants", "crafts"}


def test_the_hidden_turn_itself_is_read_and_the_floor_is_not(finished: Run):
    random = finished.metrics["accuracy"]["random"]
    assert random["hidden"]["low"] > finished.metrics["chance"]
    for arm in ("restart", "before"):
        assert random[arm]["mean"] < 0.2


def test_with_everything_in_view_the_model_knows_the_code(finished: Run):
    use = finished.metrics["use"]
    assert use["full"]["token_accuracy"]["mean"] > 0.9
    assert use["restart"]["token_accuracy"]["mean"] < 0.3


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_residual(monkeypatch, smol, drawn=False)
    small = dataclasses.replace(SMALL, contexts=4, samples=32)
    whole = study.run(small, tmp_path / "whole")
    run = partial(study.run, small, tmp_path / "stopped")
    resumed, calls = interrupted(run, monkeypatch, collecting, "read_context", at=3)
    assert len(calls) == 3 + 2
    assert json.dumps(resumed.metrics) == json.dumps(whole.metrics)


def test_one_context_says_that_it_does_not_generalise(smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_residual(monkeypatch, smol, drawn=False)
    run = study.run(dataclasses.replace(SMALL, contexts=1, samples=40), tmp_path)
    assert list(run.metrics["accuracy"]) == ["random"]
    assert "does not say" in run.report["warnings"][0]
    assert "in this one conversation" in run.report["answer"]


def metrics_with(
    leak: float,
    paired: float = 0.0,
    gain: float = 0.0,
    split: str = "leave-context-out",
    changed: float | None = None,
    permuted: bool = True,
    interval: bool = True,
) -> dict:
    """Metrics whose differences are these, each give or take 0.1.

    Args:
        permuted: whether labels permuted within conversations are read worse.
        interval: whether there are conversations enough for one.
    """

    def of(mean: float) -> dict[str, float]:
        ends = (mean - 0.1, mean + 0.1) if interval else ()
        return Estimate(mean, *ends, clusters=8 if interval else 5, smallest=mean - 0.2, largest=mean + 0.2).record()

    confirmed = {"confirmed": permuted}
    accuracy = {"masked": of(0.3), "restart": of(0.1), "masked less restart": of(0.3)}
    arm = {"token_accuracy": of(0.5), "margin": of(5.0)}
    return {
        "secret": "code",
        "chance": 0.1,
        "headline_split": split,
        "accuracy": {split: accuracy, "paired": accuracy},
        "claims": {
            "leak": of(leak) | confirmed,
            "changed": of(leak if changed is None else changed) | confirmed,
            "inside": of(paired) | confirmed,
            "use": of(gain),
        },
        "selectivity": {split: {"masked": of(leak)}},
        "use": {"full": arm, "retained": arm, "restart": arm},
    }


@pytest.mark.parametrize(
    ("leak", "paired", "start", "end"),
    [
        (0.2, 0.2, "Information leaks: ", "centred on other secrets of the same conversation, a probe reads"),
        (0.2, 0.0, "Information leaks: ", "not significantly more than the floor."),
        (0.0, 0.2, "No leak that a probe can read in new", "Something of the code is there all the same"),
        (0.0, 0.0, "No leak that a probe can read in new", "not significantly more than the floor."),
        (-0.2, 0.0, "No leak that a probe can read in new", "doubt the run"),
    ],
)
def test_the_sentence_on_leakage_follows_the_intervals(leak: float, paired: float, start: str, end: str):
    sentence = answer_probe(metrics_with(leak, paired))
    assert sentence.startswith(start)
    assert end.lower() in sentence.lower()
    assert ("all the same" in sentence) == (leak <= 0.1 < paired)


def test_what_differs_from_the_restart_is_enough_for_a_leak():
    sentence = answer_probe(metrics_with(0.0, 0.2, changed=0.2))
    assert sentence.startswith("Information leaks to anyone who has the visible text, too: ")
    assert "all the same" not in sentence


def test_a_leak_that_permuted_labels_do_not_confirm_is_not_claimed():
    assert answer_probe(metrics_with(0.2, 0.2, permuted=False)).startswith("No leak that a probe can read")


def test_of_few_conversations_ranges_are_given_and_nothing_is_claimed():
    metrics = metrics_with(0.5, 0.5, 0.5, interval=False)
    assert answer_probe(metrics).startswith("Whether information leaks cannot be said from so few conversations: ")
    assert answer_use(metrics).startswith("Whether the model uses what is left cannot be said")
    assert "range +30.0 to +70.0 over 5; too few for an interval" in answer_probe(metrics)


@pytest.mark.parametrize(("leak", "start"), [(0.2, "Information leaks within"), (0.0, "No leak was detected in this")])
def test_with_one_conversation_nothing_is_said_of_others(leak: float, start: str):
    sentence = answer_probe(metrics_with(leak, split="random"))
    assert sentence.startswith(start)
    assert "not trained on" not in sentence
    assert "stranger" not in sentence


@pytest.mark.parametrize(
    ("gain", "start"),
    [(0.5, "The model uses some"), (0.0, "No use by the model"), (-0.5, "The retained cache turns the model away")],
)
def test_the_sentence_on_use_follows_the_interval(gain: float, start: str):
    assert answer_use(metrics_with(0.0, gain=gain)).startswith(start)


def test_a_preference_for_some_digits_is_no_knowledge_of_the_code():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 10, (40, 5), generator=generator)
    blind, liking = torch.zeros(40, 5, 50), torch.zeros(40, 5, 50)
    liking[:, :, :10] = 3.0 + torch.randn(10, generator=generator)
    telling = liking.clone()
    telling.scatter_add_(2, codes[:, :, None], torch.full((40, 5, 1), 2.0))
    found = use_measurements([telling, liking, blind], codes, range(40))
    logprob, margin = found["logprob"].sum(2).mean(0), found["margin"].sum(2).mean(0)
    assert logprob[1] > logprob[2] + 1
    assert margin[0] > 7
    assert margin[1].abs() < 1e-4
    assert margin[2].abs() < 1e-4


def test_codes_that_shift_the_tokens_around_them_are_refused(smol: Model, monkeypatch: pytest.MonkeyPatch):
    refused(lambda: read_context(smol, contexts()[0], ["48213", "482135"], batch=2), "digits")
