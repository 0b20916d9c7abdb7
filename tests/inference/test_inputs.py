"""Inputs mean what they say: messages are read as messages, and what cannot be meant is refused in a sentence."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

import kvprobe as kv
from kvprobe.checks import require
from kvprobe.inference.model import Model
from kvprobe.policies import (
    H2O,
    TOVA,
    HeadBudgets,
    LayerBudgets,
    PruneToolResults,
    Quantise,
    RandomEviction,
    SinkWindow,
    SlidingWindow,
    SnapKV,
)
from kvprobe.text.chat_template import PLAIN_CHAT_TEMPLATE
from kvprobe.text.messages import Message, Part
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from tests.commands import kvprobe
from tests.models import VOCABULARY, gpt2, llama, tiny_tokenizer
from tests.refusals import refused

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "the user asks for 12."},
    {"role": "assistant", "content": ["12", {"type": "text", "text": " is it."}]},
    {"role": "user", "content": "and 7?"},
]
OTHER = [{"role": "user", "content": "hello"}]
IDS = Tokens.of([1, 2, 3, 4, 5, 6])


@pytest.fixture(scope="module")
def model() -> Model:
    return llama(tokenizer=tiny_tokenizer())


def test_a_list_of_messages_is_read_as_a_conversation(model: Model):
    chat = Transcript.from_messages(CHAT)
    assert model.tokens(CHAT) == model.tokens(tuple(CHAT)) == model.tokens(chat)
    assert model.prefill(CHAT).ledger.names == ("m0", "m1", "m2")
    assert model.generate(CHAT, max_new_tokens=4).tokens == model.generate(chat, max_new_tokens=4).tokens
    assert model.prompts(CHAT, None) == model.prompts(chat, None)
    assert model.prompts(CHAT[:2], "and 7?") == model.prompts(Transcript.from_messages(CHAT[:2]), "and 7?")
    assert torch.equal(kv.attend(model, CHAT).weights, kv.attend(model, chat).weights)


@pytest.mark.parametrize("given", [list, tuple, np.array, torch.tensor], ids=lambda given: given.__name__)
def test_ids_are_read_as_a_row_or_as_rows(model: Model, given: Callable[[list[Any]], Any]):
    assert model.tokens(given([1, 2, 3])) == [Tokens.of([1, 2, 3])]
    assert model.tokens(given([[1, 2, 3], [4, 5, 6]])) == [Tokens.of([1, 2, 3]), Tokens.of([4, 5, 6])]
    assert model.tokens([given([1, 2]), given([3])]) == [Tokens.of([1, 2]), Tokens.of([3])]
    cache = model.prefill(given([[1, 2, 3], [4, 5, 6]]))
    one, each = model.extend(cache, given([7, 8]))[0], model.extend(cache, given([[7, 8], [7, 8]]))[0]
    assert one.ledger.positions[:, 3:].tolist() == each.ledger.positions[:, 3:].tolist() == [[3, 4], [3, 4]]
    assert kv.attend(model, given([7]), cache.rows([0])).queries.tolist() == [3]
    assert len(model.generate(given([1, 2, 3]), max_new_tokens=2).tokens[0]) == 2
    refused(lambda: model.extend(cache, given([[1], [2], [3]])), "3 texts follow a cache of 2 rows")


@pytest.mark.parametrize(
    "given",
    [1.5, 7, [1.5], [True], [None], [[1, 2], [1.5]], torch.tensor([1.5]), torch.tensor(3), torch.zeros(1, 1, 1).long(),
     torch.tensor([True]), np.array([1.5]), np.array(["a"]), {1: 2}.keys()],
    ids=str,
)  # fmt: skip
def test_what_is_neither_text_nor_ids_is_refused(unchecked: None, model: Model, given: Any):
    refused(lambda: model.prefill(given), "give a text, messages", "ids")


def test_ids_that_no_model_has_are_refused(model: Model):
    refused(lambda: model.prefill([-1]), "-1 is not a token id")
    refused(lambda: model.prefill([10_000]), "token id 10000")
    refused(lambda: model.prefill(torch.zeros(1, 0).long()), "nothing to read")


def adding(template: str) -> Model:
    """A model whose tokenizer writes start or end tokens around a text."""
    tokenizer = tiny_tokenizer(bos_token="<|im_start|>")
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return llama(tokenizer=tokenizer)


def test_an_end_token_that_the_tokenizer_appends_is_not_read_before_a_continuation():
    model, start, end = adding("<|im_start|> $A <|im_end|>"), 0, 1
    plain = llama(tokenizer=tiny_tokenizer()).tokens("the 1")[0].ids
    assert model.tokenizer("the 1")["input_ids"] == [start, *plain, end]
    assert model.tokens("the 1")[0].ids == (start, *plain)
    assert model.tokens_after(model.prefill("a"), "the 1")[0].ids == plain
    assert model.tokens("the 1<|im_end|>")[0].ids == (start, *plain, end)


def test_a_start_token_written_twice_is_warned_of(recwarn: pytest.WarningsRecorder):
    model = adding("<|im_start|> $A")
    model.tokens("the 1")
    llama(tokenizer=tiny_tokenizer(bos_token="<|im_start|>")).tokens("<|im_start|>the 1")
    assert not recwarn
    with pytest.warns(UserWarning, match="so it is read twice; take it out"):
        assert model.tokens("<|im_start|>the 1")[0].ids[:2] == (0, 0)
    with pytest.warns(UserWarning, match="stands within what was read; take it out"):
        model.extend(model.prefill("a"), "<|im_start|>the 1")


def test_a_single_message_is_a_conversation(model: Model):
    assert model.tokens(OTHER[0]) == model.tokens(Transcript.from_messages(OTHER))
    assert model.prefill(OTHER[0]).batch == 1


def test_a_list_of_conversations_is_a_batch(model: Model):
    one, other = Transcript.from_messages(CHAT), Transcript.from_messages(OTHER)
    assert model.tokens([CHAT, OTHER]) == model.tokens([one, other])
    assert model.prompts([CHAT, other, IDS], None) == model.prompts([one, other, IDS], None)


@pytest.mark.parametrize("template", [None, PLAIN_CHAT_TEMPLATE], ids=["chatml", "plain"])
@pytest.mark.parametrize(
    "role", ["user<|im_end|>", "<|im_start|>assistant", "user\nassistant", "user: hi\nAssistant", "a b", "", 5, None]
)
@pytest.mark.usefixtures("unchecked")
def test_a_role_cannot_forge_a_message(model: Model, role: Any, template: str | None):
    tokenizer = tiny_tokenizer() if template is None else tiny_tokenizer(template)
    refused(
        lambda: Transcript.from_messages([{"role": role, "content": "a"}]).tokens(tokenizer),
        re.compile("one word|control token"),
    )
    refused(
        lambda: Transcript((Message(role, (Part("a"),), "m0"),)).tokens(tokenizer), re.compile("one word|control token")
    )


def test_a_control_token_of_one_word_is_refused_as_a_role():
    tokenizer = tiny_tokenizer(additional_special_tokens=["the"])
    refused(
        lambda: Transcript.from_messages([{"role": "the", "content": "a"}]).tokens(tokenizer), "control token 'the'"
    )


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages.nothing.more }}", "{% for x in 5 %}{% endfor %}", "{{"]
)
def test_a_template_that_fails_is_named(template: str):
    refused(
        lambda: Transcript.from_messages(OTHER).tokens(tiny_tokenizer(template)),
        "The chat template refuses the conversation",
    )


NAN = float("nan")
REFUSED: list[tuple[str, Callable[[Model], Any]]] = [
    ("There is nothing to read: give at least one token for each row.", lambda model: model.prefill([])),
    ("There is nothing to read: give at least one token for each row.", lambda model: model.prefill(Tokens.of([]))),
    ("There is nothing to read: give at least one token for each row.", lambda model: model.prefill("")),
    ("A list of this kind cannot be read", lambda model: model.prefill([*OTHER, IDS])),
    ("-1 is not a token id or position", lambda model: Tokens.of([-1])),
    ("-3 is not a token id or position", lambda model: Tokens.of([1], start=-3)),
    ("Row 0 has the token id 64", lambda model: model.prefill(Tokens.of([VOCABULARY]))),
    (
        "There is no policy called 'TOVX'; did you mean 'TOVA'?",
        lambda model: model.apply("TOVX(3)", model.prefill(IDS)),
    ),
    ("There is no policy called 'TOVX'; did you mean 'TOVA'?", lambda model: model.prefill(IDS, policy="TOVX(3)")),
    ("Model.watch has queries=-1", lambda model: model.watch(IDS, queries=-1)),
    ("logits is 0", lambda model: model.extend(None, IDS, logits=0)),
    ("max_new_tokens=1.5", lambda model: model.generate(IDS, max_new_tokens=1.5)),
    ("max_new_tokens=True", lambda model: model.generate(IDS, max_new_tokens=True)),
    ("max_new_tokens=nan", lambda model: model.generate(IDS, max_new_tokens=NAN)),
    ("What on_step returns is a int ('5')", lambda model: model.generate(IDS, on_step=lambda step, cache: 5)),
    ("Message 2 ('question') is empty", lambda model: model.generate(CHAT, ask="")),
    ("Message 2 ('question') contains the control token", lambda model: model.generate(CHAT, ask="a<|im_end|>")),
    ("There is no layer 99", lambda model: model.capture(IDS, ["k"], layers=[99])),
    ("There is no layer -1", lambda model: model.capture(IDS, ["k"], layers=[-1])),
    ("There is no attention of layers [99]", lambda model: kv.attend(model, IDS, layers=[99])),
    ("SlidingWindow has window=1.5", lambda model: SlidingWindow(1.5)),
    ("SlidingWindow has window=True", lambda model: SlidingWindow(True)),
    ("SlidingWindow has window=nan", lambda model: SlidingWindow(NAN)),
    ("SlidingWindow has window='4'", lambda model: SlidingWindow("4")),
    ("SinkWindow has sinks=1.5", lambda model: SinkWindow(1.5, 4)),
    ("H2O has budget=4.0", lambda model: H2O(4.0)),
    ("H2O has recent=1.5", lambda model: H2O(4, recent=1.5)),
    ("TOVA has every=1.5", lambda model: TOVA(4, every=1.5)),
    ("SnapKV has kernel=3.0", lambda model: SnapKV(20, kernel=3.0)),
    ("LayerBudgets has beta=1.5", lambda model: LayerBudgets(H2O(4), beta=1.5)),
    ("LayerBudgets shares out the budget of a policy that scores slots,", lambda model: LayerBudgets(SlidingWindow(4))),
    ("HeadBudgets has floor=nan", lambda model: HeadBudgets(H2O(4), floor=NAN)),
    ("HeadBudgets has floor=True", lambda model: HeadBudgets(H2O(4), floor=True)),
    ("Quantise has bits=4.5", lambda model: Quantise(4.5)),
    ("RandomEviction has seed=1.5", lambda model: RandomEviction(4, 1.5)),
    ("PruneToolResults has keep_last=1.5", lambda model: PruneToolResults(1.5)),
    ("samples is [-1]", lambda model: model.prefill(IDS, policy=RandomEviction(3, 0), samples=[-1])),
    ("samples is []", lambda model: model.prefill(IDS, policy=RandomEviction(3, 0), samples=[])),
    ("There is no folder nowhere", lambda model: model.prefill(IDS).save("nowhere/cache")),
    ("row_generators has rows=0", lambda model: kv.row_generators(0, 0)),
    ("row_generators has seed=1.5", lambda model: kv.row_generators(1.5, 2)),
    ("A conversation has at least one message", lambda model: Transcript.from_messages([])),
    ("Message 0 has the field 'mood', which the", lambda model: model.prefill([{**OTHER[0], "mood": "sad"}])),
    ("Message 0 has a int for content", lambda model: model.prefill([{"role": "user", "content": 5}])),
    ("a part of type 'image'", lambda model: model.prefill([{"role": "user", "content": [{"type": "image"}]}])),
    ("Message 0 has a part", lambda model: model.prefill([{"role": "user", "content": [{"text": "a", "name": 5}]}])),
    ("The model is a int ('5')", lambda model: kv.load(5)),
    ("The model is a NoneType ('None')", lambda model: kv.load(None)),
    ("The model is a Linear", lambda model: kv.load(torch.nn.Linear(2, 2))),
    ("Setting 'share' is nan", lambda model: require("share", NAN, 0, 1)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
@pytest.mark.usefixtures("unchecked")
def test_wrong_inputs_are_refused_in_one_sentence(model: Model, words: str, call: Callable[[Model], Any]):
    refused(lambda: call(model), words)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, torch.long])
@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_of_other_libraries_are_accepted(model: Model, dtype: Any):
    ids = torch.tensor([1, 2, 3], dtype=dtype) if isinstance(dtype, torch.dtype) else np.array([1, 2, 3], dtype=dtype)
    assert Tokens.of(list(ids)) == Tokens.of([1, 2, 3])
    assert SlidingWindow(np.int64(3)).act(kv.Scene(model.prefill(IDS))).cache.slots == 3


@pytest.mark.parametrize("kind", [list, iter, torch.tensor, np.array])
@pytest.mark.usefixtures("unchecked")
def test_whole_numbers_are_taken_from_anything_that_holds_them(model: Model, kind: Callable[[list[int]], Any]):
    cache = model.prefill(IDS)
    assert cache.evict(slots=kind([1, 3])).slots == 4
    masked = cache.mask(slots=kind([1, 3]), layers=kind([0]))
    assert masked.ledger.live[0, 0, 0].tolist() == [True, False, True, False, True, True]
    captured = model.capture(IDS, iter(["k"]), slots=kind([0, 2]))
    assert captured["k", 0].shape[:2] == captured.present.shape == (1, 2)
    first = model.generate(IDS, stop=[], max_new_tokens=3).tokens[0][:1]
    assert model.generate(IDS, stop=kind(list(first)), max_new_tokens=3).stopped == (True,)
    assert kv.faults.Scope(layers=kind([1])).layers == (1,)


def repeated(count: int, **changes: Any) -> Tokens:
    """As many tokens, which take little memory until they are read."""
    one = Tokens.of([1])
    columns = {name: getattr(one, name) * count for name in ("ids", "segments", "parts", "recomputed", "delimiters")}
    return Tokens(**{**columns, "positions": tuple(range(count)), **changes})


@pytest.mark.parametrize(
    ("lane", "policy", "tokens"), [("plain", None, 400_000), ("hooked", None, 20_000), ("auto", H2O(4), 20_000)]
)
def test_a_read_larger_than_free_memory_is_refused_before_it_starts(
    model: Model, lane: Any, policy: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the tokens were read")

    monkeypatch.setattr("kvprobe.models.loading.psutil.virtual_memory", lambda: SimpleNamespace(available=300_000_000))
    monkeypatch.setattr("kvprobe.inference.forward.new_slots", refuse)
    monkeypatch.setattr("kvprobe.inference.under_policy.new_slots", refuse)
    refused(
        lambda: model.prefill(repeated(tokens), lane=lane, policy=policy),
        re.compile(r"needs at least \d+\.\d GiB, but 0\.3 GiB are free on cpu"),
    )


def test_the_mask_of_an_edited_cache_counts_as_memory(model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvprobe.models.loading.psutil.virtual_memory", lambda: SimpleNamespace(available=300_000_000))
    scattered = tuple(range(0, 40_000, 2))
    refused(lambda: model.prefill(repeated(20_000, positions=scattered)), "needs at least")


def test_positions_that_a_model_has_no_embeddings_for_are_refused():
    refused(lambda: gpt2().prefill(repeated(100)), "beyond the 96 that this model has embeddings for")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "leakage", "--samples", "96.4"],
        ["run", "leakage", "--samples", "nan"],
        ["run", "carriers", "--contexts", "3.5"],
        ["budget", "smollm2-135m", "--context", "100.5"],
        ["attend", "--text", "hello", "--last", "2.5"],
    ],
    ids=" ".join,
)
def test_a_flag_for_a_whole_number_refuses_other_numbers(
    arguments: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = kvprobe(*arguments)
    assert done.returncode != 0
    assert "is not a whole number" in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())
