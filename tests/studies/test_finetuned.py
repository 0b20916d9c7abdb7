"""The finetuned study: a whole run of a tiny model, readings by hand, and what made-up tables decide."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model, load
from kvprobe.studies.finetuned import Config
from kvprobe.studies.finetuned.collect import ALL, PARTS, SEGMENTS, WHO, conversations, prompt_of
from kvprobe.studies.finetuned.conclude import concluded
from kvprobe.studies.finetuned.study import STUDY
from kvprobe.tasks.behaviours import BEHAVIOURS
from kvprobe.tidy import chosen
from kvprobe.training.adapters import Adapter
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused
from tests.studies.runs import whole_run


@pytest.fixture(scope="module")
def model() -> Model:
    return llama(tokenizer=tiny_tokenizer(), num_hidden_layers=2)


@pytest.fixture(scope="module")
def config(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Config:
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapters")
    model.lanes.plain.save_pretrained(base)
    model.tokenizer.save_pretrained(base)
    for seed, behaviour in enumerate(BEHAVIOURS):
        recipe = Adapter(behaviour=behaviour, base=str(base), rank=2)
        torch.manual_seed(seed)
        changed = recipe.model()
        for name, parameter in changed.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter.data, std=0.05)
        (folder / recipe.name).mkdir()
        recipe.write(changed, folder / recipe.name)
    return Config(behaviours=("german",), prompts=2, layers=1, adapters=str(folder))


@pytest.fixture(scope="module")
def finished(model: Model, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return whole_run(STUDY, config, model, tmp_path_factory.mktemp("runs"), [True, True, True, True, None])


def test_numbers_are_those_of_reading_by_hand(model: Model, config: Config, finished: Run):
    rows = chosen(finished.df(), {"behaviour": "german", "sample": 1})
    tuned = load(model.lanes.plain, tokenizer=model.tokenizer).adapted(f"{config.adapters}/german-0")
    told = conversations(config, "german")[1]
    cached, last, (right, wrong) = prompt_of(model, told)
    assert {*cached.segments} == {*SEGMENTS}
    readers = {"base": model, "tuned": tuned}

    def margin(reader: str, cache: Any) -> float:
        logits = readers[reader].extend(replace(cache, made_by=None), last)[1][0, -1]
        return float(logits[right] - logits[wrong])

    own = {name: one.prefill(cached) for name, one in readers.items()}
    ends = chosen(rows, {"what": "end"}).set_index("reader")["margin"]
    assert ends.to_dict() == pytest.approx({name: margin(name, own[name]) for name in WHO}, abs=1e-4)
    assert abs(ends["base"] - ends["tuned"]) > 0.01
    for reader, other in (WHO, WHO[::-1]):
        cell = {"what": "band", "reader": reader, "part": "V", "segment": "fact", "layer": 1}
        (said,) = chosen(rows, cell)["margin"]
        base, donor = (replace(own[name], made_by=None) for name in (reader, other))
        assert said == pytest.approx(margin(reader, base.patch(donor, "fact", layers=[1], part="V")), abs=1e-4)
        end = cached.span("fact").stop
        mixed = readers[reader].extend(replace(own[other].rewind(slots=end), made_by=None), cached[end:])[0]
        (said,) = chosen(rows, {"what": "handover", "reader": reader, "segment": "fact"})["margin"]
        assert said == pytest.approx(margin(reader, mixed), abs=1e-4)
    plain: Any = load(model.lanes.plain, tokenizer=model.tokenizer).adapted(f"{config.adapters}/german-0").lanes.plain
    for name, module in model.lanes.plain.named_modules():
        if isinstance(module, torch.nn.Linear) and "v_proj" not in name:
            plain.get_submodule(name).weight = module.weight
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([(cached + last).ids])).logits[0, -1]
    (said,) = chosen(rows, {"what": "matrix", "reader": "base", "place": "v_proj"})["margin"]
    assert said == pytest.approx(float(logits[right] - logits[wrong]), abs=1e-4)


def test_no_conversation_counts_twice():
    for behaviour in BEHAVIOURS:
        assert len({*conversations(Config(prompts=16), behaviour)}) == 16
    refused(lambda: conversations(Config(prompts=17), "oslo"), "16 different conversations of 'oslo'")


def test_an_adapter_that_is_not_there_is_refused(config: Config):
    refused(lambda: STUDY.inputs(replace(config, adapters="elsewhere")), "There is no adapter in")


def made_up(prompts: int = 12) -> pd.DataFrame:
    """The base reads all of the way from V of the fact in the last of four layers, where weights change most."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for sample in range(prompts):
        way = rng.normal(8, 1)
        for reader in WHO:
            sign = 1 if reader == "base" else -1

            def row(what: str, share: float, *, reader: str = reader, way: float = sign * way, **keys: Any) -> None:
                keys = {"part": "", "segment": "", "place": "", "layer": -1} | keys
                rows.append({"what": what, "reader": reader, "moved": share * way, "way": way, **keys})  # noqa: B023

            rows.append({"what": "end", "reader": reader, "margin": -sign * way / 2, "says": float(sign < 0)})
            for part in PARTS:
                for segment in (*SEGMENTS, ALL):
                    full = float("V" in part and segment in ("fact", ALL))
                    row("whole", full, part=part, segment=segment)
                    for layer in range(4):
                        row("band", full * layer**2 / 9, part=part, segment=segment, layer=layer)
            for segment in SEGMENTS:
                row("handover", float(segment != "system"), segment=segment)
            for layer in range(4):
                row("band of weights", layer / 6, layer=layer)
            row("matrix", 0.5, place="v_proj")
            row("control", 0.0, place="none")
            row("control", 1.0, place="sum")
        for place in ("itself", "shuffled", "other"):
            rows.append(
                {"what": "control", "reader": "base", "place": place, "moved": 0.01 * (place != "itself"), "way": way}
            )
        for place in WHO:
            rows += [{"what": "rest", "reader": reader, "place": place, "margin": -1.0} for reader in WHO]
        for one in rows:
            one.setdefault("sample", sample)
    table = pd.DataFrame(rows).fillna({"part": "", "segment": "", "place": "", "layer": -1})
    return table.assign(behaviour="oslo")


def example() -> tuple[Config, Conclusion]:
    config = Config(behaviours=("oslo",), prompts=12)
    return config, concluded(made_up(), config)


def test_shares_of_the_way_verdicts_and_agreement():
    _, conclusion = example()
    at, base = conclusion.findings.at, {"behaviour": "oslo", "reader": "base"}
    assert all(control.holds for control in conclusion.controls)
    assert at("whole", part="V", segment="fact", **base).mean == pytest.approx(1)
    assert at("whole", part="K", segment="fact", **base).mean == pytest.approx(0)
    assert at("content", segment=ALL, **base).above()
    assert at("band", part="KV", segment="fact", layer=3, **base).mean == pytest.approx(1)
    assert at("handover", segment="system", **base).mean == pytest.approx(0)
    assert at("agreement", **base).mean == pytest.approx(1)
    assert at("weights", layer=3, behaviour="oslo", reader="tuned").mean == pytest.approx(0.5)


def test_ranks_that_no_conversation_changes_are_not_certain():
    config, table = Config(behaviours=("oslo",), prompts=12), made_up()
    weights = table["what"] == "band of weights"
    table.loc[weights, "layer"] = table.loc[weights, "layer"].replace({1: 2, 2: 1})
    agreement = concluded(table, config).findings.at("agreement", behaviour="oslo", reader="base")
    assert agreement.mean == pytest.approx(0.8), "of four bands two have changed places"
    missed = 1 - 0.025 ** (1 / 12)
    assert agreement.low == pytest.approx(0.8 - missed * 1.8)
    assert agreement.high == pytest.approx(0.8 + missed * 0.2)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ({"place": "itself"}, 0),
        ({"place": "none"}, 1),
        ({"place": "sum"}, 2),
        ({"what": "handover", "segment": "header"}, 3),
        ({"place": "shuffled"}, 4),
    ],
)
def test_a_control_fails_if_what_it_checks_does(where: dict[str, Any], number: int):
    table = made_up()
    table.loc[chosen(table, where).index, "moved"] += 3
    holds = [control.holds for control in concluded(table, Config(behaviours=("oslo",), prompts=12)).controls]
    assert holds == [place != number for place in range(5)]
