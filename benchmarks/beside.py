"""What nnsight and kvpress take for what kvprobe does too, on the very same model in one process.

nnsight reads K and V of one layer beside the logits. kvpress reads a prompt under a policy: the last tokens and the
first (StreamingLLM), and the slots that the last queries attend to (SnapKV). Kept slots are asserted to be the same
where both define them alike, which SnapKV does without pooling: kvpress smooths scores by a mean, kvprobe by a maximum,
as the paper's code does. Of TOVA, kvpress always keeps the last slot, kvprobe does not.

    make bench NAMES=beside          in an environment of its own: kvpress 0.5.5 asks for an older transformers
"""

import copy
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from timing import Row, assert_same, compared, main
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.policies import TOVA, Policy, SinkWindow, SnapKV

MISSING = "not installed: `make bench` installs it in .venv-bench"


def measure(asked: Namespace) -> Iterator[Row]:
    model, length = kv.load(asked.model), 128 if asked.quick else 1024
    ids = torch.randint(5, 20_000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    for name, rows in (("nnsight", beside_nnsight), ("kvpress", beside_kvpress)):
        if find_spec(name) is None:
            yield Row(f"{length:,} tokens", name, note=MISSING)
        else:
            yield from rows(model, ids, asked.repeats)


def beside_nnsight(model: kv.Model, ids: list[int], repeats: int) -> Iterator[Row]:
    plain, layer = model.lanes.plain, model.geometry.n_layers // 2
    # A twin over the same weights: what nnsight does to a module is no concern of kvprobe's lanes.
    twin = copy.deepcopy(plain, {id(shared): shared for shared in [*plain.parameters(), *plain.buffers()]})
    network: Any = import_module("nnsight").NNsight(twin)

    def theirs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention = network.model.layers[layer].self_attn
        rotation = attention.source.apply_rotary_pos_emb_0
        with torch.no_grad(), network.trace(input_ids=torch.tensor([ids]), logits_to_keep=1, use_cache=False):
            value = attention.v_proj.output.save()
            key = rotation.output[1].save()
            logits = network.lm_head.output.save()
        return key, value, logits

    def ours() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        captured = model.capture(ids, ["k", "v"], layers=[layer])
        return captured["k", layer], captured["v", layer], captured.logits

    (key, value, logits), (k, v, scores) = theirs(), ours()
    for one, other in ((k, key), (v, value.unflatten(-1, (v.shape[1], -1)).transpose(1, 2)), (scores, logits)):
        assert_same(one, other)
    yield compared(f"K and V of a layer, {len(ids):,} tokens", "nnsight, trace", ours, theirs, repeats)


def beside_kvpress(model: kv.Model, ids: list[int], repeats: int) -> Iterator[Row]:
    presses: Any = import_module("kvpress")
    length, budget, full = len(ids), len(ids) // 4, model.prefill(ids)
    gone = 1 - budget / length
    snap = partial(presses.SnapKVPress, gone, window_size=16)
    alike: list[tuple[str, Policy, Any, bool]] = [
        ("StreamingLLM", SinkWindow(4, budget - 4, mode="gapped"), presses.StreamingLLMPress(gone, n_sink=4), True),
        (
            "SnapKV, no pooling",
            SnapKV(budget, kernel=1),
            snap(kernel_size=1),
            True,
        ),
        ("SnapKV", SnapKV(budget, kernel=5), snap(kernel_size=5), False),
        ("TOVA", TOVA(budget), presses.TOVAPress(gone), False),
    ]
    for name, policy, press, same in alike:
        theirs, ours = partial(pressed, model, ids, renamed(press)), partial(model.prefill, ids, policy=policy)
        shared = in_common(full, ours(), theirs())
        assert shared == 1 or not same, f"{name}: {shared:.1%} of the slots are the same"
        note = "the same slots" if same else f"{shared:.0%} of the slots are the same: see the definitions above"
        what = f"read {length:,} tokens, keep {budget}: {name}"
        yield compared(what, "kvpress", ours, theirs, repeats, note=note)


def renamed(press: Any) -> Any:
    """A press whose hook gets what it reads under the names of the transformers that kvpress is made for."""
    hook = press.forward_hook

    def given(module: object, inputs: object, named: dict[str, Any], output: object) -> object:
        older = {"past_key_values": named["cache"], "cache_position": named["position_ids"][0]}
        return hook(module, inputs, named | older, output)

    press.forward_hook = given
    return press


def pressed(model: kv.Model, ids: list[int], press: Any) -> DynamicCache:
    past = DynamicCache()
    with torch.no_grad(), press(model.lanes.plain):
        model.lanes.plain(torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1)
    return past


def in_common(full: kv.KVCache, ours: kv.KVCache, theirs: DynamicCache) -> float:
    """The share of slots that both keep, each known by its key."""
    live, shares = ours.ledger.live[:, 0], list[float]()
    for number, layer in enumerate(theirs.layers):
        for head, keys in enumerate(layer.keys[0]):
            there = live[number if len(live) > 1 else 0, head if live.shape[1] > 1 else 0]
            mine, yours = (
                set(torch.cdist(kept, full.keys[number][0, head]).argmin(1).tolist())
                for kept in (ours.keys[number][0, head][there], keys)
            )
            shares.append(len(mine & yours) / max(len(mine), len(yours)))
    return sum(shares) / len(shares)


if __name__ == "__main__":
    main(measure, __doc__)
