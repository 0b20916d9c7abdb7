"""Settings from outside: typed, bounded, near matches named."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from kvprobe.experiments.reproduce import flags
from kvprobe.experiments.settings import LAST, Settings, as_mapping, from_mapping, types_of
from kvprobe.faults.catalogue import REPORTED_FAULTS
from kvprobe.files import read_yaml
from kvprobe.presets import Preset, presets, read_preset
from kvprobe.studies import STUDIES, find, robustness
from kvprobe.studies.leakage import Config
from kvprobe.studies.robustness.collect import reported_beside
from kvprobe.studies.settings import AVAILABLE_CONTEXTS
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.passcode import contexts
from tests.refusals import refused


def test_an_unknown_setting_names_the_near_one():
    refused(lambda: from_mapping(Config, {"sampels": 100}), "'samples'")


@dataclass(frozen=True, kw_only=True)
class Every(Settings):
    """A setting of every type."""

    name: str = "a"
    count: int = 1
    share: float = 0.5
    follow: bool = True
    kind: Literal["one", "two"] = "one"
    names: tuple[str, ...] = ("b", "a")
    counts: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = (1.0,)
    kinds: tuple[Literal["one", "two"], ...] = ("one",)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name", 3),
        ("name", "x" * 5000),
        ("count", "many"),
        ("count", 1.5),
        ("count", True),
        ("count", None),
        ("count", 10**30),
        ("share", "half"),
        ("share", float("nan")),
        ("follow", 1),
        ("kind", "three"),
        ("names", "a,b"),
        ("names", []),
        ("names", ["a", "a"]),
        ("names", ["a", 1]),
        ("names", list(map(str, range(2000)))),
        ("counts", 1),
        ("counts", [1.5]),
        ("counts", [True]),
        ("rates", ["1e-7"]),
        ("rates", [float("inf")]),
        ("kinds", ["one", "three"]),
        ("seed", -1),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_value_of_the_wrong_type_or_size_is_refused_in_one_sentence(setting: str, value: Any):
    sentence = refused(lambda: from_mapping(Every, {setting: value}), f"etting '{setting}'")
    assert len(sentence) < 200


def test_a_value_is_held_in_its_type_and_numbers_are_sorted():
    config = from_mapping(Every, {"share": 1, "names": ["b", "a"], "counts": [3, 1, 2], "rates": [2, 0.5]})
    assert config == Every(share=1.0, names=("b", "a"), counts=(1, 2, 3), rates=(0.5, 2.0))
    assert [type(rate) for rate in config.rates] == [float, float]


@pytest.mark.parametrize("config", [Every(rates=(1e-7, 3.0)), *(study.config() for study in STUDIES.values())], ids=str)
def test_a_config_written_as_yaml_is_read_back_equal(config: Settings):
    assert from_mapping(type(config), yaml.safe_load(yaml.safe_dump(as_mapping(config)))) == config


def test_the_flags_that_a_report_prints_give_the_config_again():
    changed = Every(name="two words", follow=False, rates=(0.5, 2.0), kinds=("one", "two"))
    assert flags(changed) == ["--name 'two words'", "--no-follow", "--rates 0.5 2.0", "--kinds one two"]
    assert flags(Every()) == []


def test_settings_of_every_study_come_after_its_own():
    assert next(iter(types_of(Every))) == "model"
    assert tuple(types_of(Every))[-len(LAST) :] == LAST


def test_there_are_as_many_contexts_as_the_config_promises():
    assert len(contexts()) == AVAILABLE_CONTEXTS


def test_every_preset_that_ships_is_a_valid_config():
    assert presets()
    for preset in presets().values():
        from_mapping(find(preset.study).config, preset.settings)
        assert preset.question


def test_every_study_has_a_preset():
    assert set(STUDIES) == {preset.study for preset in presets().values()}


def test_an_unknown_study_names_the_near_one():
    refused(lambda: find("leakge"), "'leakage'")


def test_a_preset_is_read_from_yaml(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("study: leakage\nsettings: {contexts: 10, samples: 100}\n")
    assert read_preset(path) == Preset("mine", "leakage", {"contexts": 10, "samples": 100})


LAUGHS = "a0: &a0 [ha, ha]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
"""A few hundred bytes that stand for more entries than memory holds."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("study: leakage\nsetings: {}\n", "settings"),
        ("settings: {}\n", "study"),
        ("study: leakage\nsettings: [1]\n", "settings"),
        ("- a\n- b\n", "mapping"),
        ("study: [unclosed", "YAML"),
        ("study: !!python/object/apply:os.system ['true']\n", "YAML"),
        (LAUGHS, "aliases"),
        ("study: &name leakage\nquestion: *name\n", "aliases"),
        ("study: " + "[" * 30_000, "nests deeper"),
        ("study: " + "{a: " * 500, "nests deeper"),
        ("- " * 10_000, "nests deeper"),
        ("minutes: " + "1:" * 20_000 + "1", "longer than"),
        ("minutes: " + "9" * 5_000, "longer than"),
        ("minutes: 2026-13-45", "month"),
        ("? [study]\n: leakage", "YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    refused(lambda: read_preset(path), message)


def test_a_huge_or_missing_file_is_refused(tmp_path: Path):
    path = tmp_path / "huge.yaml"
    path.write_text("a: " + "x" * 2000)
    refused(lambda: read_yaml(path, limit=1000), "at most 1000")
    refused(lambda: read_yaml(tmp_path / "absent.yaml"), "no file")


@pytest.mark.parametrize("name", [name for name in presets() if re.match("gsm8k-qwen2.5-\\d", name)])
def test_the_presets_of_gsm8k_have_the_settings_of_the_article(name: str):
    config = from_mapping(robustness.Config, presets()[name].settings)
    table = reported_beside(config, [find_task("gsm8k")])
    assert table is not None
    assert (config.faults, config.rates) == (REPORTED_FAULTS, table.rates)
    assert config.model.endswith(table.model)
    assert config.samples == (1319 if name.endswith("full") else table.samples)
    assert "canarypwn" in presets()[name].source


DEFAULT_PRESETS = {"bands": "bands-smollm2"} | {
    name: name for name in ("dangling", "filter_poison", "patching", "routing", "poisoning", "reliance")
}
"""The preset that has the settings that a study has by itself."""


@pytest.mark.parametrize(("name", "preset"), DEFAULT_PRESETS.items())
def test_the_plain_preset_has_the_default_settings(name: str, preset: str):
    config = find(name).config
    assert from_mapping(config, presets()[preset].settings) == config()


@pytest.mark.parametrize("name", [name for name in presets() if name.endswith("-full")])
def test_a_full_preset_has_more_samples_and_nothing_else_differs(name: str):
    some, full = (dict(presets()[each].settings) for each in (name.removesuffix("-full"), name))
    assert {setting for setting in some | full if some.get(setting) != full.get(setting)} == {"samples"}
    assert full["samples"] > some["samples"]
