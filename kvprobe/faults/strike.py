"""Striking: the only code that writes faults into a cache.

Slots that are not struck are never touched. `Damage.undo` restores the struck slots bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.scope import Order, Part, Scope
from kvprobe.faults.struck import Strikes, Struck


@dataclass(frozen=True)
class NonFinite:
    """The place of a NaN or infinity in the cache."""

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
    tensors: Sequence[tuple[Float[Tensor, "rows heads slots d_head"], Float[Tensor, "rows heads slots d_value"]]],
    ledger: Ledger,
    context: FaultContext,
    step: int = 0,
    *,
    first: int = 0,
    remember: bool = False,
) -> Damage:
    """Write faults into K and V, in place.

    Rows with the same operator and the same draws are written together, whatever their scopes.

    Args:
        faults: one for each of `rows`.
        draws: one for each of `rows`.
        rows: rows of `tensors` and `ledger`; none twice, and all of one conversation, slot by slot.
        tensors: K and V by layer, contiguous, as wide as the ledger or wider.
        first: slot of the tensors at which the ledger begins.
        remember: store what is overwritten, for `Damage.undo`.
    """
    damage = Damage(torch.zeros(len(ledger.tokens), dtype=torch.long))
    groups: dict[tuple[Strikes, Draws], list[tuple[int, Strikes]]] = {}
    for fault, row_draws, row in zip(faults, draws, rows, strict=True):
        groups.setdefault((fault.operator, row_draws), []).append((row, fault))
    shape = (len(tensors), context.cache.n_kv_heads)
    orders: dict[tuple[Scope, Draws], Order] = {}
    masks: list[Bool[Tensor, "members layers heads slots"]] = []
    for (operator, row_draws), members in groups.items():
        operator.refuse_unfit(context)
        of_members: list[Tensor] = []
        for row, fault in members:
            pool = (fault.scope.pool, row_draws)
            if pool not in orders:
                orders[pool] = fault.scope.order(ledger, shape, row_draws, step, row)
            of_members.append(fault.scope.struck(orders[pool], shape))
        heads = max(mask.shape[1] for mask in of_members)
        masks.append(torch.stack([mask.expand(-1, heads, -1) for mask in of_members]).expand(-1, -1, shape[1], -1))
    # Layer by layer, so that operators that draw the same noise find it still there.
    for layer, pair in enumerate(tensors):
        for ((operator, row_draws), members), mask in zip(groups.items(), masks, strict=True):
            if operator.reaches(layer) and bool(mask[:, layer].any()):
                circumstances = row_draws, context, step
                _strike_layer(members, mask[:, layer], layer, (*pair, first), ledger, circumstances, damage, remember)
    return damage


def _strike_layer(
    members: Sequence[tuple[int, Strikes]],
    mask: Bool[Tensor, "members heads slots"],
    layer: int,
    target: tuple[Tensor, Tensor, int],
    ledger: Ledger,
    circumstances: tuple[Draws, FaultContext, int],
    damage: Damage,
    remember: bool,
) -> None:
    """Write one layer's struck slots, of all rows that share an operator.

    Args:
        target: K and V of the layer, and their slot at which the ledger begins.
    """
    layer_keys, layer_values, first = target
    draws, context, step = circumstances
    member, heads, slots = mask.nonzero(as_tuple=True)
    rows = torch.tensor([row for row, _ in members], device=member.device)[member]
    # Vectors lie one after the other: a flat index is several times faster than three.
    flat = (rows * mask.shape[1] + heads) * layer_keys.shape[2] + first + slots
    keys, values = (t.view(-1, t.shape[3]).index_select(0, flat) for t in (layer_keys, layer_values))
    positions = ledger.positions.flatten().index_select(0, rows * ledger.slots + slots)
    struck = Struck(layer, rows, heads, slots, positions, keys, values, ledger.slots, step, draws, context)
    written: list[tuple[Part, Tensor, Tensor | slice, Tensor]] = []
    parts: tuple[tuple[Part, Tensor, Tensor], ...] = (("k", layer_keys, keys), ("v", layer_values, values))
    for part, tensor, before in parts:
        if not any(part in fault.scope.parts for _, fault in members):
            continue
        vectors = tensor.view(-1, tensor.shape[3])
        after = members[0][1].damaged(struck, part).to(tensor.dtype)
        where: Tensor | slice = slice(None)
        if any(part not in fault.scope.parts or fault.scope.unit == "number" for _, fault in members):
            in_scope = torch.tensor([part in fault.scope.parts for _, fault in members], device=member.device)[member]
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
            size = (struck.context.cache.n_kv_heads, width)
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
    # Copies of their own: rows of a fork share storage, and so do caches.
    keys, values = (
        [tensor.clone(memory_format=torch.contiguous_format) for tensor in of] for of in (cache.keys, cache.values)
    )
    damage = Damage(torch.zeros(cache.batch, dtype=torch.long))
    for row, (context, row_draws) in enumerate(zip(contexts, draws, strict=True)):
        alone = without_padding(cache.rows([row]), [fault])
        refuse_other_model(alone, context.cache, "The cache of a fault context")
        context = replace(context, cache=without_padding(context.cache, []))
        tensors = [*zip(alone.keys, alone.values, strict=True)]
        row_damage = strike([fault], [row_draws], [0], tensors, alone.ledger, context)
        slots = (~cache.ledger.padding[row]).nonzero()[:, 0]
        for layer in range(cache.n_layers):
            keys[layer][row, :, slots], values[layer][row, :, slots] = alone.keys[layer][0], alone.values[layer][0]
        damage.count[row] = row_damage.count[0]
        if (first := row_damage.nonfinite.get(0)) is not None:
            damage.nonfinite[row] = replace(first, slot=int(slots[first.slot]))
    return cache.with_parts({"K": keys, "V": values}), damage
