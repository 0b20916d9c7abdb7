"""What readers of a secret are given of the caches that stay: numbers by layer and part, and slots as tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import WRITES, recurrent
from kvprobe.forgetting.hidden_secret import HiddenSecret
from kvprobe.forgetting.trace import INPUTS, STATE, SecretTrace, Slots, in_layers, seen
from kvprobe.inference.model import Model
from kvprobe.inference.states import state_of

SLOTS, LAYERS = 12, 6
"""Slots and layers that a network reads at most."""
STATES = 256
"""Principal coordinates of a state that it reads at most."""
LESS = " less restart"
Site = tuple[int, str]
"""A layer and a part of it."""


@dataclass(frozen=True)
class View:
    """What a reader is given of several caches.

    Attributes:
        sites: the numbers of each part of each layer, for readers of one or a few of them.
        tokens: single slots of several layers, all parts of a layer together, for networks.
        seen: which slots of which layers these are.
    """

    sites: Mapping[Site, Float[Tensor, "samples _"]]
    tokens: Float[Tensor, "samples layers slots numbers"]
    seen: str

    @classmethod
    def alike(cls, samples: int) -> "View":
        """Caches that do not differ: after a restart, which never reads the secret, there is one for all secrets."""
        return cls({(0, "restart"): torch.zeros(samples, 1)}, torch.zeros(samples, 1, 1, 1), "one cache for all")

    @property
    def averages(self) -> Float[Tensor, "samples sites numbers"]:
        """The sites that differ between samples, side by side; what was read anew is taken off where it is known."""
        off = {layer for layer, name in self.sites if name.endswith(LESS)}
        wanted = {site: held for site, held in self.sites.items() if site[0] not in off or site[1].endswith(LESS)}
        varying = [held for held in wanted.values() if bool((held != held[:1]).any())]
        return _side_by_side(varying or list(wanted.values())[:1])


def _spread(layers: Sequence[int]) -> list[int]:
    """At most `LAYERS` of the layers, evenly spread, the last one among them."""
    count = min(LAYERS, len(layers))
    return [layers[(number + 1) * len(layers) // count - 1] for number in range(count)]


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Along a new second axis, numbers that a shorter one lacks filled with zeros."""
    width = max(one.shape[-1] for one in rows)
    return torch.stack([pad(one, (0, width - one.shape[-1])) for one in rows], 1)


def _beyond(numbers: Float[Tensor, "samples numbers"], rounding: float) -> Float[Tensor, "samples numbers"]:
    """With those numbers alike that differ by rounding alone: standardised, they would drown the others."""
    differ = ((numbers - numbers[:1]).abs() > rounding).any(0)
    return torch.where(differ, numbers, numbers[:1])


def principal(numbers: Float[Tensor, "samples numbers"]) -> Float[Tensor, "samples samples"]:
    """The same inner products between samples, of standardised numbers, in as many numbers as there are samples, the
    largest last."""
    size = numbers.norm(dtype=torch.double) / max(numbers.numel(), 1) ** 0.5
    varying = numbers[:, (numbers != numbers[:1]).any(0)].double()
    off = varying - varying.mean(0)
    scaled = off[:, off.square().mean(0).sqrt() > 1e-9 * size]
    scaled = scaled / scaled.square().mean(0).sqrt()
    if not scaled.shape[1]:
        return torch.zeros(len(numbers), len(numbers), dtype=torch.double)
    values, axes = torch.linalg.eigh(scaled @ scaled.T)
    return axes * values.clamp(min=0).sqrt()


def rotated(numbers: Float[Tensor, "samples numbers"]) -> Float[Tensor, "samples dim"]:
    """Principal coordinates in a random rotation.

    Ridge regression asks for inner products alone. The rotation spreads them over all numbers, since probes scale each
    number to the same variance.
    """
    axes = principal(numbers)
    rng = torch.Generator().manual_seed(0)
    return (axes @ torch.linalg.qr(torch.randn(axes.shape, generator=rng, dtype=torch.double))[0]).float()


def view_of(model: Model, caches: Sequence[KVCache], slots: Slots, trace: SecretTrace) -> View:
    """Caches of one conversation with different secrets.

    Networks read slots of layers spread over those that differ between secrets: those slots that differ most in these
    layers, each less its mean over secrets.
    """
    if not trace.touched:  # the secret decides which slots stay, and nothing in those that all have
        return View.alike(len(caches))
    layers = _spread(trace.touched)
    by_slot = trace.by_slot()[layers]
    by_place = (by_slot - by_slot.amin(1, keepdim=True)).mean(0)  # a state is at every place alike
    places = sorted(by_place.topk(min(SLOTS, len(by_place))).indices.tolist())
    places = [place for place in places if by_place[place]] or [0]
    sites: dict[Site, Tensor] = {}
    tokens: list[Tensor] = []
    for layer in range(caches[0].n_layers):
        held = [seen(model, cache, slots, number, layer) for number, cache in enumerate(caches)]
        rounding = trace.rounding[layer]
        for name in held[0]:
            sites[layer, name] = rotated(_beyond(torch.stack([one[name].flatten() for one in held]), rounding[name]))
        if layer in layers:
            parts = {name: torch.stack([one[name] for one in held]) for name in held[0]}
            tokens.append(_tokens(parts, places, rounding))
    count = f"{len(places)} of {len(slots.positions)} slots"
    return View(sites, _side_by_side(tokens), f"{count} of {in_layers(layers)}")


def _tokens(
    parts: Mapping[str, Float[Tensor, "samples heads slots numbers"]],
    places: Sequence[int],
    rounding: Mapping[str, float],
) -> Float[Tensor, "samples places width"]:
    """The parts of a layer side by side. A state is the first of the slots, in its principal coordinates."""
    beside: list[Tensor] = []
    if STATE in parts:
        folded = torch.cat([_beyond(parts[name].flatten(1), rounding[name]) for name in (STATE, INPUTS)], 1)
        beside.append(pad(principal(folded).float()[:, None, -STATES:], (0, 0, 0, len(places) - 1)))
    for name in [name for name in parts if name not in (STATE, INPUTS)]:
        held = parts[name][:, :, list(places)].transpose(1, 2).flatten(2)
        beside.append((held - held.mean(0)).float())
    return torch.cat(beside, -1)


class ViewOfOthers:
    """A segment of one conversation after another: averages over its slots, and its last slots.

    Args:
        itself: what was forgotten, in place of the segment after it.
    """

    def __init__(self, model: Model, itself: bool = False) -> None:
        self._model, self._itself = model, itself
        self._means: dict[Site, list[Tensor]] = {}
        self._tokens: dict[int, list[Tensor]] = {}
        self._layers = _spread(range(model.geometry.n_layers))

    def add(self, cache: KVCache, case: HiddenSecret, restart: KVCache | None = None) -> None:
        """Add one, and the same less what a restart holds in these slots."""
        for layer in range(cache.n_layers):
            held = self._of_layer(cache, case, layer)
            anew = None if restart is None else self._of_layer(restart, case, layer)
            for name, numbers in held.items():
                self._means.setdefault((layer, name), []).append(numbers.mean(0))
                if anew is not None:
                    less = numbers.mean(0) - anew[name].mean(0)
                    self._means.setdefault((layer, f"{name}{LESS}"), []).append(less)
            if layer in self._layers and (names := [name for name in held if name != STATE]):
                last = torch.cat([held[name] for name in names], -1)[-SLOTS:]
                if anew is not None and len(anew[names[0]]) == len(held[names[0]]):
                    last = last - torch.cat([anew[name] for name in names], -1)[-SLOTS:]
                self._tokens.setdefault(layer, []).append(pad(last, (0, 0, SLOTS - len(last), 0)))

    def _of_layer(self, cache: KVCache, case: HiddenSecret, layer: int) -> dict[str, Float[Tensor, "slots _"]]:
        parts, ledger = cache.layers[layer], cache.ledger
        state = {STATE: state_of(self._model, cache, layer)[0].flatten()[None]} if recurrent(parts) else {}
        order = case.chat.segments
        first = max(order.index(name) for name in case.hide)
        wanted = case.hide if self._itself else order[first + 1 : first + 2]
        chosen = ledger.in_segments([name for name in wanted if name in ledger.names])[0] & ledger.live_somewhere[0]
        return state | {
            name: held[0][:, chosen].float().transpose(0, 1).flatten(1).cpu()
            for name, held in parts.items()
            if name not in WRITES
        }

    def view(self) -> View:
        """Of all conversations."""
        tokens = [torch.stack(rows) for rows in self._tokens.values()]
        sites = {site: torch.stack(means) for site, means in self._means.items()}
        if not tokens:  # states alone
            states = View(sites, torch.zeros(1), "states")
            return replace(states, tokens=states.averages[:, :, None])
        seen_slots = f"the last {SLOTS} slots of {in_layers(sorted(self._tokens))}"
        return View(sites, _side_by_side(tokens), seen_slots)
