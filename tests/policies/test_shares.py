"""Budgets that are shares of the prompt."""

import math

import pytest
import torch

from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.policies import H2O, TOVA, HeadBudgets, Policy, RandomEviction, Scene, SinkWindow, SlidingWindow, SnapKV
from kvprobe.policies.written import as_policy
from tests.policies.scenes import random_scene
from tests.random_caches import assert_bit_identical, assert_same_ledger, random_tokens
from tests.refusals import refused

SHARED: list[tuple[str, Policy, Policy]] = [
    ("SnapKV(50%)", SnapKV(5, window=2), SnapKV(7, window=3)),
    ("SnapKV(50%, window=2)", SnapKV(5, window=2), SnapKV(7, window=2)),
    ("H2O(0.5)", H2O(5), H2O(7)),
    ("TOVA('50%')", TOVA(5), TOVA(7)),
    ("RandomEviction(50%, 3, sinks=1)", RandomEviction(5, 3, sinks=1), RandomEviction(7, 3, sinks=1)),
    ("HeadBudgets(H2O(50%))", HeadBudgets(H2O(5)), HeadBudgets(H2O(7))),
    ("SinkWindow(2, 30%)", SinkWindow(2, 3), SinkWindow(2, 4)),
    ("SlidingWindow(80%) | TOVA(50%)", SlidingWindow(8) | TOVA(5), SlidingWindow(11) | TOVA(7)),
]
"""Texts, and the same policies for prompts of 10 and of 14 tokens."""


@pytest.mark.parametrize(("text", "short", "long"), SHARED)
def test_a_share_is_of_each_rows_own_prompt_and_stays_that_number(
    tiny_gemma: Model, text: str, short: Policy, long: Policy
):
    prompts = [random_tokens(count, {"T1": count}) for count in (10, 14)]
    for prompt, policy in zip(prompts, (short, long), strict=True):
        shared, expected = (
            generate(tiny_gemma.lanes, [prompt], max_new_tokens=4, stop=(), policy=given) for given in (text, policy)
        )
        assert_bit_identical(shared.cache, expected.cache)
        assert shared.trace[-1].policies == (str(policy),)
    together = generate(tiny_gemma.lanes, prompts, max_new_tokens=4, stop=(), policy=text)
    assert together.trace[0].policies == (str(short), str(long))
    for row, policy in enumerate((short, long)):
        alone = generate(tiny_gemma.lanes, [prompts[row]], max_new_tokens=4, stop=(), policy=policy, samples=[row])
        assert together.tokens[row] == alone.tokens[0]
        held, held_alone = (Scene(done.cache).live.sum((0, 2, 3)) for done in (together, alone))
        assert held[row] == held_alone[0]


def test_a_share_of_a_text_read_in_chunks_is_of_all_of_it(tiny_llama: Model):
    text = random_tokens(0, {"T1": 12})
    shared, expected = (tiny_llama.prefill(text, policy=policy, chunk=4) for policy in ("H2O(50%)", H2O(6)))
    assert_same_ledger(shared.ledger, expected.ledger)


def test_acting_by_hand_resolves_a_share_once():
    scene = H2O(0.5).act(random_scene(0, slots=10))
    assert scene.prompts == (10, 10)
    assert torch.equal(H2O(0.5).act(scene).live, scene.live)


@pytest.mark.parametrize("share", [0.0, 1.5, -0.5, math.nan, True, None, "50", "0%", "101%", "half", [0.5]])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_share_is_refused(share: object):
    refused(lambda: H2O(share), "H2O has budget=", "'50%'")
    refused(lambda: SinkWindow(4, share), "SinkWindow has window=", "'50%'")


def test_settings_are_cut_down_to_the_number_which_is_not_known_before_the_prompt():
    texts = ("H2O(20%, recent=5)", "RandomEviction(20%, 0, sinks=5)", "HeadBudgets(SnapKV(40%))")
    cut = (H2O(2, 2), RandomEviction(2, 0, sinks=2), HeadBudgets(SnapKV(4, window=2)))
    assert tuple(as_policy(text).at(10) for text in texts) == cut
    refused(lambda: as_policy("H2O(20%)").slot_count, "H2O(budget=20%) has a share of the prompt as its budget", "`at`")
