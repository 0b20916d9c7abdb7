"""Variants of a conversation: what is kept of them, and what erasers that are fitted on slots take from their mean."""

import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.probing.gram import one_hot_answers
from kvprobe.studies.use.variants import PARTS, VariantReads, average_cache, read_variants
from kvprobe.text.tokens import Tokens

PLACES = {"code": range(3, 5), "after": range(5, 9)}
CLASSES, COUNT = 3, 12


def variants(number: int) -> tuple[list[Tokens], torch.Tensor]:
    """A conversation whose two code slots hold one of three tokens each."""
    generator = torch.Generator().manual_seed(number)
    rest = torch.randint(10, 60, (9,), generator=generator).tolist()
    labels = torch.randint(0, CLASSES, (2, COUNT), generator=generator)
    return [Tokens.of([*rest[:3], *(2 + codes).tolist(), *rest[5:]]) for codes in labels.T], labels


@pytest.fixture(scope="module")
def reads(tiny_llama: Model) -> list[dict[str, torch.Tensor]]:
    return [
        read_variants(tiny_llama, *(rows, PLACES, labels), apart=("code",), batch=5)
        for rows, labels in map(variants, range(4))
    ]


def test_what_is_kept_is_what_each_variant_leaves_less_their_average(
    tiny_llama: Model, reads: list[dict[str, torch.Tensor]]
):
    (rows, labels), read = variants(1), reads[1]
    values = torch.stack([tiny_llama.prefill(row).values[2][0].transpose(0, 1).flatten(1) for row in rows])
    average = values.mean(0)
    torch.testing.assert_close(read["average.V"][2], average[3:], atol=1e-5, rtol=1e-4)
    centred = (values - average)[:, 5:]
    torch.testing.assert_close(read["after.V"][2], centred.mean(1), atol=1e-5, rtol=1e-3)
    gram = torch.einsum("csi,csj->ij", centred, centred) / centred.shape[1]
    torch.testing.assert_close(read["after.gram.V"][2], gram, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(read["code.V"][2], (values - average)[:, 3:5], atol=1e-5, rtol=1e-3)
    assert torch.equal(read["labels"], labels)
    base = tiny_llama.prefill(rows[0])
    held = average_cache(base, read, 3).values[2][0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(held, torch.cat([values[0, :3], average[3:]]), atol=1e-5, rtol=1e-4)


def test_samples_of_several_conversations_stand_side_by_side(reads: list[dict[str, torch.Tensor]]):
    both = VariantReads(reads[:2])
    assert both.conversations.tolist() == [0] * COUNT + [1] * COUNT
    assert torch.equal(both.features("code", "K", 1)[:, COUNT:], reads[1]["code.K"][:, :, 1])
    assert torch.equal(both.labels[:, COUNT:], reads[1]["labels"])


def test_an_eraser_fitted_on_slots_guards_their_mean(reads: list[dict[str, torch.Tensor]]):
    half = VariantReads(reads)
    answers = one_hot_answers(half.labels, CLASSES, torch.float64)
    for part in PARTS:
        intact = half.features("after", part)
        eraser, iterated = half.erasers("after", part, None, half.labels, CLASSES, 0.1)
        # Above the first layer, whose K and V of a slot know nothing of another's token.
        before, after = (
            values[1:].double().mT @ (answers - answers.mean(0)) for values in (intact, intact - eraser.inside(intact))
        )
        assert after.abs().max() < 1e-3 * before.abs().max()
        assert len(iterated.rank) == len(eraser.rank) == len(intact)
