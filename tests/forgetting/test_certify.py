"""Certificates: what is known to be left is found, where nothing is left nothing is, and intervals hold."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.forgetting import HiddenSecret, certify
from kvprobe.forgetting.readers import (
    SecretQuestion,
    held_against,
    known_readings,
    read_by_probes,
    readings_from_others,
)
from kvprobe.forgetting.secret_places import SecretPlaces, digits_of
from kvprobe.forgetting.trace import INPUTS, STATE, Slots, trace_of
from kvprobe.forgetting.use import Answers, answers, exchange, use_of, uses
from kvprobe.forgetting.views import View, _tokens, rotated
from kvprobe.forgetting.ways import WAYS, forgotten
from kvprobe.inference.forced import given_answer
from kvprobe.inference.model import Model, load
from kvprobe.report.views.certificate import certificate_page
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.models import llama, tiny_tokenizer
from tests.models.every import tiny
from tests.refusals import refused

CHAT = Transcript.from_messages(
    [
        {"role": "user", "content": "The code is 481."},
        {"role": "assistant", "content": "I see it."},
        {"role": "user", "content": "Then what is the time?"},
    ],
    names=["T1", "reply", "T2"],
)
CASE = HiddenSecret(CHAT, ("T1",), "481")


@pytest.fixture(scope="module")
def model() -> Model:
    return llama(tokenizer=tiny_tokenizer(), intermediate_size=64)


def certified(model: Model, way: Any, **settings: Any) -> Any:
    return certify(model, CASE, way, **{"secrets": 64, "asked": 12, "searched": 2, **settings})


@pytest.mark.parametrize("way", ["restart", "restart in place", "RestartRebuilt('T1')"])
def test_a_restart_leaves_nothing(model: Model, way: str):
    found = certified(model, way, ask="Which?")
    assert found.clean
    assert found.bits == 0.0
    assert found.trace.most == 0.0
    assert [verdict.left for verdict in found.verdicts] == [False] * 5


def test_all_is_found_in_an_untouched_cache(model: Model):
    found = certified(model, "nothing")
    assert found.known[0].digits.mean > 0.95
    assert 2.5 < found.bits <= found.known[0].held
    assert found.answer.endswith(f"Readers read {found.bits:.2f} bits a digit, of {found.known[0].held:.2f}.")
    assert found.search.found.mean == 1.0
    assert found.search.blind < 0.2
    assert not found.stored


def test_a_mask_hides_the_slots_and_leaves_what_others_know(model: Model):
    masked, evicted = (certified(model, way, searched=0) for way in ("mask", "evict"))
    assert masked.stored
    assert not evicted.stored
    gone = CHAT.tokens(model.tokenizer).span("T1")
    for found in (masked, evicted):
        assert found.trace.touched == (1, 2), "keys and values of layer 0 know their own token alone"
        assert all(at >= gone.stop for *_, at in found.trace.places)


def leaking(by: Callable[[str], torch.Tensor], layer: int, slot: int) -> Any:
    """Restart in place, and something of the secret added to V of one slot."""

    def leak(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = WAYS["restart in place"](model, chat, hide)
        secret = "".join(letter for letter in chat.messages[0].text if letter.isdigit())
        values = [value.clone() for value in cache.values]
        values[layer][0, 1, slot] += by(secret)
        return cache.with_parts({"V": values})

    return leak


def on_axes(secret: str) -> torch.Tensor:
    """The first digit as the place of a one."""
    return torch.nn.functional.one_hot(torch.tensor(int(secret[0]) % 8), 8).float()


def test_a_planted_channel_is_found_where_it_is(model: Model):
    found = certified(model, leaking(on_axes, 1, -2), reader="slot", searched=0)
    assert {place[:3] for place in found.trace.places} == {(1, "V", 1)}
    assert len(found.trace.places) == 1
    by_head = found.trace.by_head()
    assert by_head[1, 1] == found.trace.most
    assert by_head.count_nonzero() == 1
    assert found.as_mapping()["heads"] == [(1, 1)]
    assert not found.clean
    assert [one.place for one in found.known] == ["V of layer 1", f"1 of {len(found.trace.positions)} slots of layer 1"]
    assert all(one.above_chance for one in found.known)
    assert not any(one.dealt.above(0.1) or one.restart.above(0.1) for one in found.known)
    assert "a ridge on one slot of one layer" in str(found)
    assert {one["reader"] for one in found.as_mapping()["readers"]} == {"ridge", "slot"}


def rounded_otherwise(way: Any, size: float = 1e-6) -> Any:
    """A way whose numbers are a little different whenever it is carried out, as on a graphics card."""
    rng = torch.Generator().manual_seed(0)

    def carried_out(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = way(model, chat, hide)
        return cache.with_parts({"V": [one + size * torch.randn(one.shape, generator=rng) for one in cache.values]})

    return carried_out


def test_rounding_is_no_trace_and_drowns_none(model: Model):
    clean = certified(model, rounded_otherwise(WAYS["restart"]))
    assert clean.clean
    assert not clean.trace.exact
    assert clean.trace.most == 0.0
    leak = leaking(on_axes, 1, -2)
    exact, noisy = (certified(model, way, searched=0) for way in (leak, rounded_otherwise(leak)))
    assert noisy.trace.places == exact.trace.places
    assert noisy.trace.most == pytest.approx(exact.trace.most, rel=1e-3)
    assert noisy.known[0].above_chance
    assert noisy.bits == pytest.approx(exact.bits, abs=0.05)


def test_rounding_of_a_state_drowns_nothing_in_it_though_its_inputs_do_not_round():
    generator = torch.Generator().manual_seed(0)
    state, inputs = 1e-6 * torch.randn(32, 1, 1, 2000, generator=generator), torch.zeros(32, 1, 1, 4)
    state[:, 0, 0, 0] += (said := torch.arange(32) % 2)
    tokens = _tokens({STATE: state, INPUTS: inputs}, [0], {STATE: 2e-5, INPUTS: 0.0})
    assert abs(float(torch.corrcoef(torch.stack([tokens[:, 0, -1], said.float()]))[0, 1])) > 0.999


def test_the_place_that_is_named_is_that_of_the_difference_beside_it(model: Model):
    """V of layer 0 rounds so much that a larger difference there is none."""
    rng = torch.Generator().manual_seed(0)
    leak = leaking(on_axes, 1, -2)

    def loud(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        first, *others = (cache := leak(model, chat, hide)).values
        return cache.with_parts({"V": [first + torch.randn(first.shape, generator=rng), *others]})

    found = certified(model, loud, searched=0)
    assert {place[:2] for place in found.trace.places} == {(1, "V")}
    assert found.trace.most == pytest.approx(certified(model, leak, searched=0).trace.most)


def test_what_two_slots_say_only_together_is_read_by_a_transformer_and_not_by_the_ridge():
    """The product of the signs of two slots is the parity of a digit; either sign alone is a coin."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1, 240), generator=rng)
    coin = 2 * torch.randint(2, (240,), generator=rng) - 1
    signs = torch.stack([coin, coin * (1 - 2 * (labels[0] % 2))], 1).float()
    tokens = signs[:, None, :, None] * torch.randn(2, 8, generator=rng)
    view = View({(0, "V"): rotated(tokens.flatten(1))}, tokens, "2 slots")
    folds = torch.arange(240) % 4
    question = SecretQuestion(labels, folds, folds == 0, readers=2, seed=0)
    ridge, transformer = (held_against(one, question, view, View.alike(240)) for one in ("ridge", "transformer"))
    assert not ridge.above_chance
    assert transformer.above_chance
    assert transformer.bits.low > 0.5
    for reading in (ridge, transformer):
        assert not reading.restart.above(0.1)
        assert not reading.dealt.above(0.1)


def test_a_channel_of_which_slots_stay_is_no_clean_cache(model: Model):
    def drops(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = WAYS["restart"](model, chat, hide)
        return cache.evict(slots=[int(chat.messages[0].text[12]) % 3 + 1])

    found = certified(model, drops, searched=0)
    assert found.trace.slots_differ
    assert not found.clean


def test_a_state_that_was_not_folded_anew_keeps_it():
    model = load_hybrid()
    attends = [number for number, layer in enumerate(model.geometry.parts) if "K" in layer]
    found = certified(
        model, lambda model, chat, hide: model.prefill(chat).mask(*hide, layers=attends), searched=0, secrets=16
    )
    assert {part for _, part, *_ in found.trace.places} >= {STATE}
    assert certified(model, "restart in place", secrets=16).clean


def load_hybrid(kind: str = "qwen3_next") -> Model:
    tokenizer = tiny_tokenizer()
    return load(tiny(kind, vocab_size=len(tokenizer)), tokenizer=tokenizer)


@pytest.mark.parametrize("lead", ["", "the code is "])
@pytest.mark.parametrize("secrets", [("481", "593", "226"), ("AB-48", "AB-59", "AB-53")])
def test_a_secret_is_answered_token_by_token_from_the_lead_on_though_all_begin_alike(
    model: Model, lead: str, secrets: tuple[str, ...]
):
    caches = [model.prefill(CASE.said(secret)) for secret in secrets]
    found = answers(model, caches, secrets, "Which?", lead)
    led = len(model.tokenizer(lead)["input_ids"])
    for cache, log_probs, said in zip(caches, found.log_probs.tolist(), found.said.tolist(), strict=True):
        (asked,) = model.prompts(cache, "Which?")
        for number, secret in enumerate(secrets):
            ids = model.tokenizer(lead + secret)["input_ids"]
            whole = given_answer(model, cache, asked + Tokens.of(ids[:led], "answer", asked.following), ids[led:])
            assert log_probs[number] == pytest.approx(whole.log_prob, abs=1e-4)
            assert said[number] == whole.likeliest


@pytest.fixture(scope="module")
def gate() -> tuple[Model, tuple[str, ...], list[KVCache], list[KVCache]]:
    """SmolLM2, codes, and its caches of a conversation with each: untouched, and after a restart."""
    model = load("smollm2-135m", device="cpu", dtype="float32")
    chat = Transcript.from_messages(
        [{"role": "user", "content": "The gate code is 48213."}, {"role": "assistant", "content": "I have noted it."}],
        names=["T1", "reply"],
    )
    case = HiddenSecret(chat, ("T1",), "48213")
    secrets = case.secrets(model.tokenizer, 8, np.random.default_rng(0))
    untouched, restarted = (
        [forgotten(model, WAYS[way], case, one) for one in secrets] for way in ("nothing", "restart")
    )
    return model, secrets, untouched, restarted


@pytest.mark.parametrize("lead", ["", "The gate code is"])
def test_what_the_model_says_of_an_untouched_cache_is_said_whatever_the_lead(gate: Any, lead: str):
    """SmolLM2 replies "The gate code is 48213."; a space belongs to the word after it."""
    model, secrets, untouched, restarted = gate
    anew, whole = uses(model, restarted, untouched, secrets, "What is the gate code?", lead)
    assert whole.said.mean == 1.0
    assert whole.effect.low > 10
    assert anew.said.mean == 0.0
    assert abs(anew.effect.mean) < 1e-3


def test_what_the_model_does_not_say_of_an_untouched_cache_either_decides_nothing(model: Model):
    found = certified(model, "mask", secrets=16, searched=0, ask="Which?").verdicts[-1]
    assert found.words in ("is not decided", "it is used")
    assert "With everything in view, too, the model says it in 0.0 %" in found.sentence
    assert "--lead" in found.sentence


def test_secrets_of_another_length_than_most_are_not_asked_for(model: Model):
    secrets = ["481", "593", "226", "817", "935", "104", "673", "259", "48111"]
    caches = [model.prefill(CASE.said(secret)) for secret in secrets]
    use, _ = uses(model, caches, caches, secrets, "Which?", "")
    assert use.effect.clusters == 8
    apart = ["1", "11", "111", "1111", "11111"]
    refused(lambda: uses(model, caches[:5], caches[:5], apart, "Which?", ""), "no 3 of the 5 secrets")


def test_what_only_the_own_cache_says_is_used_and_a_common_lean_is_not():
    rng = np.random.default_rng(0)
    lean = 5 * rng.normal(size=(1, 16)) + 3 * rng.normal(size=(16, 1))
    noise = 0.1 * rng.normal(size=(16, 16))
    said = torch.ones(16, 16, dtype=torch.bool)
    none, some = (use_of(Answers(torch.from_numpy(lean + noise + size * np.eye(16)), said)) for size in (0.0, 2.0))
    assert abs(none.effect.mean) < 0.1
    assert not none.effect.above()
    assert some.effect.low > 1.8
    assert some.effect.high < 2.2
    assert some.chosen.mean == 1.0


def test_the_interval_of_an_exchange_holds_it():
    """Secrets differ in how much they are used, caches and answers in how they lean."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(400):
        effect = np.exp(rng.normal(size=16))
        table = np.diag(effect) + rng.normal(size=(16, 16)) + rng.normal(size=16) + rng.normal(size=(16, 1))
        found = exchange(table)
        held += found.low <= np.exp(0.5) <= found.high
    assert held / 400 > 0.92


@pytest.mark.parametrize("turned", [False, True])
def test_probes_of_other_conversations_read_a_channel_that_all_share_and_no_other(model: Model, turned: bool):
    """The first of three digits. With `turned`, each conversation hides it behind directions of its own."""

    def leak(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = WAYS["restart in place"](model, chat, hide)
        said = "".join(message.text for message in chat.messages if message.segment in hide)
        own = sum(ord(letter) for letter in said if not letter.isdigit())
        directions = torch.randn(10, 8, generator=torch.Generator().manual_seed(own if turned else 0))
        values = [value.clone() for value in cache.values]
        values[1][0, 1] += 5 * directions[int(next(letter for letter in said if letter.isdigit()))]
        return cache.with_parts({"V": values})

    rng = np.random.default_rng(0)
    secrets = CASE.secrets(model.tokenizer, 60, rng)
    caches = [forgotten(model, leak, CASE, secret) for secret in secrets]
    slots = Slots.of(caches)
    trace = trace_of(model, caches, caches[:1], slots)
    (known,) = known_readings(model, caches, slots, trace, secrets, ["ridge"], rng)
    (strange,) = readings_from_others(model, leak, CASE, caches, secrets, 60, ["ridge"], rng)
    assert known.digits.mean > 0.3
    assert (strange.digits.mean > 0.3) == (not turned)
    assert strange.digits.above(0.1) == (not turned)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda case: HiddenSecret(case.chat, (), "481"), "give at least one"),
        (lambda case: HiddenSecret(case.chat, ("T9",), "481"), "T9"),
        (lambda case: HiddenSecret(case.chat, ("T1", "reply", "T2"), "481"), "nothing stays"),
        (lambda case: HiddenSecret(case.chat, ("reply",), "481"), "stands in 'T1', which stays"),
        (lambda case: HiddenSecret(case.chat, ("T1",), "777"), "does not stand in T1"),
        (lambda case: HiddenSecret(case.chat, ("T1",), " "), "is empty"),
    ],
)
def test_a_case_that_cannot_be_forgotten_is_refused(change: Callable[[HiddenSecret], HiddenSecret], words: str):
    with pytest.raises(UserError, match=words):
        change(CASE)


def test_what_cannot_be_certified_is_refused(model: Model):
    with pytest.raises(UserError, match="no digit that could be drawn anew"):
        certify(model, HiddenSecret(CHAT, ("T1",), "code"), "mask")
    with pytest.raises(UserError, match="way to forget"):
        certified(model, "masc")
    with pytest.raises(UserError, match="returns a KVCache of one row"):
        certified(model, lambda model, chat, hide: None)
    full = model.prefill(CHAT)
    with pytest.raises(UserError, match="is not what 'mask' makes"):
        certified(model, "mask", cache=full)
    assert certified(model, "mask", cache=full.mask("T1"), searched=0, secrets=8).secrets == 8


def test_words_take_the_place_of_words(model: Model):
    chat = Transcript.from_messages([{"role": "user", "content": "I like tone."}, *CHAT_LATER], names=["T1", "T2"])
    found = certify(model, HiddenSecret(chat, ("T1",), "tone"), "mask", others=NAMES, asked=8)
    assert not found.known
    known, strange = (verdict.sentence for verdict in found.verdicts[1:3])
    assert known.startswith("Readers learn from 30 secrets or more")
    assert "first and last names" in known
    assert strange == "Give conversations."
    assert found.search is not None
    assert found.search.found.mean == 1.0
    assert "can be found" in [verdict.words for verdict in found.verdicts]
    assert not certify(model, HiddenSecret(chat, ("T1",), "tone"), "restart", others=NAMES).trace.places


def test_words_that_recur_in_secrets_are_read_as_digits_are(model: Model):
    others = [f"{first} {last}" for first in NAMES[:4] for last in NAMES]
    chat = Transcript.from_messages([{"role": "user", "content": "I am tail tool."}, *CHAT_LATER], names=["T1", "T2"])
    case = HiddenSecret(chat, ("T1",), "tail tool")
    found = certify(model, case, "nothing", others=others, searched=0)
    (known,) = found.known
    assert (known.noun, found.secrets) == ("word", 40)
    assert known.digits.mean > 0.9
    assert known.whole.mean > 0.8
    assert not known.dealt.above(known.chance)
    assert "Of the words (chance" in str(found)
    assert f"bits a word, of {known.held:.2f}" in found.answer
    assert "to read words from" in certificate_page(found)
    assert certify(model, case, "restart", others=others, searched=0).verdicts[1].left is False


def test_words_of_which_some_recur_and_others_do_not_are_read_where_they_do():
    assert not len(SecretPlaces.of(NAMES).labels)
    words = [f"{NAMES[number % 3]} {letter}" for number, letter in enumerate("abcdefghijkl")]
    assert SecretPlaces.of(words).labels.tolist() == [[0, 1, 2] * 4]
    assert SecretPlaces.of(words).classes == 3
    assert SecretPlaces.or_which(NAMES).labels.tolist() == [[*range(10)]]


@pytest.mark.parametrize("turned", [False, True])
def test_which_of_some_words_it_is_is_read_by_who_has_never_seen_the_conversation(model: Model, turned: bool):
    """The place of a word in the list. With `turned`, each conversation hides it behind directions of its own."""

    def leak(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = WAYS["restart in place"](model, chat, hide)
        text = " ".join(message.text for message in chat.messages if message.segment in hide)
        which = next(number for number, name in enumerate(NAMES) if name in text)
        own = sum(map(ord, text.replace(NAMES[which], "")))
        directions = torch.randn(10, 8, generator=torch.Generator().manual_seed(own if turned else 0))
        values = [value.clone() for value in cache.values]
        values[1][0, 1] += 5 * directions[which]
        return cache.with_parts({"V": values})

    chat = Transcript.from_messages([{"role": "user", "content": "I like tail."}, *CHAT_LATER], names=["T1", "T2"])
    case = HiddenSecret(chat, ("T1",), "tail")
    found = certify(model, case, leak, others=NAMES, searched=0, conversations=60)
    (strange,) = found.from_others
    assert (strange.noun, strange.digits.clusters) == ("secret", 10)
    assert strange.above_chance == (not turned)
    assert (strange.digits.mean > 0.8) == (not turned)
    assert found.verdicts[2].sentence.startswith("Of the secrets (chance")


def test_a_secret_that_is_found_where_one_guess_in_ten_would_be_is_not_called_missed(model: Model):
    chat = Transcript.from_messages([{"role": "user", "content": "I like tone."}, *CHAT_LATER], names=["T1", "T2"])
    case = HiddenSecret(chat, ("T1",), "tone")
    _, _, _, tried, _ = certify(model, case, "mask", others=NAMES[:8], searched=1).verdicts
    assert tried.words == "is not decided"
    assert tried.sentence.startswith("100% of 1 secrets")


def test_secrets_that_differ_in_letters_beside_their_digits_are_found_by_trying(model: Model):
    chat = Transcript.from_messages([{"role": "user", "content": "I like tone 4."}, *CHAT_LATER], names=["T1", "T2"])
    others = [f"{name} {number}" for number, name in enumerate(NAMES)]
    found = certify(model, HiddenSecret(chat, ("T1",), "tone 4"), "mask", others=others)
    assert found.search.found.mean == 1.0


@pytest.mark.parametrize("reader", ["ridge", "hidden"])
def test_a_reader_that_knows_how_common_digits_are_alone_reads_no_more_than_chance(reader: Any):
    """Years: the first digit is 1 or 2, the second 9 or 0. What is planted is the last."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (4, 96), generator=rng)
    labels[0] = torch.rand(96, generator=rng) > 0.8
    labels[1] = 9 * (torch.rand(96, generator=rng) > 0.3)
    noise = torch.randn(96, 96, generator=rng)
    folds = torch.arange(96) % 4
    question = SecretQuestion(labels, folds, folds >= 0, readers=1, seed=0)
    for planted, above in ((noise, False), (noise + 20 * torch.eye(96)[labels[3]], True)):
        view = View({(0, "V"): planted}, planted[:, None, None], "1 slot")
        reading = held_against(reader, question, view, View.alike(96))
        assert reading.digits.above(0.2)
        assert reading.digits.above(reading.chance) == above
        assert reading.above_chance == above


def test_readers_that_could_not_learn_are_refused_in_place_of_left_out(model: Model):
    with pytest.raises(UserError, match="'slot' learns digits, or words that recur, from 30 secrets"):
        certified(model, "mask", secrets=8, reader="slot")
    chat = Transcript.from_messages([{"role": "user", "content": "I like tone."}, *CHAT_LATER], names=["T1", "T2"])
    with pytest.raises(UserError, match="one secret of 11 learn from 33 other conversations or more, 3 for each"):
        certify(model, HiddenSecret(chat, ("T1",), "tone"), "mask", others=NAMES, conversations=32)
    last = HiddenSecret(CHAT, ("T2",), "time")
    with pytest.raises(UserError, match="the segment after what is hidden"):
        certify(model, last, "mask", others=NAMES, conversations=40)
    with pytest.raises(UserError, match="there would be 29;"):
        certified(model, "mask", conversations=29)
    one = Transcript.from_messages([{"role": "user", "content": "Code 7."}, *CHAT_LATER], names=["T1", "T2"])
    with pytest.raises(UserError, match="there would be 1;"):
        certify(model, HiddenSecret(one, ("T1",), "7"), "mask", conversations=40)


def test_secrets_of_which_some_have_more_digits_have_no_places():
    assert digits_of(["tone 1", "tail 22"]).shape == (0, 2)
    assert digits_of(["a 12", "b 13"]).tolist() == [[2, 3]]


NAMES = ["tail", "team", "told", "tips", "tidy", "tool", "tilt", "toil", "tuna", "tofu"]
CHAT_LATER = [{"role": "assistant", "content": "I see."}]


def test_a_certificate_is_shown_as_text_as_json_and_as_a_page_and_keeps_the_secret(model: Model):
    found = certified(model, "mask", secrets=8, ask="Which?", searched=1)
    shown = [str(found), repr(found), json.dumps(found.as_mapping()), certificate_page(found)]
    assert all("races are left" in one for one in shown)
    assert not any(re.search(r"(?<![\d.])481(?!\d)", one) for one in shown)
    assert "Where</h2>" in shown[3]
    assert "Where</h2>" not in certificate_page(certified(model, "restart", secrets=8))


def by_parity(one: Callable[[KVCache], KVCache], other: Callable[[KVCache], KVCache], way: str = "evict") -> Any:
    """A way after which the parity of the first digit decides between two edits."""

    def decides(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        even = int(chat.messages[0].text[12]) % 2 == 0
        return (one if even else other)(WAYS[way](model, chat, hide))

    return decides


def with_number(layer: int, part: str, slot: int, change: float) -> Callable[[KVCache], KVCache]:
    """One number of one slot, changed."""

    def changed(cache: KVCache) -> KVCache:
        layers = [dict(held) for held in cache.layers]
        layers[layer][part] = layers[layer][part].clone()
        layers[layer][part][0, 0, slot, 0] += change
        return KVCache(tuple(layers), cache.ledger, cache.made_by)

    return changed


def same(cache: KVCache) -> KVCache:
    return cache


def twice_at_one_place(change: float) -> Callable[[KVCache], KVCache]:
    """Slots 1 and 2 stand at one position, and a number of the first is changed."""

    def moved(cache: KVCache) -> KVCache:
        positions = cache.ledger.positions.clone()
        positions[:, 1] = positions[:, 2]
        return with_number(1, "V", 1, change)(replace(cache, ledger=replace(cache.ledger, positions=positions)))

    return moved


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(by_parity(with_number(1, "V", -2, 1e-3), same, "restart"), id="one number"),
        pytest.param(by_parity(KVCache.reindex, lambda one: one.reindex("naive"), "restart in place"), id="rotation"),
        pytest.param(by_parity(twice_at_one_place(0.0), twice_at_one_place(1.0), "restart"), id="one position twice"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_later_tokens_see_is_overlooked(way: Any, dtype: torch.dtype):
    plain: Any = llama().lanes.plain
    model = load(plain.to(dtype), tokenizer=tiny_tokenizer())
    assert not certified(model, way, secrets=16, searched=0).clean
    assert certified(model, "restart", secrets=16).clean


def test_inputs_that_a_convolution_keeps_are_looked_at():
    model = load_hybrid()
    layer = next(number for number, parts in enumerate(model.geometry.parts) if "conv" in parts)
    way = by_parity(with_number(layer, "conv", -1, 1.0), same, "restart")
    assert {part for _, part, *_ in certified(model, way, secrets=16, searched=0).trace.places} >= {INPUTS}


def test_what_attention_stores_beside_a_state_is_looked_at_and_read():
    model = load_hybrid("falcon_h1")
    way = by_parity(with_number(1, "V", -2, 1.0), same, "restart")
    found = certified(model, way, secrets=48, searched=0, reader="attention")
    assert {place[:2] for place in found.trace.places} == {(1, "V")}
    assert all(reading.place.startswith(("V of layer 1", "1 of")) for reading in found.known)
    *_, attention = certified(model, "evict", secrets=30, searched=0, conversations=30, reader="attention").from_others
    assert attention.place.startswith("the last 12 slots of layers 0–3")


def test_a_cache_that_holds_nan_is_refused_and_not_called_clean(model: Model):
    way = by_parity(with_number(1, "V", -2, torch.nan), same, "restart")
    with pytest.raises(UserError, match="holds NaN"):
        certified(model, way, secrets=16, searched=0)


def test_a_state_that_overflows_is_refused_and_not_called_clean():
    """Each write is finite."""
    model = load_hybrid("granitemoehybrid")
    layer = next(number for number, parts in enumerate(model.geometry.parts) if "gain" in parts)

    def huge(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = model.prefill(chat)
        layers = [dict(parts) for parts in cache.layers]
        layers[layer] |= {name: torch.full_like(layers[layer][name], 1e30) for name in ("value", "gain")}
        return replace(cache, layers=tuple(layers))

    with pytest.raises(UserError, match="holds NaN or infinity"):
        certified(model, huge, secrets=16, searched=0)


def test_a_mask_of_the_last_turn_hides_it_and_removes_nothing(model: Model):
    chat = Transcript.from_messages([*CHAT_LATER, {"role": "user", "content": "The code is 481."}], names=["T1", "T2"])
    case = HiddenSecret(chat, ("T2",), "481")
    masked, evicted = (certify(model, case, way, secrets=16, searched=0) for way in ("mask", "evict"))
    assert masked.clean
    assert masked.stored
    assert not masked.forgotten
    assert evicted.forgotten


@pytest.mark.parametrize("heads", [None, [0]])
def test_what_layers_or_heads_hide_of_slots_that_others_see_is_still_stored(model: Model, heads: list[int] | None):
    """Slots after the secret know it in all layers but the first."""

    def hidden(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        left = WAYS["evict"](model, chat, hide)
        if heads:
            blank = [torch.cat([values[:, :1], torch.zeros_like(values[:, 1:])], 1) for values in left.values]
            left = left.with_parts({"K": blank, "V": blank})
        return left.mask("reply", "T2", layers=[1, 2], heads=heads)

    found = certified(model, hidden, secrets=16, searched=0)
    assert found.clean
    assert found.stored > 10
    assert not found.forgotten


def test_a_token_that_the_ledger_names_is_stored_though_no_number_of_its_slot_differs(model: Model):
    def blank(model: Model, chat: Transcript, hide: tuple[str, ...]) -> KVCache:
        cache = model.prefill(chat).rewind("reply")
        return cache.with_parts({part: list(map(torch.zeros_like, cache.part(part))) for part in ("K", "V")})

    found = certified(model, blank, secrets=16, searched=0)
    assert found.clean
    assert 0 < found.stored <= 3


def test_what_differs_by_less_than_single_precision_is_a_trace_in_a_model_of_double_precision():
    plain: Any = llama().lanes.plain
    model = load(plain.double(), tokenizer=tiny_tokenizer())
    way = by_parity(with_number(1, "V", -2, 1e-12), same, "restart")
    assert not certified(model, way, secrets=40).clean
    assert certified(model, "restart", secrets=16).clean


def test_a_cache_whose_slots_are_hidden_is_not_one_from_which_they_were_removed(model: Model):
    with pytest.raises(UserError, match="is not what 'evict' makes"):
        certified(model, "evict", cache=model.prefill(CHAT).mask("T1"))


def test_a_cache_of_which_one_number_differs_is_another(model: Model):
    cache = with_number(1, "V", -1, 1e-4)(model.prefill(CHAT).mask("T1"))
    with pytest.raises(UserError, match="is not what 'mask' makes"):
        certified(model, "mask", cache=cache)


def test_what_is_all_there_is_read_up_to_what_its_places_hold_and_no_further():
    """Few secrets, of which some words are rare: their entropy is less than what one lacks who knows other secrets."""
    labels = torch.randint(0, 10, (3, 120), generator=torch.Generator().manual_seed(0))
    planted = torch.nn.functional.one_hot(labels, 10).float().transpose(0, 1).flatten(1)
    reading = read_by_probes({(0, "v"): planted}, labels, torch.arange(120) % 5)
    counts = torch.stack([torch.bincount(place, minlength=10) for place in labels]).double() / 120
    entropy = float(-(counts * counts.clamp(min=1e-9).log2()).sum(1).mean())
    assert entropy < reading.bits.mean <= reading.held


CALLED = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ m.call['code'] if m.call else '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that writes a call of a tool."""


def with_call(at: int, code: object, **arguments: object) -> Transcript:
    said: list[dict[str, object]] = [
        {"role": "user", "content": "The code is 481."},
        {"role": "assistant", "content": "I see it."},
        {"role": "user", "content": "Then what is the time?"},
    ]
    said[at]["call"] = {"code": code}
    return Transcript.from_messages(said, names=["T1", "reply", "T2"], **arguments)


@pytest.mark.parametrize("code", ["481", 481, ["no", "x481"]])
def test_a_secret_that_stays_beside_the_text_of_a_message_is_refused(code: object):
    refused(lambda: HiddenSecret(with_call(1, code), ("T1",), "481"), "stands in 'reply', which stays")
    tools = [{"type": "function", "function": {"name": "door", "description": "opens by 481"}}]
    refused(lambda: HiddenSecret(with_call(0, "0", tools=tools), ("T1",), "481"), "beside the messages")


@pytest.mark.parametrize("code", ["481", 481])
def test_a_secret_in_a_hidden_call_is_another_in_each_conversation(code: object):
    model = llama(tokenizer=tiny_tokenizer(CALLED), intermediate_size=64)
    case = HiddenSecret(with_call(0, code), ("T1",), "481")
    others = ["123", "234", "345", "456", "567", "678", "789", "321", "432"]
    assert case.said("123").messages[0].fields == {"call": {"code": "123" if code == "481" else 123}}
    texts = {model.tokenizer.decode(case.said(other).tokens(model.tokenizer).ids) for other in others}
    assert len(texts) == len(others)
    assert not any("481" in text for text in texts)
    assert certify(model, case, "mask", others=others, secrets=8, searched=0).trace.places
    assert certify(model, case, "restart", others=others, secrets=8, searched=0).forgotten


def test_a_secret_that_the_model_never_reads_is_refused_and_not_called_forgotten():
    """A template that leaves out thoughts of earlier turns, as those of reasoning models do."""
    model = llama(tokenizer=tiny_tokenizer(CALLED.replace("m.content", "m.content.split('</think>')[-1]")))
    said = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<think>It is 481.</think>Hello."}]
    chat = Transcript.from_messages([*said, {"role": "user", "content": "Then?"}], names=["T1", "reply", "T2"])
    case = HiddenSecret(chat, ("reply",), "481")
    refused(lambda: certify(model, case, "nothing", secrets=8, searched=0), "the same tokens whatever the secret is")
