"""Policies on a conversation with tool results: restarted, with spans masked or valueless, and with results pruned."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvprobe.cache.cache import KVCache, PositionMode
from kvprobe.editing import replace_text
from kvprobe.inference.forward import extend, prefill
from kvprobe.inference.model import Model, load
from kvprobe.policies import (
    MaskSpans,
    Policy,
    PruneToolResults,
    Quantise,
    RestartInPlace,
    RestartRebuilt,
    SinkWindow,
    SlidingWindow,
    ZeroValues,
)
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.models import every, tiny_tokenizer
from tests.random_caches import (
    assert_bit_identical,
    assert_close_caches,
    assert_same_ledger,
    copy_of,
    random_tokens,
    relative_difference,
)
from tests.refusals import refused

MESSAGES = [
    {"role": "system", "content": "us 1."},
    {"role": "user", "content": "the 12."},
    {"role": "tool", "content": "a result 1"},
    {"role": "user", "content": "a sum"},
    {"role": "tool", "content": "so 2"},
    {"role": "tool", "content": "us 3"},
    {"role": "user", "content": "then?"},
]
NAMES = ["system", "T1", "tool one", "summary", "tool two", "tool three", "T2"]


@pytest.fixture
def chat() -> Transcript:
    return Transcript.from_messages(MESSAGES, names=NAMES)


TEXTS = dict(zip(NAMES, (message["content"] for message in MESSAGES), strict=True))
SPANS = ["T1", "system", ("T1", "summary"), ("T2",)]


def names_of(segments: str | tuple[str, ...]) -> tuple[str, ...]:
    return (segments,) if isinstance(segments, str) else segments


def assert_restarted(actual: KVCache, expected: KVCache) -> None:
    """The cache of a conversation read anew, but for the names of segments that went, which the ledger still knows."""
    names = actual.ledger.names
    assert set(expected.ledger.names) <= set(names)
    numbered = replace(expected.ledger, segments=expected.ledger.numbered(names), names=names)
    assert_close_caches(actual, replace(expected, ledger=numbered))


# Restarted.


@pytest.mark.parametrize("segments", SPANS, ids=str)
def test_a_rebuilt_restart_equals_a_prefill_without_the_segments(
    tiny: Model, chat: Transcript, segments: str | tuple[str, ...]
):
    restarted = tiny.apply(RestartRebuilt(segments), tiny.prefill(chat))
    expected = tiny.prefill(chat.without(*names_of(segments), mode="contiguous"))
    assert_restarted(restarted, expected)


@pytest.mark.parametrize("segments", SPANS, ids=str)
def test_a_restart_in_place_equals_a_prefill_with_gaps(tiny: Model, chat: Transcript, segments: str | tuple[str, ...]):
    restarted = tiny.apply(RestartInPlace(segments), tiny.prefill(chat))
    expected = tiny.prefill(chat.without(*names_of(segments), mode="gapped"))
    assert_restarted(restarted, expected)
    masked = tiny.apply(MaskSpans(segments), tiny.prefill(chat))
    assert torch.equal(masked.ledger.positions, restarted.ledger.positions)
    assert torch.equal(masked.ledger.tokens, restarted.ledger.tokens)
    assert torch.equal(masked.ledger.segments, restarted.ledger.segments)
    assert masked.ledger.names == restarted.ledger.names
    assert not bool(masked.ledger.recomputed.any())


def test_a_rebuild_after_a_mask_marks_its_slots_as_recomputed(tiny_llama: Model, chat: Transcript):
    masked = tiny_llama.apply(MaskSpans("T1"), tiny_llama.prefill(chat))
    idle = tiny_llama.apply(RestartRebuilt("T1"), masked)
    assert_close_caches(idle, tiny_llama.apply(RestartRebuilt("T1"), tiny_llama.prefill(chat)))
    again = tiny_llama.apply(RestartRebuilt("T1"), idle)
    assert_close_caches(again, idle)


# Spans and values.


def decoded(model: Model, cache: KVCache, segment: str, row: int = 0) -> str:
    """What the live slots of a segment say."""
    held = (cache.ledger.in_segments([segment]) & cache.ledger.live_somewhere)[row]
    return model.tokenizer.decode(cache.ledger.tokens[row, held].tolist())


def test_a_transcript_marks_delimiters(tiny_llama: Model, chat: Transcript):
    tokens = chat.tokens(tiny_llama.tokenizer)
    for name, text in TEXTS.items():
        span = tokens.span(name)
        inside = [not delimiter for delimiter in tokens.delimiters[span]]
        first, last = inside.index(True), len(inside) - inside[::-1].index(True)
        assert all(inside[first:last])
        said = [token for token, is_text in zip(tokens.ids[span], inside, strict=True) if is_text]
        assert tiny_llama.tokenizer.decode(said) == text
    cache = tiny_llama.prefill(chat)
    assert tuple(cache.ledger.delimiters[0].tolist()) == tokens.delimiters


@pytest.mark.parametrize("mode", ["gapped", "contiguous"])
def test_masking_a_segment_hides_or_retains_its_delimiters(tiny_llama: Model, chat: Transcript, mode: str):
    cache = tiny_llama.prefill(chat)
    dropped = tiny_llama.apply(MaskSpans("T1", mode=mode), cache)
    kept = tiny_llama.apply(MaskSpans("T1", delimiters="kept", mode=mode), cache)
    assert decoded(tiny_llama, dropped, "T1") == ""
    assert decoded(tiny_llama, kept, "T1") == "<|im_start|>user\n<|im_end|>\n"
    for masked in (dropped, kept):
        assert decoded(tiny_llama, masked, "summary") == decoded(tiny_llama, cache, "summary")
        places = torch.tensor([int(origin) for origin in masked.ledger.origins[0]])
        for tensor, before in zip(masked.keys + masked.values, cache.keys + cache.values, strict=True):
            assert torch.equal(tensor, before[:, :, places])
        closed = masked.ledger.positions[0].tolist() == list(range(masked.slots))
        assert closed == (mode == "contiguous")


def test_zeroed_values_add_nothing_and_their_keys_stay(tiny: Model, chat: Transcript):
    cache = tiny.prefill(chat)
    inside = cache.ledger.in_segments(["T1"])[0]
    for layers in (None, [0, 2]):
        zeroed = tiny.apply(ZeroValues("T1", layers=layers), cache)
        assert torch.equal(zeroed.ledger.edited[0], inside)
        assert_same_ledger(replace(zeroed.ledger, edited=cache.ledger.edited), cache.ledger)
        for layer in range(cache.n_layers):
            assert torch.equal(zeroed.keys[layer], cache.keys[layer])
            assert torch.equal(zeroed.values[layer][:, :, ~inside], cache.values[layer][:, :, ~inside])
            gone = layers is None or layer in layers
            assert bool((zeroed.values[layer][:, :, inside] == 0).all()) == gone


def test_with_all_earlier_values_zeroed_only_a_querys_own_value_remains(tiny_llama: Model):
    cache = prefill(tiny_llama.lanes, [random_tokens(0, {"T1": 6})])
    before = copy_of(cache)
    zeroed = tiny_llama.apply(ZeroValues("T1"), cache)
    assert_bit_identical(cache, before)
    question = [random_tokens(1, {"T2": 1}, start=6)]
    logits = [extend(tiny_llama.lanes, past, question)[1] for past in (cache, zeroed, cache.mask("T1"))]
    assert relative_difference(logits[1], logits[0]) > 1e-3
    assert relative_difference(logits[1], logits[2]) > 1e-3


# Tool results.


def texts_by_hand(chat: Transcript, model: Model, placeholder: str | None, pruned: list[str]) -> list[int]:
    """The conversation's tokens with the placeholder's in place of each pruned text."""
    tokens = chat.tokens(model.tokenizer)
    ids = [] if placeholder is None else model.tokenizer(placeholder, add_special_tokens=False)["input_ids"]
    edited_ids: list[int] = []
    put: set[str] = set()
    for token, name, delimiter in zip(tokens.ids, tokens.segments, tokens.delimiters, strict=True):
        if name in pruned and not delimiter:
            edited_ids += ids if name not in put else []
            put.add(name)
        else:
            edited_ids.append(token)
    return edited_ids


KEPT_LAST = [(0, ["tool one", "tool two", "tool three"]), (1, ["tool one", "tool two"]), (2, ["tool one"]), (3, [])]


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize(("placeholder", "mode"), [("a.", "contiguous"), ("b result 1", "gapped")])
def test_states_do_not_decay_over_text_that_a_placeholder_stands_for(
    chat: Transcript, kind: str, placeholder: str, mode: PositionMode
):
    model = load(every.tiny(kind), tokenizer=tiny_tokenizer())
    cache = model.prefill(chat)
    pruned = model.apply(PruneToolResults(2, placeholder, mode=mode), cache)
    ids = model.tokenizer(placeholder, add_special_tokens=False)["input_ids"]
    replaced = replace_text(model, cache, "tool one", ids)
    assert_same_ledger(pruned.ledger, replaced.ledger)
    one, other = (model.extend(edited, [7, 8])[1] for edited in (pruned, replaced))
    assert relative_difference(one, other) < 1e-5


@pytest.mark.parametrize(("keep_last", "pruned"), KEPT_LAST)
@pytest.mark.parametrize("placeholder", [None, "a.", "the 1"])
@pytest.mark.parametrize("mode", ["gapped", "contiguous"])
def test_pruned_results_are_replaced_and_the_rest_is_bit_identical(
    tiny_llama: Model, chat: Transcript, keep_last: int, pruned: list[str], placeholder: str | None, mode: str
):
    cache = tiny_llama.prefill(chat)
    before = copy_of(cache)
    edited = tiny_llama.apply(PruneToolResults(keep_last, placeholder, mode=mode), cache)
    assert_bit_identical(cache, before)
    assert edited.ledger.tokens[0].tolist() == texts_by_hand(chat, tiny_llama, placeholder, pruned)
    text = cache.ledger.in_segments(pruned)[0] & ~cache.ledger.delimiters[0]
    new = edited.ledger.in_segments(pruned)[0] & ~edited.ledger.delimiters[0]
    for after, tensor in zip(edited.keys + edited.values, cache.keys + cache.values, strict=True):
        assert torch.equal(after[:, :, ~new], tensor[:, :, ~text])
    assert bool(edited.ledger.live.all())
    if mode == "contiguous":
        assert edited.ledger.positions[0].tolist() == list(range(edited.slots))
        assert edited.ledger.following[0] == edited.slots
    else:
        assert torch.equal(edited.ledger.positions[0, ~new], cache.ledger.positions[0, ~text])
        assert edited.ledger.following[0] == cache.slots
        for name in pruned if placeholder else ():
            inside = edited.ledger.in_segments([name])[0] & new
            start = int(cache.ledger.positions[0, cache.ledger.in_segments([name])[0] & text][0])
            assert edited.ledger.positions[0, inside].tolist() == list(range(start, start + int(inside.sum())))


def test_a_placeholder_attends_to_earlier_slots_but_not_to_pruned_text(tiny: Model, chat: Transcript):
    cache = tiny.prefill(chat)
    edited = tiny.apply(PruneToolResults(1, "the 1"), cache)
    ids = tiny.tokenizer("the 1", add_special_tokens=False)["input_ids"]
    tokens = chat.tokens(tiny.tokenizer)
    # By hand: the head of the conversation, then each placeholder after what still stands before it.
    before = cache.select(slots=torch.arange(cache.slots)[None] < 0)
    for name in ("tool one", "tool two"):
        texts = [
            index for index in range(len(tokens)) if tokens.segments[index] == name and not tokens.delimiters[index]
        ]
        read = [int(origin) for origin in before.ledger.origins[0]]
        head = torch.tensor([[index < texts[0] and index > max(read, default=-1) for index in range(cache.slots)]])
        piece = cache.select(slots=head & ~(cache.ledger.in_segments(["tool one"]) & ~cache.ledger.delimiters))
        keys = tuple(torch.cat(pair, 2) for pair in zip(before.keys, piece.keys, strict=True))
        values = tuple(torch.cat(pair, 2) for pair in zip(before.values, piece.values, strict=True))
        standing = KVCache.of(keys, values, before.ledger.append(piece.ledger))
        before, _ = extend(tiny.lanes, standing, [Tokens.of(ids, name, texts[0])])
    for after, tensor in zip(edited.keys + edited.values, before.keys + before.values, strict=True):
        assert relative_difference(after[:, :, : tensor.shape[2]], tensor) < 1e-5


@pytest.mark.parametrize("placeholder", [None, "a.", "a longer one"])
def test_pruned_and_recomputed_results_equal_a_prefill_of_the_edited_conversation(
    tiny: Model, chat: Transcript, placeholder: str | None
):
    policy = PruneToolResults(1, placeholder, mode="contiguous", provenance="recomputed")
    edited = tiny.apply(policy, tiny.prefill(chat))
    expected = prefill(tiny.lanes, [Tokens.of(texts_by_hand(chat, tiny, placeholder, ["tool one", "tool two"]))])
    assert torch.equal(edited.ledger.tokens, expected.ledger.tokens)
    assert torch.equal(edited.ledger.positions, expected.ledger.positions)
    for pair in zip(edited.keys + edited.values, expected.keys + expected.values, strict=True):
        assert relative_difference(*pair) < 1e-5


@pytest.mark.parametrize("placeholder", ["a.", "us", "b result 1", "a longer one than the text of any result"])
def test_slots_after_a_replaced_result_are_marked_whatever_the_placeholders_length(
    tiny_llama: Model, chat: Transcript, placeholder: str
):
    policy = PruneToolResults(2, placeholder, mode="contiguous", provenance="recomputed")
    ledger = tiny_llama.apply(policy, tiny_llama.prefill(chat)).ledger
    assert not bool(ledger.recomputed[ledger.in_segments(["system", "T1"])].any())
    assert bool(ledger.recomputed[ledger.in_segments(["summary", "tool two", "tool three", "T2"])].all())


def test_a_placeholder_that_does_not_fit_the_positions_of_its_text_is_refused(tiny_llama: Model, chat: Transcript):
    refused(
        lambda: tiny_llama.apply(PruneToolResults(1, "the result is gone"), tiny_llama.prefill(chat)),
        re.compile(r"placeholder has \d+ tokens and does not fit the positions of 'tool one'"),
    )


def test_a_placeholder_needs_a_tokenizer_and_a_result_in_every_row(tiny_llama: Model, chat: Transcript):
    bare = Model(type(tiny_llama.lanes)(tiny_llama.lanes.plain), "bare")
    refused(lambda: bare.apply(PruneToolResults(0, "a."), tiny_llama.prefill(chat)), "no tokenizer")
    rows = [chat, chat.without("tool one")]
    refused(
        lambda: tiny_llama.apply(PruneToolResults(0, "a."), tiny_llama.prefill(rows)),
        "Rows hold different tool results",
    )


def test_rows_with_other_results_are_pruned_as_each_alone(tiny_llama: Model, chat: Transcript):
    rows = [chat.without("tool one"), chat.without("tool three"), chat.without("tool one", "tool two")]
    together = tiny_llama.apply(PruneToolResults(1), tiny_llama.prefill(rows))
    for row, conversation in enumerate(rows):
        alone = tiny_llama.apply(PruneToolResults(1), tiny_llama.prefill(conversation))
        assert torch.equal(together.ledger.tokens[row, ~together.ledger.padding[row]], alone.ledger.tokens[0])


def test_results_of_tools_are_found_by_their_role_unless_they_have_other_names(tiny_llama: Model):
    messages = [{"role": role, "content": "the 1"} for role in ("user", "tool", "assistant", "tool")]
    unnamed = tiny_llama.prefill(messages)
    assert tiny_llama.apply(PruneToolResults(2), unnamed).slots == unnamed.slots
    assert tiny_llama.apply(PruneToolResults(1), unnamed).slots < unnamed.slots
    chat = Transcript.from_messages(messages, names=["a", "b", "c", "d"])
    named = tiny_llama.prefill(chat)
    refused(lambda: tiny_llama.apply(PruneToolResults(1), named), "no segment of a, b, c, d has a name", "'tool'")
    assert tiny_llama.apply(PruneToolResults(0, prefix="b"), named).slots < named.slots


def policies_of(name: str) -> list[Policy]:
    return [
        MaskSpans(name),
        ZeroValues(name),
        PruneToolResults(3),
        SinkWindow(4, 400, mode="gapped", every=None),
        SlidingWindow(400, every=None),
        Quantise(4, tail=400, every=None),
    ]


def test_a_policy_that_acts_once_and_changes_nothing_says_so(tiny_llama: Model, chat: Transcript):
    cache = tiny_llama.prefill(chat).evict("tool one")
    for policy in policies_of("tool one"):
        with pytest.warns(UserWarning, match="acts once and has changed nothing"):
            assert tiny_llama.apply(policy, cache).slots == cache.slots


def test_a_policy_that_changes_something_or_acts_again_says_nothing(
    tiny_llama: Model, chat: Transcript, recwarn: pytest.WarningsRecorder
):
    cache = tiny_llama.prefill(chat)
    for policy in (
        *policies_of("tool one")[:2],
        RestartInPlace("tool one"),
        PruneToolResults(2),
        SinkWindow(4, 400),
        Quantise(4, tail=400),
    ):
        tiny_llama.apply(policy, cache)
    assert not [warning for warning in recwarn if "changed nothing" in str(warning.message)]


@pytest.mark.parametrize("hide", [KVCache.mask, KVCache.evict])
def test_results_that_are_gone_do_not_count(tiny_llama: Model, chat: Transcript, hide: Callable[..., KVCache]):
    cache = hide(tiny_llama.prefill(chat), "tool three")
    for count, left in ((2, ["tool one", "tool two"]), (1, ["tool two"]), (0, [])):
        ledger = tiny_llama.apply(PruneToolResults(count), cache).ledger
        text = ledger.segments[0, ~ledger.delimiters[0] & ledger.live_somewhere[0]]
        assert [name for name in NAMES if "tool" in name and ledger.names.index(name) in text] == left


@pytest.mark.parametrize("placeholder", [None, "a."])
def test_pruning_a_batch_equals_pruning_each_row_alone(tiny_llama: Model, chat: Transcript, placeholder: str | None):
    other = Transcript.from_messages(
        [{**message, "content": message["content"] + " us"} for message in MESSAGES], NAMES
    )
    policy = PruneToolResults(1, placeholder, mode="contiguous")
    together = tiny_llama.apply(policy, tiny_llama.prefill([chat, other]))
    for row, conversation in enumerate((chat, other)):
        alone = tiny_llama.apply(policy, tiny_llama.prefill(conversation))
        held = ~together.ledger.padding[row]
        assert torch.equal(together.ledger.tokens[row, held], alone.ledger.tokens[0])
        assert torch.equal(together.ledger.positions[row, held], alone.ledger.positions[0])
        for tensor, tensor_alone in zip(together.keys + together.values, alone.keys + alone.values, strict=True):
            assert relative_difference(tensor[row][:, held], tensor_alone[0]) < 1e-5
