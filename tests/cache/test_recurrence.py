"""The state of a recurrent layer, folded from what tokens wrote, is what the recurrence says token by token."""

import pytest
import torch
from torch import Tensor

from kvprobe.cache.recurrence import Writes, fold, last_inputs, time_moved, timeless

HEADS, GROUPS, D_KEY, D_VALUE = 2, 2, 4, 6


def writes_of(batch: int, slots: int, decays: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, numbers: int) -> Tensor:
        return torch.randn(batch, heads, slots, numbers, generator=generator)

    return {
        "key": drawn(HEADS, D_KEY),
        "value": drawn(HEADS * GROUPS, D_VALUE),
        "decay": -0.2 * drawn(HEADS * GROUPS, 2 * decays).abs() * torch.tensor([1.0] * decays + [0.0] * decays),
        "step": 2 * drawn(HEADS * GROUPS, 1).sigmoid(),
        "conv": drawn(1, 5),
    }


def first(writes: Writes, count: int) -> dict[str, Tensor]:
    return {name: tensor[:, :, :count] for name, tensor in writes.items()}


def rest(writes: Writes, count: int) -> dict[str, Tensor]:
    return {name: tensor[:, :, count:] for name, tensor in writes.items()}


def by_token(writes: Writes, keep: Tensor | None = None) -> Tensor:
    """The recurrence as it is written down, in double precision."""
    value = writes["value"].double()
    key = writes["key"].double().repeat_interleave(GROUPS, 1)
    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = value.new_zeros(*value.shape[:2], D_KEY, D_VALUE)
    for slot in range(value.shape[2]):
        before, after = writes["decay"][:, :, slot].double().exp().chunk(2, -1)
        at, step = key[:, :, slot, :, None], writes["step"][:, :, slot, :, None].double()
        if keep is not None:
            step = step * keep[:, slot, None, None, None]
        state = state * before[..., None]
        state = state + step * at * (value[:, :, slot, None] - (at * state).sum(2, keepdim=True))
        state = state * after[..., None]
    return state


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("decays", [1, D_KEY])
@pytest.mark.parametrize("slots", [1, 7, 64, 65, 150])
def test_a_fold_is_the_recurrence_token_by_token(slots: int, decays: int):
    writes, keep = writes_of(3, slots, decays), torch.rand(3, slots, generator=torch.Generator().manual_seed(1)) < 0.5
    assert apart(fold(writes), by_token(writes)) <= 1e-6
    keep[:, 0] = True
    assert apart(fold(writes, keep=keep), by_token(writes, keep)) <= 1e-6
    assert apart(fold(timeless(writes, torch.ones_like(keep))), by_token(writes)) > (0.01 if slots > 1 else -1)


def test_a_fold_goes_on_from_a_state():
    writes = writes_of(2, 90)
    for count in (1, 64, 80):
        assert apart(fold(rest(writes, count), fold(first(writes, count))), fold(writes)) <= 1e-6
    assert torch.equal(fold(first(writes, 0)), torch.zeros(2, HEADS * GROUPS, D_KEY, D_VALUE))


def test_last_tokens_that_are_hidden_leave_nothing_but_their_decay():
    writes = writes_of(1, 20)
    keep = torch.arange(20)[None] < 15
    before = fold(first(writes, 15))
    assert apart(fold(writes, keep=keep, decay="dropped"), before) <= 1e-6
    assert apart(fold(writes, keep=keep), before) > 0.1
    passed = writes["decay"][:, :, 15:, 0].sum(2).exp()[..., None, None]
    assert apart(fold(writes, keep=keep), before * passed) <= 1e-6


def test_rows_of_unequal_length_are_folded_as_alone():
    writes = writes_of(2, 70)
    keep = torch.arange(70)[None] < torch.tensor([[70], [23]])
    together = fold(writes, keep=keep, decay="dropped")
    alone = fold(first({name: tensor[1:] for name, tensor in writes.items()}, 23))
    assert apart(together[1:], alone) <= 1e-6


@pytest.mark.parametrize("decays", [1, D_KEY])
def test_time_of_evicted_slots_still_passes(decays: int):
    writes = writes_of(2, 12, decays)
    keep = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    slots = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :7]
    padding = torch.arange(7) >= keep.sum(1)[:, None]
    moved = time_moved(writes, slots, padding, torch.ones_like(keep))
    taken = {
        name: tensor.gather(2, slots[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))
        for name, tensor in moved.items()
    }
    assert apart(fold(timeless(taken, padding), keep=~padding), by_token(writes, keep)) <= 1e-6
    closed = fold(timeless(taken, padding, gaps=True), keep=~padding)
    assert apart(closed, fold(writes, keep=keep, decay="dropped")) <= 1e-6


def test_a_convolution_remembers_the_last_live_inputs():
    inputs = torch.arange(1.0, 6.0)[None, None, :, None].expand(2, 1, 5, 1)
    live = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 0, 0, 0]]).bool()
    assert last_inputs(inputs, live, 2)[:, 0].tolist() == [[3, 5], [0, 2]]
    assert last_inputs(inputs, live, 9).shape[2] == 5
