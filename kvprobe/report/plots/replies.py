"""The plot of a comparison: how likely each token of the reply is with each cache."""

from typing import TYPE_CHECKING

from kvprobe.arguments import checked_arguments
from kvprobe.report.plots.style import shown_once, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.comparison import Comparison


@shown_once
@checked_arguments
def replies(comparison: "Comparison") -> "Figure":
    """The probability of each token of the reply that is given with everything in view, under each cache of a
    `kvprobe.compare` result."""
    import matplotlib.pyplot as plt
    import numpy as np
    import seaborn as sns

    arms = comparison.replies
    shares = np.exp([reply.logprobs for reply in arms.values()])
    tokens = [repr(token).replace("$", r"\$") for token in comparison.tokens]
    with styled():
        size = (2.0 + 0.45 * len(tokens), 1.2 + 0.32 * len(arms))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        sns.heatmap(
            shares,
            ax=axis,
            cmap="Blues",
            vmin=0,
            vmax=1,
            annot=True,
            fmt=".2f",
            annot_kws={"size": 7},
            yticklabels=list(arms),
            cbar_kws={"label": "probability"},
        )
        axis.tick_params(length=2)
        axis.set_xticks(axis.get_xticks(), tokens, rotation=45, ha="right", rotation_mode="anchor")
        axis.tick_params(axis="y", rotation=0)
    return figure
