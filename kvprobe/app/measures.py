"""What is measured on an edited cache: what each slot has become, where numbers changed, what later slots still hold of
what was hidden, and memory."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.app.edited import EditedCache
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import vectors_apart
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import KV, LATENT, ROTATED, WRITES
from kvprobe.inference.model import Model
from kvprobe.inference.under_policy import tokens_at

DECIMALS = 4
Rows = list[list[float | None]]
"""[layers][slots of the conversation]; null where there is nothing to measure."""


def slots_now(now: EditedCache) -> dict[str, list[object]]:
    """Per slot of the conversation: its `segment`, its `position` (null where it is gone), the share of layers and KV
    heads that may see it (`seen`), and whether it was `recomputed`, `damaged`, `patched`, `quantised`."""
    ledger, places, count = now.cache.ledger, now.places, now.whole.slots
    seen = torch.zeros(count)
    seen[places] = ledger.live[:, 0].float().mean((0, 1)).cpu()
    position: list[int | None] = [None] * count
    for place, at in zip(places.tolist(), ledger.positions[0].tolist(), strict=True):
        position[place] = at

    def marked(flags: Tensor) -> list[bool]:
        marks = torch.zeros(count, dtype=torch.bool)
        marks[places] = flags.cpu()
        return marks.tolist()

    whole = now.whole.ledger
    return {
        "segment": [whole.names[number] for number in whole.segments[0].tolist()],
        "position": [*position],
        "seen": seen.double().round(decimals=DECIMALS).tolist(),
        "recomputed": [*marked(ledger.recomputed[0])],
        "quantised": [*marked(ledger.quantised[0] >= 0)],
        "damaged": [slot in now.damaged for slot in range(count)],
        "patched": [slot in now.patched for slot in range(count)],
    }


def change(now: EditedCache) -> Rows:
    """How far each slot that is left is from what it held when it was written: ‖difference‖ / ‖before‖, the mean
    over parts and heads; K alone does not count where it was computed at another position."""
    places, full = now.places, now.whole
    moved = bool((full.ledger.origins[0, places] != now.cache.ledger.origins[0]).any())
    return _rows([
        _distance(mine, {name: part[:, :, places] for name, part in theirs.items()}, moved)
        for mine, theirs in zip(now.cache.layers, full.layers, strict=True)
    ], places, full.slots)  # fmt: skip


def contamination(model: Model, now: EditedCache) -> Rows | None:
    """What the later slots still hold of what no later query sees: how far they are from the same slots read without
    it, at the same positions. None where nothing is hidden, or what is left was computed again.

    A summary that was written from damaged slots is as far as the damage took it, too.
    """
    full = now.whole
    seen = torch.zeros(full.slots, dtype=torch.bool, device=now.places.device)
    seen[now.places] = now.cache.ledger.live_somewhere[0]
    retained = seen.clone()
    retained[now.places] &= ~now.cache.ledger.recomputed[0]
    hidden = (~seen).nonzero()[:, 0]
    later = retained & (torch.arange(full.slots, device=seen.device) > (int(hidden[0]) if len(hidden) else full.slots))
    if not bool(later.any()):
        return None
    kept = seen.nonzero()[:, 0]
    restart = model.prefill(tokens_at(full.ledger, 0, kept))
    index, among = later.nonzero()[:, 0], later[kept]
    distances = [
        _distance(
            {name: part[:, :, index] for name, part in mine.items()},
            {name: part[:, :, among] for name, part in theirs.items()},
        )
        for mine, theirs in zip(full.layers, restart.layers, strict=True)
    ]
    return _rows(distances, index, full.slots)


def slot_bytes(cache: KVCache) -> int:
    """Bytes of the slots that are attended to."""
    return sum(part.nbytes for layer in cache.layers for name, part in layer.items() if name not in WRITES)


def state_bytes(model: Model) -> int:
    """Bytes of the states of recurrent layers, as engines hold them: they are as large whatever they have read."""
    if not model.geometry.recurrent:
        return 0
    needs = model.budget(context=1, engine="logical")
    return sum(layer.state.nbytes(needs.request.dtype) for layer in needs.layers if layer.state is not None)


def live_bytes(cache: KVCache) -> int | None:
    """Bytes of the live slots alone where each head stores its own; None where layers keep states."""
    attended = all(name in (*KV, *LATENT, "index") for layer in cache.layers for name in layer)
    return cache.footprint if attended else None


def _distance(mine: Layer, theirs: Layer, moved: bool = False) -> Float[Tensor, "slots"] | None:
    """Of each slot of a layer; None where it stores nothing that can be compared."""
    parts = [name for name in mine if not (moved and name in ROTATED)]
    distances = [vectors_apart(mine[name][0], theirs[name][0]).mean(0) for name in parts]
    return torch.stack(distances).mean(0) if distances else None


def _rows(layers: list[Tensor | None], places: Tensor, count: int) -> Rows:
    rows: Rows = []
    for layer in layers:
        row: list[float | None] = [None] * count
        if layer is not None:
            for place, value in zip(places.tolist(), layer.double().round(decimals=DECIMALS).tolist(), strict=True):
                row[place] = value if value != float("inf") else None
        rows.append(row)
    return rows
