"""The carriers study on a tiny model: what is swapped is what its name says, and the sentences follow the numbers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import kvprobe.studies.carriers.study as study
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from kvprobe.inference.model import Model
from kvprobe.studies.carriers import collect as collecting
from kvprobe.studies.carriers.analyse import BOTH, COMPARED, analyse, share
from kvprobe.studies.carriers.collect import CODES, DIRECTIONS, QUESTIONS, ask, read_context
from kvprobe.studies.carriers.config import Config
from kvprobe.studies.carriers.groups import BEFORE, GROUPS, KINDS, PARTS, SELF, TOKEN, groups
from kvprobe.studies.carriers.narrative import answer_carriers, answer_codes, checks
from kvprobe.tasks.compaction import Compaction, compacted_conversation
from kvprobe.tasks.passcode import Context
from tests.studies.runs import about, assert_figures, give, interrupted, short_contexts

SMALL = Config(contexts=2, bands=2)
PAIR = ("48213", "90577")
CONTEXTS = short_contexts(3)
FOLLOWING = tuple(
    Compaction(
        id=context.id,
        summary_question="When?",
        summary_answer="the ride",
        hidden_question="So?",
        hidden_answer="so",
        neither_question="Who?",
        followup_user="And us?",
        followup_assistant="us, too.",
    )
    for context in CONTEXTS
)


@pytest.fixture(scope="module")
def measured() -> dict[str, pd.DataFrame]:
    """What `read_context` gave for each conversation of the run."""
    return {}


@pytest.fixture(scope="module")
def finished(roomy: Model, measured: dict[str, pd.DataFrame], tmp_path_factory: pytest.TempPathFactory) -> Run:
    def read_and_remember(model: Model, context: Context, *others: Any, **settings: Any) -> pd.DataFrame:
        measured[context.id] = read_context(model, context, *others, **settings)
        return measured[context.id]

    with pytest.MonkeyPatch.context() as patch:
        use_short_conversations(patch, roomy)
        patch.setattr(collecting, "draw_codes", lambda count, *_: (list(PAIR) * count)[:count])
        patch.setattr(collecting, "read_context", read_and_remember)
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def read(finished: Run, measured: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The first conversation, whose code is the first of `PAIR`."""
    return measured[CONTEXTS[0].id]


def use_short_conversations(patch: pytest.MonkeyPatch, model: Model) -> None:
    give(patch, model)
    patch.setattr(collecting, "contexts", lambda: CONTEXTS)
    patch.setattr(collecting, "compactions", lambda: FOLLOWING)


def caches(model: Model, code: str = PAIR[0]) -> tuple[KVCache, KVCache]:
    """The recomputed and the retained cache, the hidden turn still in place (masked) in the latter."""
    chat = compacted_conversation(CONTEXTS[0], FOLLOWING[0], code)
    whole = chat.tokens(model.tokenizer)
    gone = chat.without("T2").tokens(model.tokenizer)
    retained = model.prefill(whole[: whole.span("ask").start]).mask("T2")
    return model.prefill(gone[: gone.span("ask").start]), retained


def test_every_slot_after_the_hidden_turn_is_of_one_kind_and_the_rest_stand_before_it(roomy: Model):
    cache, _ = caches(roomy)
    found = groups(cache.ledger)
    kinds = [slot for kind in KINDS for slot in found[kind]]
    assert len(set(kinds)) == len(kinds)
    assert tuple(sorted(kinds)) == found["all after"]
    assert found[BEFORE] + found["all after"] == tuple(range(cache.slots))
    assert all(found.values())
    texts = {kind: roomy.tokenizer.decode(cache.ledger.tokens[0, list(found[kind])]) for kind in KINDS}
    assert texts["summary request"].strip() == CONTEXTS[0].ask_summary_2
    assert texts["summary text"].strip() == CONTEXTS[0].summary_2
    assert "<|im_end|>" in texts["summary delimiters"]
    assert "<|im_start|>" not in texts["later text"]


def test_bands_hold_every_layer_once():
    cut = named_bands(30, 4)
    assert [layer for name, band in cut.items() if name != EVERY_LAYER for layer in band] == list(range(30))
    assert cut[EVERY_LAYER] == tuple(range(30))
    assert list(named_bands(3, 6)) == ["0", "1", "2", EVERY_LAYER]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("group", "part"), [("summary text", "KV"), ("later delimiters", "K"), ("summary", "V")])
def test_a_swap_is_what_patching_by_hand_and_reading_on_gives(
    roomy: Model, read: pd.DataFrame, question: str, direction: str, group: str, part: str
):
    recomputed, masked = caches(roomy)
    retained = masked.evict("T2")
    base, donor = (recomputed, retained) if direction == "restoring" else (retained, recomputed)
    chat = compacted_conversation(CONTEXTS[0], FOLLOWING[0], PAIR[0])
    asked = ask(roomy, chat, CONTEXTS[0], FOLLOWING[0], PAIR[0], question)
    chosen = torch.zeros(1, base.slots, dtype=torch.bool)
    chosen[0, list(groups(base.ledger)[group])] = True
    patched = base.patch(donor, slots=chosen, part=part)
    logits, theirs = (
        roomy.extend(cache, asked.suffix, logits=asked.kept)[1][0].log_softmax(-1) for cache in (patched, donor)
    )
    row = read[
        (read["question"] == question)
        & (read["direction"] == direction)
        & (read["group"] == group)
        & (read["part"] == part)
        & (read["band"] == EVERY_LAYER)
    ].set_index("metric")
    expected = float((theirs.exp() * (theirs - logits)).sum(-1).mean())
    assert row.loc["kl", "value"] == pytest.approx(expected, abs=1e-4)
    answer = logits[-len(asked.answer) :]
    likely = float(answer.gather(1, torch.tensor(asked.answer)[:, None]).sum())
    assert row.loc["logprob", "value"] == pytest.approx(likely, abs=1e-3)
    assert row.loc["kl", "donor"] == pytest.approx(0, abs=1e-5)


def test_the_retained_cache_is_the_whole_one_with_the_turn_masked(roomy: Model, read: pd.DataFrame):
    _, masked = caches(roomy)
    chat = compacted_conversation(CONTEXTS[0], FOLLOWING[0], PAIR[0])
    asked = ask(roomy, chat, CONTEXTS[0], FOLLOWING[0], PAIR[0], "hidden")
    logits = roomy.extend(masked, asked.suffix, logits=asked.kept)[1][0].log_softmax(-1)
    likely = float(logits[-5:].gather(1, torch.tensor(asked.answer)[:, None]).sum())
    rows = read[(read["question"] == "hidden") & (read["metric"] == "logprob") & (read["direction"] == "restoring")]
    assert rows["donor"].iloc[0] == pytest.approx(likely, abs=1e-3)
    assert rows["base"].iloc[0] != pytest.approx(likely, abs=1e-2)


def test_slots_before_the_turn_do_nothing_and_all_after_it_do_everything(read: pd.DataFrame):
    assert read["apart"].max() < 1e-4
    for nothing in (BEFORE, SELF):
        assert read.loc[read["group"] == nothing, "effect"].abs().max() < 1e-3
    whole = read[(read["group"] == "all after") & (read["part"] == "KV") & (read["band"] == EVERY_LAYER)]
    assert (whole["value"] - whole["donor"]).abs().max() < 1e-3
    assert whole["way"].abs().max() > 0.01


def test_two_codes_change_nothing_before_the_turn_and_reach_what_stays(read: pd.DataFrame):
    rows = read[read["question"] == CODES].set_index("group")
    assert set(rows.index) == {*GROUPS, BEFORE}
    assert abs(rows.loc[BEFORE, "effect"]) < 1e-4
    assert rows.loc["all after", "effect"] == pytest.approx(rows.loc["all after", "way"], abs=1e-4)
    assert abs(rows.loc["all after", "way"]) > 1e-4


def test_the_example_swaps_every_slot_after_the_turn_once(roomy: Model, read: pd.DataFrame):
    rows = read[(read["group"] == TOKEN) & (read["metric"] == "kl")]
    recomputed, _ = caches(roomy)
    assert sorted(rows["slot"]) == list(groups(recomputed.ledger)["all after"])


def test_a_run_holds_every_number_and_figure(finished: Run):
    metrics = finished.metrics
    assert metrics["conversations"] == SMALL.contexts
    assert len(metrics["shares"]) == 3 * len(DIRECTIONS) * 2 * len(GROUPS) * len(PARTS)
    assert len(metrics["bands"]) == SMALL.bands
    assert all(checks(metrics).values())
    whole = share(metrics, "all after")["share"]
    assert whole["mean"] == pytest.approx(1, abs=1e-3)
    assert_figures(finished, "shares", "layers")
    titles = [section["title"] for section in finished.report["sections"]]
    assert titles[0] == "What was found"
    assert {"What was done", "Controls", "Limits", "Reproduce"} <= set(titles)
    assert finished.report["warnings"]


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, measured: dict[str, pd.DataFrame], roomy: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_short_conversations(monkeypatch, roomy)

    def remembered(model: Model, context: Context, *others: Any, **settings: Any) -> pd.DataFrame:
        return measured[context.id]

    run = partial(study.run, SMALL, tmp_path)
    resumed, calls = interrupted(run, monkeypatch, collecting, "read_context", 2, remembered)
    assert len(calls) == 1 + SMALL.contexts
    assert json.dumps(resumed.metrics) == json.dumps(finished.metrics)


PLANTED = {"summary text": 0.7, "summary delimiters": 0.1, "summary": 0.8, "later turns": 0.2, "all after": 1.0}


def made_up(conversations: int = 6) -> pd.DataFrame:
    """A table in which shares are `PLANTED`, V has three times what K has, the last of two bands has nearly all, and a
    code moves 2 of 10 logits."""
    rows = []
    for context in range(conversations):
        for question in QUESTIONS:
            for direction in DIRECTIONS:
                for metric, way in (("kl", -1.0 - context / 10), ("logprob", 3.0)):
                    known = {"context": context, "question": question, "direction": direction, "metric": metric}
                    known |= {"base": -way, "donor": 0.0, "full": 1.0, "full_other": 0.0, "right": context > 0}
                    known |= {"apart": 0.0, "way": way, "slot": -1, "token": ""}
                    for group in (*GROUPS, BEFORE, SELF):
                        for part in PARTS:
                            told = PLANTED.get(group, 0.0) * {"K": 0.25, "V": 0.75, "KV": 1.0}[part]
                            for band, weight in (("all", 1.0), ("0–1", 0.1), ("2–3", 0.9)):
                                effect = told * weight * way
                                cell = {"group": group, "part": part, "band": band, "slots": 4, "effect": effect}
                                rows.append(known | cell | {"value": -way + effect})
        for group in (*GROUPS, BEFORE):
            effect = -2.0 * PLANTED.get(group, 0.0)
            codes = {"context": context, "question": CODES, "direction": CODES, "metric": "logit_diff", "group": group}
            codes |= {"part": "KV", "band": "all", "slots": 4, "slot": -1, "token": "", "right": True, "apart": 0.0}
            # In the last conversation the model cannot tell the codes apart.
            full = 5.0 if context < conversations - 1 else -1.0
            rows.append(codes | {"base": 1.0, "donor": -1.0, "way": -2.0, "effect": effect, "value": 1.0 + effect})
            rows[-1] |= {"full": full, "full_other": -5.0}
    return pd.DataFrame(rows)


def test_the_analysis_finds_planted_shares_layers_parts_and_codes():
    metrics = analyse(made_up(), Config(contexts=6)) | {"precision": 1e-7}
    for group, planted in PLANTED.items():
        for direction in DIRECTIONS:
            found = share(metrics, group, direction=direction)["share"]
            assert found["mean"] == pytest.approx(planted)
            assert (found["low"], found["clusters"]) == (None, 6), "six conversations are too few for an interval"
    assert share(metrics, "all after", "K")["share"]["mean"] == pytest.approx(0.25)
    assert metrics["most"]["restoring"]["band"] == "2–3"
    assert not metrics["most"]["restoring"]["told"]
    assert metrics["compared"]["removing"]["summary over later turns"][BOTH]["mean"] == pytest.approx(0.6)
    assert metrics["codes"]["able"] == 5
    assert metrics["codes"]["of"] == 6
    assert metrics["codes"]["in_view"]["mean"] == pytest.approx(10)
    assert metrics["codes"]["masked"]["mean"] == pytest.approx(2)
    swapped = {each["group"]: each for each in metrics["codes"]["groups"]}
    assert swapped["summary"]["effect"]["mean"] == pytest.approx(1.6)
    assert swapped["summary"]["share"]["mean"] == pytest.approx(0.16)
    assert metrics["scale"][0]["right"]["mean"] == pytest.approx(5 / 6)
    assert all(checks(metrics).values())


@pytest.mark.parametrize(
    ("group", "control"), [(BEFORE, "light cone"), (SELF, "base itself"), ("all after", "everything")]
)
def test_a_control_that_fails_is_seen(group: str, control: str):
    table = made_up()
    spoilt = (table["group"] == group) & (table["context"] == 1)
    table.loc[spoilt, "effect"] += 0.1
    table.loc[spoilt, "value"] += 0.1
    held = checks(analyse(table, Config(contexts=6)) | {"precision": 1e-7})
    assert [name for name, holds in held.items() if not holds] == [control]


def metrics_with(
    kl: float = 0.5,
    conversations: int = 12,
    told: bool = True,
    values: float = 0.4,
    agree: bool = True,
    over: tuple[float, float] = (0.5, 0.5),
) -> dict[str, Any]:
    compared = {
        direction: {
            name: {"hidden": about(told), "summary": about(told if agree else -told), BOTH: about(told)}
            for name, told in (dict.fromkeys(COMPARED, gap) | {"V over K": values}).items()
        }
        for direction, gap in zip(DIRECTIONS, over, strict=True)
    }
    shares = [
        {"group": group, "part": part, "question": BOTH, "direction": direction, "metric": "kl", "share": about(0.5)}
        for group in GROUPS
        for part in PARTS
        for direction in DIRECTIONS
    ]
    return {
        "conversations": conversations,
        "scale": [{"kl": about(kl)}],
        "shares": shares,
        "compared": compared,
        "most": {name: {"band": "15–19", "share": about(0.6), "told": told} for name in DIRECTIONS},
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "mostly at layers 15–19"),
        ({"told": False}, "no band of layers differs significantly"),
        ({"values": 0.4}, "more of it in V"),
        ({"values": -0.4}, "more of it in K"),
        ({"values": 0.0}, "do not agree on whether more of it is in K or in V"),
        ({"agree": False}, "do not agree on whether more of it is in K or in V"),
        ({"over": (0.5, 0.5)}, "The other way round agrees"),
        ({"over": (-0.5, -0.5)}, "The other way round agrees"),
        ({"over": (0.5, 0.0)}, "does not agree"),
        ({"over": (0.0, 0.0)}, "In neither direction"),
        ({"kl": 1e-5}, "There is hardly anything to carry"),
    ],
)
def test_the_sentence_on_carriers_follows_the_numbers(settings: dict[str, Any], said: str):
    assert said in answer_carriers(metrics_with(**settings))


@pytest.mark.parametrize(
    ("masked", "said"),
    [(0.5, "Some of what they carry is the code"), (-0.5, "turned away from it"), (0.0, "was not detected")],
)
def test_the_sentence_on_codes_follows_the_interval(masked: float, said: str):
    assert said in answer_codes({"of": 12, "able": 11, "masked": about(masked), "in_view": about(9.0)})


def test_codes_that_the_model_cannot_tell_apart_in_view_give_no_verdict():
    assert "cannot be said" in answer_codes({"of": 12, "able": 1})
