"""Conversations are read, probes are fitted with all their controls for every arm, and the probes are kept."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probes.candidate import candidate_probe
from kvprobe.probes.card import Arm, Training
from kvprobe.probes.publishing import PROBES
from kvprobe.probing.claims import FLOOR, Probing
from kvprobe.probing.controls import random_model
from kvprobe.probing.differences import less_restart, nothing
from kvprobe.probing.probe import embeddings
from kvprobe.probing.probe_features import probe_features
from kvprobe.probing.splits import centred_within
from kvprobe.stats import estimate
from kvprobe.studies.leakage import Config
from kvprobe.studies.leakage.reading import FLOORS, USE_ARMS, Parts, read

ARMS = ("before", "hidden", "direct", "masked", "restart")
CHANGED = {"masked": "masked less restart", "direct": "direct less restart"}
"""Arms of what the hidden turns changed: slots less those of their restart."""
UNTRAINED = "untrained"
KEPT: dict[str, tuple[str, Arm, str]] = {
    "masked": ("T3", "retained", "the {secret} that a turn stated before it was masked"),
    "direct": ("summary2", "direct", "the {secret} that a turn stated, from the summary that is read after it"),
    "hidden": ("T2", "hidden", "the {secret} that a turn states, from that turn itself"),
}
"""Of the probes that are kept, by arm: the segment, what the model sees there, and what is read."""
Probings = Mapping[str, Probing]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows, see `tables_of`; the probes of a run of several conversations are written into it."""
    parts = read(model, config, run, "context")
    untrained = read(random_model(model, config.seed), config, run, UNTRAINED) if config.untrained else None
    probings = probings_of(model, parts, untrained, config)
    if config.contexts > 1:
        keep_probes(model, parts, probings, config, run)
    return tables_of(parts, probings)


def probings_of(model: Model, parts: Parts, untrained: Parts | None, config: Config) -> dict[str, Probing]:
    """By arm, what probes make of it.

    Args:
        untrained: what a model before training gave on the same conversations.
    """
    rng = np.random.default_rng([config.seed, 2])
    probings = {}
    for arm in ("masked", "direct", "hidden"):
        features, floors = parts.features(arm), {}
        if arm in FLOORS:
            floors = {FLOOR: parts.features(FLOORS[arm]), "embedding": embeddings(model, features)}
            if untrained is not None:
                floors[UNTRAINED] = untrained.features(arm)
        if arm == "masked":
            floors["before"] = parts.features("before")
        # The ceiling needs no p-values.
        count, note = config.permutations if arm in FLOORS else 0, f"Fitting probes, {arm}"
        probings[arm] = probe_features(features, floors, folds=config.folds, permutations=count, rng=rng, note=note)
    # In one conversation the restart is one vector, and taking it away changes nothing.
    for arm, name in CHANGED.items() if config.contexts > 1 else ():
        changed, count = less_restart(parts.features(arm), parts.features(FLOORS[arm])), config.permutations
        floors, note = {FLOOR: nothing(changed)}, f"Fitting probes, {name}"
        probings[name] = probe_features(changed, floors, folds=config.folds, permutations=count, rng=rng, note=note)
    return probings


def tables_of(parts: Parts, probings: Probings) -> dict[str, pd.DataFrame]:
    """What was read, and by which probes.

    `samples` has two kinds of rows (`measure`). Of `use`, one per sample and cache (`condition`): what the model makes
    of the secret. Of `probe`, one per sample, place of the secret, split and arm (`condition`): whether the probe that
    was chosen on inner folds reads it right, and whether one of the restart does (`floor`).

    The others have a column `arm`. `probes`, `readings`, `codelength` and `sparse` are those of
    `kvprobe.probing.claims.Probing`; `picks` has the site that each fold chose; `reach` has how far K and V of T3 vary
    with the secret, relative to their size, at layers 0 and 1 (which it cannot reach) and at the last.
    """
    summary, floors = ("codelength", "sparse"), probings["masked"].floors
    by_site: dict[str, Any] = {arm: probing.table for arm, probing in probings.items()}
    by_site |= {arm: floors[floors["floor"] == arm].drop(columns="floor") for arm in ("before", FLOOR)}
    drawn = [*ARMS, *(arm for arm in CHANGED.values() if arm in by_site)]
    picks = [
        {"arm": arm, "split": split, "fold": fold, "family": family, **site._asdict()}
        for arm, probing in probings.items()
        for split, chosen in probing.picks.items()
        for fold, (family, site) in enumerate(chosen)
    ]
    return {
        "samples": samples_of(parts, probings),
        "probes": joined({arm: by_site[arm] for arm in drawn}),
        "readings": joined({arm: probing.summary for arm, probing in probings.items()}),
        **{name: joined({arm: getattr(probing, name) for arm, probing in probings.items()}) for name in summary},
        "picks": pd.DataFrame(picks),
        "reach": reach_of(parts),
    }


def joined(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The tables of several arms."""
    return pd.concat([table.assign(arm=arm) for arm, table in tables.items()], ignore_index=True)


def samples_of(parts: Parts, probings: Probings) -> pd.DataFrame:
    """One row per sample and cache, and one per sample, place, split and arm; see `tables_of`."""
    secrets = ["-".join(parts.target.classes[label] for label in row) for row in parts.labels.tolist()]
    samples = {"sample": np.arange(len(secrets)), "context": parts.contexts, "secret": secrets}
    use = {name: parts.tensor(name).double() for name in ("logprob", "margin", "correct", "kl")}
    tables = [
        pd.DataFrame(
            {
                **samples,
                "measure": "use",
                "condition": arm,
                "logprob": use["logprob"][:, index].sum(1),
                "margin": use["margin"][:, index].sum(1),
                "kl_from_full": use["kl"][:, index],
                "token_accuracy": use["correct"][:, index].mean(1),
            }
        )
        for index, arm in enumerate(USE_ARMS)
    ]
    known = {(split, arm): (probing, "retained") for arm, probing in probings.items() for split in probing.picks}
    known |= {
        (split, arm): (probings["masked"], arm) for split in probings["masked"].picks for arm in ("before", FLOOR)
    }
    for (split, arm), (probing, reading) in known.items():
        keys = {**samples, "measure": "probe", "condition": arm, "split": split}
        for index, place in enumerate(parts.target.places):
            right, floor = (probing.right.get((split, name)) for name in (reading, FLOOR))
            assert right is not None
            held = np.nan if floor is None else floor[index].astype(float)
            tables.append(pd.DataFrame({**keys, "place": place, "right": right[index].astype(float), "floor": held}))
    return pd.concat(tables, ignore_index=True)


def reach_of(parts: Parts) -> pd.DataFrame:
    """How far K and V of T3 vary with the secret; the largest number over what probes read of them."""
    rows = []
    for family in ("k", "v"):
        vectors = parts.tensor(f"masked.{family}")
        for layer in dict.fromkeys((0, 1, vectors.shape[1] - 1)):
            of_layer = vectors[:, layer]
            varies = centred_within(of_layer, parts.contexts).abs().max() / of_layer.abs().max()
            rows.append({"arm": "masked", "family": family, "layer": layer, "varies": float(varies)})
    return pd.DataFrame(rows)


def keep_probes(model: Model, parts: Parts, probings: Probings, config: Config, run: Run) -> None:
    """Train a probe for each arm on all samples, and write it with its card into the run."""
    margin = parts.tensor("margin").double().sum(2)
    gained = margin[:, USE_ARMS.index("retained")] - margin[:, USE_ARMS.index("restart")]
    use = estimate(gained.numpy(), parts.contexts)
    for arm, (segment, seen, what) in KEPT.items():
        restart = parts.features(FLOORS[arm]) if arm in FLOORS else None
        for changed in (False, True) if arm in CHANGED else (False,):
            probe = candidate_probe(
                model,
                parts.features(arm),
                probings[CHANGED[arm] if changed else arm],
                Training("leakage", what.format(secret=config.secret), segment, seen),
                restart=restart,
                less_restart=changed,
                use=use if arm == "masked" else None,
                folds=config.folds,
                seed=config.seed,
            )
            probe.save(run.path / PROBES / probe.name)
