"""What a fault may know of the cache that it strikes: numbers, donors, rotary embedding, last queries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import named
from kvprobe.cache.rotary import Rotary
from kvprobe.cache.visibility import refuse_dropped
from kvprobe.errors import UserError
from kvprobe.faults.scope import Part, stored_name
from kvprobe.names import unknown


@dataclass(frozen=True)
class SlotMoments:
    """Mean, spread and covariance of one layer's K or V, or another part, over slots.

    Attributes:
        mean: of each channel.
        deviation: standard deviation of each channel.
        covariance: between the channels of each head.
    """

    mean: Float[Tensor, "kv_heads d"]
    deviation: Float[Tensor, "kv_heads d"]
    covariance: Float[Tensor, "kv_heads d d"]

    @classmethod
    def of(cls, vectors: Float[Tensor, "kv_heads slots d"]) -> "SlotMoments":
        """In fp32."""
        vectors = vectors.float()
        mean = vectors.mean(1)
        centred = vectors - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / vectors.shape[1]
        return cls(mean, centred.square().mean(1).sqrt(), covariance)

    @cached_property
    def root(self) -> Float[Tensor, "kv_heads d d"]:
        """A matrix that gives white noise this covariance, even where there are fewer slots than channels."""
        eigh = cast(
            Callable[[Tensor], tuple[Tensor, Tensor]],
            torch.linalg.eigh,  # pyright: ignore[reportUnknownMemberType] - torch gives it no types
        )
        eigenvalues, vectors = eigh(self.covariance.double())
        return (vectors * eigenvalues.clamp(min=0).sqrt()[:, None]).float()


@dataclass(frozen=True)
class Queries:
    """The last queries of each layer.

    Attributes:
        rows: one tensor per layer, after any norm and rotary embedding. For each token in turn, the query heads that
            share a KV head.
        scale: factor of each layer's attention scores.
        group: query heads per KV head.
    """

    rows: tuple[Float[Tensor, "kv_heads queries d_head"], ...]
    scale: tuple[float, ...]
    group: int


@dataclass(frozen=True, eq=False)
class FaultContext:
    """One row's clean cache, and what else a fault may use.

    Attributes:
        cache: the cache before any fault, of one row.
        donors: other caches by name, from which faults take slots.
        rotaries: the rotary embedding of each layer; see `Lanes.rotaries`.
        queries: the last queries of each layer, for noise that is matched by its effect.
    """

    cache: KVCache
    donors: Mapping[str, KVCache] = field(default_factory=dict[str, KVCache])
    rotaries: tuple[Rotary | None, ...] | None = None
    queries: Queries | None = None

    def __post_init__(self) -> None:
        if self.cache.batch != 1:
            raise UserError(
                f"A fault context has one row, but this cache has {self.cache.batch}; take one with KVCache.rows."
            )
        for name, donor in self.donors.items():
            refuse_other_model(self.cache, donor, f"Donor {name!r}")
            refuse_dropped(f"Donor {name!r}", donor.ledger)
            if donor.batch != 1 or donor.ledger.rotated:
                raise UserError(
                    f"Donor {name!r} has {donor.batch} rows, or keys that re-indexing has still to rotate; take one "
                    "row with KVCache.rows, and carry re-indexing out with Model.as_seen."
                )

    def donor(self, name: str) -> KVCache:
        """A donor by name.

        Raises:
            UserError: there is none of this name.
        """
        if name not in self.donors:
            raise UserError(unknown("donor", name, self.donors))
        return self.donors[name]

    def vectors(self, layer: int, part: Part) -> Float[Tensor, "kv_heads slots d"]:
        """A part of a layer's slots that hold a token."""
        return _filled(self.cache, layer, part)

    def moments(self, layer: int, part: Part) -> SlotMoments:
        """Of the clean cache."""
        return self._remember(None, self.cache, layer, part)

    def donor_moments(self, name: str, layer: int, part: Part) -> SlotMoments:
        """Of a donor's cache."""
        return self._remember(name, self.donor(name), layer, part)

    @cached_property
    def computed(self) -> dict[tuple[object, ...], object]:
        """What faults have computed from this context and will need again."""
        return {}

    def _remember(self, donor: str | None, cache: KVCache, layer: int, part: Part) -> SlotMoments:
        known = self.computed.get(("moments", donor, layer, part))
        if not isinstance(known, SlotMoments):
            known = SlotMoments.of(_filled(cache, layer, part))
            self.computed["moments", donor, layer, part] = known
        return known


def of_layer(cache: KVCache, layer: int, part: Part) -> Float[Tensor, "heads slots d"]:
    """This part of a layer of a cache of one row; raises as `named` does."""
    return named(cache.layers[layer], stored_name(part))[0]


def _filled(cache: KVCache, layer: int, part: Part) -> Float[Tensor, "heads slots d"]:
    refuse_dropped("Such a fault", cache.ledger)
    return of_layer(cache, layer, part)[:, ~cache.ledger.padding[0]]
