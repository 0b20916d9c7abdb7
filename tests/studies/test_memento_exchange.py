"""The hidden block, exchanged."""

import numpy as np
import pytest
import torch

from kvprobe.studies.memento_toy.exchange import OWN, exchange_blocks
from kvprobe.studies.memento_toy.traces import hide, retained, token_rows
from kvprobe.tasks.mementos import draw_changed
from tests.toy import toy

BLOCK, BLOCKS = 2, 4


@pytest.mark.parametrize("keep", [0, 1])
def test_through_k_and_v_an_exchange_is_the_run_with_the_other_block(keep: int):
    model, number = toy(), BLOCK + keep + 1
    pairs = [draw_changed(np.random.default_rng(seed), BLOCK, blocks=BLOCKS) for seed in range(4)]
    rows = exchange_blocks(model, pairs, BLOCK, keep).set_index(["condition", "part", "trace"]).sort_index()
    own = token_rows(model, [trace for trace, _ in pairs])
    other = token_rows(model, [changed["sum"] for _, changed in pairs])
    span = own[0].span("block 2")
    mixed = [row[: span.start] + theirs[span] + row[span.stop :] for row, theirs in zip(own, other, strict=True)]
    *_, last = retained(model, mixed, keep, number - 1)
    cache = hide(last.cache, last.number, keep)
    block, memento = own[0].span(f"block {number}"), own[0].span(f"memento {number}")
    cache, _ = model.extend(cache, [row[block] for row in own])
    scores = [
        model.extend(cache, [row[memento] for row in some], logits=4)[1][:, :3].log_softmax(-1) for some in (own, other)
    ]
    stated = [torch.tensor([row.ids[memento][1:] for row in some])[:, :, None] for some in (own, other)]
    text, rival = (score.gather(2, ids).sum((1, 2)).numpy() for score, ids in zip(scores, stated, strict=True))
    changed, own_rows = rows.loc[("sum", "KV")], rows.loc[(OWN, "KV")]
    np.testing.assert_allclose(changed["margin"], text - rival, atol=1e-4)
    assert not np.allclose(own_rows["margin"], text - rival, atol=1e-4)
    *_, last = retained(model, own, keep, number)
    np.testing.assert_array_equal(own_rows["right"], last.likeliest.all(1).double().numpy())
    assert own_rows["kl"].abs().max() == own_rows["turned"].max() == 0
    assert changed["kl"].min() > 1e-4
    assert rows.loc[("digits", "K")]["margin"].isna().all()
