"""What a recurrent layer keeps of a text, computed from what each token wrote.

The state is a matrix per head. Each token first lets it decay, and then writes. With the gated delta rule (Qwen3-Next;
Kimi Linear, where what is found by each number of a key decays by itself) it moves what its key finds in the state
towards its value, by a step between 0 (nothing) and 1 (the value alone), or 2 (Yang et al. 2024, "Gated Delta
Networks"). In Mamba-2 (Granite 4) its value is added at its key, times a gain (Dao and Gu 2024, "Transformers are
SSMs"). Nothing else enters, so the writes say what the state is, and what it would be had some tokens written nothing.
A short convolution before it keeps the last inputs; layers may also have that alone (LFM2).
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

_CHUNK, _SHORT_CHUNK = 64, 16
"""Tokens that are folded at once; fewer where each number of a key decays by itself."""
_TINY = 1e-6
"""Added to a key's squared length, as the kernels do."""

Writes = Mapping[str, Float[Tensor, "batch _ slots _"]]
"""What tokens gave to a recurrent layer, see `kvprobe.cache.parts.WRITES`."""


def fold(
    writes: Writes,
    start: Float[Tensor, "batch heads d_key d_value"] | None = None,
    keep: Bool[Tensor, "batch slots"] | None = None,
    decay: Literal["kept", "dropped"] = "kept",
) -> Float[Tensor, "batch heads d_key d_value"]:
    """The state after these writes, in fp32.

    Args:
        start: the state before them; nothing by default.
        keep: the tokens that write; all by default.
        decay: whether the state decays where the others stand.
    """
    groups = writes["value"].shape[1] // writes["key"].shape[1]
    key, value = writes["key"].float().repeat_interleave(groups, 1), writes["value"].float()
    added = "gain" in writes
    if not added:
        key = key * (key.square().sum(-1, keepdim=True) + _TINY).rsqrt()
    step = writes["gain" if added else "step"].float()
    before, after = writes["decay"].float().chunk(2, -1)
    if keep is not None:
        written = keep[:, None, :, None]
        step = step * written
        if decay == "dropped":
            before, after = before * written, after * written
    # What passes after a write passes before the next.
    before = torch.cat([before[:, :, :1], before[:, :, 1:] + after[:, :, :-1]], 2)
    state = value.new_zeros(*value.shape[:2], key.shape[3], value.shape[3]) if start is None else start.float()
    linear: Any = torch.linalg  # its annotations are incomplete
    solve: Any = linear.solve_triangular
    chunk = _CHUNK if before.shape[3] == 1 else _SHORT_CHUNK
    for first in range(0, key.shape[2], chunk):
        keys, values, steps, decays = (part[:, :, first : first + chunk] for part in (key, value, step, before))
        passed = decays.cumsum(2)
        new = steps * values
        if not added:
            if passed.shape[3] == 1:
                alike = (keys @ keys.transpose(2, 3)) * (passed - passed.transpose(2, 3)).tril().exp()
            else:
                between = (passed[:, :, :, None] - passed[:, :, None]).clamp(max=0).exp()
                alike = (keys[:, :, :, None] * keys[:, :, None] * between).sum(4)
            right = torch.cat([new, steps * passed.exp() * keys], -1)
            solved: Tensor = solve(steps * alike, right, upper=False, unitriangular=True)
            new = solved[..., : value.shape[3]] - solved[..., value.shape[3] :] @ state
        left = passed[:, :, -1:]
        state = state * left.exp().transpose(2, 3) + ((left - passed).exp() * keys).transpose(2, 3) @ new
    return state * after[:, :, -1:].exp().transpose(2, 3) if after.shape[2] else state


def last_inputs(
    inputs: Float[Tensor, "batch 1 slots channels"], live: Bool[Tensor, "batch slots"], count: int
) -> Float[Tensor, "batch channels kept"]:
    """The inputs of the last `count` live slots of each row, zeros before the first: the memory of a convolution."""
    order = live.to(torch.uint8).argsort(dim=1, stable=True)[:, live.shape[1] - min(count, live.shape[1]) :]
    kept = inputs[:, 0].gather(1, order[..., None].expand(-1, -1, inputs.shape[3]))
    return (kept * live.gather(1, order)[..., None]).transpose(1, 2)


def timeless(writes: Writes, slots: Bool[Tensor, "batch slots"], gaps: bool = False) -> Writes:
    """The writes without the decay of these slots and, where `gaps`, of those that were evicted."""
    if "decay" not in writes:
        return writes
    decay = writes["decay"].masked_fill(slots[:, None, :, None], 0.0)
    if gaps:
        before, after = decay.chunk(2, -1)
        decay = torch.cat([before, torch.zeros_like(after)], -1)
    return {**writes, "decay": decay}


def time_moved(
    writes: Writes,
    slots: Int[Tensor, "batch kept"],
    padding: Bool[Tensor, "batch kept"],
    held: Bool[Tensor, "batch slots"],
) -> Writes:
    """The writes when only the slots at these indices stay: the decay of the others passes after the last that stays
    before them.

    Args:
        padding: which of the indices name no slot.
        held: the slots that hold a token.
    """
    if "decay" not in writes:
        return writes
    decay, count = writes["decay"], held.shape[1]
    stays = torch.zeros_like(functional.pad(held, (0, 1))).scatter(1, slots.masked_fill(padding, count), True)[:, :-1]
    index = torch.arange(count, device=slots.device)
    # Before the first slot that stays the state is empty, so that nothing decays.
    before, after = decay.chunk(2, -1)
    last = index.where(stays, torch.full_like(index, -1)).cummax(1).values[:, None, :, None].expand_as(before)
    gone = (before + after) * (held & ~stays)[:, None, :, None] * (last >= 0)
    return {**writes, "decay": torch.cat([before, after.scatter_add(2, last.clamp(min=0), gone)], -1)}
