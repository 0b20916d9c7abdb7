"""One patched cell of the cache, the way a user of each library computes it: a forward pass over prompt and suffix in
which the suffix's queries, and no others, meet the donor's K or V at one slot of one layer.

Each takes several cells of one layer as rows of one pass, and gives the logits after the last token.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

import kvprobe as kv
from kvprobe.text.tokens import Tokens

Part = Literal["K", "V"]
Patch = Callable[[int, Part, Sequence[int]], Float[Tensor, "cells vocab"]]
"""The logits after the suffix with the donor's K or V at a layer and, in each row, one of these slots."""


@dataclass(frozen=True)
class Setting:
    """What is patched: a prompt that was read, the donor's prompt of the same length, and what is read after the
    cut."""

    model: kv.Model
    base: kv.KVCache
    donor: kv.KVCache
    suffix: Tokens

    @classmethod
    def drawn(cls, model: kv.Model, length: int, suffix: int, seed: int = 0) -> "Setting":
        """Prompts and suffix of random tokens."""
        draw = torch.Generator().manual_seed(seed)
        ids = [torch.randint(5, 20_000, (count,), generator=draw).tolist() for count in (length, length, suffix)]
        base, donor = (model.prefill(Tokens.of(prompt)) for prompt in ids[:2])
        return cls(model, base, donor, Tokens.of(ids[2], "suffix", length))

    @property
    def ids(self) -> Int[Tensor, "1 tokens"]:
        """Prompt and suffix."""
        return torch.cat([self.base.ledger.tokens, torch.tensor([self.suffix.ids])], 1)

    @property
    def positions(self) -> Int[Tensor, "1 tokens"]:
        return torch.arange(self.ids.shape[1])[None]

    def of_donor(self, layer: int, part: Part, slots: Sequence[int]) -> Float[Tensor, "cells kv_heads d_head"]:
        return _at(self.donor, layer, part, slots)

    def of_base(self, layer: int, part: Part, slots: Sequence[int]) -> Float[Tensor, "cells kv_heads d_head"]:
        return _at(self.base, layer, part, slots)


def _at(cache: kv.KVCache, layer: int, part: Part, slots: Sequence[int]) -> Tensor:
    return (cache.keys if part == "K" else cache.values)[layer][0, :, list(slots)].transpose(0, 1)


def by_extend(setting: Setting) -> Patch:
    """The slot overwritten in a copy of the prefilled cache, and the suffix read after it: one cell at a time, in
    kvprobe, without a sweep."""

    def patch(layer: int, part: Part, slots: Sequence[int]) -> Tensor:
        return torch.cat([one(layer, part, slot) for slot in slots])

    def one(layer: int, part: Part, slot: int) -> Tensor:
        layers, patched = list(setting.base.layers), setting.base.layers[layer][part].clone()
        patched[0, :, slot] = setting.of_donor(layer, part, [slot])[0]
        layers[layer] = {**layers[layer], part: patched}
        return setting.model.extend(replace(setting.base, layers=tuple(layers)), setting.suffix)[1][:, -1]

    return patch


def by_bridge(setting: Setting) -> Patch:
    """`TransformerBridge.run_with_hooks`, two hooks.

    A slot's K enters by one score for each query, its V by one weighted vector: the pass computes everything else.
    """
    lanes, shape = setting.model.lanes, setting.model.geometry
    bridge, scale = (
        lanes.hooked.bridge,
        [float(getattr(module, "scaling", shape.d_head**-0.5)) for module in lanes.attention_modules],
    )
    groups, asking = shape.n_heads // shape.n_kv_heads, len(setting.suffix)

    def patch(layer: int, part: Part, slots: Sequence[int]) -> Tensor:
        rows, at = torch.arange(len(slots)), torch.tensor(slots)
        theirs = setting.of_donor(layer, part, slots).repeat_interleave(groups, 1)
        seen: dict[str, Tensor] = {}

        def ask(queries: Tensor, hook: object) -> None:
            seen["queries"] = queries[:, -asking:]

        def rescore(scores: Tensor, hook: object) -> Tensor:
            scores[rows, :, -asking:, at] = scale[layer] * torch.einsum("rqhd,rhd->rhq", seen["queries"], theirs)
            return scores

        def weigh(pattern: Tensor, hook: object) -> None:
            seen["weights"] = pattern[rows, :, -asking:, at]

        def mix(z: Tensor, hook: object) -> Tensor:
            moved = theirs - setting.of_base(layer, part, slots).repeat_interleave(groups, 1)
            z[:, -asking:] += torch.einsum("rhq,rhd->rqhd", seen["weights"], moved)
            return z

        hooks = (
            [("hook_rot_q", ask), ("hook_attn_scores", rescore)]
            if part == "K"
            else [("hook_pattern", weigh), ("hook_z", mix)]
        )
        with torch.no_grad():
            return bridge.run_with_hooks(
                setting.ids.expand(len(slots), -1),
                fwd_hooks=[(f"blocks.{layer}.attn.{name}", hook) for name, hook in hooks],
                position_ids=setting.positions,
                logits_to_keep=1,
                use_cache=False,
            )[:, -1]

    return patch


def by_nnsight(setting: Setting) -> Patch:
    """nnsight over the plain model with its fused attention: the suffix's rows of the layer's attention, computed
    again.

    Raises:
        ImportError: nnsight is not installed.
    """
    from nnsight import NNsight

    plain, asking, total = setting.model.lanes.plain, len(setting.suffix), setting.ids.shape[1]
    # A twin over the same weights: what nnsight does to a module is no concern of kvprobe's lanes.
    network = NNsight(copy.deepcopy(plain, {id(shared): shared for shared in [*plain.parameters(), *plain.buffers()]}))
    causal = torch.ones(asking, total, dtype=torch.bool).tril(total - asking)

    def patch(layer: int, part: Part, slots: Sequence[int]) -> Tensor:
        rows, theirs = torch.arange(len(slots)), setting.of_donor(layer, part, slots)
        attention = network.model.layers[layer].self_attn
        # The forward pass is taken apart here: inside the trace it would be too late.
        rotation = attention.source.apply_rotary_pos_emb_0
        inputs = {"input_ids": setting.ids.expand(len(slots), -1), "position_ids": setting.positions}
        with torch.no_grad(), network.trace(**inputs, logits_to_keep=1, use_cache=False):
            values = attention.v_proj.output.unflatten(-1, (theirs.shape[1], -1)).transpose(1, 2).clone()
            queries, keys = rotation.output
            keys = keys.clone()
            (keys if part == "K" else values)[rows, :, slots] = theirs
            z = torch.nn.functional.scaled_dot_product_attention(
                queries[:, :, -asking:], keys, values, causal, enable_gqa=True
            )
            attention.o_proj.input[:, -asking:] = z.transpose(1, 2).flatten(2)
            logits = network.lm_head.output.save()
        return logits[:, -1]

    return patch
