"""Slots that hold what other slots should hold, and blocks that are read in another layout than was written."""

from collections.abc import Iterator, Mapping
from itertools import permutations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.parts import KV
from kvprobe.detection.damaged import FOREIGN, Damaged, Explanation, slots_in_words

_MOST = 512
"""Damaged slots that are looked for elsewhere."""
_MOST_BLOCKS = 8
_MOST_WHOLE = 4096
"""Slots of a cache whose whole memory may have been read in another order."""
_EXACT = 0.1
_ORDERS = tuple(" ".join(order) for order in permutations(("part", "slot", "head")))


def copied(damaged: Damaged) -> Iterator[Explanation]:
    """Each damaged slot is another slot of the reference: blocks exchanged or repeated."""
    slots = damaged.slots[:_MOST]
    distances = {part: _distances(damaged, part, slots) for part in damaged.parts}
    if damaged.count < 2:
        return
    together = torch.stack([by_head.sum(0) for by_head in distances.values()]).sum(0)
    yield _copy(damaged, slots, {part: _sources(together, slots, damaged)[None] for part in damaged.parts}, "")
    if len(distances) > 1:
        apart = {part: _sources(by_head.sum(0), slots, damaged)[None] for part, by_head in distances.items()}
        yield _copy(damaged, slots, apart, "; each part apart")
    if max(map(len, distances.values())) > 1:
        by_heads = {
            part: torch.stack([_sources(one, slots, damaged) for one in by_head]) for part, by_head in distances.items()
        }
        yield _copy(damaged, slots, by_heads, "; each head apart")


def _copy(
    damaged: Damaged, slots: Int[Tensor, "some"], sources: Mapping[str, Int[Tensor, "_ some"]], apart: str
) -> Explanation:
    guess: dict[str, Tensor] = {}
    for part, source in sources.items():
        where = damaged.places[part]
        table = torch.arange(damaged.count).repeat(len(where), 1)
        table[damaged.heads(part)[:, None], slots] = source
        guess[part] = damaged.right[part][where.nonzero()[:, 0], table[where]].float()
    left = damaged.unexplained(guess)
    every = torch.cat([source.flatten() for source in sources.values()])
    here, there = set(slots.tolist()), set(every.tolist())
    block, first, last = damaged.block, int(slots[0]), int(slots[-1])
    # Copies are exact: rows of another text are a little like some of these, too.
    numbers, cost = {"from": int(every[0])}, 0.004 * bool(apart) + (0.0 if left < _EXACT else FOREIGN)
    content = f"{' and '.join(damaged.parts)} of slots {slots_in_words(slots)}"
    if here == there:
        return Explanation("permuted blocks", left, f"{content} changed places{apart}.", 0.004 + cost, numbers)
    words = f"{content} are what slots {slots_in_words(every.unique())} should hold{apart}"
    partial = first % block and last // block == first // block
    if partial and (last % block == block - 1 or last == damaged.count - 1):
        return Explanation("stale", left, f"{words}, from the middle of a block to its end.", 0.006 + cost, numbers)
    return Explanation("repeated blocks", left, f"{words}; their own content is missing.", 0.006 + cost, numbers)


def _distances(damaged: Damaged, part: str, slots: Int[Tensor, "some"]) -> Float[Tensor, "heads some slots"]:
    """Squared distances of what slots hold from what each slot should hold, in each damaged head, relative."""
    distances: list[Tensor] = []
    sizes: list[Tensor] = []
    for head in damaged.heads(part).tolist():
        held, right = damaged.held[part][head][slots].float(), damaged.right[part][head].float()
        size = right.square().sum(1)
        distances.append((held.square().sum(1)[:, None] + size - 2 * held @ right.T).clamp(min=0))
        sizes.append(size.mean())
    return torch.stack(distances) / torch.stack(sizes).sum().clamp(min=1e-30)


def _sources(
    distances: Float[Tensor, "some slots"], slots: Int[Tensor, "some"], damaged: Damaged
) -> Int[Tensor, "some"]:
    """For each slot the one that it holds: for each block one at a constant distance, or where that fits badly, the
    nearest of each slot."""
    count = distances.shape[1]
    own = distances[torch.arange(len(slots)), slots]
    others = distances.clone()
    others[torch.arange(len(slots)), slots] = torch.inf
    nearest = others.argmin(1)
    chosen = nearest.clone()
    for block in (slots // damaged.block).unique():
        some = (slots // damaged.block == block).nonzero()[:, 0]
        offsets = torch.arange(-int(slots[some].min()), count - int(slots[some].max()))
        places = slots[some][:, None] + offsets
        cost = distances[some][:, :].gather(1, places).sum(0)
        cost[offsets == 0] = torch.inf
        if float(cost.min()) <= 2 * float(others[some].amin(1).sum()) + 0.01 * float(own[some].sum()):
            chosen[some] = places[:, cost.argmin()]
    return chosen


def misread(damaged: Damaged) -> Iterator[Explanation]:
    """Whole blocks whose memory was written in one order of K and V, slots and heads, and is read in another."""
    if not set(KV) <= set(damaged.right) or damaged.right["K"].shape != damaged.right["V"].shape:
        return
    for block in dict.fromkeys((damaged.block, damaged.count)):
        blocks = (damaged.slots // block).unique()
        blocks = blocks[(blocks + 1) * block <= damaged.count][:_MOST_BLOCKS]
        if not len(blocks) or (block == damaged.count and not block / 2 < len(damaged.slots) <= _MOST_WHOLE):
            continue
        slots = (blocks[:, None] * block + torch.arange(block)).flatten()
        some = damaged.within(slots.tolist())
        both = torch.stack([damaged.rows(part, slots)[1] for part in KV])
        best: Explanation | None = None
        for guess, words in _readings(both, block):
            found = Explanation(
                "K and V interleaved",
                some.unexplained_blocks(dict(zip(KV, guess, strict=True)), slots),
                f"Blocks of {block} slots: {words}.",
                0.003,
            )
            if best is None or found.score < best.score:
                best = found
        if best is not None:
            yield best


def _readings(both: Float[Tensor, "part head slots d"], block: int) -> Iterator[tuple[Tensor, str]]:
    """What a block would seem to hold, for each way to write and read it."""
    heads, seen = both.shape[1], set[bytes]()
    names = torch.arange(2 * heads * block).view(2, heads, block, 1)
    for written in _ORDERS:
        for read in _ORDERS:
            sizes = {"head": heads, "slot": block, "part": 2}
            memory = rearrange(names, f"part head slot d -> ({written}) d")
            order = rearrange(memory, f"({read}) d -> part head slot d", **sizes)[..., 0]
            if written == read or bool((order == names[..., 0]).all()) or (key := order.numpy().tobytes()) in seen:
                continue
            seen.add(key)
            apart = rearrange(both, "part head (block slot) d -> block (part head slot) d", slot=block)
            guess = rearrange(
                apart[:, order.flatten()], "block (part head slot) d -> part head (block slot) d", slot=block, part=2
            )
            yield guess, f"written in the order {written.replace(' ', ', ')}, and read as {read.replace(' ', ', ')}"
    paired = rearrange(both, "part head slots d -> head slots (d part)")
    yield rearrange(paired, "head slots (part d) -> part head slots d", part=2), "each number of K beside one of V"
