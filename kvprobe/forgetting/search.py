"""Whether the secret can be found by trying: which one, forgotten in the same way, leaves the cache at hand?

Anyone who has a cache, the text that stays and the weights can compute the cache of any secret, and keeps, letter by
letter, what comes nearer: the inversion of caches by collision (arXiv 2508.09442), of the retained slots.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.cache.cache import KVCache
from kvprobe.forgetting.hidden_secret import HiddenSecret
from kvprobe.forgetting.trace import Slots, seen
from kvprobe.forgetting.ways import Way, forgotten
from kvprobe.inference.model import Model
from kvprobe.progress import Bar
from kvprobe.stats import Estimate, binomial

ROUNDS = 3
"""Times that every digit is tried."""
STARTS = 3
"""Random secrets from which a search begins anew while it has not found the cache itself."""


@dataclass(frozen=True)
class Search:
    """What searching found.

    Attributes:
        found: share of the secrets that were found.
        tries: caches that were computed for each, on average.
        blind: share that as many blind guesses would find; where all secrets are tried and one is named, that of one
            guess.
    """

    found: Estimate
    tries: float
    blind: float


def search(
    model: Model,
    way: Way,
    case: HiddenSecret,
    caches: Sequence[KVCache],
    secrets: Sequence[str],
    targets: int,
    rng: np.random.Generator,
) -> Search:
    """Search for the secrets behind some of the caches, which the search does not know.

    Digits are tried one by one. Where secrets differ in more than digits, all of them are tried, which finds the right
    one wherever caches differ.
    """
    found, tries = 0, 0
    chosen = range(1, 1 + min(targets, len(secrets) - 1))  # the first is the conversation's own
    for target in Bar(chosen, desc="Searching for secrets", unit="secret"):
        hit, tried = _one(model, way, case, caches[target], secrets[target], secrets, rng)
        found, tries = found + hit, tries + tried
    mean = tries / len(chosen)
    digits = len(_places(secrets))
    blind = 1 - (1 - 10.0**-digits) ** mean if digits else 1 / len(secrets)
    return Search(binomial(found, len(chosen)), mean, blind)


def _places(secrets: Sequence[str]) -> list[int]:
    """Of the digits, where these are all that can differ."""
    alike = len({re.sub(r"[0-9]", "0", secret) for secret in secrets}) == 1
    return [match.start() for match in re.finditer(r"[0-9]", secrets[0])] if alike else []


def _one(
    model: Model,
    way: Way,
    case: HiddenSecret,
    target: KVCache,
    truth: str,
    secrets: Sequence[str],
    rng: np.random.Generator,
) -> tuple[bool, int]:
    """Whether the secret of a cache was found, and how many caches were computed."""
    known: dict[str, float] = {}

    def far(secret: str) -> float:
        if secret not in known:
            known[secret] = distance(model, target, forgotten(model, way, case, secret))
        return known[secret]

    places = _places(secrets)
    if not places:
        return min(secrets, key=far) == truth and _one_is_nearest(list(map(far, secrets))), len(known)
    best = ""
    for _ in range(STARTS):
        guess = [*case.secret]
        for place in places:
            guess[place] = str(rng.integers(10))
        for _ in range(ROUNDS):
            before = [*guess]
            for place in places:
                drawn = [[*guess[:place], str(digit), *guess[place + 1 :]] for digit in range(10)]
                guess = min(drawn, key=lambda letters: far("".join(letters)))
            if guess == before:
                break
        best = min(("".join(guess), best) if best else ("".join(guess),), key=far)
        if far(best) == 0.0:
            break
    return best == truth and _one_is_nearest(list(known.values())), len(known)


def _one_is_nearest(distances: list[float]) -> bool:
    """Whether one is nearer than all others."""
    return len(distances) < 2 or sorted(distances)[0] < sorted(distances)[1]


def distance(model: Model, one: KVCache, other: KVCache) -> float:
    """How far what later tokens see of two caches is apart, relative to its size; more than 1 where slots differ."""
    slots = Slots.of([one, other])
    off = size = 0.0
    for layer in range(one.n_layers):
        mine, theirs = (seen(model, cache, slots, number, layer) for number, cache in enumerate((one, other)))
        for name, tensor in mine.items():
            off += float((tensor - theirs[name]).double().square().sum())
            size += float(tensor.double().square().sum())
    return float(slots.differ) + ((off / size) ** 0.5 if size else 0.0)
