"""Saved slots of llama.cpp as caches of a model, and back: save → cache → mask, evict, re-index, patch, corrupt →
restore → go on.

llama.cpp rotates neighbouring numbers of a key in models that it calls Llama, and stores their projections so; in the
others it rotates numbers half a head apart, as transformers does. The order is taken from the model's
architecture, and proved: keys and values of layer 0 depend on nothing but a slot's token and position, and must be
those that the model reads there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.parts import KV
from kvprobe.cache.stored import StoredCache
from kvprobe.engines.server import CacheType, served
from kvprobe.engines.slot import Slot, SlotLayout, read_slot, stored, write_slot
from kvprobe.errors import UserError
from kvprobe.inference.forward import new_slots
from kvprobe.inference.model import Model
from kvprobe.inference.rows import Readable
from kvprobe.text.tokens import GENERATED, Tokens

PAIRED = ("llama", "mistral", "mixtral")
HALVED = ("gemma2", "gemma3_text", "gpt2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Kinds of models in transformers by the order of the numbers of a key in llama.cpp."""
FAR = 0.3
"""How far the median key and value of layer 0 may be off, relative to its length. Caches in 4 bits are off by 0.1, keys
in another order or of another model by 1."""
_READ = 64
"""Slots that are read again."""


@checked_arguments
def open_slot(path: Path, model: Model | None = None) -> StoredCache:
    """A saved slot, of which a layer is read when it is asked for; without a proof that it is of the model.

    Args:
        model: whose it is; without it each layer is one wide head, in the order of the file.

    Raises:
        UserError: see `read_slot`; or the slot is of another shape, or kvprobe does not know the model's in llama.cpp.
    """
    slot = read_slot(path)
    return stored(slot, model and layout_of(model, slot))


@checked_arguments
def from_slot(path: Path, model: Model, text: Readable | None = None) -> KVCache:
    """A saved slot as a cache of this model.

    Args:
        text: that was read into it, which gives its slots their segments; what follows it counts as generated.

    Raises:
        UserError: see `open_slot`; or keys or values are not those of this model; or the text is another, or several.
    """
    held = open_slot(path, model)
    cache = replace(held.cache(), made_by=model.lanes.maker)
    if text is not None:
        runs = model.tokens(text)
        if len(runs) != 1:
            raise UserError(f"A slot holds one text, and these are {len(runs)}; give the one that was read into it.")
        cache = told(cache, runs[0])
    _refuse_another(cache, model, path)
    return cache.to(model.lanes.device)


@checked_arguments
def to_slot(cache: KVCache, path: Path, like: Path, model: Model) -> Slot:
    """Write a cache of this model as a slot, which the server that saved `like` restores.

    The server goes on with it where the next prompt begins with `Slot.tokens`: slots that are not live are not seen,
    and nothing is computed again. Context checkpoints of `like` are left out, since they would bring back what was
    hidden.

    Raises:
        UserError: see `write_slot`.
    """
    template = read_slot(like)
    return write_slot(path, model.as_seen(cache), template, layout_of(model, template))


@checked_arguments
def pairs(
    model: Model,
    gguf: Path,
    runs: Sequence[Tokens],
    *,
    cache: CacheType = "f16",
    flash: bool = True,
    threads: AtLeastOne = 1,
) -> Iterator[tuple[KVCache, KVCache]]:
    """What the model and llama.cpp compute of the same tokens: their caches side by side, to measure what is benign.

    Raises:
        UserError: see `served` and `from_slot`.
    """
    longest = max((len(run) for run in runs), default=1)
    with served(gguf, cache=cache, context=longest + 8, flash=flash, threads=threads) as server:
        for run in runs:
            server.complete([*run.ids], reuse=False)
            server.save(0, "run")
            yield model.prefill(run), from_slot(server.path("run"), model, run)


def layout_of(model: Model, slot: Slot) -> SlotLayout:
    """How the file of a slot holds the layers of a model.

    Raises:
        UserError: kvprobe does not know how llama.cpp keeps this model, or the slot cannot be of it.
    """
    geometry, kind = model.geometry, model.lanes.plain.config.model_type
    if any(parts != KV for parts in geometry.parts):
        raise _unknown(kind)
    keys = [parts[0] for parts in geometry.layers]
    return layout_for(kind, [part.heads for part in keys], geometry.windows, keys[0].numbers, slot)


def layout_for(kind: str, heads: Sequence[int], windows: Sequence[int | None], d_head: int, slot: Slot) -> SlotLayout:
    """How the file of a slot holds layers with so many KV heads each, and these windows.

    Args:
        kind: what transformers calls such models.

    Raises:
        UserError: kvprobe does not know how llama.cpp keeps them.
    """
    if kind not in PAIRED + HALVED:
        raise _unknown(kind)
    everywhere = tuple(number for number, window in enumerate(windows) if window is None)
    sliding = tuple(number for number, window in enumerate(windows) if window is not None)
    return SlotLayout(
        len(heads),
        tuple(heads),
        (everywhere, sliding) if len(slot.attention) == 2 else (tuple(range(len(heads))),),
        paired=d_head if kind in PAIRED else 0,
        numbers=d_head,
        windows=tuple(window for window in windows if window is not None),
    )


def _unknown(kind: str) -> UserError:
    return UserError(
        f"kvprobe does not know in which order llama.cpp keeps the numbers of {kind} models; it knows "
        f"{', '.join(sorted(PAIRED + HALVED))}, and shows other slots without a model, as they lie in the file."
    )


def told(cache: KVCache, text: Tokens) -> KVCache:
    """The cache of a slot whose slots have their segments in the text that was read into it; what follows it counts as
    generated.

    Raises:
        UserError: the text is another.
    """
    ledger = cache.ledger
    positions, ids = entries(ledger.positions[0], int), entries(ledger.tokens[0], int)
    following = int(ledger.following[0])
    known = dict(zip(text.positions, range(len(text)), strict=True))
    wrong = next(
        (at for at, token in zip(positions, ids, strict=True) if at in known and text.ids[known[at]] != token), None
    )
    whole = text + Tokens.of([0] * max(0, following - text.following), GENERATED, text.following)
    place = dict(zip(whole.positions, range(len(whole)), strict=True))
    if wrong is None:
        wrong = next((at for at in positions if at not in place), None)
    if wrong is not None or text.following > following:
        raise UserError(
            f"The text is another than the slot holds, from position {text.following if wrong is None else wrong} on; "
            "give what the server had read when the slot was saved."
        )
    run = replace(whole.at([place[position] for position in positions]), ids=ids, end=following)
    new = new_slots([run], ledger.tokens.device)
    return replace(cache, ledger=replace(new, live=ledger.live, dropped=ledger.dropped, engine=ledger.engine))


def _refuse_another(cache: KVCache, model: Model, path: Path) -> None:
    """Refuse a cache whose first layer does not hold what the model reads for its tokens, at their positions."""
    live = cache.ledger.live[0, 0, 0].nonzero()[:, 0]
    chosen = live[:: -(-len(live) // _READ)]
    run = Tokens.of(entries(cache.ledger.tokens[0, chosen], int))
    again = model.prefill(replace(run, positions=entries(cache.ledger.positions[0, chosen], int)))
    for name in KV:
        own, new = cache.layers[0][name][0, :, chosen], again.layers[0][name][0].cpu().float()
        apart = ((own - new).square().sum((0, 2)) / new.square().sum((0, 2))).sqrt()
        off = apart.nanmedian()  # slots that hold NaN prove nothing
        if not off <= FAR:
            raise UserError(
                f"{name} of layer 0 in {path.name} is not what {model.name} reads for these tokens (off by {off:.2f} "
                f"of its length, and {FAR} is the most); give the model that made the slot, or see it with open_slot."
            )
