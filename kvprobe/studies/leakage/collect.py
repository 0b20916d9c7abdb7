"""Conversations are read, probes are fitted with all their controls for every arm, and the probes are kept."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probes.card import Arm, Training
from kvprobe.probes.publishing import PROBES
from kvprobe.probing.arms import Arms
from kvprobe.probing.by_split import picked_sites
from kvprobe.probing.claims import FLOOR, Probing
from kvprobe.probing.controls import random_model
from kvprobe.stats import estimate
from kvprobe.studies.leakage import Config
from kvprobe.studies.leakage.candidate import candidate_probe
from kvprobe.studies.leakage.probe_arms import UNTRAINED, probe_arm, probe_change
from kvprobe.studies.leakage.reading import FLOORS, USE_ARMS, read

ARMS = ("before", "hidden", "direct", "masked", "restart")
CHANGED = {"masked": "masked less restart", "direct": "direct less restart"}
"""Arms of what the hidden turns changed: slots less those of their restart."""
KEPT: dict[str, tuple[str, Arm, str]] = {
    "masked": ("T3", "retained", "the {secret} that a turn stated before it was masked"),
    "direct": ("summary2", "direct", "the {secret} that a turn stated, from the summary that is read after it"),
    "hidden": ("T2", "hidden", "the {secret} that a turn states, from that turn itself"),
}
"""Of the probes that are kept, by arm: the segment, what the model sees there, and what is read."""
Probings = Mapping[str, Probing]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows, see `tables_of`; the probes of a run of several conversations are written into it."""
    arms = read(model, config, run, "context")
    untrained = read(random_model(model, config.seed), config, run, UNTRAINED) if config.untrained else None
    probings = probings_of(model, arms, untrained, config)
    if config.contexts > 1:
        keep_probes(model, arms, probings, config, run)
    return tables_of(arms, probings)


def probings_of(model: Model, arms: Arms, untrained: Arms | None, config: Config) -> dict[str, Probing]:
    """By arm, what probes make of it.

    Args:
        untrained: what a model before training gave on the same conversations.
    """
    known: dict[str, Any] = {"folds": config.folds, "rng": np.random.default_rng([config.seed, 2])}
    probings = {}
    for arm in ("masked", "direct", "hidden"):
        others = ("before",) if arm == "masked" else ()
        floors: dict[str, Any] = {"restart": FLOORS[arm], "untrained": untrained} if arm in FLOORS else {}
        # The ceiling needs no p-values.
        count = config.permutations if arm in FLOORS else 0
        probings[arm] = probe_arm(model, arms, arm, **floors, others=others, permutations=count, **known)
    # In one conversation the restart is one vector, and taking it away changes nothing.
    for arm, name in CHANGED.items() if config.contexts > 1 else ():
        probings[name] = probe_change(arms, arm, FLOORS[arm], permutations=config.permutations, **known)
    return probings


def tables_of(arms: Arms, probings: Probings) -> dict[str, pd.DataFrame]:
    """What was read, and by which probes.

    `samples` has two kinds of rows (`measure`). Of `use`, one per sample and cache (`condition`): what the model makes
    of the secret. Of `probe`, one per sample, place of the secret, split and arm (`condition`): whether the probe that
    was chosen on inner folds reads it right, and whether one of the restart does (`floor`).

    The others have a column `arm`. `probes`, `readings`, `codelength` and `sparse` are those of
    `kvprobe.probing.claims.Probing`; `picks` has the site that each fold chose; `reach` has how far K and V of T3 vary
    with the secret, relative to their size, by layer (it cannot reach layers 0 and 1).
    """
    masked, every = probings["masked"], probings.items()
    by_floor = masked.floors.set_index("floor")
    floors = {floor: by_floor.loc[floor] for floor in ("before", FLOOR)}
    by_site = {arm: probing.table for arm, probing in every} | floors
    drawn = [*ARMS, *(arm for arm in CHANGED.values() if arm in by_site)]
    hits = {arm: probing.hits() for arm, probing in every} | {floor: masked.hits(floor) for floor in floors}
    samples = pd.concat(
        [arms.use(USE_ARMS).assign(measure="use"), joined(hits, "condition").assign(measure="probe")],
        ignore_index=True,
    )
    return {
        "samples": samples.assign(context=arms.contexts[samples["sample"]], secret=arms.named("-")[samples["sample"]]),
        "probes": joined({arm: by_site[arm] for arm in drawn}),
        "readings": joined({arm: probing.summary for arm, probing in every}),
        "codelength": joined({arm: probing.codelength for arm, probing in every}),
        "sparse": joined({arm: probing.sparse for arm, probing in every}),
        "picks": joined({arm: picked_sites(probing.picks) for arm, probing in every}),
        "reach": arms.variation("masked").assign(arm="masked"),
    }


def joined(tables: Mapping[str, pd.DataFrame], column: str = "arm") -> pd.DataFrame:
    """The tables of several arms."""
    return pd.concat([table.assign(**{column: arm}) for arm, table in tables.items()], ignore_index=True)


def keep_probes(model: Model, arms: Arms, probings: Probings, config: Config, run: Run) -> None:
    """Train a probe for each arm on all samples, and write it with its card into the run."""
    margin = arms.use(USE_ARMS).pivot(index="sample", columns="condition", values="margin")
    use = estimate((margin["retained"] - margin["restart"]).to_numpy(), arms.contexts)
    for arm, (segment, seen, what) in KEPT.items():
        restart = arms.features(FLOORS[arm]) if arm in FLOORS else None
        for changed in (False, True) if arm in CHANGED else (False,):
            probe = candidate_probe(
                model,
                arms.features(arm),
                probings[CHANGED[arm] if changed else arm],
                Training("leakage", what.format(secret=config.secret), segment, seen),
                restart=restart,
                less_restart=changed,
                use=use if arm == "masked" else None,
                folds=config.folds,
                seed=config.seed,
            )
            probe.save(run.path / PROBES / probe.name)
