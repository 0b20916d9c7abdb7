"""Training that is interrupted at any point gives the same weights, by any recipe; what the models `steps` are trained
on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprobe.inference.model import load
from kvprobe.tasks.lossy_mementos import LossyDesign
from kvprobe.tasks.steps import Operation, Problem, Step, read_steps
from kvprobe.training.loop import CHECKPOINT, KEPT, TrainingBatch, TrainingRecipe, loss_of, train
from kvprobe.training.lossy import Lossy
from kvprobe.training.memento import MEMENTOS, Memento
from kvprobe.training.recall import Recall
from kvprobe.training.schedule import Corpus, Schedule, Shape, UntilRight
from kvprobe.training.steps import Steps, batch_of, conversation
from tests.refusals import refused

RECIPES = ["steps", "memento", "lossy", "recall"]

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

SMALL_MEMENTO = Memento(
    blocks=2,
    layers=2,
    width=16,
    heads=2,
    inner=24,
    tested=2,
    schedule=UntilRight(steps=7, batch=4, checkpoint=2, kind=MEMENTOS, enough=0.95),
)

SMALL_LOSSY = Lossy(
    design=LossyDesign(2, 2),
    layers=2,
    width=16,
    heads=2,
    inner=24,
    tested=2,
    schedule=Schedule(steps=7, batch=4, checkpoint=2),
)


SMALL_RECALL = Recall(
    most=3, layers=2, width=16, heads=2, inner=24, tested=2, schedule=Schedule(steps=7, batch=4, checkpoint=2)
)


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module", params=[SMALL, SMALL_MEMENTO, SMALL_LOSSY, SMALL_RECALL], ids=RECIPES)
def recipe(request: pytest.FixtureRequest) -> TrainingRecipe:
    return request.param


@pytest.fixture(scope="module")
def whole(recipe: TrainingRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(recipe, folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stop", [1, 2, 3, 6])
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    recipe: TrainingRecipe, whole: Path, tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
):
    taken = type(recipe).loss
    steps = iter(range(100))

    def dies(recipe: TrainingRecipe, model: torch.nn.Module, rng: np.random.Generator) -> torch.Tensor:
        if next(steps) == stop:
            raise Killed
        return taken(recipe, model, rng)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(type(recipe), "loss", dies)
        with pytest.raises(Killed):
            train(recipe, tmp_path)
    train(recipe, tmp_path)
    assert contents(tmp_path) == contents(whole)
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_finished_training_is_left_as_it_is(recipe: TrainingRecipe, whole: Path):
    before = (whole / "model.safetensors").stat().st_mtime_ns
    record = train(recipe, whole)
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    assert len(record["losses"]) == 7
    assert [*record["accuracy"]][-4:] == ["2", "4", "6", "7"]


def test_another_recipe_is_refused_in_the_same_folder(recipe: TrainingRecipe, whole: Path):
    refused(lambda: train(replace(recipe, tested=3), whole), "another recipe")  # pyright: ignore[reportArgumentType]


def test_the_written_folder_loads_and_answers(recipe: TrainingRecipe, whole: Path):
    model = load(whole)
    answer = model.generate([{"role": "user", "content": "3 7 1"}], max_new_tokens=3)
    assert len(answer.tokens[0]) > 0
    assert json.loads((whole / "training.json").read_text())["name"] == recipe.name


# ---- until enough is right


def test_weights_are_kept_at_each_checkpoint_if_the_schedule_says_so(recipe: TrainingRecipe, whole: Path):
    """And those before the first step, which are as drawn."""
    kept = {path.name for path in whole.glob(f"{KEPT}/*")}
    if not recipe.schedule.keeps:
        assert not kept
        return
    record = json.loads((whole / "training.json").read_text())
    assert kept == set(record["accuracy"]) == {"0", "2", "4", "6", "7"}
    weights = {step: load_file(whole / KEPT / step / "model.safetensors") for step in kept}
    with torch.random.fork_rng():
        torch.manual_seed(recipe.schedule.seed)
        drawn = recipe.model().state_dict()
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(tensor, weights["7"][name])
        assert torch.equal(drawn[name], weights["0"][name])
        assert not torch.equal(weights["4"][name], weights["6"][name])
    assert load(whole / KEPT / "4").geometry.n_layers == 2


def test_a_training_ends_at_the_first_checkpoint_where_enough_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = iter([0.1, 0.5, 0.96, 0.2])
    monkeypatch.setattr(Memento, "accuracy", lambda *_: {MEMENTOS: next(measured)})
    with monkeypatch.context() as patch:
        patch.setattr("kvprobe.training.loop.write_whole", lambda *_: pytest.fail("killed before the record is there"))
        with pytest.raises(pytest.fail.Exception):
            train(SMALL_MEMENTO, tmp_path)
    assert not (tmp_path / "training.json").exists()
    record = train(SMALL_MEMENTO, tmp_path)
    assert record["accuracy"] == {"0": {MEMENTOS: 0.1}, "2": {MEMENTOS: 0.5}, "4": {MEMENTOS: 0.96}}
    assert len(record["losses"]) == 4
    assert next(measured) == 0.2


def test_a_share_that_cannot_be_reached_is_refused():
    refused(lambda: UntilRight(steps=1, batch=1, kind=MEMENTOS, enough=1.5), "'enough' is 1.5")


# ---- what stops a training


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
    """By the remark on it, which is a target, or one or two steps later by one that is none."""
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
            remark, is_target = words[start + place + 6]
            place += 7
            pending.append(step)
            wrong = [number for number, one in enumerate(pending) if not one.adds_up]
            if remark == "wait":
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
                assert remark == "ok"
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
    with torch.random.fork_rng():
        torch.manual_seed(7)  # weights for which the balance of padding shows well above round-off
        model = SMALL.model().eval()
    batch = batch_of(words_of("corrected", 3))
    padding = torch.zeros(len(batch.ids), 60)
    ids, counts, present = (
        torch.cat([known, padding.to(known.dtype)], 1) for known in (batch.ids, batch.counts, batch.present)
    )
    expected = loss_of(model, [batch])
    torch.testing.assert_close(loss_of(model, [TrainingBatch(ids, counts, present)]), expected, rtol=2e-5, atol=0)
    counted = loss_of(model, [TrainingBatch(ids, counts, torch.ones_like(present))])
    assert abs(counted - expected) / expected > 2e-4


def test_a_batch_marks_targets_and_padding():
    batch = batch_of([[("a", False), ("3", True)], [("b", False), ("=", False), ("7", True)]])
    assert batch.ids.shape == (2, 4)
    assert batch.counts.tolist() == [[False, False, True, False], [False, False, False, True]]
