"""What kvprobe promises: the names of `__all__`, and that the README's code runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvprobe
from kvprobe.model import Model
from tests.models import llama

ROOT = Path(__file__).resolve().parent.parent


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


def test_the_readmes_python_runs_and_the_mask_takes_the_code_away(smol: Model, capsys: pytest.CaptureFixture[str]):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    full, kept, fresh = eval(capsys.readouterr().out)
    assert "48213" in full
    assert "48213" not in kept
    assert "48213" not in fresh


def test_the_tutorials_faults_run_and_noise_does_more_than_noise_that_looks_like_keys(smol: Model):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "model.sweep" in each]
    names = {"model": smol, "kv": kvprobe}
    exec(compile(code, "tutorial.md", "exec"), names)
    layer, channel, *_ = names["swept"].outcomes
    assert sum(layer.kl) > sum(channel.kl)


def test_the_tutorials_budget_runs_and_is_what_the_model_holds(
    smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "kv.budget" in each]
    monkeypatch.chdir(tmp_path)
    names = {"model": smol, "kv": kvprobe}
    exec(compile(code, "tutorial.md", "exec"), names)
    said = capsys.readouterr().out
    assert "GQA 9:3" in said
    assert kvprobe.measure(smol, names["planned"]).cache == names["planned"].cache
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_the_tutorials_probe_runs_and_says_what_was_read_above_what(
    smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    (code,) = [each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "kv.probe" in each]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "tutorial.md", "exec"), {"model": smol, "kv": kvprobe})
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["random", "leave-context-out", "paired"]
    assert (tmp_path / "leak.png").stat().st_size > 10_000


def test_the_doctor_finds_nothing_wrong_with_a_sound_model_and_much_with_a_broken_one(tiny_llama: Model):
    from kvprobe.doctor import examine

    checks = list(examine(tiny_llama))
    assert len(checks) == 8
    assert all(check.passed for check in checks)


def test_the_doctor_notices_lanes_that_drift_apart(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch):
    from kvprobe.doctor import examine

    norm = tiny_llama.lanes.hooked.bridge.original_model.model.norm
    handle = norm.register_forward_hook(lambda module, args, output: output * 1.01)
    failed = {check.name for check in examine(tiny_llama) if not check.passed}
    handle.remove()
    assert failed == {"both lanes agree on logits"}


@pytest.mark.parametrize("setting", ["eos_token_id", "repetition_penalty"])
def test_the_doctor_decodes_both_sides_alike_whatever_the_generation_config_says(setting: str):
    from kvprobe.doctor import _CUT, _greedy_against_library, _sample

    model = llama()
    tokens = _sample(model)[:_CUT]
    said = model.generate(tokens, max_new_tokens=16).tokens[0]
    value = said[3] if setting == "eos_token_id" else 1.8
    setattr(model.lanes.plain.generation_config, setting, value)
    assert _greedy_against_library(model, tokens).passed
    assert getattr(model.lanes.plain.generation_config, setting) == value
