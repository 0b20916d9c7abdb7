"""Which edits of a cache the question is read under: parts of it erased, or exchanged for another code's.

Every edit is a row of one pass over the question and its reply: the cache as it was read, in which some layers' K, V or
both of one place's slots hold something else. To erase is to put the conversation's average over other codes inside a
subspace; to exchange, what the run with another code holds there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.erasing import mix
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.patching import Cell
from kvprobe.studies.use import Config
from kvprobe.studies.use.code_answers import code_answers
from kvprobe.studies.use.place_erasers import INLP, LEACE, RANDOM, RANDOM_0, Erasers, interchange_place
from kvprobe.studies.use.places import PLACES, places_of
from kvprobe.studies.use.variants import PARTS, average_cache
from kvprobe.tasks.passcode import Coded, conversation
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


@dataclass(frozen=True)
class CodedScene:
    """A conversation with its code, with another, and with the average of many, up to the question.

    Attributes:
        erasers: of the other half of the conversations.
        suffix: the question and the reply, up to the code's last digit.
        codes: token ids of this run's code, of the other's, and of codes that the true one is held against.
    """

    model: Model
    places: Mapping[str, range]
    base: KVCache
    donor: KVCache
    average: KVCache
    erasers: Erasers
    suffix: Tokens
    codes: Int[Tensor, "codes code_tokens"]

    @classmethod
    def of(cls, model: Model, case: Coded, read: Mapping[str, Tensor], erasers: Erasers) -> "CodedScene":
        """The conversation with the first code of its pair, the second being the donor's.

        Args:
            read: what `read_case` gave for this conversation.
        """
        rows = [conversation(case.context, code).tokens(model.tokenizer) for code in (*case.pair, *case.codes)]
        places, answer = places_of(rows[0]), rows[0].part("answer")
        start, stop = places["code"].start, places["summary"].stop
        both, _ = model.extend(model.prefill(rows[0][:start]), [row[start:stop] for row in rows[:2]])
        base, donor = both.rows([0]), both.rows([1])
        codes = torch.tensor([row.ids[answer] for row in rows], device=model.lanes.device)
        average = average_cache(base, read, start)
        return cls(model, places, base, donor, average, erasers, rows[0][stop : answer.stop - 1], codes)

    def seen(self, cache: KVCache, view: str) -> KVCache:
        """A cache as the question sees it."""
        if view == TURN_MASKED:
            return cache.mask("T1", "T2")
        return cache.mask(slots=self.places["code"]) if view == CODE_MASKED else cache

    def edited(self, source: KVCache, place: str, name: str, layers: Sequence[int], strength: float = 1.0) -> KVCache:
        """The base with what another cache holds in the slots of a place, inside the subspaces of this name or in
        full."""
        slots = self.places[place]
        if name == FULL:
            return mix(self.base, source, slots=slots, layers=layers, strength=strength)
        return interchange_place(
            self.base, source, self.erasers, PLACES, (place, name), slots, layers=layers, strength=strength
        )

    def cell(
        self, kind: str, place: str, name: str, band: str, layers: tuple[int, ...], part: str, strength: float = 1.0
    ) -> Cell:
        labels = {"kind": kind, "place": place, "name": name, "band": band, "strength": strength}
        content = f"{kind} {place} {name} {strength}"
        return Cell(layers, tuple(self.places[place]), part, content=content, labels=labels)

    def cells(self, view: str, bands: Mapping[str, tuple[int, ...]], config: Config) -> list[Cell]:
        """What is edited: at all layers, K and V, each alone and both, every eraser and whole vectors, erased and
        exchanged; in each band, the eraser and one random, erased. And the controls: every slot that a code can reach
        exchanged for the donor's, and none."""
        wanted = []
        for place in VIEWS[view]:
            for part in (*PARTS, BOTH) if config.apart else (BOTH,):
                every = [LEACE, *(f"{RANDOM} {draw}" for draw in range(config.randoms)), FULL]
                for kind, names in ((ERASE, [*every, INLP]), (SWAP, every)):
                    wanted += [self.cell(kind, place, name, EVERY_LAYER, bands[EVERY_LAYER], part) for name in names]
                for band, layers in bands.items():
                    if band != EVERY_LAYER:
                        wanted += [self.cell(ERASE, place, name, band, layers, part) for name in (LEACE, RANDOM_0)]
        reached = tuple(slot for slots in self.places.values() for slot in slots)
        for content in (DONOR, ITSELF):
            labels = {"kind": CONTROL, "place": "", "name": content, "band": EVERY_LAYER, "strength": 1.0}
            wanted.append(Cell(bands[EVERY_LAYER], reached, BOTH, content=content, labels=labels))
        return wanted

    def measure(self, view: str, cells: Sequence[Cell]) -> pd.DataFrame:
        """What is answered with each cell of the cache holding something else; see `code_answers`."""
        contents = {DONOR: self.donor, ITSELF: self.base}
        layers = sorted({layer for cell in cells for layer in cell.layers})
        for cell in cells:
            if cell.content not in contents:
                source = self.average if cell.labels["kind"] == ERASE else self.donor
                place, name, strength = str(cell.labels["place"]), str(cell.labels["name"]), cell.labels["strength"]
                contents[cell.content] = self.edited(source, place, name, layers, float(strength))
        base, donor = (self.seen(cache, view) for cache in (self.base, self.donor))
        rows = code_answers(self.model.lanes, base, donor, contents, cells, self.suffix, self.codes)
        return rows.assign(view=view)
