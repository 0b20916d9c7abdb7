"""Whether damage acts through the router: the damaged run routed as the clean one was, and the other way round."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import one_row_each
from kvprobe.inference.model import Model
from kvprobe.patching.metrics import KL, LEAST
from kvprobe.patching.reader import suffixes
from kvprobe.routing.reading import Routing, read
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True, repr=False)
class Mediation(Brief):
    """How much of the damage to what follows a cache goes through the routers, in nats of the next token.

    Attributes:
        damage: KL(clean ‖ damaged).
        left: KL(clean ‖ damaged, routed as the clean run).
        caused: KL(clean ‖ clean, routed as the damaged run).
        restored: the logits of the damaged run, routed as the clean one.
        clean: where the suffix was routed after the clean cache.
        damaged: where it was routed after the damaged one.
    """

    damage: float
    left: float
    caused: float
    restored: Float[Tensor, "kept vocab"] = field(repr=False)
    clean: Routing = field(repr=False)
    damaged: Routing = field(repr=False)

    def _facts(self) -> Iterable[str]:
        yield f"damage={self.damage:.4g} nats"
        if self.damage < LEAST:
            yield f"below {LEAST} nats, so shares of it (undone, done) are undefined"
        else:
            yield f"undone by the clean routing={self.undone:.3g}"
            yield f"done by the damaged routing={self.done:.3g}"

    @property
    def undone(self) -> float:
        """The share of the damage that the clean routing undoes: 1 if all of it goes through the routers, below 0 if
        the damaged routing was protective; NaN where there is hardly any damage."""
        return 1 - self.left / self.damage if self.damage >= LEAST else np.nan

    @property
    def done(self) -> float:
        """The damage that the damaged routing does alone, as a share of all; NaN where there is hardly any."""
        return self.caused / self.damage if self.damage >= LEAST else np.nan


@checked_arguments
def mediate(
    model: Model,
    clean: KVCache,
    damaged: KVCache,
    suffix: Tokens | str,
    *,
    kept: int = 1,
    layers: Sequence[int] | None = None,
) -> Mediation:
    """Read a suffix after a clean and after a damaged cache, and again with the routing of the other run.

    The two caches need not hold the same tokens, or as many: only the routing of the suffix is exchanged.

    Args:
        clean: a cache of one row, without the damage.
        damaged: a cache of one row, with it.
        suffix: what is read after either: a text where each of them ends, tokens at their positions after the clean
            cache, and as far from the end of the damaged one.
        kept: last tokens of the suffix over which KL is averaged.
        layers: whose routing is exchanged; all that have routers by default.

    Raises:
        UserError: as `kvprobe.routing.read`; or a cache of several rows.
    """
    (mediation,) = mediate_each(model, clean, damaged, suffix, [layers], kept=kept)
    return mediation


@checked_arguments
def mediate_each(
    model: Model,
    clean: KVCache,
    damaged: KVCache,
    suffix: Tokens | str,
    groups: Iterable[Sequence[int] | None],
    *,
    kept: int = 1,
) -> Iterator[Mediation]:
    """`mediate` for several groups of layers, one after the other; what they share is read once."""
    for cache in (clean, damaged):
        one_row_each(model.lanes, cache, 1)
    after_clean, after_damaged = suffixes(model, clean, damaged, suffix)
    clean_run = read(model, after_clean, clean, logits=kept)
    damaged_run = read(model, after_damaged, damaged, logits=kept)
    kl_from_clean = KL(kept).to(clean_run.logits[0])
    damage = float(kl_from_clean(damaged_run.logits[0]))
    for layers in groups:
        restored = read(model, after_damaged, damaged, routing=clean_run.routing, layers=layers, logits=kept)
        misled = read(model, after_clean, clean, routing=damaged_run.routing, layers=layers, logits=kept)
        left, caused = (float(kl_from_clean(run.logits[0])) for run in (restored, misled))
        yield Mediation(damage, left, caused, restored.logits[0], clean_run.routing, damaged_run.routing)
