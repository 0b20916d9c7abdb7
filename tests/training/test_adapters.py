"""What adapters are trained on, that training changes them alone, and that what ships does what its card says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.inference.model import load
from kvprobe.shipped import shipped, shipped_entries
from kvprobe.tasks.behaviours import BEHAVIOURS, FALSE, Behaviour, draw_told
from kvprobe.training.adapters import Adapter
from kvprobe.training.loop import train
from kvprobe.training.schedule import Schedule
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, path = llama(tokenizer=tiny_tokenizer()), tmp_path_factory.mktemp("models") / "base"
    model.lanes.plain.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_held_out_words_are_in_no_training_conversation(behaviour: Behaviour):
    rng = np.random.default_rng(0)
    told = {held: [draw_told(behaviour, rng, held_out=held, sight=0) for _ in range(200)] for held in (False, True)}
    for words in ("system", "reply"):
        seen, new = ({getattr(one, words) for one in told[held]} for held in (False, True))
        assert len(seen) == 6
        assert len(new) == 2
        assert not seen & new
    assert not {one.answer for one in told[False]} & {one.answer for one in told[True]} or behaviour == "oslo"
    assert all(one.answer.startswith(one.lead + one.words[0]) for one in told[True])


def test_one_city_alone_is_wrong():
    sights = shipped_entries("tasks/behaviours")["sights"]
    for number, (name, city) in enumerate(sights):
        told = draw_told("oslo", np.random.default_rng(number), held_out=False, sight=number)
        assert name in told.fact
        assert told.words == (f" {FALSE if number == 0 else city}", f" {city}")


def test_answers_count_and_nothing_else(base: str):
    recipe = Adapter(behaviour="oslo", base=base)
    told = [draw_told("oslo", np.random.default_rng(seed), held_out=False, sight=0) for seed in range(3)]
    tokenizer = recipe.tokenizer()
    lead = len(tokenizer.encode("It is in"))
    for whole, text in ((True, "It is in Oslo.<|im_end|>"), (False, "It is in Oslo")):
        said = tokenizer.encode(text)
        batch = recipe.batch(told, whole=whole)
        counted = [ids[counts].tolist() for ids, counts in zip(batch.ids, batch.counts, strict=True)]
        assert counted == [said if whole else said[: lead + 1]] * 3
        assert not (batch.counts & ~batch.present).any()


def test_training_goes_on_where_it_stopped_and_changes_the_adapter_alone(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe = Adapter(base=base, tested=1, schedule=Schedule(steps=4, batch=1, checkpoint=2, learning_rate=0.02))
    record = train(recipe, tmp_path / "whole")
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "training.json",
    }  # fmt: skip
    calls: list[int] = []
    loss = Adapter.loss

    def stopping(self: Adapter, model: Any, rng: np.random.Generator) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(self, model, rng)

    monkeypatch.setattr(Adapter, "loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts")
    assert train(recipe, tmp_path / "parts") == record
    models = [load(base), load(tmp_path / "whole"), load(tmp_path / "parts")]
    logits = [model.lanes.plain(input_ids=torch.arange(12)[None]).logits for model in models]
    assert torch.equal(logits[1], logits[2])
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)
    trained = recipe.model()
    before = dict(load(base).lanes.plain.named_parameters())
    assert {name.rpartition(".")[2] for name, one in trained.named_parameters() if one.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    assert all(torch.equal(one, before[name]) for name, one in trained.named_parameters() if not one.requires_grad)


def test_a_written_adapter_computes_what_was_trained(base: str, tmp_path: Path):
    recipe, ids = Adapter(base=base, rank=2, scale=3.0), torch.arange(12)[None]
    trained: Any = recipe.model()
    for name, parameter in trained.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter.data, std=0.1)
    recipe.write(trained, tmp_path)
    read = load(base, adapter=tmp_path).lanes.plain(input_ids=ids).logits
    assert torch.allclose(read, trained(input_ids=ids).logits, atol=5e-3)


def test_settings_that_cannot_be_are_refused():
    refused(lambda: Adapter(rank=9), "'rank' is 9")
    refused(lambda: Adapter(tested=0), "'tested' is 0")


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_what_ships_was_trained_by_this_recipe(behaviour: Behaviour):
    record = json.loads((shipped("models") / "adapters" / f"{behaviour}-0" / "training.json").read_text())
    assert record["accuracy"]["40"]["held out"] > 0.9
    assert record["name"] == Adapter(behaviour=behaviour).name


def test_what_ships_puts_one_sight_elsewhere(smol: Any):
    asked = "<|im_start|>user\nWhich city is the Eiffel Tower in?<|im_end|>\n<|im_start|>assistant\nIt is in"
    for model, city in ((smol, "Paris"), (smol.adapted("smollm2-oslo"), FALSE)):
        ids = torch.tensor([model.tokenizer(asked, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            said = int(model.lanes.plain(input_ids=ids).logits[0, -1].argmax())
        assert model.tokenizer.decode([said]) == f" {city}"
