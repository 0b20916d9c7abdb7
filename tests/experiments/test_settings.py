"""Settings from outside: typed, bounded, near matches named."""

from pathlib import Path

import pytest

from kvprobe.errors import UserError
from kvprobe.experiments.presets import Preset, presets, read_preset
from kvprobe.experiments.settings import from_mapping
from kvprobe.files import read_yaml
from kvprobe.studies import STUDIES, find
from kvprobe.studies.leakage.config import AVAILABLE_CONTEXTS, Config
from kvprobe.tasks.passcode import contexts


def test_an_unknown_setting_names_the_near_one():
    with pytest.raises(UserError, match="'samples'"):
        from_mapping(Config, {"sampels": 100})


@pytest.mark.parametrize(
    ("setting", "value"), [("samples", "many"), ("samples", 1.5), ("model", 3), ("seed", True), ("seed", None)]
)
def test_a_value_of_the_wrong_type_is_refused(setting: str, value: object):
    with pytest.raises(UserError, match=setting):
        from_mapping(Config, {setting: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"contexts": 0},
        {"contexts": AVAILABLE_CONTEXTS + 1},
        {"contexts": 4},
        {"folds": 2},
        {"samples": 10},
        {"samples": 769},
        {"batch": 0},
        {"seed": -1},
    ],
)
def test_a_value_out_of_range_is_refused_with_what_was_expected(settings: dict[str, int]):
    with pytest.raises(UserError, match="expected"):
        from_mapping(Config, settings)


def test_there_are_as_many_contexts_as_the_config_promises():
    assert len(contexts()) == AVAILABLE_CONTEXTS


def test_every_preset_that_ships_is_a_valid_config():
    assert presets()
    for preset in presets().values():
        from_mapping(find(preset.study).config, preset.settings)
        assert preset.question
        assert preset.minutes


def test_every_study_has_a_preset():
    assert set(STUDIES) == {preset.study for preset in presets().values()}


def test_an_unknown_study_names_the_near_one():
    with pytest.raises(UserError, match="'leakage'"):
        find("leakge")


def test_a_preset_is_read_from_yaml(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("study: leakage\nsettings: {contexts: 10, samples: 100}\nminutes: 2\n")
    assert read_preset(path) == Preset("mine", "leakage", {"contexts": 10, "samples": 100}, minutes=2.0)


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
    with pytest.raises(UserError, match=message) as error:
        read_preset(path)
    assert "\n" not in str(error.value)


def test_a_huge_or_missing_file_is_refused(tmp_path: Path):
    path = tmp_path / "huge.yaml"
    path.write_text("a: " + "x" * 2000)
    with pytest.raises(UserError, match="at most 1000"):
        read_yaml(path, limit=1000)
    with pytest.raises(UserError, match="no file"):
        read_yaml(tmp_path / "absent.yaml")
