"""Capture what a forward pass computes at chosen layers and slots.

One pass, on either lane. K and V as stored come from the cache as it is filled. Everything else comes from module hooks
on the plain lane where the plain model has such a module, and from TransformerLens hook points otherwise. Only the
slots asked for are copied, so the request bounds the memory.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvprobe.brief import Brief, brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import named
from kvprobe.cache.parts import KV, LATENT
from kvprobe.checks import names_of
from kvprobe.errors import UserError
from kvprobe.inference.forward import at_slots, cache_of, forward_pass, one_row_each, prove_reading, taps
from kvprobe.models.attending import Attending
from kvprobe.models.geometry import Geometry
from kvprobe.models.hooks import Hook, claimed, hooked
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import HOOKS, PER_HEAD, STORED, Family, hook_name, sites_of
from kvprobe.models.ports import Port
from kvprobe.models.unproved import Lane
from kvprobe.names import unknown
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True, repr=False)
class Captured(Brief):
    """What was captured in one pass.

    Attributes:
        tensors: by (family, layer); `[batch, kv_heads, picked, d_head]` for K and V, `[batch, picked, d_model]`
            for the rest.
        present: false where a row has fewer picked slots than the longest and its entry is padding.
        logits: after the last tokens of each row.
        cache: the longer cache, if `keep_cache` was given.
    """

    tensors: dict[tuple[Family, int], Tensor]
    present: Bool[Tensor, "batch picked"]
    logits: Float[Tensor, "batch last vocab"]
    cache: KVCache | None

    def _facts(self) -> Iterable[str]:
        for family in dict.fromkeys(family for family, _ in self.tensors):
            layers = {layer: tensor for (name, layer), tensor in self.tensors.items() if name == family}
            yield f"{family} of {len(layers)} layers: {brief(next(iter(layers.values())))}"
        yield f"logits={brief(self.logits)}"
        yield f"cache={brief(self.cache)}"

    def __getitem__(self, place: tuple[Family, int]) -> Tensor:
        if place not in self.tensors:
            raise UserError(f"{place[0]!r} at layer {place[1]} was not captured; ask for it in `capture`.")
        return self.tensors[place]

    @property
    def by_hook(self) -> dict[str, Tensor]:
        """The tensors by TransformerLens' names (`blocks.3.attn.hook_v`) and in its order of axes, as in an
        ActivationCache: K and V are `[batch, picked, kv_heads, d_head]`."""
        return {
            hook_name(family, layer): tensor.transpose(1, 2) if family in PER_HEAD else tensor
            for (family, layer), tensor in self.tensors.items()
            if family in HOOKS
        }

    def stack(self, family: Family) -> Tensor:
        """All captured layers of a family, layer axis first.

        Raises:
            UserError: layers differ in their heads or sizes.
        """
        tensors = [tensor for (name, _), tensor in sorted(self.tensors.items()) if name == family]
        if len(shapes := {tensor.shape[1::2] for tensor in tensors}) > 1:
            raise UserError(
                f"Layers differ in heads or numbers of {family!r} ({' and '.join(str(tuple(of)) for of in shapes)}); "
                "give `layers` that are alike."
            )
        return torch.stack(tensors)


def capture(
    lanes: Lanes,
    tokens: Sequence[Tokens],
    families: Sequence[Family | str] | Mapping[Family, Sequence[int]],
    *,
    layers: Sequence[int] | None = None,
    segments: str | Sequence[str] | None = None,
    slots: Sequence[int] | None = None,
    past: KVCache | None = None,
    lane: Lane | Literal["auto"] = "auto",
    keep_cache: bool = False,
    logits: int = 1,
) -> Captured:
    """Read `tokens` (after `past`), and return what these families compute at these layers and slots.

    Args:
        families: see `kvprobe.models.lens.Family`; or the layers of each; or TransformerLens' names of sites, such as
            `blocks.3.attn.hook_v`, each of which names its layer.
        layers: all by default that have a family.
        segments: only the slots of these segments of the new tokens.
        slots: or, these of the new tokens, by index (negative from the end of each row). All by default.
        lane: `auto` takes the plain lane if it can answer.
        keep_cache: also return the whole cache; otherwise only what was asked for stays in memory.
        logits: number of last tokens of each row to return logits for.

    Raises:
        UserError: an unknown family, layer, segment or slot; or a family that the model does not have.
    """
    wanted = layers_by_family(families, layers, lanes.geometry)
    layers = sorted({layer for of_family in wanted.values() for layer in of_family})
    past = one_row_each(lanes, past, len(tokens))
    pick, present = _picked(tokens, segments, slots, lanes.device)
    stored: list[Family] = [family for family in wanted if family in STORED]
    computed: list[Family] = [family for family in wanted if family not in (*STORED, "state")]

    tensors: dict[tuple[Family, int], Tensor] = {}

    def observe(family: Family, layer: int, tensor: Tensor) -> None:
        if family in PER_HEAD:
            per_head = tensor.reshape(*tensor.shape[:2], lanes.geometry.n_kv_heads, -1).transpose(1, 2)
            tensors[family, layer] = at_slots(per_head, pick)
        else:
            tensors[family, layer] = tensor.gather(1, pick[:, :, None].expand(-1, -1, tensor.shape[2]))

    both: tuple[Family, Family] = ("k", "v")
    # Of latents each head makes a key and a value.
    made = {
        (family, layer)
        for family in both
        for layer in wanted.get(family, ())
        if LATENT[0] in lanes.geometry.parts[layer]
    }

    def attends(inputs: Attending) -> None:
        for family, tensor in zip(both, (inputs.key, inputs.value), strict=True):
            if (family, inputs.layer) in made:
                tensors[family, inputs.layer] = at_slots(tensor[:, :, tensor.shape[2] - max(map(len, tokens)) :], pick)

    ports = plain_ports(lanes, {family: wanted[family] for family in computed}) if computed else {}
    if lane == "auto":
        lane = "hooked" if None in ports.values() else "plain"
    if made and lane == "hooked":
        raise UserError("K and V of each head of a latent are shown on the plain lane alone; use lane='plain'.")
    prove_reading(lanes, past, tokens, lane)
    tapped = taps(lanes, past, dict.fromkeys(layers, pick) if stored else None, keep_cache)
    observing = (
        lanes.hooked.observing(computed, layers, observe) if lane == "hooked" else _observing(lanes, ports, observe)
    )
    with lanes.observing_attention(attends) if made else nullcontext(), observing:
        ledger, scores = forward_pass(lanes, past, tokens, tapped, lane, logits)
    for layer in layers if stored else ():
        parts = lanes.geometry.layers[layer]
        picked = {part.name: tensor for part, tensor in zip(parts, tapped[layer].picked, strict=True)}
        tensors |= {
            (family, layer): named(picked, STORED[family])
            for family in stored
            if layer in wanted[family] and (family, layer) not in made
        }
    for layer in wanted.get("state", ()):
        if "decay" not in lanes.geometry.parts[layer]:
            raise UserError(f"Layer {layer} keeps no state; capture it in {_having('state', lanes.geometry)}.")
        tensors["state", layer] = tapped[layer].states_at(pick)
    tensors = {(family, layer): tensor for (family, layer), tensor in tensors.items() if layer in wanted[family]}
    return Captured(tensors, present, scores, cache_of(lanes, tapped, ledger) if keep_cache else None)


def layers_by_family(
    families: Sequence[Family | str] | Mapping[Family, Sequence[int]], layers: Sequence[int] | None, geometry: Geometry
) -> dict[Family, list[int]]:
    """The layers to read of each family.

    Args:
        families: or the layers of each; or TransformerLens' names of sites, each of which names its layer.
        layers: of all families; by default all that have one.

    Raises:
        UserError: an unknown family, hook or layer, or layers beside hook names.
    """
    n_layers = geometry.n_layers
    if isinstance(families, Mapping):
        if layers is not None:
            raise UserError("Give the layers of each family, or `layers` of all of them, but not both.")
        return {family: sorted({_layer(layer, n_layers) for layer in of}) for family, of in families.items()}
    sites = sites_of(families)
    if sites is None:
        for family in families:
            if family not in get_args(Family):
                known = (*get_args(Family), *(hook_name(known, 0) for known in HOOKS))
                raise UserError(unknown("family", family, known))
        if layers is not None:
            chosen = sorted({_layer(layer, n_layers) for layer in layers})
            return {cast(Family, family): chosen for family in families}
        return {cast(Family, family): _having(cast(Family, family), geometry) for family in families}
    if layers is not None:
        raise UserError("Hook names name their layers; give hook names alone, or families and `layers`.")
    by_family: dict[Family, list[int]] = {}
    for family, layer in sites:
        by_family.setdefault(family, []).append(_layer(layer, n_layers))
    return {family: sorted(of_family) for family, of_family in by_family.items()}


def plain_ports(lanes: Lanes, wanted: Mapping[Family, Sequence[int]]) -> dict[tuple[Family, int], Port | None]:
    """Where the plain model computes families at these layers; None where only a TransformerLens hook shows it.

    Raises:
        UserError: the model does not compute a family.
    """
    ports: dict[tuple[Family, int], Port | None] = {}
    if (own := lanes.own_ports) is not None:
        places: list[tuple[Family, int]] = [(family, layer) for family, layers in wanted.items() for layer in layers]
        for place in places:
            if place not in own:
                raise UserError(
                    f"{type(lanes.plain).__name__} has no module that computes {place[0]!r} of layer {place[1]}; "
                    "leave it out, or choose other layers."
                )
        return {place: own[place] for place in places}
    hooked = lanes.hooked  # once, because it looks whether any weight was written
    for family, layers in wanted.items():
        if not hooked.fires(family):
            raise UserError(f"This model does not compute {family!r}, as its blocks are built otherwise; leave it out.")
        for layer in layers:
            port = hooked.plain_port(family, layer)
            if port is not None:
                try:
                    lanes.plain.get_submodule(port[0])
                except AttributeError:
                    port = None
            ports[family, layer] = port
    return ports


@contextmanager
def _observing(
    lanes: Lanes, ports: dict[tuple[Family, int], Port | None], observe: Callable[[Family, int, Tensor], None]
) -> Generator[None]:
    """Call `observe` with the input or output of modules of the plain model; one that is never called is an error."""
    called: set[tuple[Family, int]] = set()

    def note(key: tuple[Family, int], tensor: Tensor) -> Tensor:
        called.add(key)
        observe(*key, tensor)
        return tensor

    edits: list[tuple[Port, Edit]] = []
    for key, port in ports.items():
        if port is None:
            raise UserError(f"The plain lane cannot show {key[0]!r} of this model; use lane='hooked'.")
        edits.append((port, partial(note, key)))
    with editing(lanes, edits):
        yield
    if silent := set(ports) - called:
        never = ", ".join(f"{family} of layer {layer}" for family, layer in sorted(silent))
        raise UserError(
            f"The model never called the modules that compute {never}; leave these out, or use lane='hooked'."
        )


Edit = Callable[[Tensor], Tensor]
"""Gives what stands in place of the hidden states at a port."""


@contextmanager
def editing(lanes: Lanes, edits: Iterable[tuple[Port, Edit]]) -> Generator[None]:
    """While this lasts, edits replace what the plain model computes at their ports (see `plain_ports`)."""
    stream: list[int] = []

    def note(block: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream[:] = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def by_row(edit: Edit, tensor: Tensor) -> Tensor:
        """The edit of what some modules see without rows (OPT, Llama 4)."""
        return edit(tensor) if tensor.dim() == 3 else edit(tensor.view(*stream, -1)).view_as(tensor)

    hooks: list[Hook] = [(block, "input", note) for block in lanes.blocks]
    hooks += [editing_hook(lanes.plain.get_submodule(path), end, partial(by_row, edit)) for (path, end), edit in edits]
    with claimed(lanes.plain), hooked(hooks):
        yield


def editing_hook(module: nn.Module, end: Literal["input", "output"], edit: Edit) -> Hook:
    """A hook by which `edit` replaces the hidden states that a module reads or computes."""

    def before(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (edit(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": edit(kwargs["hidden_states"])}

    def after(
        module: object, args: object, output: Tensor | tuple[Tensor, *tuple[object, ...]]
    ) -> Tensor | tuple[Tensor, *tuple[object, ...]]:
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    return module, end, before if end == "input" else after


def _picked(
    tokens: Sequence[Tokens],
    segments: str | Sequence[str] | None,
    slots: Sequence[int] | None,
    device: torch.device,
) -> tuple[Int[Tensor, "batch picked"], Bool[Tensor, "batch picked"]]:
    """Indices of the chosen slots among the new ones, row by row, and which of them are not padding."""
    if segments is not None and slots is not None:
        raise UserError("Give `segments` or `slots`, not both.")
    segments = None if segments is None else names_of(segments)
    rows: list[list[int]] = []
    for row in tokens:
        if segments is not None:
            for name in segments:
                row.span(name)  # refuses an unknown one
            rows.append([index for index, name in enumerate(row.segments) if name in segments])
        elif slots is not None:
            if not all(-len(row) <= slot < len(row) for slot in slots):
                raise UserError(f"Slots {str(slots)[:40]} reach outside the {len(row)} new tokens.")
            rows.append([slot % len(row) for slot in slots])
        else:
            rows.append(list(range(len(row))))
    longest = max(map(len, rows), default=0)
    pick = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.long, device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return pick, torch.arange(longest, device=device) < lengths[:, None]


def _having(family: Family, geometry: Geometry) -> list[int]:
    """The layers that have a family; all, where none has it, which is refused when it is looked for."""
    part = "decay" if family == "state" else STORED.get(family)
    parts = (part, LATENT[0]) if part in KV else (part,)
    having = [layer for layer, names in enumerate(geometry.parts) if part is None or not {*parts}.isdisjoint(names)]
    return having or list(range(geometry.n_layers))


def _layer(layer: int, n_layers: int) -> int:
    if not 0 <= layer < n_layers:
        raise UserError(f"There is no layer {layer}; the model has layers 0 to {n_layers - 1}.")
    return layer
