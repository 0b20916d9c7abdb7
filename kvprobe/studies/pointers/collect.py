"""Each conversation is answered with its payload in view and hidden, and with its pointer's slots exchanged."""

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import torch

from kvprobe.attention import attend
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model, load
from kvprobe.policies import RestartInPlace
from kvprobe.studies.pointers import Config
from kvprobe.studies.pointers.cases import FORMS, KNOWN, RENAMED, SHIFTED, PointerCase, binding, memo_case
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import chosen

VIEW, LATE, RESTART, STAND_IN = "in view", "hidden after", "computed again", "stand-in"
"""Of the payload: in view throughout; hidden once the pointer had seen it; hidden before, so that the pointer has never
seen it; hidden, with the pointer of the `renamed` conversation."""
ARMS, EXCHANGED, LOOKED, MASS = "arms", "exchanged", "looked", "mass"
PARTS = ("K", "V", "KV")
WHOLE = EVERY_LAYER, "KV"
AT_ONCE = 8


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables by `form` and `case`: `arms` (`right`: whether the right one of the two is the likelier; `margin` between
    them; `bits` that the answer knows of which it is), `exchanged` (margins after an exchange with a `donor`, by `band`
    and `part`; `own` and `way`, the margin without and how far it is to that of the renamed conversation), `looked`
    (margins with the payload hidden in one band of layers) and `mass` (attention of the last token to the payload in
    view, by layer).
    """
    parts = Parts(model, config, run)
    counts = dict.fromkeys(FORMS, config.conversations) | dict.fromkeys(KNOWN, config.memos)
    cases = [(form, number) for form, count in counts.items() for number in range(count)]
    rows = parts.table(measure, cases, "case", doing="Asking where pointers lead", unit="case")
    return {
        name: chosen(rows, {"table": name}).drop(columns="table").dropna(axis=1, how="all")
        for name in (ARMS, EXCHANGED, LOOKED, MASS)
    }


def measure(model: Model, config: Config, case: tuple[str, int]) -> pd.DataFrame:
    """All that is measured of a case of one form; every other conversation points to the first of two people."""
    form, number = case
    rng = np.random.default_rng([config.seed, (*FORMS, *KNOWN).index(form), number])
    if form in KNOWN:
        model = load("ordinal", device=config.device, dtype=config.dtype)
        drawn = memo_case(model, form, rng)
    else:
        drawn = binding(model, form, number % 2, config.shots, rng)
    return read_case(model, drawn, config.bands).assign(form=form, case=number)


def read_case(model: Model, case: PointerCase, bands: int) -> pd.DataFrame:
    """All that is measured of one case; see `collect`."""
    first = case.own.span(case.payload).start  # all begin alike
    before = model.prefill(case.own[:first])
    own = model.extend(before, case.own[first : case.cut])[0]
    donors = {name: model.extend(before, tokens[first : case.cut])[0] for name, tokens in case.donors.items()}
    suffix = case.own[case.cut :]
    layers = named_bands(model.geometry.n_layers, bands)
    asked = partial(outcomes, model, suffix=suffix, case=case)
    hidden, again = own.mask(case.payload), model.apply(RestartInPlace(case.payload), own)
    arms = {VIEW: own, LATE: hidden, RESTART: again, STAND_IN: hidden.patch(donors[RENAMED], case.pointer)}
    tables = [asked([cache]).assign(table=ARMS, arm=arm) for arm, cache in arms.items()]
    margin = tables[0]["margin"].item()
    there = outcomes(model, [donors[RENAMED]], case.donors[RENAMED][case.cut :], case)["margin"].item()
    keys, patched = [], []
    for donor, band, part in product(donors, layers, PARTS):
        if donor == SHIFTED and (band, part) != WHOLE:
            continue
        keys.append({"donor": donor, "band": band, "part": part})
        patched.append(own.patch(donors[donor], case.pointer, layers=layers[band], part=part))
    rows = pd.concat([pd.DataFrame(keys), asked(patched)], axis=1)
    tables.append(rows.assign(table=EXCHANGED, own=margin, way=margin - there))
    blind = asked([own.mask(case.payload, layers=where) for where in layers.values()])
    tables.append(blind.assign(table=LOOKED, band=list(layers), own=margin))
    seen = attend(model, onwards(own, [suffix])[0], own).mass(case.payload).mean((1, 2)).tolist()
    tables.append(pd.DataFrame({"table": MASS, "layer": range(len(seen)), "mass": seen}))
    return pd.concat(tables, ignore_index=True)


def outcomes(model: Model, caches: Sequence[KVCache], suffix: Tokens, case: PointerCase) -> pd.DataFrame:
    """What is answered after each of these caches, which have the same slots."""
    said = []
    for some in (caches[start : start + AT_ONCE] for start in range(0, len(caches), AT_ONCE)):
        joined = KVCache.join(list(some)) if len(some) > 1 else some[0]
        _, logits = model.extend(joined, onwards(joined, [suffix] * len(some)))
        said.append(logits[:, -1, [case.right, case.wrong]].double().cpu())
    margin = torch.cat(said).diff(dim=1)[:, 0].neg()
    bits = 1 + torch.nn.functional.logsigmoid(margin) / np.log(2)
    return pd.DataFrame({"margin": margin, "right": (margin > 0).double(), "bits": bits})
