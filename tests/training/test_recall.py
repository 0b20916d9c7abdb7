"""What the models `recall` are trained on, and that what ships answers as its card says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvprobe.cli.training import train_app
from kvprobe.inference.model import load
from kvprobe.tasks.recall import ANSWER, ASK, NAMES, PAIRS, QUESTION, TALK, draw_digits, recall_text
from kvprobe.training.memories import LONGEST, SHORTEST
from kvprobe.training.recall import NUMBER, Recall, recall_schedule
from kvprobe.training.schedule import Memory
from tests.refusals import refused
from tests.toy import toy

TINY = Recall(most=3, talk=5, questions=2, layers=2, width=16, heads=2, inner=24, tested=4)
DIGITS = draw_digits(np.random.default_rng(0), 6, 3)


def test_each_question_is_answered_by_the_digit_of_its_name():
    batch = TINY.batch(DIGITS, np.random.default_rng(1))
    words = [TINY.tokenizer().decode(row).split() for row in batch.ids]
    stated = 1 + 2 * DIGITS.shape[1]
    for row, digits in zip(words, DIGITS.tolist(), strict=True):
        assert row[:stated] == ["<bos>", *(word for pair in zip("abc", map(str, digits), strict=True) for word in pair)]
        asked = [place for place, word in enumerate(row) if word == ASK]
        assert len(asked) == TINY.questions
        assert len({row[place + 1] for place in asked}) == TINY.questions
        assert all(row[place + 2] == str(digits[NAMES.index(row[place + 1])]) for place in asked)
        assert len(row) == stated + TINY.talk + 3 * TINY.questions
    counted = [[*row.nonzero()[:, 0]] for row in batch.counts]
    assert counted == [[place + 2 for place, word in enumerate(row) if word == ASK] for row in words]
    assert len({tuple(row) for row in words}) == len(words)


def test_a_text_ends_with_a_question_as_in_training():
    model = toy(TINY)
    (tokens,) = model.tokens(recall_text([3, 7], [0, 1, 2], 1))
    assert model.tokenizer.decode(tokens.ids) == "<bos> a 3 b 7 A B C ? b 7"
    assert tuple(dict.fromkeys(tokens.segments)) == ("preamble", PAIRS, TALK, QUESTION)
    assert tokens.ids[tokens.part(ANSWER)] == (NUMBER["7"],)
    (unstated,) = model.tokens(recall_text([3, 7], [0, 1, 2], 1, stated=False))
    assert model.tokenizer.decode(unstated.ids) == "<bos> A B C ? b 7"


@pytest.mark.parametrize("memory", ["attention", "recurrent", "hybrid", "mamba"])
def test_layers_differ_in_their_memory_alone(memory: Memory):
    full = Recall(memory=memory)
    count = sum(parameter.numel() for parameter in full.model().parameters())
    assert count == pytest.approx(226_000, rel=0.02)
    geometry = toy(Recall(memory=memory, layers=3, width=16, heads=2, inner=24)).geometry
    attends = {"attention": (0, 1, 2), "recurrent": ()}.get(memory, (2,))
    assert geometry.attending == attends
    assert {*geometry.recurrent} == {0, 1, 2} - {*attends}


@pytest.mark.parametrize("memory", ["hybrid", "mamba"])
def test_states_forget_slowly_before_training(memory: Memory):
    parameters: Any = Recall(memory=memory).model().named_parameters()
    steps = torch.cat([functional.softplus(bias.detach()) for name, bias in parameters if name.endswith("dt_bias")])
    assert steps.min() >= SHORTEST * 0.99
    assert steps.max() <= LONGEST * 1.01
    assert steps.std() > 0.005


def test_settings_that_cannot_be_are_refused():
    refused(lambda: Recall(most=17), "'most' is 17")
    refused(lambda: Recall(tested=0), "'tested' is 0")
    refused(lambda: draw_digits(np.random.default_rng(0), 1, 17), "'pairs' is 17")


def test_the_command_trains_what_its_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trained: list[tuple[Recall, Path]] = []

    def train(recipe: Recall, folder: Path) -> dict[str, object]:
        trained.append((recipe, folder))
        return {"accuracy": {"200": {"8 pairs": 0.961}}}

    monkeypatch.setattr("kvprobe.training.loop.train", train)
    command = ["recall", "--memory=mamba", "--seed=3", "--steps=400", f"--out={tmp_path}"]
    train_app(command, exit_on_error=False, result_action="return_value")
    expected = Recall(memory="mamba", schedule=recall_schedule(400, 3))
    assert trained == [(expected, tmp_path / "recall-mamba-3")]
    assert "8 pairs: 96.1% right" in capsys.readouterr().out


SHIPPED = {
    "recall-attention-0": 1.0,
    "recall-attention-1": 1.0,
    "recall-recurrent-0": 0.942,
    "recall-recurrent-1": 0.998,
    "recall-hybrid-0": 0.944,
    "recall-hybrid-1": 0.999,
    "recall-mamba-0": 1.0,
    "recall-mamba-1": 1.0,
}
"""The share of right answers about 16 pairs that the card of each reports."""


@pytest.mark.parametrize("name", SHIPPED)
def test_models_that_ship_are_as_right_as_their_card_says(name: str):
    plain = load(name).lanes.plain
    right = Recall(most=16, tested=60).accuracy(plain, np.random.default_rng(1))
    assert right["16 pairs"] == pytest.approx(SHIPPED[name], abs=0.05)
