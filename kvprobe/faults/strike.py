"""Striking: the only code that writes faults into a cache.

Slots that are not struck are never touched. `Damage.undo` restores the struck slots bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.scope import Order, Part, Scope, stored_name
from kvprobe.faults.struck import Strikes, Struck

KV: tuple[Part, ...] = ("k", "v")
"""What may depend on one another when it is struck."""
Held = Mapping[Part, Tensor]


@dataclass(frozen=True)
class NonFinite:
    """The place of a NaN or infinity in the cache."""

    part: Part
    layer: int
    head: int
    slot: int
    step: int = 0

    def __str__(self) -> str:
        head = f"{'KV head' if self.part in ('k', 'v') else 'head'} {self.head}"
        return f"{stored_name(self.part)} of layer {self.layer}, {head}, slot {self.slot}"


@dataclass(eq=False)
class Damage:
    """What one strike has done.

    Attributes:
        count: struck vectors (slots × heads × layers, K and V together) of each row.
        nonfinite: the first NaN or infinity of each row that has one.
        overwritten: for `undo`, of each write: the vectors, the indices of the struck ones, and what they held.
    """

    count: Int[Tensor, "rows"]
    nonfinite: dict[int, NonFinite] = field(default_factory=dict[int, NonFinite])
    overwritten: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor, Tensor]])

    def undo(self) -> None:
        """Restore the content of the struck slots."""
        for vectors, index, before in reversed(self.overwritten):
            vectors.index_copy_(0, index, before)
        self.overwritten.clear()


def strike(
    faults: Sequence[Strikes],
    draws: Sequence[Draws],
    rows: Sequence[int],
    layers: Sequence[Layer],
    ledger: Ledger,
    context: FaultContext,
    step: int = 0,
    *,
    first: int = 0,
    remember: bool = False,
) -> Damage:
    """Write faults into what layers store, in place.

    Rows with the same operator and the same draws are written together, whatever their scopes, if it is K and V.

    Args:
        faults: one for each of `rows`.
        draws: one for each of `rows`.
        rows: rows of `layers` and `ledger`; none twice, and all of one conversation, slot by slot.
        layers: contiguous, as wide as the ledger or wider.
        first: slot of the tensors at which the ledger begins.
        remember: store what is overwritten, for `Damage.undo`.
    """
    damage = Damage(torch.zeros(len(ledger.tokens), dtype=torch.long))
    groups: dict[tuple[Strikes, Draws, tuple[Part, ...]], list[tuple[int, Strikes]]] = {}
    for fault, row_draws, row in zip(faults, draws, rows, strict=True):
        together = KV if fault.scope.each[0] in KV else fault.scope.each
        groups.setdefault((fault.operator, row_draws, together), []).append((row, fault))
    orders: dict[tuple[Scope, Draws, int], Order] = {}
    masks: list[Bool[Tensor, "members layers heads slots"]] = []
    for (operator, row_draws, _), members in groups.items():
        operator.refuse_unfit(context)
        of_members: list[Tensor] = []
        for row, fault in members:
            shape = (len(layers), _heads(fault.scope, layers))
            pool = (fault.scope.pool, row_draws, shape[1])
            if pool not in orders:
                orders[pool] = fault.scope.order(ledger, shape, row_draws, step, row)
            of_members.append(fault.scope.struck(orders[pool], shape))
        heads = max(mask.shape[1] for mask in of_members)
        masks.append(torch.stack([mask.expand(-1, heads, -1) for mask in of_members]))
    # Layer by layer, so that operators that draw the same noise find it still there.
    for layer, stored in enumerate(layers):
        for ((operator, row_draws, parts), members), mask in zip(groups.items(), masks, strict=True):
            held: Held = {part: stored[stored_name(part)] for part in parts if stored_name(part) in stored}
            if held and operator.reaches(layer) and bool(mask[:, layer].any()):
                circumstances = row_draws, context, step
                _strike_layer(members, mask[:, layer], layer, held, first, ledger, circumstances, damage, remember)
    return damage


def _heads(scope: Scope, layers: Sequence[Layer]) -> int:
    """Heads of what a scope strikes; 1 where layers differ in them.

    Raises:
        UserError: no layer stores it, or they differ and the scope draws or names heads.
    """
    names = [*map(stored_name, scope.each)]
    heads = {layer[name].shape[1] for layer in layers for name in names if name in layer}
    if not heads:
        known = ", ".join({name: None for layer in layers for name in layer})
        raise UserError(
            f"No layer of this cache stores {' or '.join(names)}, which this fault strikes; name what they store with "
            f"Scope(parts=…): {known}."
        )
    if len(heads) > 1 and (scope.unit == "head" or scope.heads is not None):
        raise UserError(
            f"Layers of this cache differ in the heads of {' and '.join(names)}, so {scope} names none; strike whole "
            "slots, or choose layers."
        )
    return heads.pop() if len(heads) == 1 else 1


def _strike_layer(
    members: Sequence[tuple[int, Strikes]],
    mask: Bool[Tensor, "members heads slots"],
    layer: int,
    held: Held,
    first: int,
    ledger: Ledger,
    circumstances: tuple[Draws, FaultContext, int],
    damage: Damage,
    remember: bool,
) -> None:
    """Write one layer's struck slots, of all rows that share an operator.

    Args:
        held: the parts of the layer, all of as many heads.
        first: their slot at which the ledger begins.
    """
    draws, context, step = circumstances
    n_heads, length = next(iter(held.values())).shape[1:3]
    member, heads, slots = mask.expand(-1, n_heads, -1).nonzero(as_tuple=True)
    rows = torch.tensor([row for row, _ in members], device=member.device)[member]
    # Vectors lie one after the other: a flat index is several times faster than three.
    flat = (rows * n_heads + heads) * length + first + slots
    vectors_of: Held = {part: tensor.view(-1, tensor.shape[3]) for part, tensor in held.items()}
    before_of: Held = {part: vectors.index_select(0, flat) for part, vectors in vectors_of.items()}
    positions = ledger.positions.flatten().index_select(0, rows * ledger.slots + slots)
    struck = Struck(layer, rows, heads, slots, positions, before_of, n_heads, ledger.slots, step, draws, context)
    written: list[tuple[Part, Tensor, Tensor | slice, Tensor]] = []
    for part, vectors in vectors_of.items():
        if not any(part in fault.scope.each for _, fault in members):
            continue
        before = before_of[part]
        after = members[0][1].damaged(struck, part).to(vectors.dtype)
        where: Tensor | slice = slice(None)
        if any(part not in fault.scope.each or fault.scope.unit == "number" for _, fault in members):
            in_scope = torch.tensor([part in fault.scope.each for _, fault in members], device=member.device)[member]
            if any(fault.scope.unit == "number" for _, fault in members):
                numbers = _struck_numbers(members, member, struck, part, ledger)
                after, in_scope = torch.where(numbers, after, before), in_scope & numbers.any(1)
            where = in_scope.nonzero()[:, 0]
        if remember:
            damage.overwritten.append((vectors, flat[where], before[where]))
        written.append((part, vectors, where, after[where]))
    # Written once both are known: the new V of a slot may depend on its K.
    for part, vectors, where, after in written:
        vectors.index_copy_(0, flat[where], after)
        damage.count += torch.bincount(rows[where].cpu(), minlength=len(damage.count))
        # A sum is finite only if all its terms are, and far cheaper than a test of each number.
        if not bool(after.sum().isfinite()):
            _note_nonfinite(damage, part, layer, step, (rows[where], heads[where], slots[where]), after)


def _struck_numbers(
    members: Sequence[tuple[int, Strikes]], member: Int[Tensor, "struck"], struck: Struck, part: Part, ledger: Ledger
) -> Bool[Tensor, "struck d"]:
    """The struck numbers of the struck vectors: all, unless a scope draws single numbers."""
    width = struck.of(part).shape[1]
    numbers = torch.ones(len(member), width, dtype=torch.bool, device=member.device)
    for index, (row, fault) in enumerate(members):
        if fault.scope.unit == "number":
            size = (struck.n_heads, width)
            eligible = fault.scope.eligible(ledger, row)
            drawn = fault.scope.numbers(eligible, size, struck.draws, struck.step, struck.layer, part)
            of_member = member == index
            numbers[of_member] = drawn[struck.heads[of_member], struck.slots[of_member]]
    return numbers


def _note_nonfinite(
    damage: Damage, part: Part, layer: int, step: int, index: tuple[Tensor, ...], after: Float[Tensor, "struck d"]
) -> None:
    bad = ~after.isfinite().all(1)
    for row, head, slot in torch.stack(index, 1)[bad].cpu().numpy().tolist():
        damage.nonfinite.setdefault(row, NonFinite(part, layer, head, slot, step))


def without_padding(cache: KVCache, faults: Sequence[Strikes]) -> KVCache:
    """A row without the padding that other rows have brought, also between its slots, so that it draws as it would
    alone.

    Raises:
        UserError: a fault names slots by index, and there is padding before some of them.
    """
    padding = cache.ledger.padding
    if not bool(padding.any()):
        return cache
    inside = bool((padding[:, :-1] & ~padding[:, 1:]).any())
    if inside and (named := [fault for fault in faults if fault.scope.slots is not None]):
        raise UserError(
            f"{named[0]} names slots by index, and this row has padding between its slots; name segments, or remove "
            "the padding first, with cache.rows([row]) and evict(slots=ledger.padding)."
        )
    return cache.take(*cache.ledger.order(~padding))


def corrupt(
    cache: KVCache, fault: Strikes, contexts: Sequence[FaultContext], draws: Sequence[Draws]
) -> tuple[KVCache, Damage]:
    """A copy of the cache with a fault written into each row, each with its own context and draws.

    Raises:
        UserError: not as many contexts and draws as rows; or see `Fault.damaged`.
    """
    if not len(contexts) == len(draws) == cache.batch:
        raise UserError(
            f"The cache has {cache.batch} rows, but there are {len(contexts)} fault contexts and {len(draws)} draws; "
            "give one of each for each row."
        )
    if cache.ledger.rotated:
        raise UserError(
            "The cache was re-indexed, and its keys are not stored as they are seen; carry that out first, with "
            "Model.as_seen."
        )
    # Copies of their own: rows of a fork share storage, and so do caches. Each number is written where it lies, so they
    # are contiguous, which caches of engines need not be.
    copies = [{name: part.clone(memory_format=torch.contiguous_format) for name, part in layer.items()}
              for layer in cache.layers]  # fmt: skip
    copied = replace(cache, layers=tuple(copies))
    damage = Damage(torch.zeros(cache.batch, dtype=torch.long))
    for row, (context, row_draws) in enumerate(zip(contexts, draws, strict=True)):
        alone = without_padding(copied.rows([row]), [fault])
        refuse_other_model(alone, context.cache, "The cache of a fault context")
        context = replace(context, cache=without_padding(context.cache, []))
        row_damage = strike([fault], [row_draws], [0], alone.layers, alone.ledger, context)
        slots = (~cache.ledger.padding[row]).nonzero()[:, 0]
        for copy, struck in zip(copies, alone.layers, strict=True):
            for name, part in struck.items():
                copy[name][row, :, slots] = part[0]
        damage.count[row] = row_damage.count[0]
        if (first := row_damage.nonfinite.get(0)) is not None:
            damage.nonfinite[row] = replace(first, slot=int(slots[first.slot]))
    return cache.holding(copies), damage
