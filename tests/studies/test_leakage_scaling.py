"""The leakage_scaling study: known answers for its readers and curves, and a whole run on a tiny model."""

from collections import Counter
from itertools import product
from math import log2

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.visibility import additive
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.models.hf_cache import CacheLayer, past_key_values
from kvprobe.probing.readers import Known, scored
from kvprobe.shipped import shipped_entries
from kvprobe.stats import SHARE, means
from kvprobe.studies.leakage_scaling import Config, Reader
from kvprobe.studies.leakage_scaling.collect import CODES, GRAMMAR, SHARED, UNTRAINED, worlds_of
from kvprobe.studies.leakage_scaling.conclude import conclude
from kvprobe.studies.leakage_scaling.curves import asymptote, points
from kvprobe.studies.leakage_scaling.readers import read
from kvprobe.studies.leakage_scaling.reading import (
    RESTART,
    RETAINED,
    STATES,
    ArmState,
    caches_of,
    digit_ids,
    last_slots,
    places_of,
    read_batch,
    token_rows,
    vectors,
)
from kvprobe.studies.leakage_scaling.soft import SoftPrompt, soft_reader
from kvprobe.studies.leakage_scaling.study import STUDY
from kvprobe.tasks.grammar import HELD_OUT, draw, random_codes
from kvprobe.text.tokens import Tokens
from tests.models import any_model, llama, tiny_tokenizer
from tests.studies.runs import close

SMALL = Config(
    conversations=(40,),
    tested=16,
    arms=("turn", "summary", "masked"),
    readers=("pooled", "asked", "soft"),
    shared=8,
    untrained=False,
    batch=104,
)
MODEL, HOLD = "wordy", [True, True]
ARMS = Config().arms
LINEAR: tuple[Reader, ...] = ("pooled", "slot", "attention")
TRAINED: tuple[Reader, ...] = (*LINEAR, "hidden", "transformer")


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert set(findings.values("read", "world")) == {GRAMMAR, SHARED}
    assert set(findings.values("read", "held_out", world=GRAMMAR)) == set(HELD_OUT)
    assert set(findings.values("leak", "arm")) == set(SMALL.arms) - {"turn"}
    assert set(findings.values("leak", "reader")) == set(SMALL.readers)


def test_what_is_held_out_is_new_and_no_code_comes_twice():
    world = worlds_of(SMALL)[0]
    training, new = world.conversations[:40], world.conversations[40:]
    assert len({one.code for one in world.conversations}) == len(world.conversations)
    for test in world.tests:
        tested = new[test.places]
        for name, of in (("wording", lambda one: one.wording), ("subject", lambda one: one.subject)):
            shares = {of(one) for one in training} & {of(one) for one in tested}
            assert not shares if test.held_out in (name, "both") else shares
        sizes = Counter(test.clusters).values()
        assert max(sizes) <= min(sizes) + 1 or test.held_out == "nothing"


def test_texts_hold_the_code_where_they_should_alone():
    lists = shipped_entries("tasks/grammar")
    assert len({text for text in lists["statements"] if text.count("{code}") == 1}) == len(lists["statements"]) > 10
    assert not any("{code}" in str(text) for name in ("summaries", "requests", "turns") for text in lists[name])
    for chat in draw(random_codes(5, np.random.default_rng(0)), np.random.default_rng(1)):
        there = {message.segment for message in chat.transcript().messages if chat.code in message.said}
        assert there == {"T2", "ask"}


def test_batched_slots_equal_one_pass_of_the_model_under_an_explicit_mask(wordy: Model):
    rng = np.random.default_rng(3)
    rows = token_rows(wordy, draw(random_codes(3, rng), rng))
    assert len({len(row) for row in rows}) > 1
    sources = {place.source for place in places_of(ARMS)}
    caches = caches_of(wordy, rows, sources)
    row = rows[1]
    hides = {
        "turn": set[str](),
        "summary": set[str](),
        "masked": {"T3", "T4"},
        "later": {"T3", "T4"},
        "late": set[str](),
        RESTART: {"summary", "T3", "T4"},
    }
    for place in sources:
        blind = hides[RESTART if place.state == RESTART else place.arm]
        seen = torch.ones(len(row), len(row), dtype=torch.bool).tril()
        for query, name in enumerate(row.segments):
            if name in blind:
                seen[query] &= torch.tensor([other != "T2" for other in row.segments])
        layers = [CacheLayer() for _ in range(wordy.geometry.n_layers)]
        with torch.no_grad():
            wordy.lanes.plain(
                input_ids=torch.tensor([row.ids]),
                position_ids=torch.tensor([row.positions]),
                attention_mask=additive(seen[None, None], 1, torch.float32),
                past_key_values=past_key_values(layers),
                use_cache=True,
            )
        segment = {"turn": "T2", "summary": "summary", "later": "T4"}.get(place.arm, "T3")
        ledger = caches[place].ledger
        there = ledger.in_segments([segment])[1]
        for layer, whole in enumerate(layers):
            assert whole.keys is not None
            assert whole.values is not None
            close(caches[place].keys[layer][1][:, there], whole.keys[0][:, row.span(segment)])
            close(caches[place].values[layer][1][:, there], whole.values[0][:, row.span(segment)])


def test_keys_are_read_as_they_were_before_rotation(wordy: Model):
    (row,) = wordy.tokens("The code is here.")
    first = wordy.prefill(row)
    moved, lengths = vectors(wordy, wordy.prefill(row.shifted(9)), row.names[0])
    same, _ = vectors(wordy, first, row.names[0])
    close(moved[:, 0], same[:, 0])
    width = same.shape[-1] // 2
    close(same[0, 0, 0, :width], first.keys[0][0, :, 0].flatten())
    assert int(lengths[0]) == len(row)
    assert last_slots(same, lengths, len(row) + 1)[:, :, 0].abs().max() == 0
    close(last_slots(same, lengths, 2), same[:, :, -2:])


def test_what_is_asked_is_the_models_own_answer(wordy: Model):
    rng = np.random.default_rng(5)
    conversations = draw(random_codes(2, rng), rng)
    said = read_batch(wordy, conversations, ("summary",), (), ("asked",))
    tokens = token_rows(wordy, conversations)[1]
    begins = tokens.span("T3").start
    cache = wordy.prefill(tokens[:begins]).mask("T2")
    question = tokens[: tokens.part("answer").stop]
    question = question[question.span("ask")].shifted(begins)
    _, logits = wordy.extend(cache, question, logits=6)
    expected = logits[0, :5].log_softmax(-1)
    digits = wordy.tokenizer("0123456789", add_special_tokens=False)["input_ids"]
    close(said["asked.summary.retained"][1], expected[:, digits])


def planted(kind: str, seed: int = 0, conversations: int = 320) -> Known:
    """Two digits, each added as one of ten directions to one slot of one layer of noise; of another basis in each
    conversation, where the channel is `rotated`; or not at all."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (2, conversations), generator=rng)
    features = 0.1 * torch.randn(conversations, 2, 3, 24, generator=rng)
    if kind != "nothing":
        signal = torch.eye(24)[labels[0]] + torch.eye(24)[10 + labels[1]]
        if kind == "rotated":
            bases = torch.linalg.qr(torch.randn(conversations, 24, 24, generator=rng))[0]
            signal = torch.einsum("nij,nj->ni", bases, signal)
        features[:, 1, 2] += signal
    folds = torch.tensor([0, 0, 1, 2, 2, 2, 2, 2]).repeat(conversations // 8)
    return Known(features, labels, folds, seed)


def seen_by(reader: Reader, known: Known) -> Known:
    """As a reader of averages, or of slots, gets it."""
    pooled = known.features.mean(2) if reader in ("pooled", "hidden") else known.features
    return Known(pooled, known.labels, known.folds, known.seed)


@pytest.mark.parametrize("reader", TRAINED)
def test_every_reader_reads_a_planted_linear_channel(reader: Reader):
    known = seen_by(reader, planted("linear"))
    right, bits = scored(known, read(reader, known))
    assert float(right.mean()) > 0.8
    assert float(bits.mean()) > 0.6 * log2(10)


@pytest.mark.parametrize("kind", ["rotated", "nothing"])
@pytest.mark.parametrize("reader", LINEAR)
def test_no_linear_reader_reads_a_channel_that_is_rotated_in_each_conversation(reader: Reader, kind: str):
    known = seen_by(reader, planted(kind))
    right, bits = scored(known, read(reader, known))
    assert float(right.mean()) < 0.2  # of 160 digits, four standard errors above chance
    assert float(bits.mean()) < 0.1


def test_a_reader_that_is_told_nothing_loses_little_and_a_model_that_knows_is_believed():
    known = planted("nothing")
    logits = torch.randn(320, 2, 10, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    noise = Known(logits, known.labels, known.folds, 0)
    assert abs(float(scored(noise, read("asked", noise))[1].mean())) < 0.1
    truth = torch.nn.functional.one_hot(known.labels.T, 10)
    biased = logits + 4 * truth + 8 * torch.arange(10) / 10  # a strong liking for large digits is calibrated away
    knows = Known(biased, known.labels, known.folds, 0)
    assert float(scored(knows, read("asked", knows))[0].mean()) > 0.85


def with_digits(model: Model, digits: torch.Tensor) -> KVCache:
    """Slots of random tokens, one of which holds, in the last layer, a value that makes the model say a digit, at a
    key that no query looks for yet."""
    rng = torch.Generator().manual_seed(3)
    texts = torch.randint(60, (digits.shape[1], 12), generator=rng).tolist()
    cache = model.prefill([Tokens.of(text) for text in texts])
    says = model.lanes.plain.get_output_embeddings().weight[digit_ids(model)].detach()
    by_kv_head = model.lanes.output_weights(1).unflatten(0, (2, 2)).sum(1)
    written = torch.stack([torch.linalg.lstsq(out.mT, (says - says.mean(0)).mT).solution.mT for out in by_kv_head])
    written *= 16 / written.norm(dim=-1, keepdim=True)
    cache.keys[1][:, :, 3] = 2 * torch.randn(2, 8, generator=rng)
    cache.values[1][:, :, 3] = written[:, digits[0]].transpose(0, 1)
    return cache


def test_a_soft_prompt_finds_what_the_model_can_be_made_to_say_and_no_more():
    model = llama(tokenizer=tiny_tokenizer(), num_hidden_layers=2, initializer_range=0.3)
    codes = torch.randint(10, (1, 96), generator=torch.Generator().manual_seed(0))
    known = Known(torch.arange(96), codes, torch.tensor([0, 0, 1, 2, 2, 2]).repeat(16), 0)
    shown = with_digits(model, codes)
    evidence, again = (soft_reader(model, shown, codes)(known) for _ in range(2))
    assert torch.equal(evidence.tested, again.tested)
    assert scored(known, evidence)[0][0].mean() > 0.8
    of_others = soft_reader(model, with_digits(model, codes.roll(7, 1)), codes)(known)
    assert float(scored(known, of_others)[0].mean()) < 0.25
    assert all(weight.requires_grad and weight.grad is None for weight in model.lanes.plain.parameters())


def test_a_soft_prompt_is_read_as_embeddings_of_its_own_before_the_digits():
    model = llama(tokenizer=tiny_tokenizer())
    texts, codes, plain = ([5, 6, 7, 8], [9, 3]), torch.tensor([[1, 2], [3, 4], [5, 6]]), model.lanes.plain
    prompt = SoftPrompt(model, model.prefill([Tokens.of(text) for text in texts]), codes)
    said = prompt(torch.tensor([1]))
    embeddings, digits = plain.get_input_embeddings(), digit_ids(model)
    before, after = (embeddings(torch.tensor(ids)) for ids in (texts[1], [digits[2], digits[4]]))
    expected = plain(inputs_embeds=torch.cat([before, prompt.vectors * prompt.scale, after])[None]).logits[:, -3:]
    close(said.detach(), expected[..., digits].detach())


def curve_of(rng: np.random.Generator, truth: np.ndarray, clusters: int = 15) -> list[np.ndarray]:
    """Points around a curve: clusters differ by a common amount, by one of their own at each point, and training sets
    by another."""
    common = rng.normal(0, 0.05, clusters)
    draws = [2] * (len(truth) - 1) + [1]
    sizes = 0.04 * 0.6 ** np.arange(len(truth))
    return [
        value + common + rng.normal(0, size, (many, 1)) + rng.normal(0, 0.03, (many, clusters))
        for value, many, size in zip(truth, draws, sizes, strict=True)
    ]


def test_intervals_of_curves_and_of_what_they_tend_to_cover():
    rng, counts = np.random.default_rng(0), (48, 150, 500, 1500, 5000, 10_000)
    truth = 0.9 - 2.0 * np.array(counts, float) ** -0.4
    covered, limits = [], []
    for _ in range(150):
        curve = curve_of(rng, truth)
        covered += [value.low <= mean <= value.high for value, mean in zip(points(curve), truth, strict=True)]
        limit = asymptote(counts, curve, log2(10))
        assert limit is not None
        limits.append(limit.low <= 0.9 <= limit.high)
    assert np.mean(covered) > 0.92
    assert np.mean(limits) > 0.92


def test_a_point_whose_clusters_all_read_everything_may_do_so_by_chance():
    (point,) = points([np.ones((2, 15))], SHARE)
    _, low, _ = means(np.ones(15), np.arange(15), SHARE)
    assert (point.low, point.high) == (pytest.approx(float(low)), 1)
    assert point.low < 0.9


def test_a_flat_curve_has_a_limit_and_one_that_rises_has_none_that_is_known():
    rng, counts = np.random.default_rng(1), (48, 150, 500, 1500, 5000, 10_000)
    slow = 3.3 - 4 * np.array(counts, float) ** -0.1
    flat, rising = (asymptote(counts, curve_of(rng, truth), 3.3) for truth in (np.zeros(6), slow))
    assert flat is not None
    assert rising is not None
    assert flat.low <= 0 <= flat.high < 0.5
    assert rising.high == pytest.approx(3.3)
    assert asymptote(counts[:3], curve_of(rng, np.zeros(3)), 3.3) is None


def test_a_curve_that_rises_late_or_all_at_once_follows_no_power_law_and_has_no_limit():
    rng, counts = np.random.default_rng(2), (48, 150, 500, 1500, 5000, 10_000)
    for truth in ([0, 0, 0, 0.4, 0.8, 1.0], [0, 0.6, 2.0, 3.0, 3.2, 3.2]):
        assert asymptote(counts, curve_of(rng, np.array(truth)), 3.3) is None


EXAMPLE = Config(conversations=(48, 150, 500, 1500), readers=("pooled", "hidden", "asked", "soft"), prompted=500)


def made_up(rng: np.random.Generator, leak: float = 0.6, used: float = 0.4) -> dict[str, pd.DataFrame]:
    """Readers gain `leak` bits of retained slots of the summary, half of it of others, and nothing of a restart."""
    rows = []
    worlds = {GRAMMAR: (EXAMPLE.readers, HELD_OUT), SHARED: (("pooled",), (CODES,)), UNTRAINED: (("pooled",), HELD_OUT)}
    for world, (readers, kinds) in worlds.items():
        for reader, kind, place, number, draw_number, cluster, digit in product(
            readers, kinds, places_of(ARMS), range(4), range(2), range(9), (1, 2)
        ):
            if reader == "soft" and EXAMPLE.conversations[number] > EXAMPLE.prompted:
                continue
            gain = 0.0 if place.state == RESTART else leak * (1.0 if place.arm == "summary" else 0.5)
            bits = gain * (1 - 0.5**number) + rng.normal(0, 0.02)
            keys = {"world": world, "reader": reader, "held_out": kind, "arm": place.arm, "state": place.state}
            known = {"conversations": EXAMPLE.conversations[number], "draw": draw_number, "cluster": cluster}
            rows.append({**keys, **known, "digit": digit, "bits": bits, "right": 0.1 + bits / 5})
    use = [
        {"arm": arm, "state": state, "held_out": kind, "cluster": cluster}
        | {"logprob": -9 + used * (state == RETAINED) + rng.normal(0, 0.05)}
        for arm, state, kind, cluster in product(ARMS, STATES, HELD_OUT, range(9))
        if ArmState(arm, state) in places_of(ARMS)
    ]
    reach = pd.DataFrame({"arm": ["masked"] * 3, "layer": range(3), "differs": [0.0, 0.0, 0.3]})
    return {"samples": pd.DataFrame(rows), "use": pd.DataFrame(use), "reach": reach}


def example() -> tuple[Config, Conclusion]:
    return EXAMPLE, conclude(made_up(np.random.default_rng(0)), EXAMPLE, any_model())


def noise(rng: np.random.Generator) -> Conclusion:
    """Nothing is left, and nothing is used."""
    return conclude(made_up(rng, 0.0, 0.0), EXAMPLE, any_model())


def test_planted_numbers_are_found():
    findings = example()[1].findings
    strict = {"world": GRAMMAR, "held_out": "both", "reader": "pooled"}
    for kind in ("subject", "both"):
        leak = findings.at("leak", arm="summary", reader="pooled", held_out=kind)
        assert leak.mean == pytest.approx(0.6 * 0.875 / 5, abs=0.01)
        assert findings.at("leak", arm="late", reader="pooled", held_out=kind).above()
    assert findings.at("used", arm="masked").mean == pytest.approx(0.4, abs=0.1)
    leak = findings.finding("leak", arm="masked", reader="pooled", held_out="both")
    assert leak.comparisons == 2 * 4 * len(EXAMPLE.readers)
    limit = findings.at("limit", arm="summary", state=RETAINED, **strict)
    assert limit.low < 0.6 < limit.high


def test_a_restart_that_can_be_read_is_a_control_that_fails():
    tables = made_up(np.random.default_rng(0))
    states = tables["samples"]["state"].map({RETAINED: RETAINED, RESTART: RETAINED})
    leaky = tables["samples"].loc[lambda rows: rows["arm"] == "summary"].assign(state=states)
    both = pd.concat([tables["samples"][tables["samples"]["state"] == RETAINED], leaky.assign(state=RESTART)])
    kept = both.groupby([column for column in both if column not in ("bits", "right")], as_index=False).mean()
    controls = conclude({**tables, "samples": kept}, EXAMPLE, any_model()).controls
    assert [control.holds for control in controls] == [False, True]
