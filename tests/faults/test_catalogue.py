"""The named faults."""

import re
from pathlib import Path

import pytest
import torch

from kvprobe.faults import Scope
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.inference.model import Model
from kvprobe.inference.trials import struck
from kvprobe.studies.robustness.conclude import CONTRASTS
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_fault_writes_the_parts_that_it_says(tiny_llama: Model, name: str):
    tokens, named = prompt(find_task("recite").items(1, 0)[0], tiny_llama.tokenizer), CATALOGUE[name]
    cache = tiny_llama.prefill(tokens)
    scope = Scope(rate=0.5, parts=named.parts, unit=named.unit("slot"))
    fault = named.make(scope=scope, at=0, transient=False)
    damaged = struck(tiny_llama, cache, fault)
    changed = {
        "k": any(not torch.equal(a, b) for a, b in zip(cache.keys, damaged.keys, strict=True)),
        "v": any(not torch.equal(a, b) for a, b in zip(cache.values, damaged.values, strict=True)),
    }
    only = "k" if name.endswith("-keys") or name in ("shifted", "overlapping") else None
    only = "v" if name.endswith("-values") else only
    assert changed == {"k": only in (None, "k"), "v": only in (None, "v")}


@pytest.mark.parametrize("unit", ["slot", "layer", "head", "number"])
def test_pages_keep_their_blocks_and_whole_vectors_their_numbers_whatever_the_unit(unit: str):
    def scope(name: str) -> Scope:
        return CATALOGUE[name].make(scope=Scope(unit=CATALOGUE[name].unit(unit))).scope

    for name in ("pointers-swapped", "pointers-repeated", "foreign-block", "stale-block", "overlapping"):
        assert (scope(name).unit, scope(name).block) == ("slot", 16)
    for name in ("permuted", "permuted-keys", "shifted"):
        assert scope(name).unit == ("slot" if unit == "number" else unit)
    for name in (*REPORTED_FAULTS, "fp8-scale", "rounded-2-bit"):
        assert scope(name).unit == unit


def test_only_faults_of_the_catalogue_are_compared():
    assert {name for pair in CONTRASTS for name in pair} <= set(CATALOGUE)


def test_the_page_on_faults_lists_their_names():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "faults.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"faults have names: (.*?)\. The others", page, flags=re.DOTALL)
    assert re.findall(r"`([^`]+)`", listed) == list(CATALOGUE)
