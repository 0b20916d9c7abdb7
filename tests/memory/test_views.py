"""The three views compared: what a query may read, what transformers holds under a policy, how vLLM groups layers."""

import pytest

from kvprobe.cache.slots import Rounds, SlotPlan
from kvprobe.memory import hf, logical, vllm
from kvprobe.memory.budget import budget
from kvprobe.memory.caches import AttentionStore, LayerStore, State
from kvprobe.memory.numbers import FORMATS
from kvprobe.memory.request import Request
from kvprobe.memory.written import plan_of
from tests.refusals import refused

FLOAT = FORMATS["float32"]
FULL = LayerStore(AttentionStore(4, 2, 8, 8))


def request(prompt: int, new: int = 0, plan: SlotPlan | None = None, source: int = 0) -> Request:
    return Request(prompt, new, source=source, dtype=FLOAT, numbers=FLOAT, plan=plan or SlotPlan())


def test_a_state_is_its_last_inputs_and_its_numbers_in_float32():
    layer = LayerStore(state=State("Mamba", channels=10, kernel=4, recurrent=70))
    half = Request(5, dtype=FORMATS["bfloat16"], numbers=FORMATS["bfloat16"])
    assert logical.held((layer,), half) == [10 * 3 * 2 + 70 * 4]
    # transformers keeps a column more, and vLLM the state in the model's numbers unless the config names others.
    assert hf.held((layer,), half) == [10 * 4 * 2 + 70 * 4]
    assert vllm.reserved((layer,), half, vllm.Engine()).bytes == 10 * 3 * 2 + 70 * 2
    named = LayerStore(state=State("Mamba", 10, 4, 70, dtype="float32"))
    assert vllm.reserved((named,), half, vllm.Engine()).bytes == 10 * 3 * 2 + 70 * 4


def test_an_index_is_read_with_the_keys():
    indexed = LayerStore(AttentionStore(4, 1, 16, 8, latent=True, d_index=5))
    assert logical.held((indexed,), request(7)) == [7 * (16 + 8 + 5) * 4]
    rounded = request(7, plan=SlotPlan("rounds", rounds=Rounds(4, 2, 1)))
    codes, scales, index = 6 * (8 + 4), 6 * (8 // 2) * 4 + 3 * 16 * 4, 6 * 5 * 4
    assert logical.held((indexed,), rounded) == [(16 + 8 + 5) * 4 + codes + scales + index]


def test_rounded_slots_leave_a_window_first():
    sliding = LayerStore(AttentionStore(4, 2, 8, 8, reach=6))
    plan = SlotPlan("rounds", rounds=Rounds(4, 4, 3))
    # Of 12 tokens 8 are rounded, and 6 of the 12 are left: two rounded ones, of one group, which keeps its scales.
    fine, slot, group = 4 * 16 * 4, 4 + 4 + 2 * 4, 8 * 4
    assert logical.held((sliding,), request(12, plan=plan)) == [2 * (fine + 2 * slot + group)]


def test_a_policy_bounds_what_transformers_holds_of_every_layer():
    layers = (FULL, LayerStore(AttentionStore(4, 2, 8, 8, reach=6)))
    numbers = 2 * 16 * 4
    assert hf.held(layers, request(20, 3, plan_of("SinkWindow(2, 8)"))) == [10 * numbers, 6 * numbers]
    assert hf.held(layers, request(20, 3, plan_of("TOVA(4)"))) == [4 * numbers, 4 * numbers]
    refused(lambda: hf.held(layers, request(20, 3, plan_of("HeadBudgets(TOVA(4))"))), "other slots in each head")


@pytest.mark.parametrize(("more", "groups"), [(14, 1), (15, 2), (16, 2), (20, 2), (21, 3)])
def test_layers_of_two_kinds_share_groups_until_one_kind_is_half_again_as_many(more: int, groups: int):
    layers = (FULL,) * 10 + (LayerStore(AttentionStore(4, 2, 8, 8, reach=32)),) * more
    reservation = vllm.reserved(layers, request(64), vllm.Engine(batched_tokens=16, steps=1))
    longest = max(10, more) if groups == 1 else 10
    assert reservation.block_bytes == longest * 16 * 2 * 16 * 4
    window = -(-min(31 + 16, 64) // 16) + 1
    assert reservation.blocks == 4 + groups * window


def test_a_window_and_the_tokens_in_flight_end_at_a_block():
    sliding = (LayerStore(AttentionStore(4, 2, 8, 8, reach=17)),)
    reservation = vllm.reserved(sliding, request(100), vllm.Engine(batched_tokens=16, steps=1))
    # 16 tokens before the query and 16 in flight are two blocks, and one more where the window begins.
    assert reservation.blocks == 3


def test_cross_attention_is_as_long_as_its_source_in_every_view():
    crossing = (FULL, LayerStore(AttentionStore(4, 2, 8, 8, crosses=True)))
    asked = request(40, source=100)
    numbers = 2 * 16 * 4
    assert logical.held(crossing, asked) == hf.held(crossing, asked) == [40 * numbers, 100 * numbers]
    reservation = vllm.reserved(crossing, asked, vllm.Engine())
    assert (reservation.blocks, reservation.block_bytes) == (3 + 7, 16 * numbers)


def test_states_that_cannot_be_divided_among_ranks_are_refused():
    refused(lambda: budget("state-spaces/mamba-2.8b-hf", engine="vllm", ranks=7), "7 ranks")


def test_the_fullest_phase_of_a_policy_that_seldom_acts_is_its_peak():
    tiny = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    at_the_act = budget(tiny, context=66, new=50, engine="logical", policy="SlidingWindow(4, every=50)")
    before = budget(tiny, context=65, new=49, engine="logical", policy="SlidingWindow(4, every=50)")
    assert at_the_act.cache < before.cache
    assert at_the_act.peak == before.peak
    assert at_the_act.phase == "on the way"
