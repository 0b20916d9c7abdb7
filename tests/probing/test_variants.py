"""Variants of a conversation: what differs beside the secret is refused, and batches change nothing."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.probing.variants import Logits, Variants
from kvprobe.text.tokens import Tokens
from tests.refusals import refused

CODES = ((5, 9), (9, 4), (3, 3), (4, 5), (8, 2))


def row(code: tuple[int, ...], before: tuple[int, ...] = (1, 2), segment: str = "T1") -> Tokens:
    tokens = Tokens.of([*before, *code, 7, 11, *code], segment)
    parts = [None] * len(before) + ["code"] * len(code) + [None, None] + ["answer"] * len(code)
    return replace(tokens, parts=tuple(parts))


@pytest.mark.parametrize("other", [row((5, 9, 9)), row((5, 9), before=(1, 3)), row((5, 9), segment="T2")])
def test_a_row_that_differs_beside_the_secret_is_refused(other: Tokens):
    refused(lambda: Variants((row(CODES[0]), other)), "use a model that tokenises them apart")
    refused(lambda: Variants(()), "give at least one")


def test_what_is_read_does_not_depend_on_the_batch_and_is_held_against_all_answers(tiny_llama: Model):
    variants = Variants(tuple(map(row, CODES)))
    answer = variants.layout.part("answer")

    def read(rows: Sequence[Tokens]) -> tuple[dict[str, torch.Tensor], list[Logits]]:
        cache, logits = tiny_llama.extend(None, [row[: answer.stop - 1] for row in rows], logits=2)
        return {"keys": cache.keys[1]}, [logits, torch.zeros_like(logits)]

    one_by_one, together = variants.read(1, read), variants.read(3, read)
    assert together.keys() == {"keys", "logprob", "margin", "correct", "kl"}
    for name, tensor in together.items():
        torch.testing.assert_close(tensor, one_by_one[name], rtol=1e-4, atol=1e-5)
    scores = read(variants.rows[3:4])[1][0][0].log_softmax(-1)
    mine, others = (
        torch.stack([scores[place, torch.tensor(codes)[:, place]] for place in (0, 1)])
        for codes in (CODES[3:4], CODES[:3] + CODES[4:])
    )
    torch.testing.assert_close(together["logprob"][3, 0], mine[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together["margin"][3, 0], mine[:, 0] - others.mean(1), rtol=1e-4, atol=1e-5)
    assert together["margin"][:, 1].abs().max() < 1e-6
