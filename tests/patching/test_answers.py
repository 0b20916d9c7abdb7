"""What a metric measures does not depend on how its answer is given: in the suffix or not, as ids or as texts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kvprobe as kv
from kvprobe.inference.model import Model, load
from kvprobe.patching import KL, Cell, LogitDiff, LogProb, Pair, attribute, patch_pairs, patch_sweep, swap_cells
from kvprobe.patching.metrics import least_way
from kvprobe.text.tokens import Tokens
from tests.models import llama, tiny_tokenizer
from tests.models.every import tiny
from tests.patching.pairs import SPANS, near, two
from tests.random_caches import random_tokens
from tests.refusals import refused

OVER: dict[str, Any] = {"layer": [0]}


@pytest.mark.parametrize("answer", [(7,), (7, 9), (7, 9, 7, 7)])
def test_an_answer_is_scored_alike_in_the_suffix_and_after_it(tiny_llama: Model, answer: tuple[int, ...]):
    """An answer that was scored one token late had -53.6 nats instead of -0.09."""
    base, donor = (run.cache for run in two(tiny_llama))
    question = random_tokens(3, {"ask": 4}, start=13)
    _, logits = tiny_llama.extend(base, question + Tokens.of(answer, "ask", 17), logits=len(answer) + 1)
    expected = sum(logits[0, place].log_softmax(-1)[token] for place, token in enumerate(answer))
    cells = [Cell((0,), (5,), "V")]
    for count in sorted({0, len(answer) - 1, len(answer)}):
        begun = replace(
            Tokens.of(answer[:count], "ask", 17), parts=("answer" if count == len(answer) == 1 else None,) * count
        )
        suffix, metric = question + begun, LogProb(answer)
        swept = patch_sweep(tiny_llama, base, donor, suffix, metric, OVER, progress=False)
        assert near(swept.base, expected)
        assert near(attribute(tiny_llama, base, donor, suffix, metric, OVER, check=1).base, expected)
        paired = patch_pairs(tiny_llama, [Pair(base, donor, suffix, metric)], OVER, progress=False)
        assert near(paired.df()["base"].iloc[0], expected)
        assert near(swap_cells(tiny_llama, base, donor, suffix, cells, {"it": metric})["base"].iloc[0], expected)
        if count == len(answer) - 1:
            both = swap_cells(tiny_llama, base, donor, suffix, cells, {"kl": KL(), "it": metric})
            assert near(both["base"].iloc[1], expected)
        else:
            refused(
                lambda suffix=suffix, metric=metric: swap_cells(
                    tiny_llama, base, donor, suffix, cells, {"kl": KL(), "it": metric}
                ),
                "need 2 different suffixes",
            )


@pytest.mark.parametrize(("answer", "ending"), [((7,), (7,)), ((7, 9, 4), (7,)), ((7, 7, 4, 4), (7,))])
def test_a_suffix_that_may_hold_a_part_of_the_answer_is_refused(
    tiny_llama: Model, answer: tuple[int, ...], ending: tuple[int, ...]
):
    base, donor = (run.cache for run in two(tiny_llama))
    suffix = random_tokens(3, {"ask": 4}, start=13) + Tokens.of(ending, "ask", 17)
    refused(
        lambda: patch_sweep(tiny_llama, base, donor, suffix, LogProb(answer), OVER, progress=False),
        f"ends with {len(ending)} of the {len(answer)} tokens of the answer",
    )


@pytest.mark.usefixtures("unchecked")
def test_tokens_of_a_logit_difference_may_be_texts_that_are_one_token():
    model = llama(tokenizer=tiny_tokenizer())
    base, donor = (run.cache for run in two(model))
    texts, (right, wrong) = LogitDiff(" the", " a"), (model.tokenizer.encode(text)[0] for text in (" the", " a"))
    cells, by_ids = [Cell((0,), (5,), "V")], kv.LogitDiff(right, wrong)
    for metric in (texts, LogitDiff(" the", wrong), LogitDiff(right=right, wrong=" a")):
        swept = [patch_sweep(model, base, donor, "us", each, OVER, progress=False) for each in (metric, by_ids)]
        assert np.array_equal(swept[0].values, swept[1].values)
    for call in (
        lambda metric: attribute(model, base, donor, "us", metric, OVER, check=1).score,
        lambda metric: patch_pairs(model, [Pair(base, donor, "us", metric)], OVER, progress=False).df()["value"],
        lambda metric: swap_cells(model, base, donor, "us", cells, {"it": metric})["value"],
    ):
        assert np.array_equal(call(texts), call(by_ids))

    def sweep(metric: LogitDiff) -> object:
        return patch_sweep(model, base, donor, random_tokens(3, {"ask": 4}, start=13), metric, OVER, progress=False)

    refused(lambda: sweep(LogitDiff(" the", " that")), "' that' is 4 tokens", "one token")
    refused(lambda: sweep(LogitDiff("", " a")), "'' is 0 tokens")
    refused(lambda: sweep(LogitDiff(" a", wrong)), "zero whatever")
    refused(lambda: texts.of(None), "No tokenizer")
    refused(lambda: texts(model.extend(None, "us")[1][0]), "No tokenizer")
    for same in (5, " a"):
        refused(lambda same=same: LogitDiff(same, same), "twice, so it is zero")
    refused(lambda: LogProb.of(" a"), "give a list of whole numbers")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("metric", [LogitDiff(5, 9), KL()])
def test_shares_of_no_way_are_said_to_be_undefined(tiny_llama: Model, metric: Any):
    base = tiny_llama.prefill(random_tokens(1, SPANS))
    suffix = random_tokens(3, {"ask": 4}, start=13)
    swept = patch_sweep(tiny_llama, base, base, suffix, metric, ("layer", "segment"), parts=("V",), progress=False)
    assert "base and donor give the same metric" in repr(swept)
    assert np.isnan(swept.normalised).all()
    refused(lambda: swept.matrix("layer", "segment"), "take value='effect'")
    assert (swept.matrix("layer", "segment", value="effect").abs() < 1e-6).all(None)
    paired = patch_pairs(tiny_llama, [Pair(base, base, suffix, metric)] * 8, OVER, parts=("V",), progress=False)
    assert "in 8 pairs base and donor give the same metric" in repr(paired)
    assert paired.summary(["layer"])["normalised"].isna().all()
    if isinstance(metric, LogitDiff):
        assert "same metric" in repr(attribute(tiny_llama, base, base, suffix, metric, OVER, parts=("V",), check=1))


@pytest.mark.parametrize("metric", [LogitDiff(5, 9), LogProb((5,)), lambda logits: logits[-1, 5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_a_way_that_is_rounding_are_undefined(metric: Any, dtype: torch.dtype):
    """Of a donor that was the base's text, read in two parts, each cell was two thirds of the way."""
    plain = tiny("gemma3_text")
    with torch.no_grad():
        plain.lm_head.weight.mul_(5)
    model = load(plain.to(dtype))
    text = random_tokens(0, SPANS)
    base, donor = model.prefill(text), model.extend(model.prefill(text[:5]), text[5:])[0]
    suffix = random_tokens(3, {"ask": 4}, start=13)
    swept = patch_sweep(model, base, donor, suffix, metric, OVER, parts=("V",), progress=False)
    assert swept.way == 0
    assert np.isnan(swept.normalised).all()
    paired = patch_pairs(model, [Pair(base, donor, suffix, metric)] * 8, OVER, parts=("V",), progress=False)
    assert paired.summary(["layer"])["normalised"].isna().all()
    other = model.prefill(random_tokens(1, SPANS))
    if dtype == torch.float32:
        assert np.isfinite(patch_sweep(model, base, other, suffix, metric, OVER, progress=False).normalised).all()


@pytest.mark.parametrize(
    ("metric", "steps"), [(LogitDiff(5, 9), 2.0), (lambda logits: logits[-1, 5], 1.0), (lambda logits: 3.0, 0.0)]
)
def test_the_least_way_is_what_rounding_does_to_a_metric(metric: Any, steps: float):
    logits = torch.zeros(1, 16)
    logits[0, 2] = -1024.0
    step = 1024 * torch.finfo(torch.float32).eps
    assert least_way(metric, logits, torch.float32) == pytest.approx(max(1e-6, steps * step), rel=0.01)
