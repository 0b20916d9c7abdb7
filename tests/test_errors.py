"""Warnings name the line of the user's code that led to them."""

import linecache
import warnings
from collections.abc import Callable

import torch

import kvprobe as kv
from kvprobe.inference.model import Model


def lines_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [linecache.getline(one.filename, one.lineno).strip() for one in caught]


def test_a_warning_names_the_line_that_called_kvprobe_however_deep_it_arose(tiny_llama: Model):
    cache = tiny_llama.prefill(kv.Tokens.of(range(6)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        cache.mask(slots=[0])
        with torch.no_grad():
            cache.evict(slots=[0])
        tiny_llama.extend(cache, kv.Tokens.of(range(3)))
    assert lines_of(caught) == [
        "cache.mask(slots=[0])",
        "cache.evict(slots=[0])",
        "tiny_llama.extend(cache, kv.Tokens.of(range(3)))",
    ]


def test_one_line_is_warned_once_and_another_again(tiny_llama: Model):
    cache = tiny_llama.prefill(kv.Tokens.of(range(6)))

    def cell(source: str) -> Callable[[], None]:
        return lambda: exec(compile(source, source, "exec"), {"cache": cache})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        cell("for _ in range(3): cache.mask(slots=[0])")()
        cell("cache.mask(slots=[0])")()
    assert len(caught) == 2
