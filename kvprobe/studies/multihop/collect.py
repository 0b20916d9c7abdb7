"""From sessions to tables: each is read once, then probes are fitted on what all of them hold.

One file per session is kept, so an interrupted run resumes.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from kvprobe.experiments.parts import Parts, arms_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.arms import Arms
from kvprobe.probing.by_split import BySplit, Folds, fit_by_split, folds_by_split, picked_sites
from kvprobe.probing.splits import Split
from kvprobe.probing.transfer import transfer_where_chosen
from kvprobe.progress import Bar
from kvprobe.studies.multihop import Config
from kvprobe.studies.multihop.hops import sessions
from kvprobe.studies.multihop.reading import ARMS, DISTANCES, PLACES, USE_ARMS, name_of, place, read_session
from kvprobe.tasks.passcode import CODE, draw_codes
from kvprobe.tidy import crossed

CONDITIONS = ("retained", "restart")
TRANSFERRED: tuple[Split, ...] = ("leave-context-out", "paired")


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """What was measured; see `tables`."""
    codes = draw_codes(config.samples, np.random.default_rng([config.seed, 1]), model.tokenizer)
    cases = [(index, of.tolist()) for index, of in enumerate(np.array_split(np.array(codes), config.sessions))]
    parts = Parts(model, config, run)
    return tables(parts.tensors(read, cases, "session", doing="Reading sessions", unit="session"), config)


def read(model: Model, config: Config, case: tuple[int, list[str]]) -> dict[str, Tensor]:
    """What is read of a session, by its number, with each of its codes."""
    index, codes = case
    return read_session(model, sessions()[index], codes, config.families, config.batch)


def tables(paths: Sequence[Path], config: Config) -> dict[str, pd.DataFrame]:
    """The tables of sessions whose parts were written. In all, `context` is the number of a session.

    Returns:
        `samples`: per code and cache, what the model makes of the code. `read`: per code, condition, arm, distance and
        split, the share of digits that the probe reads which was chosen on the inner fold, and its bits per digit.
        `transfer`: the same of a probe trained at one distance and tested at another. `picks`: the sites that folds
        chose. `probes`: accuracy of every probe. `variation`: how far what it reads varies with the code.
    """
    arms = arms_of_parts(paths, config.families, CODE)
    folds = folds_by_split(arms.contexts, config.folds, np.random.default_rng([config.seed, 2]))
    used = arms.use(USE_ARMS).rename(columns={"kl_from_full": "kl"})
    return {"samples": used.assign(code=arms.named()[used["sample"]]), **fitted(arms, folds)}


def fitted(arms: Arms, folds: Folds) -> dict[str, pd.DataFrame]:
    """The tables of what probes read; see `tables`."""
    pieces: dict[str, list[pd.DataFrame]] = defaultdict(list)
    retained: dict[str, BySplit] = {}
    for at in Bar(PLACES, desc="Fitting probes", unit="place"):
        known = {"arm": at[0], "distance": at[1]}
        for condition in CONDITIONS:
            name = name_of(condition, at)
            fits = fit_by_split(arms.features(name), folds)
            pieces["read"].append(fits.samples.assign(condition=condition, **known))
            pieces["probes"].append(fits.probes.assign(condition=condition, **known))
            if condition == "retained":
                retained[name] = fits
                pieces["picks"].append(fits.picks.assign(picks="read", **known))
                pieces["variation"].append(arms.variation(name, arms.families, by_read=True).assign(**known))
    for split in TRANSFERRED:
        for arm in Bar(ARMS, desc=f"Testing probes at other distances, {split}", unit="arm"):
            names = [name_of("retained", place(arm, distance)) for distance in DISTANCES]
            found = transfer_where_chosen(arms, {name: retained[name] for name in names}, split, folds)
            pieces["picks"].append(picked_sites({split: found.picks}).assign(picks="transfer", arm=arm))
            keys = {"trained": DISTANCES, "tested": DISTANCES, "sample": range(len(arms.contexts))}
            rows = crossed(keys, {"accuracy": found.hits}).assign(arm=arm, split=split)
            pieces["transfer"].append(rows.assign(context=arms.contexts[rows["sample"]]))
    return {name: pd.concat(parts, ignore_index=True) for name, parts in pieces.items()}
