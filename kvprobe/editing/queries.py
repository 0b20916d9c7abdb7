"""Reference queries: what tokens read after a cache attend with, layer by layer, and what they read of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.attention import output_of, scores_of, weights_of
from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import KV
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.editing.splicing import one_row
from kvprobe.errors import UserError
from kvprobe.inference.forward import as_seen, extend, new_slots, prove_reading
from kvprobe.inference.model import Model
from kvprobe.models.attending import Attending
from kvprobe.text.tokens import Tokens

BY_QUERY = ("query", "seen", "seen_kept", "rest", "output_of_rest")


@dataclass(frozen=True)
class HeadQueries:
    """What the queries of one KV head read, in fp64: of a span, and of everything else.

    Attributes:
        query: of all query heads, modules and texts that read the head, one after another.
        key, value: of the span.
        seen: which slots of the span each query sees.
        seen_kept: which of the slots that are to stand for it.
        rest: logarithm of what everything else weighs, before the softmax is normalised.
        output_of_rest: what is read there.
        scale, softcap: see `Attending`.
    """

    query: Float[Tensor, "queries d_head"]
    key: Float[Tensor, "span d_head"]
    value: Float[Tensor, "span d_value"]
    seen: Bool[Tensor, "queries span"]
    seen_kept: Bool[Tensor, "queries kept"]
    rest: Float[Tensor, "queries"]
    output_of_rest: Float[Tensor, "queries d_value"]
    scale: float
    softcap: float | None

    def shares(
        self, key: Float[Tensor, "slots d_head"], seen: Bool[Tensor, "queries slots"]
    ) -> tuple[Float[Tensor, "queries slots"], Float[Tensor, "queries 1"]]:
        """The share of its attention that each query pays slots in place of the span, and pays everything else."""
        whole = torch.cat([self._scores(key, seen), self.rest[:, None]], 1).softmax(1)
        return whole[:, :-1], whole[:, -1:]

    def log_mass(
        self, key: Float[Tensor, "slots d_head"], seen: Bool[Tensor, "queries slots"]
    ) -> tuple[Float[Tensor, "queries"], Float[Tensor, "queries slots"]]:
        """The logarithm of what slots weigh together for each query, as `rest`, and the share of each; −∞ and zeros
        where it sees none."""
        scores = self._scores(key, seen)
        return scores.logsumexp(1), scores.softmax(1).nan_to_num()

    def some(self, most: int) -> "HeadQueries":
        """The same for so many of the queries at most, evenly spread."""
        count = len(self.query)
        if count <= most:
            return self
        index = torch.linspace(0, count - 1, most, device=self.query.device).long()
        return replace(self, **{name: getattr(self, name)[index] for name in BY_QUERY})

    def _scores(
        self, key: Float[Tensor, "slots d_head"], seen: Bool[Tensor, "queries slots"]
    ) -> Float[Tensor, "queries slots"]:
        return scores_of(self.query @ key.T, self.scale, self.softcap, ~seen)


@dataclass(frozen=True)
class _ReadText:
    """A text that was read after a cache.

    Attributes:
        new: ledger of its tokens.
        attending: of each module that attends, with the keys and values of the new tokens alone.
    """

    new: Ledger
    attending: Mapping[int, Attending]


@dataclass(frozen=True)
class Readings:
    """Texts that were read after a cache of one row, each by itself.

    Attributes:
        cache: with its keys rotated to where they are seen.
    """

    model: Model
    cache: KVCache
    runs: tuple[_ReadText, ...]

    @classmethod
    def of(cls, model: Model, cache: KVCache, texts: Sequence[Tokens]) -> "Readings":
        """Read the texts, each after the cache.

        Raises:
            UserError: the cache has several rows, or the model stores something else than K and V.
        """
        one_row(cache)
        if any(names not in (KV, ()) for names in model.geometry.parts):
            raise UserError(
                f"{type(model.lanes.plain).__name__} stores other things than K and V of each head (latents, an index "
                "or states), to which attention cannot be fitted head by head; recompute or evict instead."
            )
        return cls(model, as_seen(model.lanes, cache), tuple(_read(model, cache, text) for text in texts))

    def heads(self, layer: int, span: Sequence[int], places: Sequence[int]) -> Iterator[HeadQueries]:
        """What is read of each KV head of a layer.

        Args:
            span: its slots.
            places: slots that are to stand for it.
        """
        asked = [
            [*self._asked(run, run.attending[reader], layer, span, places)]
            for run in self.runs
            for reader in self.model.geometry.readers[layer]
        ]
        for parts in zip(*asked, strict=True):
            joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in BY_QUERY}
            first = parts[0]
            yield HeadQueries(**joined, key=first.key, value=first.value, scale=first.scale, softcap=first.softcap)

    def errors(self, edited: KVCache) -> Float[Tensor, "layers"]:
        """How far each module that attends reads otherwise from another cache; see `attention_error`."""
        other = as_seen(self.model.lanes, edited)
        reads = self.model.geometry.reads
        squares = torch.zeros(2, len(reads), dtype=torch.float64)
        for run in self.runs:
            for place, reader in enumerate(reads):
                own, edits = (self._output(run, cache, reader) for cache in (self.cache, other))
                squares[:, place] += torch.stack([(edits - own).square().sum(), own.square().sum()]).double().cpu()
        return (squares[0] / squares[1]).sqrt()

    def _output(self, run: _ReadText, cache: KVCache, reader: int) -> Float[Tensor, "1 heads queries d_value"]:
        inputs, source = run.attending[reader], self.model.geometry.reads[reader]
        key, value = (
            torch.cat([cache.layers[source][part].float(), new.float()], 2)
            for part, new in zip(KV, (inputs.key, inputs.value), strict=True)
        )
        seen = self._seen(run, cache)[source]
        weights = weights_of(inputs.query, key, seen, inputs.scale, inputs.softcap, inputs.sinks)
        return output_of(weights, value)

    def _seen(self, run: _ReadText, cache: KVCache) -> list[Bool[Tensor, "1 kv_heads queries slots"]]:
        return visible_by_layer(cache.ledger.append(run.new), run.new.slots, self.model.geometry.reaches)

    def _asked(
        self, run: _ReadText, inputs: Attending, layer: int, span: Sequence[int], places: Sequence[int]
    ) -> Iterator[HeadQueries]:
        held, kv_heads = self.cache.layers[layer], self.cache.layers[layer]["K"].shape[1]
        key, value = (
            torch.cat([held[part][0], new[0]], 1).double()
            for part, new in zip(KV, (inputs.key, inputs.value), strict=True)
        )
        groups = inputs.query.shape[1] // kv_heads
        query = inputs.query[0].double().unflatten(0, (kv_heads, groups)).flatten(1, 2)
        seen = self._seen(run, self.cache)[layer][0].expand(kv_heads, -1, -1).repeat(1, groups, 1)
        inside = torch.zeros(key.shape[1], dtype=torch.bool, device=key.device)
        inside[list(span)] = True
        scores = scores_of(query @ key.transpose(1, 2), inputs.scale, inputs.softcap, ~seen | inside)
        if inputs.sinks is not None:  # they take attention and give nothing
            sinks = (
                inputs.sinks.double().unflatten(0, (kv_heads, groups)).repeat_interleave(query.shape[1] // groups, 1)
            )
            scores = torch.cat([scores, sinks[..., None]], 2)
            value = torch.nn.functional.pad(value, (0, 0, 0, 1))
        read = scores.softmax(2) @ value
        for head in range(kv_heads):
            yield HeadQueries(
                query[head],
                key[head, list(span)],
                value[head, list(span)],
                seen[head][:, list(span)],
                seen[head][:, list(places)],
                scores[head].logsumexp(1),
                read[head],
                inputs.scale,
                inputs.softcap,
            )


def _read(model: Model, cache: KVCache, text: Tokens) -> _ReadText:
    attending: dict[int, Attending] = {}

    def note(inputs: Attending) -> None:
        attending[inputs.layer] = Attending(
            inputs.layer,
            inputs.query,
            inputs.key[:, :, cache.slots :],
            inputs.value[:, :, cache.slots :],
            inputs.scale,
            inputs.softcap,
            None if inputs.sinks is None else inputs.sinks.detach(),
        )

    prove_reading(model.lanes, cache, [text])
    with model.lanes.observing_attention(note):
        extend(model.lanes, cache, [text], chunk=len(text))
    return _ReadText(new_slots([text], model.lanes.device), attending)
