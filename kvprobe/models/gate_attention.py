"""The gate of attention on the plain lane: that it is what kvprobe recomputes, shows and replaces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import LATENT
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.errors import UserError
from kvprobe.models.attending import Attending
from kvprobe.models.gate_caches import empty_cache, long_cache
from kvprobe.models.hf_cache import empty_layers, held_by, past_key_values
from kvprobe.models.hooks import bare
from kvprobe.models.rounding import difference, few_tokens
from kvprobe.models.unproved import UnprovedLanes


@bare()
def prove_attention(lanes: UnprovedLanes, slots: int) -> None:
    """Prove on a few tokens, alone and after so many slots, that attention is a softmax over scaled scores, with
    softcap and sinks where there are any.

    Only then can attention be recomputed, replaced and patched. Each module must attend once, with the keys and values
    that its layer of the cache holds, or with latent attention with one of each for each of its slots, and use what it
    reads there: if that is no number, the logits are none.

    Raises:
        UserError: it is something else, or the model does not take its attention from transformers' registry.
    """
    ids, layers = few_tokens(lanes.plain), empty_layers(lanes.geometry.parts)
    long, observed = long_cache(lanes, slots), list[tuple[Attending, Tensor]]()
    with torch.no_grad(), lanes.observing_attention_unproved(lambda inputs, output: observed.append((inputs, output))):
        lanes.unproved(ids, Ledger.of(ids), past_key_values(layers), masked=True)
        few = observed[:]
        after_long = long.read()
    name, reads = type(lanes.plain).__name__, lanes.geometry.reads
    once = sorted(inputs.layer for inputs, _ in few) == [*reads] and all(
        _reads(inputs, held_by(layers[source]), latent=lanes.geometry.layers[source][0].name == LATENT[0])
        for inputs, _ in few
        for source in [reads[inputs.layer]]
    )
    if not once or not _uses_attention(lanes):
        raise UserError(
            f"{name} does not attend once in each layer, by transformers' registry, with the keys and values that its "
            "cache holds, or does not use the result, so its attention can be neither shown nor replaced on the plain "
            "lane; patch with KVCache.patch, one cell at a time."
        )
    # Transformers leaves what an index chose to an attention that it does not know.
    apart = 0.0
    if lanes.geometry.indexed:
        with torch.no_grad():
            apart = difference(after_long, long.read())
    if not apart <= lanes.tolerance():
        raise UserError(
            f"{name} computes something else while its attention is observed (off by {apart:.1e}), so an index chooses "
            "other slots there, and its attention cannot be shown; patch with KVCache.patch instead."
        )
    every = torch.zeros(1, long.slots + long.ids.shape[1], dtype=torch.long, device=ids.device)
    worst = 0.0
    for tokens, queries, pairs in ((ids, ids.shape[1], few), (every, long.ids.shape[1], observed[len(few) :])):
        seen = visible_by_layer(Ledger.of(tokens), queries, lanes.geometry.reaches)
        outputs = ((inputs.output(seen[reads[inputs.layer]]).transpose(1, 2), computed) for inputs, computed in pairs)
        worst = max(worst, *(difference(output, computed) for output, computed in outputs))
    # Of one layer, which rounds a few times at most.
    if not worst <= max(1e-4, 8 * torch.finfo(lanes.dtype).eps):
        raise UserError(
            f"{name} attends otherwise than by a softmax over scaled scores (off by "
            f"{worst:.1e}), so its attention can be neither shown nor replaced on the plain lane; patch with "
            f"KVCache.patch, one cell at a time."
        )


def _uses_attention(lanes: UnprovedLanes) -> bool:
    """Whether what the registry's attention returns in each layer (made NaN in a row for each) is used."""
    attending = lanes.geometry.attending
    ids = few_tokens(lanes.plain, 2).expand(len(attending), -1)

    def corrupt(inputs: Attending, output: Tensor) -> None:
        output[attending.index(inputs.layer)] = torch.nan

    with torch.no_grad(), lanes.observing_attention_unproved(corrupt):
        logits = lanes.unproved(ids, Ledger.of(ids), empty_cache(lanes), masked=True)
    return bool(logits.isnan().flatten(1).any(1).all())


def _reads(inputs: Attending, held: Sequence[Tensor], latent: bool) -> bool:
    """Whether a module attended with what a layer of the cache holds; of latents it computes a key and a value each."""
    if latent:
        return {inputs.key.shape[2], inputs.value.shape[2]} == {part.shape[2] for part in held[:2]}
    pairs = zip((inputs.key, inputs.value), held, strict=False)
    return bool(held) and all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)
