"""What kvprobe promises: the names of `__all__`, and that importing them costs nothing; the doctor."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

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


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of kvprobe and of its public modules, and public methods of its classes."""
    modules = [kvprobe, *(getattr(kvprobe, name) for name in kvprobe.__all__)]
    for module in (module for module in modules if isinstance(module, ModuleType)):
        for name in getattr(module, "__all__", ()):
            member = getattr(module, name)
            if inspect.isclass(member):
                methods = inspect.getmembers(member, lambda value: inspect.isfunction(value) or inspect.ismethod(value))
                yield from (
                    (f"{name}.{method}", function) for method, function in methods if not method.startswith("_")
                )
            elif inspect.isfunction(member):
                yield name, member


def test_every_public_function_names_its_arguments_so_that_they_complete():
    functions = dict(public_functions())
    assert len(functions) > 150
    open_ended = {
        name
        for name, function in functions.items()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())
    }
    assert open_ended == {"render", "Transcript.from_messages", "read_chat"}  # whose values a template names


@pytest.mark.parametrize(
    ("outer", "inner", "given"),
    [
        ("inference.model.Model.generate", "inference.generate.generate", {"lanes", "prompts", "past"}),
        ("inference.model.Model.sweep", "inference.sweep.sweep", {"lanes", "questions"}),
        ("inference.model.Model.budget", "memory.budget.budget", {"model", "dtype"}),
        ("inference.model.Model.capture", "inference.capture.capture", {"lanes", "tokens", "families"}),
        ("patching.pairs.patch_pairs", "patching.patch_sweep.patch_sweep", {"base", "donor", "suffix", "metric"}),
        ("report.views.page.heads", "report.views.patterns.heads_view", {"caption"}),
    ],
)
def test_arguments_that_are_passed_on_have_the_same_defaults(outer: str, inner: str, given: set[str]):
    outside, inside = (inspect.signature(function_at(path)).parameters for path in (outer, inner))
    passed_on = set(inside) - given
    assert passed_on <= set(outside)
    assert {name for name in passed_on if str(outside[name].default) != str(inside[name].default)} <= {"done"}


def function_at(path: str) -> Callable[..., Any]:
    module, name = path.split(".Model.") if ".Model." in path else path.rsplit(".", 1)
    if ".Model." in path:
        return getattr(Model, name)
    return getattr(import_module(f"kvprobe.{module}"), name)


def test_the_version_is_that_of_the_package_and_the_module_runs_as_the_command():
    assert kvprobe.__version__ == version("kvprobe")
    done = subprocess.run([sys.executable, "-m", "kvprobe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kvprobe.__version__


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
