"""Which components let damage through: a damaged run, with one output at a time put back as it was.

The causal index of a component is π = 1 − KL(clean ‖ damaged, its output restored) / KL(clean ‖ damaged). Above zero
the component transmits the damage: without its reaction, less arrives. Below zero more arrives without it. The index of
a single prompt proves nothing: see `verdicts`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.executors import Executor
from kvprobe.exported import Exported
from kvprobe.inference.elsewhere import each, shares
from kvprobe.inference.forward import one_row_each
from kvprobe.inference.model import Model
from kvprobe.layers.suffix import Component, Outputs, Replacement, Suffix
from kvprobe.names import head_name
from kvprobe.patching.grid import even_bands
from kvprobe.patching.metrics import KL, LEAST
from kvprobe.patching.reader import suffixes
from kvprobe.progress import Bar
from kvprobe.text.tokens import Tokens

RESTORED, NOISED, DROPPED = "restored", "noised", "dropped"
"""What is done to outputs; see `BothRuns.kls`."""


@dataclass(frozen=True, repr=False)
class LayerMap(Brief, Exported):
    """How damage changes on its way through the layers.

    Attributes:
        groups: components restored together, by row.
        labels: what each row is: kind (attn, mlp, head, band), layer, head, band.
        damage: KL(clean ‖ damaged), in nats, the mean over the last tokens of the suffix.
        restored: KL(clean ‖ damaged with the row's outputs restored).
        noised: KL(clean ‖ clean with the row's outputs as in the damaged run); NaN for heads.
        states: by layer, see `states`.
    """

    groups: tuple[tuple[Component, ...], ...]
    labels: tuple[dict[str, int | str], ...]
    damage: float
    restored: Float[np.ndarray, "rows"]
    noised: Float[np.ndarray, "rows"]
    states: pd.DataFrame

    def _plain(self) -> Mapping[str, object]:
        return {"damage": self.damage, "components": self.df(), "states": self.states}

    def _facts(self) -> Iterable[str]:
        yield f"{len(self.labels)} components and bands"
        yield f"damage={self.damage:.4g} nats"
        if self.damage < LEAST:
            yield f"below {LEAST} nats, so shares of it (pi) are undefined"
        else:
            for name, place in (("filters", np.nanargmin(self.pi)), ("passes", np.nanargmax(self.pi))):
                yield f"{name} most: {_name(self.labels[int(place)])} (pi={self.pi[place]:+.3g})"

    @property
    def pi(self) -> Float[np.ndarray, "rows"]:
        """The causal index; NaN where the damage is below `LEAST`."""
        return 1 - self.restored / self.damage if self.damage >= LEAST else np.full(len(self.restored), np.nan)

    def df(self) -> pd.DataFrame:
        """One row per component or band, named by it (`L8H0`, `L3 attn`): kind, layer, head, band; damage, restored and
        noised in nats; pi."""
        frame = pd.DataFrame(list(self.labels), columns=["kind", "layer", "head", "band"])
        frame = frame.astype({"layer": "Int64", "head": "Int64"})
        frame = frame.set_index(pd.Index([_name(label) for label in self.labels], name="component"))
        return frame.assign(damage=self.damage, restored=self.restored, noised=self.noised, pi=self.pi)


@checked_arguments
def layer_map(
    model: Model,
    clean: KVCache,
    damaged: KVCache,
    suffix: Tokens | str,
    *,
    kept: int = 1,
    heads: bool = True,
    bands: Iterable[Sequence[int]] | None = None,
    progress: bool = True,
    executor: Executor | None = None,
) -> LayerMap:
    """Restore each attention block, MLP, head and band of layers in turn, while a suffix is read after a damaged cache.

    The two caches need not hold the same tokens, or as many: only what is computed over the suffix is exchanged.

    Args:
        clean: a cache of one row, without the damage.
        damaged: a cache of one row, with it.
        suffix: what is read after either: a text where each of them ends, tokens at their positions after the clean
            cache, and as far from the end of the damaged one.
        kept: last tokens of the suffix over which KL is averaged.
        heads: whether to restore single heads too, which are most of the rows.
        bands: of layers whose attention and MLP are restored together; quarters by default.
        executor: where passes are run side by side, see `kvprobe.executors`; here by default. Numbers are the same in
            float32 on machines of one kind.

    Raises:
        UserError: a cache of several rows or of another model; a suffix that is empty.
    """
    runs = BothRuns(model, clean, damaged, suffix, kept)
    layers = runs.clean_suffix.layers
    components = [one for one in runs.clean_suffix.components if heads or one.kind != "head"]
    rows = list(_rows(components, layers, bands))
    groups, labels = [components for components, _ in rows], [label for _, label in rows]
    blocks = [number for number, label in enumerate(labels) if label["kind"] != "head"]
    asked = {
        RESTORED: groups,
        NOISED: [groups[number] for number in blocks],
        DROPPED: [_blocks(components, [layer]) for layer in layers],
    }
    if executor is None:
        with Bar(total=sum(map(len, asked.values())), desc="Restoring", unit="row", disable=not progress) as bar:
            kls = {how: list(runs.kls(how, groups, bar.update)) for how, groups in asked.items()}
    else:
        pieces = [(how, some) for how, groups in asked.items() for some in shares(groups, executor, runs.at_once)]
        given = (clean, damaged, suffix, kept)
        found = each(
            model, replaced_kls, pieces, *given, executor=executor, doing="Restoring", unit="share", progress=progress
        )
        kls = {how: [] for how in asked}
        for (how, _), some in zip(pieces, found, strict=True):
            kls[how] += some
    restored, noised = np.array(kls[RESTORED]), np.full(len(rows), np.nan)
    noised[blocks] = kls[NOISED]
    own = model.lanes.own_ports
    parallel = not (model.lanes.hooked.fires("resid_mid") if own is None else any("resid_mid" in port for port in own))
    table = states(runs.clean, runs.damaged, parallel).assign(drop=kls[DROPPED])
    return LayerMap(tuple(groups), tuple(labels), runs.damage, restored, noised, table)


class BothRuns:
    """The suffix read after the clean cache and after the damaged one, and again with outputs replaced."""

    def __init__(self, model: Model, clean: KVCache, damaged: KVCache, suffix: Tokens | str, kept: int) -> None:
        self.clean_suffix, self._damaged_suffix = _suffixes(model, clean, damaged, suffix)
        self.clean, self.damaged, self._kept = self.clean_suffix.outputs(kept), self._damaged_suffix.outputs(kept), kept
        self._kl_from_clean = KL(kept).to(self.clean.logits)
        self.damage = float(self._kl_from_clean(self.damaged.logits))
        self.at_once = self.clean_suffix.at_once(kept)

    def kls(
        self, how: str, groups: Sequence[tuple[Component, ...]], step: Callable[[], object] = lambda: None
    ) -> Iterator[float]:
        """KL(clean ‖ a reading with each group's outputs replaced).

        Args:
            how: `RESTORED`, those of the damaged reading by the clean ones; `NOISED`, the other way round; `DROPPED`,
                those of the clean reading by nothing.
        """
        reading, other = {
            RESTORED: (self._damaged_suffix, self.clean),
            NOISED: (self.clean_suffix, self.damaged),
            DROPPED: (self.clean_suffix, self.clean.silent),
        }[how]
        for logits in reading.replaced([Replacement(group, other) for group in groups], self._kept):
            yield float(self._kl_from_clean(logits))
            step()


def replaced_kls(
    model: Model,
    piece: tuple[str, Sequence[tuple[Component, ...]]],
    clean: KVCache,
    damaged: KVCache,
    suffix: Tokens | str,
    kept: int,
) -> list[float]:
    """See `BothRuns.kls`; in a process of its own."""
    return list(BothRuns(model, clean, damaged, suffix, kept).kls(*piece))


@checked_arguments
def restored_together(
    model: Model,
    clean: KVCache,
    damaged: KVCache,
    suffix: Tokens | str,
    groups: Sequence[Sequence[Component]],
    *,
    kept: int = 1,
    source: tuple[KVCache, Tokens] | None = None,
) -> tuple[float, Float[np.ndarray, "groups"]]:
    """KL(clean ‖ damaged) and the same with each group of components restored together; see `layer_map`.

    Args:
        source: a cache, and as many tokens that are read after it as the suffix has, whose run gives the outputs in
            place of the clean one: an unrelated one is a control.

    Raises:
        UserError: as `layer_map`; a group is empty or names a component that the model does not have; or the source
            reads another number of tokens.
    """
    if not all(groups):
        raise UserError("A group is empty; give at least one component to restore.")
    clean_suffix, damaged_suffix = _suffixes(model, clean, damaged, suffix)
    known = {*clean_suffix.components}
    for component in (component for group in groups for component in group):
        if component not in known:
            raise UserError(
                f"There is no {component}; choose 'attn' or 'mlp' of layers 0 to {clean_suffix.layers[-1]}, or 'head' "
                f"and heads 0 to {model.geometry.n_heads - 1}, where the layer has them."
            )
    clean_run = clean_suffix.outputs(kept)
    kl_from_clean = KL(kept).to(clean_run.logits)
    given = clean_run if source is None else _suffixes(model, source[0], *source)[0].outputs(kept)
    if given.attn.shape != clean_run.attn.shape:
        read, wanted = given.attn.shape[1], clean_run.attn.shape[1]
        raise UserError(f"The source reads {read} tokens, but the suffix has {wanted}; give as many.")
    rows = [Replacement(tuple(group), given) for group in groups]
    restored = np.array([float(kl_from_clean(logits)) for logits in damaged_suffix.replaced(rows, kept)])
    return float(kl_from_clean(damaged_suffix.outputs(kept).logits)), restored


@checked_arguments
def states(clean: Outputs, damaged: Outputs, parallel: bool = False) -> pd.DataFrame:
    """How far the residual stream over the suffix deviates, layer by layer, and what each layer does about it.

    Columns: `rho` = ‖δ‖/‖h‖ before the layer; `gain` = rho after it / rho before; `erasure` = −⟨Δf, δ⟩/‖δ‖² of the
    layer, and of its attention and its MLP; `angle` = 1 − mean cos(h before, h after) in the clean run, a baseline. An
    erasure of 1 undoes the deviation, and below 0 adds to it; growth of the stream alone lowers `rho` without erasing
    anything. NaN where there is no deviation yet: the deviation of a damaged cache enters with the first attention.

    Args:
        parallel: whether attention and MLP read the same stream.
    """
    stream = clean.hidden.double()
    delta = damaged.hidden.double() - stream
    rho = _ratio(delta.flatten(1).norm(dim=1), stream.flatten(1).norm(dim=1))
    attn, mlp = (damaged.attn.double() - clean.attn.double(), damaged.mlp.double() - clean.mlp.double())
    between = delta[:-1] if parallel else delta[:-1] + attn
    cosine = _ratio((stream[:-1] * stream[1:]).sum(-1), stream[:-1].norm(dim=-1) * stream[1:].norm(dim=-1))
    return pd.DataFrame(
        {
            "layer": range(len(attn)),
            "rho": rho[:-1],
            "rho_after": rho[1:],
            "gain": _divided(rho[1:], rho[:-1]),
            "erasure": _erased(delta[1:] - delta[:-1], delta[:-1]),
            "erasure_attn": _erased(attn, delta[:-1]),
            "erasure_mlp": _erased(mlp, between),
            "angle": 1 - cosine.mean(1),
        }
    )


def _suffixes(model: Model, clean: KVCache, damaged: KVCache, suffix: Tokens | str) -> tuple[Suffix, Suffix]:
    for cache in (clean, damaged):
        one_row_each(model.lanes, cache, 1)
    after_clean, after_damaged = suffixes(model, clean, damaged, suffix)
    return Suffix(model.lanes, clean, after_clean), Suffix(model.lanes, damaged, after_damaged)


def _rows(
    components: Sequence[Component], layers: range, bands: Iterable[Sequence[int]] | None
) -> Iterable[tuple[tuple[Component, ...], dict[str, int | str]]]:
    for one in components:
        yield (one,), {"kind": one.kind, "layer": one.layer} | ({} if one.head is None else {"head": one.head})
    for band in even_bands(len(layers)) if bands is None else bands:
        if not band or not {*band} <= {*layers}:
            raise UserError(f"A band must be a range of layers 0 to {layers[-1]}; got {band}.")
        yield _blocks(components, band), {"kind": "band", "band": f"{band[0]}–{band[-1]}"}


def _blocks(components: Iterable[Component], layers: Sequence[int]) -> tuple[Component, ...]:
    """All that these layers add to the stream."""
    return tuple(one for one in components if one.layer in layers and one.kind != "head")


def _name(label: Mapping[str, int | str]) -> str:
    """A row of the map for people: L8H0, L3 attn, band 0–7."""
    if label["kind"] == "band":
        return f"band {label['band']}"
    if label["kind"] == "head":
        return head_name(int(label["layer"]), int(label["head"]))
    return f"L{label['layer']} {label['kind']}"


def _ratio(top: Tensor, bottom: Tensor) -> Float[np.ndarray, "..."]:
    return _divided(top.cpu().numpy(), bottom.cpu().numpy())


def _divided(top: Float[np.ndarray, "..."], bottom: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _erased(
    change: Float[Tensor, "layers queries d_model"], delta: Float[Tensor, "layers queries d_model"]
) -> Float[np.ndarray, "layers"]:
    return _ratio(-(change * delta).flatten(1).sum(1), delta.flatten(1).square().sum(1))
