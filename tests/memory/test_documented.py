"""What the documents say about memory is what the code says."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvprobe.memory.budget import budget
from kvprobe.memory.widths import FOLLOWED
from tests.memory.families import TINY

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results" / "memory.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def calculators() -> Iterator[ModuleType]:
    """`benchmarks/memory.py`, which is a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("memory")


def test_the_table_of_calculators_is_the_one_that_the_script_prints(calculators: ModuleType):
    assert "\n".join(calculators.table()) in PAGE


def test_where_all_layers_are_alike_the_public_formulas_agree_with_the_budget(calculators: ModuleType):
    config = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields = {**config, "model_type": "llama", "intermediate_size": 8, "vocab_size": 8}
    logical_bytes = sum(budget(fields, context=100, dtype="bfloat16").logical)
    assert calculators.hf_mem(config, 100) == calculators.lmcache("some/llama", config, 100) == logical_bytes


def test_the_documented_number_of_families_is_right():
    assert f"{len({kind for kind, _ in TINY.values()})} families" in PAGE
    assert f"random models of {len(FOLLOWED)} families are within 3 %" in PAGE
