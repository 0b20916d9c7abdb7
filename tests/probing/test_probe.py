"""kvprobe.probe from conversations to accuracies, on a tiny random model with a known answer."""

import numpy as np
import pytest
import torch

import kvprobe as kv
from kvprobe.model import Model
from kvprobe.probing.probe import Sample, probe
from kvprobe.probing.sweep import read_outs
from kvprobe.transcript import Transcript

PLACES = ["shed", "mill", "barn", "inn", "tower", "east desk"]


def sample(place: str, digit: int) -> Sample:
    # From 2 on, all digits take one token with this tokenizer; " 1" would shift every position after it.
    messages = [
        {"role": "user", "content": f"the {place} has {digit + 2}."},
        {"role": "assistant", "content": f"a {place} it is"},
    ]
    return Sample(Transcript.from_messages(messages, ["T1", "T2"]), (digit,), place)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [sample(place, digit) for place in PLACES for digit in (0, 1, 2, 3) for _ in range(2)]


def best(probing: kv.Probing, split: str, family: str) -> float:
    table = probing.df()
    return float(table[(table["split"] == split) & (table["family"] == family)]["accuracy"].max())


def test_a_digit_in_view_is_read_from_values_in_conversations_never_seen(tiny_llama: Model, samples: list[Sample]):
    probing = probe(tiny_llama, samples, "T1", families=["v"], folds=3)
    assert probing.chance == 0.25
    assert best(probing, "leave-context-out", "v") > 0.55


def test_a_later_turn_knows_the_digit_unless_the_turn_was_hidden_from_it(tiny_llama: Model, samples: list[Sample]):
    seen = probe(tiny_llama, samples, "T2", folds=3)
    hidden = probe(tiny_llama, samples, "T2", hide=["T1"], folds=3)
    for family in ("k", "v", "resid_post"):
        assert best(seen, "paired", family) > 0.9
        assert best(hidden, "paired", family) <= 0.3


def test_the_same_generator_gives_the_same_table(tiny_llama: Model, samples: list[Sample]):
    one, other = (
        probe(tiny_llama, samples, "T1", families=["k"], folds=3, rng=np.random.default_rng(5)) for _ in range(2)
    )
    assert one.df().equals(other.df())


def test_one_row_per_split_layer_and_read_out_with_its_interval(tiny_llama: Model, samples: list[Sample]):
    table = probe(tiny_llama, samples, "T1", families=["k"], folds=3).df()
    assert len(table) == 3 * 3 * 2
    assert not table.duplicated(["split", "family", "layer", "read"]).any()
    assert ((table["low"] <= table["accuracy"]) & (table["accuracy"] <= table["high"])).all()


def test_labels_of_unequal_number_and_unknown_segments_are_refused(tiny_llama: Model, samples: list[Sample]):
    uneven = [*samples, Sample(samples[0].transcript, (1, 2), "shed")]
    with pytest.raises(ValueError, match="same number of labels"):
        probe(tiny_llama, uneven, "T1", folds=3)
    with pytest.raises(ValueError, match="'T2'"):
        probe(tiny_llama, samples, "T22", folds=3)


def test_read_outs_put_heads_side_by_side_and_take_mean_and_last():
    stacked = torch.arange(2 * 1 * 2 * 3 * 4, dtype=torch.float).reshape(2, 1, 2, 3, 4)
    read = read_outs(stacked)
    assert read.shape == (1, 2, 2, 8)
    torch.testing.assert_close(read[0, 1, 0], torch.cat([stacked[1, 0, head].mean(0) for head in range(2)]))
    torch.testing.assert_close(read[0, 1, 1], torch.cat([stacked[1, 0, head, 2] for head in range(2)]))
    flat = stacked[:, :, 0]
    torch.testing.assert_close(read_outs(flat)[0, 0, 0], flat[0, 0].mean(0))
