"""What probings have estimated, as findings: of chosen sites, of all sites, and of few dimensions.

Probings of several arms are given as tables with a column `arm`; see `kvprobe.probing.claims.Probing`.
"""

from collections.abc import Iterator, Mapping
from math import nan
from typing import Any

from kvprobe.probing.intervals import LEVEL
from kvprobe.report.findings import Finding
from kvprobe.stats import Estimate
from kvprobe.tidy import Rows
from kvprobe.wording import count, percent, plain, points

FAMILIES = {
    "k_pre": "K before rotary embedding",
    "k": "K (keys)",
    "v": "V (values)",
    "resid_post": "residual stream",
}
"""How families of what probes read are written."""
READINGS = {
    "retained": "the slots themselves",
    "restart": "the restart: these tokens computed without what is hidden",
    "embedding": "input embeddings of these tokens",
    "untrained": "the same slots in a model of random weights",
    "hash control": "the slots, asked for labels that can only be memorised",
    "context": "no slots: the commonest label of the conversation",
    "text": "no slots: the commonest label of this text",
    "majority": "no slots: the commonest label",
}
"""How readings are written; see `kvprobe.probing.claims.Probing`."""
WRITTEN = {
    **dict.fromkeys(("accuracy", "site", "sparse"), percent),
    "lead": points,
    "bits": plain,
    "codelength": lambda value: f"{value.mean:.2f}",
    "sparse_random": lambda value: f"{100 * value.mean:.0f} %",
    **dict.fromkeys(("sites", "detected", "lowest_layer", "picked"), count),
}
"""How `probing_findings` are written."""


def probing_findings(tables: Mapping[str, Rows], clusters: int) -> Iterator[Finding]:
    """The findings of probings.

    By `arm` and `split`: `accuracy`, `bits` and `lead` of each `reading`; accuracy at every `site`; how many `sites`
    there are, at how many the target was `detected` (family-wise), the `lowest_layer` of these, the `best` accuracy and
    the least `p`; how many folds `picked` a site; the `codelength` by kind of code; and accuracy from the `k` best
    dimensions (`sparse`) and from as many random ones.

    Args:
        tables: `probes` (`Probing.table`), `readings` (its summary), `sparse`, `codelength`, and `picks`, see
            `kvprobe.probing.by_split.picked_sites`.
        clusters: over which the intervals in these tables are.
    """
    reading, sparse = ("arm", "split", "reading"), tables["sparse"]
    for name, unit in {"accuracy": "", "bits": "bits", "lead": ""}.items():
        yield from estimated(tables["readings"], name, name, reading, clusters, unit, f"{name}_")
    yield from estimated(tables["probes"], "site", "accuracy", ("arm", "split", "family", "read", "layer"), clusters)
    yield from estimated(sparse, "sparse", "accuracy", ("arm", "split", "k"), clusters)
    yield from estimated(sparse.drop(columns=["low", "high"]), "sparse_random", "random", ("arm", "split", "k"), 0)
    for (arm, split), sites in tables["probes"].dropna(subset="p_family").groupby(["arm", "split"], sort=False):
        detected = sites[sites["p_family"] <= LEVEL]
        numbers = {"sites": len(sites), "detected": len(detected), "lowest_layer": detected["layer"].min()}
        for name, value in {**numbers, "best": sites["accuracy"].max(), "p": sites["p_family"].min()}.items():
            yield Finding(name, {"arm": arm, "split": split}, Estimate(float(value)))
    picks: Any = tables["picks"].groupby(["arm", "split", "family", "layer", "read"], sort=False).size()
    for keys in picks.reset_index(name="folds").to_dict("records"):
        yield Finding("picked", keys, Estimate(float(keys.pop("folds"))))
    kinds = ["bits", "context_bits", "uniform_bits"]
    codes = tables["codelength"].groupby(["arm", "split"], sort=False)[kinds].mean()
    for (arm, split), lengths in codes.iterrows():
        for code, bits in lengths.items():
            yield Finding("codelength", {"arm": arm, "split": split, "code": code}, Estimate(bits), "bits")


def estimated(
    table: Rows, name: str, of: str, by: tuple[str, ...], clusters: int, unit: str = "", prefix: str = ""
) -> Iterator[Finding]:
    """The numbers of a column, with the intervals that stand beside them in columns that begin with `prefix`."""
    for row in table.dropna(subset=of).to_dict("records"):
        low, high, smallest, largest = (
            row.get(f"{prefix}{end}", nan) for end in ("low", "high", "smallest", "largest")
        )
        value = Estimate(row[of], low, high, clusters, smallest, largest)
        yield Finding(name, {key: row[key] for key in by}, value, unit)
