"""kvprobe.probe from a design to a claim, on a tiny random model with a known answer."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.faults import Scope, Zeros
from kvprobe.inference.model import Model, load
from kvprobe.probing.damage import damaged_slots
from kvprobe.probing.features import READS, Site, read_outs
from kvprobe.probing.probe import follows_directly, identical, probe
from kvprobe.probing.probe_features import probe_features
from kvprobe.probing.read_features import read_features, restarted
from kvprobe.probing.use import USE_ARMS, can_be_asked
from kvprobe.tasks.designs import Design, Sample, Target
from kvprobe.text.transcript import Transcript
from tests.models.every import tiny
from tests.refusals import refused

PLACES = ["shed", "mill", "barn", "inn", "tower", "east desk"]
DIGITS = Target("digit", ("2", "3", "4", "5"))


def conversation(place: str, digit: int) -> Transcript:
    # From 2 on, all digits take one token with this tokenizer; " 1" would shift every position after it.
    messages = [
        {"role": "user", "content": f"the {place} has {digit + 2}."},
        {"role": "assistant", "content": [f"a {place} it is ", {"text": str(digit + 2), "name": "answer"}]},
    ]
    return Transcript.from_messages(messages, ["T1", "T2"])


@pytest.fixture(scope="module")
def design() -> Design:
    samples = [Sample(conversation(place, digit), (digit,), place) for place in PLACES for digit in (0, 1, 2, 3) * 2]
    return Design(tuple(samples), DIGITS)


@pytest.fixture(scope="module")
def hidden(tiny_llama: Model, design: Design) -> kv.Probing:
    return probe(tiny_llama, design, "T2", hide=["T1"], folds=3, permutations=19)


def best(probing: kv.Probing, split: str, family: str) -> float:
    table = probing.df()
    return float(table[(table["split"] == split) & (table["family"] == family)]["accuracy"].max())


def test_a_digit_in_view_is_read_from_values_in_unseen_conversations(tiny_llama: Model, design: Design):
    probing = probe(tiny_llama, design, "T1", families=["v"], folds=3, permutations=0)
    assert probing.chance == 0.25
    assert best(probing, "leave-context-out", "v") > 0.55
    assert probing.use is None


def test_a_later_turn_knows_the_digit_unless_the_turn_was_hidden_from_it(
    tiny_llama: Model, design: Design, hidden: kv.Probing
):
    seen = probe(tiny_llama, design, "T2", folds=3, permutations=0)
    for family in ("k", "v", "resid_post"):
        assert best(seen, "paired", family) > 0.9
        assert best(hidden, "paired", family) <= 0.3


def test_a_state_knows_what_was_written_to_it_and_loses_what_is_hidden(tiny_llama: Model, design: Design):
    hybrid = tiny("qwen3_next", vocab_size=tiny_llama.lanes.plain.config.vocab_size)
    model = load(hybrid, tokenizer=tiny_llama.tokenizer)
    asked: dict[str, Any] = {"families": ["state", "k"], "folds": 3, "permutations": 0}
    few = replace(design, samples=design.samples[:24])
    seen, hidden = probe(model, few, "T2", **asked), probe(model, few, "T2", hide=["T1"], **asked)
    assert set(seen.table[seen.table["family"] == "state"]["layer"]) == {0, 1, 2}
    assert set(seen.table[seen.table["family"] == "k"]["layer"]) == {3}
    assert best(seen, "paired", "state") > 0.9
    assert best(hidden, "paired", "state") <= 0.3


def test_one_call_returns_floors_controls_p_values_and_use(hidden: kv.Probing):
    readings = {"retained", "restart", "embedding", "hash control", "context", "text", "majority"}
    for _, rows in hidden.summary.groupby("split"):
        assert set(rows["reading"]) == readings
        # Three contexts are too few for an interval, and have a range.
        assert rows[["accuracy_low", "accuracy_high"]].isna().all().all()
        assert rows["accuracy"].between(rows["accuracy_smallest"], rows["accuracy_largest"]).all()
        assert rows[rows["reading"] != "retained"][["lead", "lead_smallest", "lead_largest"]].notna().all().all()
    columns = {"accuracy", "bits", "floor", "leak", "selectivity", "permuted", "p", "p_family", "q", "eta_squared"}
    assert columns <= set(hidden.table.columns)
    assert len(hidden.table) == 3 * 3 * 3 * 2
    assert not hidden.table.duplicated(["split", "family", "layer", "head", "read"]).any()
    assert set(hidden.codelength["split"]) == set(hidden.sparse["split"]) == set(hidden.picks)
    assert hidden.use is not None
    assert set(hidden.use["condition"]) == set(USE_ARMS)


def test_hidden_text_is_read_no_better_than_the_restart_floor(hidden: kv.Probing):
    leads = hidden.summary[hidden.summary["reading"] == "restart"]
    assert (leads["lead_smallest"] <= 0).all()
    assert "decodable" not in str(hidden)
    assert hidden.table["p_family"].min() > 0.05


def test_an_untrained_model_is_a_further_floor(tiny_llama: Model, design: Design):
    probing = probe(tiny_llama, design, "T1", families=["v"], folds=3, permutations=0, untrained=True)
    assert "untrained" in set(probing.summary["reading"])


def test_the_same_generator_gives_the_same_table(tiny_llama: Model, design: Design):
    one, other = (probe(tiny_llama, design, "T1", families=["k"], folds=3, permutations=9, seed=5) for _ in range(2))
    assert one.df().equals(other.df())


def test_the_answer_is_never_read(tiny_llama: Model, design: Design):
    features = read_features(tiny_llama, design, "T2", families=["v"])
    tokens = design.samples[0].transcript.tokens(tiny_llama.tokenizer)
    assert features.texts is not None
    assert features.texts[0] == tokens.ids[tokens.span("T2").start : tokens.part("answer").start]


def test_each_head_is_a_site_of_its_own(tiny_llama: Model, design: Design):
    joined, apart = (
        read_features(tiny_llama, design, "T1", families=["k"], per_head=per_head) for per_head in (False, True)
    )
    heads, d_head = tiny_llama.geometry.n_kv_heads, tiny_llama.geometry.d_head
    for head in range(heads):
        torch.testing.assert_close(
            apart.at("k", Site(1, head, "last")),
            joined.at("k", Site(1, None, "last"))[..., head * d_head : (head + 1) * d_head],
        )
    assert len(apart.sites["k"]) == heads * len(joined.sites["k"])
    chosen = read_features(tiny_llama, design, "T1", families=["k"], layers=[1], heads=[heads - 1])
    assert chosen.sites["k"] == tuple(Site(1, heads - 1, read) for read in READS)
    torch.testing.assert_close(chosen.at("k", Site(1, heads - 1, "mean")), apart.at("k", Site(1, heads - 1, "mean")))
    refused(lambda: read_features(tiny_llama, design, "T1", heads=[heads]), f"0 to {heads - 1}")
    refused(lambda: read_features(tiny_llama, design, "T1", layers=[99]), "99")


def test_families_named_by_their_hooks_are_read_at_their_layers_alone(tiny_llama: Model, design: Design):
    names = ["blocks.2.attn.hook_v", "blocks.0.hook_resid_post", "blocks.1.attn.hook_v"]
    named, every = (
        read_features(tiny_llama, design, "T1", families=families) for families in (names, ["v", "resid_post"])
    )
    assert named.sites == {
        "v": tuple(Site(layer, None, read) for layer in (1, 2) for read in READS),
        "resid_post": tuple(Site(0, None, read) for read in READS),
    }
    for family, sites in named.sites.items():
        for site in sites:
            torch.testing.assert_close(named.at(family, site), every.at(family, site))
    probing = probe(tiny_llama, design, "T1", families=names[:1], folds=3, permutations=0)
    table = probing.df()
    assert set(zip(table["family"], table["layer"], strict=True)) == {("v", 2)}
    refused(lambda: probe(tiny_llama, design, "T1", families=names, layers=[0]), "hook names alone")
    refused(lambda: probe(tiny_llama, design, "T1", families=["blocks.0.attn.hook_q"]), "no site at the hook")


def test_conversations_that_do_not_differ_are_read_once(tiny_llama: Model, design: Design):
    features = read_features(tiny_llama, design, "T1", families=["v"])
    assert features.tensors["v"].shape[0] == 4 * len(PLACES)
    assert (features.rows[:4] == features.rows[4:8]).all()


def test_single_slots_are_read_at_their_place(tiny_llama: Model):
    transcripts = {place: conversation(place, 1) for place in PLACES}
    design = Design.token_identity(transcripts, tiny_llama.tokenizer, "T1", most=3)
    features = read_features(tiny_llama, design, "T1", families=["v", "resid_post"])
    number = len(design.samples) - 1
    sample = design.samples[number]
    whole = tiny_llama.capture(sample.transcript, ["v"], segments=["T1"]).stack("v")
    expected = whole[1, 0, :, sample.slot].flatten()
    torch.testing.assert_close(features.at("v", Site(1, None, "slot"))[0, number], expected, atol=1e-5, rtol=0)
    probing = probe(tiny_llama, design, "T1", families=["v"], folds=3, permutations=0)
    assert best(probing, "leave-context-out", "v") > 0.9
    moved = Design((Sample(sample.transcript, (0,), "shed", 10_000),), Target("token", ("a", "b")))
    refused(lambda: read_features(tiny_llama, moved, "T1"), "Sample 0 reads slot 10000")


def test_a_slot_keeps_its_token_after_a_restart(tiny_llama: Model):
    transcripts = {place: conversation(place, 1) for place in PLACES}
    design = Design.token_identity(transcripts, tiny_llama.tokenizer, "T2", most=3)
    probing = probe(tiny_llama, design, "T2", hide=["T1"], families=["v"], folds=3, permutations=0)
    assert best(probing, "leave-context-out", "v") > 0.9
    assert float(probing.table["floor"].max()) > 0.9


def test_damage_of_a_slot_is_read_from_the_struck_layers(tiny_llama: Model):
    transcripts = {place: conversation(place, 1) for place in PLACES}
    fault = Zeros(scope=Scope(rate=0.4, layers=[1], parts="v", segments=["T1"]))
    features = damaged_slots(tiny_llama, transcripts, fault, "T1")
    struck = features.at("v", Site(1, None, "slot"))[0].eq(0).all(1)
    assert struck.long().equal(features.labels[0])
    assert 0.2 < float(struck.double().mean()) < 0.6
    probing = probe_features(features, {}, folds=3, permutations=0, rng=np.random.default_rng(0))
    table = probing.table.query("split == 'leave-context-out'").set_index(["family", "layer"])["bits"]
    # Zeros lie close to the mean, where a line tells them apart with some errors.
    assert table["v", 1] > 0.2
    assert table["k", 1] < 0.1
    refused(lambda: damaged_slots(tiny_llama, transcripts, Zeros(), "T1"), "struck every slot")


def test_a_cache_can_be_treated_before_it_is_read(tiny_llama: Model):
    transcripts = [conversation(place, digit) for place in PLACES for digit in (0, 1)]
    struck = np.random.default_rng(0).integers(0, 2, len(transcripts))
    design = Design.labelled(transcripts, struck.tolist(), [place for place in PLACES for _ in (0, 1)], "damaged")

    def treat(cache: KVCache, sample: int) -> KVCache:
        return cache.corrupt(Zeros()) if struck[sample] else cache

    clean, hit = (
        read_features(tiny_llama, design, "T2", families=["v"], treat=treatment) for treatment in (None, treat)
    )
    changed = (clean.tensors["v"][clean.rows] - hit.tensors["v"][hit.rows]).abs().amax((1, 2)) > 1e-4
    assert changed.tolist() == struck.astype(bool).tolist()


def use_of(model: Model, design: Design, hide: list[str]) -> pd.DataFrame:
    use = probe(model, design, "T2", hide=hide, families=["v"], folds=3, permutations=0).use
    assert use is not None
    return use


def test_use_equals_reading_the_answer_token_by_token(tiny_llama: Model, design: Design):
    use = use_of(tiny_llama, design, ["T1"])
    assert len(use) == len(design.samples) * len(USE_ARMS)
    for arm in USE_ARMS:
        chat = design.samples[5].transcript
        tokens = (chat.without("T1") if arm == "restart" else chat).tokens(tiny_llama.tokenizer)
        turn, answer = tokens.span("T2").start, tokens.part("answer").start
        past = tiny_llama.prefill(tokens[:turn]) if turn else None
        past = past.mask("T1") if past is not None and arm == "retained" else past
        expected = tiny_llama.extend(past, tokens[turn:answer])[1][0, -1].log_softmax(-1)[tokens.ids[answer]]
        logprob = use[(use["sample"] == 5) & (use["condition"] == arm)]["logprob"].iloc[0]
        assert logprob == pytest.approx(float(expected), abs=1e-4)
    means = use.groupby("condition")["logprob"].mean()
    assert abs(means["full"] - means["retained"]) > 1e-3
    # Without knowledge of the answer, no answer is preferred on average.
    assert use[use["condition"] == "restart"].groupby("context")["margin"].mean().abs().max() < 1e-4
    alone = Design((design.samples[0],), DIGITS)
    refused(lambda: can_be_asked(tiny_llama, alone, "T2"), "has 1 samples")


def test_hiding_before_what_comes_right_after_is_a_restart_and_says_so(hidden: kv.Probing):
    assert [warning for warning in hidden.warnings if "give when='after'" in warning]
    assert "Warning: 'T2' comes right after what is hidden" in str(hidden)
    pages = (str(hidden), hidden._repr_html_() or "")
    assert [page.count("Nothing was measured") for page in pages] == [1, 1]
    assert "not detected" not in "".join(pages)


@pytest.mark.usefixtures("unchecked")
def test_what_was_read_in_view_and_then_hidden_still_knows_and_the_answer_is_asked_afterwards(
    tiny_llama: Model, design: Design
):
    settings: Any = {"families": ["v"], "folds": 3, "permutations": 0}
    after = probe(tiny_llama, design, "T2", hide="T1", when="after", **settings)
    in_view = probe(tiny_llama, design, "T2", **settings)
    assert best(after, "paired", "v") == best(in_view, "paired", "v") > 0.9
    leads = after.summary[(after.summary["reading"] == "restart") & (after.summary["split"] == "paired")]
    assert (leads["lead"] > 0.3).all()
    assert not [warning for warning in after.warnings if "restart" in warning]
    assert after.use is not None
    tokens = design.samples[5].transcript.tokens(tiny_llama.tokenizer)
    answer = tokens.part("answer").start
    past = tiny_llama.prefill(tokens[: answer - 1]).mask("T1")
    expected = tiny_llama.extend(past, tokens[answer - 1 : answer])[1][0, -1].log_softmax(-1)[tokens.ids[answer]]
    row = after.use[(after.use["sample"] == 5) & (after.use["condition"] == "retained")].iloc[0]
    assert row["logprob"] == pytest.approx(float(expected), abs=1e-4)
    refused(lambda: probe(tiny_llama, design, "T2", hide="T1", when="later"), "no choice of when")  # pyright: ignore[reportArgumentType]


def test_arms_that_are_the_same_bit_for_bit_say_so(tiny_llama: Model):
    def chat(place: str, digit: int) -> Transcript:
        contents = {"T1": place, "nothing": "so", "T2": str(digit + 2)}
        messages = [{"role": "user", "content": content} for content in contents.values()]
        return Transcript.from_messages(messages, [*contents])

    samples = [Sample(chat(place, digit), (digit,), place) for place in PLACES for digit in (0, 1, 2, 3)]
    design = Design(tuple(samples), DIGITS)
    reading = read_features(tiny_llama, design, "T2", families=["v"])
    assert identical(reading, reading)
    assert not identical(
        reading, read_features(tiny_llama, restarted(tiny_llama, design, ["T1"]), "T2", families=["v"])
    )
    tokens = samples[0].transcript.tokens(tiny_llama.tokenizer)
    assert follows_directly(tokens, "T2", ["nothing"])
    assert follows_directly(tokens, "T2", ["T1", "nothing"])
    assert not follows_directly(tokens, "T2", ["T1"])


def test_use_of_longer_answers_equals_reading_each_conversation_whole(tiny_llama: Model):
    def chat(place: str, word: str) -> Transcript:
        messages = [
            {"role": "user", "content": f"the {place} has {word}."},
            {"role": "assistant", "content": [f"a {place} it is ", {"text": word, "name": "answer"}]},
        ]
        return Transcript.from_messages(messages, ["T1", "T2"])

    words = ["234", "345", "452", "253"]
    samples = [Sample(chat(place, word), (index,), place) for place in PLACES for index, word in enumerate(words)]
    design = Design(tuple(samples), DIGITS)
    assert len(samples[0].transcript.tokens(tiny_llama.tokenizer).part("answer").indices(1000)) > 1
    for hide in ([], ["T1"]):
        use = use_of(tiny_llama, design, hide)
        for arm, number in product(USE_ARMS, (0, 5, len(samples) - 1)):
            whole = samples[number].transcript
            tokens = (whole.without(*hide) if hide and arm == "restart" else whole).tokens(tiny_llama.tokenizer)
            turn, answer = tokens.span("T2").start, tokens.part("answer")
            past = tiny_llama.prefill(tokens[:turn]) if turn else None
            past = past.mask(*hide) if past is not None and arm == "retained" and hide else past
            logits = tiny_llama.extend(past, tokens[turn : answer.stop - 1], logits=answer.stop - answer.start)[1][0]
            said = logits.log_softmax(-1).gather(1, torch.tensor(tokens.ids[answer])[:, None]).sum()
            row = use[(use["sample"] == number) & (use["condition"] == arm)].iloc[0]
            assert row["logprob"] == pytest.approx(float(said), abs=1e-4)


def test_use_reads_nothing_again(tiny_llama: Model, design: Design, monkeypatch: pytest.MonkeyPatch):
    tokens = []
    forward = type(tiny_llama.lanes).forward

    def counted(lanes: Any, ids: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        tokens.append(ids.numel())
        return forward(lanes, ids, *args, **settings)

    monkeypatch.setattr(type(tiny_llama.lanes), "forward", counted)
    rows = [sample.transcript.tokens(tiny_llama.tokenizer) for sample in design.samples]
    distinct = {row[: row.part("answer").start] for row in rows}
    read_features(tiny_llama, design, "T2", hide=["T1"], families=["v"])
    read_features(tiny_llama, restarted(tiny_llama, design, ["T1"]), "T2", families=["v"])
    reading = sum(tokens)
    tokens.clear()
    probe(tiny_llama, design, "T2", hide=["T1"], families=["v"], folds=3, permutations=0)
    # Only the segment itself is read once more, with everything in view.
    assert sum(tokens) == reading + sum(len(row) - row.span("T2").start for row in distinct)


def test_use_is_absent_where_nothing_can_be_asked(tiny_llama: Model, design: Design):
    transcripts = {place: conversation(place, 1) for place in PLACES}
    slots = Design.token_identity(transcripts, tiny_llama.tokenizer, "T2", most=3)
    assert not can_be_asked(tiny_llama, slots, "T2")
    assert not can_be_asked(tiny_llama, design, "T1")
    assert can_be_asked(tiny_llama, design, "T2")
    alike = Design(
        tuple(replace(sample, transcript=conversation("shed", 1), context="shed") for sample in design.samples), DIGITS
    )
    assert not can_be_asked(tiny_llama, alike, "T2")


def test_conversations_of_a_context_may_be_of_any_length_before_what_is_read(tiny_llama: Model):
    """Nothing, a message, or that message and one more: rows of one batch could be empty, or read another's cache."""
    system, digit_turn = {"role": "system", "content": "be kind"}, {"role": "user", "content": "the mill has 4."}
    before = {"role": "user", "content": "a barn it is"}
    chats = [
        Transcript.from_messages([digit_turn], ["T1"]),
        Transcript.from_messages([system, digit_turn], ["system", "T1"]),
        Transcript.from_messages([system, before, digit_turn], ["system", "T0", "T1"]),
    ]
    design = Design.labelled(chats, ["a", "b", "a"], ["one", "one", "one"])
    features = read_features(tiny_llama, design, "T1", families=["v"])
    for number, chat in enumerate(chats):
        expected = tiny_llama.capture(chat, ["v"], segments=["T1"]).stack("v")[1, 0, :, -1].flatten()
        vector = features.at("v", Site(1, None, "last"))[0, number]
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=0)


def test_unknown_segments_wrong_orders_and_counts_are_refused(tiny_llama: Model, design: Design):
    refused(lambda: probe(tiny_llama, design, "T1", permutations=-1), "permutations=-1, an int; give a whole number")
    refused(lambda: probe(tiny_llama, design, "T1", folds=2), "folds=2, an int; give a whole number of at least 3")
    refused(lambda: probe(tiny_llama, design, "T1", seed=-1), "seed=-1")
    refused(lambda: probe(tiny_llama, design, "T22", folds=3), "'T2'")
    refused(lambda: probe(tiny_llama, design, "T1", hide=["T2"], folds=3), "cannot be hidden")


def test_read_outs_put_heads_side_by_side_and_take_mean_and_last():
    stacked = torch.arange(2 * 1 * 2 * 3 * 4, dtype=torch.float).reshape(2, 1, 2, 3, 4)
    read = read_outs(stacked)
    assert read.shape == (1, 2, 2, 8)
    torch.testing.assert_close(read[0, 1, 0], torch.cat([stacked[1, 0, head].mean(0) for head in range(2)]))
    torch.testing.assert_close(read[0, 1, 1], torch.cat([stacked[1, 0, head, 2] for head in range(2)]))
    flat = stacked[:, :, 0]
    torch.testing.assert_close(read_outs(flat)[0, 0, 0], flat[0, 0].mean(0))
