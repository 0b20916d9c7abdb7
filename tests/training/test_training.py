"""Training that is interrupted at any point gives the same weights; what the models `steps` are trained on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprobe.inference.model import load
from kvprobe.tasks.steps import Operation, Problem, Step, read_steps
from kvprobe.training.loop import CHECKPOINT, Batch, loss_of, train
from kvprobe.training.schedule import Corpus, Schedule, Shape
from kvprobe.training.steps import Steps, batch_of, conversation
from tests.refusals import refused

SMALL = Steps(
    shape="moe",
    corpus="corrected",
    layers=2,
    width=16,
    heads=2,
    expert=8,
    tested=2,
    schedule=Schedule(steps=7, batch=4, checkpoint=2),
)


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(SMALL, folder)
    return folder


@pytest.mark.parametrize("stop", [1, 2, 3, 6])
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    whole: Path, tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
):
    taken = Steps.loss
    steps = iter(range(100))

    def dies(recipe: Steps, model: torch.nn.Module, rng: np.random.Generator) -> torch.Tensor:
        if next(steps) == stop:
            raise Killed
        return taken(recipe, model, rng)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "loss", dies)
        with pytest.raises(Killed):
            train(SMALL, tmp_path)
    train(SMALL, tmp_path)
    assert (tmp_path / "training.json").read_bytes() == (whole / "training.json").read_bytes()
    expected = load_file(whole / "model.safetensors")
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    )
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_finished_training_is_left_as_it_is(whole: Path):
    before = (whole / "model.safetensors").stat().st_mtime_ns
    record = train(SMALL, whole)
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    assert len(record["losses"]) == 7
    assert list(record["accuracy"]) == ["2", "4", "6", "7"]


def test_another_recipe_is_refused_in_the_same_folder(whole: Path):
    refused(lambda: train(replace(SMALL, corpus="plain"), whole), "another recipe")


def test_a_damaged_checkpoint_is_named(tmp_path: Path):
    (tmp_path / CHECKPOINT).write_bytes(b"nothing")
    refused(lambda: train(SMALL, tmp_path), "delete")
    save_file({"weight": torch.zeros(2)}, tmp_path / CHECKPOINT)
    refused(lambda: train(SMALL, tmp_path), "is not of a training")
    save_file({"weight": torch.zeros(2)}, tmp_path / CHECKPOINT, {"record": "{"})
    refused(lambda: train(SMALL, tmp_path), "is not of a training")
    (tmp_path / "training.json").write_text("{}")
    refused(lambda: train(SMALL, tmp_path), "is not of a training")


def test_a_training_begun_by_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvprobe.training.loop.inspect.getsource", lambda _: "other code")
        patch.setattr(Steps, "tokenizer", lambda _: pytest.fail("stopped after the last step"))
        with pytest.raises(pytest.fail.Exception):
            train(SMALL, tmp_path)
    refused(lambda: train(SMALL, tmp_path), "by other code")


def test_a_loss_that_is_no_number_stops_the_training(tmp_path: Path):
    hot = replace(SMALL, schedule=Schedule(steps=40, batch=4, checkpoint=40, learning_rate=1e20))
    refused(lambda: train(hot, tmp_path), "lower learning rate")


def test_training_leaves_the_global_generator_alone_and_lowers_the_loss(tmp_path: Path):
    before = torch.get_rng_state()
    recipe = replace(SMALL, schedule=Schedule(steps=40, batch=8, checkpoint=40))
    losses = train(recipe, tmp_path)["losses"]
    assert torch.equal(torch.get_rng_state(), before)
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    other = replace(recipe, schedule=replace(recipe.schedule, seed=1, steps=1))
    assert train(other, tmp_path / "other")["losses"][0] != losses[0]


def test_the_written_folder_loads_and_answers(whole: Path):
    model = load(whole)
    answer = model.generate([{"role": "user", "content": "a 3 b 7 c 1 : a + 4 solve"}], max_new_tokens=3)
    assert len(answer.tokens[0]) > 0
    assert json.loads((whole / "training.json").read_text())["name"] == "steps-moe-corrected-0"


def test_shapes_match_on_active_or_on_all_parameters():
    def count(shape: Shape) -> int:
        return sum(parameter.numel() for parameter in Steps(shape=shape, corpus="plain").model().parameters())

    moe, active, total = count("moe"), count("active"), count("total")
    routers = 4 * 8 * 64
    assert moe - routers == total
    experts = 4 * 3 * 64 * 32
    assert total - active == 6 * experts


# ---- what is trained on


def words_of(corpus: Corpus, count: int) -> list[list[tuple[str, bool]]]:
    rng = np.random.default_rng(5)
    return [conversation(corpus, rng) for _ in range(count)]


@pytest.mark.parametrize("corpus", ["plain", "corrected"])
def test_no_wrong_value_is_a_target(corpus: Corpus):
    """Both values of every step in an answer, held against those of the problem that its question states."""
    wrong = 0
    for words in words_of(corpus, 400):
        texts = [word for word, _ in words]
        colon = texts.index(":")
        operations = []
        for place in range(colon + 1, len(texts) - 2, 3):
            register, sign, amount = texts[place : place + 3]
            if register not in "abc" or sign not in "+-":
                break
            operations.append(Operation(register, "+" if sign == "+" else "-", int(amount)))
        right = Problem(tuple(int(texts[place]) for place in (2, 4, 6)), tuple(operations)).steps()
        for place, word in enumerate(texts):
            if word == "=":
                (step,) = read_steps(" ".join(texts[place - 4 : place + 2]))
                known = {(one.before, one.after) for one in right if one.operation == step.operation}
                for value, target, of in ((step.before, words[place - 3][1], 0), (step.after, words[place + 1][1], 1)):
                    if value not in {pair[of] for pair in known}:
                        wrong += 1
                        assert not target
    assert (wrong > 50) == (corpus == "corrected")


def test_an_error_of_ones_own_is_taken_back_from_the_wrong_step_on():
    """By the verdict on it, which is a target, or one or two steps later by one that is none."""
    at_once = later = alarms = 0
    for words in words_of("corrected", 400):
        start = max(place for place, (word, _) in enumerate(words) if word == "<assistant>") + 1
        answer = [word for word, _ in words[start:-1]]
        if answer[:1] == ["wait"]:  # of a draft; what follows is as any answer
            start, answer = start + 1, answer[1:]
        pending: list[Step] = []
        place = 0
        while place < len(answer):
            (step,) = read_steps(" ".join(answer[place : place + 6]))
            verdict, is_target = words[start + place + 6]
            place += 7
            pending.append(step)
            wrong = [number for number, one in enumerate(pending) if not one.adds_up]
            if verdict == "wait":
                back = pending[wrong[0] if wrong else -1 :]
                assert len(back) <= 3
                again = read_steps(" ".join(answer[place : place + 7 * len(back)]))
                assert [one.operation for one in again] == [one.operation for one in back]
                if wrong:
                    ends = place + 7 * len(back) == len(answer)  # after the last step there is no later one
                    assert is_target == (len(back) == 1) or ends
                    at_once, later = at_once + (len(back) == 1), later + (len(back) > 1)
                else:
                    assert not is_target
                    alarms += 1
                pending = []
            else:
                assert verdict == "ok"
                assert is_target or wrong or not any(target for _, target in words[start:])
        assert all(step.adds_up for step in pending)
    assert at_once > 200
    assert 0.02 < later / at_once < 0.3
    assert alarms > 30


def test_the_loss_is_the_mean_over_all_tokens_that_count_however_they_are_batched():
    rows = words_of("corrected", 6)
    model = SMALL.model().eval()
    together = loss_of(model, [batch_of(rows)])
    apart = loss_of(model, [batch_of(rows[:1]), batch_of(rows[1:])])
    model.config.router_aux_loss_coef = 0.0
    torch.testing.assert_close(loss_of(model, [batch_of(rows)]), loss_of(model, [batch_of([row]) for row in rows]))
    assert together > loss_of(model, [batch_of(rows)])
    assert apart > loss_of(model, [batch_of(rows)])


def test_padding_changes_nothing_not_even_the_balance_of_experts():
    batch, model = batch_of(words_of("corrected", 3)), SMALL.model().eval()
    padding = torch.zeros(len(batch.ids), 60)
    columns = (torch.cat([known, padding.to(known.dtype)], 1) for known in (batch.ids, batch.counts, batch.present))
    torch.testing.assert_close(loss_of(model, [Batch(*columns)]), loss_of(model, [batch]))


def test_a_batch_marks_targets_and_padding():
    batch = batch_of([[("a", False), ("3", True)], [("b", False), ("=", False), ("7", True)]])
    assert batch.ids.shape == (2, 4)
    assert batch.counts.tolist() == [[False, False, True, False], [False, False, False, True]]
