"""What kvprobe promises: the names of `__all__`, and that importing them costs nothing; the doctor."""

import subprocess
import sys

import pytest

import kvprobe
from kvprobe.inference.model import Model
from tests.models import llama


def test_every_promised_name_is_there_and_documented():
    for name in kvprobe.__all__:
        assert getattr(kvprobe, name).__doc__
    assert set(dir(kvprobe)) == set(kvprobe.__all__)


def test_an_unknown_name_is_answered_with_the_near_one():
    with pytest.raises(AttributeError, match="'Transcript'"):
        _ = kvprobe.Transcipt


def test_importing_kvprobe_imports_nothing_heavy():
    check = "import sys, kvprobe; assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_doctor_finds_nothing_wrong_with_a_sound_model_and_much_with_a_broken_one(tiny_llama: Model):
    from kvprobe.inference.doctor import examine

    checks = list(examine(tiny_llama))
    assert len(checks) == 8
    assert all(check.passed for check in checks)


def test_the_doctor_notices_lanes_that_drift_apart(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    from kvprobe.inference.doctor import examine

    norm = tiny_llama.lanes.hooked.bridge.original_model.model.norm
    handle = norm.register_forward_hook(lambda module, args, output: output * 1.01)
    failed = {check.name for check in examine(tiny_llama) if not check.passed}
    handle.remove()
    assert failed == {"both lanes agree on logits"}


@pytest.mark.parametrize("setting", ["eos_token_id", "repetition_penalty"])
def test_the_doctor_decodes_both_sides_alike_whatever_the_generation_config_says(setting: str):
    from kvprobe.inference.doctor import _CUT, _greedy_against_library, _sample

    model = llama()
    tokens = _sample(model)[:_CUT]
    said = model.generate(tokens, max_new_tokens=16).tokens[0]
    value = said[3] if setting == "eos_token_id" else 1.8
    setattr(model.lanes.plain.generation_config, setting, value)
    assert _greedy_against_library(model, tokens).passed
    assert getattr(model.lanes.plain.generation_config, setting) == value
