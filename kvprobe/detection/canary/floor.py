"""How far two answers of a sound engine lie apart, and from where on it is a wrong cache.

Numbers of floating point depend on how a matrix product is cut: on what else is in the batch (vllm #39146), and on
whether a token is read with its prompt or after it. So each kind of benign difference is measured on the target itself,
without any reuse. Logarithms of these distances are taken as normal. The threshold is where all comparisons of a run
together exceed it with a probability of 1 %: a prediction bound from the median and the median deviation, which single
wrong answers among the measured ones do not move.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, isfinite, pi, sqrt

import numpy as np
from scipy.stats import t as student

from kvprobe.detection.canary.target import EngineAnswer, Token

FALSE_ALARMS = 0.01
"""The probability that a sound engine fails anywhere in a run."""
RESOLUTION = 1e-3
"""Nats: no smaller distance is an alarm."""
LEAST_SPREAD = 0.25
"""Of the logarithm of a distance: that of a root mean square of 20 numbers alone is 0.16."""
FEWEST = 8
"""Distances from which a spread is estimated."""


def distances(first: EngineAnswer, second: EngineAnswer) -> list[float]:
    """How far two answers to one prompt lie apart, token by token, up to and with the first at which they differ.

    Tokens after that are said to different texts.
    """
    same = [one == other for one, other in zip(first.tokens, second.tokens, strict=False)]
    comparable = same.index(False) + 1 if False in same else max(1, len(first.tops), len(second.tops))
    if min(len(first.tops), len(second.tops)) < comparable:  # one ends where the other goes on
        return [inf]
    return [distance(*tops) for tops in zip(first.tops[:comparable], second.tops[:comparable], strict=True)]


def distance(first: Mapping[Token, float], second: Mapping[Token, float]) -> float:
    """The root mean square difference of log-probabilities over tokens in either list, in nats.

    A token that one list lacks is at most as likely there as its last, so that is what the other is held against.
    Infinite where something is not finite, or nothing is reported.
    """
    if not first or not second or not all(map(isfinite, [*first.values(), *second.values()])):
        return inf
    last = min(first.values()), min(second.values())
    squares = [
        (first[token] - second[token]) ** 2
        if token in first and token in second
        else max(0.0, first[token] - last[1] if token in first else second[token] - last[0]) ** 2
        for token in {**first, **second}
    ]
    return sqrt(sum(squares) / len(squares))


def threshold(floors: Mapping[str, Sequence[float]], prompts: int, comparisons: int) -> float:
    """The distance that none of so many comparisons of a sound engine exceeds, but in 1 % of runs.

    Args:
        floors: distances of benign differences by kind.
        prompts: from which those are; distances of one prompt resemble each other.
    """
    return max([RESOLUTION, *(bound(kind, prompts, comparisons) for kind in floors.values())])


def bound(benign: Iterable[float], prompts: int, comparisons: int) -> float:
    """The threshold of one kind of benign difference; zeros, where the engine computed the same twice, do not count."""
    logs = np.log([value for value in benign if 0 < value < inf])
    if not len(logs):
        return 0.0
    few = len(logs) < FEWEST
    centre = logs.max() if few else np.median(logs)
    spread = LEAST_SPREAD if few else max(LEAST_SPREAD, 1.4826 * float(np.median(np.abs(logs - centre))))
    quantile = student.ppf(1 - FALSE_ALARMS / comparisons, prompts - 1)
    return exp(float(centre) + quantile * spread * sqrt(1 + pi / 2 / prompts))
