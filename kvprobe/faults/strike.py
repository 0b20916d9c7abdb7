"""Striking: the only code that writes faults into a cache.

Slots that are not struck are never touched, and `Damage.undo` puts back what stood in those that were, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.scope import Order, Part, Scope
from kvprobe.faults.struck import Strikes, Struck


@dataclass(frozen=True)
class Broken:
    """A number that is not finite, and where it stands."""

    part: Part
    layer: int
    head: int
    slot: int
    step: int = 0

    def __str__(self) -> str:
        return f"{self.part.upper()} of layer {self.layer}, KV head {self.head}, slot {self.slot}"


@dataclass(eq=False)
class Damage:
    """What one strike has done.

    Attributes:
        count: struck vectors (slots × heads × layers, K and V together) of each row.
        broken: the first number of each row that is no longer finite, if there is one.
    """

    count: Int[Tensor, "rows"]
    broken: dict[int, Broken] = field(default_factory=dict)
    _before: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def undo(self) -> None:
        """Put back what stood in the struck slots."""
        for vectors, index, before in reversed(self._before):
            vectors.index_copy_(0, index, before)
        self._before.clear()


def strike(
    faults: Sequence[Strikes],
    draws: Sequence[Draws],
    rows: Sequence[int],
    tensors: Sequence[tuple[Float[Tensor, "rows heads slots d_head"], Float[Tensor, "rows heads slots d_value"]]],
    ledger: Ledger,
    context: FaultContext,
    step: int = 0,
    remember: bool = False,
) -> Damage:
    """Write faults into K and V, in place.

    Rows whose faults do the same to a slot, from the same lots, are written together, whatever their scopes.

    Args:
        faults: one for each of `rows`.
        draws: one for each of `rows`.
        rows: of `tensors` and `ledger`; none twice, and all of one conversation, slot by slot.
        tensors: K and V by layer, contiguous, as wide as the ledger or wider.
        remember: keep what is overwritten, for `Damage.undo`.
    """
    done = Damage(torch.zeros(len(ledger.tokens), dtype=torch.long))
    groups: dict[tuple[Strikes, Draws], list[tuple[int, Strikes]]] = {}
    for fault, lots, row in zip(faults, draws, rows, strict=True):
        groups.setdefault((fault.operator, lots), []).append((row, fault))
    shape = (len(tensors), context.cache.n_kv_heads)
    orders: dict[tuple[Scope, Draws], Order] = {}
    for (operator, lots), members in groups.items():
        operator.refuse_unfit(context)
        masks = []
        for row, fault in members:
            pool = (fault.scope.pool, lots)
            if pool not in orders:
                orders[pool] = fault.scope.order(ledger, shape, lots, step, row)
            masks.append(fault.scope.struck(orders[pool], shape))
        heads = max(mask.shape[1] for mask in masks)
        together = torch.stack([mask.expand(-1, heads, -1) for mask in masks]).expand(-1, -1, shape[1], -1)
        for layer, pair in enumerate(tensors):
            if operator.reaches(layer) and bool(together[:, layer].any()):
                _strike_layer(members, together[:, layer], layer, pair, ledger, (lots, context, step), done, remember)
    return done


def _strike_layer(
    members: Sequence[tuple[int, Strikes]],
    mask: Bool[Tensor, "members heads slots"],
    layer: int,
    pair: tuple[Tensor, Tensor],
    ledger: Ledger,
    circumstances: tuple[Draws, FaultContext, int],
    done: Damage,
    remember: bool,
) -> None:
    """One layer's struck slots, of all rows that share an operator."""
    draws, context, step = circumstances
    member, heads, slots = mask.nonzero(as_tuple=True)
    rows = torch.tensor([row for row, _ in members], device=member.device)[member]
    # Vectors lie one after the other: a flat index is several times faster than three.
    flat = (rows * mask.shape[1] + heads) * pair[0].shape[2] + slots
    keys, values = (tensor.view(-1, tensor.shape[3]).index_select(0, flat) for tensor in pair)
    struck = Struck(
        layer, rows, heads, slots, ledger.positions[rows, slots], keys, values, ledger.slots, step, draws, context
    )
    written: list[tuple[Part, Tensor, Tensor, Tensor]] = []
    found: tuple[tuple[Part, Tensor, Tensor], ...] = (("k", pair[0], keys), ("v", pair[1], values))
    for part, tensor, before in found:
        if not any(part in fault.scope.parts for _, fault in members):
            continue
        vectors = tensor.view(-1, tensor.shape[3])
        after = members[0][1].damaged(struck, part).to(tensor.dtype)
        where = torch.arange(len(member), device=member.device)
        if any(part not in fault.scope.parts or fault.scope.unit == "number" for _, fault in members):
            mine = torch.tensor([part in fault.scope.parts for _, fault in members], device=member.device)[member]
            if any(fault.scope.unit == "number" for _, fault in members):
                numbers = _numbers(members, member, struck, part, ledger)
                after, mine = torch.where(numbers, after, before), mine & numbers.any(1)
            where = mine.nonzero()[:, 0]
        if remember:
            done._before.append((vectors, flat[where], before[where]))
        written.append((part, vectors, where, after[where]))
    # Written once both are known: what a slot's V becomes may depend on its K.
    for part, vectors, where, after in written:
        vectors.index_copy_(0, flat[where], after)
        done.count += torch.bincount(rows[where].cpu(), minlength=len(done.count))
        # A sum is finite only if all its terms are, and far cheaper than asking each.
        if not bool(after.sum().isfinite()):
            _note_broken(done, part, layer, step, (rows[where], heads[where], slots[where]), after)


def _numbers(
    members: Sequence[tuple[int, Strikes]], member: Int[Tensor, "struck"], struck: Struck, part: Part, ledger: Ledger
) -> Bool[Tensor, "struck d"]:
    """Which numbers of the struck vectors are struck themselves: all, unless a scope draws single numbers."""
    width = struck.of(part).shape[1]
    found = torch.ones(len(member), width, dtype=torch.bool, device=member.device)
    for number, (row, fault) in enumerate(members):
        if fault.scope.unit == "number":
            size = (struck.context.cache.n_kv_heads, width)
            eligible = fault.scope.eligible(ledger, row)
            drawn = fault.scope.numbers(eligible, size, struck.draws, struck.step, struck.layer, part)
            mine = member == number
            found[mine] = drawn[struck.heads[mine], struck.slots[mine]]
    return found


def _note_broken(
    done: Damage, part: Part, layer: int, step: int, index: tuple[Tensor, ...], after: Float[Tensor, "struck d"]
) -> None:
    bad = ~after.isfinite().all(1)
    if not bool(bad.any()):
        return
    for row, head, slot in zip(*(each[bad].tolist() for each in index), strict=True):
        done.broken.setdefault(row, Broken(part, layer, head, slot, step))


def corrupt(
    cache: KVCache, fault: Strikes, contexts: Sequence[FaultContext], draws: Sequence[Draws]
) -> tuple[KVCache, Damage]:
    """The cache with a fault written into each row at once, each row its own context with its own draws; the cache given
    stays as it was.

    Raises:
        UserError: not as many contexts and draws as rows; or see `Fault.damaged`.
    """
    if not len(contexts) == len(draws) == cache.batch:
        raise UserError(
            f"The cache has {cache.batch} rows, but there are {len(contexts)} contexts and {len(draws)} draws."
        )
    if cache.ledger.turned:
        raise UserError(
            "The cache was re-indexed, and its keys are not stored as they are seen; carry that out first, with Model.as_seen."
        )
    # Copies of their own: rows of a fork share storage, and so do caches.
    keys = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in cache.keys)
    values = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in cache.values)
    done = Damage(torch.zeros(cache.batch, dtype=torch.long))
    for row, (context, lots) in enumerate(zip(contexts, draws, strict=True)):
        # Without the padding that other rows have brought with them: a row draws as it would alone.
        held = int((~cache.ledger.padding[row]).nonzero()[-1]) + 1 if not bool(cache.ledger.padding[row].all()) else 0
        slots = torch.arange(held, device=cache.ledger.tokens.device)[None]
        ledger = cache.ledger.rows(torch.tensor([row], device=slots.device)).take(
            slots, cache.ledger.padding[[row], :held]
        )
        own = [
            tuple(each[row : row + 1, :, :held].contiguous() for each in pair)
            for pair in zip(keys, values, strict=True)
        ]
        mine = strike([fault], [lots], [0], [(pair[0], pair[1]) for pair in own], ledger, context)
        for pair, (damaged_keys, damaged_values) in zip(zip(keys, values, strict=True), own, strict=True):
            pair[0][row, :, :held], pair[1][row, :, :held] = damaged_keys[0], damaged_values[0]
        done.count[row] = mine.count[0]
        if 0 in mine.broken:
            done.broken[row] = mine.broken[0]
    return replace(cache, keys=keys, values=values), done
