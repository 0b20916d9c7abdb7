"""From sessions to tables: each is read once, then probes are fitted on what all of them hold.

One file per session is kept, so an interrupted run resumes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.experiments.parts import tensor_of_parts, tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import chosen, fit_sites
from kvprobe.probing.splits import SPLITS, Split, centred_within, fold_numbers
from kvprobe.probing.transfer import transferred
from kvprobe.progress import Bar
from kvprobe.studies.multihop import Config
from kvprobe.studies.multihop.reading import ARMS, DISTANCES, PLACES, USE_ARMS, Arm, Place, name_of, place, read_session
from kvprobe.tasks.designs import Target
from kvprobe.tasks.hops import sessions
from kvprobe.tasks.passcode import draw_codes
from kvprobe.tidy import crossed

TARGET = Target("code", tuple("0123456789"))
CONDITIONS = ("retained", "restart")
TRANSFERRED: tuple[Split, ...] = ("leave-context-out", "paired")
Pick = tuple[Family, Site]
Folds = Mapping[Split, Int[np.ndarray, "samples"]]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """What was measured; see `tables`."""
    codes = draw_codes(config.samples, np.random.default_rng([config.seed, 1]), model.tokenizer)
    of_session = np.array_split(np.array(codes), config.sessions)

    def read(index: int) -> dict[str, Tensor]:
        return read_session(model, sessions()[index], of_session[index].tolist(), config.families, config.batch)

    cases = range(config.sessions)
    return tables(tensor_parts(run, cases, "session", read, doing="Reading sessions", unit="session"), config)


def tables(paths: Sequence[Path], config: Config) -> dict[str, pd.DataFrame]:
    """The tables of sessions whose parts were written.

    Returns:
        `samples`: per code and cache, what the model makes of the code. `read`: per code, condition, arm, distance and
        split, the share of digits that the probe reads which was chosen on the inner fold, and its bits per digit.
        `transfer`: the same of a probe trained at one distance and tested at another. `picks`: the sites that folds
        chose. `probes`: accuracy of every probe. `variation`: how far what it reads varies with the code.
    """
    digits = tensor_of_parts(paths, "digits")
    owners = np.repeat(np.arange(len(paths)), len(digits) // len(paths))
    rng = np.random.default_rng([config.seed, 2])
    folds: Folds = {split: fold_numbers(split, owners, config.folds, rng) for split in SPLITS}
    parts = Parts(paths, config.families, digits.T.contiguous(), owners)
    return {"samples": used(parts), **fitted(parts, folds)}


@dataclass(frozen=True)
class Parts:
    """What all sessions hold; features are read from their files when they are asked for.

    Attributes:
        labels: the digits.
        owners: number of each sample's session.
    """

    paths: Sequence[Path]
    families: Sequence[Family]
    labels: Int[Tensor, "digits samples"]
    owners: Int[np.ndarray, "samples"]

    def numbers(self, name: str) -> Float[np.ndarray, "samples *arms_tokens"]:
        return tensor_of_parts(self.paths, name).double().numpy()

    def features(self, condition: str, at: Place, families: Sequence[Family]) -> Features:
        """What probes read at a place. A restart has one row for each session."""
        tensors: dict[Family, Tensor] = {
            family: tensor_of_parts(self.paths, name_of(condition, at, family)) for family in families
        }
        rows = self.owners if condition == "restart" else np.arange(len(self.owners))
        return Features.of_read_outs(tensors, rows, self.labels, self.owners, TARGET)

    def vectors(self, at: Place, pick: Pick, split: Split) -> tuple[Float[Tensor, "samples dim"], Float[Tensor, ""]]:
        """What a probe at one site reads, and its root mean square before any centring."""
        family, site = pick
        features = self.features("retained", at, (family,))
        seen = features.tensors[family][:, features.sites[family].index(site)].contiguous()
        return (centred_within(seen, self.owners) if split == "paired" else seen), seen.square().mean().sqrt()


def used(parts: Parts) -> pd.DataFrame:
    """A row for each code and cache that the model was asked with."""
    columns = {
        **{name: parts.numbers(name).sum(-1) for name in ("logprob", "margin")},
        "token_accuracy": parts.numbers("correct").mean(-1),
        "kl": parts.numbers("kl"),
    }
    rows = crossed({"sample": range(len(parts.owners)), "condition": USE_ARMS}, columns)
    codes = np.array(["".join(map(str, digits)) for digits in parts.labels.T.tolist()])
    return rows.assign(session=parts.owners[rows["sample"]], code=codes[rows["sample"]])


def fitted(parts: Parts, folds: Folds) -> dict[str, pd.DataFrame]:
    """The tables of what probes read; see `tables`."""
    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)
    inner: dict[tuple[Split, Place], Tensor] = {}
    sites: list[Pick] = []
    for at in Bar(PLACES, desc="Fitting probes", unit="place"):
        for condition in CONDITIONS:
            features = parts.features(condition, at, parts.families)
            sites = list(features.family_sites)
            for split in SPLITS:
                known: dict[str, Any] = {"condition": condition, "arm": at[0], "distance": at[1], "split": split}
                fits = fit_sites(features, split, folds[split])
                best = chosen(fits, folds[split])
                read = {
                    "sample": range(len(parts.owners)),
                    "session": parts.owners,
                    "accuracy": best.predicted.eq(parts.labels).double().mean(0).numpy(),
                    "bits": best.information.double().numpy(),
                }
                tables["read"].append(pd.DataFrame(read).assign(**known))
                accuracies = fits.accuracies(parts.labels, parts.owners).drop(columns="head")
                tables["probes"].append(accuracies.assign(**known))
                if condition == "retained":
                    inner[split, at] = fits.inner_accuracy
                    tables["picks"].append(named(best.picks).assign(picks="read", **known))
            if condition == "retained":
                tables["variation"].append(varying(features).assign(arm=at[0], distance=at[1]))
    for split in TRANSFERRED:
        for arm in Bar(ARMS, desc=f"Testing probes at other distances, {split}", unit="arm"):
            of_distance = [inner[split, place(arm, distance)] for distance in DISTANCES]
            picks = [sites[index] for index in torch.stack(of_distance).mean(0).argmax(0).tolist()]
            tables["picks"].append(named(picks).assign(picks="transfer", arm=arm, split=split))
            tables["transfer"].append(carried(parts, arm, split, picks, folds[split]).assign(arm=arm, split=split))
    return {name: pd.concat(pieces, ignore_index=True) for name, pieces in tables.items()}


def named(picks: Sequence[Pick]) -> pd.DataFrame:
    """The site of each test fold."""
    rows = [(fold, family, site.layer, site.read) for fold, (family, site) in enumerate(picks)]
    return pd.DataFrame(rows, columns=["fold", "family", "layer", "read"])


def varying(features: Features) -> pd.DataFrame:
    """How far what probes read varies with the code, relative to its size: the largest over samples and numbers."""
    tables = []
    for family, tensor in features.tensors.items():
        sizes = centred_within(tensor, features.contexts).abs().amax((0, 2)) / tensor.abs().amax((0, 2))
        sites = pd.DataFrame(features.sites[family]).drop(columns="head")
        tables.append(sites.assign(family=family, variation=sizes.numpy()))
    return pd.concat(tables)


def carried(
    parts: Parts, arm: Arm, split: Split, picks: Sequence[Pick], folds: Int[np.ndarray, "samples"]
) -> pd.DataFrame:
    """Share of digits read by probes trained at each distance and tested at each, all at the site of their fold."""
    right = np.empty((len(DISTANCES), len(DISTANCES), len(folds)))
    for pick in set(picks):
        vectors = [parts.vectors(place(arm, distance), pick, split) for distance in DISTANCES]
        seen, size = (torch.stack(parts) for parts in zip(*vectors, strict=True))
        predicted = transferred(seen, parts.labels, torch.from_numpy(folds), len(TARGET.classes), size)
        tested = np.isin(folds, [fold for fold, other in enumerate(picks) if other == pick])
        right[..., tested] = predicted.eq(parts.labels).double().mean(2).numpy()[..., tested]
    rows = crossed({"trained": DISTANCES, "tested": DISTANCES, "sample": range(len(folds))}, {"accuracy": right})
    return rows.assign(session=parts.owners[rows["sample"]])
