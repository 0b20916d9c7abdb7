"""Attention patterns: how much each chosen query attends to each slot, in every layer and head.

A pattern is recorded for the chosen queries only, so a T × T matrix never exists. On the plain lane the model runs its
fused attention unchanged, its queries and keys are recorded, and softmax(q kᵀ) is computed again for the chosen
queries. On the hooked lane TransformerLens computes whole patterns, and the chosen rows are taken from each layer's. A
long text is read in chunks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.brief import Brief, Table, show_page
from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import named
from kvprobe.cache.parts import attends, recurrent
from kvprobe.cache.slot_table import slots_table
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.errors import UserError
from kvprobe.exported import Exported
from kvprobe.inference.forward import cache_of, forward_pass, new_slots, one_row_each, taps
from kvprobe.inference.model import Model, Readable
from kvprobe.inference.readable import only_run
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.names import head_name, unknown
from kvprobe.text.tokens import Decoder, Tokens, token_texts
from kvprobe.tidy import crossed

WEIGHT_DECIMALS = 6
"""Of a weight in JSON."""
CHUNK = 256
"""Tokens read at a time: enough to fill a matrix product, and few enough that a pass takes little memory."""


@checked_arguments
@dataclass(frozen=True, repr=False)
class Patterns(Brief, Exported):
    """Attention of some queries of one row to all slots.

    Attributes:
        weights: in fp32. A row sums to 1, or to less where the model has attention sinks of its own (gpt-oss).
        layers: of the model.
        queries: their slots, in order.
        cache: after reading; its ledger has each slot's token, position, segment and liveness.
        logits: after the last token.
        tokenizer: that gives tokens their text; None where the model has none.
        sources: of each of these layers, the layer of the cache that it reads; itself by default.
        norms: what `value_norms` gives where V is not stored head by head (latent attention, shared layers).
    """

    weights: Float[Tensor, "layers heads queries slots"]
    layers: tuple[int, ...]
    queries: Int[Tensor, "queries"]
    cache: KVCache
    logits: Float[Tensor, "vocab"]
    tokenizer: Decoder | None = field(default=None, compare=False, repr=False)
    sources: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    norms: Float[Tensor, "layers heads slots"] | None = field(default=None, compare=False, repr=False)

    def _plain(self) -> Mapping[str, object]:
        weights = self.weights.double().cpu().numpy().round(WEIGHT_DECIMALS)
        slots = slots_table(self.cache.ledger, self.tokenizer)
        return {"layers": self.layers, "queries": self.queries, "slots": slots, "weights": weights}

    def _table(self) -> Table:
        """Attention to each segment, the mean over heads and queries, layer by layer."""
        names = self.cache.ledger.names
        mass = torch.stack([self.mass(name).mean((1, 2)) for name in names], -1).tolist()
        return ("layer", *names), ([layer, *row] for layer, row in zip(self.layers, mass, strict=True))

    @property
    def live(self) -> Bool[Tensor, "layers heads slots"]:
        """Which slots of the cache each head may still see."""
        live = self.cache.ledger.live[:, 0]
        live = live.expand(self.cache.n_layers, -1, -1)[list(self.sources or self.layers)]
        return live.repeat_interleave(self.weights.shape[1] // live.shape[1], 1)

    @property
    def value_norms(self) -> Float[Tensor, "layers heads slots"]:
        """‖v‖ of each slot, as each head reads it, in fp32."""
        if self.norms is not None:
            return self.norms
        heads = self.weights.shape[1]
        norms = [named(self.cache.layers[layer], "V")[0].float().norm(dim=-1) for layer in self.layers]
        return torch.stack([layer.repeat_interleave(heads // len(layer), 0) for layer in norms])

    @property
    def unseen(self) -> str:
        """Which layers of the model do not attend, or keep a state beside, in words; empty where none does."""
        layers = [*enumerate(self.cache.layers)]
        kinds = {
            "do not attend": [str(number) for number, layer in layers if not attends(layer)],
            "keep a state beside": [str(number) for number, layer in layers if attends(layer) and recurrent(layer)],
        }
        return " ".join(f"Layers that {kind}: {', '.join(numbers)}." for kind, numbers in kinds.items() if numbers)

    def show(self, after: "Patterns | None" = None) -> None:
        """Show the attention on an interactive page, and with `after` also the difference; see `kv.views.attention`.

        In a notebook the page is the output. Elsewhere it is written to a temporary file, and its path is printed.
        """
        show_page("attention", self, after)

    def of_layers(self, layers: Sequence[int]) -> "Patterns":
        """The same for some of its layers; a layer that it does not have is refused."""
        if missing := [layer for layer in layers if layer not in self.layers]:
            raise UserError(f"The patterns have no layer {missing[0]}; choose from {', '.join(map(str, self.layers))}.")
        places = [self.layers.index(layer) for layer in layers]
        sources = None if self.sources is None else tuple(self.sources[place] for place in places)
        norms = None if self.norms is None else self.norms[places]
        return replace(self, weights=self.weights[places], layers=tuple(layers), sources=sources, norms=norms)

    def slots(self, *segments: str) -> Int[Tensor, "chosen"]:
        """The slots of these segments; an unknown one is refused."""
        return self.cache.ledger.in_segments(segments)[0].nonzero()[:, 0]

    def mass(
        self, *segments: str, slots: Sequence[int] | Int[Tensor, "chosen"] | None = None
    ) -> Float[Tensor, "layers heads queries"]:
        """How much of its attention each query spends on these segments, or on these slots.

        Raises:
            UserError: neither or both were given, or there is no such segment or slot.
        """
        if bool(segments) == (slots is not None):
            raise UserError("Name one or more segments, or give `slots`, but not both.")
        index = self.slots(*segments) if slots is None else refuse_missing(self, slots)
        return self.weights[..., index].sum(-1)

    def df(self) -> pd.DataFrame:
        """One row per layer, head, query (its slot, and with a tokenizer its `text`) and segment, with the attention
        that the query spends there; each named by its head (L8H0)."""
        names = self.cache.ledger.names
        mass = torch.stack([self.mass(name) for name in names], -1).cpu()
        axes = {"layer": self.layers, "head": range(mass.shape[1]), "query": self.queries.tolist(), "segment": names}
        table = crossed(axes, {"mass": mass.numpy()})
        if self.tokenizer is not None:
            texts = token_texts(self.cache.ledger.tokens[0].tolist(), self.tokenizer)
            table.insert(3, "text", [texts[query] for query in table["query"]])
        return named_by_head(table)


@checked_arguments
def attend(
    model: Model,
    text: Readable,
    past: KVCache | None = None,
    *,
    queries: str | Sequence[str] | Sequence[int] = "last",
    layers: Sequence[int] | None = None,
    lane: Lane = "plain",
    chunk: AtLeastOne = CHUNK,
) -> Patterns:
    """Read a text, after `past` if there is one, and record what some of its tokens attend to.

    Args:
        text: one row, as `Model.prefill` takes it; a bare text takes the positions that follow the cache.
        queries: the `last` token, a segment of the text or several, or tokens of it by index (negative from the end).
        layers: all that attend by default.
        chunk: tokens to read at a time.

    Raises:
        UserError: the text is empty or several rows, or there is no such query or layer.
    """
    tokens, wanted = only_run(model.tokens_after(past, text)), _layers(model, layers)
    chosen, before = _chosen(tokens, queries), 0 if past is None else past.slots
    cache, logits = one_row_each(model.lanes, past, 1), torch.empty(0)
    weights: list[Tensor] = []
    norms: Tensor | None = None
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        here = [index - start for index in chosen if start <= index < start + len(piece)]
        reading = _Reading(model.lanes, cache, piece, here, wanted)
        grown = taps(model.lanes, cache)
        with reading.recording(lane):
            ledger, logits = forward_pass(model.lanes, cache, [piece], grown, lane, logits=1)
        cache = cache_of(model.lanes, grown, ledger)
        if here:
            weights.append(reading.weights)
        norms = reading.norms
    assert cache is not None
    whole = torch.cat([torch.nn.functional.pad(part, (0, cache.slots - part.shape[-1])) for part in weights], 2)
    asked = torch.tensor(chosen, device=whole.device) + before
    sources = None if norms is None else tuple(model.geometry.reads[layer] for layer in wanted)
    return Patterns(whole, wanted, asked, cache, logits[0, -1], model.tokenizer, sources, norms)


def named_by_head(table: pd.DataFrame) -> pd.DataFrame:
    """A table with a row per `layer` and `head`, its index the name of the head, such as L8H0."""
    names = [head_name(layer, head) for layer, head in zip(table["layer"], table["head"], strict=True)]
    return table.set_index(pd.Index(names, name="component"))


def refuse_missing(patterns: Patterns, slots: Sequence[int] | Int[Tensor, "chosen"]) -> Int[Tensor, "chosen"]:
    """These slots as a tensor; a slot that the cache does not have, or that is named twice, is refused."""
    index = torch.as_tensor(slots, dtype=torch.long, device=patterns.weights.device)
    count = patterns.cache.slots
    if bool(((index < 0) | (index >= count)).any()) or len(index.unique()) != len(index):
        raise UserError(f"Slots must lie in 0 to {count - 1} and be named once each; got {index.tolist()}.")
    return index


class _Reading:
    """One chunk to be read, and the weights of the chosen queries in it, layer by layer, as they become known."""

    def __init__(
        self, lanes: Lanes, past: KVCache | None, piece: Tokens, here: Sequence[int], layers: Sequence[int]
    ) -> None:
        self.lanes, self.layers = lanes, layers
        self.here = torch.tensor(here, dtype=torch.long, device=lanes.device)
        self._weights: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        new = new_slots([piece], lanes.device)
        self.ledger = new if past is None else past.ledger.append(new)
        slots = self.here + self.ledger.slots - len(piece)
        seen = visible_by_layer(self.ledger, slots, lanes.geometry.reaches)
        self._seen = {layer: seen[source] for layer, source in lanes.geometry.reads.items()}

    @property
    def weights(self) -> Float[Tensor, "layers heads queries slots"]:
        return torch.stack([self._weights[layer] for layer in self.layers])

    @property
    def norms(self) -> Float[Tensor, "layers heads slots"] | None:
        """‖v‖ of every slot as each head read it; None where the cache has each head's V."""
        return torch.stack([self._norms[layer] for layer in self.layers]) if self._norms else None

    def recording(self, lane: Lane) -> AbstractContextManager[None]:
        """While this lasts, a pass of this lane leaves the weights here."""
        if not len(self.here) and self.lanes.geometry.own_keys:
            return nullcontext()
        self.lanes.prove(self.ledger.slots, int(self.ledger.positions.max()) + 1, lane)
        return (
            self.lanes.observing_attention(self._compute)
            if lane == "plain"
            else self.lanes.hooked.observing_patterns(self._take)
        )

    def _compute(self, attending: Attending) -> None:
        layer = attending.layer
        if layer in self.layers:
            if len(self.here):
                self._weights[layer] = attending.at(self.here).weights(self._seen[layer])[0]
            if not self.lanes.geometry.own_keys:
                norms, heads = attending.value[0].float().norm(dim=-1), attending.query.shape[1]
                self._norms[layer] = norms.repeat_interleave(heads // len(norms), 0)

    def _take(self, layer: int, pattern: Tensor) -> None:
        if layer in self.layers:
            self._weights[layer] = pattern[0, :, self.here].float()


def _layers(model: Model, layers: Sequence[int] | None) -> tuple[int, ...]:
    attending = model.geometry.attending
    wanted = attending if layers is None else tuple(dict.fromkeys(layers))
    if not wanted or not set(wanted) <= set(attending):
        whole = attending == tuple(range(len(attending)))
        known = f"0 to {attending[-1]}" if whole else f"{', '.join(map(str, attending))}, and others do not attend"
        raise UserError(
            f"There is no attention of layers {str(layers)[:40]}; the model attends in layers {known}, so give at "
            "least one of them."
        )
    return wanted


def _chosen(tokens: Tokens, queries: str | Sequence[str] | Sequence[int]) -> list[int]:
    """Indices of the chosen queries among the tokens, in order."""
    if queries == "last":
        return [len(tokens) - 1]
    asked = [queries] if isinstance(queries, str) else list(queries)
    indices = set()
    for query in asked:
        if isinstance(query, str):
            if query not in tokens.names:
                raise UserError(unknown("segment", query, tokens.names))
            indices |= {index for index, name in enumerate(tokens.segments) if name == query}
        elif -len(tokens) <= query < len(tokens):
            indices.add(query % len(tokens))
        else:
            raise UserError(
                f"There is no query {query}; the text has {len(tokens)} tokens, counted from 0 or back from -1."
            )
    if not indices:
        raise UserError("No query was chosen; give 'last', a segment, or tokens by index.")
    return sorted(indices)
