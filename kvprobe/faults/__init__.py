"""Faults: operators that damage a cache, one family a file; see `kvprobe.faults.fault` for what a fault is."""

from kvprobe.faults.bit_flips import BitFlips
from kvprobe.faults.context import FaultContext, Queries
from kvprobe.faults.donors import Distractor, ForeignBlock, Splice, StaleBlock, scaffold
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.faults.gaussian import Gaussian
from kvprobe.faults.layouts import ChannelOrder, Misread
from kvprobe.faults.not_a_number import NotANumber
from kvprobe.faults.overlap import OverlappingKV
from kvprobe.faults.paged import WrongPointers
from kvprobe.faults.permuted import Permuted
from kvprobe.faults.position_shift import PositionShift
from kvprobe.faults.precision import ForeignScales, Fp8Saturation, Fp8Scale, QuantisationNoise
from kvprobe.faults.scaled import Scaled
from kvprobe.faults.scope import Scope, bands
from kvprobe.faults.strike import Damage, NonFinite
from kvprobe.faults.struck import Struck
from kvprobe.faults.zeros import Zeros

__all__ = [
    "BitFlips",
    "ChannelOrder",
    "Damage",
    "Distractor",
    "Draws",
    "Fault",
    "FaultContext",
    "ForeignBlock",
    "ForeignScales",
    "Fp8Saturation",
    "Fp8Scale",
    "Gaussian",
    "Misread",
    "NonFinite",
    "NotANumber",
    "OverlappingKV",
    "Permuted",
    "PositionShift",
    "QuantisationNoise",
    "Queries",
    "Scaled",
    "Scope",
    "Splice",
    "StaleBlock",
    "Struck",
    "WrongPointers",
    "Zeros",
    "bands",
    "scaffold",
]
