"""What the models `lossy` are trained on: the view of a training pass is the one that a cache has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cli.training import train_app
from kvprobe.inference.model import Model
from kvprobe.policies import RestartInPlace
from kvprobe.tasks.lossy_mementos import BLOCK, MEMENTO, QUESTION, LossyDesign
from kvprobe.text.tokens import Tokens
from kvprobe.training.lossy import NUMBER, OMITTED, STATED, Lossy, lossy_schedule
from tests.refusals import refused
from tests.toy import toy

DESIGN = LossyDesign(3, 3)
TINY = Lossy(design=DESIGN, layers=3, width=16, heads=2, inner=24, tested=4)
AGAIN = replace(TINY, provenance="recomputed")
DIGITS = DESIGN.draw(4, np.random.default_rng(0))


@pytest.fixture(scope="module")
def model() -> Model:
    return toy(TINY)


def in_one_pass(recipe: Lossy, model: Model, digits: np.ndarray = DIGITS) -> torch.Tensor:
    """The logits of all that counts: stated digits, then answers."""
    batch = recipe.batch(digits)
    with torch.no_grad():
        output = model.lanes.plain(**batch.inputs, use_cache=False)
    return output.logits[:, batch.counts[0, 1:]]


def conversations(model: Model, place: int = 0) -> list[Tokens]:
    return model.tokens([DESIGN.conversation(digits, place) for digits in DIGITS.tolist()])


def hidden(recipe: Lossy, model: Model, cache: KVCache) -> KVCache:
    return cache.mask(BLOCK) if recipe == TINY else model.apply(RestartInPlace(BLOCK), cache)


@pytest.mark.parametrize("recipe", [TINY, AGAIN], ids=lambda recipe: recipe.provenance)
def test_a_training_pass_sees_what_a_cache_sees(recipe: Lossy, model: Model):
    rows = [row[: row.span(QUESTION).start] for row in conversations(model)]
    whole, written = model.extend(None, rows, logits=DESIGN.slots)
    asked = [[row[row.span(QUESTION)] for row in conversations(model, place)] for place in range(DESIGN.places)]
    cache = hidden(recipe, model, whole)
    answers = [model.extend(cache, question)[1] for question in asked]
    expected = torch.cat([written[:, :-1], *answers], 1)
    torch.testing.assert_close(in_one_pass(recipe, model), expected, atol=1e-5, rtol=1e-5)


def test_what_a_memento_omits_reaches_an_answer_only_if_it_is_retained(model: Model):
    others = DESIGN.alike(DIGITS, np.random.default_rng(1))
    assert (others[:, : DESIGN.stated] == DIGITS[:, : DESIGN.stated]).all()
    assert (others[:, DESIGN.stated :] != DIGITS[:, DESIGN.stated :]).all()
    for recipe, reaches in ((TINY, True), (AGAIN, False)):
        one, other = (in_one_pass(recipe, model, some)[:, DESIGN.stated :] for some in (DIGITS, others))
        assert (one != other).any() == reaches


def test_the_loss_is_on_stated_digits_and_answers():
    for recipe in (TINY, AGAIN):
        batch = recipe.batch(DIGITS)
        targets = batch.ids[batch.counts].reshape(len(DIGITS), -1).numpy() - NUMBER["0"]
        np.testing.assert_array_equal(targets, np.concatenate([DIGITS[:, : DESIGN.stated], DIGITS], 1))


def test_segments_are_block_memento_and_question(model: Model):
    tokens = conversations(model, 4)[0]
    assert tuple(dict.fromkeys(tokens.segments)) == ("preamble", BLOCK, MEMENTO, QUESTION)
    assert model.tokenizer.decode(tokens.ids[-2:]) == "? e"
    assert len(range(*tokens.span(MEMENTO).indices(len(tokens)))) == DESIGN.slots


def test_right_is_the_likeliest_answer_by_kind(model: Model):
    answers = in_one_pass(TINY, model)[:, DESIGN.stated :].argmax(2).numpy()
    right = TINY.right(model.lanes.plain, DIGITS)
    np.testing.assert_array_equal(right, answers == DIGITS + NUMBER["0"])
    assert set(TINY.accuracy(model.lanes.plain, np.random.default_rng(0))) == {STATED, OMITTED}
    alone = replace(TINY, design=LossyDesign(2, 1))
    assert set(alone.accuracy(model.lanes.plain, np.random.default_rng(0))) == {OMITTED}


def test_designs_that_cannot_be_are_refused():
    refused(lambda: LossyDesign(0, 1), "'asked' is 0")
    refused(lambda: LossyDesign(1, 0), "'slots' is 0")
    refused(lambda: LossyDesign(50, 4), "A block of 53 digits is too long", "at most 52")
    refused(lambda: replace(TINY, tested=0), "'tested' is 0")


def test_the_command_trains_what_its_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trained: list[tuple[Lossy, Path, str]] = []

    def train(recipe: Lossy, folder: Path, device: str) -> dict[str, object]:
        trained.append((recipe, folder, device))
        return {"accuracy": {"200": {STATED: 1.0, OMITTED: 0.961}}}

    monkeypatch.setattr("kvprobe.training.loop.train", train)
    flags = {"asked": 4, "slots": 1, "provenance": "recomputed", "seed": 3, "steps": 400, "device": "cuda"}
    command = ["lossy", *(f"--{name}={value}" for name, value in flags.items()), f"--out={tmp_path}"]
    train_app(command, exit_on_error=False, result_action="return_value")
    expected = Lossy(design=LossyDesign(4, 1), provenance="recomputed", schedule=lossy_schedule(400, 3))
    assert trained == [(expected, tmp_path / "lossy-4-1-recomputed-3", "cuda")]
    assert "omitted digits: 96.1% right" in capsys.readouterr().out
