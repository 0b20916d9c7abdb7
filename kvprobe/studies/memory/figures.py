"""The figures of the memory study."""

from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.memory.budget import Budget
from kvprobe.report.plots import memory, save, styled

_VIEWS = {"transformers": "#0072b2", "vLLM": "#cc79a7", "logical": "#009e73"}


def draw_all(stack: Budget, peaks: Any, growth: Any, times: Any, folder: Path) -> None:
    """Write all of them into `folder`."""
    folder.mkdir(exist_ok=True)
    seen = peaks[peaks["what"] == "peak"]
    save(memory(stack, "context", list(zip(seen["context"], seen["measured"], strict=True))), folder / "stack")
    save(memory(stack, "new"), folder / "generating")
    save(cache_growth(growth, stack.config.name), folder / "growth")
    save(token_times(times, stack.config.name), folder / "times")


def cache_growth(growth: Any, name: str) -> Any:
    """Bytes of the cache by generated token: three views, and what was measured."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axis = plt.subplots(figsize=(5.2, 3.0), layout="constrained")
        for view, colour in _VIEWS.items():
            axis.plot(
                growth["new"], growth[view] / 1e6, color=colour, label=view, lw=2 if view == "transformers" else 1.4
            )
        every = max(1, len(growth) // 24)
        axis.plot(growth["new"][::every], growth["measured"][::every] / 1e6, "k.", ms=5, label="measured, transformers")
        axis.set(xlabel="tokens generated", ylabel="cache, MB (10⁶ bytes)", title=name, ylim=(0, None))
        axis.legend(frameon=False)
    return figure


def token_times(times: Any, name: str) -> Any:
    """Seconds to the next token by the tokens before it, with the cache and without it; every repeat is a dot."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
        for column, colour, label in (("anew", "#d55e00", "all read anew"), ("cached", "#0072b2", "with the cache")):
            medians = times.groupby("length")[column].median()
            axis.plot(medians.index, medians * 1e3, color=colour, label=label)
            axis.plot(times["length"], times[column] * 1e3, ".", color=colour, ms=3, alpha=0.5)
        lengths = np.unique(times["length"])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.minorticks_off()
        axis.set(xlabel="tokens before it", ylabel="milliseconds to the next token", title=name)
        axis.legend(frameon=False)
    return figure
