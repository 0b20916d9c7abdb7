"""Wrong arguments: each public call ends in a result or in one sentence, whatever it is given."""

# pyright: reportArgumentType=false

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import isabstract, isclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvprobe
from kvprobe import faults, policies, saes
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.faults import Fault, Gaussian
from kvprobe.inference.model import Model
from kvprobe.policies.guard import Sound
from kvprobe.policies.written import kinds
from kvprobe.threads import one_thread
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused

SENTENCE = re.compile(r"[^\n]*[^\s.][.?]")
NAN = float("nan")
WRONG: list[Any] = [
    None, True, -1, 0, 1.5, NAN, "", "x", b"x", [], [1.5], [True, False], ["x"], [None], {}, {"a": 1}, (),
    object, np.array([True, False]), torch.tensor([1.5]), Path("/nowhere/x"), {1, 2}, range(0), [[0]],
]  # fmt: skip
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]


@dataclass
class Made:
    """What right calls are made of."""

    model: Model
    cache: KVCache
    other: KVCache


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    model = llama(tokenizer=tiny_tokenizer())
    with one_thread():  # matrices are small
        yield Made(model, model.prefill("a b c"), model.prefill("a c b"))


def right_calls(made: Made) -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """A right call of each, by the names of its arguments."""
    model, cache, other = made.model, made.cache, made.other
    chat, tokens = kvprobe.Transcript.from_messages(CHAT), model.tokens("a b")[0]
    patching = {"model": model, "base": cache, "donor": other, "suffix": "b", "metric": kvprobe.KL()}
    calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (model.tokens, {"text": "a b"}),
        (model.budget, {"context": 8}),
        (model.prefill, {"text": "a b"}),
        (model.watch, {"text": "a b"}),
        (model.apply, {"policy": policies.SinkWindow(1, 1), "start": cache}),
        (model.extend, {"cache": cache, "text": "b"}),
        (model.generate, {"start": cache, "ask": "b", "max_new_tokens": 1}),
        (model.to_hf, {"cache": cache}),
        (model.from_hf, {"past": model.to_hf(cache), "text": "a b c"}),
        (model.as_seen, {"cache": cache}),
        (model.sweep, {"start": cache, "ask": "b", "faults": [Gaussian(scale=0.1)], "max_new_tokens": 1}),
        (model.capture, {"text": "a b", "families": ["v"]}),
        (model.tokens_after, {"cache": cache, "text": "b"}),
        (model.prompts, {"start": cache, "ask": "b"}),
        (cache.mask, {"slots": [0]}),
        (cache.evict, {"slots": [0]}),
        (cache.select, {"slots": [0]}),
        (cache.reindex, {}),
        (cache.fork, {"rows": 2}),
        (cache.rows, {"index": [0]}),
        (KVCache.join, {"caches": [cache, other]}),
        (cache.corrupt, {"fault": Gaussian(scale=0.1)}),
        (cache.patch, {"donor": other, "slots": [0]}),
        (cache.to, {"device": "cpu"}),
        (KVCache.load, {"path": "none"}),
        (kvprobe.attend, {"model": model, "text": "a b"}),
        (kvprobe.attribute, {**patching, "metric": kvprobe.LogProb((1,)), "over": ("layer",)}),
        (kvprobe.patch_sweep, {**patching, "over": ("layer",)}),
        (kvprobe.layer_map, {"model": model, "clean": cache, "damaged": other, "suffix": "b"}),
        (kvprobe.compare, {"model": model, "chat": CHAT, "hide": ["m0"], "ask": "c", "max_new_tokens": 1}),
        (kvprobe.budget, {"model": model.lanes.plain.config.to_dict(), "context": 8}),
        (kvprobe.load, {"source": model.lanes.plain}),
        (kvprobe.row_generators, {"seed": 0, "rows": 1}),
        (kvprobe.scan, {"model": model, "chat": CHAT, "hide": ["m0"]}),
        (kvprobe.Run.load, {"path": "none"}),
        (kvprobe.Probe.load, {"source": "none"}),
        (kvprobe.Transcript.from_messages, {"messages": CHAT}),
        (chat.without, {"mode": "gapped"}),
        (chat.tokens, {"tokenizer": model.tokenizer}),
        (tokens.span, {"segment": "prompt"}),
        (tokens.shifted, {"start": 1}),
        (tokens.answered, {"reply": [1, 2]}),
        (kvprobe.Tokens.of, {"ids": [1], "segment": "a", "start": 0}),
        (kvprobe.common_prefix, {"tokenizer": model.tokenizer, "first": CHAT, "second": CHAT}),
        (kvprobe.read_chat, {"path": "none"}),
        (kvprobe.examine, {"model": model}),
        (cache.rewind, {"slots": 1}),
        (cache.append, {"other": other}),
        (cache.save, {"path": "/nowhere/x"}),
    ]
    return {call.__qualname__: (call, given) for call, given in calls}


def constructors() -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Policies, faults, metrics and what designs are made of, each by a right call."""
    needed: dict[str, Any] = {"budget": 32, "window": 4, "sinks": 1, "bits": 4, "keep_last": 1, "segments": "a"}
    needed |= {"seed": 0, "by": 1, "above": 0, "policy": policies.TOVA(8), "room": 1.0, "factor": 1.0, "matched": True}
    needed["sound"] = Sound((torch.zeros(2, 1, 4),), (torch.ones(2, 1, 4),), 1.0, 0.01, (None,))
    damages = [getattr(faults, name) for name in faults.__all__]
    damages = [kind for kind in damages if isclass(kind) and issubclass(kind, Fault) and not isabstract(kind)]
    made = [*kinds().values(), *damages, faults.Scope, faults.Draws]
    calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
        *((kind, {name: needed[name] for name in required(kind)}) for kind in made),
        (kvprobe.LogitDiff, {"right": 1, "wrong": 2}),
        (kvprobe.LogProb, {"tokens": (1,)}),
        (kvprobe.KL, {"kept": 1}),
        (kvprobe.Trial, {"fault": Gaussian(scale=0.1)}),
        (kvprobe.Target, {"name": "a", "classes": ("x", "y")}),
        (saes.Recipe, {}),
    ]
    return {call.__qualname__: (call, given) for call, given in calls}


def required(call: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def ending(call: Callable[..., object], *given: object, **named: object) -> str:
    """What is wrong with how a call ends; nothing where it returns, or is refused in one sentence."""
    try:
        call(*given, **named)
    except UserError as error:
        return "" if SENTENCE.fullmatch(str(error)) else f"no sentence: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_wrong_arguments_end_in_a_sentence(
    made: Made, unchecked: None, recwarn: pytest.WarningsRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # where a wrong path is a right one
    wrong: list[str] = []
    for name, (call, given) in (right_calls(made) | constructors()).items():
        for argument, parameter in inspect.signature(call).parameters.items():
            for value in WRONG if parameter.kind is not parameter.VAR_KEYWORD else []:
                several = parameter.kind is parameter.VAR_POSITIONAL
                ended = ending(call, value, **given) if several else ending(call, **{**given, argument: value})
                if ended:
                    wrong.append(f"{name}({argument}={value!r}): {ended[:200]}")
    assert not wrong, "\n".join([str(len(wrong)), *wrong])


def test_right_calls_are_right(made: Made, recwarn: pytest.WarningsRecorder):
    without = ("scan", "Transcript.without", "KVCache.append")  # need a probe, a segment and another cache
    for name, (call, given) in (right_calls(made) | constructors()).items():
        if not {"none", "/nowhere/x"} & set(map(str, given.values())) and name not in without:
            call(**given)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda made: made.model.generate(made.cache, ["a", "b"]), "ask=['a', 'b'], a list; give a text or None"),
        (lambda made: made.model.prefill("a", samples=[True]), "a Boolean mask give mask.nonzero().flatten()"),
        (
            lambda made: made.cache.mask(slots=torch.tensor([True, False, True])),
            "a Boolean mask give mask.nonzero().flatten()",
        ),
        (lambda made: made.cache.mask("text", layers=np.array([True])), "a Boolean mask give mask.nonzero().flatten()"),
        (lambda made: made.cache.fork(1.5), "KVCache.fork has rows=1.5, a float; give a whole number"),
        (lambda made: made.cache.reindex("gaped"), "no choice of mode called 'gaped'; did you mean 'gapped'"),
        (lambda made: kvprobe.load("smollm2-135m", device=None), "device=None, a NoneType; give a text or"),
        (lambda made: made.cache.corrupt("zeros"), "one of kvprobe.faults"),
        (lambda made: made.model.generate("a", temperature=NAN), "temperature=nan, a float; give a finite number"),
        (lambda made: made.model.generate("a", max_new_tokens=True), "max_new_tokens=True, a bool; give a whole"),
        (
            lambda made: kvprobe.patch_sweep(made.model, made.cache, made.other, "b", kvprobe.KL),
            "a type; give a function or a KL",
        ),
        (
            lambda made: made.model.generate("a", max_new_tokens=0),
            "max_new_tokens=0, an int; give a whole number of at",
        ),
        (lambda made: made.model.generate("a", max_new_tokens=-3), "max_new_tokens=-3, an int; give a whole number of"),
        (lambda made: policies.SnapKV(1.5), "a share of the prompt's"),
        (lambda made: policies.SinkWindow(-1, 4), "at least 0"),
        (lambda made: policies.SnapKV(8, window=True), "window=True, a bool; give a whole number"),
        (lambda made: Gaussian(scale="x"), "Gaussian has scale='x', a str; give a finite number"),
        (lambda made: Gaussian(scale=NAN), "scale=nan"),
        (lambda made: faults.Scope(layers=torch.tensor([True])), "a Boolean mask give mask.nonzero().flatten()"),
        (lambda made: kvprobe.plots.leak(None), "leak has probing=None, a NoneType; give a Probing"),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_give(
    call: Callable[[Made], object], said: str, made: Made, unchecked: None
):
    refused(lambda: call(made), said)


@pytest.mark.parametrize("number", [2, np.int64(2), np.uint8(2), torch.tensor(2)], ids=repr)
def test_numbers_of_numpy_and_torch_are_pythons_own(number: Any, made: Made, unchecked: None):
    assert made.cache.fork(number).batch == 2
    assert type(faults.Scope(count=number).count) is int
    assert made.model.generate("a", max_new_tokens=number).tokens == made.model.generate("a", max_new_tokens=2).tokens


@pytest.mark.parametrize("layers", [np.array([0, 2]), torch.tensor([0, 2]), (0, 2), iter([0, 2]), range(0, 3, 2)])
def test_lists_of_numbers_are_arrays_tensors_and_whatever_is_gone_through(layers: Any, made: Made):
    assert made.model.capture("a b", ["v"], layers=layers).tensors.keys() == {("v", 0), ("v", 2)}


def test_a_text_as_a_path_is_one(tmp_path: Path, made: Made):
    made.cache.save(str(tmp_path / "cache"))
    assert KVCache.load(str(tmp_path / "cache")).slots == made.cache.slots
