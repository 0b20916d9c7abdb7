"""What the model answers about the code after parts of it were erased from its cache, or exchanged for another code's.

Every edit is a row of one pass over the question and its reply (`kvprobe.patching.reader`): the cache as it was read,
in which some layers' K, V or both of one place's slots hold something else. To erase is to put the conversation's
average over other codes inside a subspace; to exchange, what the run with another code holds there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing import interchange
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence, use_measurements
from kvprobe.patching import Cell
from kvprobe.patching.reader import Reader
from kvprobe.studies.use.fit import INLP, LEACE, RANDOM_0, Erasers, random_names, roles
from kvprobe.studies.use.read import PARTS, Case, Layout
from kvprobe.text.tokens import Tokens

BOTH = "KV"
IN_VIEW, CODE_MASKED, TURN_MASKED = "all in view", "code masked", "turns masked"
VIEWS = {IN_VIEW: ("code", "after"), CODE_MASKED: ("after",), TURN_MASKED: ("summary",)}
"""What the question can look at: everything; all but the code's own slots; all but the first turn and the code's. And
the places that are edited in each."""
SITES = {
    (IN_VIEW, "code"): "code",
    (IN_VIEW, "after"): "after",
    (CODE_MASKED, "after"): "after (code masked)",
    (TURN_MASKED, "summary"): "summary (turns masked)",
}
"""Where an edit may be, by view and place."""
ERASE, SWAP, CONTROL = "erase", "swap", "control"
DONOR, ITSELF = "donor", "itself"
FULL = "full"
"""The whole vectors, beside which any subspace is judged."""
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Scene:
    """A conversation with its code, with another, and with the average of many, up to the question.

    Attributes:
        erasers: of the other half of the conversations.
        suffix: the question and the reply, up to the code's last digit.
        codes: token ids of this run's code, of the other's, and of codes that the true one is held against.
    """

    layout: Layout
    base: KVCache
    donor: KVCache
    average: KVCache
    erasers: Erasers
    suffix: Tokens
    codes: Int[Tensor, "codes code_tokens"]

    @property
    def kept(self) -> int:
        """Tokens of the code."""
        return self.codes.shape[1]


def stage(model: Model, case: Case, read: Mapping[str, Tensor], erasers: Erasers) -> Scene:
    """The conversation with the first code of its pair, the second being the donor's.

    Args:
        read: what `read_turn` gave for this conversation.
    """
    rows = [case.tokens(code, model.tokenizer) for code in (*case.pair, *case.codes)]
    layout, answer = Layout.of(rows[0]), rows[0].part("answer")
    prefix = model.prefill(rows[0][: layout.start])
    both, _ = model.extend(prefix, [row[layout.start : layout.stop] for row in rows[:2]])
    base, donor = both.rows([0]), both.rows([1])
    codes = torch.tensor([row.ids[answer] for row in rows], device=model.lanes.device)
    suffix = rows[0][layout.stop : answer.stop - 1]
    return Scene(layout, base, donor, _average(base, read, layout), erasers, suffix, codes)


def measure(model: Model, scene: Scene, view: str, cells: Sequence[Cell], strength: float = 1.0) -> pd.DataFrame:
    """What is said of the code with each cell of the cache holding something else.

    Returns:
        One row per cell, with its labels and `part`: `margin` of the true code over others and `intact_margin`, in nats
        over all digits; `kl` from the unedited cache's distribution of the first digit; `right`, the digits that are
        likeliest, the true ones before them given, and `said`, whether all are, so that the reply in greedy decoding
        holds the code; and `difference`, the logit of the own first digit less that of the donor's, with
        `intact_difference` and `donor_difference`.
    """
    contents = {DONOR: scene.donor, ITSELF: scene.base}
    layers = sorted({layer for cell in cells for layer in cell.layers})
    for cell in cells:
        if cell.content not in contents:
            source = scene.average if cell.labels["kind"] == ERASE else scene.donor
            place, name = str(cell.labels["place"]), str(cell.labels["name"])
            contents[cell.content] = edited(scene, source, place, name, layers, strength)
    reader = Reader(model.lanes, seen(scene.base, scene.layout, view), contents, scene.suffix)
    theirs = Reader(model.lanes, seen(scene.donor, scene.layout, view), {}, scene.suffix).logits([], scene.kept)
    order = sorted(cells, key=lambda cell: cell.layers[0])
    clean, *patched = reader.passes(order, scene.kept)
    logits = torch.cat([clean, theirs, *patched])
    said = use_measurements([logits], scene.codes, [0] * len(logits))
    margin, right = said["margin"][:, 0].sum(1), said["correct"][:, 0]
    kl, _ = divergence(clean[:, 0].expand(len(logits), -1), logits[:, 0])
    difference = logits[:, 0, scene.codes[0, 0]].float() - logits[:, 0, scene.codes[1, 0]].float()
    return pd.DataFrame(
        {
            "view": view,
            **cell.labels,
            "part": cell.part,
            "margin": float(margin[row]),
            "intact_margin": float(margin[0]),
            "kl": float(kl[row]),
            "right": float(right[row].float().mean()),
            "said": bool(right[row].all()),
            "intact_said": bool(right[0].all()),
            "difference": float(difference[row]),
            "intact_difference": float(difference[0]),
            "donor_difference": float(difference[1]),
        }
        for row, cell in enumerate(order, start=2)
    )


def seen(cache: KVCache, layout: Layout, view: str) -> KVCache:
    """The cache as the question sees it."""
    if view == TURN_MASKED:
        return cache.mask("T1", "T2")
    return cache.mask(slots=chosen(cache, layout.places["code"])) if view == CODE_MASKED else cache


def edited(
    scene: Scene, source: KVCache, place: str, name: str, layers: Sequence[int], strength: float = 1.0
) -> KVCache:
    """The base with what another cache holds in the slots of a place, inside the subspaces of this name or in full."""
    cache, slots = scene.base, scene.layout.places[place]
    if name == FULL:
        keys, values = (
            tuple(torch.lerp(mine, theirs, strength) for mine, theirs in zip(held, other, strict=True))
            for held, other in ((cache.keys, source.keys), (cache.values, source.values))
        )
        return cache.patch(replace(cache, keys=keys, values=values), slots=chosen(cache, slots), layers=layers)
    for number, role in enumerate(roles(place)):
        subspaces = {
            (layer, part): scene.erasers[place, role, part, name].at(layer) for part in PARTS for layer in layers
        }
        struck = chosen(cache, slots if role is None else slots[number : number + 1])
        cache = interchange(cache, source, subspaces, slots=struck, strength=strength)
    return cache


def chosen(cache: KVCache, slots: Sequence[int]) -> Bool[Tensor, "1 slots"]:
    mask = torch.zeros(1, cache.slots, dtype=torch.bool, device=cache.ledger.tokens.device)
    mask[0, list(slots)] = True
    return mask


def cells(view: str, layout: Layout, bands: Mapping[str, tuple[int, ...]], randoms: int) -> list[Cell]:
    """What is edited: at all layers, K, V and both, every eraser and whole vectors, erased and exchanged; in each band,
    the eraser and one random, erased. And the controls: every slot that a code can reach exchanged for the donor's, and
    none."""
    wanted = []
    for place in VIEWS[view]:
        for part in (*PARTS, BOTH):
            every = [LEACE, *random_names(randoms), FULL]
            for kind, names in ((ERASE, [*every, INLP]), (SWAP, every)):
                wanted += [cell(layout, kind, place, name, EVERY_LAYER, bands[EVERY_LAYER], part) for name in names]
            names = [LEACE, RANDOM_0, *([FULL] if part == BOTH else [])]
            for band, layers in bands.items():
                if band != EVERY_LAYER:
                    wanted += [cell(layout, ERASE, place, name, band, layers, part) for name in names]
    reached = tuple(range(layout.start, layout.stop))
    for content in (DONOR, ITSELF):
        labels = {"kind": CONTROL, "place": "", "name": content, "band": EVERY_LAYER}
        wanted.append(Cell(bands[EVERY_LAYER], reached, BOTH, content=content, labels=labels))
    return wanted


def cell(layout: Layout, kind: str, place: str, name: str, band: str, layers: tuple[int, ...], part: str) -> Cell:
    labels = {"kind": kind, "place": place, "name": name, "band": band}
    return Cell(layers, layout.places[place], part, content=f"{kind} {place} {name}", labels=labels)


def _average(base: KVCache, read: Mapping[str, Tensor], layout: Layout) -> KVCache:
    """The base with the average over codes in each slot that a code can reach."""

    def averaged(tensors: tuple[Tensor, ...], average: Float[Tensor, "layers slots width"]) -> tuple[Tensor, ...]:
        averages = []
        for tensor, of_layer in zip(tensors, average.to(tensors[0].device), strict=True):
            filled = tensor.clone()
            heads = of_layer.unflatten(1, (tensor.shape[1], tensor.shape[3])).transpose(0, 1)
            filled[0, :, layout.start : layout.stop] = heads.to(tensor.dtype)
            averages.append(filled)
        return tuple(averages)

    return replace(base, keys=averaged(base.keys, read["average.K"]), values=averaged(base.values, read["average.V"]))
