"""Impossible settings, and fault contexts that lack something."""

import re
from collections.abc import Callable

import pytest

from kvprobe.faults import (
    Distractor,
    Fault,
    FaultContext,
    Fp8Saturation,
    Fp8Scale,
    Gaussian,
    OverlappingKV,
    PositionShift,
    QuantisationNoise,
    Scope,
    Splice,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.inference.model import Model
from tests.faults import SLOTS, after, square_cache
from tests.refusals import refused


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Zeros(at=-1), "Zeros has at=-1, an int; give a whole number of at least 0 or 'every'."),
        (lambda: Zeros(at="always"), "at='always', a str; give a whole number of at least 0 or 'every'"),
        (lambda: Gaussian("leyer"), "did you mean 'layer'"),
        (lambda: Gaussian(scale=-1.0), "scale=-1.0, a float; give a finite number of at least 0"),
        (lambda: Gaussian(scale=float("inf")), "scale=inf, a float; give a finite number"),
        (lambda: Gaussian(scale=float("nan")), "scale=nan, a float; give a finite number"),
        (lambda: WrongPointers("swaped"), "did you mean 'swapped'"),
        (lambda: WrongPointers(block=0), "WrongPointers has block=0, an int; give a whole number of at least 1."),
        (lambda: StaleBlock(block=-4), "StaleBlock has block=-4, an int; give a whole number of at least 1."),
        (lambda: OverlappingKV(last="K"), "'K'"),
        (lambda: Splice(above=-1), "above=-1, an int; give a whole number of at least 0."),
        (lambda: Splice(above=1.5), "above=1.5"),
        (lambda: PositionShift(by=1.5), "by=1.5, a float; give a whole number"),
        (lambda: Fp8Scale(0.0), "Fp8Scale has factor=0.0; it must be above 0."),
        (lambda: Fp8Saturation(float("nan")), "Fp8Saturation has room=nan, a float; give a finite number."),
        (lambda: Fp8Scale(1.0, "e4m4"), "did you mean 'e4m3'"),
        (lambda: QuantisationNoise(9), "bits=9, an int; give a whole number from 1 to 8."),
        (lambda: QuantisationNoise(2.5), "bits=2.5"),
        (lambda: QuantisationNoise(4, 0), "group=0, an int; give a whole number of at least 1."),
    ],
)
def test_impossible_settings_of_a_fault_are_refused(unchecked: None, make: Callable[[], Fault], sentence: str):
    refused(make, sentence)


def test_a_fault_context_that_lacks_something_is_refused_in_one_sentence():
    cache = square_cache(0)
    bare = FaultContext(cache, {"other": square_cache(1)})
    short = FaultContext(cache, {"scaffold": square_cache(1, SLOTS - 1)})
    refused(lambda: after(Distractor(), cache, context=bare), "no donor called 'distractor'; known are 'other'")
    refused(lambda: after(Splice(above=0), cache, context=bare), "no donor called 'scaffold'")
    refused(lambda: cache.corrupt(StaleBlock(block=4)), "no donor called 'distractor'")
    refused(lambda: after(PositionShift(by=1), cache, context=bare), "no rotary frequencies")
    refused(lambda: after(Gaussian("effect"), cache, context=bare), "needs the fault context's queries")
    refused(lambda: after(Splice(above=0), cache, context=short), "has 21 slots and the cache 22")
    refused(lambda: after(QuantisationNoise(4, 3), cache), "cannot be quantised in groups of 3; give a divisor")


def test_the_remedy_that_a_refusal_names_exists():
    cache = square_cache(0)
    for fault in (PositionShift(by=1), Gaussian("effect")):
        sentence = refused(lambda fault=fault: after(fault, cache, context=FaultContext(cache)), "Model.")
        for name in re.findall(r"Model\.(\w+)", sentence):
            assert hasattr(Model, name), sentence


def test_a_fault_prints_the_settings_that_are_not_defaults():
    assert str(Gaussian("channel", scale=2.0, at="every")) == "Gaussian(at=every, matched=channel, scale=2.0)"
    assert str(Zeros()) == "Zeros()"
    assert str(Splice(above=3, scope=Scope(rate=0.5))) == "Splice(scope=Scope(rate=0.5), above=3)"
