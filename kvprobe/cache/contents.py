"""What a KV cache holds: the parts of each layer, and the ledger of the slots."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import check_fields, checked_arguments
from kvprobe.brief import Brief, plain_dtype
from kvprobe.cache import shown
from kvprobe.cache.footprint import footprint
from kvprobe.cache.layer import Layer, named, refuse_misfit, shape_of
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import Shape, described, recurrent
from kvprobe.errors import UserError
from kvprobe.fingerprint import Maker


@checked_arguments
@dataclass(frozen=True, repr=False)
class Contents(Brief):
    """What a cache holds, before anything is done to it; see `kvprobe.cache.cache.KVCache`."""

    layers: tuple[Layer, ...]
    ledger: Ledger
    made_by: Maker | None = None

    def __post_init__(self) -> None:
        if not (type(self.layers) is tuple and type(self.ledger) is Ledger):
            check_fields(self)
        if not any(self.layers):
            raise UserError("A cache needs at least one layer that stores something; got none.")
        for number, layer in enumerate(self.layers):
            refuse_misfit(number, layer, self.ledger.batch, self.ledger.slots)

    @property
    def keys(self) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
        """One tensor per layer, after any norm and rotary embedding, rotated to `ledger.origins`; see `part`."""
        return self.part("K")

    @property
    def values(self) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
        """One tensor per layer; see `part`."""
        return self.part("V")

    def part(self, name: str) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
        """This part of what each layer stores.

        Raises:
            UserError: a layer stores other parts.
        """
        return tuple(named(layer, name) for layer in self.layers)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of each layer.

        Raises:
            UserError: layers differ in it, or keep states.
        """
        if any(map(recurrent, self.layers)):
            raise UserError(
                "Layers of this cache keep states, whose heads are others, so heads cannot be named over all layers; "
                "mask slots in all heads, or choose layers."
            )
        heads = {next(iter(layer.values())).shape[1] for layer in self.layers if layer}
        if len(heads) > 1:
            raise UserError(
                f"Layers of this cache have {', '.join(map(str, sorted(heads)))} KV heads, so heads cannot be named "
                "over all layers; mask slots in all heads, or choose layers."
            )
        return heads.pop()

    @property
    def batch(self) -> int:
        return self.ledger.batch

    @property
    def slots(self) -> int:
        return self.ledger.slots

    @property
    def tensors(self) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
        """All parts of all layers."""
        return tuple(tensor for layer in self.layers for tensor in layer.values())

    @property
    def nbytes(self) -> int:
        """Bytes of storage held, storage shared between rows or layers counted once."""
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def footprint(self) -> int:
        """Bytes that the live slots take where each head stores its own and each at its precision; see
        `kvprobe.cache.footprint`. For a cache that is uniform and not quantised, `nbytes`."""
        return footprint(self.ledger, self.shape, self.tensors[0].element_size())

    @property
    def shape(self) -> Shape:
        """What each layer stores of a slot: heads and numbers of each part by its name."""
        return tuple(map(shape_of, self.layers))

    def refuse_nonfinite(self) -> None:
        """Refuse a cache that holds NaN or infinity, also in a masked slot: 0 × NaN is NaN.

        Raises:
            UserError: the cache holds one; the sentence names part, layer, KV head, slot and row.
        """
        for number, layer in enumerate(self.layers):
            for part, tensor in layer.items():
                bad = ~tensor.isfinite().all(-1)
                if bool(bad.any()):
                    row, head, slot = map(int, bad.nonzero()[0])
                    raise UserError(
                        f"{part} of layer {number}, KV head {head}, slot {slot} (row {row}) holds NaN or infinity; a "
                        f"cache must be finite to be attended to."
                    )

    def _facts(self) -> Iterable[str]:
        yield from shown.facts(self.ledger)
        yield f"{self.n_layers} layers of {described(self.shape, sizes=False)}, {plain_dtype(self.tensors[0].dtype)}"
        yield "of any model" if self.made_by is None else f"of {self.made_by.name}"
        if self.ledger.engine is not None:
            yield f"computed by {self.ledger.engine}"
        if mixed := int(self.ledger.of_others.sum()):
            yield f"{mixed} slots of {' and '.join(maker.name for maker in self.ledger.without_unused().others)}"

    def _html(self) -> str:
        return shown.html(self.ledger)
