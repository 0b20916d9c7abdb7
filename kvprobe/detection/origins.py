"""Slots that another model computed, or that were fitted, in one of two caches alone: differences that ledgers know.
And what tokens, held against all layers, say of rows that no hypothesis makes from the reference's.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.cache.ledger import OWN
from kvprobe.cache.stored import AnyCache
from kvprobe.detection.damaged import FOREIGN, Damaged, Explanation, Kind, LookUp, slots_in_words
from kvprobe.fingerprint import Maker

AFTER_OTHERS = Explanation(
    "after other slots",
    1.0,
    "They follow slots of another origin, and nothing makes them from the reference's: they were computed with those "
    "in view, or hold another text.",
)
"""Of slots whose origin is the same in both."""
_REPEATED, _TOKENS, _DENSE, _EQUAL = 3, 4, 0.95, 0.05
"""Of slots by which other weights are recognised: how many repeat the token of another one, how many tokens are
different, which share of the slots between them they are, and how far off their numbers may be for one token."""
KNOWN: tuple[Kind, ...] = ("another model", "fitted slots")
"""Kinds that need no hypothesis, since the ledgers say so."""


def known_origins(cache: AnyCache, reference: AnyCache, row: int, count: int) -> Iterator[tuple[Tensor, Explanation]]:
    """The slots of a row, of the first so many, whose origin is another in the two caches, and what it is."""
    fitted, expected = (one.ledger.fitted[row, :count].cpu() for one in (cache, reference))
    if bool((fitted != expected).any()):
        which = "the first cache" if bool((fitted & ~expected).any()) else "the second cache"
        yield _known(fitted != expected, "fitted slots", f"were fitted in {which} alone: no model read a token there")
    pairs = torch.stack([one.ledger.makers[row, :count].cpu() for one in (cache, reference)])
    for numbers in pairs.unique(dim=1).T.tolist():
        ours, theirs = (_maker(one, number) for one, number in zip((cache, reference), numbers, strict=True))
        if ours is None or theirs is None or ours.same(theirs):
            continue
        where = (pairs == torch.tensor(numbers)[:, None]).all(0) & ~fitted & ~expected
        if bool(where.any()):
            names = [ours.name, theirs.name]
            if names[0] == names[1]:
                names = [f"{one.name} ({one.fingerprint[:8]})" for one in (ours, theirs)]
            said = f"were computed by {names[0]}, and those of the second cache by {names[1]}"
            yield _known(where, "another model", said)


def one_for_each_token(
    damaged: Damaged, tokens: Int[Tensor, "slots"], look_up: LookUp | None = None
) -> Explanation | None:
    """What is said of slots of the first layer that hold one V for each token, all another one than the reference's.

    V depends on nothing but the token there, but for models that add a position to it, where nothing is recognised. So
    either the weights are others, or the tokens are, each replaced by the same one throughout.

    Args:
        look_up: finds the nearest of all tokens of the model; without it they are looked for in the reference.
    """
    part = next((name for name in ("V", "latent") if name in damaged.parts), None)
    slots = damaged.slots
    if part is None or len(slots) < _DENSE * (int(slots[-1]) - int(slots[0]) + 1):
        return None
    held, right = (rows.transpose(0, 1).flatten(1) for rows in damaged.rows(part, slots))
    ids, which, counts = tokens[slots].unique(return_inverse=True, return_counts=True)
    if len(slots) - len(ids) < _REPEATED or len(ids) < _TOKENS:
        return None
    by_token = torch.zeros(len(ids), held.shape[1]).index_add(0, which, held) / counts[:, None]
    size = right.norm(dim=1).median()
    within = (held - by_token[which]).norm(dim=1) / size
    moved, spread = (held - right).norm(dim=1) / size, (by_token - by_token.mean(0)).norm(dim=1) / size
    equal = min(_EQUAL, float(moved.median()) / 4, float(spread.median()) / 4)
    if not float(within.max()) < equal:
        return None
    held_by = f"Slots {slots_in_words(slots)} hold one {part} for each token, another one than the reference"
    if look_up is None:
        expected = torch.zeros_like(by_token).index_add(0, which, right) / counts[:, None]
        distances, place = torch.cdist(by_token, expected).fill_diagonal_(torch.inf).min(1)
        nearest, fewest = ids[place], 1
    else:
        nearest, distances = look_up(part, by_token)
        fewest = len(ids) / 2
    replaced = (distances < equal * size) & (nearest != ids)
    if int(replaced.sum()) >= fewest:
        pair = int(replaced.int().argmax())
        return Explanation(
            "foreign prefix",
            1.0,
            f"{held_by}: that of another token for {int(replaced.sum())} of {len(ids)} tokens, as of "
            f"{int(nearest[pair])} in place of {int(ids[pair])}. They are of another text.",
            FOREIGN - 1.0,
        )
    others = "no token of this model has" if look_up else "no other token of the reference has"
    either = "" if look_up else ", or hold a text in which each token is replaced by another, which `model` would show"
    return Explanation(
        "other weights",
        1.0,
        f"{held_by}, which {others}: they were computed by other weights, as those of another model or with an "
        f"adapter, or were all changed in one way{either}.",
    )


def after_another_text(
    places: Sequence[Mapping[str, Bool[Tensor, "rows _ slots"]]], row: int, slots: Int[Tensor, "chosen"]
) -> bool:
    """Whether slots hold their own tokens in the first layer and are off in all others, as where other text stood
    before them; not slot 0, before which none stands."""
    struck = [torch.stack([where[row].any(0)[slots] for where in parts.values()]).any(0) for parts in places if parts]
    return (
        int(slots[0]) > 0
        and not bool(struck[0].any())
        and len(struck) > 1
        and all(map(bool, map(torch.any, struck[1:])))
    )


def _known(where: Bool[Tensor, "slots"], kind: Kind, said: str) -> tuple[Tensor, Explanation]:
    return where, Explanation(kind, 0.0, f"Slots {slots_in_words(where.nonzero()[:, 0])} {said}.")


def _maker(cache: AnyCache, number: int) -> Maker | None:
    return cache.made_by if number == OWN else cache.ledger.others[number]
