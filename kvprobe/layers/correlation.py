"""Whether heads that do more of something have a higher causal index."""

import numpy as np
from jaxtyping import Float

from kvprobe.ranks import rank_correlation
from kvprobe.stats import leave_one_out
from kvprobe.tidy import Rows


def index_correlation(
    heads: Rows, of: str, *, within_layers: bool = False, cluster: str = "prompt"
) -> Float[np.ndarray, "draws"]:
    """The rank correlation over heads of a column's mean with the index π = 1 − Σ restored / Σ damage: of all clusters,
    then without each of them in turn, as `kvprobe.stats.jackknife` takes it. NaN where all heads are alike.

    Args:
        heads: of one family of damage, one row per cluster, `layer` and `head` (see `LayerMap.df`).
        of: the column; a head's clusters that lack it do not count.
        within_layers: correlate ranks less their mean in the head's layer.
    """
    wide = heads.pivot(index=cluster, columns=["layer", "head"], values=["damage", "restored", of])
    layers = wide["damage"].columns.get_level_values("layer").to_numpy(int) if within_layers else None
    weights = np.concatenate([np.ones((1, len(wide)), int), leave_one_out(len(wide))])
    damage, restored = (weights @ wide[column].to_numpy(float) for column in ("damage", "restored"))
    values = wide[of].to_numpy(float)
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        means = (weights @ np.where(known, values, 0.0)) / (weights @ known)
    pairs = zip(means, 1 - restored / damage, strict=True)
    return np.array([rank_correlation(one, index, layers) for one, index in pairs])
