"""Policies as text and as objects, and how many slots they leave: against caches that policies really acted on."""

import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvprobe import policies
from kvprobe.cache.slots import SlotPlan
from kvprobe.inference.model import Model
from kvprobe.memory import logical
from kvprobe.memory.caches import LayerStore
from kvprobe.memory.config import Config
from kvprobe.memory.numbers import FORMATS
from kvprobe.memory.request import Request
from kvprobe.memory.unloaded import text_model, unloaded
from kvprobe.memory.written import plan_of
from kvprobe.policies import (
    H2O,
    TOVA,
    Guard,
    HeadBudgets,
    LayerBudgets,
    MaskSpans,
    Policy,
    PruneToolResults,
    Quantise,
    RandomEviction,
    RestartInPlace,
    RestartRebuilt,
    Scored,
    SinkWindow,
    SlidingWindow,
    SnapKV,
    ZeroValues,
)
from kvprobe.policies.written import as_policy, kinds
from kvprobe.text.tokens import Tokens
from tests.models import llama
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("unchecked")  # texts name settings of any type

budgets = st.integers(4, 12)
paces = st.sampled_from([None, 1, 1, 2, 3, 5])

scored: st.SearchStrategy[Scored] = st.one_of(
    budgets.flatmap(lambda budget: st.builds(H2O, st.just(budget), st.none() | st.integers(0, budget), every=paces)),
    st.builds(TOVA, budgets, every=paces),
    st.builds(SnapKV, budgets, window=st.integers(1, 4), kernel=st.sampled_from([1, 3]), every=paces),
    st.builds(RandomEviction, budgets, st.integers(0, 3), per_head=st.booleans(), sinks=st.integers(0, 4), every=paces),
)
even: st.SearchStrategy[Policy] = st.one_of(
    st.builds(SlidingWindow, st.integers(1, 12), every=paces),
    st.builds(SinkWindow, st.integers(0, 4), st.integers(1, 8), every=paces),
    scored,
)
"""Policies with the same budget for every layer and head."""
layered = st.builds(LayerBudgets, scored, beta=st.sampled_from([1, 2, 5, 20]))
headed = st.builds(HeadBudgets, scored, floor=st.sampled_from([0.0, 0.2, 0.9]))
quantised = st.builds(
    Quantise, st.integers(1, 8), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 9), every=paces
)  # fmt: skip


def joinable(parts: list[Policy]) -> bool:
    """Whether a chain of them is not refused: random numbers are drawn for positions, which nothing may close up."""
    again = [part for part in parts if part.every is not None]
    return not (any(part.draws_by_position for part in again) and any(part.mode != "gapped" for part in again))


chains = st.lists(even, min_size=2, max_size=3).filter(joinable).map(lambda parts: policies.Chain(tuple(parts)))

PROMPTS = st.integers(1, 20)
NEW = st.integers(0, 5)
few = settings(max_examples=10)


@cache
def built(n_layers: int) -> tuple[Model, tuple[LayerStore, ...]]:
    """A tiny model, and what the budget reads in its config."""
    model = llama(num_hidden_layers=n_layers)
    return model, unloaded(text_model(Config("tiny", model.lanes.plain.config.to_dict()))).layers


def counted(policy: Policy, prompt: int, new: int, n_layers: int, batch: int = 1) -> int:
    """Bytes of the slots that are there after so many tokens. The last token that is generated has not been read."""
    rows = [Tokens.of([(row + 5 * place) % 64 for place in range(prompt)], "text") for row in range(batch)]
    return built(n_layers)[0].generate(rows, policy=policy, max_new_tokens=new + 1, stop=()).cache.footprint


def computed(plan: SlotPlan, prompt: int, new: int, n_layers: int, batch: int = 1) -> int:
    """The same from the settings alone."""
    numbers = FORMATS["float32"]
    request = Request(prompt, new, batch, dtype=numbers, numbers=numbers, plan=plan)
    return sum(logical.held(built(n_layers)[1], request))


# How many slots


@given(policy=even, prompt=PROMPTS, new=NEW, n_layers=st.sampled_from([1, 3]), batch=st.integers(1, 2))
@settings(max_examples=20)
def test_even_budgets_leave_as_many_slots_as_their_settings_say(
    policy: Policy, prompt: int, new: int, n_layers: int, batch: int
):
    assert computed(plan_of(policy), prompt, new, n_layers, batch) == counted(policy, prompt, new, n_layers, batch)


@given(policy=layered, prompt=PROMPTS, new=NEW, n_layers=st.sampled_from([1, 2, 5]))
@few
def test_layer_budgets_leave_as_many_slots_as_their_settings_say(policy: Policy, prompt: int, new: int, n_layers: int):
    assert computed(plan_of(policy), prompt, new, n_layers) == counted(policy, prompt, new, n_layers)


@given(policy=headed, prompt=PROMPTS, new=NEW, n_layers=st.sampled_from([1, 3]))
@few
def test_head_budgets_leave_as_many_slots_as_their_settings_say_but_for_ada_kvs_rounding(
    policy: Policy, prompt: int, new: int, n_layers: int
):
    heads = n_layers * built(n_layers)[0].geometry.n_kv_heads
    slot = computed(SlotPlan(), 1, 0, n_layers) // heads
    off = counted(policy, prompt, new, n_layers) - computed(plan_of(policy), prompt, new, n_layers)
    assert -1.5 * heads * slot <= off <= heads * slot


@given(policy=quantised, prompt=PROMPTS, new=NEW, batch=st.integers(1, 2))
@few
def test_rounding_costs_what_its_settings_say(policy: Policy, prompt: int, new: int, batch: int):
    assert computed(plan_of(policy), prompt, new, 3, batch) == counted(policy, prompt, new, 3, batch)


@given(policy=chains, prompt=PROMPTS, new=NEW)
@settings(max_examples=15)
def test_chains_of_even_budgets_leave_as_many_slots_as_the_tightest(policy: Policy, prompt: int, new: int):
    assert computed(plan_of(policy), prompt, new, 3) == counted(policy, prompt, new, 3)


@given(one=layered | headed, other=layered | headed | even, turned=st.booleans(), prompt=PROMPTS, new=NEW)
@example(SlidingWindow(9), LayerBudgets(TOVA(8)), False, 16, 5)
@example(LayerBudgets(TOVA(8)), SlidingWindow(9), False, 16, 5)
@example(HeadBudgets(TOVA(6), floor=0.0), SlidingWindow(6), False, 20, 3)
@few
def test_a_chain_with_uneven_budgets_is_computed_exactly_or_refused(
    one: Policy, other: Policy, turned: bool, prompt: int, new: int
):
    policy = other | one if turned else one | other
    try:
        plan = plan_of(policy)
    except ValueError:
        return
    assert computed(plan, prompt, new, 5) == counted(policy, prompt, new, 5)


def test_without_a_policy_every_token_stays():
    model, _ = built(3)
    cache = model.generate([Tokens.of(range(9), "text")], max_new_tokens=4, stop=()).cache
    assert cache.footprint == computed(SlotPlan(), 9, 3, 3)


@pytest.mark.parametrize("text", ["SnapKV(50%)", "H2O(30%)", "SinkWindow(2, 40%)", "LayerBudgets(TOVA(50%))"])
@pytest.mark.parametrize("prompt", [3, 20])
def test_a_share_is_of_the_prompt_in_budgets_too(text: str, prompt: int):
    assert computed(plan_of(text).at(prompt), prompt, 3, 3) == counted(as_policy(text), prompt, 3, 3)


@given(policy=even | layered | headed, prompt=st.integers(1, 10**6), new=st.integers(0, 10**6))
def test_no_policy_keeps_more_than_there_is(policy: Policy, prompt: int, new: int):
    plan = plan_of(policy)
    for layer in range(4):
        assert 0 < plan.kept(prompt, new, layer, 4) <= prompt + new


@given(policy=layered, prompt=st.integers(1, 60), new=st.integers(0, 40), layers=st.integers(1, 9))
def test_lengths_that_leave_more_than_a_longer_one_are_known(policy: Policy, prompt: int, new: int, layers: int):
    plan = plan_of(policy)

    def held(context: int, new: int) -> int:
        return sum(plan.kept(context - new, new, layer, layers) for layer in range(layers))

    context = prompt + new
    fuller = plan.fuller_contexts(context, new, layers)
    assert max(held(length, new) for length in (context, *fuller)) == max(
        held(length, new) for length in range(new + 1, context + 1)
    )
    steps = plan.fuller_steps(prompt, new, layers)
    assert max(held(prompt + step, step) for step in (new, *steps)) == max(
        held(prompt + step, step) for step in range(new + 1)
    )


# Text and objects


WITHOUT_BUDGET = (Guard, MaskSpans, PruneToolResults, RestartInPlace, RestartRebuilt, ZeroValues)
SETTINGS = {
    name: [field.name for field in fields(kind) if field.init and not field.kw_only]
    for name, kind in kinds().items()
    if not issubclass(kind, WITHOUT_BUDGET)
}
"""The settings of each policy with a budget, in order."""


@given(policy=even | layered | headed | quantised | chains)
def test_a_policy_written_out_has_the_plan_of_the_policy(policy: Policy):
    assert plan_of(str(policy)) == plan_of(policy)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("SlidingWindow(64)", SlidingWindow(64)),
        (" SinkWindow( 4,window = 60 ) ", SinkWindow(4, 60)),
        ("H2O(64, 8)", H2O(64, 8)),
        ("H2O(64, recent=None)", H2O(64)),
        ("TOVA(64, every=7)", TOVA(64, every=7)),
        ("SnapKV(64)", SnapKV(64)),
        ("SnapKV(64, 8, 5, every=None)", SnapKV(64, 8, 5)),
        ("RandomEviction(64, 0, True, 4)", RandomEviction(64, 0, True, 4)),
        ("LayerBudgets(SnapKV(64))", LayerBudgets(SnapKV(64))),
        ("LayerBudgets(H2O(64), 5)", LayerBudgets(H2O(64), 5)),
        ("HeadBudgets(policy=TOVA(64), floor=0)", HeadBudgets(TOVA(64), 0.0)),
        ("Quantise(4)", Quantise(4)),
        ("Quantise(2, 64, tail=0, every=None)", Quantise(2, 64, 0, every=None)),
        ("SinkWindow(4, 60) | TOVA(32)|H2O(16)", SinkWindow(4, 60) | TOVA(32) | H2O(16)),
        ("SnapKV(50%)", SnapKV(0.5)),
        ("H2O( 12.5 % , 2)", H2O("12.5%", 2)),
        ("SinkWindow(4, '25%') | TOVA(0.5)", SinkWindow(4, 0.25) | TOVA("50%")),
        ("HeadBudgets(SnapKV(30%), floor=0.5)", HeadBudgets(SnapKV(0.3), 0.5)),
    ],
)
def test_texts_are_read_as_python_reads_them(text: str, policy: Policy):
    assert as_policy(text) == as_policy(str(policy)) == policy
    plan, expected = plan_of(text), plan_of(policy)
    assert (plan.evicts, plan.rounds) == (expected.evicts, expected.rounds)


UNREADABLE = [
    "", "   ", "SlidingWindow", "64", "SlidingWindow(", "SlidingWindow)", "SlidingWindow(64", "SlidingWindow(64) |",
    "SlidingWindow(64); TOVA(8)", "x = SlidingWindow(64)", "policies.SlidingWindow(64)", "SlidingWindow(64)(8)",
    "SlidingWindow(64) or TOVA(8)", "SlidingWindow(64) & TOVA(8)", "[SlidingWindow(64)]", "lambda: 0",
    "SlidingWindow(w)",
    "SlidingWindow(60 + 4)", "SlidingWindow(*[64])", "SlidingWindow(window:=64)",
    "SlidingWindow(TOVA(8))", "LayerBudgets(64)", "LayerBudgets('SnapKV(64)')", "SlidingWindow(64)\x00", "\ud800",
    "(" * 300, "-" * 400 + "1", "(SlidingWindow(64) | " * 20,
    "SlidingWindow(64) if 1 else TOVA(8)",
    "await SlidingWindow(64)", "f'{SlidingWindow(64)}'", "SlidingWindow(64)\nTOVA(8)",
]  # fmt: skip
WRONG = [
    ("SlidingWindw(64)", "SlidingWindow"), ("Sliding(64)", "SlidingWindow"), ("eval(1)", "eval"),
    ("Chain(TOVA(8))", "Chain"), ("Scored(8)", "Scored"), ("__import__('os')", "__import__"),
    ("MaskSpans(('m0',))", "MaskSpans"), ("PruneToolResults()", "PruneToolResults"),
    ("RestartInPlace(4)", "RestartInPlace"), ("RestartRebuilt(4)", "RestartRebuilt"),
    ("ZeroValues('m0')", "ZeroValues"),
    ("SlidingWindow()", "window"), ("SinkWindow(4)", "window"), ("SinkWindow(window=4)", "sinks"),
    ("RandomEviction(8)", "seed"), ("Quantise()", "bits"), ("H2O(recent=4)", "budget"), ("LayerBudgets()", "policy"),
    ("SlidingWindow(**{'window': 64})", "no setting called 'None'"), ("SlidingWindow(" * 60, "has 840 characters"),
    ("SlidingWindow(64)" + " " * 500 + "| os.remove('all')", "has 535 characters; it must have at most 500"),
    ("SlidingWindow(64, 64)", "at most 1"), ("SlidingWindow(windw=64)", "window"), ("TOVA(8, evry=1)", "every"),
    ("SlidingWindow(0)", "window=0"), ("SnapKV(101%)", "budget='101%'"), ("SnapKV(0%)", "or a share"),
    ("SnapKV(50)%", "cannot be read"), ("Quantise(50%)", "bits='50%'"), ("SnapKV(5 0%)", "cannot be read"),
    ("SlidingWindow(1.5)", "window=1.5"),
    ("SlidingWindow(True)", "window=True"), ("SlidingWindow('64')", "window"), ("SlidingWindow([64])", "window"),
    ("TOVA(8, every=0)", "every=0"), ("Quantise(9)", "bits=9"), ("LayerBudgets(TOVA(8), 0.5)", "beta=0.5"),
    ("HeadBudgets(TOVA(8), 1.5)", "floor=1.5"), ("HeadBudgets(TOVA(8), True)", "floor=True"),
    ("RandomEviction(8, 0, 'yes')", "per_head='yes', a str; give True or False"),
]  # fmt: skip
UNFIT = [
    ("SlidingWindow(None)", "window=None"), ("Quantise(4, None)", "group=None"),
    ("LayerBudgets(Quantise(4))", "a policy that scores slots, and Quantise(bits=4) does not"),
    ("HeadBudgets(SlidingWindow(64))", "a policy that scores slots, and SlidingWindow(window=64) does not"),
    ("LayerBudgets(HeadBudgets(TOVA(8)))", "would ignore the shares"),
    ("LayerBudgets(TOVA(8), every=2)", "no setting called 'every'"), ("H2O(8, 9)", "recent=9"),
    ("RandomEviction(8, 0, mode='contiguous')", "draw old numbers again"),
    ("SlidingWindow(64, mode='sideways')", "no choice of mode called 'sideways'"),
    ("SlidingWindow(64, provenance='stolen')", "no choice of provenance called 'stolen'"),
    ("Quantise(4, mode='contiguous')", "Quantise moves and recomputes nothing"),
    ("SlidingWindow(64, window=8)", "given its window twice"),
    ("SlidingWindow(window=64, window=8)", "given its window twice"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"), [*((text, "cannot be read; write it as 'SinkWindow(4, 252)'") for text in UNREADABLE), *WRONG]
)
def test_texts_that_cannot_be_read_and_wrong_names_and_values_are_refused_in_a_sentence(text: str, said: str):
    refused(lambda: plan_of(text), said)


@pytest.mark.parametrize(("text", "said"), UNFIT)
def test_settings_that_the_policy_itself_refuses_are_refused_in_a_sentence(text: str, said: str):
    with pytest.raises(Exception):  # noqa: B017, PT011 - a policy's own refusal, or Python's
        made(text)
    refused(lambda: plan_of(text), said)


def made(text: str) -> Policy:
    """The policy that Python makes of a text of these tests."""
    return eval(text, {name: getattr(policies, name) for name in policies.__all__})


@pytest.mark.parametrize("text", ["SlidingWindow({})", "LayerBudgets(TOVA({}))", "HeadBudgets(TOVA({}))"])
def test_a_budget_beyond_all_bounds_is_read_or_refused(text: str):
    assert_read_or_refused(text.format("9" * 400))


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (MaskSpans(("m0",)), "MaskSpans has no budget in slots"),
        (PruneToolResults(2), "PruneToolResults has no budget in slots"),
        (ZeroValues("m0"), "ZeroValues saves no memory"),
        (SlidingWindow(64) | MaskSpans(("m0",)), "MaskSpans has no budget in slots"),
        (SlidingWindow(64) | Quantise(4), "both rounds and evicts"),
        (Quantise(4) | TOVA(8), "both rounds and evicts"),
        (Quantise(4) | Quantise(2), "both rounds and evicts"),
    ],
    ids=str,
)
def test_policies_whose_slots_no_setting_gives_are_refused_in_a_sentence(policy: Policy, said: str):
    refused(lambda: plan_of(policy), said)
    # A segment is printed without its quotes, which is not a text of the policy.
    refused(lambda: plan_of(str(policy)), "cannot be read" if isinstance(policy, ZeroValues) else said)


@pytest.mark.parametrize("policy", [5, None, ["SlidingWindow(64)"], SlidingWindow])
def test_anything_but_a_policy_is_refused_in_a_sentence(policy: Any):
    refused(lambda: plan_of(policy), "give one of kv.policies")


@pytest.mark.parametrize(
    "template",
    [
        "open({path!r}, 'w')",
        "SlidingWindow(open({path!r}, 'w'))",
        "SlidingWindow(__import__('pathlib').Path({path!r}).touch())",
        "LayerBudgets(open({path!r}, 'w'))",
        "SlidingWindow([open({path!r}, 'w') for _ in '1'])",
        "(lambda: open({path!r}, 'w'))()",
        "SlidingWindow(f'{{open({path!r}, \"w\")}}')",
        "SlidingWindow(64) | open({path!r}, 'w')",
        "SlidingWindow(64, every=open({path!r}, 'w'))",
    ],
)
def test_nothing_in_a_text_is_run(template: str, tmp_path: Path):
    path = tmp_path / "ran"
    refused(lambda: plan_of(template.format(path=str(path))), re.compile("no policy called 'open'|cannot be read"))
    assert not path.exists()


_NUMBERS = st.sampled_from(["8", "8", "4", "1", "0", "-1", "None", "1.5", "'a'", "[1]", "1j", "1000000000"])
_VALUES = {
    "every": st.sampled_from(["None", "0", "1", "3"]),
    "mode": st.sampled_from(["'gapped'", "'contiguous'", "'sideways'"]),
    "provenance": st.sampled_from(["'retained'", "'recomputed'", "'stolen'"]),
    "per_head": st.sampled_from(["True", "False"]),
    "slope": st.sampled_from(["0.0", "0.3", "1.0", "-0.1"]),
    "floor": st.sampled_from(["0.0", "0.3", "1.0", "1.1"]),
    "kernel": st.sampled_from(["1", "2", "3", "None"]),
}


@st.composite
def calls(draw: st.DrawFn, depth: int = 0) -> str:
    """A policy written out, with settings of its own that are right or wrong."""
    name = draw(st.sampled_from([*SETTINGS]))
    taken = SETTINGS[name]

    def value(setting: str) -> str:
        if setting == "policy":
            return draw(calls(depth + 1)) if depth < 2 else "TOVA(8)"
        return draw(_VALUES.get(setting, _NUMBERS))

    count = draw(st.integers(0, len(taken)))
    named = draw(st.lists(st.sampled_from([*taken[count:], "every", "mode", "provenance"]), max_size=2, unique=True))
    given = [value(setting) for setting in taken[:count]] + [f"{setting}={value(setting)}" for setting in named]
    return f"{name}({', '.join(given)})"


def assert_read_or_refused(text: str) -> None:
    try:
        plan = plan_of(text)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "\n" not in refusal
        assert len(refusal) < 1000
        return
    for layer in range(3):
        assert 0 <= plan.kept(100, 7, layer, 3) <= 107
    if plan.rounds is not None:
        assert 0 <= plan.rounds.coarse(100, 7) <= 107


@given(text=calls())
@settings(max_examples=400)
def test_a_text_is_read_just_where_python_makes_a_policy_of_it(text: str):
    assert_read_or_refused(text)
    try:
        policy = made(text)
    except Exception:
        refused(lambda: plan_of(text), re.compile("; (it must|write|known|did|give|leave)|, which .* does not give"))
    else:
        expected = plan_of(policy)
        assert (plan_of(text).evicts, plan_of(text).rounds) == (expected.evicts, expected.rounds)


@given(text=st.lists(calls(), min_size=2, max_size=3).map(" | ".join))
@settings(max_examples=200)
def test_any_chain_of_calls_is_read_or_refused(text: str):
    assert_read_or_refused(text)


@given(text=st.text(max_size=40) | st.text(alphabet="SnapKV(64)|,=_.'\"\n \\[]{}0x", max_size=60))
@settings(max_examples=300)
def test_any_text_is_read_or_refused(text: str):
    assert_read_or_refused(text)
